"""What a change gives up: of each setting, of each optimizer, against any base."""

from __future__ import annotations

import dataclasses

import pytest
from test_rules import FULL, LORA, QLORA

from autotune.space.config import LOADER_SETTINGS, TRADEOFF_CLASSES, TrainConfig
from autotune.space.knobs import KNOBS
from autotune.space.optimizers import OPTIMIZERS
from autotune.space.tradeoffs import (
    form,
    further_trades,
    gives_up,
    loses_small_updates,
    tradeoff_class,
)


def test_every_setting_has_a_class() -> None:
    settings = {field.name for field in dataclasses.fields(TrainConfig)}
    of_the_workload = {"method", "gradient_accumulation_steps", "sequence_length", "num_gpus"}
    # A loader loads the same batches, however it does: it is timed, not searched.
    assert set(KNOBS) == settings - of_the_workload - set(LOADER_SETTINGS)
    assert {knob.tradeoff for knob in KNOBS.values()} <= {*TRADEOFF_CLASSES, ""}
    assert [name for name, knob in KNOBS.items() if not knob.tradeoff] == ["optimizer", "no_sync"]


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
        ({"batching": "by-tokens"}, "recipe"),
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
        *(
            (
                dataclasses.replace(LORA, batching=one),
                dataclasses.replace(LORA, batching=other),
                level,
            )
            for one, other, level in (
                ("padded", "by-tokens", "exact"),
                ("by-tokens", "padded", "exact"),
                ("padded", "grouped", "recipe"),
                ("grouped", "by-tokens", "recipe"),
            )
        ),
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


ON_TWO = dataclasses.replace(FULL, parallelism="fsdp2", num_gpus=2, gradient_accumulation_steps=4)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("bf16-mixed", "numerics"),
        ("bf16-autocast", "numerics"),
        ("bf16-true", "exact"),
        ("fp32", "exact"),
    ],
)
def test_whole_gradients_add_up_in_the_dtype_of_the_products(precision: str, expected: str) -> None:
    """Shards add up in that of the weights, which is no coarser: to go there gives up nothing."""
    syncing = dataclasses.replace(ON_TWO, precision=precision)
    keeping = dataclasses.replace(syncing, no_sync=True)
    assert tradeoff_class(keeping, syncing) == expected
    assert tradeoff_class(syncing, keeping) == "exact"
    # In a single micro-step there is nothing to keep, and no change to count.
    alone = dataclasses.replace(syncing, gradient_accumulation_steps=1, micro_batch_size=16)
    assert gives_up(alone, keeping) < gives_up(
        dataclasses.replace(syncing, micro_batch_size=16), keeping
    )


CLASSES = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), "exact"),
    **dict.fromkeys(
        (
            "adamw_torch_8bit",
            "adamw_torch_4bit",
            "adamw_bnb_8bit",
            "adamw_8bit",
            "paged_adamw_8bit",
            "paged_adamw_32bit",
        ),
        "numerics",
    ),
}
"""Of optimizers that take AdamW's steps, against adamw_torch; all others are another recipe."""


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_optimizer_than_adamw_is_another_recipe(name: str) -> None:
    config = dataclasses.replace(FULL, optimizer=name)
    assert tradeoff_class(config, FULL) == CLASSES.get(name, "recipe")


def test_of_one_class_fewer_settings_give_up_less() -> None:
    base = dataclasses.replace(FULL, precision="fp32")
    half = dataclasses.replace(base, precision="bf16-true")
    both = dataclasses.replace(half, optimizer="adamw_bnb_8bit")
    assert tradeoff_class(half, base) == tradeoff_class(both, base) == "numerics"
    assert gives_up(half, base) < gives_up(both, base)
    # What costs nothing is counted last: a change is a change.
    faster = dataclasses.replace(half, optimizer="adamw_torch_fused")
    growing = dataclasses.replace(faster, expandable_segments=True)
    assert tradeoff_class(growing, half) == "exact"
    in_order = [gives_up(each, base) for each in (half, faster, growing, both)]
    assert in_order == sorted(in_order)
    assert len(set(in_order)) == len(in_order)
    assert gives_up(growing, growing) < gives_up(half, growing)
    # Whoever loses small updates to rounding gives up more than a changed optimizer that keeps them.
    kept = dataclasses.replace(half, optimizer="adamw_torch_8bit")
    assert tradeoff_class(kept, base) == "numerics"
    assert gives_up(kept, base) < gives_up(half, base)
    # DeepSpeed and FSDP2 step on float32 copies.
    zero = dataclasses.replace(half, precision="bf16-autocast", parallelism="zero2", num_gpus=2)
    alone = dataclasses.replace(zero, parallelism="ddp")
    assert loses_small_updates(alone)
    assert not loses_small_updates(zero)
    assert not loses_small_updates(dataclasses.replace(zero, parallelism="fsdp2"))
    pure = dataclasses.replace(zero, parallelism="fsdp2", precision="bf16-true")
    assert loses_small_updates(pure)
    # Nor is a lower class nothing beside a higher one.
    eight = dataclasses.replace(LORA, optimizer="adamw_bnb_8bit")
    assert tradeoff_class(eight, FULL) == tradeoff_class(LORA, FULL) == "recipe"
    assert gives_up(LORA, FULL) < gives_up(eight, FULL)
    # The usual rank comes before others, then those nearer to it, of two alike the higher.
    ranks = sorted((8, 16, 24, 32, 64), key=lambda r: gives_up(with_rank(r), FULL))
    assert ranks == [16, 24, 32, 8, 64]
    assert gives_up(with_rank(64), with_rank(64)) < gives_up(with_rank(16), with_rank(64))


