"""Blocks that artifacts store in part: a row for each of the ways in which a namespace's artifacts store a block.

Revision: 0006
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")

# Tables that refer to blocks, with their columns and the index that they have besides their key.
REFERRING = {
    "block_chunks": (("block_id", "chunk_id"), ("chunk_id", "block_id")),
    "artifact_blocks": (("artifact_id", "position", "block_id"), ("block_id", "artifact_id")),
}


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        _rebuild()
        return
    op.add_column("blocks", sa.Column("part", sa.SmallInteger(), nullable=False, server_default="0"))
    op.alter_column("blocks", "part", server_default=None)
    op.drop_constraint("uq_blocks_namespace_key", "blocks")
    op.create_unique_constraint("uq_blocks_namespace_key_part", "blocks", ["namespace", "key", "part"])


def _rebuild() -> None:
    """SQLite changes no constraint of a table that is there, and cascades when one is dropped."""
    op.rename_table("blocks", "old_blocks")
    op.create_table(
        "blocks",
        sa.Column("id", BIG, nullable=False),
        sa.Column("namespace", TEXT, nullable=False),
        sa.Column("key", sa.LargeBinary(), nullable=False),
        sa.Column("record", sa.LargeBinary(), nullable=False),
        sa.Column("start", BIG, nullable=False),
        sa.Column("stop", BIG, nullable=False),
        sa.Column("part", sa.SmallInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_blocks"),
        sa.UniqueConstraint("namespace", "key", "part", name="uq_blocks_namespace_key_part"),
    )
    op.execute("INSERT INTO blocks SELECT id, namespace, key, record, start, stop, 0 FROM old_blocks")
    for name in REFERRING:
        op.rename_table(name, f"old_{name}")
    op.create_table(
        "block_chunks",
        sa.Column("block_id", BIG, nullable=False),
        sa.Column("chunk_id", BIG, nullable=False),
        sa.ForeignKeyConstraint(["block_id"], ["blocks.id"], name="fk_block_chunks_block_id", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["chunk_id"], ["chunks.id"], name="fk_block_chunks_chunk_id"),
        sa.PrimaryKeyConstraint("block_id", "chunk_id", name="pk_block_chunks"),
        sqlite_with_rowid=False,
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
    for name, (columns, indexed) in REFERRING.items():
        listed = ", ".join(columns)
        op.execute(f"INSERT INTO {name} ({listed}) SELECT {listed} FROM old_{name}")
        op.drop_table(f"old_{name}")
        op.create_index(f"ix_{name}_{'_'.join(indexed)}", name, list(indexed))
    op.drop_table("old_blocks")
