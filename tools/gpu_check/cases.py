"""The cases that are probed: literal lists, the most telling first.

A case that says `capped` is probed twice: with all of the card, and with its own prediction as budget.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.catalogue.models import ModelSource, resolve
from autotune.records.measurement import ProbeSpec
from autotune.space.config import TrainConfig
from autotune.space.search_space import MethodSpace, SearchSpace

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A workload on which `find` is held against what people run (speedups.py)."""

    model: str
    """As `--model` takes it; a file is looked for from the repository's root."""
    gpu_mem: str
    method: str
    sequence_length: int = 1024
    effective_batch_size: int = 32
    options: tuple[str, ...] = ()
    """More of them for `find`."""
    space: str = ""
    """What its file of the search space holds [default: the default space]."""

    @property
    def key(self) -> str:
        size = f"{self.sequence_length} x {self.effective_batch_size}"
        return f"{self.model} {self.method} {self.gpu_mem} {size}"


def source(model: str) -> ModelSource:
    return TINY if model == TINY.name else resolve(model)


def request(case: Case, spec: ProbeSpec) -> dict[str, Any]:
    """The request of a probe, as the worker's verbs `probe` and `profile` take it."""
    return {
        "config": source(case.model).config,
        "train_config": case.config.to_dict(),
        "spec": dataclasses.asdict(spec),
    }


def full(model: str, length: int, micro_batch: int, precision: str, **rest: Any) -> Case:
    return _case(model, "full", length, micro_batch, precision, **rest)


def lora(
    model: str,
    length: int,
    micro_batch: int,
    rank: int,
    precision: str = "bf16-autocast",
    **rest: Any,
) -> Case:
    settings: dict[str, Any] = {"lora_rank": rank, "lora_targets": "all-linear"} | rest
    return _case(model, "lora", length, micro_batch, precision, **settings)


def qlora(model: str, length: int, micro_batch: int, rank: int, **rest: Any) -> Case:
    settings: dict[str, Any] = {
        "lora_rank": rank,
        "lora_targets": "all-linear",
        "quantization": "nf4-double",
    }
    return _case(model, "qlora", length, micro_batch, "bf16-autocast", **(settings | rest))


def adapter(method: str, model: str, **rest: Any) -> Case:
    return _case(model, method, 1024, 4, "bf16-autocast", **rest)


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


def _plan(plan: str, num_layers: int) -> dict[str, Any]:
    return {**CKPT, "checkpoint_plan": plan, "checkpoint_layers": num_layers}


