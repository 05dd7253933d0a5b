"""Journal of what is under way on a machine, so that whatever ends a night at any moment costs it nothing.

`nightly.json` in the machine's folder: the cells that were begun, and the repeated measurements that no
recommendation has yet. Written whole, beside its place, and moved there. Several threads may use one.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock

from autotune.errors import StorageError
from autotune.export import write_texts
from autotune.records.fingerprint import Fingerprint
from autotune.space.config import TrainConfig
from autotune.store.database import file_of, parse_url

FILE = "nightly.json"
LOCK = "nightly.lock"
LIFETIME_SECONDS = 12 * 3600.0
"""Seconds that repeated measurements last: older ones are another night's."""


class Journal:
    """The file of a machine's night."""

    def __init__(self, folder: Path, now: datetime.datetime) -> None:
        self._path = folder / FILE
        self._now = now
        self._lock = threading.RLock()
        self._cells: dict[str, dict[str, Any]] = {}
        # Without it, or with one that was damaged, cells start afresh: the probes are in the database.
        with contextlib.suppress(OSError, ValueError):
            read = json.loads(self._path.read_text(encoding="utf-8"))
            if isinstance(read, dict) and isinstance(read.get("begun"), dict):
                self._cells = {k: v for k, v in read["begun"].items() if isinstance(v, dict)}

    @property
    def begun(self) -> dict[str, int]:
        """Return the cells whose search has begun and not ended; how often whatever ran it died over it."""
        return {
            name: deaths if type(deaths := cell.get("deaths")) is int else 0
            for name, cell in self._cells.items()
            if cell.get("searches")
        }

    def begin(self, name: str, *, searches: bool) -> None:
        """Count the cell's run as a death, until `pause` or `end` says otherwise."""
        with self._lock:
            deaths = self.begun.get(name, 0) + 1
            cell = self._cells.setdefault(name, {})
            cell |= {"searches": searches or bool(cell.get("searches")), "deaths": deaths}
            self._write()

    def pause(self, name: str) -> None:
        """Record that the cell's run was stopped in good order, and goes on another time."""
        with self._lock:
            self._cells.get(name, {})["deaths"] = 0
            self._write()

    def end(self, name: str) -> None:
        """Record that all of the cell's run is in the database."""
        with self._lock:
            self._cells.pop(name, None)
            self._write()

    def speeds(self, name: str, config: TrainConfig, fingerprint: Fingerprint) -> list[float]:
        """Return tokens per second that this night, begun before, measured of that configuration."""
        found = self._cells.get(name, {}).get("speeds", {}).get(_key(config, fingerprint), {})
        try:
            at = datetime.datetime.fromisoformat(found["at"])
            if abs((self._now - at).total_seconds()) > LIFETIME_SECONDS:
                return []
            return [float(speed) for speed in found["speeds"] if speed > 0]
        except (KeyError, TypeError, ValueError):
            return []

    def keep(
        self, name: str, config: TrainConfig, fingerprint: Fingerprint, speeds: list[float]
    ) -> None:
        key, at = _key(config, fingerprint), self._now.isoformat()
        with self._lock:
            is_more = bool(self.speeds(name, config, fingerprint))
            known = self._cells.setdefault(name, {}).setdefault("speeds", {})
            if is_more:
                at = known[key]["at"]
            known[key] = {"at": at, "speeds": list(speeds)}
            self._write()

    def _write(self) -> None:
        text = json.dumps({"begun": self._cells}, indent=1, sort_keys=True) + "\n"
        write_texts({self._path: text})


def _key(config: TrainConfig, fingerprint: Fingerprint) -> str:
    return f"{config!r} {fingerprint!r}"


@contextmanager
def locked(storage: str, out: Path) -> Iterator[None]:
    """Hold this machine's lock: beside an SQLite database, else in `out`. Raises StorageError.

    The kernel lets go of it when the process ends, however it does. Two machines that share a
    PostgreSQL each hold their own: their nights are two.
    """
    database = file_of(parse_url(storage))
    folder = out if database is None else database.parent
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path, timeout=0)
        lock.acquire()
    except filelock.Timeout:
        raise StorageError(
            "Another autotune nightly is running here",
            why=f"It holds {path}",
            remedy="Wait for it to end: two at once would slow each other's measurements",
        ) from None
    except (OSError, NotImplementedError) as error:
        raise StorageError(
            f"The lock {path} cannot be taken",
            why=getattr(error, "strerror", None) or str(error),
            remedy="Check the folder's permissions",
        ) from error
    try:
        yield
    finally:
        lock.release()
