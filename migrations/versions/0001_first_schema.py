"""The first schema.

Revision: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
# Compared and sorted by bytes, as SQLite does, whatever the database's locale.
TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")

# The index holds no text of its own; these triggers keep it in step with artifact_texts.
FULL_TEXT_SQLITE = (
    """
    CREATE VIRTUAL TABLE artifact_search USING fts5(
        text, content=artifact_texts, content_rowid=artifact_id, tokenize='unicode61 remove_diacritics 0'
    )
    """,
    """
    CREATE TRIGGER artifact_texts_insert AFTER INSERT ON artifact_texts BEGIN
        INSERT INTO artifact_search(rowid, text) VALUES (new.artifact_id, new.text);
    END
    """,
    """
    CREATE TRIGGER artifact_texts_delete AFTER DELETE ON artifact_texts BEGIN
        INSERT INTO artifact_search(artifact_search, rowid, text) VALUES ('delete', old.artifact_id, old.text);
    END
    """,
)

FULL_TEXT_POSTGRES = (
    """
    CREATE TABLE artifact_words (
        artifact_id bigint PRIMARY KEY REFERENCES artifact_texts ON DELETE CASCADE, words text[] NOT NULL
    )
    """,
    "CREATE INDEX ix_artifact_words_words ON artifact_words USING gin (words)",
)


def upgrade() -> None:
    op.create_table(
        "blocks",
        sa.Column("id", BIG, nullable=False),
        sa.Column("namespace", TEXT, nullable=False),
        sa.Column("key", sa.LargeBinary(), nullable=False),
        sa.Column("record", sa.LargeBinary(), nullable=False),
        sa.Column("start", BIG, nullable=False),
        sa.Column("stop", BIG, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_blocks"),
        sa.UniqueConstraint("namespace", "key", name="uq_blocks_namespace_key"),
    )
    op.create_table(
        "chunks",
        sa.Column("id", BIG, nullable=False),
        sa.Column("namespace", TEXT, nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("dtype", TEXT, nullable=False),
        sa.Column("shape", TEXT, nullable=False),
        sa.Column("size", BIG, nullable=False),
        sa.Column("state", sa.SmallInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_chunks"),
        sa.UniqueConstraint("namespace", "digest", name="uq_chunks_namespace_digest"),
    )
    op.create_index("ix_chunks_digest", "chunks", ["digest"])
    op.create_index("ix_chunks_state_namespace_size", "chunks", ["state", "namespace", "size"])
    op.create_table(
        "divergences",
        sa.Column("namespace", TEXT, nullable=False),
        sa.Column("id", TEXT, nullable=False),
        sa.Column("block_key", sa.LargeBinary(), nullable=False),
        sa.Column("stored_record", sa.LargeBinary(), nullable=False),
        sa.Column("offered_record", sa.LargeBinary(), nullable=False),
        sa.Column("chunks", TEXT, nullable=False),
        sa.Column("created_at", BIG, nullable=False),
        sa.PrimaryKeyConstraint("namespace", "id", name="pk_divergences"),
    )
    op.create_index("ix_divergences_namespace_created_at", "divergences", ["namespace", "created_at"])
    op.create_table(
        "fingerprints",
        sa.Column("id", BIG, nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("model_digest", sa.LargeBinary(), nullable=False),
        sa.Column("sections", TEXT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_fingerprints"),
        sa.UniqueConstraint("digest", name="uq_fingerprints_digest"),
    )
    op.create_index("ix_fingerprints_model_digest", "fingerprints", ["model_digest"])
    op.create_table(
        "loose_records",
        sa.Column("namespace", TEXT, nullable=False),
        sa.Column("key", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("namespace", "key", name="pk_loose_records"),
    )
    op.create_table(
        "meta",
        sa.Column("name", TEXT, nullable=False),
        sa.Column("value", TEXT, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_meta"),
    )
    op.create_table(
        "pushes",
        sa.Column("id", BIG, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("namespace", TEXT, nullable=False),
        sa.Column("fingerprint", TEXT, nullable=False),
        sa.Column("lease", BIG, nullable=False),
        sa.Column("expires_at", BIG, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_pushes"),
        sa.UniqueConstraint("name", name="uq_pushes_name"),
    )
    op.create_index("ix_pushes_expires_at", "pushes", ["expires_at"])
    op.create_index("ix_pushes_namespace", "pushes", ["namespace"])
    op.create_table(
        "artifacts",
        sa.Column("id", BIG, nullable=False),
        sa.Column("namespace", TEXT, nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("fingerprint_id", BIG, nullable=False),
        sa.Column("token_count", BIG, nullable=False),
        sa.Column("block_tokens", BIG, nullable=False),
        sa.Column("block_count", BIG, nullable=False),
        sa.Column("private_tokens", sa.Boolean(), nullable=False),
        sa.Column("exactness", TEXT, nullable=False),
        sa.Column("parent", sa.LargeBinary(), nullable=True),
        sa.Column("created_at", BIG, nullable=False),
        sa.Column("total_bytes", BIG, nullable=False),
        sa.Column("token_head", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["fingerprint_id"], ["fingerprints.id"], name="fk_artifacts_fingerprint_id"),
        sa.PrimaryKeyConstraint("id", name="pk_artifacts"),
        sa.UniqueConstraint("namespace", "digest", name="uq_artifacts_namespace_digest"),
    )
    op.create_index("ix_artifacts_fingerprint_id", "artifacts", ["fingerprint_id"])
    op.create_index("ix_artifacts_namespace_created_at_digest", "artifacts", ["namespace", "created_at", "digest"])
    op.create_index("ix_artifacts_namespace_token_count_digest", "artifacts", ["namespace", "token_count", "digest"])
    op.create_index("ix_artifacts_namespace_token_head", "artifacts", ["namespace", "token_head"])
    op.create_index("ix_artifacts_namespace_total_bytes_digest", "artifacts", ["namespace", "total_bytes", "digest"])
    op.create_table(
        "block_chunks",
        sa.Column("block_id", BIG, nullable=False),
        sa.Column("chunk_id", BIG, nullable=False),
        sa.ForeignKeyConstraint(["block_id"], ["blocks.id"], name="fk_block_chunks_block_id", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["chunk_id"], ["chunks.id"], name="fk_block_chunks_chunk_id"),
        sa.PrimaryKeyConstraint("block_id", "chunk_id", name="pk_block_chunks"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_block_chunks_chunk_id_block_id", "block_chunks", ["chunk_id", "block_id"])
    op.create_table(
        "push_blocks",
        sa.Column("push_id", BIG, nullable=False),
        sa.Column("key", sa.LargeBinary(), nullable=False),
        sa.Column("record", sa.LargeBinary(), nullable=False),
        sa.Column("document", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["push_id"], ["pushes.id"], name="fk_push_blocks_push_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("push_id", "key", name="pk_push_blocks"),
    )
    op.create_index("ix_push_blocks_key", "push_blocks", ["key"])
    op.create_table(
        "push_chunks",
        sa.Column("push_id", BIG, nullable=False),
        sa.Column("chunk_id", BIG, nullable=False),
        sa.Column("dtype", TEXT, nullable=False),
        sa.Column("shape", TEXT, nullable=False),
        sa.ForeignKeyConstraint(["chunk_id"], ["chunks.id"], name="fk_push_chunks_chunk_id"),
        sa.ForeignKeyConstraint(["push_id"], ["pushes.id"], name="fk_push_chunks_push_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("push_id", "chunk_id", name="pk_push_chunks"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_push_chunks_chunk_id_push_id", "push_chunks", ["chunk_id", "push_id"])
    op.create_table(
        "annotations",
        sa.Column("artifact_id", BIG, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("value", TEXT, nullable=False),
        sa.ForeignKeyConstraint(
            ["artifact_id"], ["artifacts.id"], name="fk_annotations_artifact_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("artifact_id", "name", name="pk_annotations"),
    )
    op.create_table(
        "artifact_blocks",
        sa.Column("artifact_id", BIG, nullable=False),
        sa.Column("position", BIG, nullable=False),
        sa.Column("block_id", BIG, nullable=False),
        sa.ForeignKeyConstraint(
            ["artifact_id"], ["artifacts.id"], name="fk_artifact_blocks_artifact_id", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["block_id"], ["blocks.id"], name="fk_artifact_blocks_block_id"),
        sa.PrimaryKeyConstraint("artifact_id", "position", name="pk_artifact_blocks"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_artifact_blocks_block_id_artifact_id", "artifact_blocks", ["block_id", "artifact_id"])
    op.create_table(
        "artifact_texts",
        sa.Column("artifact_id", BIG, nullable=False),
        sa.Column("text", TEXT, nullable=False),
        sa.ForeignKeyConstraint(
            ["artifact_id"], ["artifacts.id"], name="fk_artifact_texts_artifact_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("artifact_id", name="pk_artifact_texts"),
    )
    op.create_table(
        "artifact_token_chunks",
        sa.Column("artifact_id", BIG, nullable=False),
        sa.Column("chunk_id", BIG, nullable=False),
        sa.ForeignKeyConstraint(
            ["artifact_id"], ["artifacts.id"], name="fk_artifact_token_chunks_artifact_id", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["chunk_id"], ["chunks.id"], name="fk_artifact_token_chunks_chunk_id"),
        sa.PrimaryKeyConstraint("artifact_id", "chunk_id", name="pk_artifact_token_chunks"),
        sqlite_with_rowid=False,
    )
    op.create_index(
        "ix_artifact_token_chunks_chunk_id_artifact_id", "artifact_token_chunks", ["chunk_id", "artifact_id"]
    )
    op.create_table(
        "artifact_tokens",
        sa.Column("artifact_id", BIG, nullable=False),
        sa.Column("part", BIG, nullable=False),
        sa.Column("chain", sa.LargeBinary(), nullable=False),
        sa.Column("tokens", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["artifact_id"], ["artifacts.id"], name="fk_artifact_tokens_artifact_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("artifact_id", "part", name="pk_artifact_tokens"),
    )
    op.create_table(
        "tags",
        sa.Column("namespace", TEXT, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("artifact_id", BIG, nullable=False),
        sa.Column("updated_at", BIG, nullable=False),
        sa.ForeignKeyConstraint(["artifact_id"], ["artifacts.id"], name="fk_tags_artifact_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("namespace", "name", name="pk_tags"),
    )
    op.create_index("ix_tags_artifact_id", "tags", ["artifact_id"])
    op.create_index("ix_annotations_name_value", "annotations", ["name", sa.text("substr(value, 1, 64)")])
    for statement in FULL_TEXT_SQLITE if op.get_bind().dialect.name == "sqlite" else FULL_TEXT_POSTGRES:
        op.execute(statement)
