"""Traces that were made before, in table `autotune_traces`: a search that was made once needs no torch.

A trace depends on its request, the libraries' versions and the code that traces, all of which are in its key.
That code is one module and all that it imports of this package. It is a cache: where the database refuses,
traces are made again.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
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
from autotune.store.database import file_of, parse_url
from autotune.store.probe_table import ROWS_AT_ONCE
from autotune.store.upgrade import open_engine

_PACKAGE = "autotune"
_TRACER = "autotune.worker.trace.step"


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
    for _, file in sorted(_sources(_TRACER).items()):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _sources(module: str) -> dict[str, Path]:
    """The files of a module and of all that it imports of this package, however deep, by module."""
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = None if name in found else _file_of(name)
        if file is not None:
            found[name] = file
            waiting += _imported_by(file)
    return found


def _file_of(module: str) -> Path | None:
    """The file of a module of this package; None for any other.

    The package itself has none here: it imports all, and only when asked.
    """
    package, *names = module.split(".")
    if package != _PACKAGE or not names:
        return None
    path = Path(str(resources.files(_PACKAGE)), *names)
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def _imported_by(file: Path) -> Iterator[str]:
    """Names that a file's imports may load, with the packages around them; some are names of no module."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            yield from itertools.accumulate(name.split("."), "{}.{}".format)
