"""What is predicted now, against what PyTorch's CUDA build allocated and reserved where there was no card."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import here
import pytest

from autotune.catalogue.attention import EXPANDED
from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.models import resolve
from autotune.common.units import GIB
from autotune.predict.estimator import Estimator
from autotune.predict.floors import least_bytes
from autotune.predict.tracing import trace_all
from autotune.records.estimate import KEPT_RANK, Estimate, TraceSpec
from autotune.space.checkpoint_plans import plan_offloads
from autotune.space.config import TrainConfig
from autotune.space.optimizers import OPTIMIZERS
from autotune.space.teacher import Teacher
from autotune.space.trainers import TRAINERS
from validation.no_card_embeddings import source as embedder
from validation.no_card_fuzz import cut

STUDY = Path(__file__).parents[2] / "studies" / "no-card"
PATH = STUDY / "h200" / "predicted_vs_measured.jsonl"
PLANS = [json.loads(line) for line in (STUDY / "checkpoint_plans.jsonl").read_text().splitlines()]
PARTS = [json.loads(line) for line in (STUDY / "chunked_loss.jsonl").read_text().splitlines()]
UPDATES = [json.loads(line) for line in (STUDY / "backward_updates.jsonl").read_text().splitlines()]
FLEX = [json.loads(line) for line in (STUDY / "flex.jsonl").read_text().splitlines()]
T4 = [json.loads(line) for line in (STUDY / "t4_attention.jsonl").read_text().splitlines()]
EMBEDDINGS = [json.loads(line) for line in (STUDY / "embeddings.jsonl").read_text().splitlines()]
PREFERENCES = [json.loads(line) for line in (STUDY / "trainers.jsonl").read_text().splitlines()]
SHARED_PAIRS = [
    json.loads(line) for line in (STUDY / "shared_pairs.jsonl").read_text().splitlines()
]
SHARED_ADAPTERS = [
    json.loads(line) for line in (STUDY / "shared_adapters.jsonl").read_text().splitlines()
]
SHARED_OWN = [
    json.loads(line)
    for name in (
        "shared_completions",
        "shared_completions_zero",
        "shared_completions_vllm",
        "shared_embeddings",
    )
    for line in (STUDY / f"{name}.jsonl").read_text().splitlines()
]
SHARED = [
    json.loads(line)
    for name in ("shared", "shared_no_reshard", "shared_no_sync")
    for line in (STUDY / f"{name}.jsonl").read_text().splitlines()
]
SHORT = 1024


@pytest.mark.parametrize("model", ["HuggingFaceTB/SmolLM2-135M", "openai-community/gpt2"])
def test_as_pytorch_allocates(model: str) -> None:
    records = [json.loads(line) for line in PATH.read_text(encoding="utf-8").splitlines()]
    seen = {
        TrainConfig(**r["measurement"]["config"]): r["measurement"]
        for r in records
        if r["model"] == model
        and not r["capped_at_prediction"]
        and r["measurement"]["config"]["sequence_length"] == SHORT
    }
    assert len(seen) >= 2
    card = find_gpu("h200")
    specs = {TraceSpec.of(config) for config in seen}
    traces = trace_all(resolve(model), "causal-lm", SHORT, card, specs, server=here.workers)
    estimator = Estimator(traces, card, memory_budget_bytes=card.capacity_bytes)
    for config, measurement in seen.items():
        estimate = estimator.estimate(config)
        for name, share in (("peak_allocated_bytes", 1e-4), ("peak_reserved_bytes", 1e-3)):
            found = getattr(estimate, name)
            assert found == pytest.approx(measurement[name], rel=share), (name, config)


@pytest.mark.parametrize(
    "key",
    [
        "sentence-similarity: lora, eager, checkpointed",
        "sentence-triplets: full, 8 bits",
        "sentence-ratings: full",
    ],
)
def test_embeddings_as_pytorch_allocates(key: str) -> None:
    (record,) = [each for each in EMBEDDINGS if each["key"] == key]
    measurement, card = record["measurement"], find_gpu("h200")
    config = TrainConfig(**measurement["config"])
    task, specs = TRAINERS[config.trainer].task, {TraceSpec.of(config)}
    traces = trace_all(embedder(), task, config.sequence_length, card, specs, server=here.workers)
    estimate = Estimator(traces, card, memory_budget_bytes=card.capacity_bytes).estimate(config)
    for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
        assert getattr(estimate, name) == pytest.approx(measurement[name], rel=1e-5), name


def predicted(record: dict[str, Any], gpu: str) -> Estimate:
    config = TrainConfig(**record["measurement"]["config"])
    num_gpus = config.num_gpus
    task = TRAINERS[config.trainer].task or "causal-lm"
    card, source = find_gpu(gpu), cut(record["model"], record["num_layers"])
    specs = {TraceSpec.of(config)}
    length = config.sequence_length
    told = record["measurement"]["spec"].get("teacher")
    traces = trace_all(
        source,
        task,
        length,
        card,
        specs,
        num_gpus=num_gpus,
        teacher=Teacher(**told) if told else None,
        server=here.workers,
    )
    return Estimator(traces, card, memory_budget_bytes=card.capacity_bytes).estimate(config)


@pytest.mark.parametrize(
    ("method", "trainer", "attention"),
    [
        ("full", "trl-dpo", "eager"),
        ("lora", "trl-kto", "sdpa"),
        ("qlora", "trl-reward", "sdpa"),
    ],
)
def test_preferences_and_rewards_as_pytorch_allocates(
    method: str, trainer: str, attention: str
) -> None:
    records = [
        each
        for each in PREFERENCES
        if each["model"] == "HuggingFaceTB/SmolLM2-135M"
        and each["measurement"]["outcome"] == "ok"
        and not each["measurement"]["config"]["precompute_ref_log_probs"]
        and [each["measurement"]["config"][name] for name in ("method", "trainer", "attention")]
        == [method, trainer, attention]
    ]
    assert records
    for record in records:
        estimate, seen = predicted(record, "rtx-3090"), record["measurement"]
        for name, share in (("peak_allocated_bytes", 1e-5), ("peak_reserved_bytes", 0.01)):
            assert getattr(estimate, name) == pytest.approx(seen[name], rel=share), record["key"]


def smallest_of_each(
    records: list[dict[str, Any]], kind: Callable[[dict[str, Any]], Any], least_bytes: int = 0
) -> list[dict[str, Any]]:
    """Of each kind of configuration, None for those left out, the run that ended with the least memory."""
    found: dict[Any, dict[str, Any]] = {}
    ended = (each for each in records if each["measurement"]["outcome"] == "ok")
    for record in sorted(ended, key=lambda each: -each["measurement"]["peak_reserved_bytes"]):
        name = kind(record["measurement"]["config"])
        if name is not None and record["measurement"]["peak_reserved_bytes"] > least_bytes:
            found[name] = record
    return list(found.values())


def kind_of_adapter(config: dict[str, Any]) -> tuple[str, ...] | None:
    """Trainer, method and way to share, of adapters under FSDP2 and ZeRO 3."""
    if config["method"] == "full" or config["parallelism"] not in ("fsdp2", "zero3"):
        return None
    return config["trainer"], config["method"], config["parallelism"]


def kind_of_own(config: dict[str, Any]) -> tuple[str, str, bool]:
    """Trainer, way to share, and whether DDP may make its buckets anew."""
    is_full = config["method"] == "full" and config["activation_checkpointing"] > 0
    way = config["parallelism"]
    return config["trainer"], way, is_full and way == "ddp"


SMALL = [
    *smallest_of_each(SHARED, lambda config: (config["parallelism"], config.get("no_sync")), GIB),
    *smallest_of_each(SHARED_ADAPTERS, kind_of_adapter),
    *smallest_of_each(SHARED_OWN, kind_of_own),
]


def name_of_share(record: dict[str, Any]) -> str:
    config = record["measurement"]["config"]
    once = ("no_sync",) if config.get("no_sync") else ()
    return " ".join((*(config[name] for name in ("trainer", "method", "parallelism")), *once))


@pytest.mark.parametrize("record", SMALL, ids=name_of_share)
def test_what_gpus_share_is_as_pytorch_allocates(record: dict[str, Any]) -> None:
    estimate, seen = predicted(record, "rtx-3090"), record["measurement"]
    for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
        # What is predicted now is no worse than what was as it was recorded.
        off = abs(record["prediction"][name] / seen[name] - 1)
        assert getattr(estimate, name) == pytest.approx(seen[name], rel=max(1.01 * off, 1e-5))


@pytest.mark.parametrize(
    ("model", "parallelism"),
    [
        # Whole weights that are loaded leave free blocks, as do what is flattened and what is gathered.
        ("microsoft/Phi-3-mini-4k-instruct", "zero1"),
        # The first GPU reserves more than the last, of which more is allocated.
        ("Qwen/Qwen2.5-1.5B", "zero2"),
        ("Qwen/Qwen2.5-1.5B", "hsdp"),
        # What the embedding gathers going backward stays until the end.
        ("HuggingFaceTB/SmolLM2-135M", "zero3-offload"),
        # LoRA on three GPUs: parts are copied to the card, and the frozen head keeps what it read.
        ("Qwen/Qwen3-0.6B", "zero3-offload"),
        # A gradient that is larger than the bucket is cloned.
        ("mistralai/Mistral-7B-v0.3", "zero1-offload"),
        # The third of four GPUs reserves most, and copies its own gradients for their norm.
        ("Qwen/Qwen2.5-1.5B", "zero1"),
        # The embedding is sent as it is, by itself; checkpointed in full, buckets are made anew.
        ("Qwen/Qwen2.5-0.5B", "ddp"),
        ("EleutherAI/pythia-1b", "ddp"),
        # The first GPU loads otherwise than the second, which reserves more and copies no merged attention;
        # the list of denominators.
        ("mistralai/Mistral-7B-v0.3", "cp"),
        # Weights that were gathered stay until the backward pass has used them.
        ("HuggingFaceTB/SmolLM2-135M", "fsdp2-no-reshard"),
        # Rows that three GPUs do not divide; learned positions are left to the root.
        ("facebook/opt-1.3b", "fsdp2"),
        # Adapters are dealt out behind the weights that they adapt.
        ("microsoft/Phi-3-mini-4k-instruct", "fsdp2"),
    ],
)
def test_what_loading_leaves_is_as_pytorch_allocates(model: str, parallelism: str) -> None:
    record = next(
        each
        for each in SHARED
        if (each["model"], each["measurement"]["config"]["parallelism"]) == (model, parallelism)
    )
    estimate, seen = predicted(record, "rtx-3090"), record["measurement"]
    assert estimate.peak_allocated_bytes == pytest.approx(seen["peak_allocated_bytes"], rel=1e-4)
    assert estimate.peak_reserved_bytes == pytest.approx(seen["peak_reserved_bytes"], rel=0.004)


@pytest.mark.parametrize(
    ("model", "parallelism", "method"),
    [
        ("Qwen/Qwen3-0.6B", "hsdp", "full"),
        # Its own engine gathers the reference, and keeps the head through its passes.
        ("meta-llama/Llama-3.2-1B", "zero3", "full"),
        ("google/gemma-3-1b-it", "fsdp2", "full"),
        # The head makes the loss, and its gradient waits for the embedding's part.
        ("meta-llama/Llama-3.2-1B", "zero2", "full"),
        # What a gradient was made of has gone as the weight gets it, and the bucket is made.
        ("meta-llama/Llama-3.2-1B", "zero2", "lora"),
        # Rank 64: the first bucket is full within a layer.
        ("Qwen/Qwen2.5-1.5B", "zero2", "lora"),
    ],
)
def test_what_gpus_share_of_a_reference_is_as_pytorch_allocates(
    model: str, parallelism: str, method: str
) -> None:
    record = next(
        each
        for each in (*SHARED_PAIRS, *SHARED_OWN)
        if each["model"] == model
        and each["measurement"]["config"]["parallelism"] == parallelism
        and each["measurement"]["config"]["method"] == method
    )
    estimate, seen = predicted(record, "rtx-3090"), record["measurement"]
    assert estimate.peak_allocated_bytes == pytest.approx(seen["peak_allocated_bytes"], rel=1.1e-4)
    assert estimate.peak_reserved_bytes == pytest.approx(seen["peak_reserved_bytes"], rel=0.004)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("shared", [106, 98, 82, 72, 76]),
        ("shared_torch_2_15", [73, 72, 72, 70, 71]),
        ("shared_encoders", [34, 34, 30, 31, 31]),
        ("shared_pairs", [35, 33, 25, 25, 29]),
        ("shared_qlora", [5, 5, 5, 3, 5]),
        ("shared_no_reshard", [49, 48, 47, 46, 47]),
        ("shared_no_sync", [44, 40, 39, 40, 40]),
        ("shared_adapters", [43, 41, 36, 36, 40]),
        ("shared_completions", [24, 24, 23, 23, 24]),
        ("shared_completions_zero", [35, 35, 34, 31, 32]),
        ("shared_completions_vllm", [20, 20, 20, 20, 20]),
        ("shared_embeddings", [24, 24, 23, 23, 23]),
        ("compiled", [6, 6, 2, 2, 2]),
        ("loss_in_parts", [146, 126, 126, 126, 126]),
    ],
)
def test_recorded_runs_were_predicted(name: str, counts: list[int]) -> None:
    """The shares that studies/no-card/README.md names."""
    records = [json.loads(line) for line in (STUDY / f"{name}.jsonl").read_text().splitlines()]
    ended = [each for each in records if each["measurement"]["outcome"] == "ok"]

    def num_within(name: str, share: float) -> int:
        ratios = (each["prediction"][name] / each["measurement"][name] for each in ended)
        return sum(abs(ratio - 1) <= share for ratio in ratios)

    within = [
        num_within("peak_allocated_bytes", 0.002),
        num_within("peak_reserved_bytes", 0.01),
        num_within("peak_reserved_bytes", 0.03),
    ]
    assert [len(records), len(ended), *within] == counts
    for each in ended:  # Nor did any take less than is known before a trace is made.
        config, parameters = each["prediction"]["config"], each["prediction"]["parameters"]
        count = parameters["total"] - (config["method"] != "full") * parameters["trainable"]
        known_bytes = least_bytes(TrainConfig(**config), count)
        assert known_bytes <= each["measurement"]["peak_allocated_bytes"]


def test_recorded_plans_that_offload_were_predicted() -> None:
    """As studies/no-card/README.md says, with a torch that has other workspaces than the one that is here."""
    lines = (STUDY / "plans_that_offload.jsonl").read_text().splitlines()
    each = [(record["prediction"], record["measurement"]) for record in map(json.loads, lines)]
    names = ("peak_allocated_bytes", "peak_reserved_bytes")
    equal = [sum(ours[name] == held[name] for ours, held in each) for name in names]
    offloading = [pair for pair in each if plan_offloads(pair[0]["config"]["checkpoint_plan"])]
    assert all(ours[name] == held[name] for ours, held in offloading for name in names)
    assert [len(lines), len(offloading), *equal] == [24, 5, 24, 22]


def test_recorded_pipelines_were_predicted() -> None:
    """The share that studies/no-card/README.md names, of the runs that what was mended since was found by."""
    lines = (STUDY / "pipelines.jsonl").read_text().splitlines()[:17]
    each = [
        (ours, held)
        for record in map(json.loads, lines)
        for ours, held in zip(record["predictions"], record["held"], strict=True)
    ]
    counts = [
        sum(abs(ours[name] / held[name] - 1) <= share for ours, held in each)
        for name, share in (("peak_allocated_bytes", 0.001), ("peak_reserved_bytes", 0.02))
    ]
    assert [len(lines), len(each), *counts] == [17, 50, 47, 39]


def expanded_on_a_t4() -> list[dict[str, Any]]:
    """Runs with expanded key heads that ended without asking torch for its cache back."""
    return [
        record
        for record in T4
        if record["measurement"]["config"]["attention"] == EXPANDED
        and record["measurement"]["outcome"] == "ok"
        and not record["measurement"]["num_alloc_retries"]
        # Which expert a token goes to depends on values, of which there are none.
        and "30B-A3B" not in record["model"]
    ]


def in_parts() -> list[dict[str, Any]]:
    """Runs on an RTX 4090 with the loss in parts that ended."""
    return [
        record
        for record in PARTS
        if record["measurement"]["config"]["chunked_loss"]
        and record["measurement"]["outcome"] == "ok"
        and not record["measurement"]["num_alloc_retries"]
    ]


@pytest.mark.parametrize("number", range(len(in_parts())))
def test_a_loss_in_parts_is_as_pytorch_allocates(number: int) -> None:
    record = in_parts()[number]
    seen, estimate = record["measurement"], predicted(record, "rtx-4090")
    allocated, reserved = seen["peak_allocated_bytes"], seen["peak_reserved_bytes"]
    assert estimate.peak_allocated_bytes == pytest.approx(allocated, rel=2e-4)
    assert estimate.peak_reserved_bytes == pytest.approx(reserved, rel=5e-4)


@pytest.mark.parametrize("number", range(len(FLEX)))
def test_what_compiling_flex_attention_keeps_is_predicted(number: int) -> None:
    """studies/no-card/README.md names those that are further off."""
    record = FLEX[number]
    seen, estimate = record["measurement"], predicted(record, "h200")
    kind = record["model"].partition("/")[2], seen["config"]["method"]
    off = {("Mistral-7B-v0.3", "qlora"): 0.04, ("SmolLM2-135M", "lora"): 2.5e-3}.get(kind, 4e-4)
    assert estimate.peak_allocated_bytes == pytest.approx(seen["peak_allocated_bytes"], rel=off)
    off = {("Mistral-7B-v0.3", "lora"): 0.04, ("SmolLM2-135M", "lora"): 0.12}.get(kind, 0.021)
    assert estimate.peak_reserved_bytes == pytest.approx(seen["peak_reserved_bytes"], rel=off)


def in_backward() -> list[dict[str, Any]]:
    """Of each class of optimizers the run with the least memory that updates in the backward pass."""
    found: dict[str, dict[str, Any]] = {}
    for record in sorted(UPDATES, key=lambda r: -(r["measurement"]["peak_allocated_bytes"] or 0)):
        config = TrainConfig(**record["measurement"]["config"])
        is_ended = record["measurement"]["outcome"] == "ok"
        if is_ended and config.update_in_backward:
            found[OPTIMIZERS[config.optimizer].class_name] = record
    return list(found.values())


@pytest.mark.parametrize("number", range(len(in_backward())))
def test_updates_in_the_backward_pass_are_as_pytorch_allocates(number: int) -> None:
    record = in_backward()[number]
    seen, estimate = record["measurement"], predicted(record, "h200")
    allocated, reserved = seen["peak_allocated_bytes"], seen["peak_reserved_bytes"]
    assert estimate.peak_allocated_bytes == pytest.approx(allocated, rel=1e-4)
    assert estimate.peak_reserved_bytes == reserved


def by_plan(*, capped: bool) -> list[dict[str, Any]]:
    """Runs with a plan of checkpointing, with all of the card or capped at what was predicted."""
    return [
        record
        for record in PLANS
        if record["capped_at_prediction"] is capped
        and TrainConfig(**record["measurement"]["config"]).has_plan
    ]


def ended_of_each_plan() -> list[dict[str, Any]]:
    """Of each method and plan the run that ended with the least memory, and all with a rank of 256."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    ended = [r for r in by_plan(capped=False) if r["measurement"]["outcome"] == "ok"]
    for record in sorted(ended, key=lambda r: -r["measurement"]["peak_allocated_bytes"]):
        config = record["measurement"]["config"]
        what = (config["method"], config["checkpoint_plan"])
        found[(*what, record["key"]) if config["lora_rank"] == KEPT_RANK else what] = record
    return list(found.values())


