"""`autotune find --backend cpu`: real probes of a tiny model, from the command to the files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import here
import optuna
import pytest
import torch
from optuna.trial import TrialState
from optuna_storage import unpooled

from autotune.catalogue import gpus
from autotune.records.measurement import measurement_from_dict

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-llama.json"
SPACE = """
name: tiny
description: a few points
methods:
  full:
    micro_batch_size: [1, 2, 4, 8]
    precision: [bf16-true]
    optimizer: [adamw_torch_fused, adamw_torch]
    activation_checkpointing: [none, full]
    attention: [eager]
"""
MARK = "AUTOTUNE_TEST_MARK"
STUDY = "tiny-measured"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    (folder / "tiny").mkdir()
    (folder / "temporary").mkdir()
    shutil.copy(EXAMPLE, folder / "tiny" / "config.json")
    (folder / "space.yaml").write_text(SPACE, encoding="utf-8")
    return folder


def arguments(budget: str) -> list[str]:
    text = (
        f"find --model tiny --backend cpu --gpu-mem {budget} --space space.yaml --method full "
        f"--seq-len 64 --effective-batch 8 --effort quick --study {STUDY}-{budget} --out out --json"
    )
    return text.split()


def start(folder: Path, budget: str = "30MB") -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        MARK: str(folder),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TMPDIR": str(folder / "temporary"),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "autotune", *arguments(budget)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left_behind(folder: Path) -> list[int]:
    """Processes that were started for this folder and are still there."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.fixture(scope="module")
def answer(folder: Path) -> dict[str, Any]:
    process = start(folder)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


def test_the_answer_is_measured_and_says_on_what(answer: dict[str, Any]) -> None:
    assert answer["evidence"] == "measured"
    best = answer["measured"]["best"]
    # On a busy machine one that was stopped as too slow may win: what it was slow beside is slower in
    # its confirmation.
    assert best["outcome"] in ("ok", "slow")
    assert best["fits"]
    assert best["spec"]["backend"] == "cpu"
    assert best["fingerprint"]["device"]
    assert best["loss_is_finite"]
    assert best["config"] == answer["best"]["config"]
    assert answer["measured"]["outcomes"]["ok"] >= 1


def test_the_winner_is_confirmed_and_nothing_of_it_is_left(
    folder: Path, answer: dict[str, Any]
) -> None:
    found = answer["measured"]
    assert found["confirmed"]
    assert found["rejected"] == []
    confirmation = found["confirmation"]
    assert confirmation["config"] == answer["best"]["config"]
    assert confirmation["spec"]["confirm_steps"] == 10
    assert confirmation["num_steps"] == 10
    assert confirmation["fits"]
    assert confirmation["spread"] is not None
    left = [path.name for path in (folder / "temporary").iterdir()]
    assert not [name for name in left if name.startswith("autotune-")]


def test_memory_was_predicted_to_the_percent(answer: dict[str, Any]) -> None:
    """Eager attention runs the same operations on a CPU; its embedding needs no sort buffers."""
    predicted = answer["measured"]["predicted_peak_device_bytes"]
    assert predicted == pytest.approx(answer["measured"]["best"]["peak_device_bytes"], rel=0.01)


def test_the_study_holds_what_was_measured_only(folder: Path, answer: dict[str, Any]) -> None:
    study = optuna.load_study(
        study_name=f"{STUDY}-30MB", storage=unpooled(f"sqlite:///{folder}/studies/autotune.db")
    )
    assert {t.user_attrs["evidence"] for t in study.trials} == {"measured"}
    assert {t.user_attrs["space"] for t in study.trials} == {"tiny"}
    # Step by step, those that were not known from before: the base is measured outside the study.
    stepwise = [t for t in study.trials if t.intermediate_values]
    assert len(stepwise) >= len(study.trials) - 1
    for trial in stepwise:
        assert len(trial.intermediate_values) == trial.user_attrs["measurement"]["num_steps"]
    # Which of them wins is tests/probe/test_loop.py's: on a busy machine a confirmation may decide.
    best = answer["measured"]["best"]
    seen = [t.user_attrs["measurement"] for t in study.trials]
    assert [m["config"] for m in seen if m["micro_step_seconds"] == best["micro_step_seconds"]] == [
        best["config"]
    ]
    for trial in study.get_trials(states=(TrialState.COMPLETE,)):
        measured = measurement_from_dict(trial.user_attrs["measurement"])
        assert trial.value == measured.tokens_per_second


