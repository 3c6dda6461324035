"""Rebuilding the index from the store, in one transaction: readers see the old rows, then the new."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, delete, func, select, update

from repo_service.domain.digest import SHA256, parse_digest
from repo_service.domain.views import Divergence, TagInfo
from repo_service.index import chunks, meta, publishing, times, unsettled
from repo_service.index import divergences as divergence_rows
from repo_service.index import tags as tag_rows
from repo_service.index.dialect import table_of
from repo_service.index.entry import Entry
from repo_service.index.models import (
    HELD,
    Annotation,
    Artifact,
    ArtifactBlock,
    ArtifactText,
    ArtifactTokenChunk,
    ArtifactTokens,
    Block,
    BlockChunk,
    Chunk,
    ChunkState,
    DivergenceRow,
    FingerprintRow,
    Tag,
)
from repo_service.index.unsettled import Noted

# Children before their parents, so that no cascade has anything left to do.
_REBUILT = (
    Tag,
    Annotation,
    ArtifactText,
    ArtifactTokens,
    ArtifactTokenChunk,
    ArtifactBlock,
    BlockChunk,
    Artifact,
    Block,
    FingerprintRow,
    DivergenceRow,
)


@dataclass(frozen=True)
class Rebuilt:
    """Rows after a rebuild."""

    artifacts: int
    blocks: int
    chunks: int
    tags: int
    divergences: int


def rebuild(
    connection: Connection,
    entries: Iterable[Entry],
    tags: Iterable[TagInfo],
    divergences: Iterable[Divergence],
    unread: Iterable[Noted] = (),
) -> Rebuilt:
    """Replace all that is derived from the store; running pushes go on.

    Each iterable is read only now, under the write lock, so that what was published before the lock
    was taken is in the listing it comes from. A tag of an artifact that is not there is left out. Last
    uses are kept, and ``unread`` entries noted, to be settled when they can be read; an artifact that the index did not know may have been used a moment ago. Kept as
    well is which chunks are damaged.
    """
    uses = {
        (row.namespace, row.digest): row.last_used_at
        for row in connection.execute(select(Artifact.namespace, Artifact.digest, Artifact.last_used_at))
    }
    unknown = times.now()
    _clear(connection)
    for entry in entries:
        digest = parse_digest(entry.manifest.id, SHA256)
        publishing.restore(connection, entry, uses.get((entry.namespace, digest), unknown))
    _forget_damage_of_nobody(connection)
    for tag in tags:
        if publishing.artifact_row_id(connection, tag.namespace, tag.artifact_id) is not None:
            tag_rows.set_tag(connection, tag.namespace, tag.name, tag.artifact_id, tag.updated_at)
    for divergence in divergences:
        divergence_rows.record(connection, divergence)
    for document in unread:
        unsettled.note(connection, document)
    meta.set_complete(connection, complete=True)
    count = [
        connection.scalars(select(func.count()).select_from(model)).one()
        for model in (Artifact, Block, Tag, DivergenceRow)
    ]
    published = select(func.count()).where(Chunk.state.in_(HELD))
    return Rebuilt(count[0], count[1], connection.scalars(published).one(), count[2], count[3])


def _clear(connection: Connection) -> None:
    for model in _REBUILT:
        connection.execute(delete(table_of(model)))
    # Nothing the old rows promised is taken on trust: a running push sends again what no artifact holds.
    connection.execute(
        update(Chunk).where(Chunk.state == ChunkState.PUBLISHED, chunks.IS_PUSHED).values(state=ChunkState.AWAITED)
    )
    connection.execute(update(Chunk).where(Chunk.state == ChunkState.LOOSE).values(state=ChunkState.DOOMED))
    # Bytes of an artifact that can't be read just now are forgotten here, but not reclaimed.
    connection.execute(delete(Chunk).where(Chunk.state == ChunkState.PUBLISHED))
    connection.execute(delete(Chunk).where(Chunk.state == ChunkState.AWAITED, ~chunks.IS_PUSHED))


def _forget_damage_of_nobody(connection: Connection) -> None:
    """Damaged chunks to which no artifact refers any more."""
    unheld = (Chunk.state == ChunkState.DAMAGED) & ~chunks.IS_PUBLISHED
    connection.execute(update(Chunk).where(unheld, chunks.IS_PUSHED).values(state=ChunkState.AWAITED))
    connection.execute(delete(Chunk).where(unheld))
