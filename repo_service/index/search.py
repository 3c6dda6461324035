"""Artifacts by conditions, a page at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, func, or_, select
from sqlalchemy.orm import InstrumentedAttribute

from repo_service.domain.canonical import MAX_INTEGER
from repo_service.domain.digest import BLAKE3, SHA256, format_digest, parse_digest
from repo_service.domain.errors import MalformedRequest
from repo_service.domain.views import ArtifactInfo, ArtifactPage, ArtifactQuery, query_words
from repo_service.index import times, tokens
from repo_service.index.cursor import Cursor, Totals
from repo_service.index.dialect import text_matches, total
from repo_service.index.lookup import ARTIFACTS, infos
from repo_service.index.models import (
    HELD,
    Annotation,
    Artifact,
    ArtifactBlock,
    ArtifactTokenChunk,
    Block,
    BlockChunk,
    Chunk,
    FingerprintRow,
    Tag,
    annotation_head,
)

PAGE_CHARACTERS = 4 * 2**20
"""Of annotations and tags: an artifact may have 262,144 in annotations alone."""

_READ_AT_ONCE = 32

_SORTS = {
    "created_at": Artifact.created_at,
    "token_count": Artifact.token_count,
    "total_bytes": Artifact.total_bytes,
}


def query(connection: Connection, wanted: ArtifactQuery) -> ArtifactPage:
    """One page, in the order of the sort field and then the id.

    Raises
    ------
    MalformedRequest, MalformedDigest, InvalidTokens
    """
    conditions = _conditions(wanted, connection.dialect.name)
    sort = _SORTS[wanted.sort]
    after = [] if wanted.cursor is None else [Cursor.decode(wanted.cursor, wanted)]
    totals = after[0].totals if after else _totals(connection, wanted.namespace, conditions)
    page = ARTIFACTS.where(*conditions, *(_beyond(wanted, sort, cursor) for cursor in after))
    order = (sort.desc(), Artifact.digest.desc()) if wanted.descending else (sort, Artifact.digest)
    rows = connection.execute(page.order_by(*order).limit(wanted.limit + 1)).all()
    items = _filling(connection, rows[: wanted.limit])
    next_cursor = None
    if len(items) < len(rows):
        last = rows[len(items) - 1]
        next_cursor = Cursor(getattr(last, wanted.sort), format_digest(SHA256, last.digest), totals).encode(wanted)
    return ArtifactPage(
        items=items,
        next_cursor=next_cursor,
        count=totals.count,
        total_bytes=totals.total_bytes,
        unique_bytes=totals.unique_bytes,
    )


def _filling(connection: Connection, rows: Sequence[Row[*tuple[Any, ...]]]) -> list[ArtifactInfo]:
    """The artifacts of the first rows, at least one, whose annotations and tags fit into a page."""
    items: list[ArtifactInfo] = []
    room = PAGE_CHARACTERS
    for start in range(0, len(rows), _READ_AT_ONCE):
        for item in infos(connection, rows[start : start + _READ_AT_ONCE]):
            room -= sum(map(len, (*item.annotations, *item.annotations.values(), *item.tags)))
            if items and room < 0:
                return items
            items.append(item)
    return items


def _beyond(wanted: ArtifactQuery, sort: InstrumentedAttribute[int], cursor: Cursor) -> ColumnElement[bool]:
    digest = parse_digest(cursor.artifact_id, SHA256)
    # The first condition alone is implied by the second; it bounds the scan of the sort's index.
    if wanted.descending:
        return and_(sort <= cursor.value, or_(sort < cursor.value, Artifact.digest < digest))
    return and_(sort >= cursor.value, or_(sort > cursor.value, Artifact.digest > digest))


def _totals(connection: Connection, namespace: str, conditions: list[ColumnElement[bool]]) -> Totals:
    count, size = connection.execute(select(func.count(), total(Artifact.total_bytes)).where(*conditions)).one()
    unique = total(Chunk.size)
    if len(conditions) == 1:
        statement = select(unique).where(Chunk.state.in_(HELD), Chunk.namespace == namespace)
    else:
        statement = select(unique).where(Chunk.id.in_(_chunks_of(select(Artifact.id).where(*conditions))))
    return Totals(count, size, connection.scalars(statement).one())


def _chunks_of(artifacts: Select[int]) -> Any:
    blocks = select(ArtifactBlock.block_id).where(ArtifactBlock.artifact_id.in_(artifacts))
    return (
        select(BlockChunk.chunk_id)
        .where(BlockChunk.block_id.in_(blocks))
        .union(select(ArtifactTokenChunk.chunk_id).where(ArtifactTokenChunk.artifact_id.in_(artifacts)))
    )


def _conditions(wanted: ArtifactQuery, dialect: str) -> list[ColumnElement[bool]]:
    """The conditions on `Artifact`; if nothing is asked there is only one, the namespace."""
    listed = [Artifact.id.in_(ids) for ids in _listings(wanted, dialect)]
    # Ids that are listed are few: they, and no index on the namespace, are to lead the search.
    namespace = Artifact.namespace.concat("") if listed else Artifact.namespace
    return [namespace == wanted.namespace, *listed, *_properties(wanted)]


def _listings(wanted: ArtifactQuery, dialect: str) -> Iterator[Any]:
    """Conditions that are met by the artifacts whose ids another table lists."""
    if wanted.block_key is not None:
        yield _with_block(wanted.namespace, wanted.block_key)
    if wanted.chunk is not None:
        yield _with_chunk(wanted.namespace, wanted.chunk)
    if wanted.tag is not None:
        yield select(Tag.artifact_id).where(Tag.namespace == wanted.namespace, Tag.name == wanted.tag)
    for name, value in wanted.annotations.items():
        yield _with_annotation(name, value)
    if wanted.text is not None and (words := query_words(wanted.text)):
        yield text_matches(dialect, words)


def _properties(wanted: ArtifactQuery) -> Iterator[ColumnElement[bool]]:
    """Conditions on the artifact's own row."""
    if wanted.fingerprint_id is not None:
        yield _made_with(FingerprintRow.digest == parse_digest(wanted.fingerprint_id, SHA256))
    if wanted.model_id is not None:
        yield _made_with(FingerprintRow.model_digest == parse_digest(wanted.model_id, SHA256))
    if wanted.min_tokens is not None:
        yield Artifact.token_count >= min(wanted.min_tokens, MAX_INTEGER)
    if wanted.max_tokens is not None:
        yield Artifact.token_count <= min(wanted.max_tokens, MAX_INTEGER)
    if wanted.covers is not None:
        yield Artifact.token_count >= _stop(wanted.covers)
    if wanted.token_prefix is not None:
        yield from tokens.begins_with(wanted.token_prefix)
    if wanted.exactness is not None:
        yield Artifact.exactness == wanted.exactness
    if wanted.created_after is not None:
        yield Artifact.created_at >= times.to_microseconds(wanted.created_after)
    if wanted.created_before is not None:
        yield Artifact.created_at < times.to_microseconds(wanted.created_before)


