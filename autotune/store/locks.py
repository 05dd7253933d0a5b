"""Locks of a database, which end with the process that holds them.

| database   | lock                                                                              |
|------------|-----------------------------------------------------------------------------------|
| PostgreSQL | an advisory lock of a transaction, which the server ends with its connection      |
| SQLite     | of a file beside the database, `autotune.db-ask.lock`, which the kernel lets go   |
| others     | none: two processes at the same moment may do the same                            |
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from autotune.errors import StorageError
from autotune.store.database import ELSEWHERE, file_of

if TYPE_CHECKING:
    from sqlalchemy import Engine

_DEAD_PEER = {"tcp_keepalives_idle": 15, "tcp_keepalives_interval": 5, "tcp_keepalives_count": 3}
"""TCP keepalive settings of a connection that holds a lock: seconds, seconds, packets. A server waits two
hours, by Linux's default, before it takes a machine that lost its power with a lock for dead (PostgreSQL
16, "TCP Settings")."""


@contextlib.contextmanager
def exclusive(engine: Engine, purpose: str, what: str) -> Iterator[None]:
    """Hold the lock of that purpose, waiting for it: on PostgreSQL of `what` alone, on SQLite of all.

    `purpose` is part of a file's name. The same purpose must not be locked again inside the `with` block.
    Raises StorageError where the lock's file cannot be made.
    """
    if engine.dialect.name == "postgresql":
        with _advisory(engine, purpose, what):
            yield
        return
    file = file_of(engine.url)
    if file is None:
        yield
        return
    with _of_file(f"{file}-{purpose}.lock"):
        yield


@contextlib.contextmanager
def _advisory(engine: Engine, purpose: str, what: str) -> Iterator[None]:
    import sqlalchemy

    with engine.begin() as connection:
        for name, value in _DEAD_PEER.items():
            connection.execute(sqlalchemy.text(f"SET LOCAL {name} = {value}"))
        # PostgreSQL's keys are signed integers of 64 bits; two alike would only wait in vain.
        digest = hashlib.sha256(f"autotune {purpose} {what}".encode()).digest()[:8]
        key = sqlalchemy.cast(int.from_bytes(digest, signed=True), sqlalchemy.BigInteger)
        connection.execute(sqlalchemy.select(sqlalchemy.func.pg_advisory_xact_lock(key)))
        yield


@contextlib.contextmanager
def _of_file(path: str) -> Iterator[None]:
    import filelock

    lock = filelock.FileLock(path)
    try:
        lock.acquire()
    except OSError as error:
        raise StorageError(
            f"{path} cannot be locked",
            why=error.strerror or str(error),
            remedy=f"Check the permissions of its folder, {ELSEWHERE}",
        ) from error
    try:
        yield
    finally:
        lock.release()
