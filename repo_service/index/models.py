"""The tables. Integer surrogate keys, digests as 32 bytes, times as UTC microseconds.

Everything but ``pushes``, ``push_blocks``, ``push_chunks``, ``loose_records``, ``unsettled``, ``meta``,
``tokens``, an artifact's last use and the chunks that no artifact refers to can be rebuilt from the store. A row of ``blocks`` exists only while a
published artifact of its namespace refers to it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from sqlalchemy import (
    ColumnElement,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    SmallInteger,
    UniqueConstraint,
    func,
    literal,
    literal_column,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from repo_service.index.dialect import AnyText, BigKey, PlainText


class ChunkState(IntEnum):
    """What a namespace may rely on about a chunk.

    A chunk is AWAITED from the first offer until its bytes arrive, STORED while only pushes refer to
    it, PUBLISHED while an artifact does, LOOSE once nothing does. It is DOOMED before any of its bytes
    go, so that a crash in the middle of reclaiming leaves no row that promises bytes which are gone.
    An awaited chunk that nothing refers to any more is ABANDONED: bytes may have come unrecorded. A
    chunk whose bytes were found damaged or gone is DAMAGED while an artifact refers to it, and AWAITED
    again where only pushes do; either way the next push sends it.
    Rows from DOOMED on are reclaimed.
    """

    AWAITED = 0
    STORED = 1
    PUBLISHED = 2
    DAMAGED = 3
    LOOSE = 4
    DOOMED = 5
    ABANDONED = 6


PRESENT = (ChunkState.STORED, ChunkState.PUBLISHED, ChunkState.LOOSE)
WANTED = (ChunkState.AWAITED, ChunkState.DAMAGED)
HELD = (ChunkState.PUBLISHED, ChunkState.DAMAGED)
"""What an artifact refers to."""


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        }
    )
    type_annotation_map = {int: BigKey, str: PlainText, bytes: LargeBinary}  # noqa: RUF012


def _cascade(column: str) -> ForeignKey:
    return ForeignKey(column, ondelete="CASCADE")


class Meta(Base):
    __tablename__ = "meta"

    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]


class FingerprintRow(Base):
    __tablename__ = "fingerprints"

    id: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[bytes] = mapped_column(unique=True)
    model_digest: Mapped[bytes] = mapped_column(index=True)
    sections: Mapped[str]


class Chunk(Base):
    """One row for each namespace, so that no lookup ever touches another's rows (I7).

    Dtype, shape and size are those the digest commits to while the chunk is present, and somebody's
    unproved word before.
    """

    __tablename__ = "chunks"
    __table_args__ = (UniqueConstraint("namespace", "digest"), Index(None, "state", "namespace", "size"))

    id: Mapped[int] = mapped_column(primary_key=True)
    namespace: Mapped[str]
    digest: Mapped[bytes] = mapped_column(index=True)
    dtype: Mapped[str]
    shape: Mapped[str]
    size: Mapped[int]
    state: Mapped[int] = mapped_column(SmallInteger)


class Block(Base):
    """A block as artifacts store it: one row for each of the ways in which the artifacts of a namespace do.

    ``part`` is 0 where it is stored whole and the state at its end can be resumed; else 1 and the number of its
    arrays that are not stored. A match ends at blocks of part 0.
    """

    __tablename__ = "blocks"
    __table_args__ = (UniqueConstraint("namespace", "key", "part"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    namespace: Mapped[str]
    key: Mapped[bytes]
    record: Mapped[bytes]
    start: Mapped[int]
    stop: Mapped[int]
    part: Mapped[int] = mapped_column(SmallInteger)


class BlockChunk(Base):
    __tablename__ = "block_chunks"
    __table_args__ = (Index(None, "chunk_id", "block_id"), {"sqlite_with_rowid": False})

    block_id: Mapped[int] = mapped_column(_cascade("blocks.id"), primary_key=True)
    chunk_id: Mapped[int] = mapped_column(ForeignKey("chunks.id"), primary_key=True)


class Artifact(Base):
    __tablename__ = "artifacts"
    __table_args__ = (
        UniqueConstraint("namespace", "digest"),
        Index(None, "namespace", "created_at", "digest"),
        Index(None, "namespace", "token_count", "digest"),
        Index(None, "namespace", "total_bytes", "digest"),
        Index(None, "namespace", "token_head"),
        Index(None, "digest"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    namespace: Mapped[str]
    digest: Mapped[bytes]
    fingerprint_id: Mapped[int] = mapped_column(ForeignKey("fingerprints.id"), index=True)
    token_count: Mapped[int]
    block_tokens: Mapped[int]
    block_count: Mapped[int]
    private_tokens: Mapped[bool]
    exactness: Mapped[str]
    parent: Mapped[bytes | None]
    created_at: Mapped[int]
    total_bytes: Mapped[int]
    token_head: Mapped[bytes | None]
    last_used_at: Mapped[int | None]


class ArtifactBlock(Base):
    __tablename__ = "artifact_blocks"
    __table_args__ = (Index(None, "block_id", "artifact_id"), {"sqlite_with_rowid": False})

    artifact_id: Mapped[int] = mapped_column(_cascade("artifacts.id"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    block_id: Mapped[int] = mapped_column(ForeignKey("blocks.id"))


class ArtifactTokenChunk(Base):
    __tablename__ = "artifact_token_chunks"
    __table_args__ = (Index(None, "chunk_id", "artifact_id"), {"sqlite_with_rowid": False})

    artifact_id: Mapped[int] = mapped_column(_cascade("artifacts.id"), primary_key=True)
    chunk_id: Mapped[int] = mapped_column(ForeignKey("chunks.id"), primary_key=True)


class ArtifactTokens(Base):
    """Token ids in parts; ``chain`` commits to all tokens up to a part's end (see `tokens`)."""

    __tablename__ = "artifact_tokens"

    artifact_id: Mapped[int] = mapped_column(_cascade("artifacts.id"), primary_key=True)
    part: Mapped[int] = mapped_column(primary_key=True)
    chain: Mapped[bytes]
    tokens: Mapped[bytes]


