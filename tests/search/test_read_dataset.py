"""Questions about a dataset: what a worker is asked, what it may answer; tests/contracts has real ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import answers
import pytest
import tiny_model
from ends import ended

from autotune.errors import ConfigError, WorkerError
from autotune.records.loader_times import settings_to_time
from autotune.records.question import Question
from autotune.search import dataset
from autotune.space.dataset import Dataset
from autotune.space.lengths import Lengths
from autotune.worker.client.isolate import WorkerEnd

SEEN: dict[str, Any] = {
    "format": "prompts",
    "text_field": "prompt",
    "answer_field": None,
    "loss_on": "all",
    "input_field": None,
    "system_field": None,
    "history_field": None,
    "has_weights": False,
    "is_sharegpt": False,
    "unread": [],
    "unusual": [],
    "counts": [[8, 1], [9, 1], [20, 2]],
    "num_samples": 40,
    "longest": 20,
}


class Worker:
    """Stands for the process that reads a dataset, or for the server that forks one."""

    def __init__(self, *given: Any, **how: Any) -> None:
        self.end = ended(*given, **how)
        self.asked: list[tuple[str, Mapping[str, Any]]] = []

    def run(self, verb: str, request: Mapping[str, Any], *, deadline_seconds: float) -> WorkerEnd:
        assert deadline_seconds == dataset.DEADLINE_SECONDS
        self.asked.append((verb, request))
        return self.end


def read(
    monkeypatch: pytest.MonkeyPatch,
    answer: dict[str, Any],
    *,
    length: int = 24,
    beside: int = 0,
    **asked: Any,
) -> tuple[Dataset, Lengths, list[str], Mapping[str, Any]]:
    worker = Worker(answer)
    monkeypatch.setattr(dataset, "run", worker.run)
    notes: list[str] = []
    found, lengths = dataset.read_dataset(
        Question(**{"dataset": "on/the-hub", **asked}),
        tiny_model.MODEL,
        "grpo",
        length,
        beside=beside,
        note=notes.append,
    )
    ((verb, request),) = worker.asked
    assert verb == "lengths"
    return found, lengths, notes, request


def test_a_dataset_is_recognised_and_its_samples_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found, lengths, notes, request = read(monkeypatch, SEEN, text_field="prompt")
    assert request == {
        "dataset": "on/the-hub",
        "task": "grpo",
        "tokenizer": tiny_model.MODEL.folder_or_id,
        "format": None,
        "text_field": "prompt",
        "answer_field": None,
        "loss_on": None,
    }
    assert found == Dataset(
        name="on/the-hub",
        tokenizer=tiny_model.MODEL.folder_or_id,
        format="prompts",
        loss_on="all",
        text_field="prompt",
    )
    assert (lengths.num_samples, lengths.longest) == (40, 20)
    assert lengths.num_tokens == 10 * (8 + 9 + 2 * 20)
    assert notes == []
    # A file is named as any process finds it, and as the user named it.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.txt").write_text("word")
    found, _, _, request = read(monkeypatch, SEEN, dataset="data.txt", tokenizer="mine")
    assert (request["dataset"], request["tokenizer"]) == (str(tmp_path / "data.txt"), "mine")
    assert (found.name, found.tokenizer) == ("data.txt", "mine")
    # A tokenizer of another model may have tokens that this one does not.
    size = tiny_model.MODEL.config["vocab_size"]
    for more in (0, 1):
        counted = {**SEEN, "vocabulary_size": size + more}
        _, _, notes, _ = read(monkeypatch, counted, tokenizer="mine")
        assert len(notes) == more
        assert all("the model a vocabulary of" in note for note in notes)
    # Samples are cut off, and fields that are not trained on are said.
    for form, unread, way in (
        ("prompts", ["system", "tools"], "--format names another"),
        ("text", ["label"], "--task sequence-classification reads labels"),
        ("text", ["system"], "--format names another"),
        ("text", ["Category"], "--task sequence-classification reads labels"),
        ("text", ["label", "spans"], "--task token-classification reads spans"),
        ("chat", ["chosen", "rejected"], "--task dpo reads preferences"),
        ("preferences", ["system", "question"], "TRL reads what is asked in prompt: rename it"),
        ("prompt-completion", ["label"], "--task kto reads labels that are true or false"),
    ):
        _, cut, notes, _ = read(monkeypatch, {**SEEN, "format": form, "unread": unread}, length=10)
        assert cut.longest == 10
        names = " and ".join(unread)
        assert notes == [
            f"{names} of the samples: no part of the format {form}, so not trained on ({way})."
        ]


def test_a_completion_comes_behind_each_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    _, lengths, notes, _ = read(monkeypatch, SEEN, length=40, beside=12)
    assert (lengths.longest, lengths.num_tokens) == (32, 10 * (20 + 21 + 2 * 32))
    assert notes == []
    # 20 + 12 of 32 tokens fit, of 31 they do not.
    assert read(monkeypatch, SEEN, length=32, beside=12)[2] == []
    _, _, notes, _ = read(monkeypatch, SEEN, length=31, beside=12)
    assert notes == [
        "50% of the prompts have more than 19 tokens, and the run leaves them out. The longest has 20, so "
        "give a longer --seq-len."
    ]
    assert read(monkeypatch, SEEN, length=20, beside=12)[2][0].startswith("75% of the prompts")
    with pytest.raises(ConfigError, match="No prompt of on/the-hub is short enough") as raised:
        read(monkeypatch, SEEN, length=19, beside=12)
    assert "Of 19 tokens 12 are a completion's" in raised.value.why
    assert raised.value.why.endswith("more than the other 7")
    assert "The longest has 20" in raised.value.remedy


def test_a_dataset_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="The dataset on/the-hub cannot be used") as raised:
        read(monkeypatch, {"problem": "It is empty", "remedy": "Name another"})
    assert (raised.value.why, raised.value.remedy) == ("It is empty", "Name another")
    for worker in (Worker(), Worker(SEEN, how="crashed", problem="died")):
        monkeypatch.setattr(dataset, "run", worker.run)
        with pytest.raises(WorkerError, match="The lengths process"):
            dataset.read_dataset(Question(dataset="x"), tiny_model.MODEL, "grpo", 9)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, ""),
        ({"dataset": "x", "tokenizer": "y"}, ""),
        ({"tokenizer": "y"}, "--tokenizer"),
        ({"tokenizer": "y", "text_field": "t"}, "--text-field and --tokenizer"),
        ({"format": "text", "loss_on": "all"}, "--format and --loss-on"),
        ({"answer_field": "a"}, "--answer-field"),
    ],
)
def test_options_of_a_dataset_that_is_not_given(given: dict[str, Any], said: str) -> None:
    notes: list[str] = []
    dataset.note_unread(Question(**given), notes.append)
    told = f"without --dataset nothing is read, which is all that {said} would change."
    assert notes == ([told] if said else [])


DATA = Dataset(name="x", tokenizer="y", format="text", loss_on="all", text_field="text")
TIME = {
    "num_workers": 2,
    "prefetch_factor": 4,
    "pin_memory": None,
    "batch_seconds": 0.1,
    "num_batches": 9,
}
LENGTHS = Lengths.of({100: 3, 1024: 1}, 1024, num_samples=4, longest=1024)


@pytest.mark.parametrize("backend", ["cuda", "cpu"])
@pytest.mark.parametrize("least_workers", [0, 1])
def test_the_loader_of_the_answer_is_timed(
    monkeypatch: pytest.MonkeyPatch, backend: str, least_workers: int
) -> None:
    monkeypatch.setattr(dataset.os, "sched_getaffinity", lambda _: range(6))
    seen = answers.measurement()
    best = dataclasses.replace(
        seen, spec=dataclasses.replace(seen.spec, backend=backend), micro_step_seconds=2.0
    )
    workload = dataclasses.replace(answers.WORKLOAD, dataset=DATA)
    if least_workers:
        extra = '{"dataloader_persistent_workers": true}'
        workload = dataclasses.replace(workload, extra_arguments=extra)
    worker = Worker(TIME, {**TIME, "num_workers": 4})
    found = dataset.time_loaders(worker, DATA, workload, best)  # type: ignore[arg-type]
    assert found.micro_step_seconds == 2.0
    assert [each.num_workers for each in found.times] == [2, 4]
    ((verb, request),) = worker.asked
    assert verb == "loader"
    assert "Trainer" in request.pop("program")
    assert request == {
        "dataset": "x",
        "tokenizer": "y",
        "backend": backend,
        "micro_step_seconds": 2.0,
        "settings": list(
            settings_to_time(6, has_cuda=backend == "cuda", least_workers=least_workers)
        ),
    }


@pytest.mark.parametrize(
    ("worker", "says"),
    [
        (Worker(), "The loader process"),
        (Worker(TIME, how="timeout"), "The loader process"),
        (Worker(TIME, {"problem": "no fields"}), "The loader cannot be timed. no fields"),
        (Worker({**TIME, "num_workers": "two"}), "talked nonsense"),
    ],
)
def test_a_loader_that_cannot_be_timed(worker: Worker, says: str) -> None:
    best = dataclasses.replace(answers.measurement(), micro_step_seconds=2.0)
    with pytest.raises(WorkerError) as raised:
        dataset.time_loaders(worker, DATA, answers.WORKLOAD, best)  # type: ignore[arg-type]
    assert says in str(raised.value)


@pytest.mark.parametrize("batching", ["padded", "grouped", "by-tokens", "packed"])
def test_the_step_that_batches_are_compared_with_is_of_average_length(batching: str) -> None:
    config = dataclasses.replace(answers.CONFIG, batching=batching)
    best = dataclasses.replace(answers.measurement(config=config), micro_step_seconds=2.0)
    workload = dataclasses.replace(answers.WORKLOAD, lengths=LENGTHS)
    found = dataset.time_loaders(Worker(TIME), DATA, workload, best)  # type: ignore[arg-type]
    filled = workload.filling(config)
    seconds = {
        "packed": 2.0,
        # To the loader a whole step is one batch: all of its micro-batches.
        "by-tokens": 2.0 * filled.num_micro_batches * min(filled.full_share, 1.0),
    }.get(batching, 2.0 * filled.full_share)
    assert found.micro_step_seconds == pytest.approx(seconds)
    assert batching == "packed" or found.micro_step_seconds != 2.0