def _made_with(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    return Artifact.fingerprint_id.in_(select(FingerprintRow.id).where(condition))


def _stop(span: tuple[int, int]) -> int:
    start, stop = span
    if not 0 <= start < stop:
        raise MalformedRequest(f"the span {start} to {stop} is not one: it needs 0 <= start < stop")
    return min(stop, MAX_INTEGER)


def _with_block(namespace: str, key: str) -> Select[int]:
    return (
        select(ArtifactBlock.artifact_id)
        .join(Block, Block.id == ArtifactBlock.block_id)
        .where(Block.namespace == namespace, Block.key == parse_digest(key, SHA256))
    )


def _with_chunk(namespace: str, digest: str) -> Any:
    chunk = (Chunk.namespace == namespace) & (Chunk.digest == parse_digest(digest, BLAKE3))
    return (
        select(ArtifactBlock.artifact_id)
        .join(BlockChunk, BlockChunk.block_id == ArtifactBlock.block_id)
        .join(Chunk, Chunk.id == BlockChunk.chunk_id)
        .where(chunk)
        .union(select(ArtifactTokenChunk.artifact_id).join(Chunk, Chunk.id == ArtifactTokenChunk.chunk_id).where(chunk))
    )


def _with_annotation(name: str, value: str) -> Select[int]:
    return select(Annotation.artifact_id).where(
        Annotation.name == name,
        annotation_head(Annotation.value) == annotation_head(value),
        Annotation.value == value,
    )
