"""Checks of the database and the Hub, which are elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from autotune.doctor.machine import CheckedMachine
from autotune.doctor.verdict import Diagnosis, fail, ok, warn
from autotune.errors import StorageError, first_line
from autotune.store import optuna_study, upgrade
from autotune.store.database import engine_options, explained, file_of, parse_url

if TYPE_CHECKING:
    from sqlalchemy import URL

HUB_TIMEOUT_SECONDS = 3.0
_HUB_FILE = ("openai-community/gpt2", "config.json")
"""File on the Hub that is asked for: public, small, and unlikely to go."""
_WITHOUT_HUB = (
    "Connect to name other models; those of `autotune models`, folders, config.json files and what "
    "the Hub's cache has work without"
)


def database(machine: CheckedMachine) -> Diagnosis:
    """Check that the database can be read and written, and whose versions wrote it. Nothing is created."""
    from autotune.store.schema import HEAD

    try:
        url = parse_url(machine.storage)
        file = file_of(url)
        if file is not None and not file.exists():
            return ok(f"{url} is not there yet: the first `find` makes it")
        with explained(url):
            server, tables, ours = _ask(url)
        if not tables:
            return ok(f"{url} on {server} is empty: the first `find` makes its tables")
        said = f"{url} on {server}; autotune's tables are at {ours or 'none'}"
        if "alembic_version" in tables:
            with optuna_study.existing_storage(machine.storage) as storage:
                said += f", Optuna's at {storage.get_current_version()}"
    except StorageError as error:
        return fail(f"{error.what}: {error.why}" if error.why else error.what, error.remedy)
    if ours is not None and ours != HEAD:
        return warn(
            f"{said}, and this version makes {HEAD}",
            "The next `find` brings them up to date; of a file of SQLite a copy is kept beside it",
        )
    return ok(said)


def _ask(url: URL) -> tuple[str, list[str], str | None]:
    """Return the server and its version, the names of its tables, the revision of ours.

    Raises what `explained` translates, where the database cannot be written as well.
    """
    import sqlalchemy

    engine = sqlalchemy.create_engine(url, **engine_options(url))
    try:
        ours = upgrade.refuse_newer(engine)
        with engine.connect() as connection:
            if engine.dialect.name == "sqlite":
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                connection.rollback()
            tables = sqlalchemy.inspect(connection).get_table_names()
            numbers = engine.dialect.server_version_info or ()
    finally:
        engine.dispose()
    return f"{engine.dialect.name} {'.'.join(map(str, numbers))}", tables, ours


def hub(_machine: CheckedMachine) -> Diagnosis:
    """Check that a configuration could be fetched, asked as autotune.catalogue.models does, token and all."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    endpoint = constants.ENDPOINT
    if constants.HF_HUB_OFFLINE:
        return warn("not asked: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set", _WITHOUT_HUB)
    started = time.monotonic()
    try:
        url = huggingface_hub.hf_hub_url(*_HUB_FILE)
        huggingface_hub.get_hf_file_metadata(url, timeout=HUB_TIMEOUT_SECONDS)
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403) and huggingface_hub.get_token():
            return fail(
                f"{endpoint} refuses your token ({status})",
                "Renew it: `hf auth login`, or correct or unset HF_TOKEN",
            )
        if status >= 500:
            return warn(f"{endpoint} answers with an error ({status})", _WITHOUT_HUB)
    except Exception as error:  # its HTTP library raises what it likes
        return warn(f"{endpoint} cannot be reached: {first_line(error, 160)}", _WITHOUT_HUB)
    milliseconds = 1000 * (time.monotonic() - started)
    return ok(f"{endpoint} answers in {milliseconds:.0f} ms")
