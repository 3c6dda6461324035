"""A run: one sequence's tokens, schedule, cache and latest logits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine_adapter.cache import StateCache
from engine_adapter.state import BlockRecorder, BlockState
from engine_adapter.tensors import host_bytes
from repo_service.domain.digest import sha256_digest
from repo_service.domain.record import BlockRecord
from repo_service.domain.schedule import PREFILL, Step, append_step

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Run:
    """State of one sequence, positioned after its last token.

    Attributes
    ----------
    tokens
        Token ids from position 0.
    steps
        The schedule that made the state.
    cache
        The engine's cache; hand it to the model to go on by hand.
    grafted_tokens, computed_tokens
        How many tokens' state came from the repository and how many were computed here.
    artifact_id
        The artifact that was grafted, if any.
    """

    cache: StateCache = field(repr=False)
    tokens: list[int] = field(default_factory=list, repr=False)
    steps: list[Step] = field(default_factory=list, repr=False)
    grafted_tokens: int = 0
    computed_tokens: int = 0
    artifact_id: str | None = None
    recorder: BlockRecorder | None = field(default=None, repr=False)
    stored: list[BlockRecord] = field(default_factory=list, repr=False)
    blocks: list[BlockState] = field(default_factory=list, repr=False)
    _logits: Tensor | Callable[[], Tensor] | None = field(default=None, repr=False)

    @property
    def logits(self) -> Tensor:
        """Logits after the last token, ``[1, vocab]``, in the model's dtype.

        After `GraftSession.graft` they are computed on first use, by the artifact's own last
        forward call on the state before it.
        """
        if callable(self._logits):
            self._logits = self._logits()
        if self._logits is None:
            raise RuntimeError("the run has no tokens yet")
        return self._logits

    @logits.setter
    def logits(self, value: Tensor | Callable[[], Tensor]) -> None:
        self._logits = value

    def fork(self) -> Run:
        """A copy that goes its own way, unrecorded."""
        self.cache.recorder = None
        return replace(
            self,
            cache=copy.deepcopy(self.cache),
            tokens=list(self.tokens),
            steps=list(self.steps),
            stored=list(self.stored),
            recorder=None,
            blocks=[],
        )


@dataclass(frozen=True)
class Generation:
    """Greedily generated tokens.

    Attributes
    ----------
    tokens
        The new token ids.
    text
        The new tokens decoded, or None without a tokenizer.
    logits_sha256
        SHA-256 of the logits each new token was chosen from.
    run
        The run, positioned after the last new token whose state was computed.
    """

    tokens: list[int]
    text: str | None
    logits_sha256: list[str] = field(repr=False)
    run: Run = field(repr=False)


def logits_sha256(logits: Tensor) -> str:
    """SHA-256 over the raw bytes of logits ``[1, vocab]``."""
    return sha256_digest(host_bytes(logits))


def steps_until(records: Sequence[BlockRecord], position: int) -> list[Step]:
    """The schedule that made the state of the first ``position`` tokens."""
    steps: list[Step] = []
    for record in records:
        for step in record.steps:
            if step.start < position:
                append_step(steps, Step(step.kind, step.start, min(step.stop, position)))
    return steps


def last_call_start(records: Sequence[BlockRecord], position: int) -> int:
    """Where the forward call that ended at ``position`` began."""
    last = steps_until(records, position)[-1]
    return last.start if last.kind == PREFILL else last.stop - 1
