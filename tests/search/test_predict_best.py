"""The answer against brute force over every estimate; ties, baseline, widening, what fits nowhere."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import answers
import pytest
import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.catalogue.attention import EXPANDED
from autotune.catalogue.gpus import find_gpu
from autotune.common.units import GIB, format_bytes, parse_bytes
from autotune.errors import ConfigError, HardwareError, NothingFitsError
from autotune.memory.traces import Trace
from autotune.predict.estimator import Estimator
from autotune.records.answer import Answer
from autotune.records.estimate import Breakdown, Estimate, ParameterCount, StateBytes, TraceSpec
from autotune.search import (
    beside,
    first_answers,
    predict_best,
    prediction,
    room,
    searched_space,
    tried_on_best,
)
from autotune.search.candidates import Candidates
from autotune.search.nothing_fits import none_of_class
from autotune.search.predict_best import find
from autotune.search.refused import refused_kinds
from autotune.space import requirements
from autotune.space.config import TRADEOFF_CLASSES, TrainConfig
from autotune.space.defaults import default_base
from autotune.space.enumeration import enumerate_configs
from autotune.space.headroom import NO_HEADROOM, Headroom
from autotune.space.optimizers import OPTIMIZERS
from autotune.space.rules import Context
from autotune.space.search_space import with_domains
from autotune.space.space_file import load
from autotune.space.tradeoffs import tradeoff_class
from autotune.speed.sureness import Part

MB = 10**6
BUDGETS = [800 * MB, 980 * MB, 1180 * MB, 2180 * MB, 12_000 * MB]
LEVELS = {name: level for level, name in enumerate(TRADEOFF_CLASSES)}

BASE = tiny_model.FULL
LORA = dataclasses.replace(
    BASE, method="lora", precision="bf16-autocast", lora_rank=16, lora_targets="all-linear"
)


def speed(estimate: Estimate) -> float:
    assert estimate.tokens_per_second is not None
    return estimate.tokens_per_second


Key = tuple[int, int, bool, float, int, int, int, int, float, float]


def changed(config: TrainConfig, base: TrainConfig) -> list[str]:
    """Names of the settings that differ; what the accumulation is follows from the micro-batch."""
    return [
        field.name
        for field in dataclasses.fields(base)
        if field.name != "gradient_accumulation_steps"
        and getattr(config, field.name) != getattr(base, field.name)
    ]


def scarce_bytes(estimate: Estimate, budget_bytes: int) -> float:
    """Bytes of the budget's last tenth that are taken for good."""
    return max(estimate.resident_bytes - int(0.9 * budget_bytes), 0)


def form(config: TrainConfig, base: TrainConfig) -> tuple[int, bool, int]:
    """How many of rank and optimizer are not what people mean; whether the weights are quantised, and whether
    they train in bfloat16, which loses small updates."""
    families = [OPTIMIZERS[name].family for name in (config.optimizer, base.optimizer)]
    ranks = {config.lora_rank, base.lora_rank or 16} - {None}
    has_rank = config.lora_rank is not None
    in_bfloat16, base_in_bfloat16 = (
        (each.method, each.precision) == ("full", "bf16-true") for each in (config, base)
    )
    return (
        (families[0] != families[1]) + (has_rank and len(ranks) > 1),
        config.quantization != "none",
        2 * (in_bfloat16 and not base_in_bfloat16),
    )


def giving_up(estimate: Estimate, base: TrainConfig, budget_bytes: int) -> Key:
    """Least first: class, form, rank as near to 16 as can be, settings changed of each class, headroom where
    it is scarce, speed."""
    rank = estimate.config.lora_rank or 16
    classes = [
        tradeoff_class(dataclasses.replace(base, **{name: getattr(estimate.config, name)}), base)
        if name != "micro_batch_size"
        else "exact"
        for name in changed(estimate.config, base)
    ]
    return (
        LEVELS[tradeoff_class(estimate.config, base)],
        *form(estimate.config, base),
        max(rank, 16) / min(rank, 16),
        -rank,
        classes.count("recipe"),
        classes.count("numerics"),
        classes.count("exact"),
        scarce_bytes(estimate, budget_bytes),
        -speed(estimate),
    )


def brute_force(
    estimates: Iterable[Estimate],
    base: TrainConfig,
    budget_bytes: int,
    wanted: Callable[[int], bool],
) -> Key | None:
    """Every estimate looked at; nothing ranked, bounded or grouped."""
    fitting = [
        e
        for e in estimates
        if e.peak_device_bytes <= budget_bytes and wanted(LEVELS[tradeoff_class(e.config, base)])
    ]
    if not fitting:
        return None
    least = min(form(e.config, base) for e in fitting)
    fitting = [e for e in fitting if form(e.config, base) == least]
    fastest = max(map(speed, fitting))
    tied = [e for e in fitting if speed(e) >= 0.98 * fastest]
    best = min(tied, key=lambda e: giving_up(e, base, budget_bytes))
    while nearer := [
        e
        for e in tied
        if len(names := changed(e.config, best.config)) == 1
        and not changed(e.config, dataclasses.replace(e.config, **of(base, names)))
    ]:
        best = max(nearer, key=speed)
    return giving_up(best, base, budget_bytes)


def of(config: TrainConfig, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names}


@pytest.fixture(scope="module")
def traces() -> Mapping[TraceSpec, Trace]:
    return tiny_model.traces()


@pytest.fixture(scope="module")
def roomy(traces: Mapping[TraceSpec, Trace]) -> Estimator:
    return Estimator(traces, tiny_model.gpu(), memory_budget_bytes=10**12)


EstimateAll = Callable[[int], list[Estimate]]


@pytest.fixture(scope="module")
def estimate_all(roomy: Estimator) -> EstimateAll:
    """Every point of the space under a budget, by Estimator.estimate."""

    @functools.cache
    def estimates(budget_bytes: int) -> list[Estimate]:
        return list(map(roomy.with_budget(budget_bytes).estimate, tiny_model.configs()))

    return estimates


@pytest.fixture
def traced(traces: Mapping[TraceSpec, Trace], monkeypatch: pytest.MonkeyPatch) -> None:
    """find() gets the traces that were made before."""

    def trace_all(*args: Any, found: dict[TraceSpec, Trace], **_: Any) -> None:
        *_, specs = args
        found |= {spec: traces[spec] for spec in specs if spec in traces}

    monkeypatch.setattr(predict_best, "trace_all", trace_all)


