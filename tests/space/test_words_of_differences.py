"""A configuration in words beside another, and as options of a command."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autotune.space.config import TrainConfig
from autotune.space.words import as_options, describe, difference

FULL = TrainConfig(
    method="full",
    micro_batch_size=4,
    gradient_accumulation_steps=8,
    sequence_length=1024,
    precision="bf16-true",
    optimizer="adamw_torch",
)
LORA = dataclasses.replace(
    FULL, method="lora", lora_rank=16, lora_targets="all-linear", precision="bf16-autocast"
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "the same settings"),
        ({"micro_batch_size": 8, "gradient_accumulation_steps": 4}, "micro-batch 8 x 4"),
        ({"optimizer": "sgd", "attention": "eager"}, "sgd, eager attention"),
        ({"precision": "fp32", "micro_batch_size": 2}, "micro-batch 2 x 8, fp32"),
        ({"activation_checkpointing": 2}, "checkpoint every 2nd layer"),
    ],
)
def test_a_difference_is_what_the_other_has_not(changes: dict[str, Any], said: str) -> None:
    found = difference(dataclasses.replace(FULL, **changes), FULL)
    assert sorted(found.split(", ")) == sorted(said.split(", "))


def test_another_method_is_said_whole() -> None:
    assert describe(LORA) == (
        "LoRA r=16 on all-linear, bf16-autocast, adamw_torch, micro-batch 4 x 8, sdpa"
    )
    assert difference(LORA, FULL) == describe(LORA)
    assert difference(FULL, LORA) == describe(FULL)
    assert describe(FULL) == ("full fine-tune, bf16-true, adamw_torch, micro-batch 4 x 8, sdpa")


@pytest.mark.parametrize(("num_gpus", "said"), [(1, "ddp on 1 GPU"), (2, "ddp on 2 GPUs")])
def test_a_shared_run_says_on_how_many(num_gpus: int, said: str) -> None:
    shared = dataclasses.replace(FULL, parallelism="ddp", num_gpus=num_gpus)
    assert describe(shared) == (
        f"full fine-tune, bf16-true, adamw_torch, micro-batch 4 x 8, {said}, sdpa"
    )


def test_pictures_are_batched_in_no_way_that_could_be_said() -> None:
    padded = dataclasses.replace(FULL, batching="padded")
    assert "padded" in describe(padded)
    assert "padded" not in describe(dataclasses.replace(padded, sequence_length=1))
    assert "padded" in describe(dataclasses.replace(padded, sequence_length=2))


def test_options_of_a_configuration_leave_out_what_is_plain() -> None:
    plain = ["--micro-batch", "4", "--precision", "bf16-true", "--optimizer", "adamw_torch"]
    assert as_options(FULL) == plain
    more = dataclasses.replace(FULL, liger=True, activation_checkpointing=2)
    assert as_options(more) == [*plain, "--checkpointing", "every-2", "--liger"]
    of_lora = ["bf16-autocast" if each == "bf16-true" else each for each in plain]
    assert as_options(LORA) == [*of_lora, "--rank", "16", "--targets", "all-linear"]
    with_liger = dataclasses.replace(FULL, liger=True)
    assert difference(with_liger, FULL) == "Liger kernels"
    assert difference(FULL, with_liger) == "no Liger kernels"
