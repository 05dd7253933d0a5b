"""The tables of our own, beside Optuna's in the same database, as the newest revision makes them.

`autotune_probes`, `autotune_calibrations` and `autotune_recommendations` only grow: no row is ever changed or
removed. A row of `autotune_jobs` changes until its job has ended. Each table is read by a module of its own
(probe_table.py, calibrations.py, recommendations.py). What comes between the versions of this schema
is in migrations/; autotune_schema holds the revision (Optuna owns `alembic_version`).

Times are UTC, without saying so, as Optuna's are.
"""

from __future__ import annotations

import datetime

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

HEAD = "0003"
"""The newest revision of migrations/versions."""
VERSION_TABLE = "autotune_schema"

_DIGEST = String(64)
"""SHA-256, in hexadecimal digits."""

metadata = MetaData()

probes = Table(
    "autotune_probes",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("key", _DIGEST, nullable=False, index=True),
    Column("made_at", DateTime, nullable=False),
    Column("outcome", String(16), nullable=False),
    # The Measurement as JSON.
    Column("record", Text, nullable=False),
    # What was measured, on which device: what probes of the same card have in common.
    Column("near_key", _DIGEST, nullable=False, server_default=""),
    # Of the model's configuration.
    Column("model_digest", _DIGEST, nullable=False, server_default=""),
    Column("fingerprint", _DIGEST, nullable=False, server_default=""),
    Column("device", Text, nullable=False, server_default=""),
    Column("model", Text, nullable=False, server_default=""),
    # Of a probe that failed.
    Column("stderr_tail", Text, nullable=False, server_default=""),
    Index("ix_autotune_probes_near_key", "near_key", "model_digest", "fingerprint"),
)

calibrations = Table(
    "autotune_calibrations",
    metadata,
    Column("id", Integer, primary_key=True),
    # The card, as NVML names it.
    Column("device", Text, nullable=False),
    Column("made_at", DateTime, nullable=False),
    # The Calibration as JSON.
    Column("record", Text, nullable=False),
)

recommendations = Table(
    "autotune_recommendations",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("question_key", _DIGEST, nullable=False),
    Column("question", Text, nullable=False),
    Column("device", Text, nullable=False),
    Column("fingerprint", Text, nullable=False),
    Column("made_at", DateTime, nullable=False),
    Column("study", Text, nullable=False),
    Column("evidence", String(16), nullable=False),
    Column("tokens_per_second", Float(53)),
    Column("spread", Float(53)),
    Column("peak_device_bytes", BigInteger),
    Column("config", Text, nullable=False),
    Column("result", Text, nullable=False),
    Column("reason", String(32), nullable=False),
    Index("ix_autotune_recommendations_question", "question_key", "device", "made_at"),
)


def utc_now() -> datetime.datetime:
    """The time now in UTC without a time zone, as the tables hold it."""
    return datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
