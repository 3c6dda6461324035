"""What an index says, without the row numbers it happens to use: equal for equal repositories (I5)."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Select, select

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
    DivergenceRow,
    FingerprintRow,
    Tag,
)

_ARTIFACT = (Artifact.namespace, Artifact.digest)
_BLOCK = (Block.namespace, Block.key, Block.part)


def dump(connection: Connection) -> dict[str, list[tuple[Any, ...]]]:
    """Rows derived from the store, by table, with natural keys in place of row numbers, in their order."""
    return {
        name: sorted((tuple(row) for row in connection.execute(statement)), key=repr)
        for name, statement in _statements().items()
    }


def _statements() -> dict[str, Select[*tuple[Any, ...]]]:
    chunk = (Chunk.namespace, Chunk.digest)
    artifact_columns = [
        column for column in Artifact.__table__.columns if column.name not in ("id", "fingerprint_id", "last_used_at")
    ]
    fingerprint_columns = [column for column in FingerprintRow.__table__.columns if column.name != "id"]
    return {
        "fingerprints": select(*fingerprint_columns),
        "chunks": select(*chunk, Chunk.dtype, Chunk.shape, Chunk.size).where(Chunk.state.in_(HELD)),
        "blocks": select(*_BLOCK, Block.record, Block.start, Block.stop),
        "block_chunks": select(*_BLOCK, Chunk.digest)
        .join(BlockChunk, BlockChunk.block_id == Block.id)
        .join(Chunk, Chunk.id == BlockChunk.chunk_id),
        "artifacts": select(*artifact_columns, FingerprintRow.digest.label("fingerprint")).join(
            FingerprintRow, FingerprintRow.id == Artifact.fingerprint_id
        ),
        "artifact_blocks": select(*_ARTIFACT, ArtifactBlock.position, Block.key, Block.part)
        .join(ArtifactBlock, ArtifactBlock.artifact_id == Artifact.id)
        .join(Block, Block.id == ArtifactBlock.block_id),
        "artifact_token_chunks": select(*_ARTIFACT, Chunk.digest)
        .join(ArtifactTokenChunk, ArtifactTokenChunk.artifact_id == Artifact.id)
        .join(Chunk, Chunk.id == ArtifactTokenChunk.chunk_id),
        "artifact_tokens": select(*_ARTIFACT, ArtifactTokens.part, ArtifactTokens.chain, ArtifactTokens.tokens).join(
            ArtifactTokens, ArtifactTokens.artifact_id == Artifact.id
        ),
        "annotations": select(*_ARTIFACT, Annotation.name, Annotation.value).join(
            Annotation, Annotation.artifact_id == Artifact.id
        ),
        "artifact_texts": select(*_ARTIFACT, ArtifactText.text).join(
            ArtifactText, ArtifactText.artifact_id == Artifact.id
        ),
        "tags": select(Tag.namespace, Tag.name, Artifact.digest, Tag.updated_at).join(
            Artifact, Artifact.id == Tag.artifact_id
        ),
        "divergences": select(*DivergenceRow.__table__.columns),
    }
