"""`autotune nightly --backend cpu`: real probes of a tiny model, night after night."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import here
import pytest
from nights_of import tiny_night

from autotune.nightly.journal import locked

URL = "sqlite:///studies/autotune.db"
CELLS = ("tiny-30mb-seq64-full", "tiny-40mb-seq64-full")


def nightly(folder: Path, *more: str) -> tuple[int, dict[str, Any], str]:
    done = here.command("nightly", "--backend", "cpu", "--json", *more, cwd=folder)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def num_probes(folder: Path) -> int:
    with (
        contextlib.closing(sqlite3.connect(folder / "studies" / "autotune.db")) as database,
        database,
    ):
        (count,) = database.execute("select count(*) from autotune_probes").fetchone()
    database.close()
    return int(count)


@contextlib.contextmanager
def stopped_once(is_time: Callable[[], bool]) -> Iterator[None]:
    """Send this process the signal that ends a night, as soon as it is time."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.05):
            if is_time():
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def nobody_listened(*_: object) -> None:
        pytest.fail("the night was over before it was stopped")

    before = signal.signal(signal.SIGTERM, nobody_listened)
    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        is_over.set()
        watching.join()
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_night(tmp_path_factory.mktemp("nightly"))


@pytest.fixture(scope="module")
def first(folder: Path) -> dict[str, Any]:
    # By the plan, which knows only what the effort may take, one cell alone has time.
    with here.workers.at_work():
        code, digest, err = nightly(folder, "--max-minutes", "5")
    assert code == 0, err
    return digest


@pytest.mark.slow
def test_the_first_night_has_time_for_more_than_was_planned(first: dict[str, Any]) -> None:
    assert [cell["chosen"] for cell in first["cells"]] == [True, False]
    assert first["left"] == []


@pytest.mark.slow
def test_the_first_night_is_new(folder: Path, first: dict[str, Any]) -> None:
    assert first["headline"] == "2 cells: 2 new"
    assert [(cell["cell"], cell["state"], cell["kind"]) for cell in first["cells"]] == [
        (name, "new", "new") for name in CELLS
    ]
    assert all(cell["evidence"] == "measured" for cell in first["cells"])
    machine = folder / "studies" / first["machine"]
    for name in CELLS:
        text = (machine / "recommendations" / f"{name}.json").read_text(encoding="utf-8")
        assert str(folder) not in text
        content = json.loads(text)
        assert list(content) == sorted(content)
        assert content["question"]["model"] == "tiny"
        assert content["recommendation"]["config"]["method"] == "full"
        assert len(content["nights"]) == 1
        assert (machine / name / "train.py").exists()
    assert "2 cells: 2 new" in (machine / "digest.md").read_text(encoding="utf-8")
    assert "<svg" in (machine / "digest.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_the_second_night_measures_the_winners_and_nothing_else_though_it_is_stopped(
    folder: Path, first: dict[str, Any]
) -> None:
    machine = folder / "studies" / first["machine"]
    exported = {p: p.read_bytes() for name in CELLS for p in (machine / name).glob("*.*")}
    before = num_probes(folder)
    with stopped_once(lambda: num_probes(folder) > before):
        code, _, err = nightly(folder)
    assert code == 130, err
    assert "(interrupted)" in (machine / "digest.md").read_text(encoding="utf-8")
    code, digest, err = nightly(folder)
    # One night alone is never a change, whatever this machine is busy with.
    assert code == 0, err
    assert {cell["kind"] for cell in digest["cells"]} <= {"unchanged", "suspect"}
    assert [(cell["state"], cell["searches"]) for cell in digest["cells"]] == [("fresh", False)] * 2
    # What the stopped night had measured counts: two processes of each cell, in two nights together.
    assert num_probes(folder) - before == 2 * 2
    assert exported == {path: path.read_bytes() for path in exported}


@pytest.mark.slow
def test_two_nights_never_run_at_once(
    folder: Path, first: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with locked(URL, Path("studies")):
        code, digest, err = nightly(folder)
    assert (code, digest) == (6, {})
    assert "Another autotune nightly is running here" in err
    assert err.count("\n") == 1
