"""A small Llama, its search space and its traces, made once for the tests that price and search."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import here

from autotune.catalogue.gpus import Gpu, find_gpu
from autotune.catalogue.models import ModelSource
from autotune.memory.traces import Trace
from autotune.predict.tracing import trace_all
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig, Workload
from autotune.space.enumeration import enumerate_configs
from autotune.space.headroom import NO_HEADROOM, Headroom
from autotune.space.search_space import MethodSpace, SearchSpace

SEQUENCE_LENGTH = 512
EFFECTIVE_BATCH_SIZE = 8
METHODS = ("full", "lora", "qlora")

MODEL = ModelSource(
    name="tiny-llama",
    config={
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 5,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 32_000,
        "max_position_embeddings": 2048,
    },
    origin="file",
    path=Path("config.json"),
)
NUM_LAYERS = 5
FULL = TrainConfig(
    method="full",
    micro_batch_size=1,
    gradient_accumulation_steps=EFFECTIVE_BATCH_SIZE,
    sequence_length=SEQUENCE_LENGTH,
    precision="bf16-true",
    optimizer="adamw_torch_fused",
)
"""The whole batch in micro-batches of one sample."""
SHALLOW = dataclasses.replace(MODEL, config={**MODEL.config, "num_hidden_layers": 2})
"""For compiled steps, of which every layer is traced."""

_COMMON: dict[str, Any] = {
    "micro_batch_size": (1, 2, 4, 8),
    "activation_checkpointing": (0, 1),
    "activation_offloading": (False,),
    "attention": ("sdpa",),
}
_ADAPTER: dict[str, Any] = {
    "precision": ("bf16-autocast",),
    "lora_rank": (8, 16, 64),
    "lora_targets": ("all-linear",),
}
SPACE = SearchSpace(
    name="tiny",
    description="a few points of each method",
    methods=(
        MethodSpace(
            method="full",
            domains={
                "precision": ("bf16-mixed", "bf16-true"),
                "optimizer": ("adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_32bit", "sgd"),
                **_COMMON,
            },
        ),
        MethodSpace(
            method="lora",
            domains={
                "optimizer": ("adamw_torch_fused", "paged_adamw_8bit"),
                **_COMMON,
                **_ADAPTER,
            },
        ),
        MethodSpace(
            method="qlora",
            domains={
                "optimizer": ("adamw_torch_fused",),
                "quantization": ("nf4", "nf4-double"),
                **_COMMON,
                **_ADAPTER,
            },
        ),
    ),
)


def workload(
    memory_budget_bytes: int,
    methods: tuple[str, ...] = METHODS,
    headroom: Headroom = NO_HEADROOM,
) -> Workload:
    return Workload(
        model=MODEL.name,
        sequence_length=SEQUENCE_LENGTH,
        effective_batch_size=EFFECTIVE_BATCH_SIZE,
        methods=methods,
        memory_budget_bytes=memory_budget_bytes,
        headroom=headroom,
    )


def gpu() -> Gpu:
    return find_gpu("rtx-4070")


def configs(methods: tuple[str, ...] = METHODS, space: SearchSpace = SPACE) -> list[TrainConfig]:
    return enumerate_configs(
        space,
        workload(1, methods),
        num_layers=NUM_LAYERS,
        compute_capability=gpu().compute_capability,
    ).configs


@functools.cache
def traces() -> Mapping[TraceSpec, Trace]:
    """Make every trace of the space."""
    specs = {TraceSpec.of(config) for config in configs()}
    return trace_all(MODEL, "causal-lm", SEQUENCE_LENGTH, gpu(), specs, server=here.workers)
