"""A few traced layers with prime dimensions stand for the whole model, event by event.

The other side of each comparison traces every layer, and reads the worker's answer without
extrapolating anything. Only the order among adjacent frees may differ, and only under autocast: it
drops its cached weights from a hash table, in no order (an allocator cannot tell either).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from autotune.catalogue.models import resolve
from autotune.common.json_lines import decode, encode
from autotune.memory.traces import SETUP_PHASES, BrokenTrace, Stacks, Trace, evaluate, on_card_with
from autotune.records.estimate import TraceSpec
from autotune.space.adapters import ADAPTERS
from autotune.space.checkpoint_plans import CHECKPOINT_PLANS, plan_offloads
from autotune.space.precisions import PRECISIONS
from autotune.worker.build import model as models
from autotune.worker.build.layers import with_layers
from autotune.worker.trace import step as trace_module
from autotune.worker.trace.cuda import Device

pytestmark = [
    # PEFT 0.21 asks Transformers 5.23 by the old names of activation checkpointing.
    pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning"),
]

ADA = Device(compute_capability=(8, 9), cublas_workspace_bytes=8_519_680)
MICRO_BATCH, RANK = 4, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    model: str
    num_layers: int = 5
    """At least: layers_of."""
    task: str = "causal-lm"
    sequence_length: int = 1024
    attention: str | None = None
    """None: the spec's. Transformers has no sdpa for Gemma 2."""


ARCHITECTURES = {
    "llama": Architecture(model="meta-llama/Llama-3.1-8B"),
    "qwen2, tied": Architecture(model="Qwen/Qwen2.5-1.5B"),
    "gpt2": Architecture(model="openai-community/gpt2"),
    "gpt_neox": Architecture(model="EleutherAI/polyglot-ko-1.3b"),
    "gemma2, alternating": Architecture(model="google/gemma-2-2b", num_layers=9, attention="eager"),
    "gemma3, every sixth": Architecture(model="google/gemma-3-1b-pt", num_layers=26),
    "phi3": Architecture(model="microsoft/Phi-3-mini-4k-instruct"),
    "opt": Architecture(model="facebook/opt-1.3b"),
    "falcon": Architecture(model="tiiuae/falcon-7b"),
    "bert": Architecture(
        model="google-bert/bert-base-uncased", task="masked-lm", sequence_length=512
    ),
    "roberta": Architecture(
        model="FacebookAI/roberta-large", task="sequence-classification", sequence_length=512
    ),
    "t5, two stacks": Architecture(
        model="google-t5/t5-base", task="seq2seq-lm", num_layers=11, sequence_length=512
    ),
}


def spec_of(**changes: Any) -> TraceSpec:
    full: dict[str, Any] = {
        "method": "full",
        "lora_targets": None,
        "quantization": "none",
        "precision": "bf16-true",
        "activation_checkpointing": 0,
        "activation_offloading": False,
        "attention": "sdpa",
        "single": False,
    }
    return TraceSpec(**{**full, **changes})


LORA = {"method": "lora", "lora_targets": "all-linear"}
QLORA = {"method": "qlora", "lora_targets": "all-linear", "precision": "bf16-autocast"}
SPECS = {
    "full": spec_of(),
    "full, micro-batch 1, fp32": spec_of(single=True, precision="fp32"),
    "full, bf16-mixed, checkpointed": spec_of(precision="bf16-mixed", activation_checkpointing=1),
    "full, every second layer": spec_of(activation_checkpointing=2),
    "full, offloaded": spec_of(activation_checkpointing=1, activation_offloading=True),
    "lora": spec_of(**LORA, precision="bf16-autocast"),
    "lora, eager, fp16, every second": spec_of(
        **LORA, precision="fp16-mixed", attention="eager", activation_checkpointing=2
    ),
    "qlora": spec_of(**QLORA, quantization="nf4"),
    "qlora, double, checkpointed": spec_of(
        **QLORA, quantization="nf4-double", activation_checkpointing=1
    ),
}

ADAPTED = {"precision": "bf16-autocast"}
ADAPTER_SPECS = {
    "dora": spec_of(**LORA, **ADAPTED, lora_variant="dora"),
    "vera": spec_of(**ADAPTED, method="vera", lora_targets="attention"),
    "miss": spec_of(**ADAPTED, method="miss", lora_targets="all-linear", lora_rank=64),
    "oft": spec_of(**ADAPTED, method="oft", lora_targets="attention"),
    "ia3, checkpointed": spec_of(**ADAPTED, method="ia3", activation_checkpointing=1),
    "prompt": spec_of(**ADAPTED, method="prompt_tuning", num_virtual_tokens=20),
    "p-tuning": spec_of(**ADAPTED, method="p_tuning", num_virtual_tokens=20),
    "trainable tokens": spec_of(**ADAPTED, method="trainable_tokens", num_virtual_tokens=20),
    "int8": spec_of(**QLORA, quantization="int8"),
    "int8, every second": spec_of(**QLORA, quantization="int8", activation_checkpointing=2),
    "prompt on fp4": spec_of(
        **ADAPTED, method="prompt_tuning", num_virtual_tokens=20, quantization="fp4-double"
    ),
}


