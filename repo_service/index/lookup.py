"""Finding one artifact, block or chunk. Every query here is an index lookup, however large the index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    Connection,
    Integer,
    LargeBinary,
    Row,
    Select,
    Text,
    bindparam,
    case,
    exists,
    literal_column,
    select,
)

from repo_service.domain.digest import BLAKE3, SHA256, format_digest, parse_digest
from repo_service.domain.errors import Ambiguous, ArtifactNotFound, ChunkNotFound
from repo_service.domain.layout import ChunkSpec
from repo_service.domain.names import is_artifact_reference
from repo_service.domain.views import ArtifactInfo
from repo_service.index import chunks, times
from repo_service.index.dialect import DIGEST_BYTES, digest_at
from repo_service.index.models import (
    Annotation,
    Artifact,
    ArtifactBlock,
    ArtifactTokenChunk,
    Block,
    BlockChunk,
    Chunk,
    FingerprintRow,
    Tag,
)
from repo_service.index.tags import tag_not_found

ARTIFACTS = select(
    *Artifact.__table__.columns,
    FingerprintRow.digest.label("fingerprint_digest"),
    FingerprintRow.model_digest,
).join(FingerprintRow, FingerprintRow.id == Artifact.fingerprint_id)
"""Rows that `infos` reads."""

_AMBIGUOUS_SHOWN = 10


def artifact(connection: Connection, namespace: str, ref: str) -> ArtifactInfo:
    """The artifact with an id, a shortened id, or a tag."""
    return infos(connection, [find(connection, namespace, ref)])[0]


def find(connection: Connection, namespace: str, ref: str) -> Row[*tuple[Any, ...]]:
    """The row of the artifact with an id, a shortened id, or a tag."""
    rows = connection.execute(_by_reference(namespace, ref).limit(_AMBIGUOUS_SHOWN)).all()
    if not rows and not is_artifact_reference(ref):
        raise tag_not_found(namespace, ref)
    if not rows:
        raise ArtifactNotFound(
            f"no artifact {ref} in the namespace {namespace}: check the id and the namespace",
            artifact_id=ref,
            namespace=namespace,
        )
    if len(rows) > 1:
        ids = [format_digest(SHA256, row.digest) for row in rows]
        raise Ambiguous(
            f"several artifacts have ids that begin with {ref}: {', '.join(ids)}; give more digits", ids=ids
        )
    return rows[0]


def infos(connection: Connection, rows: Sequence[Row[*tuple[Any, ...]]]) -> list[ArtifactInfo]:
    """The views of `ARTIFACTS` rows, with their annotations and tags."""
    if not rows:
        return []
    ids = [row.id for row in rows]
    annotations: dict[int, dict[str, str]] = {row_id: {} for row_id in ids}
    for note in connection.execute(select(*Annotation.__table__.columns).where(Annotation.artifact_id.in_(ids))):
        annotations[note.artifact_id][note.name] = note.value
    tags: dict[int, list[str]] = {row_id: [] for row_id in ids}
    for tag in connection.execute(select(Tag.artifact_id, Tag.name).where(Tag.artifact_id.in_(ids)).order_by(Tag.name)):
        tags[tag.artifact_id].append(tag.name)
    return [
        ArtifactInfo(
            id=format_digest(SHA256, row.digest),
            namespace=row.namespace,
            fingerprint_id=format_digest(SHA256, row.fingerprint_digest),
            model_id=format_digest(SHA256, row.model_digest),
            token_count=row.token_count,
            block_tokens=row.block_tokens,
            block_count=row.block_count,
            private_tokens=row.private_tokens,
            exactness=row.exactness,
            parent=None if row.parent is None else format_digest(SHA256, row.parent),
            created_at=times.from_microseconds(row.created_at),
            last_used_at=None if row.last_used_at is None else times.from_microseconds(row.last_used_at),
            total_bytes=row.total_bytes,
            annotations=dict(sorted(annotations[row.id].items())),
            tags=tags[row.id],
        )
        for row in rows
    ]


def published_record(connection: Connection, namespace: str, key: str) -> str | None:
    record = connection.execute(
        select(Block.record).where(Block.namespace == namespace, Block.key == parse_digest(key, SHA256))
    ).scalar()
    return None if record is None else format_digest(SHA256, record)


def holds_chunk(connection: Connection, namespace: str, artifact_id: str, digest: str) -> ChunkSpec:
    row = connection.execute(
        _HELD,
        {
            "namespace": namespace,
            "artifact": parse_digest(artifact_id, SHA256),
            "chunk": parse_digest(digest, BLAKE3),
        },
    ).first()
    if row is None:
        raise ChunkNotFound(
            f"no chunk {digest} of an artifact {artifact_id} in the namespace {namespace}: take chunk digests from the "
            "artifact's manifest and block records",
            artifact_id=artifact_id,
            digest=digest,
        )
    return chunks.spec_of(row)


def match(connection: Connection, namespace: str, keys: Sequence[str]) -> Row[*tuple[Any, ...]] | None:
    """The artifact that holds the longest prefix: its digest and last use, and how far it goes."""
    packed = b"".join(parse_digest(key, SHA256) for key in keys)
    return connection.execute(_MATCH, {"namespace": namespace, "keys": packed, "count": len(keys)}).first()


def _by_reference(namespace: str, ref: str) -> Select[*tuple[Any, ...]]:
    if not is_artifact_reference(ref):
        return ARTIFACTS.join(Tag, Tag.artifact_id == Artifact.id).where(Tag.namespace == namespace, Tag.name == ref)
    digits = ref.partition(":")[2]
    lowest, highest = (bytes.fromhex(digits.ljust(2 * DIGEST_BYTES, fill)) for fill in "0f")
    return ARTIFACTS.where(Artifact.namespace == namespace, Artifact.digest.between(lowest, highest)).order_by(
        Artifact.digest
    )


def _held_statement() -> Select[str, str]:
    # Nested, so that the few blocks of the chunk are looked at and not the many of the artifact.
    of_artifact = exists().where(
        ArtifactBlock.block_id == BlockChunk.block_id, ArtifactBlock.artifact_id == Artifact.id
    )
    in_block = exists().where(BlockChunk.chunk_id == Chunk.id, of_artifact.correlate(BlockChunk, Artifact))
    in_tokens = exists().where(ArtifactTokenChunk.artifact_id == Artifact.id, ArtifactTokenChunk.chunk_id == Chunk.id)
    return (
        select(Chunk.dtype, Chunk.shape)
        .join(Artifact, Artifact.namespace == Chunk.namespace)
        .where(
            Chunk.namespace == bindparam("namespace"),
            Chunk.digest == bindparam("chunk"),
            Artifact.digest == bindparam("artifact"),
            in_tokens | in_block,
        )
    )


def _match_statement() -> Select[*tuple[Any, ...]]:
    """Binary search for the last key that is there, and from it back to one where the state can be resumed.

    A published artifact holds every block before one that it holds, and a key commits to all keys
    before it; so the keys that are there come first. The way back is none where artifacts are stored whole.
    """
    packed = bindparam("keys", type_=LargeBinary)
    namespace = bindparam("namespace", type_=Text)
    search = select(literal_column("0", Integer).label("low"), bindparam("count", type_=Integer).label("high")).cte(
        "search", recursive=True
    )
    middle = (search.c.low + search.c.high + 1) // 2
    there = exists().where(Block.namespace == namespace, Block.key == digest_at(packed, middle - 1))
    search = search.union_all(
        select(case((there, middle), else_=search.c.low), case((there, search.c.high), else_=middle - 1)).where(
            search.c.low < search.c.high
        )
    )
    found = select(search.c.low).where(search.c.low == search.c.high).cte("found", recursive=True)
    resumed = exists().where(
        Block.namespace == namespace, Block.key == digest_at(packed, found.c.low - 1), Block.part == 0
    )
    found = found.union_all(select(found.c.low - 1).where(found.c.low > 0, ~resumed))
    position = found.c.low - 1
    # A join would sort all artifacts that share the block; this takes the first in the index.
    holder = (
        select(ArtifactBlock.artifact_id)
        .where(ArtifactBlock.block_id == Block.id, ArtifactBlock.position == position)
        .order_by(ArtifactBlock.artifact_id)
        .limit(1)
        .scalar_subquery()
    )
    return (
        select(found.c.low, Block.stop, Artifact.digest, Artifact.last_used_at)
        .join(Block, (Block.namespace == namespace) & (Block.key == digest_at(packed, position)) & (Block.part == 0))
        .join(Artifact, Artifact.id == holder)
        .where(found.c.low > 0)
    )


_HELD = _held_statement()
_MATCH = _match_statement()