def with_rank(rank: int) -> TrainConfig:
    return dataclasses.replace(LORA, lora_rank=rank)


@pytest.mark.parametrize(
    ("config", "base", "expected"),
    [
        (LORA, FULL, ()),
        (QLORA, FULL, ()),
        (FULL, LORA, ()),
        (dataclasses.replace(FULL, optimizer="adamw_bnb_8bit", batching="padded"), FULL, ()),
        (dataclasses.replace(FULL, optimizer="lion_8bit"), FULL, ("optimizer",)),
        (with_rank(128), FULL, ("lora_rank",)),
        (dataclasses.replace(LORA, lora_targets="attention"), FULL, ("lora_targets",)),
        (
            dataclasses.replace(LORA, lora_variant="dora", lora_rank=8),
            FULL,
            ("lora_rank", "lora_variant"),
        ),
        # VeRA's usual rank is its own.
        (dataclasses.replace(LORA, method="vera", lora_rank=256), FULL, ("method",)),
        # What the base has is no trade, and its own size is the usual one.
        (with_rank(64), with_rank(64), ()),
        (dataclasses.replace(QLORA, lora_rank=64), with_rank(64), ()),
        (LORA, with_rank(64), ("lora_rank",)),
        (dataclasses.replace(LORA, lora_dropout=0.1), LORA, ("lora_dropout",)),
    ],
)
def test_further_trades(config: TrainConfig, base: TrainConfig, expected: tuple[str, ...]) -> None:
    assert set(further_trades(config, base)) == set(expected)


def test_quantised_weights_come_after_16_bits_and_before_further_trades() -> None:
    attention = dataclasses.replace(LORA, lora_targets="attention")
    assert form(LORA, FULL) < form(QLORA, FULL) < form(attention, FULL)
    assert form(QLORA, QLORA) == form(LORA, FULL)


def test_bfloat16_weights_come_after_32_bits_unless_the_base_has_them() -> None:
    """Those that keep small updates come between, and all of them before 4 bits and other targets."""
    mixed = dataclasses.replace(FULL, precision="bf16-mixed")
    loses = dataclasses.replace(FULL, precision="bf16-true")
    keeps = dataclasses.replace(loses, optimizer="adamw_torch_8bit")
    assert form(mixed, mixed) < form(keeps, mixed) < form(loses, mixed) < form(QLORA, mixed)
    assert form(loses, loses) == form(keeps, loses) == form(mixed, loses)
    assert form(loses, keeps) > form(keeps, keeps)


def test_of_the_highest_class_the_number_of_changes_is_counted_first() -> None:
    """One change of the recipe and two of rounding give up less than two changes of the recipe."""
    one = dataclasses.replace(
        LORA, lora_dropout=0.1, precision="bf16-true", optimizer="adamw_bnb_8bit"
    )
    two = dataclasses.replace(LORA, lora_dropout=0.1, lora_variant="rslora")
    assert tradeoff_class(one, LORA) == tradeoff_class(two, LORA) == "recipe"
    assert gives_up(one, LORA) < gives_up(two, LORA)


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({}, (0, 0, 0)),
        ({"attention": "eager"}, (0, 0, 1)),
        ({"batching": "by-tokens"}, (0, 0, 1)),
        ({"batching": "grouped"}, (1, 0, 0)),
        ({"optimizer": "adamw_torch_fused", "liger": True}, (0, 1, 1)),
        ({"optimizer": "sgd", "precision": "fp32", "expandable_segments": True}, (1, 1, 1)),
        ({"sequence_length": 512, "batching": "packed"}, (2, 0, 0)),
    ],
)
def test_changes_are_counted_by_class_highest_first(
    changes: dict[str, object], counts: tuple[int, ...]
) -> None:
    base = dataclasses.replace(FULL, batching="padded")
    changed = dataclasses.replace(base, **changes)  # type: ignore[arg-type]
    assert gives_up(changed, base)[-3:] == counts


def test_a_loss_that_compares_samples_makes_the_micro_batch_part_of_the_recipe() -> None:
    larger = {"micro_batch_size": 8, "gradient_accumulation_steps": 4}
    for trainer, expected in (("trl-kto", "recipe"), ("trl-dpo", "exact")):
        base = dataclasses.replace(FULL, trainer=trainer, batching="padded")
        assert tradeoff_class(dataclasses.replace(base, **larger), base) == expected
