"""Traces and replays that were made before, in the user's cache: what was predicted once needs no torch.

A trace depends on its request, the libraries' versions and the code that traces, all of which are in its key;
a replay (autotune.predict.kept_replays) on what it replays and on the code.
Several processes may use the cache at once. Where it cannot be read or written, traces are made again and the
log says why; a damaged one starts afresh. What was used longest ago goes first when there is too much.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sqlite3
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from autotune.catalogue import installed
from autotune.common import files, json_lines, log
from autotune.space.knobs import KNOBS
from autotune.store.database import pages

_log = log.logger(__name__)

VARIABLE = "AUTOTUNE_CACHE"
MAX_BYTES = 256 * 2**20
"""Most bytes of traces that are kept. [judgement] The 62 of an 8B model in the default space take 0.6 MB."""
MAX_REPLAYS_BYTES = 2 * 2**20
"""Most bytes of replays that are kept. [judgement] One takes 0.2 kB, a search makes some tens."""
MAX_PRICES_BYTES = 16 * 2**20
"""Most bytes of prices that are kept. [judgement] Those of a trace on one card take some kB."""
MAX_QUESTIONS_BYTES = 10 * 2**10
"""Most bytes of notes of questions that were answered. [judgement] One takes ten or so."""
MAX_PICTURES_BYTES = 2**20
"""Most bytes of what models read of pictures. [judgement] One takes 0.3 kB."""
_BUSY_SECONDS = 5.0
_DAY_SECONDS = 86_400
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_TABLE = """
CREATE TABLE IF NOT EXISTS {table} (
    key BLOB PRIMARY KEY,
    used_at INTEGER NOT NULL,
    answer BLOB NOT NULL
)
"""
_HAS_TABLE = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
_TOO_MUCH = """
DELETE FROM {table} WHERE key IN (
    SELECT key FROM (
        SELECT key, sum(length(answer)) OVER (ORDER BY used_at DESC, rowid DESC) AS bytes FROM {table}
    ) WHERE bytes > ?
)
"""

_CODE = (
    *("errors.py", "common", "memory", "catalogue", "space", "records"),
    *("speed/__init__.py", "speed/origin.py"),
    *("worker/__init__.py", "worker/uncompiled.py", "worker/build", "worker/trace"),
    *("worker/client/__init__.py", "worker/client/libraries.py", "worker/client/orphans.py"),
    *("predict/__init__.py", "predict/steps.py", "predict/expandable_segments.py"),
    *("predict/kept_replays.py",),
)
"""Files and folders of the package that a process which traces imports from, and those that replay."""
_CODE_OF_PRICES = ("speed", "predict")
"""Folders that prices depend on besides."""


def folder() -> Path:
    """Return the user's cache folder: AUTOTUNE_CACHE, else autotune in XDG_CACHE_HOME."""
    given = os.environ.get(VARIABLE)
    return Path(given) if given else files.user_folder("XDG_CACHE_HOME", ".cache")


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """The contents of a cache."""

    num_traces: int
    num_replays: int
    file_bytes: int