def search(budget_bytes: int, **options: Any) -> Answer:
    methods = options.pop("methods", tiny_model.METHODS)
    workload = tiny_model.workload(budget_bytes, methods)
    limit = options.pop("host_memory_bytes", None)
    return find(
        options.pop("model", tiny_model.MODEL),
        dataclasses.replace(workload, host_memory_bytes=limit),
        options.pop("space", tiny_model.SPACE),
        options.pop("gpu", tiny_model.gpu()),
        **options,
    ).answer


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("budget_bytes", BUDGETS)
@pytest.mark.parametrize("base", [BASE, LORA], ids=["base full", "base lora"])
def test_the_answer_is_that_of_brute_force(
    estimate_all: EstimateAll, base: TrainConfig, budget_bytes: int
) -> None:
    estimates = estimate_all(budget_bytes)
    assert len(estimates) == 160

    for allow in TRADEOFF_CLASSES:
        expected = brute_force(
            estimates, base, budget_bytes, lambda level, cap=LEVELS[allow]: level <= cap
        )
        if expected is None:
            with pytest.raises(NothingFitsError):
                search(budget_bytes, base=base, allow=allow)
            continue
        answer = search(budget_bytes, base=base, allow=allow)
        assert giving_up(answer.best, base, budget_bytes) == expected
        assert answer.best in estimates
        assert answer.best_class == tradeoff_class(answer.best.config, base)
        by_class = {
            name: brute_force(estimates, base, budget_bytes, lambda n, own=level: n == own)
            for name, level in LEVELS.items()
        }
        found = {name: giving_up(e, base, budget_bytes) for name, e in answer.best_by_class.items()}
        assert found == {name: key for name, key in by_class.items() if key is not None}
        fastest = max(speed(e) for e in estimates if e.peak_device_bytes <= budget_bytes)
        shown = max(map(speed, (answer.best, *answer.best_by_class.values())))
        assert (answer.further is None) == (shown >= 0.98 * fastest)
        assert max(shown, speed(answer.further or answer.best)) >= 0.98 * fastest


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("budget_bytes", BUDGETS)
def test_what_keeps_small_updates_is_brute_force_too(
    estimate_all: EstimateAll, budget_bytes: int
) -> None:
    """The fastest of float32 weights and the answer's family; where none fits, one that lacks memory."""
    answer = search(budget_bytes, base=BASE, allow="recipe")
    if (answer.best.config.method, answer.best.config.precision) != ("full", "bf16-true"):
        assert answer.safer is None
        return
    assert answer.safer is not None
    safe = [
        e
        for e in estimate_all(budget_bytes)
        if e.config.precision == "bf16-mixed"
        and (e.config.optimizer == "sgd") == (answer.best.config.optimizer == "sgd")
    ]
    fits = [e for e in safe if e.peak_device_bytes <= budget_bytes]
    assert answer.safer.leaves_room == bool(fits)
    assert answer.safer.value == answer.safer.estimate.config.precision == "bf16-mixed"
    if fits:
        assert speed(answer.safer.estimate) >= 0.98 * max(map(speed, fits))
    else:
        least = min(e.peak_device_bytes for e in safe)
        assert least <= answer.safer.estimate.peak_device_bytes <= 1.1 * least


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_another_optimizer_is_no_remedy_for_rounding(estimate_all: EstimateAll) -> None:
    """Weights of 32 bits fit with SGD alone: it is not told to who trains with AdamW."""
    two = with_domains(tiny_model.SPACE, lambda _: {"optimizer": ("adamw_torch_fused", "sgd")})
    least = {
        optimizer: min(
            e.peak_device_bytes
            for e in estimate_all(10**12)
            if (e.config.precision, e.config.optimizer) == ("bf16-mixed", optimizer)
        )
        for optimizer in ("adamw_torch_fused", "sgd")
    }
    assert least["sgd"] < least["adamw_torch_fused"]
    budget_bytes = least["adamw_torch_fused"] - 1
    answer = search(budget_bytes, base=BASE, allow="numerics", methods=("full",), space=two)
    assert (answer.best.config.optimizer, answer.best.config.precision) == (
        "adamw_torch_fused",
        "bf16-true",
    )
    assert answer.safer is not None
    assert answer.safer.estimate.config.optimizer == "adamw_torch_fused"
    assert not answer.safer.leaves_room


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("budget_bytes", [1320 * MB, 1700 * MB, 12_000 * MB])
def test_more_memory_is_brute_force_too(estimate_all: EstimateAll, budget_bytes: int) -> None:
    larger = budget_bytes + 2 * 10**9
    fits = [e for e in estimate_all(larger) if e.peak_device_bytes <= larger]
    answer = search(budget_bytes, base=BASE, allow="recipe")
    least = min(form(e.config, BASE) for e in fits)
    fastest = max(speed(e) for e in fits if form(e.config, BASE) == least)
    now = [e for e in estimate_all(budget_bytes) if e.peak_device_bytes <= budget_bytes]
    least = min(form(e.config, BASE) for e in now)
    fastest_now = max(speed(e) for e in now if form(e.config, BASE) == least)
    if fastest < 1.02 * max(fastest_now, speed(answer.best)):
        assert answer.more_memory is None
    else:
        assert answer.more_memory is not None
        assert answer.more_memory.value == larger
        assert speed(answer.more_memory.estimate) == fastest


def fake(config: TrainConfig, *, speed: float, peak_bytes: int) -> Estimate:
    none = Breakdown(**{field.name: 0 for field in dataclasses.fields(Breakdown)})
    state = StateBytes(**{field.name: 0 for field in dataclasses.fields(StateBytes)})
    return Estimate(
        config=config,
        gpu="fake",
        peak_allocated_bytes=peak_bytes,
        peak_reserved_bytes=peak_bytes,
        nontorch_bytes=0,
        breakdown=none,
        state=state,
        parameters=ParameterCount(total=1, trainable=1),
        micro_step_seconds=0.0,
        optimizer_step_seconds=config.tokens_per_step / speed,
        flops_per_step=1.0,
        model_flops_per_step=1.0,
        mfu=None,
        bound="compute",
    )


class FakeEstimator:
    """Prices as told: (floor, peak, promised speed, speed of the replay) per configuration."""

    def __init__(
        self, prices: Mapping[TrainConfig, tuple[int, int, float, float]], budget_bytes: int
    ) -> None:
        self.prices = prices
        self.memory_budget_bytes = budget_bytes
        self.replayed: list[TrainConfig] = []
        self.known: dict[TrainConfig, dict[str, Part]] = {}

    def with_budget(self, budget_bytes: int) -> FakeEstimator:
        return FakeEstimator(self.prices, budget_bytes)

    def floor_bytes(self, config: TrainConfig) -> int:
        return self.prices[config][0]

    def may_fit(self, config: TrainConfig) -> bool:
        return self.floor_bytes(config) <= self.memory_budget_bytes

    def fits(self, estimate: Estimate) -> bool:
        return estimate.peak_device_bytes <= self.memory_budget_bytes

    def reserving(self, config: TrainConfig, most_bytes: int) -> Estimate | None:
        estimate = self.estimate(config)
        return estimate if estimate.peak_reserved_bytes <= most_bytes else None

    def fitting(self, config: TrainConfig) -> Estimate | None:
        """The estimate, if it fits. No replay where the same with another optimizer does not fit."""
        fits = self.prices[config][1] <= self.memory_budget_bytes
        begins_alike = (dataclasses.replace(c, optimizer=config.optimizer) for c in self.replayed)
        if not fits and config in begins_alike:
            return None
        estimate = self.estimate(config)
        return estimate if fits else None

    def tokens_per_second(self, config: TrainConfig) -> float:
        return self.prices[config][2]

    def parts(self, config: TrainConfig) -> dict[str, Part] | None:
        return self.known.get(config)

    def estimate(self, config: TrainConfig) -> Estimate:
        self.replayed.append(config)
        _, peak_bytes, _, exact = self.prices[config]
        return fake(config, speed=exact, peak_bytes=peak_bytes)


def variants() -> list[TrainConfig]:
    """Points of every class against BASE; several ranks."""
    exact = [dataclasses.replace(BASE, activation_checkpointing=n) for n in (0, 1, 2)]
    numerics = [dataclasses.replace(c, precision="bf16-mixed") for c in exact]
    recipe = [
        dataclasses.replace(LORA, lora_rank=rank, activation_checkpointing=n)
        for rank in (8, 64)
        for n in (0, 1)
    ]
    return [*exact, *numerics, *recipe, LORA, dataclasses.replace(LORA, optimizer="lion_8bit")]


def candidates(
    prices: Mapping[TrainConfig, tuple[int, int, float, float]],
    budget_bytes: int,
    base: TrainConfig = BASE,
) -> tuple[Candidates, FakeEstimator]:
    estimator = FakeEstimator(prices, budget_bytes)
    return Candidates(estimator, prices, base), estimator  # type: ignore[arg-type]


PRICE = st.tuples(
    st.integers(0, 100),  # floor
    st.integers(0, 30),  # the replay adds
    st.integers(900, 1000),  # promised
    st.sampled_from([1.0, 1.0, 0.99, 0.9]),  # what paging leaves of it
)


@settings(max_examples=300, deadline=None)
@given(st.lists(PRICE, min_size=len(variants()), max_size=len(variants())), st.integers(0, 130))
def test_any_prices_give_what_brute_force_gives(
    prices: list[tuple[int, int, int, float]], budget_bytes: int
) -> None:
    table = {
        config: (floor, floor + added, float(promised), promised * left)
        for config, (floor, added, promised, left) in zip(variants(), prices, strict=True)
    }
    search, estimator = candidates(table, budget_bytes)
    everything = [estimator.estimate(config) for config in table]
    for name, level in LEVELS.items():
        for wanted, matches in (
            (search.at_most(name), lambda n, cap=level: n <= cap),
            (search.exactly(name), lambda n, own=level: n == own),
        ):
            expected = brute_force(everything, BASE, budget_bytes, matches)
            best = search.best(wanted)
            found = None if best is None else giving_up(best, BASE, budget_bytes)
            assert found == expected


SETTINGS: dict[str, tuple[Any, Any]] = {
    "optimizer": ("adamw_torch_fused", "adamw_torch"),
    "activation_checkpointing": (0, 2),
    "precision": ("bf16-true", "bf16-mixed"),
    "attention": ("sdpa", "eager"),
}
AROUND_BASE = [
    dataclasses.replace(BASE, **dict(zip(SETTINGS, values, strict=True)))
    for values in itertools.product(*SETTINGS.values())
]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(PRICE, min_size=len(AROUND_BASE), max_size=len(AROUND_BASE)),
    st.integers(0, 130),
    st.sampled_from(["exact", "numerics", "recipe"]),
)
def test_never_slower_than_a_base_that_fits_and_no_setting_differs_for_less_than_the_noise(
    prices: list[tuple[int, int, int, float]], budget_bytes: int, allow: str
) -> None:
    table = {
        config: (floor, floor + added, float(promised), promised * left)
        for config, (floor, added, promised, left) in zip(AROUND_BASE, prices, strict=True)
    }
    search, estimator = candidates(table, budget_bytes)
    fitting = {
        config: speed(estimator.estimate(config))
        for config, (_, peak, *_) in table.items()
        if peak <= budget_bytes and LEVELS[tradeoff_class(config, BASE)] <= LEVELS[allow]
    }
    best = search.best(search.at_most(allow))
    if not fitting:
        assert best is None
        return
    assert best is not None
    answer, least = best.config, 0.98 * max(fitting.values())
    assert fitting[answer] >= least
    assert fitting[answer] >= fitting.get(BASE, 0.0)
    for name in changed(answer, BASE):
        without = dataclasses.replace(answer, **of(BASE, [name]))
        assert fitting.get(without, 0.0) < least