class Annotation(Base):
    __tablename__ = "annotations"

    artifact_id: Mapped[int] = mapped_column(_cascade("artifacts.id"), primary_key=True)
    name: Mapped[str] = mapped_column(AnyText, primary_key=True)
    value: Mapped[str] = mapped_column(AnyText)


def annotation_head(value: Any) -> ColumnElement[str]:
    """What the index holds of an annotation's value; PostgreSQL limits the size of an index row."""
    text = literal(value, AnyText) if isinstance(value, str) else value
    return func.substr(text, literal_column("1"), literal_column("64"), type_=AnyText)


Index("ix_annotations_name_value", Annotation.name, annotation_head(Annotation.value))


class ArtifactText(Base):
    """Text for search: in SQLite the full-text index follows by triggers, in PostgreSQL see `dialect.insert_words`."""

    __tablename__ = "artifact_texts"

    artifact_id: Mapped[int] = mapped_column(_cascade("artifacts.id"), primary_key=True)
    text: Mapped[str] = mapped_column(AnyText)


class Tag(Base):
    __tablename__ = "tags"

    namespace: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    artifact_id: Mapped[int] = mapped_column(_cascade("artifacts.id"), index=True)
    updated_at: Mapped[int]


class DivergenceRow(Base):
    __tablename__ = "divergences"
    __table_args__ = (Index(None, "namespace", "created_at"),)

    namespace: Mapped[str] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(primary_key=True)
    block_key: Mapped[bytes]
    stored_record: Mapped[bytes]
    offered_record: Mapped[bytes]
    chunks: Mapped[str]
    created_at: Mapped[int]


class PushRecord(Base):
    """A running push; ``lease`` is how long it lives after it was last heard of, in microseconds."""

    __tablename__ = "pushes"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(AnyText, unique=True)
    namespace: Mapped[str] = mapped_column(index=True)
    fingerprint: Mapped[str]
    lease: Mapped[int]
    expires_at: Mapped[int] = mapped_column(index=True)


class PushBlock(Base):
    __tablename__ = "push_blocks"

    push_id: Mapped[int] = mapped_column(_cascade("pushes.id"), primary_key=True)
    key: Mapped[bytes] = mapped_column(primary_key=True, index=True)
    record: Mapped[bytes]
    document: Mapped[bytes]


class PushChunk(Base):
    """A chunk that a push offered, as it says the chunk is: true once bytes with that digest have arrived."""

    __tablename__ = "push_chunks"
    __table_args__ = (Index(None, "chunk_id", "push_id"), {"sqlite_with_rowid": False})

    push_id: Mapped[int] = mapped_column(_cascade("pushes.id"), primary_key=True)
    chunk_id: Mapped[int] = mapped_column(ForeignKey("chunks.id"), primary_key=True)
    dtype: Mapped[str]
    shape: Mapped[str]


class LooseRecord(Base):
    """A block record that may be in the store although no artifact was published with it, or none is any more."""

    __tablename__ = "loose_records"

    namespace: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[bytes] = mapped_column(primary_key=True)


class Unsettled(Base):
    """A document of the store that a transaction was about to change: see `unsettled`."""

    __tablename__ = "unsettled"

    operation: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    namespace: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)


class TokenRow(Base):
    """An access token: ``name`` is its public id, ``namespaces`` a JSON list."""

    __tablename__ = "tokens"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    secret_digest: Mapped[bytes]
    scope: Mapped[str]
    namespaces: Mapped[str]
    note: Mapped[str]
    created_at: Mapped[int] = mapped_column(index=True)
    expires_at: Mapped[int | None]
    revoked_at: Mapped[int | None]