def layers_of(architecture: Architecture, spec: TraceSpec) -> int:
    """Three periods are traced: two layers more, or of an even period one more than four periods."""
    return max(architecture.num_layers, 9 if spec.activation_checkpointing == 2 else 0)


def traced(
    architecture: Architecture, spec: TraceSpec, *, whole: bool = False, device: Device = ADA
) -> dict[str, Any]:
    config = models.load_config(resolve(architecture.model).config)
    if architecture.attention is not None:
        spec = dataclasses.replace(spec, attention=architecture.attention)
    answer = trace_module.trace_step(
        with_layers(config, layers_of(architecture, spec)),
        architecture.task,
        spec,
        sequence_length=architecture.sequence_length,
        device=device,
        whole=whole,
    )
    loaded: dict[str, Any] = decode(encode(answer))
    return loaded


traced_once = functools.cache(traced)


Seen = list[tuple[bool, int]]
"""(freed, bytes) per event."""


def as_traced(answer: dict[str, Any], trace: Trace, micro_batch: int, rank: int) -> dict[str, Seen]:
    """The worker's own events, as they stand in the answer."""
    bytes_of = dict(zip(trace.template, trace.sizes(micro_batch, rank), strict=True))
    seen: dict[str, Seen] = {"setup": [], "batch": [], "count": [], "first": []}
    for block in answer["blocks"]:
        phase = "setup" if block["phase"] in SETUP_PHASES else block["phase"]
        part = seen.get(phase, seen["first"])
        part += [(e < 0, bytes_of[e if e >= 0 else ~e]) for e in block["events"]]
    return seen


def events_of(trace: Trace, name: str, micro_batch: int, rank: int) -> list[tuple[bool, int, str]]:
    sizes = trace.sizes(micro_batch, rank)
    numbers = [(event < 0, event if event >= 0 else ~event) for event in getattr(trace, name)]
    return [(freed, sizes[number], trace.categories[number]) for freed, number in numbers]


def without_order_of_frees(seen: list[Any]) -> list[Any]:
    runs = [list(run) for _, run in itertools.groupby(seen, key=lambda event: event[0])]
    return list(itertools.chain(*(sorted(run) if run[0][0] else run for run in runs)))


def assert_same_events(mine: list[Any], theirs: list[Any], spec: TraceSpec, what: str) -> None:
    """But for those of no bytes: what a kernel needs from some size on."""
    if mine == theirs:
        return
    mine, theirs = ([event for event in seen if event[1]] for seen in (mine, theirs))
    if PRECISIONS[spec.precision].autocast:
        mine, theirs = without_order_of_frees(mine), without_order_of_frees(theirs)
    pairs = itertools.zip_longest(mine, theirs)
    difference = next(((i, m, t) for i, (m, t) in enumerate(pairs) if m != t), None)
    assert difference is None, (what, difference)


def kernels_of(trace: Trace, micro_batch: int, rank: int) -> Counter[tuple[Any, ...]]:
    counts: Counter[tuple[Any, ...]] = Counter()
    for kernel in trace.kernels:
        flops = evaluate(kernel.flops, micro_batch, rank)
        moved = sum(evaluate(term, micro_batch, rank) for term in kernel.moved)
        shape = tuple(evaluate(size[:3], micro_batch, rank) for size in kernel.shape)
        is_again = kernel.phase == "recompute"
        counts[kernel.name, kernel.dtype, flops, moved, shape, is_again] += kernel.count
    return counts


CASES = {
    f"{name}: {spec_name}": (architecture, spec)
    for name, architecture in ARCHITECTURES.items()
    for spec_name, spec in SPECS.items()
    # PEFT copies a classifier to train it, which bitsandbytes' weights on meta refuse.
    if not (architecture.task == "sequence-classification" and spec.method == "qlora")
    # Transformers quantises none of its layers.
    if not (name == "falcon" and spec.method == "qlora")
    # Gemma 3 repeats after six layers, T5 has two stacks: slow to trace whole.
    if architecture.num_layers < 10
    or spec_name in ("full", "full, every second layer", "lora")
    # Checkpointed layers of T5 hand the gradient of their common position bias around.
    or (architecture.task == "seq2seq-lm" and spec.activation_checkpointing)
}
CASES |= {f"llama: {name}": (ARCHITECTURES["llama"], spec) for name, spec in ADAPTER_SPECS.items()}


