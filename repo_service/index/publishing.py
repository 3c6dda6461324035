"""Rows of published artifacts: put in whole, taken out whole."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, bindparam, delete, exists, insert, select

from repo_service.domain.canonical import canonical_json
from repo_service.domain.digest import BLAKE3, SHA256, format_digest, parse_digest
from repo_service.domain.errors import ArtifactNotFound, ChunksMissing, Divergence
from repo_service.domain.fingerprint import Fingerprint
from repo_service.domain.tokens import encode_tokens
from repo_service.index import chunks, times, tokens
from repo_service.index.chunks import KnownChunk
from repo_service.index.dialect import bound, bound_ids, digest_list, id_list, insert_many, insert_new, insert_words
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
    ChunkState,
    FingerprintRow,
    LooseRecord,
    PushBlock,
    PushRecord,
    Tag,
)
from repo_service.index.pushes import divergent_blocks

_KEYS = digest_list("keys")
_BLOCK_IDS = select(Block.key, Block.part, Block.id).join(
    _KEYS, (Block.namespace == bindparam("namespace")) & (Block.key == _KEYS.c.digest)
)
_UNHELD = select(_KEYS.c.digest).where(
    ~exists().where(Block.namespace == bindparam("namespace"), Block.key == _KEYS.c.digest),
    ~exists().where(
        PushBlock.key == _KEYS.c.digest,
        PushRecord.id == PushBlock.push_id,
        PushRecord.namespace == bindparam("namespace"),
    ),
)
_OTHER_BLOCK = ArtifactBlock.__table__.alias("other_block")


def publish(connection: Connection, entry: Entry) -> None:
    """Add an artifact whose chunks this namespace has; one that is published already stays as it is.

    Raises
    ------
    ChunksMissing, Divergence, MalformedDocument
    """
    if artifact_row_id(connection, entry.namespace, entry.manifest.id) is not None:
        return
    known = chunks.ensure(connection, entry.namespace, entry.specs())
    missing = [format_digest(BLAKE3, digest) for digest, chunk in known.items() if not chunk.present]
    if missing:
        raise ChunksMissing(
            f"{len(missing)} chunks of the artifact are not in the repository, the first is {missing[0]}; "
            "offer its blocks, send what is missing, then commit again",
            missing=missing[:1000],
        )
    # A push that expired in the middle of its commit may have lost block records to reclaiming.
    keys = [parse_digest(record.key, SHA256) for record in entry.records]
    unheld = connection.scalars(_UNHELD, bound(keys, "keys") | {"namespace": entry.namespace}).first()
    if unheld is not None:
        raise ChunksMissing(
            f"no running push offers the block {format_digest(SHA256, unheld)}: the push has expired; offer the "
            "blocks again in a new one",
            block_key=format_digest(SHA256, unheld),
        )
    _insert(connection, entry, known)


def restore(connection: Connection, entry: Entry, last_used_at: int | None) -> None:
    """Add an artifact found in the store, whose word is taken for its chunks, but for those known to be damaged."""
    if artifact_row_id(connection, entry.namespace, entry.manifest.id) is None:
        known = chunks.ensure(connection, entry.namespace, entry.specs(), proven=True)
        _insert(connection, entry, known, last_used_at)


def unpublish(connection: Connection, namespace: str, artifact_id: str) -> list[str]:
    """Remove an artifact, its tags, and what no other artifact of the namespace needs.

    Raises
    ------
    ArtifactNotFound
    """
    row_id = require_artifact(connection, namespace, artifact_id)
    tags = list(connection.scalars(select(Tag.name).where(Tag.artifact_id == row_id).order_by(Tag.name)))
    fingerprint = connection.scalars(select(Artifact.fingerprint_id).where(Artifact.id == row_id)).one()
    own_blocks = select(ArtifactBlock.block_id).where(
        ArtifactBlock.artifact_id == row_id,
        ~exists().where(_OTHER_BLOCK.c.block_id == ArtifactBlock.block_id, _OTHER_BLOCK.c.artifact_id != row_id),
    )
    block_ids = connection.scalars(own_blocks).all()
    chunk_ids = connection.scalars(
        select(BlockChunk.chunk_id)
        .where(BlockChunk.block_id.in_(own_blocks))
        .union(select(ArtifactTokenChunk.chunk_id).where(ArtifactTokenChunk.artifact_id == row_id))
    ).all()
    connection.execute(
        insert_new(LooseRecord).from_select(
            ["namespace", "key"], select(Block.namespace, Block.key).where(Block.id.in_(own_blocks))
        )
    )
    connection.execute(delete(Artifact).where(Artifact.id == row_id))
    connection.execute(delete(Block).where(Block.id.in_(id_list())), bound_ids(block_ids))
    chunks.release_unpublished(connection, chunk_ids)
    connection.execute(
        delete(FingerprintRow).where(
            FingerprintRow.id == fingerprint, ~exists().where(Artifact.fingerprint_id == FingerprintRow.id)
        )
    )
    return tags


def artifact_row_id(connection: Connection, namespace: str, artifact_id: str) -> int | None:
    return connection.execute(
        select(Artifact.id).where(Artifact.namespace == namespace, Artifact.digest == parse_digest(artifact_id, SHA256))
    ).scalar()


def require_artifact(connection: Connection, namespace: str, artifact_id: str) -> int:
    row_id = artifact_row_id(connection, namespace, artifact_id)
    if row_id is None:
        raise ArtifactNotFound(
            f"no artifact {artifact_id} in the namespace {namespace}: check the id and the namespace",
            artifact_id=artifact_id,
            namespace=namespace,
        )
    return row_id


def _insert(
    connection: Connection, entry: Entry, known: Mapping[bytes, KnownChunk], last_used_at: int | None = None
) -> None:
    block_ids = _insert_blocks(connection, entry, known)
    row_id = _insert_artifact(connection, entry, last_used_at)
    insert_many(
        connection,
        (ArtifactBlock.artifact_id, ArtifactBlock.position, ArtifactBlock.block_id),
        ((row_id, position, block_id) for position, block_id in enumerate(block_ids)),
    )
    insert_many(
        connection,
        (ArtifactTokenChunk.artifact_id, ArtifactTokenChunk.chunk_id),
        ((row_id, known[digest].id) for digest in entry.token_chunks()),
    )
    if entry.tokens is not None:
        insert_many(
            connection,
            (ArtifactTokens.artifact_id, ArtifactTokens.part, ArtifactTokens.chain, ArtifactTokens.tokens),
            ((row_id, *part) for part in tokens.parts(encode_tokens(entry.tokens))),
        )
    insert_many(
        connection,
        (Annotation.artifact_id, Annotation.name, Annotation.value),
        ((row_id, *note) for note in entry.manifest.annotations.items()),
    )
    if entry.manifest.text:
        insert_many(connection, (ArtifactText.artifact_id, ArtifactText.text), [(row_id, entry.manifest.text)])
        insert_words(connection, row_id, entry.manifest.text)
    chunks.set_state(connection, [c.id for c in known.values() if c.state not in HELD], ChunkState.PUBLISHED)


def _insert_artifact(connection: Connection, entry: Entry, last_used_at: int | None) -> int:
    manifest = entry.manifest
    return connection.execute(
        insert(Artifact)
        .values(
            namespace=entry.namespace,
            digest=parse_digest(manifest.id, SHA256),
            fingerprint_id=_fingerprint(connection, manifest.fingerprint),
            token_count=manifest.token_count,
            block_tokens=manifest.layout.block_tokens,
            block_count=len(manifest.blocks),
            private_tokens=manifest.tokens is None,
            exactness=manifest.exactness.kind,
            parent=None if manifest.parent is None else parse_digest(manifest.parent, SHA256),
            created_at=times.to_microseconds(entry.created_at),
            last_used_at=last_used_at,
            total_bytes=sum(spec.size for spec in entry.specs().values()),
            token_head=None if entry.tokens is None else tokens.head(encode_tokens(entry.tokens[: tokens.HEAD_TOKENS])),
        )
        .returning(Artifact.id)
    ).scalar_one()


def _insert_blocks(connection: Connection, entry: Entry, known: Mapping[bytes, KnownChunk]) -> list[int]:
    """Row ids of the entry's blocks, in order, the ones not yet known inserted with their chunks."""
    keys = [parse_digest(record.key, SHA256) for record in entry.records]
    offered = dict(zip(keys, (parse_digest(record.digest, SHA256) for record in entry.records), strict=True))
    for key, stored in divergent_blocks(connection, entry.namespace, offered).items():
        raise Divergence(
            f"the block {format_digest(SHA256, key)} is published with the record {format_digest(SHA256, stored)}; "
            f"this artifact has {format_digest(SHA256, offered[key])}, other bytes under an equal key",
            block_key=format_digest(SHA256, key),
            stored_record=format_digest(SHA256, stored),
            offered_record=format_digest(SHA256, offered[key]),
        )
    parameters = bound(keys, "keys") | {"namespace": entry.namespace}
    names = list(zip(keys, entry.parts(), strict=True))
    before = {(row.key, row.part) for row in connection.execute(_BLOCK_IDS, parameters)}
    new = [
        (name, record, digests)
        for name, record, digests in zip(names, entry.records, entry.block_chunks(), strict=True)
        if name not in before
    ]
    insert_many(
        connection,
        (Block.namespace, Block.key, Block.record, Block.start, Block.stop, Block.part),
        ((entry.namespace, key, offered[key], record.start, record.stop, part) for (key, part), record, _ in new),
    )
    ids = {(row.key, row.part): row.id for row in connection.execute(_BLOCK_IDS, parameters)}
    insert_many(
        connection,
        (BlockChunk.block_id, BlockChunk.chunk_id),
        ((ids[name], known[digest].id) for name, _, digests in new for digest in digests),
    )
    return [ids[name] for name in names]


def _fingerprint(connection: Connection, fingerprint: Fingerprint) -> int:
    digest = parse_digest(fingerprint.id, SHA256)
    connection.execute(
        insert_new(FingerprintRow).values(
            digest=digest,
            model_digest=parse_digest(fingerprint.model_id, SHA256),
            sections=canonical_json(fingerprint.sections).decode(),
        )
    )
    return connection.scalars(select(FingerprintRow.id).where(FingerprintRow.digest == digest)).one()
