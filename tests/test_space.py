"""Enumeration counted by hand, every rule on a point that breaks it, trade-off classes."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from autotune.config import LOADER_SETTINGS, TRADEOFF_CLASSES, TrainConfig, Workload
from autotune.knobs import KNOBS
from autotune.optimizers import OPTIMIZERS, Optimizer
from autotune.space import (
    RULES,
    Context,
    MethodSpace,
    Rule,
    SearchSpace,
    broken_rules,
    enumerate_configs,
    filter_allowed,
    for_gpus,
    tradeoff_class,
    with_attentions,
)

FULL = TrainConfig(
    method="full",
    micro_batch_size=4,
    gradient_accumulation_steps=8,
    sequence_length=1024,
    precision="bf16-mixed",
    optimizer="adamw_torch",
)
LORA = dataclasses.replace(FULL, method="lora", lora_rank=16, lora_targets="all-linear")
QLORA = dataclasses.replace(LORA, method="qlora", quantization="nf4")
WHOLE_BATCH = dataclasses.replace(FULL, micro_batch_size=32, gradient_accumulation_steps=1)
ON_TWO = dataclasses.replace(FULL, parallelism="fsdp2", num_gpus=2, gradient_accumulation_steps=4)
ON_TWO_QLORA = dataclasses.replace(
    QLORA, parallelism="fsdp2", num_gpus=2, gradient_accumulation_steps=4
)
ADA = Context(effective_batch_size=32, num_layers=16, compute_capability=(8, 9))
TURING = Context(effective_batch_size=32, num_layers=16, compute_capability=(7, 5))
UNKNOWN = Context(effective_batch_size=32)


def workload(effective_batch_size: int = 32, methods: tuple[str, ...] = ("full",)) -> Workload:
    return Workload(
        model="m",
        effective_batch_size=effective_batch_size,
        methods=methods,
        memory_budget_bytes=1,
    )


def section(**changes: object) -> MethodSpace:
    domains: dict[str, Any] = {
        "micro_batch_size": (1,),
        "precision": ("bf16-mixed",),
        "optimizer": ("adamw_torch",),
        "activation_checkpointing": (0,),
        "activation_offloading": (False,),
        "attention": ("sdpa",),
    }
    domains |= changes
    return MethodSpace(method=domains.pop("method", "full"), domains=domains)


def space(*sections: MethodSpace) -> SearchSpace:
    return SearchSpace(name="test", description="", methods=sections)


# --- rules


@pytest.mark.parametrize("config", [FULL, LORA, QLORA], ids=lambda config: config.method)
@pytest.mark.parametrize("context", [ADA, UNKNOWN])
def test_a_sound_configuration_breaks_no_rule(config: TrainConfig, context: Context) -> None:
    assert broken_rules(config, context) == []


@pytest.mark.parametrize(
    ("parallelism", "storage", "is_shared"),
    [
        ("fsdp2", "uint8", False),
        ("fsdp2", "bfloat16", True),
        ("fsdp2", "float16", False),
        ("fsdp2", "float32", False),
        ("fsdp2-offload", "bfloat16", False),
        ("zero3", "bfloat16", False),
        ("zero2", "uint8", True),
        ("zero2", "bfloat16", True),
        ("zero2", "float16", False),
        ("ddp", "float16", True),
    ],
)
def test_gpus_share_4_bit_weights_that_no_cast_spoils(
    parallelism: str, storage: str, is_shared: bool
) -> None:
    """bfloat16 is computed with."""
    config = dataclasses.replace(
        ON_TWO_QLORA,
        parallelism=parallelism,
        precision="bf16-autocast",
        quantization_storage=storage,
    )
    assert (broken_rules(config, ADA) == []) == is_shared


BREAKERS = {
    "micro-batch-divides": (dataclasses.replace(FULL, micro_batch_size=5), ADA),
    "adapter-needs-rank": (dataclasses.replace(LORA, lora_rank=None), ADA),
    "full-has-no-adapter": (dataclasses.replace(FULL, lora_rank=8), ADA),
    "quantization-needs-qlora": (dataclasses.replace(LORA, quantization="nf4"), ADA),
    "storage-needs-4-bits": (dataclasses.replace(LORA, quantization_storage="bfloat16"), ADA),
    "qlora-needs-quantization": (dataclasses.replace(QLORA, quantization="none"), ADA),
    "adapter-has-no-such-setting": (dataclasses.replace(LORA, num_virtual_tokens=8), ADA),
    "prefix-without-checkpointing": (
        dataclasses.replace(
            FULL, method="prefix_tuning", num_virtual_tokens=8, activation_checkpointing=1
        ),
        ADA,
    ),
    "prompt-within-positions": (
        dataclasses.replace(FULL, method="prompt_tuning", num_virtual_tokens=8),
        dataclasses.replace(ADA, max_sequence_length=1024),
    ),
    "offloading-needs-checkpointing": (
        dataclasses.replace(FULL, activation_offloading=True),
        ADA,
    ),
    "checkpoint-interval-within-layers": (
        dataclasses.replace(FULL, activation_checkpointing=17),
        ADA,
    ),
    "bf16-needs-ampere": (FULL, TURING),
    "tf32-needs-ampere": (dataclasses.replace(FULL, precision="tf32"), TURING),
    "flash-attention-computes-in-16-bits": (
        dataclasses.replace(FULL, precision="fp32", attention="flash_attention_2"),
        ADA,
    ),
    "flash-attention-needs-ampere": (
        dataclasses.replace(FULL, precision="fp16-mixed", attention="flash_attention_2"),
        TURING,
    ),
    "flash-attention-3-needs-hopper": (
        dataclasses.replace(FULL, attention="flash_attention_3"),
        ADA,
    ),
    "flash-attention-heads-up-to-256": (
        dataclasses.replace(FULL, attention="flash_attention_2"),
        dataclasses.replace(ADA, head_size=320),
    ),
    "padding-free-needs-flash-attention": (dataclasses.replace(FULL, batching="padding-free"), ADA),
    "padding-free-is-for-causal-lm": (
        dataclasses.replace(FULL, batching="padding-free", attention="flash_attention_2"),
        dataclasses.replace(ADA, task="masked-lm"),
    ),
    "padding-free-without-prompts": (
        dataclasses.replace(
            FULL,
            method="prompt_tuning",
            num_virtual_tokens=20,
            batching="padding-free",
            attention="flash_attention_2",
        ),
        ADA,
    ),
    "flex-attention-needs-ampere": (
        dataclasses.replace(FULL, precision="fp16-mixed", attention="flex_attention"),
        TURING,
    ),
    "flex-attention-computes-in-16-bits": (
        dataclasses.replace(FULL, precision="tf32", attention="flex_attention"),
        ADA,
    ),
    "flex-attention-heads-from-16": (
        dataclasses.replace(FULL, attention="flex_attention"),
        dataclasses.replace(ADA, head_size=8),
    ),
    "prefetch-needs-workers": (dataclasses.replace(FULL, dataloader_prefetch_factor=4), ADA),
    "compile-backend-needs-compile": (
        dataclasses.replace(FULL, torch_compile_backend="aot_eager"),
        ADA,
    ),
    "compile-modes-are-inductors": (
        dataclasses.replace(
            FULL, torch_compile="reduce-overhead", torch_compile_backend="cudagraphs"
        ),
        ADA,
    ),
    "liger-needs-ampere": (
        dataclasses.replace(FULL, precision="fp16-mixed", liger=True),
        TURING,
    ),
    "fp16-weights-cannot-train": (dataclasses.replace(FULL, precision="fp16-autocast"), TURING),
    "weight-decay-copies-gradients": (
        dataclasses.replace(FULL, optimizer="sgd"),
        dataclasses.replace(ADA, weight_decay=True),
    ),
    "optimizer-needs-full": (dataclasses.replace(LORA, optimizer="apollo_adamw"), ADA),
    "backward-update-needs-accumulation-1": (dataclasses.replace(FULL, optimizer="lomo"), ADA),
    "fp8-needs-ada": (
        dataclasses.replace(FULL, precision="fp8-mixed"),
        dataclasses.replace(ADA, compute_capability=(8, 6)),
    ),
    "fp8-needs-multiples-of-16": (
        dataclasses.replace(FULL, precision="fp8-autocast", sequence_length=1000),
        ADA,
    ),
    "fp8-needs-float-weights": (dataclasses.replace(QLORA, precision="fp8-autocast"), ADA),
    "one-gpu-only": (dataclasses.replace(ON_TWO, liger=True), ADA),
    "whole-matrix-optimizers-need-one-gpu": (
        dataclasses.replace(ON_TWO, parallelism="ddp", optimizer="galore_adamw"),
        ADA,
    ),
    "backward-update-without-loss-scaling": (
        dataclasses.replace(
            WHOLE_BATCH, optimizer="galore_adamw_layerwise", precision="fp16-mixed"
        ),
        TURING,
    ),
    "bf16-replaces-fp16": (
        dataclasses.replace(FULL, precision="fp16-mixed"),
        dataclasses.replace(ADA, precisions=("bf16-mixed", "fp16-mixed")),
    ),
    "gpus-need-parallelism": (dataclasses.replace(ON_TWO, parallelism="none"), ADA),
    "parallelism-needs-gpus": (dataclasses.replace(FULL, parallelism="zero2"), ADA),
    "sharding-needs-float-weights": (
        ON_TWO_QLORA,
        ADA,
    ),
    "zero-keeps-only-its-dtype": (
        dataclasses.replace(
            ON_TWO_QLORA,
            parallelism="zero2",
            precision="bf16-mixed",
            quantization_storage="float32",
        ),
        ADA,
    ),
    "sharding-needs-its-optimizers": (
        dataclasses.replace(ON_TWO, optimizer="adamw_bnb_8bit"),
        ADA,
    ),
    "zero-needs-mixed-precision": (
        dataclasses.replace(ON_TWO, parallelism="zero1", precision="bf16-true"),
        ADA,
    ),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_names_its_own_breach_and_no_other(rule: Rule) -> None:
    config, context = BREAKERS[rule.name]
    assert [broken.name for broken in broken_rules(config, context)] == [rule.name]
    assert rule.reason


@pytest.mark.parametrize(
    ("config", "context"),
    [
        (dataclasses.replace(FULL, activation_checkpointing=16), ADA),
        (dataclasses.replace(FULL, activation_checkpointing=1, activation_offloading=True), ADA),
        (FULL, dataclasses.replace(ADA, compute_capability=(8, 0))),
        (dataclasses.replace(FULL, optimizer="apollo_adamw"), ADA),
        (
            dataclasses.replace(FULL, batching="padding-free", attention="flash_attention_2"),
            dataclasses.replace(ADA, head_size=256, task="causal-lm"),
        ),
        (
            dataclasses.replace(FULL, attention="flash_attention_3"),
            dataclasses.replace(ADA, compute_capability=(9, 0)),
        ),
        (
            dataclasses.replace(FULL, attention="flex_attention"),
            dataclasses.replace(ADA, head_size=16, compute_capability=(8, 0)),
        ),
        (dataclasses.replace(WHOLE_BATCH, optimizer="lomo"), ADA),
        (dataclasses.replace(LORA, optimizer="stable_adamw"), ADA),
        (dataclasses.replace(FULL, precision="fp16-mixed"), TURING),
        (dataclasses.replace(FULL, precision="fp16-mixed"), ADA),
        (
            dataclasses.replace(FULL, precision="fp16-mixed"),
            dataclasses.replace(TURING, precisions=("bf16-mixed", "fp16-mixed")),
        ),
        (
            # bf16-true gives up float32 weights: no substitute.
            dataclasses.replace(FULL, precision="fp16-mixed"),
            dataclasses.replace(ADA, precisions=("bf16-true", "fp16-mixed")),
        ),
    ],
)
def test_the_other_side_of_each_border(config: TrainConfig, context: Context) -> None:
    assert broken_rules(config, context) == []


# --- enumeration


def test_micro_batch_times_accumulation_is_the_effective_batch() -> None:
    result = enumerate_configs(space(section(micro_batch_size=(1, 2, 3, 4, 12, 24))), workload(12))
    splits = [(c.micro_batch_size, c.gradient_accumulation_steps) for c in result.configs]
    assert splits == [(1, 12), (2, 6), (3, 4), (4, 3), (12, 1)]
    assert result.num_enumerated == 6
    assert result.invalid == {"micro-batch-divides": 1}


def test_every_valid_combination_comes_once() -> None:
    adapters = section(
        method="lora",
        lora_rank=(8, 16),
        lora_targets=("all-linear", "attention"),
        activation_checkpointing=(0, 1, 2),
        activation_offloading=(False, True),
        optimizer=("adamw_torch", "sgd"),
    )
    result = enumerate_configs(space(section(), adapters), workload(methods=("full", "lora")))
    # Two ranks, two targets, two optimizers; five of six checkpointing and offloading pairs; full.
    assert len(result.configs) == 2 * 2 * 2 * 5 + 1
    assert len(set(result.configs)) == len(result.configs)
    assert result.num_enumerated == 2 * 2 * 2 * 6 + 1
    assert result.invalid == {"offloading-needs-checkpointing": 8}
    assert result.configs[0].method == "full"


def test_only_the_workloads_methods_are_enumerated() -> None:
    lora = section(method="lora", lora_rank=(8,), lora_targets=("attention",))
    result = enumerate_configs(space(section(), lora), workload(methods=("lora",)))
    assert [config.method for config in result.configs] == ["lora"]
    assert result.num_enumerated == 1


def test_the_workload_gives_the_sequence_length() -> None:
    wanted = dataclasses.replace(workload(), sequence_length=77)
    assert enumerate_configs(space(section()), wanted).configs[0].sequence_length == 77


def test_card_and_model_reach_the_rules() -> None:
    domains = section(
        precision=("bf16-mixed", "fp16-mixed"), activation_checkpointing=(0, 30), optimizer=("sgd",)
    )
    turing = enumerate_configs(space(domains), workload(), num_layers=24, compute_capability=(7, 5))
    assert [(c.precision, c.activation_checkpointing) for c in turing.configs] == [
        ("fp16-mixed", 0)
    ]
    hopper = enumerate_configs(space(domains), workload(), num_layers=32, compute_capability=(9, 0))
    assert {c.precision for c in hopper.configs} == {"bf16-mixed"}
    assert len(hopper.configs) == 2


def test_a_hundred_thousand_points_take_about_a_quarter_of_a_second() -> None:
    domains = section(
        micro_batch_size=(1, 2, 4, 8, 16, 32),
        method="lora",
        lora_rank=tuple(range(1, 418)),
        lora_targets=("all-linear", "attention"),
        optimizer=tuple(OPTIMIZERS)[:10],
        activation_checkpointing=(0, 2),
    )
    start = time.process_time()
    result = enumerate_configs(space(domains), workload(methods=("lora",)))
    assert len(result.configs) == 100_080
    # Twelve times what was seen on two shared cores.
    assert time.process_time() - start < 3


# --- trade-off classes


@pytest.mark.parametrize(
    ("named", "num_gpus", "expected"),
    [
        ((), 1, ("none",)),
        ((), 4, ("ddp", "fsdp2")),
        (("none",), 4, ("ddp", "fsdp2")),
        (("ddp", "zero3"), 4, ("ddp", "zero3")),
        (("none", "zero1"), 2, ("zero1",)),
        (("ddp", "zero3"), 1, ("none",)),
    ],
)
def test_a_space_is_of_so_many_gpus(
    named: tuple[str, ...], num_gpus: int, expected: tuple[str, ...]
) -> None:
    changes = {"parallelism": named} if named else {}
    (found,) = for_gpus(space(section(**changes)), num_gpus).methods
    assert found.domains["parallelism"] == expected


def test_gpus_share_the_effective_batch() -> None:
    shared = dataclasses.replace(workload(32), num_gpus=4)
    sizes = section(micro_batch_size=(1, 2, 8, 16), parallelism=("ddp",))
    found = enumerate_configs(space(sizes), shared)
    assert [(c.micro_batch_size, c.gradient_accumulation_steps) for c in found.configs] == [
        (1, 8), (2, 4), (8, 1)
    ]  # fmt: skip
    assert {c.effective_batch_size for c in found.configs} == {32}
    assert found.invalid == {"micro-batch-divides": 1}


def test_every_setting_has_a_class() -> None:
    settings = {field.name for field in dataclasses.fields(TrainConfig)}
    of_the_workload = {"method", "gradient_accumulation_steps", "sequence_length", "num_gpus"}
    # A loader loads the same batches, however it does: it is timed, not searched.
    assert set(KNOBS) == settings - of_the_workload - set(LOADER_SETTINGS)
    assert {knob.tradeoff for knob in KNOBS.values()} <= {*TRADEOFF_CLASSES, ""}
    assert [name for name, knob in KNOBS.items() if not knob.tradeoff] == ["optimizer"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "exact"),
        ({"micro_batch_size": 8, "gradient_accumulation_steps": 4}, "exact"),
        ({"activation_checkpointing": 2, "activation_offloading": True}, "exact"),
        ({"attention": "eager"}, "exact"),
        ({"optimizer": "adamw_torch_fused"}, "exact"),
        ({"precision": "bf16-true"}, "numerics"),
        ({"optimizer": "adamw_bnb_8bit"}, "numerics"),
        ({"optimizer": "paged_adamw_32bit"}, "numerics"),
        ({"optimizer": "adafactor"}, "recipe"),
        ({"optimizer": "lion_8bit", "precision": "bf16-true"}, "recipe"),
        ({"micro_batch_size": 8}, "recipe"),
        ({"sequence_length": 512}, "recipe"),
        ({"method": "lora", "lora_rank": 8, "lora_targets": "attention"}, "recipe"),
    ],
)
def test_class_against_full_adamw(changes: dict[str, object], expected: str) -> None:
    changed = dataclasses.replace(FULL, **changes)  # type: ignore[arg-type]
    assert tradeoff_class(changed, FULL) == expected
    assert tradeoff_class(FULL, changed) == expected


@pytest.mark.parametrize(
    ("config", "base", "expected"),
    [
        (dataclasses.replace(LORA, lora_rank=64), LORA, "recipe"),
        (dataclasses.replace(LORA, lora_targets="attention"), LORA, "recipe"),
        (dataclasses.replace(QLORA, quantization="nf4-double"), QLORA, "recipe"),
        (QLORA, LORA, "recipe"),
    ],
)
def test_class_among_adapters(config: TrainConfig, base: TrainConfig, expected: str) -> None:
    assert tradeoff_class(config, base) == expected


@pytest.mark.parametrize(
    ("name", "base_name", "expected"),
    [
        ("lion_8bit", "lion_32bit", "numerics"),
        ("paged_lion_8bit", "lion_8bit", "exact"),
        ("paged_adamw_8bit", "adamw_bnb_8bit", "exact"),
        ("adamw_torch", "paged_adamw_8bit", "numerics"),
        ("sgd", "adafactor", "recipe"),
    ],
)
def test_class_follows_the_users_own_optimizer(name: str, base_name: str, expected: str) -> None:
    config, base = (dataclasses.replace(FULL, optimizer=each) for each in (name, base_name))
    assert tradeoff_class(config, base) == expected


@pytest.mark.parametrize("row", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_a_rows_own_tradeoff_is_its_class_against_adamw_torch(row: Optimizer) -> None:
    assert tradeoff_class(dataclasses.replace(FULL, optimizer=row.name), FULL) == row.tradeoff


def test_filter_keeps_what_is_allowed_in_order() -> None:
    fused = dataclasses.replace(FULL, optimizer="adamw_torch_fused")
    quantised = dataclasses.replace(FULL, optimizer="adamw_bnb_8bit")
    configs = [LORA, quantised, fused, FULL]
    kept = {allow: filter_allowed(configs, FULL, allow) for allow in TRADEOFF_CLASSES}
    assert kept == {
        "exact": [fused, FULL],
        "numerics": [quantised, fused, FULL],
        "recipe": configs,
    }


def test_a_model_without_sdpa_is_searched_with_what_it_has() -> None:
    def offered(*attentions: str) -> SearchSpace:
        return SearchSpace(name="s", description="", methods=(section(attention=attentions),))

    def left(space: SearchSpace, *attentions: str) -> tuple[str, ...]:
        return with_attentions(space, attentions).methods[0].domains["attention"]

    assert left(offered("sdpa"), "eager") == ("eager",)
    assert left(offered("eager", "sdpa"), "eager") == ("eager",)
    assert left(offered("sdpa"), "eager", "flex_attention") == ("eager",)
    assert left(offered("sdpa", "flex_attention"), "eager", "flex_attention") == ("flex_attention",)
    assert left(offered("flex_attention"), "eager", "sdpa") == ("sdpa",)
    assert left(offered("sdpa"), "eager", "sdpa") == ("sdpa",)
