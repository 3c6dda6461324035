"""Rebuilding the index from the store, in one transaction: readers see the old rows, then the new."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, delete, exists, func, select, update
from sqlalchemy.orm import DeclarativeBase

from repo_service.domain.digest import SHA256, parse_digest
from repo_service.domain.views import Divergence, TagInfo
from repo_service.index import chunks, meta, publishing, times, unsettled
from repo_service.index import divergences as divergence_rows
from repo_service.index import tags as tag_rows
from repo_service.index.dialect import bound_ids, id_list, table_of
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
from repo_service.index.unsettled import DIVERGENCE, ENTRY, TAG, Noted

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

# What stays of a table where artifacts are kept, by the time its turn comes.
_NEEDED: dict[type[DeclarativeBase], ColumnElement[bool]] = {
    model: model.artifact_id.in_(id_list())
    for model in (Annotation, ArtifactText, ArtifactTokens, ArtifactTokenChunk, ArtifactBlock)
} | {
    BlockChunk: exists().where(ArtifactBlock.block_id == BlockChunk.block_id),
    Artifact: Artifact.id.in_(id_list()),
    Block: exists().where(ArtifactBlock.block_id == Block.id),
    FingerprintRow: exists().where(Artifact.fingerprint_id == FingerprintRow.id),
}


class Unkept(Exception):
    """Other artifacts are to keep their rows: those of ``entries``, which could not be read this time."""

    def __init__(self, entries: Collection[Noted]) -> None:
        super().__init__(f"{len(entries)} artifacts are to keep their rows")
        self.entries = entries


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
    keep: Collection[Noted] = (),
) -> Rebuilt:
    """Replace all that is derived from the store; running pushes go on.

    Each iterable is read only now, under the write lock, so that what was published before the lock
    was taken is in the listing it comes from. A tag of an artifact that is not there is left out. Last
    uses are kept, and which chunks are damaged; an artifact that the index did not know may have been
    used a moment ago. What can't be read, ``unread``, keeps the rows it has; where it has none it is
    noted, to be settled when it can be read.

    Raises
    ------
    Unkept
        If ``keep`` is not what the index knew and could not be read: once more, with what it says.
    """
    # What an index that is being made says is no reason to keep it.
    trusted = meta.is_complete(connection)
    uses = {
        (row.namespace, row.digest): row.last_used_at
        for row in connection.execute(select(Artifact.namespace, Artifact.digest, Artifact.last_used_at))
    }
    tags_before = {(tag.namespace, tag.name): tag for tag in tag_rows.of_all(connection)}
    divergences_before = {(one.namespace, one.id): one for one in divergence_rows.rows(connection)}
    unknown = times.now()
    _clear(connection, keep)
    for entry in entries:
        digest = parse_digest(entry.manifest.id, SHA256)
        publishing.restore(connection, entry, uses.get((entry.namespace, digest), unknown))
    _forget_damage_of_nobody(connection)
    for tag in tags:
        _set_tag(connection, tag)
    for divergence in divergences:
        divergence_rows.record(connection, divergence)
    unread_before = set()
    for document in unread if trusted else ():
        place = document.namespace, document.name
        if document.kind == ENTRY and (document.namespace, parse_digest(document.name, SHA256)) in uses:
            unread_before.add(document)
        elif document.kind == TAG and place in tags_before:
            _set_tag(connection, tags_before[place])
        elif document.kind == DIVERGENCE and place in divergences_before:
            divergence_rows.record(connection, divergences_before[place])
    for document in unread:
        if document.kind != DIVERGENCE and document not in unread_before:
            unsettled.note(connection, document)
    if unread_before != set(keep):
        raise Unkept(unread_before)
    meta.set_complete(connection, complete=True)
    blocks = select(Block.namespace, Block.key).distinct().subquery()
    count = [
        connection.scalars(select(func.count()).select_from(rows)).one()
        for rows in (Artifact, blocks, Tag, DivergenceRow)
    ]
    published = select(func.count()).where(Chunk.state.in_(HELD))
    return Rebuilt(count[0], count[1], connection.scalars(published).one(), count[2], count[3])


def _set_tag(connection: Connection, tag: TagInfo) -> None:
    if publishing.artifact_row_id(connection, tag.namespace, tag.artifact_id) is not None:
        tag_rows.set_tag(connection, tag.namespace, tag.name, tag.artifact_id, tag.updated_at)


def _clear(connection: Connection, keep: Collection[Noted]) -> None:
    """Remove all rows but those that artifacts which are kept need."""
    found = (publishing.artifact_row_id(connection, entry.namespace, entry.name) for entry in keep)
    kept = bound_ids(row_id for row_id in found if row_id is not None)
    for model in _REBUILT:
        everything = delete(table_of(model))
        if keep and (needed := _NEEDED.get(model)) is not None:
            connection.execute(everything.where(~needed), kept)
        else:
            connection.execute(everything)
    promised = (Chunk.state == ChunkState.PUBLISHED) & ~chunks.IS_PUBLISHED
    # Nothing the old rows promised is taken on trust: a running push sends again what no artifact holds.
    connection.execute(update(Chunk).where(promised, chunks.IS_PUSHED).values(state=ChunkState.AWAITED))
    connection.execute(update(Chunk).where(Chunk.state == ChunkState.LOOSE).values(state=ChunkState.DOOMED))
    # Bytes of an artifact that is not to be found are forgotten here, but not reclaimed.
    connection.execute(delete(Chunk).where(promised))
    connection.execute(delete(Chunk).where(Chunk.state == ChunkState.AWAITED, ~chunks.IS_PUSHED))


def _forget_damage_of_nobody(connection: Connection) -> None:
    """Damaged chunks to which no artifact refers any more."""
    unheld = (Chunk.state == ChunkState.DAMAGED) & ~chunks.IS_PUBLISHED
    connection.execute(update(Chunk).where(unheld, chunks.IS_PUSHED).values(state=ChunkState.AWAITED))
    connection.execute(delete(Chunk).where(unheld))
