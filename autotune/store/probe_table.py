"""Every probe ever made, in the database of the studies: what was measured once is never made again.

One table, `autotune_probes`: what the measurement depends on (probe_key.py), when, the Measurement as
JSON, and what a probe that failed wrote last. A row is never changed or removed.

What was measured under one budget answers for others:

| measured under B             | answers for a budget b   | because                                     |
|------------------------------|--------------------------|---------------------------------------------|
| ok, no allocation retry      | any: its peak is p       | p <= b fits; where p > b, b forces a retry  |
| the same, where segments     | p <= b                   | below p they come and go as they did until  |
| grow                         |                          | B was met: how well, is not known           |
| ok, with retries             | b <= B                   | less memory forces them, too                |
| oom, at least e were lacking | b < B + e                | it needs B + e or more                      |
| invalid                      | any                      | what was asked for is not on at any budget  |
| slow                         | as ok, beside a faster   | it would be stopped again                   |
| timeout, crashed, ...        | none                     | it is worth another try                     |
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from autotune.records.measurement import Measurement, measurement_from_dict
from autotune.store.database import pages
from autotune.store.probe_key import ProbeKey
from autotune.store.upgrade import open_engine

if TYPE_CHECKING:
    from sqlalchemy import Engine

STDERR_TAIL_CHARS = 4000


class ProbeTable:
    """The probes of one database."""

    def __init__(self, engine: Engine) -> None:
        from autotune.store.schema import probes

        self._engine = engine
        self._table = probes

    def find(
        self, key: ProbeKey, budget_bytes: int, *, slow_below: float = 0.0
    ) -> Measurement | None:
        """The newest measurement of that key that answers for the budget, restated for that budget.

        None when there is none, or it is worth another try. `slow_below`: tokens per second; what was
        slower than that when it was stopped need not be measured to its end.
        """
        import sqlalchemy

        table = self._table
        query = sqlalchemy.select(table.c.record).where(
            table.c.near_key == key.near_key,
            table.c.model_digest == key.model_digest,
            table.c.fingerprint == key.fingerprint,
        )
        with self._engine.connect() as connection:
            for (text,) in connection.execute(query.order_by(table.c.id.desc())):
                measurement = _read(text)
                if measurement is None:
                    continue
                if measurement.outcome == "slow" and not _is_below(measurement, slow_below):
                    continue
                restated = for_budget(measurement, budget_bytes)
                if restated is not None:
                    return restated
        return None

    def near(self, keys: Mapping[ProbeKey, Hashable]) -> dict[Any, Measurement]:
        """The newest measurements of the same on the same device, with another driver or other libraries.

        Returned by what each key is given for in `keys`. Only runs that succeeded or ran out of memory count.
        """
        import sqlalchemy

        table = self._table
        asked = {key.near_key: (key, what) for key, what in keys.items()}
        newest: dict[str, int] = {}
        columns = (table.c.id, table.c.near_key, table.c.fingerprint)
        query = sqlalchemy.select(*columns).where(
            table.c.model_digest.in_({key.model_digest for key in keys}),
            table.c.outcome.in_(("ok", "oom")),
        )
        with self._engine.connect() as connection:
            for page in pages(asked):
                rows = connection.execute(
                    query.where(table.c.near_key.in_(page)).order_by(table.c.id.desc())
                )
                for row in rows:
                    if row.fingerprint != asked[row.near_key][0].fingerprint:
                        newest.setdefault(row.near_key, row.id)
            found: dict[Any, Measurement] = {}
            record = sqlalchemy.select(table.c.near_key, table.c.record).order_by(table.c.id)
            for numbers in pages(sorted(newest.values())):
                for near_key, text in connection.execute(record.where(table.c.id.in_(numbers))):
                    measurement = _read(text)
                    if measurement is not None:
                        found[asked[near_key][1]] = measurement
        return found

    def add(
        self, key: ProbeKey, measurement: Measurement, *, model: str = "", stderr_tail: str = ""
    ) -> None:
        """Keep a measurement; committed when this returns. `model` is what people call it."""
        from autotune.store.schema import utc_now

        row = {
            "key": key.digest,
            "near_key": key.near_key,
            "model_digest": key.model_digest,
            "fingerprint": key.fingerprint,
            "device": measurement.fingerprint.device,
            "model": model,
            "made_at": utc_now(),
            "outcome": measurement.outcome,
            "record": json.dumps(measurement.to_dict()),
            # PostgreSQL keeps no NUL.
            "stderr_tail": stderr_tail[-STDERR_TAIL_CHARS:].replace("\0", ""),
        }
        with self._engine.begin() as connection:
            connection.execute(self._table.insert().values(row))


def for_budget(measurement: Measurement, budget_bytes: int) -> Measurement | None:
    """The measurement restated for another budget; None where it does not answer for that."""
    probed_bytes = measurement.spec.memory_budget_bytes
    if not _answers(measurement, budget_bytes):
        return None
    if budget_bytes == probed_bytes:
        return measurement
    excess_bytes = measurement.excess_bytes
    if excess_bytes is not None:
        excess_bytes += probed_bytes - budget_bytes
    return dataclasses.replace(
        measurement,
        spec=dataclasses.replace(measurement.spec, memory_budget_bytes=budget_bytes),
        excess_bytes=excess_bytes,
        probed_budget_bytes=probed_bytes,
    )


def _answers(measurement: Measurement, budget_bytes: int) -> bool:
    """Whether a measurement answers for the budget, by the table at the top of this module."""
    probed_bytes = measurement.spec.memory_budget_bytes
    match measurement.outcome:
        case "ok" | "slow":
            if measurement.num_alloc_retries:
                return budget_bytes <= probed_bytes
            peak_bytes = measurement.peak_device_bytes
            grows = measurement.config.expandable_segments
            return not grows or (peak_bytes is not None and peak_bytes <= budget_bytes)
        case "oom":
            over_bytes = measurement.over_budget_bytes
            assert over_bytes is not None
            return budget_bytes < probed_bytes + over_bytes
        case outcome:
            return outcome == "invalid"


def _is_below(measurement: Measurement, tokens_per_second: float) -> bool:
    """Whether a stopped probe is slower than that speed by more than twice its standard error."""
    speed, spread = measurement.tokens_per_second, measurement.spread
    if speed is None or spread is None or measurement.peak_device_bytes is None:
        return False
    return speed * (1 + 2 * spread) < tokens_per_second


def _read(text: str) -> Measurement | None:
    """The measurement of a row; None for what cannot be read, another version's, say.

    Such a row stays, and the probe is made again.
    """
    try:
        return measurement_from_dict(json.loads(text))
    except ValueError:
        return None


@contextmanager
def open_probes(url: str) -> Iterator[ProbeTable]:
    """Open the table of probes in the database at that address, created where it is missing.

    Raises StorageError for everything that the database refuses, inside the `with` block too.
    """
    with open_engine(url) as engine:
        yield ProbeTable(engine)
