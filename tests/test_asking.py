"""A question on its way: what it carries, what stays, and how it is read elsewhere."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import answers
import pytest

from autotune import asking
from autotune.errors import ConfigError, HardwareError, NothingFitsError, WorkerError
from autotune.jobs import Wanted
from autotune.options import FindOptions

SPACE = """
name: small
methods:
  full:
    micro_batch_size: [1, 2]
    precision: [bf16-true]
    optimizer: [adamw_torch_fused]
"""
MODEL = {"model_type": "gpt2", "n_layer": 2, "n_positions": 256, "vocab_size": 100}


def prepared(**options: Any) -> tuple[dict[str, Any], Wanted]:
    question, wanted = asking.prepare(FindOptions(**options))
    # As the database gives it back.
    return json.loads(json.dumps(question)), wanted


def test_a_question_needs_no_file_where_it_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laptop, machine = tmp_path / "laptop", tmp_path / "machine"
    (laptop / "mine").mkdir(parents=True)
    machine.mkdir()
    (laptop / "mine" / "config.json").write_text(json.dumps(MODEL))
    (laptop / "small.yaml").write_text(SPACE)
    monkeypatch.chdir(laptop)
    options = {
        "model": "mine",
        "gpu": "rtx-4090",
        "gpu_mem": "12GB",
        "methods": ("full", "lora"),
        "seq_len": 128,
    }
    question, wanted = prepared(**options, space="small.yaml")
    assert wanted == Wanted(card="NVIDIA RTX 4090", budget_bytes=12 * 10**9)
    monkeypatch.chdir(machine)
    asked = asking.read(question, machine, backend="cuda")
    assert (asked.source.name, asked.source.config) == ("mine", MODEL)
    assert Path(asked.options.space).read_text() == SPACE
    given = FindOptions(**options, backend="cuda")  # type: ignore[arg-type]
    assert dataclasses.replace(asked.options, space="default") == given


def test_a_shipped_space_goes_by_its_name() -> None:
    question, wanted = prepared(model="gpt2", gpu="rtx-4090", space="quick")
    assert question["space"] is None
    assert question["options"]["space"] == "quick"
    assert wanted.budget_bytes is None


def test_probes_on_a_cpu_want_one_and_a_budget() -> None:
    assert prepared(model="gpt2", backend="cpu", gpu_mem="500MB")[1] == Wanted(
        card="CPU", budget_bytes=500_000_000
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "There is no model"),
        ({"gpu": None}, "needs to know the card"),
        ({"gpu": None, "backend": "cpu"}, "no memory budget"),
        ({"backend": "cpu", "gpu_mem": "1GB"}, "--gpu does not go with --backend cpu"),
        ({"backend": "predict"}, "A prediction needs no other machine"),
        ({"num_gpus": 2}, "Probes run on one GPU"),
        ({"gpu_mem": "30GB"}, "more than the"),
        ({"gpu_mem": "much"}, "much"),
        ({"model": "gtp2"}, "gpt2"),
        ({"space": "nowhere.yaml"}, "no search space"),
        ({"seq_len": 5000}, "too long"),
        ({"dataset": Path("data.jsonl")}, "--dataset does not go with --enqueue"),
        ({"base": Path("run.yaml")}, "--base does not go with --enqueue"),
        ({"tokenizer": "here"}, "--tokenizer does not go with --enqueue"),
    ],
)
def test_what_no_other_machine_can_answer_is_refused_here(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        prepared(**{"model": "openai-community/gpt2", "gpu": "rtx-4090", **options})
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "question", [{}, {"schema_version": 99}, {"schema_version": 1, "options": {"new": 1}}]
)
def test_a_question_of_another_version_is_refused(question: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        asking.read({"space": None, "model": {}, **question}, tmp_path, backend="cpu")


def test_the_files_of_an_answer_are_those_of_find(tmp_path: Path) -> None:
    result = json.loads(json.dumps({**answers.summary().to_dict(), "files": []}))
    summary, files, unsaid = asking.write_files(result, tmp_path / "out")
    assert summary.exported == answers.CONFIG
    assert {"train.py", "train_config.yaml", "result.json"} <= {path.name for path in files}
    assert all(path.exists() for path in files)
    assert json.loads((tmp_path / "out" / "result.json").read_text())["files"] == [
        str(path) for path in files
    ]
    assert isinstance(unsaid, dict)


@pytest.mark.parametrize(
    ("code", "kind"),
    [(4, NothingFitsError), (3, HardwareError), (1, WorkerError), (None, WorkerError)],
)
def test_why_there_is_no_answer_ends_the_command_as_it_would_have_here(
    code: int | None, kind: type[Exception]
) -> None:
    error = asking.error_of("Nothing fits.", code)
    assert type(error) is kind
    assert str(error) == "Nothing fits."
