"""Addresses of databases, places for them, and connections to files that others hold."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import StorageError
from autotune.store import database
from autotune.store.database import parse_url


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "cannot be read"),
        ("studies.db", "cannot be read. Write it as SQLAlchemy does: sqlite:///studies.db"),
        ("a" * 81, "cannot be read"),
        ("sqlite:///a\0b.db", "cannot be read"),
        ("sqlite:///\ud800.db", "cannot be read. It is not UTF-8 text"),
        ("sqlite:///" + "a" * 300, "cannot be used. File name too long"),
        ("postgresql://me:secret@host:port/x", "cannot be read"),
    ],
)
def test_an_address_that_no_database_can_have(url: str, says: str) -> None:
    with pytest.raises(StorageError) as raised:
        parse_url(url)
    scheme, rest, _ = url.partition(":")
    shown = f"{scheme[:80]}..." if rest or len(url) > 80 else url
    assert str(raised.value).startswith(f'The database address "{shown}" {says}')
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "file"),
    [
        ("sqlite:///a.db", "a.db"),
        ("sqlite:////tmp/a.db", "/tmp/a.db"),
        ("sqlite:///~/a.db", "/home/me/a.db"),
        ("sqlite:///file:a%20b.db?uri=true", "a b.db"),
        ("sqlite:///file:///tmp/a.db?uri=true", "/tmp/a.db"),
        ("sqlite:///file:x?mode=memory&uri=true", None),
        ("sqlite://", None),
        ("sqlite:///:memory:", None),
        ("postgresql+psycopg://host/a.db", None),
    ],
)
def test_the_file_of_an_address(
    url: str, file: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    parsed = parse_url(url)
    assert database.file_of(parsed) == (None if file is None else Path(file))
    if file is None and url.startswith("sqlite"):
        for check in (database.refuse_memory, database.check_place):
            with pytest.raises(StorageError, match="It is in memory, where nothing stays"):
                check(parsed)
    else:
        database.refuse_memory(parsed)


def test_a_place_is_checked_where_there_is_no_file_yet(tmp_path: Path) -> None:
    database.check_place(parse_url(f"sqlite:///{tmp_path}/new/a.db"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    for name in ("file/a.db", "file/deeper/a.db"):
        url = parse_url(f"sqlite:///{tmp_path}/{name}")
        with pytest.raises(StorageError, match="The database sqlite:///") as raised:
            database.check_place(url)
        assert "--storage" in raised.value.remedy
    database.check_place(
        parse_url(f"sqlite:///{tmp_path}/file")
    )  # What is there is not asked here.
    database.check_place(parse_url("postgresql://host/a"))


@pytest.mark.parametrize(
    ("url", "shown", "is_secret"),
    [
        ("postgresql://me:pass@host/a", "host/a", True),
        ("postgresql://me@host/a", "host/a", False),
        ("postgresql://host/a?password=pass", "postgresql://host/a?password=***", True),
        ("postgresql://host/a?sslmode=pass", "postgresql://host/a?sslmode=pass", False),
        ("sqlite:///a.db", "sqlite:///a.db", False),
    ],
)
def test_secrets_of_an_address(url: str, shown: str, is_secret: bool) -> None:
    assert database.shown_url(url) == shown
    assert database.holds_password(parse_url(url)) == is_secret
    assert not is_secret or "pass@" not in database.named(parse_url(url))


class Busy(database._SqliteConnection):
    """A connection to a file that others open at the same time; `errors`: what its first commands raise."""

    errors: list[Exception] = []
    done: list[str] = []

    def execute(self, command: str, *arguments: Any) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        self.done.append(command)
        return super().execute(command, *arguments)


def failed(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("it failed")
    error.sqlite_errorcode = code
    return error


@contextmanager
def opened(kind: type[sqlite3.Connection]) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:", factory=kind)
    yield connection
    connection.close()


def test_a_file_that_others_open_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Busy, "done", [])
    snapshot = sqlite3.SQLITE_BUSY | 2 << 8  # SQLITE_BUSY_SNAPSHOT of sqlite3.h
    monkeypatch.setattr(Busy, "errors", [failed(sqlite3.SQLITE_BUSY), failed(snapshot)])
    with opened(Busy):
        assert Busy.done == [f"PRAGMA {each}" for each in database.SQLITE_PRAGMAS]
    for code in (sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL):
        monkeypatch.setattr(Busy, "errors", [failed(code)])
        with pytest.raises(sqlite3.OperationalError), opened(Busy):
            pass
    monkeypatch.setattr(database, "BUSY_SECONDS", -1.0)
    monkeypatch.setattr(Busy, "errors", [failed(sqlite3.SQLITE_BUSY)])
    with pytest.raises(sqlite3.OperationalError), opened(Busy):
        pass


@pytest.mark.parametrize("durable", [False, True])
def test_what_must_not_be_lost_waits_for_the_disk(durable: bool, tmp_path: Path) -> None:
    options = database.engine_options(parse_url("sqlite:///a.db"), durable=durable)
    connect_args = options["connect_args"]
    assert connect_args["timeout"] == database.BUSY_SECONDS
    connection = sqlite3.connect(tmp_path / "a.db", factory=connect_args["factory"])
    # https://www.sqlite.org/pragma.html#pragma_synchronous: 1 is NORMAL, 2 is FULL.
    assert connection.execute("PRAGMA synchronous").fetchone() == (1 + durable,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


@pytest.mark.parametrize(
    ("driver", "is_timed"),
    [("psycopg", True), ("psycopg2", True), ("asyncpg", False), ("pg8000", False)],
)
def test_a_server_that_does_not_answer_is_not_waited_for(driver: str, is_timed: bool) -> None:
    url = parse_url(f"postgresql+{driver}://host/a")
    try:
        options = database.engine_options(url)
    except ImportError:
        pytest.skip("the driver is not installed")
    seconds = database.CONNECT_SECONDS
    assert options == ({"connect_args": {"connect_timeout": seconds}} if is_timed else {})


@pytest.mark.parametrize("number", [0, 1, 499, 500, 501, 1000, 1001])
def test_pages_hold_everything_once(number: int) -> None:
    pages = list(database.pages(range(number)))
    assert [each for page in pages for each in page] == list(range(number))
    assert all(len(page) == database.ROWS_AT_ONCE for page in pages[:-1])
    assert all(0 < len(page) <= database.ROWS_AT_ONCE for page in pages)


def storage_error(original: Exception) -> StorageError:
    """As SQLAlchemy's errors of a driver's error are told."""
    wrapped = ValueError()
    wrapped.orig = original  # type: ignore[attr-defined]
    error = StorageError("It cannot be read")
    error.__cause__ = wrapped
    return error


def test_a_lock_is_an_error_of_the_moment_and_a_file_of_something_else_is_not(
    tmp_path: Path,
) -> None:
    holder = sqlite3.connect(tmp_path / "locked.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    (tmp_path / "text.db").write_bytes(b"no database at all" * 100)
    for name, passes in (("locked.db", True), ("text.db", False)):
        connection = sqlite3.connect(tmp_path / name, timeout=0)
        with pytest.raises(sqlite3.DatabaseError) as raised:
            connection.execute("CREATE TABLE a (b)")
        connection.close()
        assert database.may_pass(storage_error(raised.value)) is passes
    holder.close()


def test_what_cannot_be_decoded_is_no_error_of_the_moment() -> None:
    """Python's module raises it without SQLite's code."""
    connection = sqlite3.connect(":memory:")
    with pytest.raises(sqlite3.OperationalError) as raised:
        connection.execute("SELECT CAST(x'ff' AS TEXT)").fetchall()
    connection.close()
    assert not database.may_pass(storage_error(raised.value))
