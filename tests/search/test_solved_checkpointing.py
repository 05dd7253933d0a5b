"""Plans of checkpointing against brute force: every plan with every number of lean layers."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from pathlib import Path

import here
import pytest
import tiny_model

from autotune.errors import ConfigError
from autotune.memory.traces import BrokenTrace, Trace
from autotune.predict.estimator import Estimator
from autotune.predict.sharding.shared_trace import SharedTrace
from autotune.predict.tracing import trace_all
from autotune.records.estimate import Estimate, TraceSpec
from autotune.records.measurement import NOISE
from autotune.records.question import Question
from autotune.search import predict_best, solved_checkpointing
from autotune.search.candidates import Candidates
from autotune.search.estimate import estimate
from autotune.search.inverse.limits import resolve_limit
from autotune.search.solved_checkpointing import PlanSolver, families_of, plan_specs
from autotune.space.checkpoint_plans import CHECKPOINT_PLANS, SOLVE, plan_offloads
from autotune.space.config import TrainConfig, Workload
from autotune.space.headroom import NO_HEADROOM
from autotune.space.search_space import MethodSpace, SearchSpace, without_solve

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]

NUM_LAYERS = 10
LENGTH = 1024
MODEL = dataclasses.replace(
    tiny_model.MODEL,
    config={**tiny_model.MODEL.config, "num_hidden_layers": NUM_LAYERS, "vocab_size": 4096},
)
FREE = TrainConfig(
    method="full",
    micro_batch_size=4,
    gradient_accumulation_steps=2,
    sequence_length=LENGTH,
    precision="bf16-true",
    optimizer="adamw_torch_fused",
)
LORA = dataclasses.replace(
    FREE, method="lora", precision="bf16-autocast", lora_rank=16, lora_targets="all-linear"
)
METHODS = {"full": FREE, "lora": LORA}
HOST_BYTES = 10**12
"""More of the host than any plan takes."""


def checkpointed(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, activation_checkpointing=1)


@functools.cache
def traced() -> dict[TraceSpec, Trace | SharedTrace]:
    specs = {TraceSpec.of(config) for config in METHODS.values()}
    specs |= {TraceSpec.of(checkpointed(config)) for config in METHODS.values()}
    specs |= {
        spec for config in METHODS.values() for spec in plan_specs(checkpointed(config), HOST_BYTES)
    }
    return trace_all(MODEL, "causal-lm", LENGTH, tiny_model.gpu(), specs, server=here.workers)


def estimator(
    budget_bytes: int,
    traces: dict[TraceSpec, Trace | SharedTrace],
    host_bytes: int | None = None,
) -> Estimator:
    return Estimator(
        traces,
        tiny_model.gpu(),
        memory_budget_bytes=budget_bytes,
        host_memory_bytes=host_bytes,
    )


def speed(found: Estimate) -> float:
    assert found.tokens_per_second is not None
    return found.tokens_per_second


@functools.cache
def all_plans(method: str) -> list[Estimate]:
    lean, traces = checkpointed(METHODS[method]), dict(traced())
    found = []
    for plan in CHECKPOINT_PLANS:
        of_any = traces[TraceSpec.of(dataclasses.replace(lean, checkpoint_plan=plan))]
        assert isinstance(of_any, Trace)
        for count in of_any.lean_layers:
            config = dataclasses.replace(lean, checkpoint_plan=plan, checkpoint_layers=count)
            traces[TraceSpec.of(config)] = of_any.with_lean_layers(count)
            found.append(estimator(10**12, traces).estimate(config))
    return found


@functools.cache
def priced() -> tuple[Estimator, dict[TraceSpec, Trace | SharedTrace]]:
    """An estimator for the solver's plans, and its traces: all limits share what is replayed."""
    return estimator(10**12, traces := dict(traced())), traces


@pytest.mark.parametrize("host", ["unsaid", "some", "any"])
@pytest.mark.parametrize("method", METHODS)
def test_the_solver_finds_what_brute_force_does(method: str, host: str) -> None:
    every = all_plans(method)
    # Of what offloads a stretch has four layers at least.
    assert len(every) == 3 * 5 + 3 * 3
    needed = sorted(found.host_bytes for found in every if found.host_bytes)
    host_bytes = {"unsaid": None, "some": needed[len(needed) // 2], "any": HOST_BYTES}[host]
    every = [found for found in every if found.host_bytes <= (host_bytes or 0)]
    # A budget between each two of them, and one below and above all.
    peaks = sorted({found.peak_device_bytes for found in every})
    budgets = [peaks[0] - 1, *peaks]
    assert len(budgets) > 10
    plans = set()
    shared, traces = priced()
    roomy = copy.copy(shared)
    roomy.host_memory_bytes = host_bytes
    for budget_bytes in budgets:
        solver = PlanSolver(roomy.with_budget(budget_bytes), traces)
        solved = solver.solved(checkpointed(METHODS[method]))
        fitting = [found for found in every if found.peak_device_bytes <= budget_bytes]
        if not fitting:
            assert solved is None
            continue
        assert solved is not None
        assert solved.peak_device_bytes <= budget_bytes
        assert speed(solved) == max(map(speed, fitting))
        plans.add(solved.config.checkpoint_plan)
    assert len(plans) > 1
    assert any(map(plan_offloads, plans)) == (host != "unsaid")


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_checkpointed_where_all_fits_and_everything_where_nothing_does(
    method: str,
) -> None:
    config = METHODS[method]
    free = estimator(10**12, traced()).estimate(config).peak_device_bytes

    def chosen(budget_bytes: int) -> TrainConfig:
        solver = PlanSolver(estimator(budget_bytes, traces := dict(traced())), traces)
        return solver.least_checkpointed(checkpointed(config))

    assert chosen(free) == config
    assert chosen(free - 1).has_plan
    assert chosen(10**9 // 4) == checkpointed(config)


def space(*checkpointing: int) -> SearchSpace:
    domains = {
        # Of smaller ones all would fit without.
        "micro_batch_size": (4, 8),
        "precision": (FREE.precision,),
        "optimizer": (FREE.optimizer,),
        "activation_checkpointing": checkpointing,
        "expandable_segments": (False, True),
    }
    return SearchSpace(
        name="s", description="", methods=(MethodSpace(method="full", domains=domains),)
    )


def test_solve_stands_for_no_and_all_layers_and_is_no_point() -> None:
    plain, methods = without_solve(space(2, SOLVE))
    assert methods == {"full"}
    assert plain.methods[0].domains["activation_checkpointing"] == (2, 0, 1)
    assert without_solve(plain) == (plain, frozenset())
    assert space(0, 1, SOLVE).methods[0].num_points == space(0, 1).methods[0].num_points


def searched(
    budget_bytes: int, *checkpointing: int, host_bytes: int | None = None
) -> predict_best.Prediction:
    workload = Workload(
        model=MODEL.name,
        sequence_length=LENGTH,
        effective_batch_size=8,
        methods=("full",),
        memory_budget_bytes=budget_bytes,
        headroom=NO_HEADROOM,
        host_memory_bytes=host_bytes,
    )
    return predict_best.find(
        MODEL, workload, space(*checkpointing), tiny_model.gpu(), allow="exact", base=FREE
    )


@pytest.mark.parametrize("host_bytes", [None, HOST_BYTES])
def test_a_search_is_faster_with_what_is_solved_and_uses_the_memory_there_is(
    host_bytes: int | None,
) -> None:
    every = [each for each in all_plans("full") if host_bytes or not each.host_bytes]
    every.sort(key=lambda found: found.peak_device_bytes)
    budget_bytes = every[len(every) // 2].peak_device_bytes
    listed, solved = (
        searched(budget_bytes, *each, host_bytes=host_bytes) for each in ((0, 1), (0, 1, SOLVE))
    )
    best = solved.answer.best
    assert best.config.has_plan
    assert plan_offloads(best.config.checkpoint_plan) == (host_bytes is not None)
    assert best.peak_device_bytes <= budget_bytes
    assert speed(best) > speed(listed.answer.best) * (1 + NOISE)
    # No plan at this micro-batch that fits is faster by more than the noise.
    fitting = [found for found in every if found.peak_device_bytes <= budget_bytes]
    assert speed(best) * (1 + NOISE) >= max(map(speed, fitting))
    assert solved.answer.counts.enumerated > listed.answer.counts.enumerated
    # The report tells what checkpointing costs, and has a way from the base to the plan.
    assert "activation_checkpointing" in {each.setting for each in solved.answer.changes}
    changed = [set(step.changed) for step in solved.details(solved.answer).path]
    assert {"activation_checkpointing", "checkpoint_plan", "checkpoint_layers"} in changed


def test_what_needs_no_further_traces_may_win_beyond_the_most_families(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(solved_checkpointing, "MOST_FAMILIES", 1)
    peaks = sorted(found.peak_device_bytes for found in all_plans("full"))
    priced = estimator(peaks[len(peaks) // 2], dict(traced()))
    lean = checkpointed(FREE)
    smaller = dataclasses.replace(lean, micro_batch_size=2, gradient_accumulation_steps=4)
    candidates = Candidates(priced, [lean, smaller], FREE)
    methods = frozenset({"full"})
    [families] = families_of(candidates, [lean, smaller], priced, methods=methods, allow="exact")
    assert set(families.leans) == {lean, smaller}


def test_nothing_is_solved_where_all_fits_without() -> None:
    plenty = searched(10**12, 0, 1, SOLVE).answer
    assert not plenty.best.config.has_plan
    assert plenty.counts.enumerated == searched(10**12, 0, 1).answer.counts.enumerated


def test_one_configuration_is_solved_and_a_limit_is_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL.config), encoding="utf-8")
    budget_bytes = max(found.peak_device_bytes for found in all_plans("full"))
    question = Question(
        model=str(tmp_path / "config.json"),
        gpu="rtx-4070",
        gpu_mem=f"{budget_bytes}B",
        headroom="0",
        seq_len=LENGTH,
        methods=("full",),
        accumulation=2,
        settings={
            "micro_batch_size": 4,
            "precision": FREE.precision,
            "activation_checkpointing": SOLVE,
        },
    )
    found = estimate(question).estimate
    assert found.config.has_plan
    assert found.peak_device_bytes <= budget_bytes
    with pytest.raises(ConfigError, match="--checkpointing solve does not go with `max`"):
        resolve_limit(question, "sequence-length", multiple_of=64)
    offloaded = {**question.settings, "activation_offloading": True}
    with pytest.raises(ConfigError, match="says itself what waits in host memory"):
        estimate(dataclasses.replace(question, settings=offloaded))


def test_a_number_that_no_trace_tells_of_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL.config), encoding="utf-8")
    question = Question(
        model=str(tmp_path / "config.json"),
        gpu="rtx-4070",
        seq_len=LENGTH,
        methods=("full",),
        settings={
            "activation_checkpointing": 1,
            "checkpoint_plan": "recompute",
            "checkpoint_layers": NUM_LAYERS - 1,
        },
    )
    with pytest.raises(ConfigError, match="Each stretch of layers needs three"):
        estimate(question)


def test_a_trace_that_tells_of_no_such_number_has_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise BrokenTrace("layer 6 makes nothing like the trace's tensor 9")

    monkeypatch.setattr(PlanSolver, "_promises", broken)
    solver = PlanSolver(None, {})  # type: ignore[arg-type]
    assert solver.promise(checkpointed(LORA)) == 0
    assert solver.solved(checkpointed(LORA)) is None
