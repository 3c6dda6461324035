"""Deposit: a state computed under the canonical schedule, or a recorded run's, published as an artifact."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from engine_adapter.engine import Progress, Tokens
from engine_adapter.run import Run
from engine_adapter.state import BlockRecorder
from engine_adapter.transfer import BlockWriter
from repo_service.domain.errors import AccessDenied, InvalidInput, NotFound, NotStored
from repo_service.domain.layout import Layout
from repo_service.domain.manifest import Manifest, check_annotations, check_text
from repo_service.domain.names import check_tag
from repo_service.domain.repository import Push, despite_expiry
from repo_service.domain.schedule import PREFILL, canonical_steps
from repo_service.domain.tokens import token_chunks
from repo_service.domain.views import ArtifactInfo

if TYPE_CHECKING:
    from engine_adapter.session import GraftSession

ALL = "all"
RESUME = "resume"
"""What an artifact stores of sliding layers: everything, or what a resume at its end needs."""


def deposit(
    session: GraftSession,
    source: Tokens | str | Run,
    *,
    tag: str | None,
    text: str | None,
    annotations: dict[str, str],
    private_tokens: bool,
    sliding: str,
    graft: bool,
    progress: Progress | None,
) -> ArtifactInfo:
    """Publish; see `GraftSession.deposit`."""
    if tag is not None:
        check_tag(tag)
    check_annotations(annotations)
    check_text(text)
    if isinstance(source, Run):
        ids = list(source.tokens)
        if source.recorder is None:
            raise InvalidInput("this run was not recorded: make it with record=True to deposit it")
    else:
        ids = session.encode(source)
    resume_from = _resume_from(session.layout, sliding, len(ids))

    def publish() -> ArtifactInfo:
        with session.repository.begin_push(session.fingerprint, session.namespace) as push:
            writer = BlockWriter(push, session.layout, session.fingerprint.id, ids, resume_from)
            try:
                if isinstance(source, Run):
                    _write_recorded(source, writer)
                else:
                    _compute(session, ids, writer, graft=graft, progress=progress)
                records = writer.finish()
            finally:
                writer.close()
            return push.commit(
                Manifest(
                    session.fingerprint,
                    len(ids),
                    None if private_tokens else _send_tokens(push, ids),
                    tuple((record.key, record.digest) for record in records),
                    parent=source.artifact_id if isinstance(source, Run) else None,
                    annotations=annotations,
                    text=text,
                    resume_from=resume_from,
                )
            )

    info = despite_expiry(publish)
    if tag is not None:
        session.repository.set_tag(session.namespace, tag, info.id)
        info = session.repository.artifact(info.id, session.namespace)
    return info


def deposit_in_stages(
    session: GraftSession,
    ids: Sequence[int],
    *,
    every: int,
    text: str,
    annotations: dict[str, str],
    stage_annotations: dict[str, str],
    sliding: str,
    progress: Progress | None,
) -> ArtifactInfo:
    """Compute a state and publish it, and on the way its beginning, every so many tokens, in place of the one before.

    Whoever computes the same tokens after this was killed grafts what was published last.

    Parameters
    ----------
    every
        Tokens between stages, a multiple of the session's ``block_tokens``.
    stage_annotations
        The annotations of a beginning.
    """
    session.require_unchanged()
    run = session.graft_prefix(ids, progress)
    before: str | None = None
    while True:
        stop = min(len(run.tokens) // every * every + every, len(ids))
        last = stop == len(ids)
        resume_from = _resume_from(session.layout, sliding, stop)
        with session.repository.begin_push(session.fingerprint, session.namespace) as push:
            writer = BlockWriter(push, session.layout, session.fingerprint.id, ids, resume_from)
            try:
                if not writer.known(run.stored):
                    # It was resumed from an artifact that leaves out what this one is to store.
                    run = session.new_run(len(ids))
                    push.abort()
                    continue
                run.recorder = BlockRecorder(session.layout, writer)
                for step in canonical_steps(len(run.tokens), stop, session.block_tokens):
                    session.call(run, ids[step.start : step.stop], PREFILL)
                    if progress is not None:
                        progress("tokens", step.stop, len(ids))
                run.recorder.finish()
                run.stored = writer.finish()
            finally:
                writer.close()
            info = push.commit(
                Manifest(
                    session.fingerprint,
                    stop,
                    _send_tokens(push, ids[:stop]),
                    tuple((record.key, record.digest) for record in run.stored),
                    annotations=annotations if last else stage_annotations,
                    text=text if last else None,
                    resume_from=resume_from,
                )
            )
        if before is not None:
            # Only an administrator may delete; a stage that stays shares its blocks with the next.
            with suppress(NotFound, AccessDenied):
                session.repository.delete(before, session.namespace)
        if last:
            return info
        before = info.id


def _compute(
    session: GraftSession, ids: Sequence[int], writer: BlockWriter, *, graft: bool, progress: Progress | None
) -> None:
    run = session.graft_prefix(ids, progress) if graft else session.new_run()
    if not writer.known(run.stored):
        # It was resumed from an artifact that leaves out what this one is to store.
        run = session.new_run(len(ids))
    run.recorder = BlockRecorder(session.layout, writer)
    session.extend(run, ids[len(run.tokens) :], progress=progress)
    run.recorder.finish()


def _write_recorded(run: Run, writer: BlockWriter) -> None:
    if not writer.known(run.stored):
        raise NotStored(
            f"the repository does not store all of the {len(run.stored)} blocks that this run began with: the artifact "
            f"{run.artifact_id} leaves out state of sliding layers; deposit with sliding={RESUME!r}, which needs none of it",
            artifact_id=run.artifact_id,
        )
    for block in run.blocks:
        writer(block)
    partial = run.recorder.snapshot() if run.recorder is not None else None
    if partial is not None:
        writer(partial)


def _resume_from(layout: Layout, sliding: str, token_count: int) -> int:
    if sliding not in (ALL, RESUME):
        raise InvalidInput(f"sliding is {str(sliding)[:40]!r}; it must be {ALL!r} or {RESUME!r}")
    return layout.last_resume(token_count) if sliding == RESUME else 0


def _send_tokens(push: Push, ids: Sequence[int]) -> tuple[str, ...]:
    chunks = token_chunks(ids)
    contents = dict(chunks)
    for digest in push.offer_tokens(len(ids), list(contents)):
        push.put(digest, contents[digest])
    return tuple(digest for digest, _ in chunks)
