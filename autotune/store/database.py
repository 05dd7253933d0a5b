"""Opens databases at SQLAlchemy URLs, and explains in one line whatever they refuse.

SQLite is opened in WAL mode and waits for another process that writes. A password in an address is never
repeated: not in a message, not in a name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from autotune.common import files
from autotune.common.secrets import redacted
from autotune.errors import StorageError

if TYPE_CHECKING:
    from sqlalchemy import URL

T = TypeVar("T")

DEFAULT_URL = "sqlite:///studies/autotune.db"

PREFIX = "autotune_"
"""Prefix of the names of our own tables."""
_OF_THE_MOMENT = (
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR,
)  # fmt: skip
BUSY_SECONDS = 5.0
"""How long a statement waits for another process to finish writing to SQLite."""
_AGAIN_SECONDS = 0.01
CONNECT_SECONDS = 10
SQLITE_PRAGMAS = ["journal_mode=WAL", "synchronous=NORMAL"]
"""Readers need not wait for a writer; a crash of the machine loses the last commits, no more."""
DURABLE_PRAGMA = "synchronous=FULL"
"""Durability of our own tables, probes among them: what is committed is on the disk, whatever happens next
(https://www.sqlite.org/pragma.html#pragma_synchronous). It costs a few milliseconds, beside a probe's
seconds."""

ROWS_AT_ONCE = 500
"""Fewer than SQLite allows parameters in a statement."""

_DRIVERS_WITH_CONNECT_TIMEOUT = ("psycopg", "psycopg2", "pymysql", "mysqldb")

_EXPLANATIONS = (
    # part of the driver's message, why, remedy
    ("readonly database", "It cannot be written to", "Make it writable"),
    (
        "unable to open",
        "Its file cannot be opened",
        "Check the permissions, also of its folder: SQLite writes there even to read",
    ),
    (
        "file is not a database",
        "The file is damaged or is not SQLite's; it was left as it is",
        "Restore it from a copy",
    ),
    (
        "malformed",
        "The file is damaged; it was left as it is",
        "Restore it from a copy",
    ),
    (
        "no such table",
        "It lacks a table that it was made with; it was left as it is",
        "Restore it from a copy",
    ),
    (
        "no such column",
        "It lacks a column that it was made with; it was left as it is",
        "Restore it from a copy",
    ),
    ("is locked", "Another process is writing to it", "Try again when that has finished"),
    (
        "Can't load plugin",
        "SQLAlchemy knows no database of that name",
        "Begin it with sqlite:/// or postgresql+psycopg://",
    ),
    ("Can't reconnect until", "The connection to its server was lost", "Try again when it runs"),
    ("disk is full", "The disk is full; nothing stored is lost", "Free some space and try again"),
)
ELSEWHERE = "or choose another database with --storage"


def shown_url(url: str) -> str:
    """Return the address without its secrets: all that comes before its @, and secret parameters."""
    return redacted(url.rpartition("@")[2])


def named(url: URL) -> str:
    """Return the address as messages show it, its secrets masked."""
    # `str` hides the password before the @.
    return redacted(str(url))


def holds_password(url: URL) -> bool:
    """Whether the address holds a password, or a parameter whose name says that it is secret."""
    return any(_secrets(url))


def _secrets(url: URL) -> Iterator[str]:
    if isinstance(url.password, str) and url.password:
        yield url.password
    for name, value in url.query.items():
        if redacted(f"{name}=it") != f"{name}=it":
            yield from (value,) if isinstance(value, str) else value


def parse_url(url: str) -> URL:
    """Parse the address of a database, without asking whether there is one.

    Raises StorageError for an address that no database can have.
    """
    import sqlalchemy

    # What follows the scheme may hold a password, so it is not repeated.
    shown = url.partition(":")[0][:80]
    what = f'The database address "{shown}{"" if shown == url else "..."}"'
    try:
        url.encode()
        parsed = sqlalchemy.make_url(url)
        if file_of(parsed) is not None:  # No shell knows the ~ of sqlite:///~/autotune.db.
            parsed = parsed.set(database=os.path.expanduser(parsed.database or ""))
        file = file_of(parsed)
        if file is not None:
            _check_file_name(file)
    except UnicodeEncodeError:
        raise StorageError(f"{what} cannot be read", why="It is not UTF-8 text") from None
    except OSError as error:
        raise StorageError(f"{what} cannot be used", why=error.strerror or "") from None
    except (sqlalchemy.exc.ArgumentError, ValueError):
        raise StorageError(
            f"{what} cannot be read",
            remedy=f"Write it as SQLAlchemy does: sqlite:///{url}"
            if shown == url != ""
            else "Write it as SQLAlchemy does, such as sqlite:///studies/autotune.db",
        ) from None
    return parsed


def _check_file_name(file: Path) -> None:
    """Check that a file can have this name.

    Raises OSError for a name that is too long, and ValueError for one with a zero byte in it.
    """
    try:
        os.lstat(file)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise


def file_of(url: URL) -> Path | None:
    """The file of an SQLite database; None for a server, and for a database in memory."""
    name = url.database or ""
    if name.startswith("file:"):
        # A URI of SQLite's own: file:a%20b.db, file:///tmp/a.db, file:x?mode=memory.
        name = unquote(name.removeprefix("file:").removeprefix("//").partition("?")[0])
    is_file = url.get_backend_name() == "sqlite" and name not in ("", ":memory:")
    return Path(name) if is_file and url.query.get("mode") != "memory" else None


def make_folder(url: URL) -> None:
    file = file_of(url)
    if file is None:
        return
    try:
        files.make_folder(file.parent)
    except OSError as error:
        raise StorageError(
            f"The folder of the database {named(url)} cannot be created",
            why=error.strerror or str(error),
            remedy=f"Check its permissions, {ELSEWHERE}",
        ) from error


def check_place(url: URL) -> None:
    """Check that a database can be kept there, before anything is. Raises StorageError."""
    refuse_memory(url)
    file = file_of(url)
    if file is not None and not file.exists():
        files.check_folder(
            file.parent,
            what=f"The database {named(url)}",
            remedy=f"Check its permissions, {ELSEWHERE}",
        )


def refuse_memory(url: URL) -> None:
    """Refuse an SQLite database in memory: whoever opens it has an empty one of their own.

    Raises StorageError.
    """
    if url.get_backend_name() == "sqlite" and file_of(url) is None:
        raise StorageError(
            f"The database {named(url)} cannot be used",
            why="It is in memory, where nothing stays",
            remedy="Name a file, such as sqlite:///studies/autotune.db",
        )


def refuse_stranger(url: URL, tables: Collection[str]) -> None:
    """Refuse an SQLite file that holds tables of another program only, neither Optuna's nor ours.

    Raises StorageError.
    """
    is_known = not tables or "studies" in tables or any(t.startswith(PREFIX) for t in tables)
    if url.get_backend_name() == "sqlite" and not is_known:
        raise StorageError(
            f"The database {named(url)} cannot be used",
            why="It belongs to another program; it was left as it is",
            remedy="Choose another with --storage",
        )


def pages(values: Iterable[T]) -> Iterator[list[T]]:
    """Yield the values in lists of ROWS_AT_ONCE: so many as one statement takes."""
    for _, page in groupby(enumerate(values), key=lambda pair: pair[0] // ROWS_AT_ONCE):
        yield [value for _, value in page]


def engine_options(url: URL, *, durable: bool = False) -> dict[str, Any]:
    """Return the arguments of SQLAlchemy's `create_engine` beside the address.

    `durable`: SQLite waits for the disk at each commit.
    """
    if url.get_backend_name() == "sqlite":
        factory = _DurableConnection if durable else _SqliteConnection
        return {"connect_args": {"timeout": BUSY_SECONDS, "factory": factory}}
    # Without it, an address where nobody answers is waited for during minutes.
    timed = url.get_driver_name() in _DRIVERS_WITH_CONNECT_TIMEOUT
    return {"connect_args": {"connect_timeout": CONNECT_SECONDS}} if timed else {}


@contextlib.contextmanager
def explained(url: URL) -> Iterator[None]:
    """Turn what Optuna, SQLAlchemy and the driver raise into a StorageError of one line."""
    import optuna
    import sqlalchemy

    try:
        yield
    except ImportError as error:
        raise StorageError(
            f"The database {named(url)} cannot be opened",
            why=str(error),
            remedy=f"Install the driver that SQLAlchemy asks for, {ELSEWHERE}",
        ) from error
    except (optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError) as error:
        message = _driver_message(error)
        for secret in filter(None, _secrets(url)):
            message = message.replace(secret, "***")
        known = ((why, remedy) for part, why, remedy in _EXPLANATIONS if part in message)
        is_file = url.get_backend_name() == "sqlite"
        check = "that its disk has room" if is_file else "that its server runs"
        why, remedy = next(known, (message, f"Check its address, and {check}"))
        raise StorageError(
            f"The database {named(url)} cannot be used", why=why, remedy=f"{remedy}, {ELSEWHERE}"
        ) from error


def may_pass(error: StorageError) -> bool:
    """Whether an error of SQLite's is one of the moment: a lock, or a disk that is full or fails."""
    cause: BaseException | None = error
    while cause is not None:
        original = getattr(cause, "orig", None)
        if isinstance(original, sqlite3.OperationalError):
            # What Python cannot decode has no code.
            return getattr(original, "sqlite_errorcode", 0) & 0xFF in _OF_THE_MOMENT
        cause = cause.__cause__
    return False


@contextlib.contextmanager
def damage_explained(url: URL) -> Iterator[None]:
    """Turn the exceptions that a damaged value causes into a StorageError.

    For code that only reads: around anything else it would hide mistakes.
    """
    try:
        yield
    except (
        ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
        AssertionError,  # Optuna asserts what it reads.
    ) as error:  # fmt: skip
        said = f" ({str(error)[:200]})" if str(error) else ""
        raise StorageError(
            f"The database {named(url)} cannot be read",
            why=f"Something in it is damaged, and was left as it is{said}",
            remedy=f"Restore it from a copy, {ELSEWHERE}",
        ) from error


def _driver_message(error: BaseException) -> str:
    """The first line of what the driver said, from under the wrappings of the libraries."""
    cause: BaseException | None = error
    while cause is not None:
        original = getattr(cause, "orig", None)
        if original is not None:
            return str(original).partition("\n")[0][:300]
        error, cause = cause, cause.__cause__
    return str(error).partition("\n")[0][:300]


class _SqliteConnection(sqlite3.Connection):
    """A connection that applies SQLITE_PRAGMAS, whichever engine opens it."""

    is_durable = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        try:
            for pragma in (*SQLITE_PRAGMAS, *((DURABLE_PRAGMA,) if self.is_durable else ())):
                self._apply(pragma)
        except Exception:  # Not sqlite3's own alone: its message may be no UTF-8.
            # Nobody gets this connection, so that nobody else could close it.
            self.close()
            raise

    def _apply(self, pragma: str) -> None:
        """Apply a pragma. SQLite does not wait by itself where others open a new file at the same time."""
        until = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                self.execute(f"PRAGMA {pragma}")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(_AGAIN_SECONDS)
            else:
                return


class _DurableConnection(_SqliteConnection):
    """A SQLite connection that applies DURABLE_PRAGMA as well."""

    is_durable = True
