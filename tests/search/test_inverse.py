"""The inverse questions against a search that tries every configuration at every value."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import here
import pytest
import tiny_model

from autotune.catalogue import models
from autotune.catalogue.gpus import Gpu, catalogue, find_gpu
from autotune.catalogue.models import CatalogueEntry, ModelSource
from autotune.errors import ConfigError, NothingFitsError
from autotune.memory.allocator import Replay
from autotune.memory.traces import Trace
from autotune.predict import estimator
from autotune.predict.estimator import Estimator
from autotune.predict.replays import Replayable, Replays
from autotune.predict.tracing import of_card, trace_all
from autotune.records.estimate import Estimate, TraceSpec
from autotune.records.question import Question
from autotune.report import limits
from autotune.search.budget import CardSource, ChosenCard
from autotune.search.inverse import pricing, questions
from autotune.search.inverse.limits import resolve_limit
from autotune.search.inverse.pricing import Case, LimitProblem, Pricer, thrift
from autotune.space import space_file
from autotune.space.config import METHODS, TrainConfig
from autotune.space.enumeration import enumerate_configs
from autotune.space.headroom import NO_HEADROOM, Headroom
from autotune.space.lengths import Lengths
from autotune.space.search_space import MethodSpace, SearchSpace, for_gpus, with_domains

pytestmark = pytest.mark.worker

_TRACED: dict[tuple[object, ...], Trace | None] = {}


def traced(
    source: ModelSource,
    task: str,
    sequence_length: int,
    card: Gpu,
    specs: Iterable[TraceSpec],
    *,
    server: here.Workers,
    num_gpus: int = 1,
    cache: object = None,
    on_trace: Callable[[int, int], None] | None = None,
) -> dict[TraceSpec, Any]:
    """What trace_all makes, once for all tests of this file: a trace follows from these alone."""
    kernels = tuple(of_card(card).items())
    step = source.name, json.dumps(source.config), task, sequence_length, num_gpus, kernels
    wanted = set(specs)
    missing = {spec for spec in wanted if (step, spec) not in _TRACED}
    if missing:
        try:
            made = trace_all(
                source,
                task,
                sequence_length,
                card,
                missing,
                num_gpus=num_gpus,
                server=server,
                on_trace=on_trace,
            )
        except ConfigError:
            # Asked for at once, the others would have come.
            if missing == wanted:
                raise
            made = {}
        _TRACED.update({(step, spec): made.get(spec) for spec in missing})
    return {spec: trace for spec in wanted if (trace := _TRACED[step, spec]) is not None}


@pytest.fixture(autouse=True)
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pricing, "trace_all", traced)


GB = 10**9
STEP = 512
LENGTHS = (512, 1024, 1536, 2048)


def _sparser(section: MethodSpace) -> dict[str, tuple[object, ...]]:
    fewer: dict[str, tuple[object, ...]] = {"micro_batch_size": (1, 2, 8), "lora_rank": (8, 64)}
    if section.method == "full":
        fewer["optimizer"] = ("adamw_torch_fused", "paged_adamw_32bit", "sgd")
    return {name: values for name, values in fewer.items() if name in section.domains}


SPARSE = with_domains(tiny_model.SPACE, _sparser)
"""For full searches, which replay every point: the ends of each row and something between."""


@pytest.fixture(scope="module")
def server() -> here.Workers:
    return here.workers


def asked(
    *,
    gpu: Gpu | None = None,
    budget_bytes: int = 3 * GB,
    accumulation: int = 1,
    fixed: Mapping[str, Any] | None = None,
    **changed: Any,
) -> LimitProblem:
    plain: dict[str, Any] = {
        "question": Question(accumulation=accumulation, settings=fixed or {}),
        "source": tiny_model.MODEL,
        "card": ChosenCard(
            gpu=gpu or tiny_model.gpu(), source=CardSource.NAMED, budget_bytes=budget_bytes
        ),
        "headroom": NO_HEADROOM,
        "sequence_length": tiny_model.SEQUENCE_LENGTH,
        "methods": METHODS,
        "space": tiny_model.SPACE,
        "multiple_of": STEP,
    }
    return LimitProblem(**plain | changed)


def every_config(
    length: int = 512,
    methods: tuple[str, ...] = METHODS,
    space: SearchSpace = tiny_model.SPACE,
) -> list[TrainConfig]:
    """The space's, each with one micro-batch per step."""
    return [
        dataclasses.replace(config, gradient_accumulation_steps=1, sequence_length=length)
        for config in tiny_model.configs(methods, space)
    ]


