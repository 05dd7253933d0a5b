"""Every probe ever made, in the database of the studies: what was measured once is never made again.

One table, `autotune_probes`: a key, when, and the Measurement as JSON. The key says what a measurement
depends on: the model's configuration, the task, the TrainConfig, the budget, the backend, the
fingerprint, and the steps of a confirmation. A row is never changed or removed.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from autotune import locks
from autotune.config import TrainConfig
from autotune.results import (
    SCHEMA_VERSION,
    Fingerprint,
    Measurement,
    ProbeSpec,
    measurement_from_dict,
)
from autotune.store import explained, parse_url

REUSABLE = ("ok", "oom", "invalid")
"""Outcomes that another probe of the same would have too; the others are worth another try."""


def probe_key(
    model: Mapping[str, Any], config: TrainConfig, spec: ProbeSpec, fingerprint: Fingerprint
) -> str:
    """What a measurement depends on, as a digest.

    How long a probe was timed does not matter; a confirmation is another measurement.
    """
    parts = {
        "model": model,
        "config": config.to_dict(),
        "task": spec.task,
        "backend": spec.backend,
        "memory_budget_bytes": spec.memory_budget_bytes,
        "confirm_steps": spec.confirm_steps,
        "fingerprint": dataclasses.asdict(fingerprint),
        "schema_version": SCHEMA_VERSION,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class ProbeTable:
    """The probes of one database."""

    def __init__(self, engine: Any, table: Any) -> None:
        self._engine = engine
        self._table = table

    def find(self, key: str) -> Measurement | None:
        """The measurement of that key; None when there is none, or it is worth another try."""
        import sqlalchemy

        query = sqlalchemy.select(self._table.c.record).where(self._table.c.key == key)
        with self._engine.connect() as connection:
            for (record,) in connection.execute(query.order_by(self._table.c.id.desc())):
                # What cannot be read (another version's, say) stays, and the probe is made again.
                with suppress(ValueError):
                    measurement = measurement_from_dict(json.loads(record))
                    if measurement.outcome in REUSABLE:
                        return measurement
        return None

    def add(self, key: str, measurement: Measurement) -> None:
        """Keep a measurement; committed when this returns."""
        row = {
            "key": key,
            "made_at": datetime.datetime.now(datetime.UTC),
            "outcome": measurement.outcome,
            "record": json.dumps(measurement.to_dict()),
        }
        with self._engine.begin() as connection:
            connection.execute(self._table.insert().values(row))

    def exclusive(self, purpose: str, what: str) -> AbstractContextManager[None]:
        """The lock of the database with that purpose, as autotune.locks has it."""
        return locks.exclusive(self._engine, purpose, what)


@contextmanager
def open_probes(url: str) -> Iterator[ProbeTable]:
    """The table of the database at that address, created where it is missing.

    Raises StorageError for everything that the database refuses, inside the `with` block too.
    """
    import sqlalchemy

    from autotune.store import engine_options, make_folder

    parsed = parse_url(url)
    with explained(parsed):
        make_folder(parsed)
        engine = sqlalchemy.create_engine(parsed, **engine_options(parsed))
        try:
            table = sqlalchemy.Table(
                "autotune_probes",
                sqlalchemy.MetaData(),
                sqlalchemy.Column("id", sqlalchemy.Integer, primary_key=True),
                sqlalchemy.Column("key", sqlalchemy.String(64), nullable=False, index=True),
                sqlalchemy.Column("made_at", sqlalchemy.DateTime, nullable=False),
                sqlalchemy.Column("outcome", sqlalchemy.String(16), nullable=False),
                sqlalchemy.Column("record", sqlalchemy.Text, nullable=False),
            )
            table.metadata.create_all(engine)
            yield ProbeTable(engine, table)
        finally:
            engine.dispose()
