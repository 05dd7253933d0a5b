"""Databases of every age: made, upgraded in place with a copy beside them, refused."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from next_revision import NEXT, next_revision

from autotune.errors import StorageError
from autotune.records.fingerprint import Fingerprint
from autotune.records.measurement import Measurement, ProbeSpec
from autotune.space.config import TrainConfig, Workload
from autotune.store import database, migrations, optuna_study, schema, stored_answers
from autotune.store.probe_key import probe_key
from autotune.store.probe_table import open_probes
from autotune.store.upgrade import open_engine

pytestmark = pytest.mark.worker

MODEL = {"model_type": "llama", "hidden_size": 64}
CONFIG = TrainConfig(
    method="lora",
    micro_batch_size=2,
    gradient_accumulation_steps=4,
    sequence_length=128,
    precision="bf16-true",
    optimizer="adamw_torch_fused",
    lora_rank=8,
)
HERE = Fingerprint(
    device="a CPU", driver="", cuda="", versions=(("torch", "2.13.0"),), allocator=""
)


def measured(micro_batch_size: int) -> Measurement:
    return Measurement(
        config=dataclasses.replace(CONFIG, micro_batch_size=micro_batch_size),
        spec=ProbeSpec(
            task="causal-lm", backend="cpu", memory_budget_bytes=10**9, max_seconds=10.0
        ),
        fingerprint=HERE,
        outcome="ok",
        message="",
        micro_step_seconds=0.5,
        optimizer_step_seconds=0.25,
        peak_reserved_bytes=900_000_000,
        nontorch_bytes=50_000_000,
    )


def old_database(url: str, num_probes: int = 1) -> None:
    """One of before the next revision, with probes of 1, 2, ... samples."""
    with open_probes(url) as table:
        for one in map(measured, range(1, num_probes + 1)):
            table.add(probe_key(MODEL, one.config, one.spec, HERE), one)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        address: str = request.getfixturevalue("postgres_url")
        return address
    return f"sqlite:///{tmp_path}/autotune.db"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "autotune.db"


def differences(url: str) -> list[Any]:
    """What the database's tables differ in from schema.py's."""
    with open_engine(url) as engine, engine.connect() as connection:
        context = MigrationContext.configure(
            connection,
            opts={
                "version_table": schema.VERSION_TABLE,
                "compare_type": True,
                "include_name": lambda name, kind, _: (
                    kind != "table" or str(name).startswith("autotune_")
                ),
            },
        )
        return list(compare_metadata(context, schema.metadata))


def dump(file: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(file)) as connection:
        return list(connection.iterdump())


def revision(url: str) -> str:
    engine = sqlalchemy.create_engine(url)
    with engine.connect() as connection:
        (found,) = connection.exec_driver_sql("SELECT version_num FROM autotune_schema").one()
    engine.dispose()
    return str(found)


def test_the_newest_revision_is_the_one_that_schema_names() -> None:
    assert ScriptDirectory(str(Path(migrations.__file__).parent)).get_heads() == [schema.HEAD]


def test_an_empty_database_gets_the_tables_of_schema(url: str, tmp_path: Path) -> None:
    assert differences(url) == []
    assert revision(url) == schema.HEAD
    assert list(tmp_path.glob("*before*")) == []


def test_an_old_one_gets_the_tables_of_the_next_revision_and_keeps_its_probes(url: str) -> None:
    old_database(url, num_probes=2)
    with next_revision():
        with open_probes(url) as table:
            for one in (measured(1), measured(2)):
                key = probe_key(MODEL, one.config, one.spec, HERE)
                assert table.find(key, 10**9) == one
        assert revision(url) == NEXT
    engine = sqlalchemy.create_engine(url)
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT record, added FROM autotune_probes").all()
    engine.dispose()
    assert [row.added for row in rows] == [3 * row.record for row in rows]
    assert len(rows) == 2


def test_an_empty_database_is_made_at_the_newest_revision_without_a_copy(
    url: str, tmp_path: Path
) -> None:
    with next_revision(), open_engine(url):
        pass
    assert revision(url) == NEXT
    assert list(tmp_path.glob("*before*")) == []


def test_a_copy_of_the_file_is_kept_as_it_was(file: Path) -> None:
    url = f"sqlite:///{file}"
    old_database(url)
    before = dump(file)
    for _ in range(2):
        with next_revision(), open_engine(url):
            pass
    (kept,) = file.parent.glob("*before*")
    assert kept.name == f"autotune.db.before-{NEXT}"
    assert dump(kept) == before != dump(file)


def test_studies_of_an_old_database_are_listed_without_upgrading_it(file: Path) -> None:
    url = f"sqlite:///{file}"
    with optuna_study.open_study(
        url, "s", workload=Workload(model="m", memory_budget_bytes=10**9), gpu="g"
    ):
        pass
    old_database(url)
    with next_revision():
        assert [study.name for study in stored_answers.listed(url)] == ["s"]
    assert revision(url) == schema.HEAD


def test_a_newer_one_is_refused_and_left_alone(url: str) -> None:
    with open_engine(url):
        pass
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE autotune_schema SET version_num = '9001'")
    workload = Workload(model="m", memory_budget_bytes=10**9)
    for opened in (
        lambda: open_probes(url),
        lambda: optuna_study.open_study(url, "s", workload=workload, gpu="g"),
        lambda: optuna_study.existing_storage(url),
    ):
        with pytest.raises(StorageError, match=r"newer autotune.*9001.*Update autotune"), opened():
            pass
    # None of Optuna's, then.
    assert set(sqlalchemy.inspect(engine).get_table_names()) == {
        schema.VERSION_TABLE,
        *schema.metadata.tables,
    }
    engine.dispose()


def test_another_programs_file_is_refused(file: Path) -> None:
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("CREATE TABLE somebodys (x)")
    with pytest.raises(StorageError, match="another program"), open_probes(f"sqlite:///{file}"):
        pass


def test_no_room_for_the_copy_is_one_clear_line(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{file}"
    old_database(url)
    before = dump(file)

    class Full(sqlite3.Connection):
        """Python's sqlite3, on a disk with room for a page."""

        def __init__(self, path: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(path, *args, **kwargs)
            if str(path).endswith(".new"):
                self.execute("PRAGMA max_page_count=1")

    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda *args, **kw: connect(*args, **{"factory": Full, **kw})
    )
    with (
        pytest.raises(StorageError, match=r"full.*Nothing was changed") as raised,
        next_revision(),
        open_engine(url),
    ):
        pass
    assert "\n" not in str(raised.value)
    monkeypatch.undo()
    assert dump(file) == before
    assert [path.name for path in file.parent.iterdir()] == ["autotune.db"]


def test_no_room_for_the_upgrade_leaves_everything_as_it_was(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{file}"
    old_database(url, num_probes=40)
    before, num_pages = dump(file), file.stat().st_size // 4096
    pragmas = [*database.SQLITE_PRAGMAS, f"max_page_count={num_pages + 2}"]
    monkeypatch.setattr(database, "SQLITE_PRAGMAS", pragmas)
    with (
        pytest.raises(StorageError, match="disk is full"),
        next_revision(),
        open_engine(url),
    ):
        pass
    assert dump(file) == before
    assert list(file.parent.glob("*before*")) == []
    monkeypatch.undo()
    with next_revision(), open_engine(url):
        pass
    assert revision(url) == NEXT


def test_one_that_cannot_be_written_is_one_clear_line(file: Path) -> None:
    old_database(f"sqlite:///{file}")
    before = dump(file)
    url = f"sqlite:///file:{file}?mode=ro&uri=true"
    with (
        pytest.raises(StorageError, match="cannot be written") as raised,
        next_revision(),
        open_engine(url),
    ):
        pass
    assert "\n" not in str(raised.value)
    assert dump(file) == before
    assert list(file.parent.glob("*before*")) == []


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("sqlite:///a/b.db", "a/b.db"),
        ("sqlite:////tmp/b.db", "/tmp/b.db"),
        ("sqlite:///file:/tmp/b%20c.db?uri=true", "/tmp/b c.db"),
        ("sqlite:///file:///tmp/b.db?mode=rw&uri=true", "/tmp/b.db"),
        ("sqlite:///file:name?mode=memory&uri=true", None),
        ("sqlite:///:memory:", None),
        ("sqlite://", None),
        ("postgresql://host/autotune.db", None),
    ],
)
def test_the_file_of_an_address(address: str, path: str | None) -> None:
    found = database.file_of(database.parse_url(address))
    assert found == (None if path is None else Path(path))


