"""Makes our tables in a database, brings old ones up to date, and leaves a newer autotune's alone.

An upgrade is one transaction, and two processes that open an old database at once make it once. A file
of SQLite is copied beside itself first (`autotune.db.before-0002`, by the revision that it is brought to);
a copy of what a server holds is for its own tools, such as pg_dump. What only reads Optuna's tables
(`studies list`, `report`) takes an old database as it is.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.common.files import sync_names
from autotune.errors import StorageError
from autotune.store.database import (
    ELSEWHERE,
    damage_explained,
    engine_options,
    explained,
    file_of,
    make_folder,
    named,
    parse_url,
    refuse_memory,
    refuse_stranger,
)

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

_BUSY_SECONDS = 60
"""Seconds to wait for another process that upgrades the same file: a million probes take it a minute."""
_LOCK = 0x6175746F74756E65
"""Number of our advisory lock on PostgreSQL: `autotune`, as eight bytes."""


@contextlib.contextmanager
def open_engine(url: str) -> Iterator[Engine]:
    """Open the database at that address, with our tables in it made or brought up to date.

    Raises StorageError for everything that the database refuses, inside the `with` block too.
    """
    import sqlalchemy

    parsed = parse_url(url)
    with explained(parsed):
        refuse_memory(parsed)
        make_folder(parsed)
        engine = sqlalchemy.create_engine(parsed, **engine_options(parsed, durable=True))
        try:
            with damage_explained(parsed):
                bring_up_to_date(engine)
            yield engine
        finally:
            engine.dispose()


def bring_up_to_date(engine: Engine) -> None:
    """Make what is missing of our tables.

    Raises StorageError for a newer database, or a stranger's.
    """
    from autotune.store.schema import HEAD

    if refuse_newer(engine) == HEAD:
        return
    with alone(engine) as connection:
        # Another process may have made them while this one waited.
        revision = _revision(connection)
        if revision != HEAD:
            _upgrade(connection, revision)


def refuse_newer(engine: Engine) -> str | None:
    """Return the revision of our tables.

    Raises StorageError for a newer database, or a stranger's.
    """
    from autotune.store.schema import HEAD

    with engine.connect() as connection:
        revision = _revision(connection)
    if revision is not None and revision > HEAD:
        raise StorageError(
            f"The database {named(engine.url)} cannot be used",
            why=f"A newer autotune wrote it (its tables are at {revision[:20]}); it was left as it is",
            remedy=f"Update autotune, {ELSEWHERE}",
        )
    return revision


def _revision(connection: Connection) -> str | None:
    """The revision of our tables, None where there are none.

    Raises StorageError for a stranger's database.
    """
    import sqlalchemy

    from autotune.store import schema

    tables = sqlalchemy.inspect(connection).get_table_names()
    refuse_stranger(connection.engine.url, tables)
    if schema.VERSION_TABLE not in tables:
        return None
    column = sqlalchemy.column("version_num", sqlalchemy.String)
    query = sqlalchemy.select(column).select_from(sqlalchemy.table(schema.VERSION_TABLE))
    found: str | None = connection.execute(query).scalar()
    return found


def _upgrade(connection: Connection, revision: str | None) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    from autotune.store import migrations
    from autotune.store.schema import HEAD, metadata

    config = Config()
    # ConfigParser reads a % as the start of a name.
    folder = str(Path(migrations.__file__).parent).replace("%", "%%")
    config.set_main_option("script_location", folder)
    config.attributes["connection"] = connection
    if revision is None:
        metadata.create_all(connection)
        command.stamp(config, HEAD)
        connection.commit()
        return
    known = {each.revision for each in ScriptDirectory.from_config(config).walk_revisions()}
    if revision not in known:  # damage_explained says it
        raise ValueError(f"there is no revision {str(revision)[:20]!r} of its tables")
    kept = _keep(connection, f"before-{HEAD}")
    try:
        command.upgrade(config, HEAD)
        connection.commit()
    except BaseException:
        # Nothing was changed, so the copy says nothing.
        if kept is not None:
            kept.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def alone(engine: Engine) -> Iterator[Connection]:
    """Open a transaction that no other process has at the same time; the caller commits it."""
    dialect = engine.dialect.name
    with engine.connect() as connection:
        if dialect == "postgresql":
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
        if dialect != "sqlite":
            yield connection
            return
        driver = connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        # Python's sqlite3 begins no transaction before a CREATE or ALTER: it is begun here.
        before, driver.isolation_level = driver.isolation_level, None
        try:
            connection.exec_driver_sql(f"PRAGMA busy_timeout={1000 * _BUSY_SECONDS}")
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection
        finally:
            connection.rollback()
            driver.isolation_level = before
            # The next user of this connection waits as ever.
            connection.invalidate()


def _keep(connection: Connection, suffix: str) -> Path | None:
    """Copy SQLite's file beside itself and return the copy; None for a database that is no file.

    Raises StorageError where it cannot be made; nothing is left of it then.
    """
    file = file_of(connection.engine.url)
    if file is None:
        return None
    kept = _free(file.with_name(f"{file.name}.{suffix}"))
    partial = kept.with_name(f"{kept.name}.new")
    try:
        # By another connection: this one is in the middle of a transaction.
        with (
            contextlib.closing(sqlite3.connect(file)) as source,
            contextlib.closing(sqlite3.connect(partial)) as target,
        ):
            source.backup(target)
        partial.rename(kept)
        # Before anything is changed.
        sync_names(kept.parent)
    except (sqlite3.Error, OSError) as error:
        partial.unlink(missing_ok=True)
        raise StorageError(
            f"The database {named(connection.engine.url)} was made by an older autotune and was not upgraded",
            why=f"Its backup {kept.name} cannot be written: {error}",
            remedy=f"Nothing was changed. Free some space beside it, {ELSEWHERE}",
        ) from error
    return kept


def _free(path: Path) -> Path:
    """The path itself, or with a number appended where such a file exists already."""
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate
