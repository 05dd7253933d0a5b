"""Databases of every age: made, upgraded in place with a copy beside them, refused."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from autotune.errors import StorageError
from autotune.records.fingerprint import Fingerprint
from autotune.records.measurement import Measurement, ProbeSpec
from autotune.space.config import TrainConfig, Workload
from autotune.store import database, migrations, optuna_study, schema, stored_answers
from autotune.store.probe_key import probe_key
from autotune.store.probe_table import open_probes
from autotune.store.upgrade import open_engine

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


def measured(micro_batch_size: int = 2, budget_bytes: int = 10**9) -> Measurement:
    return Measurement(
        config=dataclasses.replace(CONFIG, micro_batch_size=micro_batch_size),
        spec=ProbeSpec(
            task="causal-lm", backend="cpu", memory_budget_bytes=budget_bytes, max_seconds=10.0
        ),
        fingerprint=HERE,
        outcome="ok",
        message="",
        micro_step_seconds=0.5,
        optimizer_step_seconds=0.25,
        peak_reserved_bytes=900_000_000,
        nontorch_bytes=50_000_000,
    )


def record_of_release_0(measurement: Measurement) -> dict[str, Any]:
    """As it was written before probed_budget_bytes, and before torch_compile_backend was a setting."""
    record = json.loads(json.dumps(measurement.to_dict()))
    del record["probed_budget_bytes"]
    del record["config"]["torch_compile_backend"]
    return record


def key_of_release_0(record: dict[str, Any]) -> str:
    """Written out here once more: what the first releases wrote must stay readable."""
    parts = {
        "model": MODEL,
        "config": record["config"],
        "task": "causal-lm",
        "backend": "cpu",
        "memory_budget_bytes": record["spec"]["memory_budget_bytes"],
        "confirm_steps": 0,
        "fingerprint": record["fingerprint"],
        "schema_version": 1,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def database_of_release_0(url: str, *records: dict[str, Any]) -> None:
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as connection:
        # The statements that SQLAlchemy emitted for the table of the first releases.
        kind = "SERIAL" if engine.dialect.name == "postgresql" else "INTEGER"
        when = "TIMESTAMP WITHOUT TIME ZONE" if kind == "SERIAL" else "DATETIME"
        connection.exec_driver_sql(
            f"CREATE TABLE autotune_probes (id {kind} NOT NULL, key VARCHAR(64) NOT NULL, "
            f"made_at {when} NOT NULL, outcome VARCHAR(16) NOT NULL, record TEXT NOT NULL, "
            "PRIMARY KEY (id))"
        )
        connection.exec_driver_sql("CREATE INDEX ix_autotune_probes_key ON autotune_probes (key)")
        for record in records:
            connection.execute(
                sqlalchemy.text(
                    "INSERT INTO autotune_probes (key, made_at, outcome, record) "
                    "VALUES (:key, '2026-01-02 03:04:05.000000', 'ok', :record)"
                ),
                {"key": key_of_release_0(record), "record": json.dumps(record)},
            )
    engine.dispose()


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


def test_one_of_the_first_release_gets_them_too_and_keeps_its_probes(url: str) -> None:
    database_of_release_0(url, record_of_release_0(measured()))
    assert differences(url) == []
    assert revision(url) == schema.HEAD
    engine = sqlalchemy.create_engine(url)
    with engine.connect() as connection:
        (row,) = connection.execute(schema.probes.select())
    engine.dispose()
    assert json.loads(row.record) == record_of_release_0(measured())
    assert (row.device, row.model_digest) == ("a CPU", "")


def test_what_the_first_release_measured_is_found_for_its_model_only(url: str) -> None:
    database_of_release_0(
        url,
        record_of_release_0(measured(micro_batch_size=2)),
        record_of_release_0(measured(micro_batch_size=4, budget_bytes=2 * 10**9)),
        {"no": "record"} | {"spec": {"memory_budget_bytes": 1}, "config": {}, "fingerprint": {}},
    )
    with open_probes(url) as table:
        for size, probed_bytes in ((2, 10**9), (4, 2 * 10**9)):
            wanted = measured(micro_batch_size=size, budget_bytes=probed_bytes)
            key = probe_key(MODEL, wanted.config, wanted.spec, HERE)
            assert table.find(key, probed_bytes) == wanted
            # For another budget, too: what it was measured under is in its old key.
            other = table.find(key, 3 * 10**9)
            assert other is not None
            assert (other.fits, other.probed_budget_bytes) == (True, probed_bytes)
            stranger = probe_key({**MODEL, "hidden_size": 65}, wanted.config, wanted.spec, HERE)
            assert table.find(stranger, probed_bytes) is None


def test_a_copy_of_the_file_is_kept_as_it_was(file: Path) -> None:
    url = f"sqlite:///{file}"
    database_of_release_0(url, record_of_release_0(measured()))
    before = dump(file)
    with open_engine(url):
        pass
    with open_engine(url):
        pass
    (kept,) = file.parent.glob("*before*")
    assert kept.name == f"autotune.db.before-{schema.HEAD}"
    assert dump(kept) == before


def test_studies_of_an_old_database_are_listed_without_upgrading_it(file: Path) -> None:
    url = f"sqlite:///{file}"
    with optuna_study.open_study(
        url, "s", workload=Workload(model="m", memory_budget_bytes=10**9), gpu="g"
    ):
        pass
    database_of_release_0(url, record_of_release_0(measured()))
    assert [study.name for study in stored_answers.listed(url)] == ["s"]
    with sqlite3.connect(file) as connection:
        assert connection.execute(
            "SELECT count(*) FROM sqlite_master WHERE name = 'autotune_schema'"
        ).fetchone() == (0,)


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
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE somebodys (x)")
    with pytest.raises(StorageError, match="another program"), open_probes(f"sqlite:///{file}"):
        pass


def test_no_room_for_the_copy_is_one_clear_line(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{file}"
    database_of_release_0(url, record_of_release_0(measured()))
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
    records = (record_of_release_0(measured(micro_batch_size=n)) for n in range(1, 40))
    database_of_release_0(url, *records)
    before, num_pages = dump(file), file.stat().st_size // 4096
    pragmas = [*database.SQLITE_PRAGMAS, f"max_page_count={num_pages + 2}"]
    monkeypatch.setattr(database, "SQLITE_PRAGMAS", pragmas)
    with pytest.raises(StorageError, match="disk is full"), open_engine(url):
        pass
    assert dump(file) == before
    assert list(file.parent.glob("*before*")) == []
    monkeypatch.undo()
    assert differences(url) == []


def test_one_that_cannot_be_written_is_one_clear_line(file: Path) -> None:
    database_of_release_0(f"sqlite:///{file}", record_of_release_0(measured()))
    before = dump(file)
    url = f"sqlite:///file:{file}?mode=ro&uri=true"
    with pytest.raises(StorageError, match="cannot be written") as raised, open_engine(url):
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


OPENS = "import sys; from autotune.store.upgrade import open_engine; open_engine(sys.argv[1]).__enter__()"


def test_processes_that_open_an_old_one_at_once_upgrade_it_once(url: str, file: Path) -> None:
    records = [record_of_release_0(measured(micro_batch_size=n)) for n in range(1, 60)]
    database_of_release_0(url, *records)
    command = [sys.executable, "-c", OPENS, url]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    ended = [(process.communicate(timeout=60)[1], process.returncode) for process in started]
    assert ended == [("", 0)] * 3
    assert differences(url) == []
    assert len(list(file.parent.glob("*before*"))) == int(url.startswith("sqlite"))


def test_what_is_committed_to_our_tables_is_on_the_disk(tmp_path: Path) -> None:
    """A cut of the power loses no probe: SQLite syncs at each commit (FULL is 2, NORMAL 1)."""
    with open_engine(f"sqlite:///{tmp_path / 'a.db'}") as engine, engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
