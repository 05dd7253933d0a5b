"""torch.compile in a predicted search: what is traced, what may win, and what is said."""

from __future__ import annotations

import dataclasses
import io
from types import SimpleNamespace
from typing import Any

import answers
import here
import pytest
import tiny_model

from autotune.errors import ConfigError, HardwareError
from autotune.memory.traces import Trace
from autotune.probe import compiled
from autotune.records.answer import Answer, answer_from_dict, stored_record
from autotune.records.compilation import Compilation
from autotune.records.estimate import TraceSpec
from autotune.report import terminal, words
from autotune.search import compiled_candidates, predict_best
from autotune.search.compiled_candidates import predicted_ways, without_predicted
from autotune.search.predict_best import find
from autotune.space.requirements import Reason

SPACE = compiled.with_mode(tiny_model.SPACE, "default")
WAYS = compiled.settings_of(SPACE)


def test_only_what_is_modelled_is_predicted() -> None:
    assert predicted_ways(WAYS, "cuda") == WAYS
    assert not any(predicted_ways(WAYS, "cpu").values())
    others = compiled.settings_of(compiled.with_mode(tiny_model.SPACE, "max-autotune"))
    assert not any(predicted_ways(others, "cuda").values())


def test_the_eager_space_has_none_of_what_is_predicted() -> None:
    left = without_predicted(SPACE, WAYS)
    assert {section.domains["torch_compile"] for section in left.methods} == {("none",)}
    assert without_predicted(SPACE, predicted_ways(WAYS, "cpu")) == SPACE
    assert without_predicted(tiny_model.SPACE, WAYS) == tiny_model.SPACE


@pytest.fixture(scope="module")
def found() -> Answer:
    return search(24 * 10**9)


def search(budget_bytes: int, **options: Any) -> Answer:
    workload = tiny_model.workload(budget_bytes, ("full",))
    with here.workers.at_work():
        return find(tiny_model.SHALLOW, workload, SPACE, tiny_model.gpu(), **options).answer


@pytest.mark.worker
def test_a_compiled_configuration_may_win_and_is_labelled(found: Answer) -> None:
    outcome = found.compilation
    assert outcome is not None
    assert outcome.compiled.config.is_compiled
    assert not outcome.eager.config.is_compiled
    assert not outcome.compiled.is_bound
    compiled_speed, eager_speed = (
        estimate.tokens_per_second or 0 for estimate in (outcome.compiled, outcome.eager)
    )
    assert found.best.config.is_compiled == (compiled_speed > eager_speed)
    assert not any("torch.compile" in str(each) for each in found.left_out)
    drawn = io.StringIO()
    terminal.draw_answer(found, drawn)
    assert "compiles for" in " ".join(drawn.getvalue().split())
    assert answer_from_dict(stored_record(found)) == found


@pytest.mark.worker
def test_what_cannot_be_traced_compiled_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    trace_all = predict_best.trace_all

    def refusing(*args: Any, **rest: Any) -> None:
        if any(spec.is_compiled for spec in args[-1]):
            raise ConfigError("tiny-llama cannot be traced", why="its graph breaks")
        trace_all(*args, **rest)

    monkeypatch.setattr(predict_best, "trace_all", refusing)
    answer = search(24 * 10**9)
    assert answer.compilation is None
    assert "its graph breaks" in " ".join(map(str, answer.left_out))
    assert not answer.best.config.is_compiled


@pytest.mark.parametrize(
    ("ways", "traced", "why"),
    [
        ({}, None, "nothing that fits without it can be predicted with it"),
        (
            WAYS,
            ConfigError("x cannot be traced", why="its graph breaks"),
            "step cannot be traced: its gr",
        ),
        (WAYS, HardwareError("no card"), "its compiled step cannot be traced: no card"),
        (WAYS, "", ""),
        (WAYS, "a graph breaks", "a graph breaks"),
        (WAYS, None, "it was not traced"),
    ],
)
def test_why_nothing_is_predicted_compiled_is_said(
    monkeypatch: pytest.MonkeyPatch, ways: Any, traced: Any, why: str
) -> None:
    best = answers.estimate(dataclasses.replace(answers.CONFIG, micro_batch_size=1))
    candidates: Any = SimpleNamespace(
        exactly=lambda name: name, best=lambda name: best if name == "exact" else None
    )
    traces: dict[TraceSpec, Any] = {}

    class Made(Trace):
        def __init__(self) -> None:
            self.not_compiled, self.is_compiled = traced, not traced

    def trace(specs: set[TraceSpec]) -> None:
        assert specs
        assert all(spec.is_compiled for spec in specs)
        # With layers checkpointed and without, of one sample and of several.
        assert {(spec.activation_checkpointing, spec.single) for spec in specs} == {
            *((2, True), (2, False), (0, True), (0, False)),
        }
        if isinstance(traced, Exception):
            raise traced
        if traced is not None:
            traces.update({spec: Made() for spec in specs})

    def configs(allow: str | None) -> Any:
        return compiled_candidates.compiled_configs(
            candidates, [best.config], ways, allow=allow, trace=trace, traces=traces
        )

    found, left_out = configs(None)
    if why:
        assert found == []
        assert [each.reason for each in left_out] == [Reason.NOT_PREDICTED]
        assert why in str(left_out[0])
        return
    assert left_out == ()
    assert found == [dataclasses.replace(best.config, torch_compile="default")]
    # Nothing of a class that may not be the answer is compiled.
    candidates.best = lambda name: best if name == "recipe" else None
    assert configs("recipe")[0] == found
    assert configs("numerics")[0] == []


def pair(compiled_seconds: float, compile_seconds: tuple[float, float]) -> Compilation:
    eager = dataclasses.replace(
        answers.estimate(), micro_step_seconds=1.0, optimizer_step_seconds=0.0
    )
    accumulation = eager.config.gradient_accumulation_steps
    fast = dataclasses.replace(
        eager,
        config=dataclasses.replace(eager.config, torch_compile="default"),
        micro_step_seconds=compiled_seconds / accumulation,
        compile_seconds=compile_seconds,
    )
    eager = dataclasses.replace(eager, micro_step_seconds=1.0 / accumulation)
    return Compilation(compiled=fast, eager=eager)


@pytest.mark.parametrize(
    ("compiled_seconds", "pays_after", "said"),
    [
        (0.75, (40, 160), "after 40 to 160 steps"),
        (1.0, None, "never pays"),
        (1.5, None, "never pays"),
    ],
)
def test_compiling_pays_after_so_many_steps(
    compiled_seconds: float, pays_after: tuple[int, int] | None, said: str
) -> None:
    outcome = pair(compiled_seconds, (10.0, 40.0))
    assert outcome.pays_after_steps == pays_after
    answer = dataclasses.replace(answers.answer(), compilation=outcome)
    assert said in words.predicted_compilation(answer)
    expected = None if pays_after is None else list(pays_after)
    assert outcome.to_dict(10**9)["pays_after_steps"] == expected
    assert words.predicted_compilation(answers.answer()) == ""