def test_no_setting_is_put_back_that_makes_weights_coarser() -> None:
    """bfloat16 weights with the base's optimizer lose what another keeps, however much faster they are."""
    mixed = dataclasses.replace(BASE, precision="bf16-mixed")
    keeps = dataclasses.replace(BASE, optimizer="adamw_torch_8bit")
    table = {
        mixed: (200, 200, 900.0, 900.0),
        **dict.fromkeys((keeps, BASE), (10, 10, 950.0, 950.0)),
    }
    search, _ = candidates(table, 100, base=mixed)
    found = search.best(search.at_most("numerics"))
    assert found is not None
    assert found.config == keeps


def test_what_cannot_win_is_not_replayed() -> None:
    table = {c: (10, 10, 1000.0 - 100 * n, 1000.0 - 100 * n) for n, c in enumerate(variants())}
    search, estimator = candidates(table, 100)
    assert search.best(search.at_most("recipe")) is not None
    assert len(estimator.replayed) == 1
    table = dict.fromkeys(variants(), (101, 101, 1000.0, 1000.0))
    search, estimator = candidates(table, 100)
    assert search.best(search.at_most("recipe")) is None
    assert (search.num_possible, estimator.replayed) == (0, [])


def test_what_is_known_not_to_fit_is_counted_and_not_replayed() -> None:
    others = [
        dataclasses.replace(BASE, optimizer=name) for name in ("adamw_torch", "adamw_bnb_8bit")
    ]
    table = dict.fromkeys((BASE, *others), (0, 200, 1000.0, 1000.0))
    search, estimator = candidates({**table, variants()[1]: (0, 50, 500.0, 500.0)}, 100)
    best = search.fastest(lambda _: True)
    assert best is not None
    assert best.config == variants()[1]
    assert len(estimator.replayed) == 2
    assert (search.num_replayed, search.num_replayed_oom) == (4, 3)
    # What is replayed to be drawn, too, is counted once.
    assert len(search.pool(lambda _: True, 4, always=None)) == 4
    assert (search.num_replayed, search.num_replayed_oom) == (4, 3)


def test_among_the_tied_the_least_is_given_up() -> None:
    exact, lora8, lora64 = variants()[0], variants()[6], variants()[8]
    assert (lora8.lora_rank, lora64.lora_rank) == (8, 64)

    def winner(**speeds_and_peaks: tuple[float, int]) -> TrainConfig:
        names = {"exact": exact, "lora8": lora8, "lora64": lora64}
        table = {names[n]: (0, peak, fast, fast) for n, (fast, peak) in speeds_and_peaks.items()}
        search, _ = candidates(table, 100)
        best = search.best(search.at_most("recipe"))
        assert best is not None
        return best.config

    assert winner(exact=(981.0, 90), lora64=(1000.0, 50), lora8=(1000.0, 10)) == exact
    # No rank but the usual one before the mathematics of the base, however fast; of two the nearer one.
    assert winner(exact=(500.0, 90), lora64=(1000.0, 50), lora8=(1000.0, 10)) == exact
    assert winner(exact=(979.0, 101), lora64=(1000.0, 50), lora8=(1000.0, 10)) == lora8
    assert winner(exact=(979.0, 101), lora64=(1000.0, 50), lora8=(981.0, 10)) == lora8
    assert winner(exact=(1000.0, 101), lora64=(1000.0, 50), lora8=(900.0, 10)) == lora64


QLORA = dataclasses.replace(LORA, method="qlora", quantization="nf4")
FURTHER = {
    "attention only": dataclasses.replace(LORA, lora_targets="attention"),
    "high rank": dataclasses.replace(LORA, lora_rank=128),
    "another family": dataclasses.replace(LORA, optimizer="lion_8bit"),
    "another family, all weights": dataclasses.replace(BASE, optimizer="adafactor"),
    "prompt": dataclasses.replace(BASE, method="prompt-tuning", num_virtual_tokens=20),
    "qlora on attention": dataclasses.replace(QLORA, lora_targets="attention"),
}


@pytest.mark.parametrize("further", FURTHER.values(), ids=FURTHER)
def test_a_further_trade_is_shown_and_taken_only_where_nothing_else_fits(
    further: TrainConfig,
) -> None:
    """LoRA of rank 16 on all linear layers is the usual form, QLoRA where that does not fit."""

    def answers(*fitting: TrainConfig, speed: float = 2000.0) -> tuple[TrainConfig, object]:
        peaks = {c: 10 if c in fitting else 101 for c in (LORA, QLORA, further)}
        speeds = {LORA: 1000.0, QLORA: 900.0, further: speed}
        table = {c: (0, peaks[c], speeds[c], speeds[c]) for c in peaks}
        search, _ = candidates(table, 100)
        best = search.best(search.at_most("recipe"))
        assert best is not None
        shown = search.further(search.at_most("recipe"), best)
        return best.config, None if shown is None else shown.config

    assert answers(LORA, QLORA, further) == (LORA, further)
    assert answers(LORA, QLORA, further, speed=1019.0) == (LORA, None)
    assert answers(QLORA, further) == (QLORA, further)
    assert answers(further) == (further, None)
    # Of those tied with the fastest, none that is as fast as the answer but for the noise.
    small = dataclasses.replace(further, micro_batch_size=2 * further.micro_batch_size)
    speeds = {LORA: 1000.0, further: 1015.0, small: 1030.0}
    search, _ = candidates({c: (0, 10, speed, speed) for c, speed in speeds.items()}, 100)
    best = search.best(search.at_most("recipe"))
    assert best is not None
    shown = search.further(search.at_most("recipe"), best)
    assert shown is not None
    assert shown.config == small
    # Quantised weights are a further trade too, where 16 bits fit.
    table = {LORA: (0, 10, 1000.0, 1000.0), QLORA: (0, 10, 2000.0, 2000.0)}
    search, _ = candidates(table, 100)
    best = search.best(search.at_most("recipe"))
    assert best is not None
    assert best.config == LORA
    assert [e.config for e in search.pool(search.in_form_of(LORA), 9, always=None)] == [LORA]


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [((60, 40, 50), 0), ((90, 40, 50), 0), ((91, 40, 50), 1), ((99, 95, 93), 2), ((90, 90, 40), 0)],
)
def test_memory_decides_where_it_is_scarce_and_the_order_of_the_space_never(
    peaks: tuple[int, int, int], expected: int
) -> None:
    """Of three that are alike but for a setting that costs nothing and gains a little speed."""
    base = dataclasses.replace(BASE, activation_checkpointing=3)
    exact = variants()[:3]
    speeds = (1002.0, 1001.0, 1000.0)
    for order in itertools.permutations(range(3)):
        table = {exact[n]: (0, peaks[n], speeds[n], speeds[n]) for n in order}
        search, _ = candidates(table, 100, base)
        best = search.best(search.at_most("exact"))
        assert best is not None
        assert best.config == exact[expected]


@pytest.mark.parametrize(
    ("speeds", "peaks", "expected"),
    [
        ({"": 981.0, "a": 1000.0}, {}, ""),
        ({"": 979.0, "a": 1000.0}, {}, "a"),
        # Two that gain 1.5 % each: both together are more than the noise, so that one stays.
        ({"": 970.0, "a": 985.0, "b": 984.0, "ab": 1000.0}, {}, "a"),
        ({"": 981.0, "a": 985.0, "b": 984.0, "ab": 1000.0}, {}, ""),
        # The one that gains most stays.
        ({"": 950.0, "a": 990.0, "b": 955.0, "ab": 1000.0}, {}, "a"),
        # A base that is as fast is the answer, whatever lies between.
        ({"": 1000.0, "a": 970.0, "b": 970.0, "ab": 1000.0}, {}, ""),
        ({"": 1000.0, "a": 1000.0}, {"": 101}, "a"),
        ({"": 1000.0, "a": 1000.0}, {"": 100, "a": 10}, ""),
    ],
)
def test_what_gains_nothing_is_as_in_the_base(
    speeds: dict[str, float], peaks: dict[str, int], expected: str
) -> None:
    settings: dict[str, dict[str, Any]] = {
        "": {},
        "a": {"optimizer": "adamw_torch"},
        "b": {"activation_checkpointing": 2},
    }
    configs = {
        name: dataclasses.replace(BASE, **settings[name[:1]], **settings[name[1:]])
        for name in speeds
    }
    table = {configs[name]: (0, peaks.get(name, 10), v, v) for name, v in speeds.items()}
    search, _ = candidates(table, 100)
    best = search.best(search.at_most("exact"))
    assert best is not None
    assert best.config == configs[expected]