OPENS = """
import sys
from next_revision import next_revision
from autotune.store.upgrade import open_engine
with next_revision(), open_engine(sys.argv[1]):
    pass
"""


def test_processes_that_open_an_old_one_at_once_upgrade_it_once(url: str, file: Path) -> None:
    old_database(url, num_probes=60)
    command = [sys.executable, "-c", OPENS, url]
    started = [
        subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for _ in range(3)
    ]
    ended = [(process.communicate(timeout=60)[1], process.returncode) for process in started]
    assert ended == [("", 0)] * 3
    assert revision(url) == NEXT
    assert len(list(file.parent.glob("*before*"))) == int(url.startswith("sqlite"))


def test_several_open_a_new_one_at_once(tmp_path: Path) -> None:
    """SQLite refuses some of them at once, without waiting: about one time in ten."""

    def opened(file: Path) -> None:
        start.wait()
        with open_engine(f"sqlite:///{file}"):
            pass

    start = threading.Barrier(3)
    with ThreadPoolExecutor(start.parties) as pool:
        for number in range(40):
            list(pool.map(opened, [tmp_path / f"{number}.db"] * start.parties))


def test_what_is_committed_to_our_tables_is_on_the_disk(tmp_path: Path) -> None:
    """A cut of the power loses no probe: SQLite syncs at each commit (FULL is 2, NORMAL 1)."""
    with open_engine(f"sqlite:///{tmp_path / 'a.db'}") as engine, engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"


JOBS = """CREATE TABLE autotune_jobs (
    id INTEGER PRIMARY KEY, state VARCHAR(16) NOT NULL, question TEXT NOT NULL, result TEXT
)"""
"""The table of questions that waited for other machines, which the first two revisions had."""
ANSWER = (
    "1, 'k', '{}', 'CPU', '', '2026-01-01 00:00:00', 's', 'measured', 1.0, 0.1, 5, '{}', '{}', 'r'"
)


@pytest.mark.parametrize("before", ["0001", "0002"])
def test_a_database_with_jobs_keeps_its_probes_and_answers(file: Path, before: str) -> None:
    url = f"sqlite:///{file}"
    old_database(url, num_probes=2)
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        if before == "0001":
            connection.execute("DROP TABLE autotune_calibrations")
        connection.execute(JOBS)
        connection.execute("INSERT INTO autotune_jobs VALUES (1, 'done', '{}', '{}')")
        connection.execute(f"INSERT INTO autotune_recommendations VALUES ({ANSWER})")
        connection.execute(f"UPDATE {schema.VERSION_TABLE} SET version_num = '{before}'")
    with open_engine(url) as engine, engine.connect() as connection:
        assert len(connection.execute(schema.probes.select()).all()) == 2
        (kept,) = connection.execute(schema.recommendations.select()).all()
        assert (kept.study, kept.evidence) == ("s", "measured")
        assert connection.execute(schema.calibrations.select()).all() == []
    assert differences(url) == []
    assert "autotune_jobs" not in tables(file)
    assert "autotune_jobs" in tables(file.with_name(f"{file.name}.before-{schema.HEAD}"))


def tables(file: Path) -> set[str]:
    with contextlib.closing(sqlite3.connect(file)) as connection:
        return {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}


@pytest.mark.parametrize("revision", ["0000", ""])
def test_a_revision_that_never_was_is_damage(file: Path, revision: str) -> None:
    url = f"sqlite:///{file}"
    old_database(url)
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(f"UPDATE {schema.VERSION_TABLE} SET version_num = '{revision}'")
    with pytest.raises(StorageError, match="was left as it is"), open_engine(url):
        pass
