"""An index says whether it knows all that its store holds.

Revision: 0005
"""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("INSERT INTO meta (name, value) SELECT 'complete', '' FROM meta WHERE name = 'repository_id'")