@pytest.mark.usefixtures("forked_workers")
def test_asked_again_nothing_is_measured_again(folder: Path, answer: dict[str, Any]) -> None:
    ran = here.command(*arguments("30MB"), cwd=folder)
    assert ran.returncode == 0, ran.stderr
    again = json.loads(ran.stdout)["measured"]
    assert again["best"]["config"] == answer["measured"]["best"]["config"]
    assert again["confirmation"] == answer["measured"]["confirmation"]
    # A candidate that was stopped as too slow may be looked at again, the others are known.
    assert again["num_run"] <= 1


@pytest.mark.usefixtures("forked_workers")
def test_a_budget_that_nothing_fits_is_exit_4(folder: Path, answer: dict[str, Any]) -> None:
    ran = here.command(*arguments("3MB"), cwd=folder)
    assert ran.returncode == 4
    assert "Nothing" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not ran.stdout


@pytest.mark.usefixtures("forked_workers")
def test_a_database_that_fails_costs_the_measurement_and_not_the_prediction(
    folder: Path, answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is whole when it is looked at, before the prediction."""
    monkeypatch.setattr("autotune.store.optuna_study.check_study", lambda *_, **__: None)
    (folder / "broken.db").write_bytes(b"no database " * 1000)
    kept = (folder / "out" / "result.json").read_bytes()
    asked = [*arguments("30MB"), "--storage", "sqlite:///broken.db"]
    ran = here.command(*asked, cwd=folder)
    assert ran.returncode == 6
    assert "The file is damaged" in ran.stderr
    predicted = json.loads(ran.stdout)
    assert (predicted["evidence"], predicted["files"]) == ("predicted", [])
    # The folder holds an answer that was measured.
    assert (folder / "out" / "result.json").read_bytes() == kept

    asked.remove("--json")
    ran = here.command(*asked, cwd=folder)
    assert ran.returncode == 6
    assert "PREDICTED, not measured" in ran.stdout
    assert "written" not in ran.stdout


@pytest.mark.usefixtures("forked_workers")
def test_killed_half_way_nothing_is_left_and_the_command_goes_on(folder: Path) -> None:
    process = start(folder, "29MB")
    time.sleep(5.0)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 10
    while left_behind(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left_behind(folder)
    ran = here.command(*arguments("29MB"), cwd=folder)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)["measured"]
    # A probe that was stopped beside a faster one, which then failed its confirmation, has its own instead.
    assert found["confirmation" if found["confirmed"] else "best"]["fits"]
    study = optuna.load_study(
        study_name=f"{STUDY}-29MB", storage=unpooled(f"sqlite:///{folder}/studies/autotune.db")
    )
    assert all(trial.state.is_finished() for trial in study.trials)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_a_card_that_torch_cannot_use_is_planned_for_unless_measuring_was_asked_for(
    backend: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this torch can use CUDA")
    monkeypatch.setattr(gpus, "detect", lambda: [gpus.find_gpu("rtx-4070")])
    text = (
        f"find --model tiny --backend {backend} --gpu-mem 2GB --space space.yaml --method full "
        f"--seq-len 64 --effective-batch 8 --out {backend}"
    )
    ran = here.command(*text.split(), cwd=folder)
    assert "CUDA" in ran.stderr
    if backend == "cuda":
        assert (ran.returncode, ran.stdout) == (3, "")
        assert "PyTorch cannot use the GPU of this machine" in ran.stderr
        return
    assert ran.returncode == 0, ran.stderr
    assert "note: nothing could be measured, so the answer is predicted." in ran.stderr
    assert "PREDICTED, not measured" in ran.stdout
    # What is predicted leaves room, as what is measured need not.
    result = json.loads((folder / backend / "result.json").read_text(encoding="utf-8"))
    assert result["headroom"] == {"odds": 0.99, "spare_bytes": None}
    assert "room0" not in ran.stdout
