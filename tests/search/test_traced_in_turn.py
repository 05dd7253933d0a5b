"""A search that leaves traces out answers as one that makes them all."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import here
import pytest
import tiny_model

from autotune.errors import ConfigError, NothingFitsError
from autotune.memory.traces import Trace
from autotune.predict.estimator import Estimator
from autotune.predict.floors import least_bytes
from autotune.predict.tracing import trace_all
from autotune.records.estimate import TraceSpec
from autotune.search import predict_best, room
from autotune.search.candidates import Candidates
from autotune.search.prediction import Prediction
from autotune.search.solved_checkpointing import Families, plan_specs
from autotune.search.traced_in_turn import SAVERS, _faster, of_each_method
from autotune.space.config import TrainConfig
from autotune.space.enumeration import enumerate_configs
from autotune.space.search_space import MethodSpace, SearchSpace

pytestmark = [pytest.mark.slow, pytest.mark.worker]

MB = 10**6
_COMMON: dict[str, Any] = {
    "micro_batch_size": (1, 2, 8),
    "activation_checkpointing": (0, 1, 2),
    "activation_offloading": (False, True),
}
SPACE = SearchSpace(
    name="s",
    description="",
    methods=(
        MethodSpace(
            method="full",
            domains={
                "precision": ("bf16-true",),
                "optimizer": ("adamw_torch_fused", "paged_adamw_32bit"),
                **_COMMON,
            },
        ),
        MethodSpace(
            method="qlora",
            domains={
                "precision": ("bf16-autocast",),
                "optimizer": ("adamw_torch_fused",),
                "quantization": ("nf4", "nf4-double"),
                "lora_rank": (8, 16),
                "lora_targets": ("all-linear",),
                **_COMMON,
            },
        ),
    ),
)
METHODS = ("full", "qlora")
WORKLOAD = tiny_model.workload(1, METHODS)
FULL = tiny_model.FULL
LEAN = dataclasses.replace(FULL, activation_checkpointing=1, activation_offloading=True)
QLORA = dataclasses.replace(
    LEAN,
    method="qlora",
    precision="bf16-autocast",
    quantization="nf4-double",
    lora_rank=16,
    lora_targets="all-linear",
)
CONFIGS = enumerate_configs(
    SPACE,
    WORKLOAD,
    num_layers=tiny_model.NUM_LAYERS,
    compute_capability=tiny_model.gpu().compute_capability,
).configs


@pytest.fixture(scope="module")
def traces() -> Mapping[TraceSpec, Trace]:
    specs = {TraceSpec.of(config) for config in CONFIGS}
    length = tiny_model.SEQUENCE_LENGTH
    return trace_all(
        tiny_model.MODEL, "causal-lm", length, tiny_model.gpu(), specs, server=here.workers
    )


@pytest.fixture
def asked(
    traces: Mapping[TraceSpec, Trace], monkeypatch: pytest.MonkeyPatch
) -> list[set[TraceSpec]]:
    """The specs that a search asks traces of, turn by turn; it gets those that were made before."""
    turns: list[set[TraceSpec]] = []

    def trace_all(
        *args: Any, found: dict[TraceSpec, Trace], refused: dict[TraceSpec, str], **_: Any
    ) -> None:
        turns.append(args[4])
        found |= {spec: traces[spec] for spec in turns[-1] if spec in traces}
        refused |= {spec: "it changes codes" for spec in turns[-1] if spec not in traces}

    monkeypatch.setattr(predict_best, "trace_all", trace_all)
    return turns


def searched(budget_bytes: int, base: TrainConfig, **options: Any) -> Prediction:
    return predict_best.find(
        tiny_model.MODEL,
        dataclasses.replace(WORKLOAD, memory_budget_bytes=budget_bytes),
        SPACE,
        tiny_model.gpu(),
        base=base,
        allow="recipe",
        **options,
    )


def answer_or_error(budget_bytes: int, base: TrainConfig, **options: Any) -> Prediction | str:
    try:
        return searched(budget_bytes, base, **options)
    except NothingFitsError as error:
        return str(error)


def told(prediction: Prediction) -> dict[str, Any]:
    """All that is said of an answer but how it was found."""
    answer = prediction.answer
    return {
        **{field.name: getattr(answer, field.name) for field in dataclasses.fields(answer)},
        "fallbacks": prediction.fallbacks(answer),
        "put back": prediction.put_back(answer),
        "counts": None,
        "elapsed_seconds": None,
        # Of rivals that are far slower a few are missing.
        "sureness": None,
    }


@pytest.mark.parametrize("budget_bytes", [700, 900, 1100, 1500, 2200, 12_000])
@pytest.mark.parametrize("base", [FULL, LEAN, QLORA], ids=["full", "lean", "qlora"])
def test_the_answer_is_that_of_all_traces(
    base: TrainConfig, budget_bytes: int, asked: list[set[TraceSpec]]
) -> None:
    expected = answer_or_error(budget_bytes * MB, base, traces_all=True)
    (every,) = asked
    asked.clear()
    found = answer_or_error(budget_bytes * MB, base)
    if isinstance(found, str) or isinstance(expected, str):
        assert found == expected
        return
    assert told(found) == told(expected)
    assert set().union(*asked) <= every
    assert sum(map(len, asked)) == len(set().union(*asked))
    counts = found.answer.counts
    missing = every - set().union(*asked)
    assert counts.passed_over == sum(TraceSpec.of(config) in missing for config in CONFIGS)
    assert counts.unsupported == 0


@pytest.mark.parametrize("budget_bytes", [1500, 12_000])
def test_traces_that_come_along_are_priced(
    budget_bytes: int, traces: Mapping[TraceSpec, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataset has them: one sample at a time is traced with several."""

    def trace_all(*args: Any, found: dict[TraceSpec, Trace], **_: Any) -> None:
        found |= {s: traces[s] for s in traces if s in args[4] or s.activation_offloading}

    monkeypatch.setattr(predict_best, "trace_all", trace_all)
    expected = searched(budget_bytes * MB, FULL, traces_all=True)
    found = searched(budget_bytes * MB, FULL)
    assert told(found) == told(expected)
    counts = found.answer.counts
    assert counts.passed_over > 0
    assert counts.unsupported == 0
    dropped = counts.invalid + counts.passed_over + counts.predicted_oom
    assert counts.enumerated == dropped + counts.feasible


