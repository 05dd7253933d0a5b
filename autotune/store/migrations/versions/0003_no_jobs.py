"""No table of jobs: their answers are in the table of recommendations, as all answers are."""

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.drop_table("autotune_jobs")