def test_every_adapter_that_repeats_is_here() -> None:
    specs = [*SPECS.values(), *ADAPTER_SPECS.values()]
    repeating = {name for name, row in ADAPTERS.items() if row.repeats}
    assert {spec.method for spec in specs} == {"full", *repeating}


@pytest.mark.parametrize(("architecture", "spec"), CASES.values(), ids=CASES)
def test_few_layers_make_the_events_of_all(architecture: Architecture, spec: TraceSpec) -> None:
    micro_batch = 1 if spec.single else MICRO_BATCH
    few, all_of_them = traced_once(architecture, spec), traced(architecture, spec, whole=True)
    assert Stacks.of_answer(few).text.traced < layers_of(architecture, spec)
    extrapolated, whole = Trace(few), Trace(all_of_them)

    plain = as_traced(all_of_them, whole, micro_batch, RANK)
    for name, theirs in plain.items():
        mine = [event[:2] for event in events_of(extrapolated, name, micro_batch, RANK)]
        assert_same_events(mine, theirs, spec, name)
    assert_same_traces(extrapolated, whole, spec)


def assert_same_traces(extrapolated: Trace, whole: Trace, spec: TraceSpec) -> None:
    """Compare all that is made of a trace of few layers with that of every layer."""
    micro_batch = 1 if spec.single else MICRO_BATCH
    for name in ("setup", "batch", "count", "first", "again", "next", "released"):
        mine, theirs = (events_of(t, name, micro_batch, RANK) for t in (extrapolated, whole))
        assert_same_events(mine, theirs, spec, name)
    assert len(extrapolated.gradients) == len(whole.gradients)
    assert kernels_of(extrapolated, micro_batch, RANK) == kernels_of(whole, micro_batch, RANK)
    assert extrapolated.trainable(RANK) == whole.trainable(RANK)
    assert extrapolated.num_parameters(RANK) == whole.num_parameters(RANK)


def assert_tells_of(
    of_any: Trace, architecture: Architecture, spec: TraceSpec, counts: Sequence[int]
) -> None:
    """Compare what the trace of a plan tells of each number of lean layers with all layers traced so."""
    micro_batch = 1 if spec.single else MICRO_BATCH
    for count in counts:
        planned = dataclasses.replace(spec, checkpoint_layers=count)
        whole = Trace(traced(architecture, planned, whole=True))
        derived = of_any.with_lean_layers(count)
        for events in ("setup", "batch", "count", "first", "again", "next"):
            mine, theirs = (events_of(t, events, micro_batch, RANK) for t in (derived, whole))
            assert_same_events(mine, theirs, spec, events)
        assert kernels_of(derived, micro_batch, RANK) == kernels_of(whole, micro_batch, RANK)
        assert derived.num_parameters(RANK) == whole.num_parameters(RANK)


PLANNED = {
    "llama": SPECS["full"],
    "qwen2, tied": SPECS["full, micro-batch 1, fp32"],
    "gemma2, alternating": SPECS["full"],
    "gpt_neox": SPECS["lora"],
    "bert": SPECS["lora"],
    "phi3": SPECS["qlora"],
    "t5, two stacks": SPECS["lora"],
}


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        (name, plan)
        for name in PLANNED
        for plan in CHECKPOINT_PLANS
        # Two stacks are slow to trace whole: the plan that has both ways to keep less.
        if ("stacks" not in name or plan == "recompute-products")
        and (not plan_offloads(plan) or name in ("llama", "gemma2, alternating"))
    ],
)
def test_one_trace_of_a_plan_stands_for_any_number_of_lean_layers(name: str, plan: str) -> None:
    period = 2 if "alternating" in name else 1
    # Three periods of each kind are traced: these leave none, one or two of a kind to be made. Four where
    # layers fetch what the one below has made; of two stacks, whose first layers make what the others share,
    # one more and four of each.
    first, periods = (1, 4) if "stacks" in name else (0, 4 if plan_offloads(plan) else 3)
    least = first + periods * period
    architecture = dataclasses.replace(
        ARCHITECTURES[name], num_layers=least + (periods + 2) * period
    )
    spec = dataclasses.replace(PLANNED[name], activation_checkpointing=1, checkpoint_plan=plan)
    few = Trace(traced(architecture, spec))
    assert few.lean_layers == range(least, least + 2 * period + 1, period)
    # None and two of a kind to be made; one of each is between them.
    counts = (least, least + period, least + 2 * period)
    assert_tells_of(few, architecture, spec, counts if name == "llama" else counts[::2])