EAGER: dict[str, Any] = {"attention": "eager"}
EXPANDABLE: dict[str, Any] = {"expandable_segments": True}
IN_BACKWARD: dict[str, Any] = {"update_in_backward": True}

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
    # One of each kind of what follows, in sizes that the device bounds.
    full(LLAMA_8, 1024, 2, "bf16-true", optimizer="adamw_bnb_8bit", **CKPT),
    lora(LLAMA_3, 1024, 4, 16),
    full(QWEN_15, 1024, 4, "bf16-true", **CKPT),
    full(QWEN_05, 1024, 2, "fp32"),
    full(SMOLLM, 4096, 2, "bf16-true"),
    qlora(QWEN_15, 4096, 2, 16, **CKPT),
    full(GPT2, 256, 8, "bf16-mixed"),
    full(QWEN_05, 1024, 1, "bf16-mixed", optimizer="adamw_bnb_8bit", capped=True),
    lora(QWEN_15, 4096, 1, 16, **OFFLOAD),
    full(QWEN_05, 1024, 4, "bf16-true", **EXPANDABLE, capped=True),
    lora(LLAMA_8, 4096, 2, 16, optimizer="lion_8bit", **CKPT),
    full(QWEN_05, 1024, 16, "bf16-true", accumulation=1, capped=True),
    full(QWEN_05, 1024, 1, "bf16-mixed", optimizer="paged_adamw_32bit", capped=True),
    full(QWEN_05, 1024, 2, "fp16-mixed"),
    full(QWEN_05, 1024, 1, "bf16-mixed", optimizer="adafactor", capped=True),
    # Each optimizer, on 0.5B: state is a large part of its memory.
    full(QWEN_05, 1024, 1, "bf16-mixed", optimizer="adamw_torch", capped=True),
    full(QWEN_05, 1024, 1, "bf16-mixed", optimizer="adamw_torch_fused"),
    full(QWEN_05, 1024, 1, "bf16-mixed", optimizer="paged_adamw_8bit"),
    full(QWEN_05, 1024, 1, "bf16-mixed", optimizer="lion_32bit"),
    full(QWEN_05, 1024, 1, "bf16-true", optimizer="adamw_torch_8bit"),
    full(QWEN_05, 1024, 1, "bf16-true", optimizer="adamw_torch_4bit"),
    full(QWEN_05, 1024, 1, "bf16-mixed", optimizer="lion_8bit"),
    full(QWEN_05, 1024, 1, "bf16-mixed", optimizer="paged_lion_8bit"),
    full(QWEN_05, 1024, 1, "bf16-mixed", optimizer="sgd"),
    # Checkpointing, offloading, attention, precision.
    full(QWEN_05, 1024, 8, "bf16-true", **EVERY_2, capped=True),
    full(QWEN_05, 1024, 8, "bf16-true", **OFFLOAD, capped=True),
    full(QWEN_05, 1024, 4, "bf16-true", **EAGER),
    full(QWEN_05, 1024, 2, "tf32"),
    full(SMOLLM, 1024, 4, "bf16-true", **EXPANDABLE, capped=True),
    lora(SMOLLM, 1024, 4, 16, **EXPANDABLE, capped=True),
    qlora(SMOLLM, 1024, 4, 16, **EXPANDABLE, capped=True),
    lora(QWEN_05, 1024, 8, 16, **CKPT, **EXPANDABLE, capped=True),
    qlora(LLAMA_8, 1024, 2, 16, **CKPT, **EXPANDABLE, capped=True),
    # Another architecture: learned positions, fused projections, dropout.
    full(GPT2, 256, 8, "bf16-mixed", **EAGER),
    full(GPT2, 1024, 8, "bf16-true", **CKPT),
    lora(GPT2, 1024, 8, 16, lora_targets="attention"),
    # Lengths.
    full(SMOLLM, 256, 16, "bf16-mixed"),
    full(SMOLLM, 256, 1, "bf16-true", optimizer="adamw_torch"),
    full(SMOLLM, 4096, 1, "bf16-true", **EAGER),
    lora(SMOLLM, 4096, 4, 16, **EVERY_2),
    # Between.
    full(QWEN_15, 1024, 1, "bf16-mixed", optimizer="adamw_bnb_8bit"),
    lora(QWEN_15, 1024, 4, 64, optimizer="paged_adamw_8bit"),
    qlora(QWEN_15, 1024, 4, 128, quantization="nf4", **EVERY_2),
    # Large.
    full(LLAMA_3, 1024, 4, "bf16-true", optimizer="adamw_bnb_8bit", **EVERY_2),
    qlora(LLAMA_3, 1024, 4, 16, lora_targets="attention", **CKPT),
    full(LLAMA_8, 1024, 1, "bf16-true", optimizer="adafactor", **CKPT),
    full(LLAMA_8, 1024, 1, "bf16-true", optimizer="sgd", **EVERY_2),
    qlora(LLAMA_8, 4096, 1, 64, **CKPT),
)

