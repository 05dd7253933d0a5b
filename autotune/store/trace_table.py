"""Traces that were made before, in table `autotune_traces`: a search that was made once needs no torch.

A trace depends on its request, the libraries' versions and the code that traces, all of which are in its key.
It is a cache: where the database refuses, traces are made again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from autotune.catalogue import installed
from autotune.errors import StorageError
from autotune.space.knobs import KNOBS
from autotune.store.database import file_of, pages, parse_url
from autotune.store.upgrade import open_engine

_CODE = (
    *("errors.py", "common", "memory", "catalogue", "space", "records"),
    *("worker/__init__.py", "worker/build", "worker/trace"),
)
"""Files and folders of the package that a process which traces imports from."""


class TraceTable:
    """The table of workers' answers to requests for traces."""

    def __init__(self, url: str) -> None:
        """Remember the address; the database is not opened, or made, before there is something to keep."""
        self._url = url

    def find(self, requests: Collection[str]) -> dict[str, dict[str, Any]]:
        """Find the answers that are stored, by request; none where the database refuses."""
        import sqlalchemy

        from autotune.store.schema import traces

        found: dict[str, dict[str, Any]] = {}
        of_key = {_key(request): request for request in requests}
        with suppress(StorageError):
            file = file_of(parse_url(self._url))
            if file is not None and not file.exists():
                return found
            with open_engine(self._url) as engine, engine.connect() as connection:
                for page in pages(of_key):
                    query = sqlalchemy.select(traces.c.key, traces.c.answer)
                    query = query.where(traces.c.key.in_(page))
                    for key, answer in connection.execute(query):
                        with suppress(ValueError, zlib.error):
                            found[of_key[key]] = json.loads(zlib.decompress(answer))
        return found

    def add(self, answers: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep what workers answered; nothing is kept where the database refuses."""
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


def table_of_prediction(url: str, *, is_kept: bool) -> TraceTable | None:
    """The table of a database file; None where there is no such file, or the database has a server.

    A prediction waits for no server. `is_kept`: it will be stored there, so that the file may be made.
    """
    with suppress(StorageError, OSError):
        file = file_of(parse_url(url))
        if file is not None and (is_kept or file.exists()):
            return TraceTable(url)
    return None


def _key(request: str) -> str:
    return hashlib.sha256(f"{_made_by()} {request}".encode()).hexdigest()


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


def _sources() -> Iterator[Path]:
    package = Path(str(resources.files("autotune")))
    for name in _CODE:
        place = package / name
        yield from sorted(place.rglob("*.py")) if place.is_dir() else [place]