def test_a_model_with_room_to_spare_leaves_most_traces_out(asked: list[set[TraceSpec]]) -> None:
    searched(12_000 * MB, FULL)
    first, *others = asked
    assert {spec.method for spec in first} == {"full", "qlora"}
    assert len(first) == 4, "each method, with one sample at a time and with more"
    # Its plan B saves memory.
    assert {spec.method for spec in others[-1]} == {"full"}
    assert sum(map(len, asked)) < 0.7 * len({TraceSpec.of(config) for config in CONFIGS})


def test_what_is_passed_over_is_what_less_memory_asks_for(
    asked: list[set[TraceSpec]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is traced ahead where there is time for it: the next answer with less memory finds it."""
    left: list[list[TraceSpec]] = []

    class Ahead:
        def go_on(self, specs: Callable[[], list[TraceSpec]]) -> None:
            left.append(specs())

        def stop(self) -> None:
            pass

    monkeypatch.setattr(predict_best, "traces_ahead", lambda *_: contextlib.nullcontext(Ahead()))
    counts = searched(12_000 * MB, FULL).answer.counts
    known = set().union(*asked)
    specs = {TraceSpec.of(config) for config in CONFIGS}
    (after,) = left
    assert set(after) == specs - known
    assert sum(TraceSpec.of(config) in after for config in CONFIGS) == counts.passed_over
    asked.clear()
    searched(1100 * MB, FULL)
    assert set().union(*asked) <= known | set(after)
    # What saves less comes before what saves more.
    for number, spec in enumerate(after):
        assert {*_faster(spec, FULL)}.isdisjoint(after[number:])


def test_plans_of_a_class_that_may_not_be_chosen_are_not_traced_ahead(
    asked: list[set[TraceSpec]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lean, of_other = (
        dataclasses.replace(config, activation_offloading=False) for config in (LEAN, QLORA)
    )

    def families_of(candidates: Candidates, *_: Any, **__: Any) -> list[Families]:
        best = candidates.best(lambda _: True)
        assert best is not None
        return [
            Families(best=best, answer=best, leans=(lean,)),
            Families(best=best, leans=(of_other,)),
        ]

    monkeypatch.setattr(predict_best, "families_of", families_of)
    searched(1100 * MB, FULL)
    assert {spec for spec in set().union(*asked) if spec.has_plan} == plan_specs(lean)


def test_a_step_that_is_refused_is_not_asked_for_with_less_memory(
    traces: Mapping[TraceSpec, Trace],
    asked: list[set[TraceSpec]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gemma 3n clamps weights that QLoRA stores in 4 bits: checkpointing them does not help."""
    for spec in [spec for spec in traces if spec.method == "qlora"]:
        monkeypatch.delitem(traces, spec)  # type: ignore[arg-type]
    prediction = searched(1100 * MB, FULL)
    of_qlora = [spec for spec in set().union(*asked) if spec.method == "qlora"]
    assert len(of_qlora) == 2, "with one sample at a time and with more"
    assert not any(spec.activation_checkpointing for spec in of_qlora)
    assert prediction.answer.best.config.method == "full"
    assert prediction.answer.counts.unsupported == sum(c.method == "qlora" for c in CONFIGS)
    assert str(prediction.answer.left_out[-1]) == "QLoRA (it changes codes)"
    with pytest.raises(NothingFitsError, match="; no QLoRA: it changes codes"):
        searched(400 * MB, FULL)


def test_no_step_is_traced_whose_weights_leave_no_room(
    asked: list[set[TraceSpec]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many parameters a model has is known from its first trace, where nothing else says it."""
    assert tiny_model.MODEL.num_parameters_known is None
    # Of so small a model the context takes most.
    context_bytes = tiny_model.gpu().context_bytes
    assert context_bytes is not None
    monkeypatch.setattr(room, "MORE_MEMORY_BYTES", -context_bytes)
    base = dataclasses.replace(QLORA, activation_checkpointing=0, activation_offloading=False)
    every = searched(700 * MB, base, traces_all=True)
    asked.clear()
    prediction = searched(700 * MB, base)
    assert told(prediction) == told(every)
    of_full = [spec for spec in set().union(*asked) if spec.method == "full"]
    assert len(of_full) == 2, "the first alone"
    assert prediction.answer.counts.passed_over < sum(c.method == "qlora" for c in CONFIGS)
    assert prediction.answer.counts.unsupported == 0


def test_what_is_there_however_a_step_runs_is_a_lower_bound(
    traces: Mapping[TraceSpec, Trace],
) -> None:
    estimator = Estimator(traces, tiny_model.gpu(), memory_budget_bytes=1 << 60)
    vocab_size = tiny_model.MODEL.text_config["vocab_size"]
    count = max(
        trace.num_parameters(1)[0] for spec, trace in traces.items() if spec.method == "full"
    )
    for config in CONFIGS:
        least = least_bytes(config, count, vocab_size)
        assert least > least_bytes(config, count)
        assert least < estimator.floor_bytes(config)


def test_methods_are_traced_ahead_in_turn() -> None:
    specs = list(dict.fromkeys(map(TraceSpec.of, CONFIGS)))
    full = [spec for spec in specs if spec.method == "full"][:2]
    qlora = [spec for spec in specs if spec.method == "qlora"][:4]
    assert of_each_method([*qlora, *full]) == [
        *(qlora[0], full[0]),
        *(qlora[1], full[1]),
        *qlora[2:],
    ]


def test_what_saves_memory_is_never_faster(traces: Mapping[TraceSpec, Trace]) -> None:
    estimator = Estimator(traces, tiny_model.gpu(), memory_budget_bytes=1 << 60)
    num_compared = 0
    for config in CONFIGS:
        speed = estimator.tokens_per_second(config)
        assert speed is not None
        for name, less in SAVERS.items():
            changed: dict[str, Any] = {name: less(getattr(config, name))}
            without = dataclasses.replace(config, **changed)
            if changed[name] is None or without not in CONFIGS:
                continue
            num_compared += 1
            assert speed <= (estimator.tokens_per_second(without) or 0), (config, name)
    assert num_compared > len(CONFIGS)


def test_a_model_that_cannot_save_memory_is_searched_without(
    traces: Mapping[TraceSpec, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn of which nothing can be traced is left out; where it is the first one, there is no model."""
    traceable = {spec for spec in traces if not spec.activation_checkpointing}

    def trace_all(*args: Any, found: dict[TraceSpec, Trace], **_: Any) -> None:
        some = {spec: traces[spec] for spec in args[4] if spec in traceable}
        if not some:
            raise ConfigError("none can be traced")
        found |= some

    monkeypatch.setattr(predict_best, "trace_all", trace_all)

    answer = searched(1500 * MB, FULL).answer
    assert answer.best.config.activation_checkpointing == 0
    assert answer.counts.unsupported > 0

    traceable.clear()
    with pytest.raises(ConfigError, match="none can be traced"):
        searched(1500 * MB, FULL)
