"""What a probe that several processes share makes where, and in which dtype."""

from __future__ import annotations

import dataclasses

import pytest

from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.worker.probe.checks import _adapter_dtype
from autotune.worker.probe.shared import is_dealt_out, is_made_on_host

LORA = TrainConfig(
    method="lora",
    micro_batch_size=1,
    gradient_accumulation_steps=1,
    sequence_length=8,
    precision="bf16-autocast",
    optimizer="adamw_torch",
    lora_rank=8,
    lora_targets="all-linear",
    num_gpus=2,
)
QLORA = dataclasses.replace(LORA, method="qlora", quantization="nf4")


@pytest.mark.parametrize(
    ("config", "parallelism", "is_taken_over", "is_on_host"),
    [
        (LORA, "ddp", False, False),
        (LORA, "fsdp2", True, True),
        (LORA, "zero2", True, True),
        # Transformers loads 4-bit weights on the device, unless they wait on the host.
        (QLORA, "fsdp2", True, False),
        (QLORA, "zero2", True, False),
        (QLORA, "fsdp2-offload", True, True),
    ],
)
def test_where_a_model_is_made(
    config: TrainConfig, parallelism: str, is_taken_over: bool, is_on_host: bool
) -> None:
    config = dataclasses.replace(config, parallelism=parallelism)
    assert (is_dealt_out(config), is_made_on_host(config)) == (is_taken_over, is_on_host)


@pytest.mark.parametrize(
    ("trainer", "parallelism", "dtype", "is_reentrant"),
    [
        ("transformers", "zero3", "float32", False),
        # TRL leaves the adapter that it makes in the base's dtype.
        ("trl-dpo", "zero3", "bfloat16", True),
        ("trl-sft", "zero3", "float32", True),
        ("trl-dpo", "zero2", "float32", False),
        ("trl-dpo", "fsdp2", "float32", False),
    ],
)
def test_what_trl_does_with_an_adapter_under_zero3(
    trainer: str, parallelism: str, dtype: str, is_reentrant: bool
) -> None:
    config = dataclasses.replace(LORA, trainer=trainer, parallelism=parallelism)
    assert _adapter_dtype(config) == dtype
    assert TraceSpec.of(config).checkpoints_reentrantly == is_reentrant