def fitting(
    traces: Mapping[TraceSpec, Trace], configs: list[TrainConfig], budget_bytes: int
) -> list[Estimate]:
    """By a full replay of each."""
    estimates = replayed(traces, configs, budget_bytes)
    return [each for each in estimates if each.peak_device_bytes <= budget_bytes]


def replayed(
    traces: Mapping[TraceSpec, Trace], configs: list[TrainConfig], budget_bytes: int
) -> list[Estimate]:
    if id(traces) not in _REPLAYED:
        _REPLAYED[id(traces)] = Estimator(traces, tiny_model.gpu(), memory_budget_bytes=10**12)
    estimator = _REPLAYED[id(traces)].with_budget(budget_bytes)
    return [estimator.estimate(config) for config in configs if estimator.supports(config)]


_REPLAYED: dict[int, Estimator] = {}
"""Estimators by the traces that they hold: budgets share what is replayed."""


@pytest.fixture(scope="module")
def traces_by_length(server: here.Workers) -> dict[int, Mapping[TraceSpec, Trace]]:
    specs = {TraceSpec.of(config) for config in every_config()}
    card, model = tiny_model.gpu(), tiny_model.MODEL
    return {
        length: traced(model, "causal-lm", length, card, specs, server=server) for length in LENGTHS
    }


def test_updates_in_the_backward_pass_are_tried(server: here.Workers) -> None:
    """They keep no gradients: 249 MB of the 124 M weights in 16 bits."""
    space = with_domains(SPARSE, lambda _: {"update_in_backward": (False, True)})
    options: dict[str, Any] = {"budget_bytes": 820_000_000, "methods": ("full",)}
    with pytest.raises(NothingFitsError):
        questions.answer("micro-batch", asked(**options, space=SPARSE), server)
    found = questions.answer("micro-batch", asked(**options, space=space), server)
    # Where nothing fits, what needs least is one of them, and is said.
    tight = asked(methods=("full",), budget_bytes=500_000_000, space=space)
    with pytest.raises(NothingFitsError, match=r"not even micro-batch 1.*update in the backward"):
        questions.answer("micro-batch", tight, server)
    assert found.best.config.update_in_backward
    assert cast(int, found.value) >= 1


def test_host_memory_ends_what_the_card_has_room_for(server: here.Workers) -> None:
    """Each sample of 512 tokens parks the input of five layers, 1,024 wide, in 16 bits."""
    per_sample = 5 * 512 * 1024 * 2
    fixed = {"activation_checkpointing": 1, "activation_offloading": True}
    problem = asked(methods=("lora",), fixed=fixed, host_memory_bytes=4 * per_sample)
    found = questions.answer("micro-batch", problem, server)
    assert (found.value, found.best.host_bytes) == (4, 4 * per_sample)
    assert found.beyond is not None
    # Torch rounds five samples up to eight.
    assert found.beyond.smallest.host_bytes == 8 * per_sample
    drawn = io.StringIO()
    limits.draw_answer(found, limits.command(found), drawn)
    shown = " ".join(drawn.getvalue().split())
    assert "needs 40.0 MiB of host memory at least, 20.0 MiB too much" in shown
    assert f"--host-mem {4 * per_sample}B" in limits.command(found)
    tight = asked(methods=("lora",), fixed=fixed, host_memory_bytes=per_sample - 1)
    with pytest.raises(
        NothingFitsError, match=r"of host memory, 1 B too much.*--host-mem 0\.1GB is"
    ):
        questions.answer("micro-batch", tight, server)
    # Nothing may wait there: the card's memory alone decides where nothing does.
    nowhere = dataclasses.replace(tight, host_memory_bytes=0)
    with pytest.raises(NothingFitsError, match=r"5\.0 MiB too much"):
        questions.answer("micro-batch", nowhere, server)
    kept = asked(methods=("lora",), fixed={"activation_offloading": False}, host_memory_bytes=0)
    alike = dataclasses.replace(kept, host_memory_bytes=None)
    values = {questions.answer("micro-batch", each, server).value for each in (kept, alike)}
    assert len(values) == 1