TECHNIQUES: tuple[Case, ...] = (
    # Kernels, and what is around the step.
    full(QWEN_05, 1024, 4, "bf16-true", liger=True),
    full(QWEN_05, 1024, 4, "bf16-mixed", liger=True, **CKPT),
    lora(LLAMA_8, 1024, 2, 16, liger=True, **CKPT),
    full(QWEN_05, 1024, 4, "bf16-true", chunked_loss=True),
    # Updates in the backward pass.
    *(
        full(QWEN_05, 1024, 4, "bf16-true", optimizer=optimizer, accumulation=1, **IN_BACKWARD)
        for optimizer in ("adamw_torch_fused", "adamw_bnb_8bit")
    ),
    # Plans of checkpointing.
    full(QWEN_05, 1024, 8, "bf16-true", **_plan("recompute", 12)),
    full(QWEN_05, 1024, 8, "bf16-true", **_plan("products", 12)),
    lora(LLAMA_8, 1024, 2, 16, **_plan("recompute-products", 16)),
    lora(LLAMA_8, 1024, 2, 16, **_plan("offload", 16)),
    full(QWEN_05, 1024, 8, "bf16-true", **_plan("recompute-offload", 6)),
    full(QWEN_05, 1024, 4, "bf16-true", attention="flash_attention_2"),
    full(QWEN_05, 1024, 4, "bf16-true", attention="flash_attention_3"),
    full(QWEN_05, 1024, 4, "bf16-true", attention="flex_attention"),
    full(QWEN_05, 1024, 4, "bf16-mixed", attention="flex_attention", **CKPT),
    full(QWEN_05, 1024, 4, "bf16-true", trainer="trl-sft"),
    lora(LLAMA_8, 1024, 2, 16, trainer="trl-sft", **CKPT),
    full(QWEN_05, 1024, 4, "bf16-true", neftune_noise_alpha=5.0),
    full(QWEN_05, 1024, 4, "bf16-true", torch_empty_cache_steps=1),
    # Segments that grow.
    full(SMOLLM, 4096, 2, "bf16-true", **EXPANDABLE),
    full(GPT2, 1024, 8, "bf16-mixed", **EXPANDABLE),
    full(QWEN_05, 1024, 1, "bf16-mixed", optimizer="adamw_torch", **EXPANDABLE),
    full(QWEN_05, 1024, 1, "bf16-mixed", optimizer="paged_adamw_8bit", **EXPANDABLE),
    full(QWEN_05, 1024, 4, "bf16-true", torch_empty_cache_steps=1, **EXPANDABLE),
    lora(QWEN_15, 1024, 4, 64, **EVERY_2, **EXPANDABLE),
    # fp8, beside what it is to replace.
    full(QWEN_15, 1024, 4, "bf16-autocast", **CKPT),
    full(QWEN_15, 1024, 4, "fp8-autocast", **CKPT),
    full(QWEN_05, 1024, 2, "fp8-mixed"),
    lora(LLAMA_8, 1024, 2, 16, precision="fp8-autocast", **CKPT),
    # Batches of samples kept apart.
    full(QWEN_05, 1024, 4, "bf16-true", batching="padded"),
    lora(QWEN_05, 1024, 4, 16, batching="padded"),
    lora(QWEN_05, 1024, 4, 16, batching="padded", attention="flex_attention"),
    full(QWEN_05, 1024, 4, "bf16-true", batching="padding-free", attention="flash_attention_2"),
    # Adapters.
    lora(QWEN_15, 1024, 4, 16, lora_variant="dora"),
    lora(QWEN_15, 1024, 4, 16, lora_variant="rslora", **CKPT),
    qlora(QWEN_15, 1024, 4, 16, lora_variant="dora", **CKPT),
    adapter("vera", QWEN_15, lora_rank=256, lora_targets="all-linear"),
    adapter("miss", QWEN_15, lora_rank=64, lora_targets="all-linear"),
    adapter("oft", QWEN_15, lora_targets="all-linear"),
    adapter("ia3", QWEN_15),
    adapter("prompt_tuning", QWEN_15, num_virtual_tokens=20),
    adapter("p_tuning", QWEN_15, num_virtual_tokens=20),
    adapter("prefix_tuning", QWEN_15, num_virtual_tokens=20),
    adapter("adaption_prompt", SMOLLM, num_virtual_tokens=20),
    adapter("trainable_tokens", QWEN_15, num_virtual_tokens=20),
    # Quantised bases.
    qlora(QWEN_15, 1024, 4, 16, quantization="int8"),
    qlora(LLAMA_8, 1024, 2, 16, quantization="int8", **CKPT),
    qlora(QWEN_15, 1024, 4, 16, quantization="fp4"),
    # Optimizers of other packages, and those of bitsandbytes that CASES has not.
    *(
        full(QWEN_05, 1024, 1, "bf16-mixed", optimizer=optimizer)
        for optimizer in (
            "adamw_torch_8bit",
            "adamw_torch_4bit",
            "schedule_free_adamw",
            "schedule_free_radam",
            "stable_adamw",
            "grokadamw",
            "ademamix",
            "paged_ademamix_8bit",
            "rmsprop",
            "rmsprop_bnb_8bit",
            "adagrad",
            "galore_adamw",
            "galore_adamw_8bit",
            "galore_adafactor",
            "apollo_adamw",
        )
    ),
    *(
        full(QWEN_05, 1024, 1, "bf16-true", optimizer=optimizer, accumulation=1)
        for optimizer in ("lomo", "adalomo", "galore_adamw_layerwise", "apollo_adamw_layerwise")
    ),
)
"""One setting at a time beside the main roads. No SFTTrainer: a probe runs Transformers' Trainer."""

