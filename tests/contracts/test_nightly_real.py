"""`autotune nightly --backend cpu`: real probes of a tiny model, night after night."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autotune.nightly import ledger, matrix
from autotune.nightly.history import Night
from autotune.nightly.journal import locked

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-llama.json"
SPACE = """
name: tiny
description: the base, so that one trace is all there is to predict
methods:
  full:
    micro_batch_size: [1]
    precision: [bf16-true]
    optimizer: [adamw_torch_fused]
"""
MATRIX = """
models: [tiny]
budgets: [30MB]
lengths: [32, 64]
methods: [full]
effective_batch: 8
effort: quick
space: space.yaml
confirm_steps: 0
measure_again_after: 0s
probes: 2
max_probes: 2
hooks:
  - {on: [regression], command: [cp, studies/nightly.yaml, told-of-a-regression]}
"""
URL = "sqlite:///studies/autotune.db"
CELLS = ("tiny-30mb-seq32-full", "tiny-30mb-seq64-full")


def command(*more: str) -> list[str]:
    return [sys.executable, "-m", "autotune", "nightly", "--backend", "cpu", *more]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def nightly(folder: Path, *more: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        command("--json", *more),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def num_probes(folder: Path) -> int:
    with sqlite3.connect(folder / "studies" / "autotune.db") as database:
        (count,) = database.execute("select count(*) from autotune_probes").fetchone()
    database.close()
    return int(count)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nightly")
    (folder / "tiny").mkdir()
    (folder / "studies").mkdir()
    shutil.copy(EXAMPLE, folder / "tiny" / "config.json")
    (folder / "space.yaml").write_text(SPACE, encoding="utf-8")
    (folder / "studies" / "nightly.yaml").write_text(MATRIX, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def first(folder: Path) -> dict[str, Any]:
    code, digest, err = nightly(folder)
    assert code == 0, err
    return digest


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
def test_the_second_night_measures_the_winners_and_nothing_else_though_it_is_stopped(
    folder: Path, first: dict[str, Any]
) -> None:
    machine = folder / "studies" / first["machine"]
    exported = {p: p.read_bytes() for name in CELLS for p in (machine / name).glob("*.*")}
    before = num_probes(folder)
    stopped = subprocess.Popen(
        command(), cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 120
    while num_probes(folder) == before and time.monotonic() < until:
        time.sleep(0.05)
    stopped.send_signal(signal.SIGTERM)
    _, err = stopped.communicate(timeout=60)
    assert stopped.returncode == 130, err
    assert "(interrupted)" in (machine / "digest.md").read_text(encoding="utf-8")
    code, digest, err = nightly(folder)
    # One night alone is never a change, whatever this machine is busy with.
    assert code == 0, err
    assert {cell["kind"] for cell in digest["cells"]} <= {"unchanged", "suspect"}
    assert [(cell["state"], cell["searches"]) for cell in digest["cells"]] == [("fresh", False)] * 2
    # What the stopped night had measured counts: two processes of each cell, in two nights together.
    assert num_probes(folder) - before == 2 * 2
    assert exported == {path: path.read_bytes() for path in exported}


def planted(last: Night, factor: float, torch: str = "") -> list[Night]:
    """Five nights and a suspect before tonight: the level was `factor` times what it is now."""
    now = datetime.datetime.now(datetime.UTC)
    versions = dict(last.fingerprint.versions)
    versions |= {"torch": torch} if torch else {}
    fingerprint = dataclasses.replace(last.fingerprint, versions=tuple(sorted(versions.items())))
    nights = []
    for nights_ago in range(7, 0, -1):
        speed = last.speed * (factor if nights_ago > 1 else 1.0)
        nights.append(
            dataclasses.replace(
                last,
                made_at=(now - datetime.timedelta(milliseconds=nights_ago)).isoformat(),
                kind={7: "new", 1: "suspect"}.get(nights_ago, "unchanged"),
                num_nights=1,
                fingerprint=fingerprint,
                has_searched=nights_ago == 7,
                tokens_per_second=(speed, speed),
            )
        )
    return nights


@pytest.mark.slow
def test_a_regression_is_7_an_older_torch_makes_stale_and_both_are_told(
    folder: Path, first: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its history the one cell was forty times as fast, and the other a fortieth, with an older torch."""
    monkeypatch.chdir(folder)
    cells = matrix.read(Path("studies/nightly.yaml")).cells
    history = ledger.nights(URL, cells, first["device"])
    for cell, factor, torch in zip(cells, (40.0, 1 / 40), ("", "2.1.0"), strict=True):
        for night in planted(history[cell.name][-1], factor, torch):
            ledger.keep(URL, cell, night)
    before = num_probes(folder)
    code, digest, err = nightly(folder)
    assert code == 7, (err, digest)
    assert digest["events"] == ["regression", "improved"]
    seen = {cell["cell"]: cell for cell in digest["cells"]}
    slower, faster = (seen[name] for name in CELLS)
    assert (slower["state"], slower["kind"], slower["searches"]) == ("fresh", "regression", False)
    assert slower["change"] == pytest.approx(1 / 40 - 1, abs=0.02)
    assert slower["why"] == "on 2 nights; no library or driver has changed"
    assert (faster["state"], faster["kind"], faster["searches"]) == ("stale", "improvement", True)
    assert faster["reason"].startswith("torch 2.1.0 -> 2.")
    assert faster["why"].startswith("on 2 nights; since torch 2.1.0 -> 2.")
    # What the first night's search measured was so with these libraries: no probe of it is made again.
    assert num_probes(folder) - before == slower["num_probes"] + faster["num_probes"] == 4
    assert (folder / "told-of-a-regression").exists()


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
