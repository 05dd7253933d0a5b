"""Traces in the database: what several processes keep at once."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import autotune
from autotune.store import trace_table
from autotune.store.trace_table import TraceTable

pytestmark = pytest.mark.worker


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


PACKAGE = Path(autotune.__file__).parent


def said_by(code: str, *, path: Path) -> str:
    """What a fresh process prints, with the package that is in that folder."""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=path,  # where it looks first
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return ended.stdout


def key_after_an_edit(module: str | None, folder: Path) -> str:
    """The key of a request, asked of a copy of the package in which this module was edited."""
    shutil.copytree(PACKAGE, folder / "autotune", ignore=shutil.ignore_patterns("__pycache__"))
    if module is not None:
        found = importlib.util.find_spec(module)
        assert found is not None
        assert found.origin is not None
        edited = folder / "autotune" / Path(found.origin).relative_to(PACKAGE)
        with edited.open("a", encoding="utf-8") as file:
            file.write("# edited\n")
    return said_by(
        f"from {trace_table.__name__} import _key; print(_key('a request'))", path=folder
    )


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> str:
    return key_after_an_edit(None, tmp_path_factory.mktemp("as_it_is"))


@pytest.mark.parametrize(
    ("module", "is_kept"),
    [
        ("autotune.probe.loop", True),
        ("autotune.search.predict_best", True),
        ("autotune.worker.probe.run", True),
        ("autotune.worker.trace.tracker", False),
        ("autotune.worker.trace.liger", False),
        ("autotune.memory.traces.reductions", False),
        ("autotune.records.estimate", False),
    ],
)
def test_an_edit_drops_traces_where_it_may_change_them(
    key: str, module: str, is_kept: bool, tmp_path: Path
) -> None:
    assert (key_after_an_edit(module, tmp_path) == key) == is_kept


@pytest.mark.slow  # imports torch
def test_all_that_a_tracing_process_imports_is_in_the_key() -> None:
    code = "import sys, autotune.worker.trace.step; print(*sys.modules)"
    loaded = names(PACKAGE.rglob("*.py")).intersection(said_by(code, path=PACKAGE.parent).split())
    assert "autotune.worker.trace.encode" in loaded
    assert loaded - names(trace_table._sources()) == {"autotune"}


def names(files: Iterable[Path]) -> set[str]:
    """The names of modules of the package."""
    places = (file.relative_to(PACKAGE.parent).with_suffix("") for file in files)
    return {".".join(place.parts).removesuffix(".__init__") for place in places}
