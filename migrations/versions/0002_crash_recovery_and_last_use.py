"""Documents about to be written, and when an artifact was last used.

Revision: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "unsettled",
        sa.Column("operation", TEXT, nullable=False),
        sa.Column("kind", TEXT, nullable=False),
        sa.Column("namespace", TEXT, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.PrimaryKeyConstraint("operation", "kind", "namespace", "name", name="pk_unsettled"),
    )
    op.create_index("ix_artifacts_digest", "artifacts", ["digest"])
    op.add_column("artifacts", sa.Column("last_used_at", BIG, nullable=True))
