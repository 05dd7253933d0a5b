"""The table of probes as the first releases made it, without Alembic."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "autotune_probes",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("key", sa.String(64), nullable=False, index=True),
        sa.Column("made_at", sa.DateTime, nullable=False),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("record", sa.Text, nullable=False),
    )
