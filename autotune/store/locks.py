"""Locks of a database, which end with the process that holds them.

| database   | lock                                                                              |
|------------|-----------------------------------------------------------------------------------|
| PostgreSQL | an advisory lock, which the server ends with its connection                       |
| SQLite     | of a file beside the database, `autotune.db-ask.lock`, which the kernel lets go   |
| others     | none: two processes at the same moment may do the same                            |

`exclusive` is for moments. `searching` is for the length of a search: a study has one searcher at a time.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from autotune.errors import StorageError
from autotune.store.database import ELSEWHERE, file_of

if TYPE_CHECKING:
    import optuna
    from sqlalchemy import Engine

SEARCHER = "searcher"
"""User attribute of a study: who searches in it, or did so last: host, pid, since."""
POLL_SECONDS = 1.0
"""Time between two attempts to get the lock of a study that another search holds."""

_DEAD_PEER = {"tcp_keepalives_idle": 15, "tcp_keepalives_interval": 5, "tcp_keepalives_count": 3}
"""TCP keepalive settings of a connection that holds a lock: seconds, seconds, packets. A server waits two
hours, by Linux's default, before it takes a machine that lost its power with a lock for dead (PostgreSQL
16, "TCP Settings")."""


@contextlib.contextmanager
def exclusive(engine: Engine, what: str) -> Iterator[None]:
    """Hold the lock, waiting for it: on PostgreSQL of `what` alone, on SQLite of all.

    It must not be locked again inside the `with` block. Raises StorageError where its file cannot be made.
    """
    if engine.dialect.name == "postgresql":
        with _advisory(engine, what):
            yield
        return
    file = file_of(engine.url)
    if file is None:
        yield
        return
    lock = _of_file(f"{file}-ask.lock", waits=True)
    try:
        yield
    finally:
        lock.release()


class StudyBusyError(StorageError):
    """Another process searches in the study."""


@contextlib.contextmanager
def searching(
    engine: Engine, study: optuna.Study, *, waits: bool, note: Callable[[str], None]
) -> Iterator[None]:
    """Be the one searcher of a study; `waits`: once the one who has it is done, which is noted.

    Raises StudyBusyError where another process has it.
    """
    with contextlib.ExitStack() as held:
        is_noted = False
        while not _got(engine, study.study_name, held):
            who = _words(study.user_attrs.get(SEARCHER))
            if not waits:
                raise StudyBusyError(
                    f'Another search works in the study "{study.study_name}"',
                    why=who,
                    remedy="Wait for it with --wait, or name another study with --study",
                )
            if not is_noted:
                note(f'waiting for the study "{study.study_name}": {who}.')
                is_noted = True
            time.sleep(POLL_SECONDS)
        since = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        me = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
        study.set_user_attr(SEARCHER, me)
        yield


def _words(who: Any) -> str:
    if not isinstance(who, dict):
        return "Who it is was not written down yet"
    return (
        f"Process {who.get('pid')} on {who.get('host')} has searched in it since {who.get('since')}"
    )


def _got(engine: Engine, study: str, held: contextlib.ExitStack) -> bool:
    """Try to get the lock of a study, for as long as `held` lasts."""
    if engine.dialect.name == "postgresql":
        import sqlalchemy

        connection = held.enter_context(
            engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        )
        for name, value in _DEAD_PEER.items():
            connection.execute(sqlalchemy.text(f"SET {name} = {value}"))
        query = sqlalchemy.select(sqlalchemy.func.pg_try_advisory_lock(_key("search", study)))
        if connection.execute(query).scalar():
            # The server ends it with the session: a pool would keep that for others.
            held.callback(connection.invalidate)
            return True
        held.close()
        return False
    file = file_of(engine.url)
    if file is None:
        return True
    digest = hashlib.sha256(study.encode()).hexdigest()[:12]
    lock = _of_file(f"{file}-search-{digest}.lock", waits=False)
    if not lock.is_locked:
        return False
    held.callback(lock.release)
    return True


@contextlib.contextmanager
def _advisory(engine: Engine, what: str) -> Iterator[None]:
    import sqlalchemy

    with engine.begin() as connection:
        for name, value in _DEAD_PEER.items():
            connection.execute(sqlalchemy.text(f"SET LOCAL {name} = {value}"))
        lock = sqlalchemy.func.pg_advisory_xact_lock(_key("ask", what))
        connection.execute(sqlalchemy.select(lock))
        yield


def _key(purpose: str, what: str) -> Any:
    """A key of PostgreSQL's, a signed integer of 64 bits; two alike would only wait in vain."""
    import sqlalchemy

    digest = hashlib.sha256(f"autotune {purpose} {what}".encode()).digest()[:8]
    return sqlalchemy.cast(int.from_bytes(digest, signed=True), sqlalchemy.BigInteger)


def _of_file(path: str, *, waits: bool) -> Any:
    """The lock of a file, got where it is free or `waits`."""
    import filelock

    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=-1 if waits else 0)
    except filelock.Timeout:
        pass
    except OSError as error:
        raise StorageError(
            f"{path} cannot be locked",
            why=error.strerror or str(error),
            remedy=f"Check the permissions of its folder, {ELSEWHERE}",
        ) from error
    return lock