@pytest.mark.parametrize(
    ("budget_bytes", "methods"),
    [(1_262_000_000, METHODS), (1_062_000_000, ("lora",)), (962_000_000, ("full",))],
)
def test_the_longest_sequence_is_that_of_a_full_search(
    server: here.Workers,
    traces_by_length: dict[int, Mapping[TraceSpec, Trace]],
    budget_bytes: int,
    methods: tuple[str, ...],
) -> None:
    every_one = {
        length: replayed(traces, every_config(length, methods, SPARSE), budget_bytes)
        for length, traces in traces_by_length.items()
    }
    by_length = {
        length: [each for each in estimates if each.peak_device_bytes <= budget_bytes]
        for length, estimates in every_one.items()
    }
    longest = max(length for length, fit in by_length.items() if fit)
    assert longest in LENGTHS[:-1], "the case would say nothing"
    found = questions.answer(
        "sequence-length",
        asked(budget_bytes=budget_bytes, methods=methods, space=SPARSE),
        server,
    )
    assert found.value == longest
    assert found.best in by_length[longest]
    # At the limit no form is usual: whatever fits is shown at its best.
    fastest = max(e.tokens_per_second or 0 for e in by_length[longest])
    assert found.best.tokens_per_second == pytest.approx(fastest, rel=0.02)
    assert found.beyond is not None
    assert found.beyond.value == longest + STEP
    assert found.limit == "memory"
    # It lacks what the best configuration for it lacks, by a full replay of every one.
    needed = [each.resident_bytes for each in every_one[longest + STEP]]
    assert found.beyond.lacks_bytes == min(needed) - budget_bytes > 0
    peak_bytes = found.beyond.smallest.resident_bytes
    roomy = dataclasses.replace(
        found.beyond, budget_bytes=peak_bytes + 1, needed_bytes=peak_bytes + 2
    )
    told = roomy.to_dict()
    assert (told["fits"], told["leaves_room"]) == (True, False), "as `estimate --json` says it"


def test_where_the_model_ends_it_that_is_said(server: here.Workers) -> None:
    found = questions.answer("sequence-length", asked(budget_bytes=11 * GB), server)
    assert found.value == 2048
    assert found.beyond is None
    assert "positions" in found.limit
    assert found.best.peak_device_bytes <= 11 * GB
    # It is said what it took: each structure of the settings is traced.
    assert found.to_dict()["num_traces"] == found.num_traces > 0


def test_learned_positions_are_a_limit_and_unnamed_ones_are_none() -> None:
    assert questions.positions(models.resolve("gpt2"))[0] == 1024
    assert questions.positions(models.resolve("roberta-large"))[0] == 512
    assert questions.positions(models.resolve("t5-base"))[0] == questions.MAX_SEQUENCE_LENGTH


@pytest.mark.parametrize("methods", [("full",), ("lora",)])
def test_the_largest_micro_batch_is_that_of_a_full_search(
    server: here.Workers,
    traces_by_length: dict[int, Mapping[TraceSpec, Trace]],
    methods: tuple[str, ...],
) -> None:
    budget_bytes = 3 * GB
    found = questions.answer(
        "micro-batch", asked(budget_bytes=budget_bytes, methods=methods), server
    )
    assert isinstance(found.value, int)
    configs = [c for c in every_config(512, methods) if c.micro_batch_size == 2]

    def fit_at(size: int) -> list[Estimate]:
        return fitting(
            traces_by_length[512],
            [dataclasses.replace(config, micro_batch_size=size) for config in configs],
            budget_bytes,
        )

    assert found.value > 4
    assert found.best in fit_at(found.value)
    assert not any(fit_at(size) for size in range(found.value + 1, found.value + 4))
    assert found.beyond is not None
    assert found.beyond.value == found.value + 1


def test_the_largest_micro_batch_of_two_gpus_is_that_of_a_full_search(server: here.Workers) -> None:
    """Either has its own micro-batch, and with fsdp2 half of the weights."""
    budget_bytes = 1_400_000_000
    two = for_gpus(SPARSE, 2)
    ask = asked(budget_bytes=budget_bytes, methods=("full",), space=two, num_gpus=2)
    found = questions.answer("micro-batch", ask, server)
    assert isinstance(found.value, int)
    (section,) = (each for each in two.methods if each.method == "full")
    assert set(section.domains["parallelism"]) == {"ddp", "fsdp2", "fsdp2-no-reshard"}
    workload = dataclasses.replace(
        tiny_model.workload(("full",)), num_gpus=2, effective_batch_size=4
    )
    every = enumerate_configs(two, workload, num_layers=4).configs
    of_two = [c for c in every if (c.method, c.micro_batch_size) == ("full", 2)]
    assert {c.gradient_accumulation_steps for c in of_two} == {1}
    specs = {TraceSpec.of(config) for config in of_two}
    traces = traced(
        tiny_model.MODEL, "causal-lm", 512, tiny_model.gpu(), specs, server=server, num_gpus=2
    )

    def fit_at(size: int) -> list[Estimate]:
        sized = [dataclasses.replace(config, micro_batch_size=size) for config in of_two]
        return fitting(traces, sized, budget_bytes)

    assert found.best in fit_at(found.value)
    assert {each.config.parallelism for each in fit_at(found.value)} == {"fsdp2"}
    assert not any(fit_at(size) for size in range(found.value + 1, found.value + 4))
    assert "--num-gpus 2" in limits.command(found)
    drawn = io.StringIO()
    limits.draw_answer(found, limits.command(found), drawn)
    assert "all figures of memory are of each GPU" in " ".join(drawn.getvalue().split())