class TraceCache:
    """A file of workers' answers to requests for traces, in a folder."""

    _table = "traces"
    _most_bytes = MAX_BYTES

    def __init__(self, place: Path | None = None, *, max_bytes: int | None = None) -> None:
        """Remember the folder, by default the user's; nothing is made before there is something to keep."""
        # The number is that of the table's form: autotunes with another one do not meet here.
        self.file = (folder() if place is None else place) / "traces-2.db"
        self._max_bytes = self._most_bytes if max_bytes is None else max_bytes

    def replays(self) -> ReplayCache:
        """Return the replays in the same folder."""
        return ReplayCache(self.file.parent)

    def prices(self) -> PriceCache:
        """Return the prices in the same folder."""
        return PriceCache(self.file.parent)

    def find(self, requests: Collection[str]) -> dict[str, dict[str, Any]]:
        """Find the answers that are kept, by request."""
        found: dict[str, dict[str, Any]] = {}
        for request, text in self.find_texts(requests).items():
            with suppress(ValueError):
                found[request] = json_lines.decode(text)
        return found

    def find_texts(self, requests: Collection[str]) -> dict[str, bytes]:
        """Find the answers that are kept, by request, as JSON: what is spoilt may be no JSON any more."""
        found: dict[str, bytes] = {}
        of_key = {self._key_of(request): request for request in requests}
        with self._or_a_note("read"):
            if not self.file.exists():
                return found
            with self._connection() as connection:
                if not connection.execute(_HAS_TABLE, (self._table,)).fetchone():
                    return found
                for keys in pages(of_key):
                    query = f"SELECT key, answer FROM {self._table} WHERE key IN ({_marks(keys)})"
                    for key, answer in connection.execute(query, keys):
                        with suppress(zlib.error):
                            found[of_key[key]] = zlib.decompress(answer)
                with suppress(
                    sqlite3.OperationalError
                ):  # what may only be read serves all the same
                    _touch(connection, self._table, map(self._key_of, found))
        return found

    def add(self, answers: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep what workers answered."""
        self.add_packed({request: json_lines.packed(answer) for request, answer in answers.items()})

    def add_packed(self, answers: Mapping[str, bytes]) -> None:
        """Keep what workers answered, which json_lines.packed has compressed."""
        now = int(time.time())
        rows = [(self._key_of(request), now, answer) for request, answer in answers.items()]
        with self._or_a_note("written"):
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._connection() as connection:
                connection.execute("PRAGMA auto_vacuum=FULL")
                connection.execute(_TABLE.format(table=self._table))
                connection.executemany(
                    f"INSERT OR REPLACE INTO {self._table} VALUES (?, ?, ?)", rows
                )
                connection.execute(_TOO_MUCH.format(table=self._table), (self._max_bytes,))

    def contents(self) -> Contents:
        """Count what is kept."""
        counts = dict.fromkeys(("traces", "replays"), 0)
        with self._or_a_note("read"):
            if self.file.exists():
                with self._connection() as connection:
                    for name in counts:
                        if connection.execute(_HAS_TABLE, (name,)).fetchone():
                            ((counts[name],),) = connection.execute(f"SELECT count(*) FROM {name}")
        file_bytes = self.file.stat().st_size if self.file.exists() else 0
        return Contents(
            num_traces=counts["traces"], num_replays=counts["replays"], file_bytes=file_bytes
        )

    def clear(self) -> None:
        """Remove what is kept, by older forms of the table too. Raises OSError."""
        for file in self.file.parent.glob("traces-*.db*"):
            file.unlink(missing_ok=True)

    def _key_of(self, request: str) -> bytes:
        return _key(request)

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Open the file for one transaction."""
        with contextlib.closing(sqlite3.connect(self.file, timeout=_BUSY_SECONDS)) as connection:
            # A power cut may spoil it, which is noticed: traces are made again.
            connection.execute("PRAGMA synchronous=OFF")
            with connection:
                yield connection

    @contextlib.contextmanager
    def _or_a_note(self, done: str) -> Iterator[None]:
        """Let nothing that befalls the file stop a prediction."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            is_damaged = getattr(error, "sqlite_errorcode", None) in _DAMAGED
            _log.info(
                "the cache of traces %s cannot be %s%s: %s",
                self.file,
                done,
                ", so it starts afresh" if is_damaged else "",
                error,
            )
            if is_damaged:
                with suppress(OSError):
                    self.clear()


class ReplayCache(TraceCache):
    """Replays, beside the traces in the same file."""

    _table = "replays"
    _most_bytes = MAX_REPLAYS_BYTES


class PriceCache(TraceCache):
    """Prices that were worked out of traces (autotune.predict.kept_prices), beside them in the same file."""

    _table = "prices"
    _most_bytes = MAX_PRICES_BYTES

    def _key_of(self, request: str) -> bytes:
        return _key(f"{_priced_by()} {request}")


class AnsweredQuestions(TraceCache):
    """Questions that were answered before: their traces are kept."""

    _table = "questions"

    def __init__(self, place: Path | None = None, *, max_bytes: int = MAX_QUESTIONS_BYTES) -> None:
        super().__init__(place, max_bytes=max_bytes)


class SeenPictures(TraceCache):
    """Answers about what models read of pictures."""

    _table = "pictures"
    _most_bytes = MAX_PICTURES_BYTES


def _touch(connection: sqlite3.Connection, table: str, keys: Iterable[bytes]) -> None:
    """Note that these are used: once a day, so that finding seldom writes."""
    now = int(time.time())
    for page in pages(keys):
        connection.execute(
            f"UPDATE {table} SET used_at = ? WHERE used_at < ? AND key IN ({_marks(page)})",
            (now, now - _DAY_SECONDS, *page),
        )


def _marks(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))


def _key(request: str) -> bytes:
    return hashlib.sha256(f"{_made_by()} {request}".encode()).digest()


@functools.cache
def _made_by() -> str:
    """A digest of the versions and the code that traces depend on."""
    digest = hashlib.sha256()
    try:
        digest.update(repr(installed.versions()).encode())
    except metadata.PackageNotFoundError as error:
        digest.update(repr(error.name).encode())
    libraries = sorted({name for knob in KNOBS.values() for name in knob.needs.values() if name})
    digest.update(repr([(name, installed.version(name)) for name in libraries]).encode())
    for file in _sources():
        digest.update(file.read_bytes())
    return digest.hexdigest()


@functools.cache
def _priced_by() -> str:
    """A digest of the code that prices depend on beside that of traces."""
    digest = hashlib.sha256()
    for file in _sources(_CODE_OF_PRICES):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _sources(names: Iterable[str] = _CODE) -> Iterator[Path]:
    package = Path(str(resources.files("autotune")))
    for name in names:
        place = package / name
        yield from sorted(place.rglob("*.py")) if place.is_dir() else [place]