@pytest.mark.parametrize("number", range(len(ended_of_each_plan())))
def test_a_plan_of_checkpointing_is_as_pytorch_allocates(number: int) -> None:
    record = ended_of_each_plan()[number]
    seen = record["measurement"]
    gpu = seen["fingerprint"]["device"].removeprefix("NVIDIA ")
    estimate = predicted(record, gpu)
    # studies/no-card/README.md tells of adapters of rank 256, with a plan and without.
    share = 3e-3 if seen["config"]["lora_rank"] == KEPT_RANK else 1e-4
    for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
        assert getattr(estimate, name) == pytest.approx(seen[name], rel=share), name


def test_what_a_plan_is_predicted_to_need_was_enough() -> None:
    """Runs whose budget was their own prediction ended; one, predicted 2 MiB low, gave its cache back."""
    capped = by_plan(capped=True)
    assert len(capped) >= 10
    seen = [record["measurement"] for record in capped]
    budgets = [measurement["spec"]["memory_budget_bytes"] for measurement in seen]
    assert budgets == [record["prediction"]["peak_device_bytes"] for record in capped]
    assert {measurement["outcome"] for measurement in seen} == {"ok"}
    assert sum(measurement["num_alloc_retries"] > 0 for measurement in seen) == 1


@pytest.mark.parametrize("number", range(len(expanded_on_a_t4())))
def test_expanded_key_heads_on_a_card_without_flash_attention(number: int) -> None:
    """The memory-efficient kernel runs in the model that the program registers: bytes are equal."""
    record = expanded_on_a_t4()[number]
    seen = record["measurement"]
    estimate = predicted(record, "t4")
    assert estimate.peak_allocated_bytes == pytest.approx(seen["peak_allocated_bytes"], rel=1e-5)
    assert estimate.peak_reserved_bytes == seen["peak_reserved_bytes"]
