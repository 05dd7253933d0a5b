"""A lock of a database: one at a time, and none that outlives its process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy
from waiting import wait_until

from autotune.errors import StorageError
from autotune.store.locks import exclusive

pytestmark = pytest.mark.worker

HOLD = """
import sys, time, sqlalchemy
from autotune.store.locks import exclusive
with exclusive(sqlalchemy.create_engine(sys.argv[1]), "s"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/autotune.db"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def engine(url: str) -> Iterator[sqlalchemy.Engine]:
    made = sqlalchemy.create_engine(url)
    yield made
    made.dispose()


def test_one_waits_for_the_other(engine: sqlalchemy.Engine) -> None:
    got = threading.Event()

    def second() -> None:
        with exclusive(engine, "s"):
            got.set()

    thread = threading.Thread(target=second)
    with exclusive(engine, "s"):
        thread.start()
        assert not got.wait(0.3)
    assert wait_until(got.is_set)
    thread.join()


def test_another_study_does_not_wait_on_a_server(postgres_url: str) -> None:
    engine = sqlalchemy.create_engine(postgres_url)
    with exclusive(engine, "s"), exclusive(engine, "another"):
        pass
    engine.dispose()


def test_a_server_soon_takes_a_machine_without_power_for_dead(postgres_url: str) -> None:
    engine = sqlalchemy.create_engine(postgres_url)
    said: list[str] = []
    sqlalchemy.event.listen(
        engine, "before_cursor_execute", lambda _, __, text, *___: said.append(text)
    )
    with exclusive(engine, "s"):
        settings = dict(re.findall(r"SET LOCAL tcp_keepalives_(\w+) = (\d+)", "\n".join(said)))
    engine.dispose()
    # Silent for so long, then asked so many times: half a minute, before whoever waits has the lock.
    assert int(settings["idle"]) + int(settings["interval"]) * int(settings["count"]) == 30


def test_a_lock_ends_with_its_process(url: str, engine: sqlalchemy.Engine) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, url],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGKILL)
        with exclusive(engine, "s"):
            pass


def test_a_database_in_memory_is_nobody_elses() -> None:
    for address in ("sqlite://", "sqlite:///:memory:"):
        engine = sqlalchemy.create_engine(address)
        with exclusive(engine, "s"), exclusive(engine, "s"):
            pass
        engine.dispose()


def test_a_file_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/autotune.db")
    (tmp_path / "autotune.db-ask.lock").mkdir()
    with pytest.raises(StorageError, match="cannot be locked"), exclusive(engine, "s"):
        pass
    engine.dispose()
