"""What keeps a large database quick; validation/timing/store.py has the figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from autotune.store import schema
from autotune.store.probe_table import ProbeTable
from autotune.store.recommendations import RecommendationTable
from autotune.store.upgrade import open_engine
from validation.timing import store as large


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sqlalchemy.Engine]:
    with open_engine(f"sqlite:///{tmp_path}/autotune.db") as opened:
        with opened.begin() as connection:
            connection.execute(schema.probes.insert(), list(large.rows(4000)))
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


def test_no_look_up_reads_the_whole_table(engine: sqlalchemy.Engine) -> None:
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
