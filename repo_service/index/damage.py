"""What is published, page by page, for whoever reads it all; and what was found damaged."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection, bindparam, case, exists, func, select, update

from repo_service.domain.digest import BLAKE3, SHA256, format_digest, parse_digest
from repo_service.domain.layout import ChunkSpec
from repo_service.domain.views import TagInfo
from repo_service.index import chunks, tags, times
from repo_service.index.dialect import bound, digest_list
from repo_service.index.models import (
    PRESENT,
    Artifact,
    ArtifactBlock,
    ArtifactTokenChunk,
    Block,
    BlockChunk,
    Chunk,
    ChunkState,
    Tag,
)


class PublishedArtifact(NamedTuple):
    """An artifact with its tags; ``row`` orders pages."""

    row: int
    namespace: str
    id: str
    created_at: datetime
    tags: list[TagInfo]


class PublishedRecord(NamedTuple):
    """A block and the digest of its record; ``row`` orders pages."""

    row: int
    namespace: str
    key: str
    record: str


class PublishedChunk(NamedTuple):
    """A chunk, and whether it was found damaged before."""

    digest: str
    spec: ChunkSpec
    damaged: bool


Holder = tuple[str, str]
"""Namespace and id of an artifact."""

_DIGESTS = digest_list()
_TWIN = Block.__table__.alias("twin")
HOLDERS = 100
"""Most artifacts named as holders of one object."""

_PUBLISHED = (BlockChunk.chunk_id, ArtifactTokenChunk.chunk_id)
_MARK = (
    update(Chunk)
    .where(Chunk.digest.in_(select(_DIGESTS.c.digest)), Chunk.state.in_(PRESENT))
    .values(
        state=case(
            (Chunk.state == ChunkState.PUBLISHED, ChunkState.DAMAGED),
            (Chunk.state == ChunkState.LOOSE, ChunkState.ABANDONED),
            else_=ChunkState.AWAITED,
        )
    )
)
_HOLDING = (
    select(Artifact.namespace, Artifact.digest)
    .join(ArtifactBlock, ArtifactBlock.artifact_id == Artifact.id)
    .join(BlockChunk, BlockChunk.block_id == ArtifactBlock.block_id)
    .join(Chunk, Chunk.id == BlockChunk.chunk_id)
    .where(Chunk.digest == bindparam("digest"))
    .union(
        select(Artifact.namespace, Artifact.digest)
        .join(ArtifactTokenChunk, ArtifactTokenChunk.artifact_id == Artifact.id)
        .join(Chunk, Chunk.id == ArtifactTokenChunk.chunk_id)
        .where(Chunk.digest == bindparam("digest"))
    )
    .subquery()
)
_HOLDERS = select(_HOLDING).order_by(_HOLDING.c.namespace, _HOLDING.c.digest).limit(HOLDERS)


_WHOLE = (
    update(Chunk)
    .where(Chunk.digest.in_(select(_DIGESTS.c.digest)), Chunk.state == ChunkState.DAMAGED)
    .values(state=ChunkState.PUBLISHED)
)


def mark_whole(connection: Connection, digests: Sequence[str]) -> None:
    """Take back that chunks are damaged, whose bytes have been read and verified."""
    connection.execute(_WHOLE, bound([parse_digest(digest, BLAKE3) for digest in digests]))


def mark(connection: Connection, digests: Sequence[str]) -> None:
    """Await chunks again whose bytes are damaged or gone, so that the next push of one sends it."""
    connection.execute(_MARK, bound([parse_digest(digest, BLAKE3) for digest in digests]))


def artifacts_after(connection: Connection, row: int, limit: int) -> list[PublishedArtifact]:
    rows = connection.execute(
        select(Artifact.id, Artifact.namespace, Artifact.digest, Artifact.created_at)
        .where(Artifact.id > row)
        .order_by(Artifact.id)
        .limit(limit)
    ).all()
    digests = {row.id: row.digest for row in rows}
    tagged: dict[int, list[TagInfo]] = {row.id: [] for row in rows}
    for tag in connection.execute(select(*Tag.__table__.columns).where(Tag.artifact_id.in_(list(tagged)))):
        tagged[tag.artifact_id].append(tags.view(tag, digests[tag.artifact_id]))
    return [
        PublishedArtifact(
            row.id,
            row.namespace,
            format_digest(SHA256, row.digest),
            times.from_microseconds(row.created_at),
            tagged[row.id],
        )
        for row in rows
    ]


def records_after(connection: Connection, row: int, limit: int) -> list[PublishedRecord]:
    twin = (_TWIN.c.namespace == Block.namespace) & (_TWIN.c.key == Block.key)
    rows = connection.execute(
        select(Block.id, Block.namespace, Block.key, Block.record)
        .where(Block.id > row, ~exists().where(twin, _TWIN.c.id < Block.id))
        .order_by(Block.id)
        .limit(limit)
    )
    return [
        PublishedRecord(row.id, row.namespace, format_digest(SHA256, row.key), format_digest(SHA256, row.record))
        for row in rows
    ]


def chunks_after(connection: Connection, digest: str | None, limit: int) -> list[PublishedChunk]:
    """Chunks that an artifact of any namespace refers to, each once, by digest."""
    after = b"" if digest is None else parse_digest(digest, BLAKE3)
    referred = [exists().where(column == Chunk.id) for column in _PUBLISHED]
    rows = connection.execute(
        select(
            Chunk.digest,
            Chunk.dtype,
            Chunk.shape,
            func.max(case((Chunk.state == ChunkState.DAMAGED, 1), else_=0)).label("damaged"),
        )
        .where(Chunk.digest > after, referred[0] | referred[1])
        .group_by(Chunk.digest, Chunk.dtype, Chunk.shape)
        .order_by(Chunk.digest)
        .limit(limit)
    )
    return [PublishedChunk(format_digest(BLAKE3, row.digest), chunks.spec_of(row), bool(row.damaged)) for row in rows]


def holders_of_chunk(connection: Connection, digest: str) -> list[Holder]:
    """The first artifacts that refer to a chunk, in every namespace."""
    rows = connection.execute(_HOLDERS, {"digest": parse_digest(digest, BLAKE3)})
    return sorted((row.namespace, format_digest(SHA256, row.digest)) for row in rows)


def holders_of_block(connection: Connection, row: int) -> list[Holder]:
    """The first artifacts that refer to a block, by one of its rows."""
    rows = connection.execute(
        select(Artifact.namespace, Artifact.digest)
        .join(ArtifactBlock, ArtifactBlock.artifact_id == Artifact.id)
        .join(Block, Block.id == ArtifactBlock.block_id)
        .join(_TWIN, (_TWIN.c.namespace == Block.namespace) & (_TWIN.c.key == Block.key))
        .where(_TWIN.c.id == row)
        .order_by(Artifact.namespace, Artifact.digest)
        .limit(HOLDERS)
    )
    return sorted((row.namespace, format_digest(SHA256, row.digest)) for row in rows)
