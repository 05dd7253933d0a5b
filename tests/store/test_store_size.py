"""What keeps a large database quick and whole; benchmarks/store.py and kill_store.py have the figures."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from autotune.store import schema
from autotune.store.probe_table import ProbeTable
from autotune.store.recommendations import RecommendationTable
from autotune.store.upgrade import open_engine

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module


@pytest.fixture
def engine(tmp_path: Path, benchmarks: Any) -> Iterator[sqlalchemy.Engine]:
    with open_engine(f"sqlite:///{tmp_path}/autotune.db") as opened:
        with opened.begin() as connection:
            connection.execute(schema.probes.insert(), list(benchmarks("store").rows(4000)))
            connection.exec_driver_sql("ANALYZE")
        yield opened


def plans(engine: sqlalchemy.Engine, ask: Any) -> list[str]:
    """How SQLite goes about each statement that is executed."""
    asked: list[tuple[str, Any]] = []

    def listen(_c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        asked.append((statement, parameters))

    sqlalchemy.event.listen(engine, "before_cursor_execute", listen)
    ask()
    sqlalchemy.event.remove(engine, "before_cursor_execute", listen)
    assert asked
    with engine.connect() as connection:
        return [
            str(row[3])
            for statement, parameters in asked
            for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
        ]


def test_no_look_up_reads_the_whole_table(engine: sqlalchemy.Engine, benchmarks: Any) -> None:
    large = benchmarks("store")
    machine = large.MACHINES[0]
    one = large.measured(3, machine)
    key = large.probe_key(large.model(5), one.config, large.SPEC, machine)
    table, answers = ProbeTable(engine), RecommendationTable(engine)
    for ask in (
        lambda: table.find(key, 10**10),
        lambda: table.near({key: "it"}),
        lambda: answers.latest("a" * 64, "a card"),
        lambda: answers.history("a" * 64),
    ):
        said = plans(engine, ask)
        assert any("USING INDEX ix_autotune" in step for step in said)
        assert not any("SCAN" in step for step in said)
    assert table.find(key, large.SPEC.memory_budget_bytes) == one


@pytest.mark.slow
def test_what_was_said_to_be_kept_survives_a_kill(tmp_path: Path, benchmarks: Any) -> None:
    """Of a writer of each kind."""
    problems, killed = benchmarks("kill_store").run(3, 3, tmp_path)
    assert problems == []
    assert sum(killed.values()) == 3
