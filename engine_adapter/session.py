"""Graft sessions: deposit, graft and go on, exactly or not at all (I1)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from engine_adapter.canary import measure as measure_canary
from engine_adapter.canary import watched_settings
from engine_adapter.deposit import ALL, deposit
from engine_adapter.engine import Engine, Progress, Tokens, token_list
from engine_adapter.fingerprint import measure_current, measure_fingerprint
from engine_adapter.paged import Paging
from engine_adapter.run import Generation, Run, last_call_start, logits_sha256, steps_until
from engine_adapter.state import BlockRecorder
from engine_adapter.transfer import ChunkReader
from engine_adapter.verify import VerifyReport, verify_artifact
from engine_adapter.weights import checksum_weights, digest_weights
from repo_service.domain.errors import FingerprintMismatch, InvalidInput, InvalidTokens, WeightsChanged
from repo_service.domain.fingerprint import Fingerprint
from repo_service.domain.layout import Layout
from repo_service.domain.manifest import Manifest
from repo_service.domain.names import DEFAULT_NAMESPACE, check_namespace
from repo_service.domain.record import BlockRecord, block_keys
from repo_service.domain.repository import Repository
from repo_service.domain.schedule import DECODE, PREFILL, canonical_steps
from repo_service.domain.tokens import read_token_chunks
from repo_service.domain.views import ArtifactInfo

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class GraftSession(Engine):
    """One loaded model and one repository.

    Opening a session hashes the weights and runs the canary. Not for use by several threads at once.

    Parameters
    ----------
    model
        A causal language model of transformers in eval mode.
    tokenizer
        Its tokenizer, or None to work with token ids only.
    repository
        From `open_repository`.
    block_tokens
        Tokens per block and per prefill call.
    namespace
        Where artifacts are looked up and published.
    read_workers
        Threads that read chunks; default: the machine's cores, at most 4.
    device_pages, device_bytes
        Keep the state of full layers in pages on the host, and so many of them, or of their bytes, on the
        device. The model's attention must be one of `paged_attention`. None keeps all state on the device.
    page_directory
        Where to keep the host's pages in a file; None keeps them in memory.
    prefetch
        Read pages ahead.

    Raises
    ------
    UnsupportedModel
        Names what can't be grafted exactly, before any work.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        repository: Repository,
        *,
        block_tokens: int = 256,
        namespace: str = DEFAULT_NAMESPACE,
        read_workers: int | None = None,
        device_pages: int | None = None,
        device_bytes: int | None = None,
        page_directory: Path | None = None,
        prefetch: bool = True,
    ) -> None:
        if not isinstance(block_tokens, int) or not 1 <= block_tokens <= 2**16:
            raise InvalidInput(f"block_tokens is {block_tokens}; it must be from 1 to 65536")
        super().__init__(model, tokenizer, block_tokens)
        self.repository = repository
        self.namespace = check_namespace(namespace)
        self.fingerprint: Fingerprint = measure_fingerprint(model, tokenizer, block_tokens)
        self.layout = Layout.of(self.fingerprint)
        if device_pages is not None or device_bytes is not None:
            self.paging = Paging(
                model, self.layout, pages=device_pages, size=device_bytes, directory=page_directory, prefetch=prefetch
            )
            self.paging.try_on(model)
        self._watched = watched_settings()
        self._weights = checksum_weights(model)
        workers = read_workers or min(4, os.cpu_count() or 1)
        self.reader = ChunkReader(repository, namespace, workers, model.device)

    def close(self) -> None:
        """Stop the session's threads; the model and the repository stay open."""
        self.reader.close()
        if self.paging is not None:
            self.paging.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prefill(
        self, tokens: Tokens | str, graft: bool = True, *, record: bool = False, progress: Progress | None = None
    ) -> Run:
        """Run a prompt under the canonical schedule, grafting its longest stored prefix.

        Parameters
        ----------
        tokens
            Token ids, or a text.
        graft
            Use stored state; False computes everything.
        record
            Keep new state on the host, so that the run can be deposited.

        Returns
        -------
        Run
            ``logits`` after the last token; at least the last call is computed.

        Raises
        ------
        InvalidTokens, ContextTooLong, WeightsChanged, FingerprintMismatch, ChunkCorrupt
        """
        ids = self.encode(tokens)
        if graft:
            self.require_unchanged()
        run = self.graft_prefix(ids, progress) if graft else self.new_run()
        if record:
            run.recorder = BlockRecorder(self.layout, run.blocks.append)
        return self.extend(run, ids[len(run.tokens) :], progress=progress)

    def generate(
        self,
        prompt: Tokens | str | Run,
        max_new_tokens: int = 64,
        graft: bool = True,
        *,
        record: bool = False,
    ) -> Generation:
        """Generate greedily, from a prompt or from where a run stands.

        Stops at the model's end-of-sequence tokens, at ``max_new_tokens``, or at the native window.
        """
        if max_new_tokens < 1:
            raise InvalidInput(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        run = prompt if isinstance(prompt, Run) else self.prefill(prompt, graft, record=record)
        run.cache.reserve(len(run.tokens) + max_new_tokens - 1)
        ends = end_tokens(self.model)
        tokens: list[int] = []
        digests: list[str] = []
        while len(tokens) < max_new_tokens:
            digests.append(logits_sha256(run.logits))
            token = int(run.logits.argmax(-1))
            tokens.append(token)
            full = self.window is not None and len(run.tokens) >= self.window
            if token in ends or full or len(tokens) == max_new_tokens:
                break
            self.call(run, [token], DECODE)
        text = None if self.tokenizer is None else str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        return Generation(tokens, text, digests, run)

    def graft(
        self,
        ref: str,
        *,
        tokens: Tokens | None = None,
        record: bool = False,
        progress: Progress | None = None,
    ) -> Run:
        """Place an artifact's whole state, positioned at its end.

        Parameters
        ----------
        ref
            Artifact id or tag.
        tokens
            The token ids, where the pusher kept them private.
        record
            Keep what is computed afterwards, so that the continued run can be deposited.

        Raises
        ------
        FingerprintMismatch
            Names the fields in which the artifact differs from this model and machine.
        ArtifactNotFound, TagNotFound, ChunkCorrupt, WeightsChanged
        """
        self.require_unchanged()
        manifest, records, ids = self.load(ref, tokens)
        run = self._restored(manifest, records, ids, manifest.token_count, progress)
        run.logits = lambda: self.last_logits(manifest, records, ids, manifest.token_count)
        if record:
            partial = None
            if manifest.token_count % self.block_tokens:
                partial = self.reader.read_block(manifest.id, self.layout, records[-1])
                run.stored.pop()
            run.recorder = BlockRecorder(self.layout, run.blocks.append, partial)
        return run

    def load(self, ref: str, tokens: Tokens | None = None) -> tuple[Manifest, list[BlockRecord], list[int]]:
        """An artifact's manifest, records and token ids, checked against this session and each other.

        Raises
        ------
        FingerprintMismatch, MalformedDocument, InvalidTokens
        """
        manifest = self.repository.manifest(ref, self.namespace)
        self.fingerprint.require_equal(manifest.fingerprint, f"the artifact {ref}")
        records = self.repository.records(manifest, self.namespace)
        if manifest.tokens is not None:
            ids = self._read_tokens(manifest)
        elif tokens is not None:
            ids = token_list(tokens)
        else:
            raise InvalidTokens(f"the artifact {ref} keeps its token ids private: give them as tokens=")
        manifest.check_keys(records, ids)
        return manifest, records, ids

    def restore(self, manifest: Manifest, records: Sequence[BlockRecord], ids: Sequence[int], position: int) -> Run:
        """A run holding the artifact's state up to ``position``, which must lie between two forward calls.

        Its cache has room for all of ``ids``.

        Raises
        ------
        NotStored
            If the artifact leaves out state of sliding layers that is needed there.
        """
        return self._restored(manifest, records, ids, position, None)

    def _restored(
        self,
        manifest: Manifest,
        records: Sequence[BlockRecord],
        ids: Sequence[int],
        position: int,
        progress: Progress | None,
    ) -> Run:
        manifest.require_resumable(position)
        run = self.new_run(len(ids))
        if position:
            self.reader.restore(manifest.id, self.layout, records, position, run.cache, progress)
        run.tokens = list(ids[:position])
        run.steps = steps_until(records, position)
        run.stored = [record for record in records if record.stop <= position]
        run.grafted_tokens = position
        run.artifact_id = manifest.id
        return run

    def last_logits(
        self, manifest: Manifest, records: Sequence[BlockRecord], ids: Sequence[int], position: int
    ) -> Tensor:
        """Logits after ``position`` tokens: the artifact's own last call there, on the stored state before it."""
        start = last_call_start(records, position)
        run = self.restore(manifest, records, ids, start)
        return self.call(run, ids[start:position], PREFILL)

    def graft_prefix(self, ids: Sequence[int], progress: Progress | None = None) -> Run:
        """A run holding the longest stored prefix that leaves the prompt's last call to compute."""
        size = self.block_tokens
        whole = (len(ids) - 1) // size * size
        keys = block_keys(self.fingerprint.id, ids[:whole], canonical_steps(0, whole, size), size)
        match = self.repository.match(self.namespace, keys) if keys else None
        if match is None:
            return self.new_run(len(ids))
        manifest = self.repository.manifest(match.artifact_id, self.namespace)
        self.fingerprint.require_equal(manifest.fingerprint, f"the artifact {match.artifact_id}")
        records = self.repository.records(manifest, self.namespace)[: match.blocks]
        if [record.key for record in records] != keys[: match.blocks]:
            raise FingerprintMismatch(f"the artifact {match.artifact_id} does not hold the blocks it was matched for")
        return self._restored(manifest, records, ids, records[-1].stop, progress)

    def require_unchanged(self) -> None:
        """Measure weights, settings and backend again.

        Raises
        ------
        WeightsChanged
            If the weights are not those the session began with.
        FingerprintMismatch
            If anything else is not.
        """
        sections = self.fingerprint.sections
        weights = sections["model"]["weights"]
        if checksum_weights(self.model) != self._weights:
            weights = digest_weights(self.model)
        current = measure_current(self.model, weights)
        if watched_settings() != self._watched:
            current["canary"] = dict(measure_canary(self.model, self.block_tokens))
        now = Fingerprint({**sections, **current, "model": {**sections["model"], **current["model"]}})
        if now.id == self.fingerprint.id:
            return
        if weights != sections["model"]["weights"]:
            raise WeightsChanged(
                "the model's weights were changed since the session began: open a new session",
                before=sections["model"]["weights"],
                now=weights,
            )
        self.fingerprint.require_equal(now, "the model as it now is")

    def _read_tokens(self, manifest: Manifest) -> list[int]:
        read = partial(self.repository.read_chunk, manifest.id, self.namespace)
        return read_token_chunks(manifest.tokens or (), manifest.token_count, read)

    def deposit(
        self,
        tokens_or_text: Tokens | str | Run,
        tag: str | None = None,
        text: str | None = None,
        annotations: dict[str, str] | None = None,
        private_tokens: bool = False,
        *,
        sliding: str = ALL,
        graft: bool = True,
        progress: Progress | None = None,
    ) -> ArtifactInfo:
        """Compute a state under the canonical schedule and publish it, or publish a recorded run's.

        Blocks are hashed and sent while the next ones are computed; what the repository holds is
        neither computed (with ``graft``) nor sent again.

        Parameters
        ----------
        tokens_or_text
            Token ids, a text, or a run made with ``record=True``.
        tag
            Name to point at the artifact.
        text
            Text for the full-text index.
        annotations
            Free names and values, kept in the artifact.
        private_tokens
            Publish keys and state without the token ids.
        sliding
            ``"all"``, or ``"resume"`` to store of sliding layers only what a resume at the artifact's end, or
            before its last block, needs. A longer prompt still matches it there, a shorter one does not.

        Raises
        ------
        Divergence
            If a block of this key is stored with other bytes.
        NotStored
            If a run began with an artifact that leaves out what this one is to store.
        """
        self.require_unchanged()
        return deposit(
            self,
            tokens_or_text,
            tag=tag,
            text=text,
            annotations=annotations or {},
            private_tokens=private_tokens,
            sliding=sliding,
            graft=graft,
            progress=progress,
        )

    def verify(
        self,
        ref: str,
        samples: int = 50,
        *,
        tokens: Tokens | None = None,
        inexact: bool = False,
        progress: Progress | None = None,
    ) -> VerifyReport:
        """Replay an artifact from its tokens under its own schedule and compare everything.

        Parameters
        ----------
        samples
            Greedy continuation steps whose logits are compared, grafted against fresh.
        inexact
            Also measure what a full prefill and moved positions would cost on the same samples.
        """
        self.require_unchanged()
        return verify_artifact(self, ref, samples, tokens=tokens, inexact=inexact, progress=progress)


def end_tokens(model: PreTrainedModel) -> set[int]:
    ends = getattr(model.generation_config, "eos_token_id", None)
    if ends is None:
        return set()
    return set(ends) if isinstance(ends, (list, tuple)) else {int(ends)}
