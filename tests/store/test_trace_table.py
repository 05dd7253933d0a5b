"""Traces in the database: what several processes keep at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.store.trace_table import TraceTable


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_what_another_process_has_kept_meanwhile_spoils_nothing(
    kind: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capfd: pytest.CaptureFixture[str],
) -> None:
    url = f"sqlite:///{tmp_path}/autotune.db"
    if kind == "postgresql":
        url = str(request.getfixturevalue("postgres_url"))
    TraceTable(url).add({"a": {"events": 1}})
    capfd.readouterr()
    TraceTable(url).add({"a": {"events": 2}, "b": {"events": 3}})
    assert TraceTable(url).find(["a", "b", "c"]) == {"a": {"events": 1}, "b": {"events": 3}}
    assert capfd.readouterr() == ("", "")