def test_the_highest_rank_is_that_of_a_full_search(
    server: here.Workers, traces_by_length: dict[int, Mapping[TraceSpec, Trace]]
) -> None:
    budget_bytes = 862_000_000
    found = questions.answer("lora-rank", asked(budget_bytes=budget_bytes), server)
    assert isinstance(found.value, int)
    configs = [c for c in every_config() if c.method != "full" and c.lora_rank == 8]

    def fit_at(rank: int) -> list[Estimate]:
        ranked = [dataclasses.replace(config, lora_rank=rank) for config in configs]
        return fitting(traces_by_length[512], ranked, budget_bytes)

    assert 8 < found.value < 1024
    assert found.best in fit_at(found.value)
    assert not any(fit_at(rank) for rank in range(found.value + 1, found.value + 4))


def test_no_rank_is_higher_than_a_matrix_has_sides(server: here.Workers) -> None:
    found = questions.answer("lora-rank", asked(budget_bytes=11 * GB, methods=("lora",)), server)
    assert found.value == 512  # keys and values: 8 heads of 64 of 1,024 inputs
    assert "512 inputs or outputs: more rank adds nothing" in found.limit
    assert found.beyond is None


def test_a_rank_beyond_the_narrowest_layer_is_for_other_layers(server: here.Workers) -> None:
    sections = [
        dataclasses.replace(
            section, domains={**section.domains, "lora_targets": ("all-linear", "q_proj,o_proj")}
        )
        for section in tiny_model.SPACE.methods
        if section.method == "lora"
    ]
    space = dataclasses.replace(tiny_model.SPACE, methods=tuple(sections))
    ask = asked(budget_bytes=11 * GB, methods=("lora",), space=space)
    found = questions.answer("lora-rank", ask, server)
    assert found.value == 1024
    assert found.best.config.lora_targets == "q_proj,o_proj"


def test_a_rank_of_full_fine_tuning_is_refused(server: here.Workers) -> None:
    with pytest.raises(ConfigError, match="has no rank"):
        questions.answer("lora-rank", asked(methods=("full",)), server)


def llama(hidden_size: int, num_layers: int, intermediate_size: int) -> dict[str, Any]:
    """The configuration of a Llama: few layers make a replay quick, wide ones its weights large."""
    return tiny_model.MODEL.config | {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // 64,
        "num_key_value_heads": hidden_size // 128,
    }


def num_parameters(config: Mapping[str, Any]) -> int:
    width = config["hidden_size"]
    attention = 2 * width * (width + config["num_key_value_heads"] * 64)
    layer = attention + 3 * width * config["intermediate_size"] + 2 * width
    return config["num_hidden_layers"] * layer + 2 * config["vocab_size"] * width + width


def entry(config: Mapping[str, Any], folder: Path) -> CatalogueEntry:
    name = f"llama-{config['hidden_size']}"
    file = folder / f"{name}.json"
    file.write_text(json.dumps(config))
    return dataclasses.replace(
        models.catalogue()[0],
        hub_id=f"made-up/{name}",
        file=str(file),
        num_parameters=num_parameters(config),
    )


