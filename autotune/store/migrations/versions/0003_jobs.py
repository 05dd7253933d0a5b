"""Jobs: questions that wait for a machine that can answer them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "autotune_jobs",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("card", sa.Text, nullable=False),
        sa.Column("budget_bytes", sa.BigInteger),
        sa.Column("question", sa.Text, nullable=False),
        sa.Column("command", sa.Text, nullable=False),
        sa.Column("asked_by", sa.Text, nullable=False),
        sa.Column("asked_at", sa.DateTime, nullable=False),
        sa.Column("worker", sa.Text, nullable=False, server_default=""),
        sa.Column("fingerprint", sa.String(64), nullable=False, server_default=""),
        sa.Column("heartbeat_at", sa.DateTime),
        sa.Column("num_claims", sa.Integer, nullable=False, server_default="0"),
        sa.Column("progress", sa.Text, nullable=False, server_default=""),
        sa.Column("ended_at", sa.DateTime),
        sa.Column("study", sa.Text, nullable=False, server_default=""),
        sa.Column("result", sa.Text),
        sa.Column("problem", sa.Text, nullable=False, server_default=""),
        sa.Column("exit_code", sa.Integer),
    )
    op.create_index("ix_autotune_jobs_state", "autotune_jobs", ["state", "card"])
