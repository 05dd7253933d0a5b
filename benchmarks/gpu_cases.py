"""What benchmarks/gpu_check.py probes: literal lists, the most telling first.

A case that says `capped` is probed twice: with all of the card, and with its own prediction as budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.config import TrainConfig
from autotune.models import ModelSource, resolve
from autotune.space import MethodSpace, SearchSpace

TASK = "causal-lm"

TINY = ModelSource(
    name="tiny-llama",
    config={
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 128,
    },
    origin="file",
    path=Path("config.json"),
    requires_remote_code=False,
)
"""For --tiny: seconds on a CPU."""

SMOLLM = "HuggingFaceTB/SmolLM2-135M"
GPT2 = "openai-community/gpt2"
QWEN_05 = "Qwen/Qwen2.5-0.5B"
QWEN_15 = "Qwen/Qwen2.5-1.5B"
LLAMA_3 = "meta-llama/Llama-3.2-3B"
LLAMA_8 = "meta-llama/Llama-3.1-8B"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One configuration of one model."""

    model: str
    config: TrainConfig
    capped: bool = False


def source(model: str) -> ModelSource:
    return TINY if model == TINY.name else resolve(model)


def full(model: str, length: int, micro_batch: int, precision: str, **rest: Any) -> Case:
    return _case(model, "full", length, micro_batch, precision, **rest)


def lora(model: str, length: int, micro_batch: int, rank: int, **rest: Any) -> Case:
    adapter = {"lora_rank": rank, "lora_targets": "all-linear"} | rest
    return _case(model, "lora", length, micro_batch, "bf16-autocast", **adapter)


def qlora(model: str, length: int, micro_batch: int, rank: int, **rest: Any) -> Case:
    adapter = {"lora_rank": rank, "lora_targets": "all-linear", "quantization": "nf4-double"} | rest
    return _case(model, "qlora", length, micro_batch, "bf16-autocast", **adapter)


def _case(
    model: str,
    method: str,
    length: int,
    micro_batch: int,
    precision: str,
    *,
    capped: bool = False,
    optimizer: str = "adamw_torch_fused",
    accumulation: int = 2,
    **rest: Any,
) -> Case:
    config = TrainConfig(
        method=method,
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        sequence_length=length,
        precision=precision,
        optimizer=optimizer,
        **rest,
    )
    return Case(model=model, config=config, capped=capped)


CKPT: dict[str, Any] = {"activation_checkpointing": 1}
EVERY_2: dict[str, Any] = {"activation_checkpointing": 2}
OFFLOAD: dict[str, Any] = {"activation_checkpointing": 1, "activation_offloading": True}
EAGER: dict[str, Any] = {"attention": "eager"}

