"""Traces that were made before, in table `autotune_traces`: a search that was made once needs no torch.

A trace depends on what was asked for, the libraries' versions and autotune's own code, all of which are
in its key. It is a cache: where the database refuses, traces are made again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import zlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from autotune.catalogue import installed
from autotune.errors import StorageError
from autotune.space.knobs import KNOBS
from autotune.store.database import file_of, parse_url
from autotune.store.probe_table import ROWS_AT_ONCE
from autotune.store.upgrade import open_engine

_ELSEWHERE = ("cli", "export", "migrations", "nightly", "report")
"""Folders of the package that no trace depends on."""


class TraceTable:
    """What workers answered, by what they were asked."""

    def __init__(self, url: str) -> None:
        """Nothing is opened, or made, before there is something to keep."""
        self._url = url

    def find(self, requests: Collection[str]) -> dict[str, dict[str, Any]]:
        """The answers that are there, by request; none where the database refuses."""
        import sqlalchemy

        from autotune.store.schema import traces

        found: dict[str, dict[str, Any]] = {}
        of_key = {_key(request): request for request in requests}
        keys = list(of_key)
        with suppress(StorageError):
            file = file_of(parse_url(self._url))
            if file is not None and not file.exists():
                return found
            with open_engine(self._url) as engine, engine.connect() as connection:
                for first in range(0, len(keys), ROWS_AT_ONCE):
                    page = traces.c.key.in_(keys[first : first + ROWS_AT_ONCE])
                    query = sqlalchemy.select(traces.c.key, traces.c.answer).where(page)
                    for key, answer in connection.execute(query):
                        with suppress(ValueError, zlib.error):
                            found[of_key[key]] = json.loads(zlib.decompress(answer))
        return found

    def add(self, answers: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep what workers answered. What the database refuses is not kept."""
        from sqlalchemy.dialects import postgresql, sqlite

        from autotune.store.schema import traces, utc_now

        rows = [
            {
                "key": _key(request),
                "made_at": utc_now(),
                "answer": zlib.compress(json.dumps(answer).encode(), 1),
            }
            for request, answer in answers.items()
        ]
        with suppress(StorageError), open_engine(self._url) as engine, engine.begin() as connection:
            # Another process may have kept the same meanwhile: MySQL and others refuse all then.
            module = {"postgresql": postgresql, "sqlite": sqlite}.get(engine.dialect.name)
            if module is None:
                connection.execute(traces.insert(), rows)
            else:
                connection.execute(module.insert(traces).on_conflict_do_nothing(), rows)


def _key(request: str) -> str:
    return hashlib.sha256(f"{_made_by()} {request}".encode()).hexdigest()


@functools.cache
def _made_by() -> str:
    """Versions and code that traces depend on, as a digest."""
    digest = hashlib.sha256()
    try:
        digest.update(repr(installed.versions()).encode())
    except metadata.PackageNotFoundError as error:
        digest.update(repr(error.name).encode())
    libraries = sorted({name for knob in KNOBS.values() for name in knob.needs.values() if name})
    digest.update(repr([(name, installed.version(name)) for name in libraries]).encode())
    package = Path(__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        if file.relative_to(package).parts[0] not in _ELSEWHERE:
            digest.update(file.read_bytes())
    return digest.hexdigest()
