"""The published training runs that are predicted, what their programs did, and why others are left out."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from published_peft import peft_plans
from published_peft import why_left_out as why_peft_left_out
from published_plan import Plan, Program

from autotune.catalogue.models import ModelSource, resolve
from autotune.common.units import MIB
from autotune.space.config import TrainConfig

# distilbert-base-uncased is not in the catalogue: transformers' DistilBertConfig defaults.
DISTILBERT = ModelSource(
    name="distilbert-base-uncased",
    config={
        "model_type": "distilbert",
        "dim": 768,
        "hidden_dim": 3072,
        "n_layers": 6,
        "n_heads": 12,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
    },
    origin="file",
    path=Path("config.json"),
    requires_remote_code=False,
)

FP16_TRUE = "float16 weights without autocast: taken as bfloat16, which has the same bytes"


def _rasbt_plans() -> dict[str, Plan]:
    """rasbt/LLM-finetuning-scripts: Lightning Fabric, zero_grad between forward and backward."""
    precisions = {
        "rasbt-001": "fp32",
        "rasbt-002": "tf32",
        "rasbt-003": "tf32",
        "rasbt-004": "fp16-mixed",
        "rasbt-005": "fp16-mixed",
        "rasbt-006": "bf16-mixed",
        "rasbt-007": "bf16-mixed",
        "rasbt-008": "bf16-true",
        "rasbt-009": "bf16-true",
    }
    quirks = (
        "zero_grad after the next forward pass: gradients live through it",
        "transformers 4.28: masked scores live through the attention",
    )
    return {
        name: Plan(
            model=DISTILBERT,
            gpu="A100-SXM4-40GB",
            task="sequence-classification",
            config=TrainConfig(
                method="full",
                micro_batch_size=12,
                gradient_accumulation_steps=1,
                sequence_length=512,
                precision=precision,
                optimizer="adamw_torch",
                attention="eager",
            ),
            metric="reserved",
            program=Program(
                gradients="dropped before the backward pass",
                clips=False,
                parameter_groups=1,
                attention="DistilBERT 4.28",
            ),
            quirks=quirks + ((FP16_TRUE,) if name == "rasbt-008" else ()),
        )
        for name, precision in precisions.items()
    }


HFPERF_CONTEXT_BYTES = 1343 * MIB
"""Stated on the same page (row hfperf-010)."""


def _hfperf_plans() -> dict[str, Plan]:
    """transformers docs perf_train_gpu_one.mdx @0016acf7: the Trainer of January 2022, torch 1.10."""
    model = resolve("google-bert/bert-large-uncased")
    # id: precision, micro-batch, accumulation, optimizer, checkpointing
    runs = {
        "hfperf-001": ("fp32", 4, 1, "adamw_torch_fused", 0),
        "hfperf-002": ("fp32", 1, 4, "adamw_torch_fused", 0),
        "hfperf-003": ("fp32", 1, 4, "adamw_torch_fused", 1),
        "hfperf-004": ("fp16-mixed", 4, 1, "adamw_torch_fused", 0),
        "hfperf-005": ("fp16-mixed", 1, 4, "adamw_torch_fused", 1),
        "hfperf-006": ("fp32", 4, 1, "adafactor", 0),
        "hfperf-007": ("fp16-mixed", 1, 4, "adafactor", 1),
        "hfperf-008": ("fp32", 4, 1, "adamw_bnb_8bit", 0),
        "hfperf-009": ("fp16-mixed", 1, 4, "adamw_bnb_8bit", 1),
    }
    plans = {}
    for name, (precision, micro_batch, accumulation, optimizer, checkpointing) in runs.items():
        quirks = [
            "torch 1.10: softmax keeps its input, zero_grad keeps the gradients",
            "transformers 4.16: a float32 mask is added to the scores",
        ]
        if optimizer == "adamw_torch_fused":
            quirks.append("transformers' own AdamW, parameter by parameter: taken as the fused one")
        if optimizer == "adamw_bnb_8bit":
            quirks.append("its own Adam8bit: embeddings' state in 8 bits")
        plans[name] = Plan(
            model=model,
            gpu="V100-SXM2-16GB",
            task="sequence-classification",
            config=TrainConfig(
                method="full",
                micro_batch_size=micro_batch,
                gradient_accumulation_steps=accumulation,
                sequence_length=512,
                precision=precision,
                optimizer=optimizer,
                activation_checkpointing=checkpointing,
                attention="eager",
            ),
            metric="device",
            context_bytes=HFPERF_CONTEXT_BYTES,
            program=Program(
                gradients="kept", attention="BERT 4.16, torch 1.10", embedding_state_32bit=False
            ),
            quirks=tuple(quirks),
        )
    return plans


def neox_kept(config: dict[str, Any], tokens: int, *, cache: bool) -> tuple[tuple[str, int], ...]:
    """What transformers 4.40's GPT-NeoX and the book's loop hold after optimizer.step().

    `outputs` is alive: logits and, with the cache, each layer's key (float32: multiplied by float32
    cosines) and value, a view that keeps the fused projection of query, key and value.
    Source: transformers 4.40.1 models/gpt_neox/modeling_gpt_neox.py; onlybooks/llm chapter_5.ipynb.
    """
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    positions = config["max_position_embeddings"]
    rotary = int(width // config["num_attention_heads"] * config["rotary_pct"])
    kept = [
        ("causal masks, a byte per pair", layers * positions**2),
        ("cosines and sines in float32, per layer", layers * 2 * positions * rotary * 4),
    ]
    if cache:
        kept.append(("logits", tokens * config["vocab_size"] * 2))
        kept.append(("keys in float32", layers * tokens * width * 4))
        kept.append(("fused projections, held by the values", layers * tokens * 3 * width * 2))
    return tuple(kept)


def _kbook_plans() -> dict[str, Plan]:
    """onlybooks/llm chapter_5.ipynb: a loop of its own; fp16 weights without autocast on a T4."""
    model = resolve("EleutherAI/polyglot-ko-1.3b")
    # id: micro-batch, accumulation, checkpointing, method
    runs = {
        "kbook-002": (4, 1, 0, "full"),
        "kbook-003": (8, 1, 0, "full"),
        "kbook-005": (4, 4, 0, "full"),
        "kbook-006": (16, 1, 1, "full"),
        "kbook-007": (16, 1, 0, "lora"),
        "kbook-008": (16, 1, 1, "qlora"),
    }
    config = model.config
    embeddings_elements = 2 * config["vocab_size"] * config["hidden_size"]
    plans = {}
    for name, (micro_batch, accumulation, checkpointing, method) in runs.items():
        tokens = micro_batch * 256
        kept = neox_kept(config, tokens, cache=not checkpointing)
        quirks = [FP16_TRUE, "transformers 4.40: masks and rotary tables are buffers"]
        if checkpointing:
            logits_bytes = 4 if method == "qlora" else 2
            kept += (("logits", tokens * config["vocab_size"] * logits_bytes),)
            quirks.append("its loop holds the logits")
        else:
            quirks.append("its loop holds the outputs: logits and a cache of keys and values")
        if method == "lora":
            # PEFT 0.10 leaves the adapter in float16; PEFT today casts it to float32.
            kept += (("adapter, its gradient and state in 16 bits", -8 * 1_572_864),)
            quirks.append("PEFT 0.10: adapter in 16 bits")
        if method == "qlora":
            kept += (
                ("embedding and head in float32", 2 * embeddings_elements),
                ("embedding's output and its gradient", 2 * tokens * config["hidden_size"] * 4),
            )
            quirks.append(
                "prepare_model_for_kbit_training: 16-bit weights in float32; the embedding's output "
                "requires a gradient and keeps it"
            )
        adapter = {} if method == "full" else {"lora_rank": 8, "lora_targets": "query_key_value"}
        if name == "kbook-003":
            quirks.append("the notebook itself prints 11.113 GiB")
        plans[name] = Plan(
            model=model,
            gpu="T4",
            config=TrainConfig(
                method=method,
                micro_batch_size=micro_batch,
                gradient_accumulation_steps=accumulation,
                sequence_length=256,
                precision="bf16-true",
                optimizer="adamw_torch",
                activation_checkpointing=checkpointing,
                attention="eager",
                quantization="nf4-double" if method == "qlora" else "none",
                **adapter,
            ),
            metric="step end",
            program=Program(clips=False, parameter_groups=1, kept=kept),
            quirks=tuple(quirks),
        )
    return plans


def _hf4bit_plans() -> dict[str, Plan]:
    """huggingface/blog 4bit-transformers-bitsandbytes.md @1b4d85d9: fits or not on a T4."""
    # id: model, length, compute dtype, quantisation, checkpointing
    runs = {
        "hf4bit-003": ("Llama-2-7b-hf", 512, "bf16", "nf4", 0),
        "hf4bit-004": ("Llama-2-7b-hf", 512, "bf16", "nf4", 0),
        "hf4bit-005": ("Llama-2-7b-hf", 1024, "bf16", "nf4", 0),
        "hf4bit-006": ("Llama-2-7b-hf", 1024, "bf16", "nf4", 0),
        "hf4bit-007": ("Llama-2-7b-hf", 1024, "bf16", "nf4", 1),
        "hf4bit-009": ("Llama-2-13b-hf", 512, "bf16", "nf4", 0),
        "hf4bit-010": ("Llama-2-13b-hf", 512, "fp16", "nf4", 0),
        "hf4bit-011": ("Llama-2-13b-hf", 512, "fp16", "nf4", 1),
        "hf4bit-012": ("Llama-2-13b-hf", 1024, "fp16", "nf4", 1),
        "hf4bit-013": ("Llama-2-13b-hf", 1024, "fp16", "nf4-double", 1),
    }
    quirks = (
        "LoRA settings are not published: taken to be rank 64 on q_proj and v_proj",
        "LLaMA 1 has the shapes of Llama 2; fp4 has the bytes of nf4",
    )
    return {
        name: Plan(
            model=resolve(model),
            gpu="T4",
            config=TrainConfig(
                method="qlora",
                micro_batch_size=1,
                gradient_accumulation_steps=4,
                sequence_length=length,
                precision=f"{compute}-autocast",
                optimizer="adamw_torch",
                activation_checkpointing=checkpointing,
                attention="eager",
                quantization=quantization,
                lora_rank=64,
                lora_targets="q_proj,v_proj",
            ),
            metric="fits",
            quirks=quirks,
        )
        for name, (model, length, compute, quantization, checkpointing) in runs.items()
    }


@functools.cache
def plans() -> dict[str, Plan]:
    """Every row that is predicted."""
    return {
        **peft_plans(),
        **_kbook_plans(),
        **_rasbt_plans(),
        **_hfperf_plans(),
        **_hf4bit_plans(),
    }


def why_left_out(row: dict[str, str]) -> str:
    """Why a row of the table is not predicted; raises KeyError for a row that should be."""
    name = row["id"]
    group = name.rpartition("-")[0]
    if group in ("litgpt-rt", "litgpt-ch"):
        return "litgpt's own modelling code and loss"
    if group == "qwen1":
        return "the repository's own modelling code; which memory is meant is not stated"
    if group == "ao":
        return "torchtune's, torchao's or timm's modelling code"
    if group == "peft":
        return why_peft_left_out(name)
    return {
        "rasbt-010": "float64 is no precision of autotune",
        "hfperf-010": "no model: the context, taken from it for the rows beside it",
        "hfperf-011": "no training: weights after loading",
        "kbook-001": "no training: weights after loading",
        "kbook-004": "no figure: out of memory at the second step, whose outputs its loop holds",
        "kbook-009": "no training: weights after loading",
        "hf4bit-001": "int8 weights are no quantisation of autotune",
        "hf4bit-002": "int8 weights are no quantisation of autotune",
        "hf4bit-008": "int8 weights are no quantisation of autotune",
    }[name]
