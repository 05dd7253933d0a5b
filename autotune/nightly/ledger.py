"""The nights of each cell in the database: a Recommendation each, with the Night in its `result`."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Sequence

from autotune.common import json_records
from autotune.nightly.history import MAX_NIGHTS, Night, night_from_dict
from autotune.nightly.matrix import Cell
from autotune.store.database import file_of, parse_url
from autotune.store.recommendations import Recommendation, open_recommendations, question_of

NIGHT = "nightly"
"""Key of a Recommendation's `result` that holds the Night."""


def nights(storage: str, cells: Sequence[Cell], machine: str | None) -> dict[str, list[Night]]:
    """Return the nights of each cell, by its name, oldest first; of any machine for None.

    Answers that `find` gave are no nights. A database that is not there holds none, and is not created.
    Raises StorageError.
    """
    path = file_of(parse_url(storage))
    if path is not None and not path.exists():
        return {cell.name: [] for cell in cells}
    found: dict[str, list[Night]] = {}
    now = datetime.datetime.now(datetime.UTC)
    with open_recommendations(storage) as table:
        for cell in cells:
            read = found[cell.name] = []
            for row in table.history(cell.key, machine, now=now):
                # What another version wrote stays, and is no history to this one.
                with contextlib.suppress(ValueError):
                    if NIGHT in row.result:
                        read.append(night_from_dict(row.result[NIGHT]))
            del read[:-MAX_NIGHTS]
    return found


def keep(storage: str, cell: Cell, night: Night, *, machine: str) -> None:
    """Keep another night of that machine; committed when this returns. Raises StorageError."""
    with open_recommendations(storage) as table:
        table.add(
            Recommendation(
                question_key=cell.key,
                question=question_of(cell.options),
                device=machine,
                fingerprint=night.fingerprint,
                made_at=night.at,
                study=night.study,
                evidence="measured",
                tokens_per_second=night.speed,
                spread=night.spread,
                peak_device_bytes=night.peak_device_bytes,
                config=night.config.to_dict(),
                result={NIGHT: json_records.plain(night)},
                reason=night.kind,
            )
        )
