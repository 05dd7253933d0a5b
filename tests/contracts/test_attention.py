"""FlashAttention through Transformers' integration, without its library, against PyTorch's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from autotune.config import ATTENTIONS
from autotune.results import TraceSpec
from autotune.traces import Trace
from autotune.worker import model as models
from autotune.worker.attention import FLASH
from autotune.worker.cuda import Device
from autotune.worker.model import UnsupportedModel
from autotune.worker.trace import trace_step

ADA = Device(compute_capability=(8, 9), cublas_workspace_bytes=8_519_680)

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "vocab_size": 1000,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 352,
}
ODD_HEADS = {**LLAMA, "hidden_size": 480}
"""Heads of 60, which the kernels pad to 64."""


def trace(attention: str, config: dict[str, Any], **changes: Any) -> Trace:
    spec = {
        "method": "full",
        "lora_targets": None,
        "quantization": "none",
        "precision": "bf16-true",
        "activation_checkpointing": 0,
        "activation_offloading": False,
        "single": False,
        **changes,
    }
    answer = trace_step(
        models.load_config(config),
        "causal-lm",
        TraceSpec(attention=attention, **spec),
        sequence_length=1000,
        device=ADA,
    )
    return Trace(json.loads(json.dumps(answer)))


def peak_bytes(traced: Trace) -> int:
    return int(traced.running_bytes("again", 4, 16).max())


def flops(traced: Trace) -> float:
    return sum(launch.count * launch.flops for launch in traced.launches(4, 16))


@pytest.mark.parametrize("config", [LLAMA, ODD_HEADS], ids=["heads of 64", "heads of 60"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"single": True},
        {"precision": "bf16-mixed", "activation_checkpointing": 1},
        {"method": "lora", "lora_targets": "all-linear", "precision": "bf16-autocast"},
    ],
    ids=["full", "micro-batch 1", "mixed", "lora"],
)
def test_the_second_keeps_what_pytorch_keeps(
    config: dict[str, Any], changes: dict[str, Any]
) -> None:
    """PyTorch's flash kernels are FlashAttention 2's; sdpa picks them on this card, without a mask."""
    own, library = (trace(name, config, **changes) for name in ("sdpa", "flash_attention_2"))
    assert peak_bytes(library) == peak_bytes(own)
    assert flops(library) == flops(own)


def test_the_third_sums_grouped_heads_in_float32() -> None:
    """Its dK and dV are summed in float32 for the key heads, the second's kept for all in 16 bits."""
    names = {k.name for k in trace("flash_attention_3", LLAMA).kernels}
    assert {
        "_scaled_dot_product_flash3_attention",
        "_scaled_dot_product_flash3_attention_backward",
    } <= names
    assert not any("flash_attention" in name for name in names)


@pytest.mark.parametrize("attention", FLASH)
@pytest.mark.parametrize(
    ("change", "precision", "message"),
    [
        ({"head_dim": 320}, "bf16-true", "no heads of 320: up to 256"),
        ({}, "fp32", "does not compute in torch.float32"),
    ],
)
def test_what_the_kernels_refuse_is_refused(
    attention: str, change: dict[str, Any], precision: str, message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        trace(attention, {**LLAMA, **change}, precision=precision)


def test_the_names_are_transformers_own() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert set(ATTENTIONS) <= {"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()}