def test_among_equals_the_order_of_the_space_decides_nothing() -> None:
    for exact in (variants()[:3], variants()[:2]):
        assert num_answers_of(exact) == 1


def num_answers_of(exact: list[TrainConfig]) -> int:
    """The number of unlike answers that orders of these, all equally good, have."""
    found = set()
    for order in itertools.permutations(exact):
        search, _ = candidates(dict.fromkeys(order, (0, 10, 1000.0, 1000.0)), 100)
        best = search.best(search.at_most("exact"))
        assert best is not None
        pool = search.pool(search.at_most("exact"), 2, always=None)
        tied = search.tied(best, search.at_most("exact"))
        found.add(tuple(e.config for e in (best, *tied, *pool)))
    return len(found)


def test_what_takes_all_of_the_budget_fits() -> None:
    all_of_it, nearly_as_fast, a_byte_more, too_much_alive = (
        dataclasses.replace(BASE, activation_checkpointing=n) for n in range(4)
    )
    table = {
        all_of_it: (100, 100, 900.0, 900.0),
        nearly_as_fast: (100, 100, 890.0, 890.0),
        a_byte_more: (100, 101, 950.0, 950.0),
        too_much_alive: (101, 101, 1000.0, 1000.0),
    }
    search, estimator = candidates(table, 100)
    best = search.best(search.at_most("exact"))
    assert best is not None
    assert best.config == all_of_it
    # What is alive at least is known before anything is replayed; fastest first.
    assert search.priced() == [(950.0, 100), (900.0, 100), (890.0, 100)]
    assert estimator.replayed == [a_byte_more, all_of_it]
    assert (search.num_possible, search.num_replayed, search.num_replayed_oom) == (3, 2, 1)


def test_the_pool_is_of_the_wanted_class_and_fastest_first() -> None:
    table = {c: (0, 10, 1000.0 + n, 1000.0 + n) for n, c in enumerate(variants())}
    search, _ = candidates(table, 100)
    pool = search.pool(search.exactly("numerics"), 2, always=None)
    assert [e.config for e in pool] == [variants()[5], variants()[4]]


def test_what_is_tied_is_of_the_winners_class() -> None:
    """What is shown beside the answer as just as good gives up no more."""
    exact, other = variants()[:2]
    numerics, recipe = variants()[3], variants()[8]
    table = dict.fromkeys((exact, other, numerics, recipe), (0, 10, 1000.0, 1000.0))
    search, _ = candidates(table, 100)
    best = search.best(search.at_most("recipe"))
    assert best is not None
    tied = search.tied(best, search.at_most("recipe"))
    assert {e.config for e in (best, *tied)} == {exact, other}


def test_what_is_tied_fits_and_is_as_fast() -> None:
    winner, tied, slower, too_large = (
        dataclasses.replace(BASE, activation_checkpointing=n) for n in range(4)
    )
    table = {
        winner: (0, 10, 1000.0, 1000.0),
        # 1.98 % of the fastest, although 1000 is more than 1.02 times as much.
        tied: (0, 20, 1000.0, 980.2),
        slower: (0, 20, 1000.0, 979.0),
        too_large: (0, 101, 1000.0, 1000.0),
    }
    search, _ = candidates(table, 100)
    best = search.best(search.at_most("exact"))
    assert best is not None
    assert best.config == winner
    assert [e.config for e in search.tied(best, search.at_most("exact"))] == [tied]


@pytest.mark.parametrize(
    ("speeds", "further"),
    [
        # Faster than what is shown by more than the noise, and by more than twice that to be looked for.
        ((1000.0, 1000.0), None),
        ((1000.0, 1020.0), None),
        ((1000.0, 1041.0), 1041.0),
        ((1000.0, 2000.0), 2000.0),
    ],
)
def test_a_further_trade_is_faster_than_what_is_shown(
    speeds: tuple[float, float], further: float | None
) -> None:
    shown, other = BASE, variants()[-1]
    table = {c: (0, 10, each, each) for c, each in zip((shown, other), speeds, strict=True)}
    search, _ = candidates(table, 100)
    best = search.best(search.exactly("exact"))
    assert best is not None
    found = search.further(search.exactly("recipe"), best)
    assert (None if found is None else speed(found)) == further
    nothing = search.further(search.exactly("numerics"), best)
    assert nothing is None
    alone = search.further(search.exactly("recipe"))
    assert alone is not None
    assert alone.config == other


def test_a_rival_is_likely_wanted_fits_and_is_not_the_answer() -> None:
    """Kernels of their own, off by a third each: what is as fast wins every second time."""
    answer, rival, unwanted, too_large = (
        dataclasses.replace(BASE, activation_checkpointing=n) for n in range(4)
    )
    table = {
        answer: (0, 10, 1000.0, 1000.0),
        rival: (0, 20, 999.0, 999.0),
        unwanted: (0, 20, 1000.0, 1000.0),
        too_large: (0, 101, 1000.0, 1000.0),
    }
    search, estimator = candidates(table, 100)
    best = search.estimate(answer)
    assert search.sureness(best, lambda _: True) is None
    seconds = {c: answer.tokens_per_step / fast for c, (*_, fast, _) in table.items()}
    known = {
        config: {f"mm {number}": Part(seconds=seconds[config], spread=0.3)}
        for number, config in enumerate(table)
    }
    estimator.known = known
    alone = search.sureness(best, lambda config: config == answer)
    assert alone is not None
    assert (alone.odds, alone.rival) == (1.0, None)
    found = search.sureness(best, lambda config: config in (answer, rival))
    assert found is not None
    assert found.rival is not None
    assert found.rival.config == rival
    assert 0.4 < found.odds < 0.65
    assert found.rival_odds == pytest.approx(1 - found.odds, abs=0.05)
    # What does not fit counts among what might, but is not named.
    misfit = search.sureness(best, lambda config: config in (answer, too_large))
    assert misfit is not None
    assert misfit.rival is None
    # One of whose time nothing is known is no rival.
    del known[rival]
    silent = search.sureness(best, lambda config: config in (answer, rival))
    assert silent is not None
    assert (silent.odds, silent.rival) == (1.0, None)


def test_what_keeps_small_updates_is_of_the_answers_family_where_there_is_one() -> None:
    mixed, other_family = (
        dataclasses.replace(BASE, precision="bf16-mixed", optimizer=name)
        for name in (BASE.optimizer, "sgd")
    )
    checkpointed = dataclasses.replace(BASE, activation_checkpointing=1)
    table = {
        BASE: (10, 10, 1000.0, 1000.0),
        checkpointed: (5, 5, 950.0, 950.0),
        mixed: (30, 30, 800.0, 800.0),
        other_family: (20, 20, 900.0, 900.0),
    }

    def safer(budget_bytes: int, *left_out: TrainConfig, of: TrainConfig = BASE) -> Any:
        prices = {c: price for c, price in table.items() if c not in left_out}
        search, estimator = candidates(prices, budget_bytes)
        return beside.safer(estimator, search, prices, of, backend="cpu")  # type: ignore[arg-type]

    found = safer(100)
    assert (found.setting, found.value, found.leaves_room) == ("precision", "bf16-mixed", True)
    assert found.estimate.config == mixed
    # It is named, though it does not fit; another family is none of its place.
    found = safer(25)
    assert (found.estimate.config, found.leaves_room) == (mixed, False)
    found = safer(25, mixed)
    assert (found.estimate.config, found.leaves_room) == (other_family, True)
    assert safer(100, mixed, other_family) is None
    assert safer(100, of=mixed) is None


LOGITS_BYTES = GIB // 4