PROFILED: tuple[Case, ...] = (
    full(QWEN_05, 1024, 8, "bf16-true"),
    lora(LLAMA_8, 1024, 2, 16, **CKPT),
    qlora(LLAMA_8, 1024, 4, 16, **CKPT),
    full(QWEN_15, 1024, 4, "bf16-mixed"),
    lora(QWEN_15, 1024, 4, 16),
    full(SMOLLM, 1024, 4, "bf16-true"),
    full(QWEN_05, 1024, 4, "bf16-mixed", optimizer="adamw_bnb_8bit"),
    full(GPT2, 256, 8, "bf16-mixed"),
    full(SMOLLM, 4096, 2, "bf16-true"),
    full(QWEN_05, 1024, 4, "bf16-true", liger=True),
)
"""Cases whose steps are profiled: one of each method, where the device and where the host bounds."""

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

COMPARISONS: tuple[Comparison, ...] = (
    Comparison(model=QWEN_05, method="full", gpu_mem="16GB"),
    Comparison(model=QWEN_15, method="full", gpu_mem="24GB"),
    Comparison(model=QWEN_15, method="lora", gpu_mem="12GB"),
    Comparison(model=LLAMA_8, method="qlora", gpu_mem="24GB"),
    Comparison(model=SMOLLM, method="full", gpu_mem="8GB"),
    Comparison(model=LLAMA_3, method="full", gpu_mem="80GB"),
    Comparison(model=LLAMA_8, method="lora", gpu_mem="80GB"),
    Comparison(model=QWEN_15, method="full", gpu_mem="12GB"),
)
"""Roomy budgets and tight ones."""

SWEEP_FILE = "studies/cpu-sweep/config.json"
EXAMPLE_FILE = "examples/tiny-llama.json"
CPU_COMPARISONS: tuple[Comparison, ...] = (
    Comparison(
        model=SWEEP_FILE,
        method="full",
        gpu_mem="100MB",
        sequence_length=64,
        effective_batch_size=16,
    ),
    Comparison(
        model=SWEEP_FILE,
        method="full",
        gpu_mem="25MB",
        sequence_length=64,
        effective_batch_size=16,
    ),
    Comparison(
        model=SWEEP_FILE,
        method="lora",
        gpu_mem="30MB",
        sequence_length=64,
        effective_batch_size=16,
    ),
    Comparison(
        model=SWEEP_FILE,
        method="full",
        gpu_mem="50MB",
        sequence_length=128,
        effective_batch_size=20,
    ),
)
"""They say nothing of a card: they show that the comparison works."""
TINY_CASES: tuple[Case, ...] = (
    full(TINY.name, 64, 2, "fp32", **EAGER, capped=True),
    lora(TINY.name, 64, 2, 4, **EAGER),
)
TINY_TECHNIQUES: tuple[Case, ...] = (
    full(TINY.name, 64, 2, "fp32", neftune_noise_alpha=5.0, **EAGER),
    lora(TINY.name, 64, 2, 4, lora_variant="dora", batching="padded", **EAGER),
    full(TINY.name, 64, 2, "bf16-true", attention="flash_attention_3"),
    full(TINY.name, 60, 2, "fp8-mixed", **EAGER),
)
"""The last two cannot be run: a library that is nowhere, a length that fp8 does not take."""
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
TINY_COMPARISONS: tuple[Comparison, ...] = (
    Comparison(
        model=EXAMPLE_FILE,
        method="full",
        gpu_mem="20MB",
        sequence_length=64,
        effective_batch_size=4,
        options=("--allow", "recipe", "--confirm-steps", "0"),
        space=TINY_FIND_SPACE,
    ),
)
