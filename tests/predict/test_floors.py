"""Bytes that are there however a step runs, worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autotune.predict.floors import least_bytes
from autotune.space.config import TrainConfig

CONFIG = TrainConfig(
    method="full",
    micro_batch_size=3,
    gradient_accumulation_steps=2,
    sequence_length=64,
    precision="bf16-true",
    optimizer="adamw_torch",
)
NUM_PARAMETERS = 1000
LORA = {"method": "lora", "lora_rank": 8, "lora_targets": "all-linear"}


@pytest.mark.parametrize(
    ("change", "bytes_each", "logit_bytes"),
    [
        # Weights and gradients; logits and their gradient, of 192 tokens.
        ({}, 2 + 2, 2),
        ({"precision": "bf16-mixed"}, 4 + 4, 2),
        ({"precision": "fp32"}, 4 + 4, 4),
        (LORA, 2, 2),
        ({"optimizer": "lomo"}, 2, 2),
        (LORA | {"method": "qlora", "quantization": "nf4", "precision": "bf16-autocast"}, 0.5, 2),
        (LORA | {"quantization": "int8"}, 1, 2),
        ({"liger": True}, 4, 0),
        ({"chunked_loss": True}, 4, 0),
        ({"trainer": "trl-sft"}, 4, 0),
    ],
)
def test_weights_and_gradients_and_logits_are_there_at_least(
    change: dict[str, Any], bytes_each: float, logit_bytes: int
) -> None:
    config = dataclasses.replace(CONFIG, **change)
    weights = int(bytes_each * NUM_PARAMETERS)
    assert least_bytes(config, NUM_PARAMETERS) == weights
    assert least_bytes(config, NUM_PARAMETERS, 50) == weights + 2 * logit_bytes * 50 * 3 * 64


@pytest.mark.parametrize(
    ("change", "bytes_each", "num_parts"),
    [
        ({"parallelism": "ddp"}, 2 + 2, 1),
        ({"parallelism": "zero1"}, 2 + 2, 1),
        ({"parallelism": "zero2"}, 2 + 2 / 4, 1),
        ({"parallelism": "zero3"}, (2 + 2) / 4, 1),
        ({"parallelism": "zero3-offload"}, 0, 1),
        ({"parallelism": "fsdp2"}, (2 + 2) / 4, 1),
        ({"parallelism": "hsdp"}, (2 + 2) / 2, 1),
        ({"parallelism": "tp"}, (2 + 2) / 4, 4),
        ({"parallelism": "cp"}, (2 + 2) / 4, 4),
        ({"parallelism": "device-map"}, (2 + 2) / 4, 4),
        # DeepSpeed casts the weights to 16 bits, FSDP2 shares out those of 32.
        ({"parallelism": "zero2", "precision": "bf16-mixed"}, 2 + 2 / 4, 1),
        ({"parallelism": "fsdp2", "precision": "bf16-mixed"}, (4 + 4) / 4, 1),
        (LORA | {"parallelism": "ddp", "quantization": "nf4"}, 0.5, 1),
        # What FSDP2 cuts was loaded whole on each.
        (LORA | {"parallelism": "fsdp2", "quantization": "nf4"}, 0.5, 1),
        (LORA | {"parallelism": "device-map", "quantization": "nf4"}, 0.5 / 4, 4),
    ],
)
def test_of_four_gpus_each_has_its_share(
    change: dict[str, Any], bytes_each: float, num_parts: int
) -> None:
    config = dataclasses.replace(CONFIG, num_gpus=4, **change)
    weights = int(bytes_each * NUM_PARAMETERS)
    assert least_bytes(config, NUM_PARAMETERS) == weights
    assert least_bytes(config, NUM_PARAMETERS, 50) == weights + 4 * 50 * 3 * 64 // num_parts