@pytest.mark.parametrize(
    ("changes", "speed_of_other", "room_bytes", "lacking_bytes", "may_pay"),
    [
        # The other has to be faster by more than the noise, and to fit without its half a GiB of logits.
        ({}, 1.0201, 10 * GIB, None, True),
        ({}, 1.0199, 10 * GIB, None, False),
        ({}, 1.5, 10 * GIB - 1, None, False),
        ({"liger": True}, 1.5, 10 * GIB, None, False),
        ({"chunked_loss": True}, 1.5, 10 * GIB, None, False),
        # Without checkpointing it would be twice as fast: half of that for the logits is worth 25 times
        # their bytes, at 2 % for each of them.
        ({}, 1.5, 0, 25 * LOGITS_BYTES - 1, True),
        ({}, 1.5, 0, 25 * LOGITS_BYTES, False),
    ],
)
def test_a_loss_in_parts_may_pay_where_the_logits_stand_in_the_way(
    changes: dict[str, Any],
    speed_of_other: float,
    room_bytes: int,
    lacking_bytes: int | None,
    may_pay: bool,
) -> None:
    config = dataclasses.replace(answers.CONFIG, **changes)
    best = answers.estimate(config)
    other = dataclasses.replace(config, micro_batch_size=8, gradient_accumulation_steps=4)
    free = dataclasses.replace(config, activation_checkpointing=0)
    speeds = {other: speed_of_other * speed(best), free: 2 * speed(best)}
    floors = {other: 10 * GIB + GIB // 2, config: GIB, free: GIB + (lacking_bytes or 0)}
    estimator: Any = SimpleNamespace(
        gpu=SimpleNamespace(memory_bandwidth_bytes_per_second=None),
        tokens_per_second=speeds.get,
        floor_bytes=floors.get,
        room_for=lambda _: room_bytes,
    )
    configs = [other] if lacking_bytes is None else [other, free]
    assert tried_on_best.parts_may_pay(best, configs, estimator) is may_pay
    nothing = dataclasses.replace(
        best, breakdown=dataclasses.replace(best.breakdown, logits_bytes=0)
    )
    assert not tried_on_best.parts_may_pay(nothing, configs, estimator)


def test_a_loss_in_parts_is_traced_for_methods_that_have_it() -> None:
    best = answers.estimate()
    context = Context(effective_batch_size=32)

    def of(estimate: Estimate | None, *parting: str) -> list[TraceSpec]:
        what: Any = SimpleNamespace(parting=frozenset(parting), context=context)
        return tried_on_best.specs_in_parts(estimate, what)

    assert of(None, "full") == of(best, "lora") == []
    lean, free, *plans = of(best, "full")
    assert (lean.activation_checkpointing, free.activation_checkpointing) == (1, 0)
    assert plans
    assert all(spec.checkpoint_plan != "interval" for spec in plans)
    assert all(spec.chunked_loss for spec in (lean, free, *plans))
    # Liger's kernels make no logits anyway.
    fused = answers.estimate(dataclasses.replace(answers.CONFIG, liger=True))
    assert of(fused, "full") == []


def more_memory(of_more: TrainConfig, speed_of_more: float, allow: str) -> Any:
    """What 2 GB more are said to bring where they make room for one more configuration."""
    exact = variants()[0]
    table = {exact: (0, 10, 1000.0, 1000.0), of_more: (10**9, 10**9, speed_of_more, speed_of_more)}
    search, estimator = candidates(table, 100)
    best = search.best(search.at_most(allow))
    assert best is not None
    assert best.config == exact
    return beside.more_memory(
        estimator,  # type: ignore[arg-type]
        list(table),
        BASE,
        best,
        search.at_most(allow),
    )


@pytest.mark.parametrize(("speed_of_more", "is_offered"), [(1019.0, False), (1021.0, True)])
def test_more_memory_is_offered_where_it_is_faster_by_more_than_the_noise(
    speed_of_more: float, is_offered: bool
) -> None:
    offered = more_memory(variants()[1], speed_of_more, "exact")
    if not is_offered:
        assert offered is None
        return
    assert (offered.setting, offered.value) == ("memory_budget_bytes", 100 + 2 * 10**9)
    assert offered.estimate.config == variants()[1]
    assert offered.leaves_room


def test_more_memory_does_not_bring_what_fits_already() -> None:
    """The answer is the base, since it is as fast but for the noise as what is the fastest."""
    exact, faster, of_more = variants()[:3]
    speeds = {exact: (10, 1000.0), faster: (10, 1015.0), of_more: (10**9, 1025.0)}
    table = {config: (floor, floor, speed, speed) for config, (floor, speed) in speeds.items()}
    search, estimator = candidates(table, 100)
    wanted = search.at_most("numerics")
    best, fastest_now = search.best(wanted), search.fastest(wanted)
    assert best is not None
    assert fastest_now is not None
    assert (best.config, fastest_now.config) == (exact, faster)
    asked: Any = (estimator, list(table), BASE, best, wanted)
    assert beside.more_memory(*asked, fastest_now=fastest_now) is None
    assert beside.more_memory(*asked) is not None


def test_more_memory_is_not_offered_for_what_gives_up_more_than_allowed() -> None:
    numerics = variants()[3]
    assert more_memory(numerics, 2000.0, "exact") is None
    assert more_memory(numerics, 2000.0, "numerics") is not None


def test_more_memory_is_no_other_setting_where_the_answer_gains_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Paged state finds more room, whatever the setting that is a little faster there, or was tied before."""
    estimate = FakeEstimator.estimate

    def with_room(self: FakeEstimator, config: TrainConfig) -> Estimate:
        found = estimate(self, config)
        seconds = found.step_seconds
        assert seconds is not None
        gained = 0.9 if self.memory_budget_bytes > 10**9 else 1.0
        return dataclasses.replace(found, optimizer_step_seconds=gained * seconds)

    monkeypatch.setattr(FakeEstimator, "estimate", with_room)
    offered = more_memory(variants()[1], 1010.0, "exact")
    assert offered.estimate.config == variants()[0]
    offered = more_memory(variants()[1], 1100.0, "exact")
    assert offered.estimate.config == variants()[1]


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_the_base_is_measured_with_the_candidates_however_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prediction, "POOL_SIZE", 1)
    found = find(
        tiny_model.MODEL,
        tiny_model.workload(12_000 * MB),
        tiny_model.SPACE,
        tiny_model.gpu(),
        base=dataclasses.replace(BASE, activation_checkpointing=1),
        allow="recipe",
    )
    baseline = found.answer.baseline
    assert baseline is not None
    fastest, base = found.pool()
    assert base.config == baseline.config
    assert speed(fastest) > speed(base)


def test_the_base_is_among_the_candidates_for_probes_however_slow() -> None:
    exact = variants()[:3]
    table = {c: (0, 10, 1000.0 - n, 1000.0 - n) for n, c in enumerate(exact)}
    search, _ = candidates(table, 100)
    of_class = search.at_most("exact")
    assert [e.config for e in search.pool(of_class, 1, always=exact[2])] == [exact[0], exact[2]]
    assert [e.config for e in search.pool(of_class, 1, always=exact[0])] == [exact[0]]
    # What the space has not, or is not wanted, is no candidate.
    assert [e.config for e in search.pool(of_class, 1, always=LORA)] == [exact[0]]


GROWING = dataclasses.replace(BASE, expandable_segments=True)


@pytest.mark.parametrize(
    ("growing", "fixed", "expected"),
    [
        # (peak, speed) of each, under a budget of 100. Growing costs memory: never, the user's or not.
        ((60, 1000.0), (50, 1000.0), [BASE, BASE]),
        ((60, 990.0), (50, 1000.0), [BASE, BASE]),
        # It saves memory: fixed ones still where they fit, but for a user who has them grow.
        ((50, 1000.0), (60, 1000.0), [BASE, GROWING]),
        ((50, 1000.0), (50, 1000.0), [BASE, GROWING]),
        # It makes room, for the run or for speed.
        ((90, 1000.0), (101, 1000.0), [GROWING, GROWING]),
        ((60, 1000.0), (50, 970.0), [GROWING, GROWING]),
    ],
)
def test_segments_grow_where_that_gains_something(
    growing: tuple[int, float], fixed: tuple[int, float], expected: list[TrainConfig]
) -> None:
    table = {
        config: (0, peak, 1000.0, fast)
        for config, (peak, fast) in ((GROWING, growing), (BASE, fixed))
    }
    found = []
    for base in (BASE, GROWING):
        search, _ = candidates(table, 100, base)
        best = search.best(search.at_most("exact"))
        assert best is not None
        found.append(best.config)
    assert found == expected


def test_a_setting_that_costs_what_it_should_save_is_not_probed() -> None:
    """Segments that grow, and offloading, which took 4 GiB more: studies/no-card/README.md."""
    checkpointed = dataclasses.replace(BASE, activation_checkpointing=1)
    offloaded = dataclasses.replace(checkpointed, activation_offloading=True)
    saves = dataclasses.replace(GROWING, activation_checkpointing=2)
    table = {
        BASE: (0, 50, 1000.0, 1000.0),
        GROWING: (0, 60, 1000.0, 1000.0),
        checkpointed: (0, 40, 900.0, 900.0),
        offloaded: (0, 50, 890.0, 890.0),
        dataclasses.replace(saves, expandable_segments=False): (0, 101, 800.0, 800.0),
        saves: (0, 90, 800.0, 800.0),
    }
    search, _ = candidates(table, 100)
    kept = {e.config for e in search.pool(search.at_most("exact"), 10, always=None)}
    assert kept == table.keys() - {GROWING, offloaded}
    # What the user trains with is measured all the same.
    kept = {e.config for e in search.pool(search.at_most("exact"), 10, always=GROWING)}
    assert kept == table.keys() - {offloaded}


def test_what_varied_lengths_leave_in_pieces_is_not_predicted() -> None:
    """Segments may grow there although they cost memory at full length."""
    padded = [dataclasses.replace(config, batching="padded") for config in (BASE, GROWING)]
    peaks = dict(zip(padded, (50, 60), strict=True))
    search, _ = candidates({c: (0, peaks[c], 1000.0, 1000.0) for c in padded}, 100, padded[1])
    assert len(search.pool(search.at_most("exact"), 10, always=None)) == 2
    best = search.best(search.at_most("exact"))
    assert best is not None
    assert best.config == padded[1]


def test_what_was_considered_puts_what_fits_first() -> None:
    table = {
        config: (0, 120 if n % 3 == 0 else 80, 1000.0 - n, 1000.0 - n)
        for n, config in enumerate(variants())
    }
    search, _ = candidates(table, 100)
    for config in table:
        search.estimate(config)
    kept = search.considered(len(table))
    assert len(search.considered(5)) == 5
    assert search.considered(5) == kept[:5]
    assert 0 < sum(e.peak_device_bytes <= 100 for e in kept) < len(kept)
    fits = [e.peak_device_bytes <= 100 for e in kept]
    assert fits == sorted(fits, reverse=True)
    of_fitting = [speed(e) for e in kept if e.peak_device_bytes <= 100]
    assert of_fitting == sorted(of_fitting, reverse=True)


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_the_baseline_is_the_base_with_the_largest_micro_batch_that_fits(roomy: Estimator) -> None:
    def at(size: int) -> Estimate:
        return roomy.estimate(
            dataclasses.replace(BASE, micro_batch_size=size, gradient_accumulation_steps=8 // size)
        )

    peaks = {size: at(size).peak_device_bytes for size in (1, 2, 4, 8)}
    between = (peaks[4] + peaks[8]) // 2
    assert peaks[4] < between < peaks[8]
    answer = search(between)
    default = default_base(answer.workload, tiny_model.gpu(), tiny_model.MODEL)
    of_four = {"micro_batch_size": 4, "gradient_accumulation_steps": 2}
    assert answer.base == dataclasses.replace(default, **of_four)
    assert answer.baseline is not None
    assert answer.baseline.config == answer.base
    assert answer.speedup == pytest.approx(speed(answer.best) / speed(at(4)))

    given_base = at(1).config
    alone = search(between, base=given_base)
    assert alone.baseline == roomy.estimate(given_base)
    too_small = search(peaks[1] - 1, base=given_base, allow="recipe")
    assert too_small.baseline is None
    assert too_small.speedup is None


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_the_base_may_win_with_a_micro_batch_that_the_space_has_not() -> None:
    of_one = [
        dataclasses.replace(section, domains={**section.domains, "micro_batch_size": (1,)})
        for section in tiny_model.SPACE.methods
    ]
    space = dataclasses.replace(tiny_model.SPACE, methods=tuple(of_one))
    answer = search(12_000 * MB, space=space)
    assert answer.baseline is not None
    assert answer.baseline.config.micro_batch_size == 8
    assert speed(answer.best) >= speed(answer.baseline)
    counts = answer.counts
    assert counts.enumerated == counts.feasible + counts.invalid + counts.passed_over
    # A base that the space has not is what the answer is compared with, and no answer.
    other = dataclasses.replace(BASE, micro_batch_size=8, gradient_accumulation_steps=1)
    answer = search(12_000 * MB, space=space, base=other, methods=("lora",), allow="recipe")
    assert answer.best.config.method == "lora"


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_better_odds_leave_more_room_and_cost_speed_at_most() -> None:
    budget_bytes = 1500 * MB

    def best(headroom: Headroom) -> Estimate:
        return find(
            tiny_model.MODEL,
            tiny_model.workload(budget_bytes, headroom=headroom),
            tiny_model.SPACE,
            tiny_model.gpu(),
            allow="numerics",
        ).answer.best

    odds = (0.5, 0.9, 0.99, 0.999)
    found = [best(NO_HEADROOM), *(best(Headroom(odds=each)) for each in odds)]
    for estimate, each in zip(found[1:], odds, strict=True):
        assert estimate.fits_with(budget_bytes) >= each - 1e-6
    speeds = list(map(speed, found))
    # Ties are not decided by speed.
    assert all(later <= before / 0.98 for before, later in itertools.pairwise(speeds))
    assert speeds[0] > speeds[-1]
    spare = 300 * MB
    assert best(Headroom(spare_bytes=spare)).peak_device_bytes <= budget_bytes - spare


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_a_likely_rival_is_allowed_fits_and_is_not_the_answer() -> None:
    answer = search(1500 * MB)
    sure = answer.sureness
    assert sure is not None
    assert 0 < sure.odds <= 1
    assert sure.odds + sure.rival_odds <= 1
    if sure.rival is not None:
        assert sure.rival.config != answer.best.config
        assert sure.rival.peak_device_bytes <= 1500 * MB
        assert LEVELS[tradeoff_class(sure.rival.config, answer.base)] <= LEVELS[answer.allow]


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_the_class_is_raised_only_where_nothing_else_fits() -> None:
    tight, roomy_enough = 980 * MB, 4000 * MB
    answer = search(tight)
    assert answer.widened
    assert (answer.allow, answer.best_class) == ("recipe", "recipe")
    answer = search(roomy_enough)
    assert not answer.widened
    assert answer.allow == "numerics"
    assert answer.best_class != "recipe"
    with pytest.raises(NothingFitsError) as caught:
        search(tight, allow="exact")
    assert "--allow recipe" in str(caught.value)
    assert not search(tight, allow="recipe").widened


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_host_memory_is_named_where_nothing_else_fits() -> None:
    of_adamw = with_domains(tiny_model.SPACE, lambda _: {"optimizer": ("adamw_torch_fused",)})
    with pytest.raises(NothingFitsError) as caught:
        search(1100 * MB, methods=("full",), space=of_adamw)
    said = re.search(
        r"--space host-memory fits, more slowly: with (.*) GiB in host memory the card needs (.*) [MG]iB",
        str(caught.value),
    )
    assert said
    # DeepSpeed's 16 bytes of each weight, and 2 of the copy that is fetched.
    num_parameters = 5 * (4 * 1024**2 * 3 // 4 + 3 * 1024 * 2816) + 2 * 32_000 * 1024
    assert float(said[1]) == pytest.approx(18 * num_parameters / GIB, rel=0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_an_answer_takes_no_more_of_the_host_than_it_may() -> None:
    paged = with_domains(tiny_model.SPACE, lambda _: {"optimizer": ("paged_adamw_32bit",)})
    options: dict[str, Any] = {"methods": ("full",), "space": paged}
    free = search(1500 * MB, **options).best
    state = free.state.optimizer_state_managed_bytes
    assert free.host_bytes == state - free.paged_in_bytes > 0
    limit = free.host_bytes - 1
    less = search(1500 * MB, **options, host_memory_bytes=limit, base=free.config)
    assert less.best.host_bytes <= limit
    assert (less.baseline, less.base_lacks_on_host_bytes) == (None, 1)
    with pytest.raises(NothingFitsError) as caught:
        search(1500 * MB, **options, host_memory_bytes=1)
    said = re.search(r"--host-mem (\S+) is enough for .*paged_adamw_32bit", str(caught.value))
    assert said
    assert search(1500 * MB, **options, host_memory_bytes=parse_bytes(said[1]))


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(("copies_per_second", "is_widened"), [(2e9, True), (60e9, False)])
def test_the_class_is_raised_where_the_answer_would_wait_for_the_host(
    copies_per_second: float, is_widened: bool
) -> None:
    paged = with_domains(
        tiny_model.SPACE,
        lambda section: {"optimizer": ("paged_adamw_32bit",)} if section.method == "full" else {},
    )
    gpu = dataclasses.replace(tiny_model.gpu(), pcie_bandwidth_bytes_per_second=copies_per_second)
    options: dict[str, Any] = {"methods": ("full", "lora"), "space": paged, "gpu": gpu}
    answer = search(1100 * MB, **options)
    waiting = search(1100 * MB, **options, allow="numerics").best
    assert (answer.best_class == "recipe") == answer.widened == is_widened
    if is_widened:
        assert waiting.bound == "transfer"
        assert speed(answer.best) >= 1.5 * speed(waiting)
        assert answer.best_by_class["numerics"] == waiting
    trained = search(1100 * MB, **options, base=waiting.config)
    assert not trained.widened  # Who trains so already has chosen it.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("methods", "allow", "most_specs"),
    [
        (tiny_model.METHODS, None, 2),
        (tiny_model.METHODS, "numerics", 2),
        (("full",), None, 2),
        (("lora",), None, 1),
    ],
)
def test_of_a_model_that_is_far_too_large_only_the_smallest_is_traced(
    methods: tuple[str, ...],
    allow: str | None,
    most_specs: int,
    traces: Mapping[TraceSpec, Trace],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: set[TraceSpec] = set()
    refuses: list[str] = []

    def trace_all(*args: Any, found: dict[TraceSpec, Trace], **_: Any) -> None:
        *_, specs = args
        asked.update(specs)
        given = {spec for spec in specs if spec in traces and spec.quantization not in refuses}
        if not given:
            raise ConfigError("The model cannot be traced so")
        found |= {spec: traces[spec] for spec in given}

    def lacking() -> str:
        asked.clear()
        with pytest.raises(NothingFitsError) as caught:
            search(20 * MB, methods=methods, allow=allow, model=model)
        said = str(caught.value)
        assert ("About the smallest" in said) == room.is_hopeless([], model, workload)
        return said.replace("About the", "The")

    monkeypatch.setattr(predict_best, "trace_all", trace_all)
    model = dataclasses.replace(tiny_model.MODEL, num_parameters_known=room.num_traced(traces))
    workload = tiny_model.workload(20 * MB, methods)
    said = lacking()
    assert len(asked) <= most_specs
    refuses += ["nf4", "nf4-double"]
    without = lacking()  # The smallest cannot be traced, others can.
    monkeypatch.setattr(room, "is_hopeless", lambda *_: False)
    assert lacking() == without
    assert len(asked) > most_specs
    refuses.clear()
    assert lacking() == said


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_a_class_that_is_too_large_is_not_said_to_be_missing() -> None:
    """Its configurations are known not to fit before anything is traced."""
    of_7b = dataclasses.replace(tiny_model.MODEL, num_parameters_known=2 * 10**9)
    with pytest.raises(NothingFitsError) as caught:
        search(4000 * MB, allow="exact", model=of_7b)
    said = str(caught.value)
    assert said.startswith(
        "Nothing of the class exact fits into 3.73 GiB. The weights and gradients"
    )
    # 2 x 2 bytes each.
    assert "take 7.45 GiB. --allow recipe: " in said
    with pytest.raises(NothingFitsError) as caught:
        search(4000 * MB, allow="exact", base=dataclasses.replace(BASE, precision="fp32"))
    said = str(caught.value)
    assert said.startswith("No configuration of the class exact is in the space. The base is full")
    assert "fp32" in said


@pytest.mark.parametrize(
    ("allow", "remedy"), [("exact", "Raise --allow"), ("recipe", "Name another --space")]
)
def test_a_class_that_cannot_be_traced_is_not_said_to_be_too_large(allow: str, remedy: str) -> None:
    found = none_of_class(
        allow,
        [BASE],
        BASE,
        tiny_model.MODEL,
        tiny_model.workload(MB),
        {},
        {TraceSpec.of(BASE): "no kernel"},
    )
    assert str(found).startswith(
        f"No configuration of the class {allow} can be traced. No kernel. {remedy}"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_a_class_outside_the_space_is_told_from_one_of_which_nothing_fits() -> None:
    assert search(1500 * MB).classes_outside == ()
    # A base in float32, which the space has nothing of.
    base = dataclasses.replace(search(4000 * MB).base, precision="fp32")
    answer = search(4000 * MB, base=base)
    assert answer.classes_outside == ("exact",)
    assert answer.best_class == "numerics"


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("methods", [("full",), ("full", "lora"), tiny_model.METHODS])
def test_when_nothing_fits_the_message_has_the_smallest(
    estimate_all: EstimateAll, methods: tuple[str, ...]
) -> None:
    budget = 650 * MB  # QLoRA takes less than 700 since its base is loaded in one block
    estimates = [e for e in estimate_all(budget) if e.config.method in methods]
    smallest = min(estimates, key=lambda e: e.peak_device_bytes)
    with pytest.raises(NothingFitsError) as caught:
        search(budget, methods=methods, allow="recipe")
    message = str(caught.value)
    assert format_bytes(budget) in message
    assert format_bytes(smallest.peak_device_bytes) in message
    assert ("--method qlora" in message) == ("qlora" not in methods)


@pytest.mark.usefixtures("torch_before_2_14")
@pytest.mark.parametrize(("task", "attention"), [("causal-lm", EXPANDED), ("dpo", "sdpa")])
def test_a_card_without_fused_groups_has_an_attention_for_whatever_the_batches_are(
    task: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs are padded: beside their mask key heads are expanded anyway."""
    valid = []

    def stop(*args: Any, **facts: Any) -> Any:
        valid.extend(enumerate_configs(*args, **facts).configs)
        raise ConfigError("seen")

    monkeypatch.setattr(searched_space, "enumerate_configs", stop)
    workload = dataclasses.replace(tiny_model.workload(8000 * MB, ("full",)), task=task)
    with pytest.raises(ConfigError, match="seen"):
        find(tiny_model.MODEL, workload, load("default"), find_gpu("t4"))
    assert {config.attention for config in valid} == {attention}


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_what_cannot_be_quantised_again_is_not_advised_to_be() -> None:
    config = {**tiny_model.MODEL.config, "quantization_config": {"quant_method": "mxfp4"}}
    unpacked = dataclasses.replace(tiny_model.MODEL, config=config)
    for model, is_advised in ((tiny_model.MODEL, True), (unpacked, False)):
        with pytest.raises(NothingFitsError) as caught:
            search(650 * MB, model=model, methods=("full", "lora"), allow="recipe")
        assert ("--method qlora" in str(caught.value)) == is_advised


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_what_fits_but_for_the_room_is_said_to_need_room(estimate_all: EstimateAll) -> None:
    peak_bytes = min(estimate.peak_device_bytes for estimate in estimate_all(650 * MB))
    workload = dataclasses.replace(
        tiny_model.workload(peak_bytes + 10 * MB, tiny_model.METHODS),
        headroom=Headroom(spare_bytes=40 * MB),
    )
    needed, room = format_bytes(peak_bytes + 40 * MB), format_bytes(40 * MB)
    with pytest.raises(NothingFitsError, match=f"need {needed} with {room} of room"):
        find(tiny_model.MODEL, workload, tiny_model.SPACE, tiny_model.gpu(), allow="recipe")


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_weights_are_updated_in_the_backward_pass_where_nothing_else_fits(
    roomy: Estimator,
) -> None:
    """As another recipe; and where all samples of a step are too many, it is said how many would fit."""
    both = with_domains(tiny_model.SPACE, lambda _: {"update_in_backward": (False, True)})

    def least_bytes(micro_batch_size: int, *, in_backward: bool) -> int:
        configs = (
            dataclasses.replace(
                config,
                micro_batch_size=micro_batch_size,
                gradient_accumulation_steps=1 if in_backward else 2,
                update_in_backward=in_backward,
            )
            for config in tiny_model.configs(("full",))
        )
        return min(roomy.estimate(config).peak_device_bytes for config in configs)

    def searched(budget_bytes: int) -> Answer:
        workload = dataclasses.replace(
            tiny_model.workload(budget_bytes, ("full",)), effective_batch_size=2
        )
        return find(tiny_model.MODEL, workload, both, tiny_model.gpu()).answer

    one, two = (least_bytes(size, in_backward=True) for size in (1, 2))
    assert one < two < least_bytes(1, in_backward=False)
    found = searched(two)
    assert found.best.config.update_in_backward
    assert (found.best_class, found.best.config.micro_batch_size) == ("recipe", 2)
    with pytest.raises(NothingFitsError, match="--effective-batch 1 fits"):
        searched(one)


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("precision", "budget_bytes", "expected"),
    [
        ("bf16-mixed", 1600 * MB, {"activation_checkpointing", "precision"}),
        ("bf16-true", 2700 * MB, {"activation_checkpointing"}),
    ],
)
def test_changes_put_one_setting_back(
    roomy: Estimator, precision: str, budget_bytes: int, expected: set[str]
) -> None:
    slow = {"optimizer": "adamw_bnb_8bit", "precision": precision}
    base = dataclasses.replace(BASE, activation_checkpointing=1, **slow)
    answer = search(budget_bytes, base=base, allow="recipe", methods=("full",))
    estimator = roomy.with_budget(budget_bytes)
    settings = {change.setting for change in answer.changes}
    assert expected <= settings
    for change in answer.changes:
        put_back = dataclasses.replace(answer.best.config, **{change.setting: change.value})
        assert change.value == getattr(base, change.setting)
        assert change.value != getattr(answer.best.config, change.setting)
        assert change.estimate == estimator.estimate(put_back)
        assert change.leaves_room == (change.estimate.peak_device_bytes <= budget_bytes)


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_every_point_is_accounted_for() -> None:
    for budget_bytes in BUDGETS:
        answer = search(budget_bytes, allow="recipe")
        counts = answer.counts
        dropped = counts.invalid + counts.unsupported + counts.passed_over
        rest = dropped + counts.predicted_oom + counts.feasible
        assert counts.enumerated == rest == 160 + sum(answer.invalid_by_rule.values())
        assert counts.feasible > 0
        assert 0 < counts.replayed <= 160
    assert counts.predicted_oom == 0  # 12 GB hold everything


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_the_search_replays_a_fraction() -> None:
    assert search(12_000 * MB).counts.replayed < 80


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_effort_bounds_what_is_recorded() -> None:
    found = find(
        tiny_model.MODEL,
        tiny_model.workload(2000 * MB),
        tiny_model.SPACE,
        tiny_model.gpu(),
        effort="quick",
    )
    assert found.answer.best in found.considered
    assert len(found.considered) <= prediction.EFFORTS["quick"].num_recorded


