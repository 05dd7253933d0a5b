"""The tables of the first release."""

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
        sa.Column("near_key", sa.String(64), nullable=False, server_default=""),
        sa.Column("model_digest", sa.String(64), nullable=False, server_default=""),
        sa.Column("fingerprint", sa.String(64), nullable=False, server_default=""),
        sa.Column("device", sa.Text, nullable=False, server_default=""),
        sa.Column("model", sa.Text, nullable=False, server_default=""),
        sa.Column("stderr_tail", sa.Text, nullable=False, server_default=""),
    )
    op.create_index(
        "ix_autotune_probes_near_key",
        "autotune_probes",
        ["near_key", "model_digest", "fingerprint"],
    )
    op.create_table(
        "autotune_recommendations",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("question_key", sa.String(64), nullable=False),
        sa.Column("question", sa.Text, nullable=False),
        sa.Column("device", sa.Text, nullable=False),
        sa.Column("fingerprint", sa.Text, nullable=False),
        sa.Column("made_at", sa.DateTime, nullable=False),
        sa.Column("study", sa.Text, nullable=False),
        sa.Column("evidence", sa.String(16), nullable=False),
        sa.Column("tokens_per_second", sa.Float(53)),
        sa.Column("spread", sa.Float(53)),
        sa.Column("peak_device_bytes", sa.BigInteger),
        sa.Column("config", sa.Text, nullable=False),
        sa.Column("result", sa.Text, nullable=False),
        sa.Column("reason", sa.String(32), nullable=False),
    )
    op.create_index(
        "ix_autotune_recommendations_question",
        "autotune_recommendations",
        ["question_key", "device", "made_at"],
    )
    op.create_table(
        "autotune_traces",
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("made_at", sa.DateTime, nullable=False),
        sa.Column("answer", sa.LargeBinary, nullable=False),
    )
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