CASES: tuple[Case, ...] = (
    # The main roads of each method, small to large.
    full(SMOLLM, 1024, 4, "bf16-true", capped=True),
    full(SMOLLM, 1024, 4, "bf16-mixed", capped=True),
    full(SMOLLM, 1024, 4, "bf16-true", **CKPT, capped=True),
    lora(SMOLLM, 1024, 4, 16, capped=True),
    qlora(SMOLLM, 1024, 4, 16, capped=True),
    full(QWEN_05, 1024, 4, "bf16-true", capped=True),
    lora(QWEN_05, 1024, 8, 16, **CKPT, capped=True),
    qlora(QWEN_05, 1024, 8, 64, capped=True),
    qlora(LLAMA_8, 1024, 2, 16, **CKPT, capped=True),
    lora(LLAMA_8, 1024, 1, 16, **CKPT, capped=True),
    full(LLAMA_3, 1024, 1, "bf16-true", **CKPT, capped=True),
    # Each optimizer, on 0.5B: state is a large part of its memory.
    full(QWEN_05, 1024, 1, "bf16-mixed", optimizer="adamw_torch", capped=True),
    full(QWEN_05, 1024, 1, "bf16-mixed", optimizer="adamw_torch_fused"),
    full(QWEN_05, 1024, 1, "bf16-mixed", optimizer="adamw_bnb_8bit", capped=True),
    full(QWEN_05, 1024, 1, "bf16-mixed", optimizer="paged_adamw_8bit"),
    full(QWEN_05, 1024, 1, "bf16-mixed", optimizer="paged_adamw_32bit", capped=True),
    full(QWEN_05, 1024, 1, "bf16-mixed", optimizer="lion_32bit"),
    full(QWEN_05, 1024, 1, "bf16-mixed", optimizer="lion_8bit"),
    full(QWEN_05, 1024, 1, "bf16-mixed", optimizer="paged_lion_8bit"),
    full(QWEN_05, 1024, 1, "bf16-mixed", optimizer="adafactor", capped=True),
    full(QWEN_05, 1024, 1, "bf16-mixed", optimizer="sgd"),
    # Checkpointing, offloading, attention, precision.
    full(QWEN_05, 1024, 8, "bf16-true", **EVERY_2, capped=True),
    full(QWEN_05, 1024, 8, "bf16-true", **OFFLOAD, capped=True),
    full(QWEN_05, 1024, 4, "bf16-true", **EAGER),
    full(QWEN_05, 1024, 2, "fp16-mixed"),
    full(QWEN_05, 1024, 2, "fp32"),
    full(QWEN_05, 1024, 2, "tf32"),
    full(QWEN_05, 1024, 16, "bf16-true", accumulation=1, capped=True),
    # Another architecture: learned positions, fused projections, dropout.
    full(GPT2, 256, 8, "bf16-mixed"),
    full(GPT2, 256, 8, "bf16-mixed", **EAGER),
    full(GPT2, 1024, 8, "bf16-true", **CKPT),
    lora(GPT2, 1024, 8, 16, lora_targets="attention"),
    # Lengths.
    full(SMOLLM, 256, 16, "bf16-mixed"),
    full(SMOLLM, 256, 1, "bf16-true", optimizer="adamw_torch"),
    full(SMOLLM, 4096, 2, "bf16-true"),
    full(SMOLLM, 4096, 1, "bf16-true", **EAGER),
    lora(SMOLLM, 4096, 4, 16, **EVERY_2),
    # Between.
    full(QWEN_15, 1024, 4, "bf16-true", **CKPT),
    full(QWEN_15, 1024, 1, "bf16-mixed", optimizer="adamw_bnb_8bit"),
    lora(QWEN_15, 1024, 4, 64, optimizer="paged_adamw_8bit"),
    qlora(QWEN_15, 1024, 4, 128, quantization="nf4", **EVERY_2),
    lora(QWEN_15, 4096, 1, 16, **OFFLOAD),
    qlora(QWEN_15, 4096, 2, 16, **CKPT),
    # Large.
    full(LLAMA_3, 1024, 4, "bf16-true", optimizer="adamw_bnb_8bit", **EVERY_2),
    lora(LLAMA_3, 1024, 4, 16),
    qlora(LLAMA_3, 1024, 4, 16, lora_targets="attention", **CKPT),
    full(LLAMA_8, 1024, 2, "bf16-true", optimizer="adamw_bnb_8bit", **CKPT),
    full(LLAMA_8, 1024, 1, "bf16-true", optimizer="adafactor", **CKPT),
    full(LLAMA_8, 1024, 1, "bf16-true", optimizer="sgd", **EVERY_2),
    qlora(LLAMA_8, 4096, 1, 64, **CKPT),
    lora(LLAMA_8, 4096, 2, 16, optimizer="lion_8bit", **CKPT),
)

SWEEP_MODEL = SMOLLM
SWEEP_LENGTH = 512
SWEEP_EFFECTIVE_BATCH = 16
SWEEP_BUDGET = "8GB"
"""A quarter of the space is predicted not to fit into it."""
SWEEP = SearchSpace(
    name="gpu-check-sweep",
    description="every point is probed: a benchmark for searches",
    methods=(
        MethodSpace(
            method="full",
            domains={
                "micro_batch_size": (1, 2, 4, 8, 16),
                "precision": ("bf16-mixed", "bf16-true"),
                "optimizer": ("adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "lion_8bit"),
                "activation_checkpointing": (0, 1, 2),
                "activation_offloading": (False,),
                "attention": ("sdpa",),
            },
        ),
        MethodSpace(
            method="lora",
            domains={
                "micro_batch_size": (1, 2, 4, 8, 16),
                "precision": ("bf16-autocast",),
                "optimizer": ("adamw_torch_fused", "adamw_bnb_8bit"),
                "activation_checkpointing": (0, 1, 2),
                "activation_offloading": (False,),
                "attention": ("sdpa",),
                "lora_rank": (8, 64),
                "lora_targets": ("all-linear",),
            },
        ),
    ),
)

FINDS: tuple[tuple[str, str], ...] = (
    (QWEN_15, "24GB"),
    (QWEN_15, "8GB"),
    (QWEN_15, "80GB"),
    (QWEN_15, "12GB"),
)
"""(model, budget), end to end."""

TINY_CASES: tuple[Case, ...] = (
    full(TINY.name, 64, 2, "fp32", **EAGER, capped=True),
    lora(TINY.name, 64, 2, 4, **EAGER),
)
TINY_LENGTH = 64
TINY_EFFECTIVE_BATCH = 4
TINY_SWEEP_BUDGET = "100MB"
TINY_SWEEP = SearchSpace(
    name="gpu-check-tiny",
    description="two points",
    methods=(
        MethodSpace(
            method="full",
            domains={
                "micro_batch_size": (1, 4),
                "precision": ("fp32",),
                "optimizer": ("sgd",),
                "activation_checkpointing": (0,),
                "activation_offloading": (False,),
                "attention": ("eager",),
            },
        ),
    ),
)
TINY_FIND_SPACE = """\
name: gpu-check-tiny
description: two points
methods:
  full:
    micro_batch_size: [1, 4]
    precision: [fp32]
    optimizer: [sgd]
    activation_checkpointing: [none]
    activation_offloading: [false]
    attention: [eager]
"""
