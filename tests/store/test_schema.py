"""The tables as the code knows them are those that the revisions make."""

from __future__ import annotations

from pathlib import Path

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
        indexes = {each["name"]: each["column_names"] for each in made.get_indexes(table.name)}
        assert indexes == {str(each.name): each.columns.keys() for each in table.indexes}
    engine.dispose()