@pytest.mark.parametrize(
    ("plan", "spec", "counts"),
    [
        ("recompute", SPECS["full, micro-batch 1, fp32"], (8, 21)),
        ("recompute-products", SPECS["lora"], (22,)),
    ],
)
def test_a_plan_of_unlike_layers_is_told_from_one_trace_of_all(
    plan: str, spec: TraceSpec, counts: Sequence[int]
) -> None:
    # Three of its patterns in each stretch would be more layers than there are.
    architecture = ARCHITECTURES["gemma3, every sixth"]
    spec = dataclasses.replace(spec, activation_checkpointing=1, checkpoint_plan=plan)
    of_any = Trace(traced(architecture, spec))
    assert of_any.lean_layers == (8, 9, 10, 14, 15, 16, 20, 21, 22)
    assert_tells_of(of_any, architecture, spec, counts)


def test_a_plan_tells_of_no_other_numbers() -> None:
    spec = dataclasses.replace(
        SPECS["full"], activation_checkpointing=1, checkpoint_plan="recompute"
    )
    few = Trace(traced(dataclasses.replace(ARCHITECTURES["llama"], num_layers=10), spec))
    for count in (2, 8):
        with pytest.raises(BrokenTrace):
            few.with_lean_layers(count)
    every_other = dataclasses.replace(ARCHITECTURES["gemma2, alternating"], num_layers=20)
    with pytest.raises(BrokenTrace, match="7 layers are not made of whole patterns"):
        Trace(traced(every_other, spec)).with_lean_layers(7)
    plain = Trace(traced_once(ARCHITECTURES["llama"], SPECS["full"]))
    assert not plain.lean_layers
    with pytest.raises(BrokenTrace):
        plain.with_lean_layers(3)
    # Five layers are not enough for two stretches of three.
    with pytest.raises(models.UnsupportedModel, match="too few, or too unlike, for a plan"):
        traced(ARCHITECTURES["llama"], spec)


@pytest.mark.parametrize(
    ("name", "spec", "single", "differs"),
    [
        # 512 blocks of queries leave the larger card half empty: flash attention splits the keys.
        ("llama", SPECS["lora"], True, True),
        ("llama", ADAPTER_SPECS["int8"], False, False),
        # Sums over a micro-batch's tokens are shared among as many blocks as the card can hold.
        ("bert", ADAPTER_SPECS["ia3, checkpointed"], False, True),
    ],
)
def test_cards_share_a_trace_but_for_their_multiprocessors(
    name: str, spec: TraceSpec, single: bool, differs: bool
) -> None:
    spec, micro_batch = dataclasses.replace(spec, single=single), 1 if single else 2
    small, large = (dataclasses.replace(ADA, num_sms=number) for number in (24, 400))
    theirs = Trace(traced(ARCHITECTURES[name], spec, device=small))
    answer = traced(ARCHITECTURES[name], spec, device=large)
    as_asked = Trace(answer).sizes(micro_batch, RANK)
    assert (as_asked != theirs.sizes(micro_batch, RANK)) == differs
    on_card_with(24, answer["tensors"])
    mine = Trace(answer)
    assert mine.sizes(micro_batch, RANK) == theirs.sizes(micro_batch, RANK)
    for events in ("setup", "batch", "count", "first", "again", "next", "released"):
        assert getattr(mine, events) == getattr(theirs, events)
    assert mine.launches(micro_batch, RANK) == theirs.launches(micro_batch, RANK)
    assert mine.trainable(RANK) == theirs.trainable(RANK)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        *((name, SPECS["lora"]) for name in ("llama", "gpt2")),
        *((name, SPECS["qlora, double, checkpointed"]) for name in ("llama", "gpt2")),
        *(("llama", ADAPTER_SPECS[name]) for name in ("dora", "vera", "int8")),
    ],
    ids=str,
)
def test_primes_stand_for_any_micro_batch_and_rank(
    name: str, spec: TraceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    symbolic = Trace(traced_once(ARCHITECTURES[name], spec))
    monkeypatch.setattr(trace_module, "MICRO_BATCH", MICRO_BATCH)
    monkeypatch.setattr(trace_module, "RANK", RANK)
    direct = Trace(traced(ARCHITECTURES[name], spec))

    for events in ("setup", "batch", "count", "first", "again", "next"):
        mine, theirs = (events_of(t, events, MICRO_BATCH, RANK) for t in (symbolic, direct))
        assert_same_events(mine, theirs, spec, events)
    assert kernels_of(symbolic, MICRO_BATCH, RANK) == kernels_of(direct, MICRO_BATCH, RANK)
    assert symbolic.trainable(RANK) == direct.trainable(RANK)
    assert symbolic.num_parameters(RANK) == direct.num_parameters(RANK)
