"""Which artifacts the rules of a namespace let go of, and what would be freed with them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, exists, func, select

from repo_service.domain.digest import BLAKE3, SHA256, format_digest
from repo_service.domain.policy import Policy
from repo_service.index import times
from repo_service.index.dialect import bound_ids, id_list, total
from repo_service.index.models import (
    HELD,
    Artifact,
    ArtifactBlock,
    ArtifactTokenChunk,
    Block,
    BlockChunk,
    Chunk,
    ChunkState,
    PushBlock,
    PushChunk,
    PushRecord,
    Tag,
)
from repo_service.index.uses import RESOLUTION

_SECOND = 1_000_000
_RESOLUTION = int(RESOLUTION.total_seconds()) * _SECOND


class LetGo(NamedTuple):
    """An artifact that a rule lets go of; ``row`` is its row, ``last_used_at`` what that said."""

    row: int
    namespace: str
    id: str
    last_used_at: datetime | None
    reason: str


class Freed(NamedTuple):
    """What nothing would need any more: chunks with their bytes, block records, manifests."""

    chunks: list[tuple[str, int]]
    records: list[tuple[str, str]]
    manifests: list[str]


_GONE = id_list("gone")
_OTHER = Chunk.__table__.alias("other")
_TWIN = Block.__table__.alias("twin")
_OTHER_BLOCK = ArtifactBlock.__table__.alias("other_block")
_OTHER_ARTIFACT = Artifact.__table__.alias("other_artifact")


def _held_by_gone() -> Any:
    """Row numbers of the chunks that only artifacts that are gone refer to."""
    blocks = select(ArtifactBlock.block_id).where(ArtifactBlock.artifact_id.in_(_GONE))
    referred = (
        select(BlockChunk.chunk_id)
        .where(BlockChunk.block_id.in_(blocks))
        .union(select(ArtifactTokenChunk.chunk_id).where(ArtifactTokenChunk.artifact_id.in_(_GONE)))
    )
    return (
        select(Chunk.id)
        .where(
            Chunk.id.in_(referred),
            ~exists().where(
                BlockChunk.chunk_id == Chunk.id,
                _OTHER_BLOCK.c.block_id == BlockChunk.block_id,
                _OTHER_BLOCK.c.artifact_id.not_in(_GONE),
            ),
            ~exists().where(ArtifactTokenChunk.chunk_id == Chunk.id, ArtifactTokenChunk.artifact_id.not_in(_GONE)),
        )
        .correlate(None)
    )


_LOST = _held_by_gone()
_UNPUSHED = _LOST.where(~exists().where(PushChunk.chunk_id == Chunk.id))
_LOST_BYTES = select(total(Chunk.size)).where(Chunk.id.in_(_LOST), (Chunk.state + 0).in_(HELD))
_FREED_CHUNKS = (
    select(Chunk.digest, func.max(Chunk.size).label("size"))
    .where(
        Chunk.id.in_(_UNPUSHED),
        ~exists().where(
            _OTHER.c.digest == Chunk.digest,
            _OTHER.c.state < ChunkState.DOOMED,
            (_OTHER.c.state + 0) != ChunkState.LOOSE,
            _OTHER.c.id.not_in(_UNPUSHED),
        ),
    )
    .group_by(Chunk.digest)
    .order_by(Chunk.digest)
)
_FREED_RECORDS = (
    select(Block.namespace, Block.key)
    .where(
        Block.id.in_(select(ArtifactBlock.block_id).where(ArtifactBlock.artifact_id.in_(_GONE))),
        ~exists().where(
            _TWIN.c.namespace == Block.namespace,
            _TWIN.c.key == Block.key,
            _OTHER_BLOCK.c.block_id == _TWIN.c.id,
            _OTHER_BLOCK.c.artifact_id.not_in(_GONE),
        ),
        ~exists().where(
            PushBlock.key == Block.key, PushRecord.id == PushBlock.push_id, PushRecord.namespace == Block.namespace
        ),
    )
    .distinct()
)
_FREED_MANIFESTS = (
    select(Artifact.digest)
    .where(
        Artifact.id.in_(_GONE),
        ~exists().where(_OTHER_ARTIFACT.c.digest == Artifact.digest, _OTHER_ARTIFACT.c.id.not_in(_GONE)),
    )
    .distinct()
)
_STORED_BYTES = select(total(Chunk.size)).where(Chunk.state.in_(HELD))


def let_go(connection: Connection, namespace: str, policy: Policy, now: datetime) -> list[LetGo]:
    """The artifacts that the policy lets go of.

    A time that lies in the future counts as now, and so does a use within its resolution.
    """
    at = times.to_microseconds(now)
    tags: dict[int, list[str]] = {}
    for tag in connection.execute(select(Tag.artifact_id, Tag.name).where(Tag.namespace == namespace)):
        tags.setdefault(tag.artifact_id, []).append(tag.name)
    columns = (Artifact.id, Artifact.digest, Artifact.created_at, Artifact.last_used_at)
    going: list[tuple[Any, str]] = []
    staying: list[Any] = []
    for row in connection.execute(select(*columns).where(Artifact.namespace == namespace)):
        if policy.pins(tags.get(row.id, ())):
            continue
        reason = _outlived(policy, at, row.created_at, row.last_used_at)
        if reason is None:
            staying.append(row)
        else:
            going.append((row, reason))
    if policy.max_bytes is not None:
        # What was never used was last wanted when it was published.
        staying.sort(key=lambda row: (min(at, row.last_used_at or row.created_at), row.created_at, row.digest))
        count = _excess(connection, namespace, policy.max_bytes, [row.id for row, _ in going], [r.id for r in staying])
        reason = f"least recently used, beyond max_bytes {policy.max_bytes}"
        going += [(row, reason) for row in staying[:count]]
    return [
        LetGo(
            row.id,
            namespace,
            format_digest(SHA256, row.digest),
            None if row.last_used_at is None else times.from_microseconds(row.last_used_at),
            reason,
        )
        for row, reason in going
    ]


def freed(connection: Connection, rows: Sequence[int]) -> Freed:
    """What would be freed if the artifacts of these rows were gone."""
    gone = bound_ids(rows, "gone")
    return Freed(
        [(format_digest(BLAKE3, row.digest), row.size) for row in connection.execute(_FREED_CHUNKS, gone)],
        [(row.namespace, format_digest(SHA256, row.key)) for row in connection.execute(_FREED_RECORDS, gone)],
        [format_digest(SHA256, digest) for digest in connection.scalars(_FREED_MANIFESTS, gone)],
    )


def _outlived(policy: Policy, now: int, created: int, used: int | None) -> str | None:
    if policy.max_age_s is not None and now - created > policy.max_age_s * _SECOND:
        return f"published longer ago than max_age_s {policy.max_age_s}"
    last = created if used is None else max(created, used + _RESOLUTION)
    if policy.max_idle_s is not None and now - last > policy.max_idle_s * _SECOND:
        return f"not used for longer than max_idle_s {policy.max_idle_s}"
    return None


def _excess(connection: Connection, namespace: str, limit: int, gone: list[int], rows: list[int]) -> int:
    """How many of the rows, from the first, must go as well for the others to fit in ``limit`` bytes."""
    stored = connection.scalars(_STORED_BYTES.where(Chunk.namespace == namespace)).one()

    def kept(count: int) -> int:
        if count == 0 and not gone:
            return stored
        return stored - connection.scalars(_LOST_BYTES, bound_ids(gone + rows[:count], "gone")).one()

    # The more go, the less is kept.
    return bisect_left(range(len(rows)), True, key=lambda count: kept(count) <= limit)
