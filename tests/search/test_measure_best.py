"""When the loader of an answer is timed, and what becomes of an answer where that fails."""

from __future__ import annotations

import dataclasses
from typing import Any

import answers
import pytest

from autotune.errors import WorkerError
from autotune.search import measure_best
from autotune.search.listener import SILENT
from autotune.space.config import Workload
from autotune.space.lengths import Lengths
from autotune.space.requirements import LeftOut, Reason


def timed(workload: Workload, said: list[str], data: Any = "a dataset") -> Any:
    listener = dataclasses.replace(SILENT, note=said.append)
    server: Any = None
    return measure_best._time_loaders(server, data, workload, answers.measured(), listener)


def test_a_loader_is_timed_where_there_is_data_and_the_user_has_not_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure_best, "time_loaders", lambda *asked: asked[-1])
    said: list[str] = []
    assert timed(answers.WORKLOAD, said) == answers.measured().best
    assert timed(answers.WORKLOAD, said, data=None) is None
    decided = dataclasses.replace(answers.WORKLOAD, extra_arguments='{"dataloader_num_workers": 2}')
    assert timed(decided, said) is None
    assert said == []


def test_a_loader_that_cannot_be_timed_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise WorkerError("it was killed")

    monkeypatch.setattr(measure_best, "time_loaders", fails)
    said: list[str] = []
    assert timed(answers.WORKLOAD, said) is None
    assert "it was killed" in said[0]


def test_a_measured_answer_is_the_best_of_its_class() -> None:
    base = dataclasses.replace(answers.BASE, gradient_accumulation_steps=32)
    answer = answers.answer(base=base)
    predicted = answers.estimate(dataclasses.replace(answers.CONFIG, micro_batch_size=2))
    answer.best_by_class[answer.best_class] = predicted
    found = measure_best.with_measured(answer, answers.measured())
    assert found.best_by_class == {**answer.best_by_class, answer.best_class: answers.estimate()}


@pytest.mark.parametrize(
    ("num_compiled", "not_compiled", "reasons"),
    [
        (0, "", [Reason.NOT_PREDICTED, Reason.NOT_TRACED]),
        (0, "no compiler", [Reason.NOT_COMPILED, Reason.NOT_TRACED]),
        (1, "", [Reason.NOT_TRACED]),
    ],
)
def test_what_was_compiled_is_not_left_out(
    num_compiled: int, not_compiled: str, reasons: list[Reason]
) -> None:
    left_out = tuple(
        LeftOut("w", reason, "d") for reason in (Reason.NOT_PREDICTED, Reason.NOT_TRACED)
    )
    answer, measured = (
        answers.answer(left_out=left_out),
        answers.measured(num_compiled=num_compiled),
    )
    found = measure_best.with_measured(answer, measured, not_compiled=not_compiled)
    assert [each.reason for each in found.left_out] == reasons
    assert [each.details == not_compiled for each in found.left_out[:-1]] == [
        bool(not_compiled)
    ] * (len(reasons) - 1)


@pytest.mark.parametrize(
    ("batching", "useful_share", "num_steps"),
    [
        # 32 samples of 1,024 tokens are 32,768 a step, of 100,000: a stream has more than samples keep.
        ("packed", 1.0, 4),
        ("padded", 1.0, 3),
        ("padded", 0.5, 5),
    ],
)
def test_an_epoch_is_as_many_steps_as_its_useful_tokens_take(
    batching: str, useful_share: float, num_steps: int
) -> None:
    config = dataclasses.replace(answers.CONFIG, batching=batching)
    lengths = Lengths(
        num_samples=100, num_tokens=100_000, num_kept_tokens=80_000, percentiles=(800,) * 101
    )
    best = answers.estimate(config, useful_share=useful_share)

    def steps(lengths: Lengths | None) -> int | None:
        workload = dataclasses.replace(answers.WORKLOAD, lengths=lengths)
        return measure_best.steps_per_epoch(answers.answer(best=best, workload=workload))

    assert steps(lengths) == num_steps
    assert steps(None) is None
    # A stream that fills no block has no step; samples have one.
    short = dataclasses.replace(lengths, num_tokens=1023, num_kept_tokens=1023)
    assert steps(short) == (None if batching == "packed" else 1)
