"""Verification: a fresh replay under an artifact's own schedule against what is stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from engine_adapter.engine import Progress, Tokens
from engine_adapter.run import Run, last_call_start, logits_sha256
from engine_adapter.state import BlockRecorder, BlockState
from engine_adapter.transfer import record_block
from repo_service.domain.manifest import Manifest
from repo_service.domain.record import BlockRecord
from repo_service.domain.schedule import DECODE, PREFILL

if TYPE_CHECKING:
    from torch import Tensor

    from engine_adapter.session import GraftSession

MOVED_BY = (8, 128, 1024)


@dataclass(frozen=True)
class BlockCheck:
    """One block: whether every chunk's digest is the replay's."""

    start: int
    stop: int
    key: str
    equal: bool
    differing: list[str]


@dataclass(frozen=True)
class SampleCheck:
    """Logits after one position, fresh against another way."""

    position: int
    equal: bool
    kl: float
    argmax_agrees: bool
    max_difference: float
    sha256_fresh: str
    sha256_other: str


@dataclass(frozen=True)
class Comparison:
    """A way of reaching the same positions, summed over the samples."""

    name: str
    exact: bool
    samples: int
    equal: int
    argmax_agree: int
    kl_max: float
    kl_mean: float
    max_difference: float

    @classmethod
    def of(cls, name: str, checks: Sequence[SampleCheck]) -> Comparison:
        return cls(
            name,
            all(check.equal for check in checks),
            len(checks),
            sum(check.equal for check in checks),
            sum(check.argmax_agrees for check in checks),
            max((check.kl for check in checks), default=0.0),
            sum(check.kl for check in checks) / len(checks) if checks else 0.0,
            max((check.max_difference for check in checks), default=0.0),
        )


@dataclass(frozen=True)
class VerifyReport:
    """What a replay found; ``exact`` only if every block and every sample is equal."""

    artifact_id: str
    exact: bool
    tokens: int
    blocks: list[BlockCheck]
    samples: list[SampleCheck]
    grafted: Comparison
    inexact: list[Comparison] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def verify_artifact(
    session: GraftSession,
    ref: str,
    samples: int,
    *,
    tokens: Tokens | None,
    inexact: bool,
    progress: Progress | None,
) -> VerifyReport:
    """Replay an artifact and compare digests per block and logits per sample.

    The samples are the logits at a boundary of the artifact and after each step of a greedy
    continuation from there, computed once on the fresh state and once on the grafted one. The
    boundary is the artifact's end, or, where the native window leaves no room, the last earlier one; if the
    artifact can't be resumed there it is the end, with fewer samples.
    """
    manifest, records, ids = session.load(ref, tokens)
    room = len(ids) if session.window is None else session.window - samples
    boundary = len(ids) if len(ids) <= room else room // session.block_tokens * session.block_tokens
    if boundary and last_call_start(records, boundary) < manifest.resume_from:
        # It can't be resumed there: as many samples as fit after the end.
        boundary, samples = len(ids), max(1, room + samples - len(ids))
    blocks, fresh = _replay(session, records, ids, boundary, progress)
    checks = [_check_block(session, record, blocks[i], ids) for i, record in enumerate(records)]
    sampled: list[SampleCheck] = []
    comparisons: list[Comparison] = []
    if boundary and samples:
        fresh_logits, continuation = _greedy(session, fresh, samples)
        grafted_logits = _grafted(session, manifest, records, ids, boundary, continuation)
        sampled = compare(boundary, fresh_logits, grafted_logits)
        if inexact:
            comparisons = [
                Comparison.of(name, compare(boundary, fresh_logits, other))
                for name, other in _inexact_ways(session, manifest, records, ids, boundary, continuation)
            ]
    exact = all(check.equal for check in checks) and all(sample.equal for sample in sampled)
    grafted = Comparison.of("grafted", sampled)
    return VerifyReport(manifest.id, exact, len(ids), checks, sampled, grafted, comparisons)


def _replay(
    session: GraftSession, records: Sequence[BlockRecord], ids: list[int], boundary: int, progress: Progress | None
) -> tuple[list[BlockState], Run]:
    """Compute every block afresh; also the run as it stood at ``boundary``."""
    run = session.new_run()
    blocks: list[BlockState] = []
    recorder = run.recorder = BlockRecorder(session.layout, blocks.append)
    kept = run
    for record in records:
        for step in record.steps:
            for start, stop in step.calls():
                session.call(run, ids[start:stop], step.kind)
        if record.stop == boundary != len(ids):
            kept = run.fork()
        if progress is not None:
            progress("tokens", record.stop, len(ids))
    recorder.finish()
    run.recorder = None
    return blocks, kept


def _check_block(session: GraftSession, stored: BlockRecord, block: BlockState, ids: list[int]) -> BlockCheck:
    fresh, _ = record_block(block, session.layout, session.fingerprint.id, stored.parent, ids)
    differing = sorted(
        f"{name}[{i}]"
        for name, digests in stored.chunks.items()
        for i, digest in enumerate(digests)
        if fresh.chunks[name][i] != digest
    )
    equal = not differing and fresh.key == stored.key
    return BlockCheck(stored.start, stored.stop, stored.key, equal, differing)


def _greedy(session: GraftSession, run: Run, samples: int) -> tuple[list[Tensor], list[int]]:
    """Logits at the run's end and along its greedy continuation, and the tokens of the latter."""
    logits = [run.logits]
    continuation: list[int] = []
    while len(logits) < samples:
        continuation.append(int(logits[-1].argmax(-1)))
        logits.append(session.call(run, continuation[-1:], DECODE))
    return logits, continuation


