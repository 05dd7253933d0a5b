"""The tables as the code knows them are those that the revisions make."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy

from autotune.store import schema
from autotune.store.upgrade import open_engine


def test_a_new_database_has_the_columns_of_the_schema(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    with open_engine(url):
        pass
    engine = sqlalchemy.create_engine(url)
    made = sqlalchemy.inspect(engine)
    tables = schema.recommendations.metadata.sorted_tables
    assert len(tables) >= 3
    for table in tables:
        columns = {each["name"]: each["nullable"] for each in made.get_columns(table.name)}
        assert columns == {column.name: column.nullable for column in table.columns}
    engine.dispose()


@pytest.mark.parametrize(
    ("table", "looked_up_by"),
    [
        ("autotune_probes", ("key",)),  # by an import
        ("autotune_probes", ("near_key", "model_digest", "fingerprint")),
        ("autotune_probes", ("near_key", "model_digest")),
        ("autotune_recommendations", ("question_key",)),
        ("autotune_recommendations", ("question_key", "device")),
    ],
)
def test_rows_are_found_without_reading_all(
    tmp_path: Path, table: str, looked_up_by: tuple[str, ...]
) -> None:
    with open_engine(f"sqlite:///{tmp_path}/a.db") as engine, engine.connect() as connection:
        where = " AND ".join(f"{name} = ''" for name in looked_up_by)
        query = f"EXPLAIN QUERY PLAN SELECT * FROM {table} WHERE {where}"
        (plan,) = connection.exec_driver_sql(query)
    assert plan.detail.startswith(f"SEARCH {table} USING INDEX")


def test_only_figures_that_an_answer_may_lack_may_be_empty() -> None:
    """Whatever else is None is the text null, of JSON."""
    optional = {
        table.name: {column.name for column in table.columns if column.nullable}
        for table in schema.metadata.sorted_tables
    }
    of_answers = {"tokens_per_second", "spread", "peak_device_bytes"}
    assert optional.pop("autotune_recommendations") == of_answers
    assert set.union(*optional.values()) == set()