def test_the_largest_model_is_that_of_a_full_search(
    server: here.Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget_bytes, length = 1_150_000_000, 512
    rows = [entry(llama(width, 2, 8 * width), tmp_path) for width in (1024, 512, 2048, 1536)]
    monkeypatch.setattr(models, "catalogue", lambda: tuple(rows))
    monkeypatch.setattr(models, "known", lambda: tuple(rows))
    found = questions.answer(
        "model", asked(source=None, budget_bytes=budget_bytes, methods=("lora",)), server
    )
    configs = every_config(length, ("lora",))
    specs = {TraceSpec.of(config) for config in configs}

    def fits(source: ModelSource) -> bool:
        traces = traced(source, "causal-lm", length, tiny_model.gpu(), specs, server=server)
        return bool(fitting(traces, configs, budget_bytes))

    by_size = sorted(rows, key=lambda row: -row.num_parameters)
    fitting_ones = [row.hub_id for row in by_size if fits(models.resolve(row.hub_id))]
    assert 0 < len(fitting_ones) < len(by_size), "the case would say nothing"
    assert found.value == fitting_ones[0]
    assert found.beyond is not None
    assert found.beyond.lacks_bytes > 0
    beyond = by_size[by_size.index(next(r for r in rows if r.hub_id == found.value)) - 1]
    assert found.beyond.value == beyond.hub_id


def test_the_smallest_card_is_that_of_a_full_search(server: here.Workers) -> None:
    config = llama(8192, 2, 144_384)
    weights_bytes = 2 * num_parameters(config)
    assert 16.0 * GB < weights_bytes < 16.5 * GB
    source = dataclasses.replace(tiny_model.MODEL, name="wide-llama", config=config)
    methods, length = ("lora",), 512
    found = questions.answer("gpu", asked(source=source, methods=methods, space=SPARSE), server)
    configs = every_config(length, methods, SPARSE)
    specs = {TraceSpec.of(config) for config in configs}
    tried = []
    for card in sorted(catalogue(), key=lambda card: card.capacity_bytes):
        if card.compute_capability is None or card.compute_capability < (8, 0):
            continue
        if card.capacity_bytes < weights_bytes:
            continue
        tried.append(card)
        traces = traced(source, "causal-lm", length, card, specs, server=server)
        estimator = Estimator(traces, card, memory_budget_bytes=card.capacity_bytes)
        peak = min(estimator.estimate(config).peak_device_bytes for config in configs)
        if peak <= card.capacity_bytes:
            break
    assert len({card.capacity_bytes for card in tried}) > 1, "the case would say nothing"
    assert find_gpu(str(found.value)).name == card.name
    assert found.memory_budget_bytes == card.capacity_bytes
    assert found.beyond is not None
    assert find_gpu(str(found.beyond.value)).capacity_bytes < card.capacity_bytes


class PricerOfRooms(Pricer):
    """Says that a card fits which leaves torch as much as its kind of card needs."""

    def __init__(self, needed: Mapping[object, int]) -> None:
        self.needed = needed
        self.num_asked = 0
        self.too_small = set[int | str]()
        """Cards that what is left in pieces does not fit, by name, whatever their room."""

    def holds_weights(self, case: Case) -> bool:
        return case.budget_bytes > 6 * 2**30

    def fitting(self, case: Case) -> Estimate | None:
        self.num_asked += 1
        fits = questions.room_for_torch(case.gpu) >= self.needed[questions.kind_of(case.gpu)]
        return cast("Estimate", case) if fits and case.value not in self.too_small else None


@pytest.mark.parametrize("seed", range(20))
def test_halving_finds_the_card_that_asking_each_one_finds(seed: int) -> None:
    draw = random.Random(seed)
    cards = questions.unlike_cards()
    cases = [
        Case(
            value=card.slug,
            source=tiny_model.MODEL,
            gpu=card,
            budget_bytes=card.capacity_bytes,
            sequence_length=512,
            fixed={},
        )
        for card in cards
    ]
    most = draw.choice((10, 30, 90, 400))
    kinds = {questions.kind_of(card): draw.randrange(5 * 2**30, most * 2**30) for card in cards}
    each = PricerOfRooms(kinds)
    expected = next(
        (n for n, c in enumerate(cases) if each.holds_weights(c) and each.fitting(c)), None
    )
    halving = PricerOfRooms(kinds)
    assert questions.first_card(cases, halving) == expected
    assert halving.num_asked <= 5 + 3 * len(kinds)
    if expected is None:
        return
    # Nor is a card the answer that has room and does not fit.
    halving.too_small = {cases[expected].value}
    number = questions.first_card(cases, halving)
    assert number is None or halving.fitting(cases[number]) is not None


def test_the_next_card_and_its_traces_are_told_while_they_are_made(server: here.Workers) -> None:
    told: list[tuple[str, int, int]] = []
    ask = asked(methods=("lora",), card=None)
    questions.answer("gpu", ask, server, progress=lambda *said: told.append(said))
    tried = [said for said in told if said[0] == "tried"]
    assert {number for _, number, _ in tried} == set(range(1, len(tried) + 1))
    assert len(tried) < 12
    assert "trace" in {what for what, _, _ in told}


def test_few_are_replayed_where_all_fit(
    server: here.Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches, ranks and plans need a replay each only where a misfit would spare a trace."""
    replayed: set[TrainConfig] = set()

    class Counted(Replays):
        def whole(self, run: Replayable) -> Replay:
            replayed.add(run.config)
            return super().whole(run)

    monkeypatch.setattr(estimator, "Replays", Counted)
    ask = asked(budget_bytes=60 * GB, accumulation=100_000, methods=("lora",))
    found = questions.answer("sequence-length", ask, server)
    assert (found.value, found.beyond) == (2048, None)
    assert found.best.config.gradient_accumulation_steps == 100_000
    assert len(replayed) < 2 * found.num_traces


LENGTHS_OF_SAMPLES = Lengths.of({128: 500, 1100: 500}, 2048, num_samples=1000, longest=1100)


def test_samples_of_a_dataset_are_no_longer_than_they_are(server: here.Workers) -> None:
    """Where they cannot be packed, as the answers of a classifier: there nothing is longer."""
    fixed = {"batching": "padded", "micro_batch_size": 4}
    space = with_domains(tiny_model.SPACE, lambda _: {"batching": ("padded",)})
    ask = asked(
        budget_bytes=11 * GB,
        methods=("lora",),
        space=space,
        fixed=fixed,
        lengths=LENGTHS_OF_SAMPLES,
        multiple_of=550,
    )
    found = questions.answer("sequence-length", ask, server)
    assert (found.value, found.limit) == (1100, "no sample of the dataset is longer")
    assert found.best.config.batching == "padded"
    assert found.workload is not None
    filled = found.workload.filling(found.best.config)
    assert filled.useful_share < 1
    # Nearly as much less time as there are fewer tokens.
    assert found.best.useful_share == pytest.approx(filled.useful_share, rel=0.05)


def test_what_is_fixed_stays_and_the_rest_is_free(server: here.Workers) -> None:
    fixed = {"lora_rank": 64, "activation_checkpointing": 0, "micro_batch_size": 2}
    found = questions.answer("sequence-length", asked(budget_bytes=3 * GB, fixed=fixed), server)
    config = found.best.config
    assert {name: getattr(config, name) for name in fixed} == fixed
    assert config.method in ("lora", "qlora")  # nothing else has a rank
    free = questions.answer("sequence-length", asked(budget_bytes=3 * GB), server)
    assert int(free.value) > int(found.value)


def test_a_loss_in_parts_is_tried_where_all_logits_at_once_do_not_fit(server: here.Workers) -> None:
    """`find` tries it: it finds answers for what was said not to fit."""
    few = {"activation_checkpointing": (1,), "activation_offloading": (False,)}
    both = with_domains(SPARSE, lambda _: {**few, "chunked_loss": (False, True)})

    def largest(**fixed: Any) -> questions.Limit:
        ask = asked(budget_bytes=1_062_000_000, methods=("lora",), space=both, fixed=fixed)
        return questions.answer("micro-batch", ask, server)

    free, whole, parted = (
        largest(**fixed) for fixed in ({}, {"chunked_loss": False}, {"chunked_loss": True})
    )
    assert int(whole.value) < int(parted.value)
    assert (free.value, free.best) == (parted.value, parted.best)
    assert free.best.config.chunked_loss
    assert free.beyond is not None
    assert free.beyond.lacks_bytes > 0
    # Where they fit, nothing is computed twice for it.
    ask = asked(methods=("lora",), space=both)
    small = Case(
        value=1,
        source=tiny_model.MODEL,
        gpu=tiny_model.gpu(),
        budget_bytes=3 * GB,
        sequence_length=512,
        fixed={"micro_batch_size": 1},
    )
    best, _ = Pricer(ask, server, lambda *_: None).best(small)
    assert not best.config.chunked_loss
    asked_for = resolve_limit(Question(model="gpt2", gpu="rtx-4070"), "micro-batch", multiple_of=64)
    parts = {each.method: each.domains["chunked_loss"] for each in asked_for.space.methods}
    assert parts["full"] == parts["lora"] == parts["qlora"] == (False, True)


def test_accumulation_needs_no_less(server: here.Workers) -> None:
    once = questions.answer("micro-batch", asked(methods=("full",)), server)
    often = questions.answer("micro-batch", asked(methods=("full",), accumulation=4), server)
    assert often.best.config.gradient_accumulation_steps == 4
    assert int(often.value) < int(once.value)
    assert once.accumulated is not None
    assert once.accumulated.peak_device_bytes > once.best.peak_device_bytes
    assert often.accumulated == often.best


def test_a_model_that_recomputes_nothing_is_searched_without(
    server: here.Workers,
    traces_by_length: dict[int, Mapping[TraceSpec, Trace]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without_checkpointing(*arguments: Any, **rest: Any) -> dict[TraceSpec, Trace]:
        made = traced(*arguments, **rest)
        left = {spec: trace for spec, trace in made.items() if not spec.activation_checkpointing}
        if not left:
            raise ConfigError("tiny-llama cannot be traced")
        return left

    monkeypatch.setattr(pricing, "trace_all", without_checkpointing)
    budget_bytes = 1_900_000_000
    found = questions.answer(
        "sequence-length", asked(budget_bytes=budget_bytes, methods=("lora",)), server
    )
    plain = [
        length
        for length, traces in traces_by_length.items()
        if any(
            not each.config.activation_checkpointing
            for each in fitting(traces, every_config(length, ("lora",)), budget_bytes)
        )
    ]
    assert found.value == max(plain) < 2048


@pytest.mark.parametrize(
    ("changed", "num_asked"),
    [
        ({"capacity_bytes": 24 * GB, "context_bytes": GB}, 1),
        ({"num_sms": 92}, 2),
        ({"vendor": "cpu"}, 2),
        ({"compute_capability": (9, 0)}, 2),
        ({"cublas_workspace_bytes": 32 * 2**20}, 2),
    ],
)
def test_a_card_is_priced_with_the_traces_of_its_own_kernels(
    server: here.Workers,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    num_asked: int,
) -> None:
    cards: list[Gpu] = []

    def asked_for(
        source: ModelSource, task: str, length: int, card: Gpu, *_: Any, **__: Any
    ) -> dict[TraceSpec, Trace]:
        cards.append(card)
        return traced(source, task, length, tiny_model.gpu(), *_, **__)

    monkeypatch.setattr(pricing, "trace_all", asked_for)
    first = tiny_model.gpu()
    other = dataclasses.replace(first, name="another card", **changed)
    pricer = pricing.Pricer(asked(), server, lambda *_: None)
    config = every_config(methods=("lora",))[0]
    for card in (first, other):
        case = pricing.Case(
            value=card.slug,
            source=tiny_model.MODEL,
            gpu=card,
            budget_bytes=card.capacity_bytes,
            sequence_length=512,
            fixed={},
        )
        pricer.peak_bytes(case, config)
    assert cards == [first, other][:num_asked]


def test_an_attention_that_was_given_stays_though_the_model_lacks_it(server: here.Workers) -> None:
    gemma = models.resolve("gemma-2-2b")
    ask = asked(source=gemma, fixed={"attention": "sdpa"}, methods=("lora",), budget_bytes=12 * GB)
    with pytest.raises(ConfigError, match=r"no sdpa attention for gemma2\. Give --attention eager"):
        questions.answer("micro-batch", ask, server)


def test_micro_batches_begin_at_the_least_that_the_trainer_takes(server: here.Workers) -> None:
    pytest.importorskip("trl")
    ask = asked(methods=("lora",), fixed={"activation_checkpointing": 0}, budget_bytes=4 * GB)
    ask = dataclasses.replace(ask, question=dataclasses.replace(ask.question, task="kto"))
    found = questions.answer("micro-batch", ask, server)
    assert found.value >= 2
    assert found.best.config.trainer == "trl-kto"


def test_micro_batches_of_completions_are_whole_groups(server: here.Workers) -> None:
    pytest.importorskip("trl")
    fixed = {"activation_checkpointing": 0, "num_generations": 3, "max_completion_length": 16}
    ask = asked(methods=("lora",), fixed=fixed, budget_bytes=4 * GB)
    ask = dataclasses.replace(ask, question=dataclasses.replace(ask.question, task="grpo"))
    found = questions.answer("micro-batch", ask, server)
    assert isinstance(found.value, int)
    assert found.value >= 3
    assert found.value % 3 == 0
    assert found.best.config.max_completion_length == 16


def test_a_card_whose_rates_are_unknown_has_its_answer_without_a_speed(
    server: here.Workers,
) -> None:
    card = dataclasses.replace(tiny_model.gpu(), peak_flop_per_second={})
    ask: dict[str, Any] = {"budget_bytes": 1_500_000_000, "methods": ("full",)}
    found = questions.answer("sequence-length", asked(gpu=card, **ask), server)
    assert found.best.tokens_per_second is None
    assert found.best.peak_device_bytes <= 1_500_000_000
    assert found.value == questions.answer("sequence-length", asked(**ask), server).value


def test_settings_that_no_card_allows_are_refused(server: here.Workers) -> None:
    ask = asked(card=None, space=for_gpus(tiny_model.SPACE, 2), num_gpus=2)
    question = dataclasses.replace(ask.question, settings={"parallelism": "none"})
    with pytest.raises(ConfigError, match="several GPUs share a run in one of the ways"):
        questions.answer("gpu", dataclasses.replace(ask, question=question), server)


def test_nothing_fits_says_what_needs_least(server: here.Workers) -> None:
    said = r"not even 512.*QLoRA r=8.*predicted to need .* too much"
    with pytest.raises(NothingFitsError, match=said):
        questions.answer("sequence-length", asked(budget_bytes=650_000_000), server)


def test_a_model_that_cannot_be_traced_does_not_end_the_search(
    server: here.Workers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """JetMoE makes a list of how many tokens each expert has."""
    (tmp_path / "config.json").write_text('{"model_type": "jetmoe", "num_hidden_layers": 2}')
    few = [entry(llama(512, 2, 2048), tmp_path)]
    larger = {"hub_id": "jetmoe/jetmoe", "file": str(tmp_path / "config.json")}
    few.append(dataclasses.replace(few[0], **larger, num_parameters=few[0].num_parameters + 1))
    ask = asked(
        source=None,
        gpu=find_gpu("t4"),
        budget_bytes=find_gpu("t4").capacity_bytes,
        methods=("qlora",),
        space=space_file.load("quick"),
    )
    monkeypatch.setattr(models, "catalogue", lambda: tuple(few))
    monkeypatch.setattr(models, "known", lambda: tuple(few))
    found = questions.answer("model", ask, server)
    assert found.value == few[0].hub_id
    assert found.beyond is None
    assert found.limit != "memory"
    assert list(found.left_out) == ["jetmoe/jetmoe"]
    shown = io.StringIO()
    limits.draw_answer(found, "", shown)
    text = " ".join(shown.getvalue().split())
    assert "left out jetmoe/jetmoe: Its training step cannot be run" in text

    monkeypatch.setattr(models, "catalogue", lambda: (few[-1],))
    with pytest.raises(ConfigError, match="jetmoe cannot be traced"):
        questions.answer("model", ask, server)


def test_the_value_leaves_the_room_that_was_asked_for(server: here.Workers) -> None:
    headroom = Headroom(odds=0.999)
    found = questions.answer(
        "sequence-length", asked(budget_bytes=1262 * 10**6, headroom=headroom), server
    )
    assert found.best.fits_with(1262 * 10**6) >= 0.999 - 1e-6
    assert found.beyond is not None
    # The next one may fit, but with less room.
    lacking = found.beyond.smallest.over_bytes(1262 * 10**6, headroom)
    assert found.beyond.lacks_bytes == lacking > 0


def test_settings_that_exclude_each_other_are_refused(server: here.Workers) -> None:
    fixed = {"quantization": "nf4"}
    with pytest.raises(ConfigError, match="None can work: quantised weights cannot be trained"):
        questions.answer("sequence-length", asked(fixed=fixed, methods=("lora",)), server)


FAMILIES = (
    "gpt2", "opt-1.3b", "pythia-1b", "gemma-2-2b", "falcon-7b", "bert-base-uncased", "t5-base",
    "gpt-oss-20b",
)  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_the_thriftiest_settings_need_least(server: here.Workers, name: str) -> None:
    """What the search takes for granted, for each family of models."""
    whole = models.resolve(name)
    keys = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")
    few = {key: 4 for key in keys if key in whole.config}
    config = {k: v for k, v in whole.config.items() if k != "layer_types"} | few
    source = dataclasses.replace(whole, config=config)
    configs = [
        TrainConfig(
            method="lora",
            micro_batch_size=size,
            gradient_accumulation_steps=1,
            sequence_length=512,
            precision="bf16-autocast",
            optimizer="adamw_torch_fused",
            lora_rank=8,
            lora_targets="all-linear",
            activation_checkpointing=interval,
            activation_offloading=offload,
            attention="sdpa" if "sdpa" in source.attentions else "eager",
        )
        for size, interval, offload in itertools.product((1, 2), (0, 1, 2), (False, True))
        if interval or not offload
    ]
    specs = {TraceSpec.of(config) for config in configs}
    traces = traced(source, source.task, 512, tiny_model.gpu(), specs, server=server)
    estimator = Estimator(traces, tiny_model.gpu(), memory_budget_bytes=100 * GB)
    supported = list(filter(estimator.supports, configs))
    peaks = {c: estimator.estimate(c).peak_device_bytes for c in supported}
    thriftiest = min(map(thrift, supported))
    assert min(peaks.values()) == min(peaks[c] for c in supported if thrift(c) == thriftiest)
    assert len(supported) > 1
