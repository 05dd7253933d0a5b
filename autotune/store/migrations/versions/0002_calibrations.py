"""The table of calibrations."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "autotune_calibrations",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("device", sa.Text, nullable=False),
        sa.Column("made_at", sa.DateTime, nullable=False),
        sa.Column("record", sa.Text, nullable=False),
    )