@pytest.mark.slow
def test_a_method_that_cannot_be_traced_is_counted(
    traces: Mapping[TraceSpec, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = {spec: trace for spec, trace in traces.items() if spec.method == "lora"}
    others = dict.fromkeys(traces.keys() - some.keys(), "its weights are shared")

    def trace_all(
        *_: object, found: dict[TraceSpec, Trace], refused: dict[TraceSpec, str], **__: object
    ) -> None:
        found.update(some)
        refused.update(others)

    monkeypatch.setattr(predict_best, "trace_all", trace_all)
    answer = search(12_000 * MB)
    assert answer.best.config.method == "lora"
    assert answer.counts.unsupported == 160 - 48
    assert (answer.baseline, answer.base_refused) == (None, "its weights are shared")


@pytest.mark.slow
def test_a_first_answer_is_told_while_others_are_traced(
    traces: Mapping[TraceSpec, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    def trace_all(
        *_: Any,
        found: dict[TraceSpec, Trace],
        on_trace: Callable[[int, int], None],
        **__: Any,
    ) -> None:
        for number, (spec, trace) in enumerate(sorted(traces.items(), key=repr), start=1):
            found[spec] = trace
            on_trace(number, len(traces))

    monkeypatch.setattr(predict_best, "trace_all", trace_all)
    monkeypatch.setattr(first_answers, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(first_answers, "MOST_SHARE", 1.0)
    told = list[Estimate]()
    answer = search(2000 * MB, so_far=told.append)
    assert told
    assert all(estimate.peak_device_bytes <= 2000 * MB for estimate in told)
    # Looking on the way changes nothing of the answer.
    assert dataclasses.replace(answer, elapsed_seconds=0.0) == dataclasses.replace(
        search(2000 * MB), elapsed_seconds=0.0
    )


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_a_way_to_share_that_cannot_be_traced_is_named_for_a_reason_of_its_own() -> None:
    config = TrainConfig(
        method="full",
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        sequence_length=8,
        precision="bf16-true",
        optimizer="adamw_torch",
        parallelism="ddp",
        num_gpus=2,
    )
    spec = TraceSpec.of(config)
    on_fsdp2 = dataclasses.replace(spec, parallelism="fsdp2")
    refused = {
        on_fsdp2: "its weight is two",
        **{dataclasses.replace(each, attention="eager"): "no eager" for each in (spec, on_fsdp2)},
    }
    (found,) = refused_kinds([], [config], refused)
    assert str(found) == "fsdp2 (its weight is two)"

    adapters = [
        dataclasses.replace(config, method="lora", lora_targets=targets, parallelism=way)
        for targets, way in (("attention", "fsdp2"), ("all-linear", "fsdp2"), ("attention", "ddp"))
    ]
    refused = {TraceSpec.of(adapters[1]): "experts"}
    found, *others = refused_kinds([], [config, *adapters[::2]], refused)
    assert (str(found), others) == ("LoRA on all-linear with fsdp2 (experts)", [])


@pytest.mark.slow
def test_a_card_of_unknown_speed_is_refused() -> None:
    card = dataclasses.replace(tiny_model.gpu(), peak_flop_per_second={})
    with pytest.raises(HardwareError, match=r"speed of .* is not known"):
        search(12_000 * MB, gpu=card)


def test_a_task_whose_trainer_is_missing_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (searched_space, requirements):
        monkeypatch.setattr(module, "is_installed", lambda _: False)
    workload = tiny_model.workload(8000 * MB, ("full",))
    workload = dataclasses.replace(workload, task="sentence-similarity")
    with pytest.raises(
        ConfigError, match=r"not installed here\. pip install sentence-transformers"
    ):
        find(tiny_model.MODEL, workload, load("full"), find_gpu("a100"))


def test_a_space_without_valid_points_says_which_rule_they_break() -> None:
    # bfloat16 and adapters under it: nothing for a Turing card.
    with pytest.raises(ConfigError, match="no valid configuration") as caught:
        search(12_000 * MB, gpu=find_gpu("t4"))
    assert "bfloat16 matrix products need compute capability 8.0" in str(caught.value)
    empty = dataclasses.replace(tiny_model.SPACE, methods=tiny_model.SPACE.methods[:1])
    with pytest.raises(ConfigError, match="no valid configuration") as caught:
        search(12_000 * MB, space=empty, methods=("lora",))
    assert "lora" in str(caught.value)
    assert "--num-gpus" not in str(caught.value)
    shared = dataclasses.replace(
        tiny_model.workload(8000 * MB, ("full",)), num_gpus=2, task="sentence-similarity"
    )
    apart = with_domains(load("full"), lambda _: {"parallelism": ("fsdp2",)})
    with pytest.raises(ConfigError, match=r"or leave --num-gpus out\.$"):
        find(tiny_model.MODEL, shared, apart, find_gpu("a100"))
    # No rule is broken by all: the base's are told.
    pytest.importorskip("trl")
    few = dataclasses.replace(
        tiny_model.workload(8000 * MB, ("full",)), task="grpo", effective_batch_size=4
    )
    with pytest.raises(ConfigError, match=r"--effective-batch 8 or a multiple of it") as caught:
        find(tiny_model.MODEL, few, load("full"), find_gpu("a100"))
    assert "completions are rewarded against the others of their prompt" in str(caught.value)
    # The space's own number, and not where one of its numbers would do.
    of_six, of_two = (
        with_domains(load("full"), lambda _, numbers=numbers: {"num_generations": numbers})
        for numbers in ((6, 12), (6, 2))
    )
    with pytest.raises(
        ConfigError, match=r"--effective-batch 6 or a multiple of it: a prompt has 6"
    ):
        find(tiny_model.MODEL, few, of_six, find_gpu("a100"))
    large = with_domains(of_two, lambda _: {"micro_batch_size": (8,)})
    with pytest.raises(ConfigError, match="micro-batch x accumulation x GPUs") as caught:
        find(tiny_model.MODEL, few, large, find_gpu("a100"))
    assert "a multiple of it" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_progress_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    answer = search(2700 * MB, progress=lambda *step: told.append(step))
    assert [what for what, _, _ in told] == ["space", "priced", "replayed"]
    assert all(0 < done <= total for _, done, total in told)
    assert told[0][1:] == (160, 160)
    assert told[2][1] <= answer.counts.replayed


def test_what_cannot_fit_is_not_traced() -> None:
    model = dataclasses.replace(tiny_model.MODEL, num_parameters_known=10**9)

    def left(budget_bytes: int, model: Any = model) -> set[tuple[str, str]]:
        possible = room.possible(tiny_model.configs(), model, tiny_model.workload(budget_bytes))
        return {(config.method, config.precision) for config in possible}

    every = left(100 * 10**9)
    # With 2 GB more, which the answer speaks of: 4 bytes per parameter of bfloat16 full fine-tuning.
    assert every - left(3 * 10**9) == {("full", "bf16-mixed")}
    assert left(10**8) == {("lora", "bf16-autocast"), ("qlora", "bf16-autocast")}
    # Nothing at all: everything is priced, so that the smallest can be named.
    assert left(10**8, dataclasses.replace(model, num_parameters_known=10**12)) == every
    unknown = dataclasses.replace(model, num_parameters_known=None)
    assert left(10**8, unknown) == every


LADDER = [
    dataclasses.replace(
        BASE,
        micro_batch_size=8 // n,
        gradient_accumulation_steps=n,
        activation_checkpointing=layers,
    )
    for n in (1, 2, 4, 8)
    for layers in (0, 1)
]
OF_OTHER_RUNS = [
    dataclasses.replace(BASE, optimizer="adamw_8bit"),
    dataclasses.replace(BASE, precision="bf16-mixed"),
    LORA,
]


@settings(max_examples=300, deadline=None)
@given(st.permutations([*range(100, 900, 100)]), st.permutations([*range(100, 900, 100)]))
def test_fallbacks_are_the_fastest_with_more_room(peaks: list[int], speeds: list[int]) -> None:
    """Each gives back a tenth; the last takes the least; another run's settings are in none."""
    table = {
        config: (peak, peak, float(speed), float(speed))
        for config, peak, speed in zip(LADDER, peaks, speeds, strict=True)
    }
    table |= dict.fromkeys(OF_OTHER_RUNS, (1, 1, 10000.0, 10000.0))
    search, estimator = candidates(table, 1000)
    answer = estimator.estimate(LADDER[0])
    found = search.fallbacks(answer, search.at_most("recipe"))
    before = answer
    for number, fallback in enumerate(found, start=1):
        roomier = [c for c in LADDER[1:] if 10 * table[c][1] <= 9 * before.peak_device_bytes]
        least = min(roomier, key=lambda config: table[config][1])
        fastest = max(roomier, key=lambda config: table[config][2])
        assert fallback.config == (least if number == 3 else fastest)
        before = fallback
    if len(found) < 3:
        assert all(10 * table[config][1] > 9 * before.peak_device_bytes for config in LADDER[1:])
