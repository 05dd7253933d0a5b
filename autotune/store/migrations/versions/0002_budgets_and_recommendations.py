"""Probes that answer for other budgets; recommendations; traces.

A row keeps its key, which tells the model that it is of; what else it says is read off its record. A
record that cannot be read stays as it is, and is not found, as before.
"""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

from autotune.store.probe_key import columns_of

revision = "0002"
down_revision = "0001"

ROWS_AT_ONCE = 1000

_ADDED = (
    ("near_key", sa.String(64)),
    ("model_digest", sa.String(64)),
    ("fingerprint", sa.String(64)),
    ("device", sa.Text),
    ("model", sa.Text),
    ("stderr_tail", sa.Text),
)


def upgrade() -> None:
    for name, kind in _ADDED:
        op.add_column("autotune_probes", sa.Column(name, kind, nullable=False, server_default=""))
    _fill()
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


def _fill() -> None:
    """Fill the new columns of the rows that are there, some at a time: there may be a million."""
    names = ("id", "record", "near_key", "fingerprint", "device")
    probes = sa.table("autotune_probes", *map(sa.column, names))
    connection = op.get_bind()
    filled = ("near_key", "fingerprint", "device")
    update = (
        probes.update()
        .where(probes.c.id == sa.bindparam("of_id"))
        .values({name: sa.bindparam(name) for name in filled})
    )
    last_id = 0
    while True:
        page = sa.select(probes.c.id, probes.c.record).where(probes.c.id > last_id)
        rows = connection.execute(page.order_by(probes.c.id).limit(ROWS_AT_ONCE)).all()
        if not rows:
            return
        values = []
        for row_id, text in rows:
            try:
                values.append({"of_id": row_id, **columns_of(json.loads(text))})
            except ValueError:
                continue
        if values:
            connection.execute(update, values)
        last_id = rows[-1][0]
