"""Schedules: the exact sequence of forward calls that makes a state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from repo_service.domain.errors import MalformedDocument

PREFILL = "prefill"
DECODE = "decode"


@dataclass(frozen=True)
class Step:
    """One forward call over tokens ``[start, stop)``, or, for decode, a run of single-token calls.

    Parameters
    ----------
    kind
        ``"prefill"`` or ``"decode"``.
    start, stop
        Absolute token positions, ``0 <= start < stop``.
    """

    kind: str
    start: int
    stop: int

    def to_json(self) -> list[Any]:
        return [self.kind, self.start, self.stop]

    @classmethod
    def from_json(cls, value: Any) -> Step:
        match value:
            case [("prefill" | "decode") as kind, int(start), int(stop)] if 0 <= start < stop:
                if not isinstance(start, bool) and not isinstance(stop, bool):
                    return cls(kind, start, stop)
        raise MalformedDocument(f"{str(value)[:100]} is not a step: [kind, start, stop] with 0 <= start < stop")

    def calls(self) -> Iterator[tuple[int, int]]:
        """The forward calls of this step, as (start, stop)."""
        if self.kind == DECODE:
            yield from ((i, i + 1) for i in range(self.start, self.stop))
        else:
            yield self.start, self.stop


def canonical_steps(start: int, stop: int, block_tokens: int) -> list[Step]:
    """The canonical prefill of tokens ``[start, stop)``: steps that end at every multiple of ``block_tokens``."""
    steps = []
    while start < stop:
        end = min(stop, (start // block_tokens + 1) * block_tokens)
        steps.append(Step(PREFILL, start, end))
        start = end
    return steps


def split_by_block(steps: Iterable[Step], block_tokens: int) -> list[list[Step]]:
    """Group steps by block, runs of decode merged and cut at block boundaries.

    Raises
    ------
    MalformedDocument
        If the steps have gaps, overlap, or a prefill step crosses a block boundary.
    """
    blocks: list[list[Step]] = []
    position = 0
    for step in steps:
        if step.start != position:
            raise MalformedDocument(f"a step begins at token {step.start}; the one before it ends at {position}")
        while position < step.stop:
            boundary = (position // block_tokens + 1) * block_tokens
            end = min(step.stop, boundary)
            if step.kind == PREFILL and end != step.stop:
                raise MalformedDocument(
                    f"the prefill step {step.start} to {step.stop} crosses the block boundary at {boundary}"
                )
            if position % block_tokens == 0:
                blocks.append([])
            append_step(blocks[-1], Step(step.kind, position, end))
            position = end
    return blocks


def append_step(steps: list[Step], step: Step) -> None:
    """Append to a list of steps in normal form: adjoining runs of decode become one."""
    if steps and steps[-1].kind == step.kind == DECODE:
        steps[-1] = Step(DECODE, steps[-1].start, step.stop)
    else:
        steps.append(step)
