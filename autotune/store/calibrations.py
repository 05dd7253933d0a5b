"""Calibrations of this machine's cards, in a database of the user's own: predictions made here use them.

The table `autotune_calibrations` only grows, as that of the probes does: the newest row of a card counts, if
it was made at the same power limit and highest clocks. Another version of torch is said beside it.
Which database: AUTOTUNE_CALIBRATIONS, an address as --storage takes it; else autotune/autotune.db in
XDG_DATA_HOME. One without kernels is of the host alone, which searches time where there is none.
"""

from __future__ import annotations

import json
import os

from autotune.catalogue.nvml import CardIdentity
from autotune.common import files
from autotune.records.calibration import Calibration, calibration_from_dict
from autotune.store import database
from autotune.store.upgrade import open_engine

VARIABLE = "AUTOTUNE_CALIBRATIONS"


def address() -> str:
    """Return the address of the database."""
    folder = files.user_folder("XDG_DATA_HOME", ".local/share")
    return os.environ.get(VARIABLE) or f"sqlite:///{folder / 'autotune.db'}"


def add(calibration: Calibration, url: str | None = None) -> None:
    """Keep a calibration; committed when this returns. Raises StorageError."""
    from autotune.store.schema import calibrations, utc_now

    row = {
        "device": calibration.card.name,
        "made_at": utc_now(),
        "record": json.dumps(calibration.to_dict(), allow_nan=False),
    }
    with open_engine(url or address()) as engine, engine.begin() as connection:
        connection.execute(calibrations.insert().values(row))


def newest(card: CardIdentity, url: str | None = None) -> Calibration | None:
    """Return the newest calibration of a card; None where there is none. Raises StorageError.

    A row that cannot be read, another version's, say, is passed over. No database is made.
    """
    url = url or address()
    file = database.file_of(database.parse_url(url))
    if file is not None and not file.exists():
        return None
    from autotune.store.schema import calibrations

    query = calibrations.select().where(calibrations.c.device == card.name)
    with open_engine(url) as engine, engine.connect() as connection:
        for row in connection.execute(query.order_by(calibrations.c.id.desc())):
            try:
                found = calibration_from_dict(json.loads(row.record))
            except ValueError:
                continue
            if found.card.is_like(card):
                return found
    return None
