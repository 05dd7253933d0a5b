"""What a limit's pricer and its questions make of a case, without a trace."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import answers
import pytest
import tiny_model

from autotune.errors import ConfigError
from autotune.predict.floors import least_bytes
from autotune.search import room
from autotune.search.inverse import questions
from autotune.search.inverse.pricing import Case, Pricer
from autotune.search.predict_best import Prediction

CASE = Case(
    value=1,
    source=tiny_model.MODEL,
    gpu=tiny_model.gpu(),
    budget_bytes=10**9,
    sequence_length=answers.CONFIG.sequence_length,
    fixed={},
)


@pytest.mark.parametrize(
    ("limit_bytes", "host_bytes", "peak_bytes"),
    [
        (None, 0, 300),
        (None, 10**9, 300),
        (100, 0, 300),
        (0, 0, 300),
        (100, 20, 300),  # a fifth of the host's memory, and less than a third of the card's
        (100, 50, 500),
        (100, 100, 1000),
        (100, 101, 1010),
        (3, 1, 334),
        (0, 7, 7000),
        (1, 7, 7000),
    ],
)
def test_a_peak_counts_the_scarcer_memory(
    limit_bytes: int | None, host_bytes: int, peak_bytes: int
) -> None:
    told: list[tuple[str, int, int]] = []
    estimator = SimpleNamespace(
        room_for=lambda _: 1000,
        estimate=lambda config: SimpleNamespace(peak_device_bytes=300, all_host_bytes=host_bytes),
    )
    pricer: Any = SimpleNamespace(
        _num_tried=4,
        _estimator=lambda case, configs: estimator,
        _progress=lambda *done: told.append(done),
        num_traces=2,
        host_memory_bytes=limit_bytes,
    )
    assert Pricer.peak_bytes(pricer, CASE, answers.CONFIG) == peak_bytes
    assert told == [("tried", 5, 2)]


def test_what_weights_alone_do_not_fit_is_hopeless(monkeypatch: pytest.MonkeyPatch) -> None:
    pricer: Any = SimpleNamespace(task=lambda _: "causal-lm")
    count = room.num_said(tiny_model.MODEL, "causal-lm")
    vocab_size = room.vocab_size_of(tiny_model.MODEL, "causal-lm")
    assert (count, vocab_size) == (tiny_model.MODEL.num_parameters_known, 32_000)
    if count is None:
        count = 80_000_000
        monkeypatch.setattr(room, "num_said", lambda *_: count)
    least = least_bytes(answers.CONFIG, count, vocab_size)
    for budget_bytes, is_hopeless in ((least - 1, True), (least, False)):
        case = dataclasses.replace(CASE, budget_bytes=budget_bytes)
        assert Pricer._is_hopeless(pricer, case, answers.CONFIG) is is_hopeless
    monkeypatch.setattr(room, "num_said", lambda *_: None)
    case = dataclasses.replace(CASE, budget_bytes=1)
    assert Pricer._is_hopeless(pricer, case, answers.CONFIG) is False


def test_the_largest_models_that_take_the_length_are_asked_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sources = {
        "a": (10, 512, "causal-lm"),
        "b": (20, 511, "causal-lm"),
        "c": (30, 513, "causal-lm"),
        "d": (40, None, "causal-lm"),
        "e": (50, None, "masked-lm"),
        "z": (10, None, "causal-lm"),
    }
    entries = [SimpleNamespace(hub_id=name, num_parameters=of[0]) for name, of in sources.items()]

    def resolve(name: str) -> Any:
        _, longest, task = sources[name]
        return SimpleNamespace(task=task, max_sequence_length=longest)

    monkeypatch.setattr(questions.models, "catalogue", lambda: entries)
    monkeypatch.setattr(questions.models, "resolve", resolve)
    monkeypatch.setattr(questions, "_case", lambda asked, name, source: name)
    monkeypatch.setattr(questions, "_first", lambda cases, why, pricer: cases)

    def asked(length: int, task: str | None = None) -> Any:
        question = SimpleNamespace(task=task)
        found: Any = SimpleNamespace(question=question, sequence_length=length)
        return questions._largest_model(found, object())  # type: ignore[arg-type]

    assert asked(512) == ["d", "c", "a", "z"]
    assert asked(513) == ["d", "c", "z"]
    assert asked(1, "masked-lm") == ["e"]
    del sources["d"], sources["z"]
    entries[:] = [each for each in entries if each.hub_id in sources]
    with pytest.raises(ConfigError, match="No model of the catalogue takes 514 tokens"):
        asked(514)


def test_a_program_that_cannot_go_on_with_another_has_no_plan_b() -> None:
    class Candidates:
        def at_most(self, name: str) -> str:
            return f"at most {name}"

        def fallbacks(self, best: Any, is_allowed: str) -> tuple[Any, ...]:
            return best, is_allowed

    prediction: Any = SimpleNamespace(_candidates=Candidates())

    def plan_b(**changes: Any) -> Any:
        best = answers.estimate(dataclasses.replace(answers.CONFIG, **changes))
        answer: Any = SimpleNamespace(allow="exact", best=best, workload=workload)
        found = Prediction.fallbacks(prediction, answer)
        assert found in ((), (best, "at most exact"))
        return bool(found)

    workload: Any = dataclasses.replace(answers.WORKLOAD, pictures=None)
    assert plan_b()
    assert not plan_b(trainer="sentence-transformers")
    workload = SimpleNamespace(pictures="some")
    assert not plan_b()
