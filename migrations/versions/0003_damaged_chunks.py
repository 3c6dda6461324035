"""Chunks that artifacts refer to and whose bytes are damaged get a state of their own.

Revision: 0003
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Loose, doomed and abandoned chunks make room, the last one first.
    for state in (5, 4, 3):
        op.execute(f"UPDATE chunks SET state = {state + 1} WHERE state = {state}")
    op.execute(
        "UPDATE chunks SET state = 3 WHERE state = 0 AND ("
        "EXISTS (SELECT 1 FROM block_chunks WHERE block_chunks.chunk_id = chunks.id) OR "
        "EXISTS (SELECT 1 FROM artifact_token_chunks WHERE artifact_token_chunks.chunk_id = chunks.id))"
    )