def _grafted(
    session: GraftSession,
    manifest: Manifest,
    records: Sequence[BlockRecord],
    ids: list[int],
    boundary: int,
    continuation: list[int],
) -> list[Tensor]:
    """The same logits from stored state: the last call before the boundary, then the state after it."""
    first = session.last_logits(manifest, records, ids, boundary)
    run = session.restore(manifest, records, ids, boundary)
    return [first, *(session.call(run, [token], DECODE) for token in continuation)]


def _inexact_ways(
    session: GraftSession,
    manifest: Manifest,
    records: Sequence[BlockRecord],
    ids: list[int],
    boundary: int,
    continuation: list[int],
) -> Iterator[tuple[str, list[Tensor]]]:
    """The same logits in ways that are not exact: another schedule, and other positions."""
    run = session.new_run()
    first = session.call(run, ids[:boundary], PREFILL)
    yield "full prefill", [first, *(session.call(run, [token], DECODE) for token in continuation)]
    for distance in MOVED_BY:
        start = last_call_start(records, boundary)
        run = session.restore(manifest, records, ids, start)
        logits = [session.call(run, ids[start:boundary], PREFILL, position=start + distance)]
        run = session.restore(manifest, records, ids, boundary)
        for i, token in enumerate(continuation):
            logits.append(session.call(run, [token], DECODE, position=boundary + i + distance))
        yield f"moved by {distance}", logits


def compare(boundary: int, fresh: Sequence[Tensor], other: Sequence[Tensor]) -> list[SampleCheck]:
    """Compare logits after ``boundary`` tokens and after each further one."""
    return [compare_logits(boundary - 1 + i, a, b) for i, (a, b) in enumerate(zip(fresh, other, strict=True))]


def compare_logits(position: int, fresh: Tensor, other: Tensor) -> SampleCheck:
    """Compare two logits ``[1, vocab]``; the KL divergence is in nats, computed in float64."""
    a, b = logits_sha256(fresh), logits_sha256(other)
    p, q = (torch.log_softmax(t.double(), -1) for t in (fresh, other))
    return SampleCheck(
        position,
        a == b,
        0.0 if a == b else max(0.0, float((p.exp() * (p - q)).sum())),
        bool(fresh.argmax(-1) == other.argmax(-1)),
        0.0 if a == b else float((fresh.double() - other.double()).abs().max()),
        a,
        b,
    )
