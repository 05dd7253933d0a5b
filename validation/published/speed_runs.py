"""The published training runs whose time is predicted, what is assumed of each, and why others are left out.

The figures are the column `throughput` of studies/published-memory/published_memory.csv. A run is a
Plan, as for its memory, and the seconds of one optimizer step that follow from the figure.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from published_peft import why_left_out as why_peft_left_out
from published_plan import Plan, published
from published_runs import plans

from autotune.catalogue.models import ModelSource, resolve
from autotune.space.config import TrainConfig

CHOSEN_WITH = (
    *("qwen1-001", "qwen1-025", "qwen1-043"),  # the host's time of a recomputed operation
    *("litgpt-ch-012", "litgpt-ch-024"),  # the bandwidth at which 4-bit weights are unpacked
)
"""With these rows a constant of roofline.py was chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A published time, and the run that it is of."""

    plan: Plan
    group: str
    """Runs of one program on one card."""
    published_seconds: float
    """Of an optimizer step."""
    evidence: str
    """A: every setting that decides the time is published. B: something is assumed. C: besides, the
    program is known to spend time on what no Trainer does."""
    assumed: tuple[str, ...]
    resolution: float
    """Half of the last digit of the published figure, as a share of it."""


def _source(name: str, **config: Any) -> ModelSource:
    return ModelSource(
        name=name,
        config=config,
        origin="file",
        path=Path("config.json"),
        requires_remote_code=False,
    )


def _qwen(name: str, layers: int, width: int, inner: int, vocabulary: int) -> ModelSource:
    """Qwen 1's shape in Qwen2's code: biases on query, key and value, heads of 128, untied."""
    return _source(
        name,
        model_type="qwen2",
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=width // 128,
        num_key_value_heads=width // 128,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )


# QwenLM/Qwen README.md, table of model sizes, and config.json of each: intermediate_size is of both
# halves of the gated MLP.
QWEN = {
    "1.8B": _qwen("Qwen-1_8B", 24, 2048, 5504, 151936),
    "7B": _qwen("Qwen-7B", 32, 4096, 11008, 151936),
    "14B": _qwen("Qwen-14B", 40, 5120, 13696, 152064),
}
# litgpt config.py: phi-1_5, phi-2, stablelm-base-alpha-3b.
PHI_1_5 = _source(
    "phi-1_5",
    model_type="phi",
    num_hidden_layers=24,
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=32,
    vocab_size=51200,
    max_position_embeddings=2048,
    partial_rotary_factor=0.5,
)
PHI_2 = _source(
    "phi-2",
    model_type="phi",
    num_hidden_layers=32,
    hidden_size=2560,
    intermediate_size=10240,
    num_attention_heads=32,
    vocab_size=51200,
    max_position_embeddings=2048,
    partial_rotary_factor=0.4,
)
STABLELM_3B = _source(
    "stablelm-base-alpha-3b",
    model_type="gpt_neox",
    num_hidden_layers=16,
    hidden_size=4096,
    intermediate_size=16384,
    num_attention_heads=32,
    vocab_size=50688,
    max_position_embeddings=4096,
    rotary_pct=0.25,
)

PEFT_LENGTH = (
    "batches of varying length: taken to be the mean, 210 tokens (4,198,051 tokens in 5,000 steps of 4), "
    "without padding"
)
PEFT_SYNCHRONISES = "its loop pads the batch and waits for the GPU in every step"


def _peft() -> dict[str, Timed]:
    """Every run of the method comparison that is described for its memory: means of 5,000 steps."""
    timed = {}
    table = published()
    for name, plan in plans().items():
        if not name.startswith("peft"):
            continue
        seconds = re.search(r"([\d.]+) s/step", table[name]["notes"])
        assert seconds is not None, name
        timed[name] = Timed(
            plan=replace(plan, config=replace(plan.config, sequence_length=210)),
            group="peft, L40S",
            published_seconds=float(seconds[1]),
            evidence="B",
            assumed=(PEFT_LENGTH, PEFT_SYNCHRONISES),
            resolution=0.0001,
        )
    return timed


# IMDb's 35,000 and 5,000 reviews, the last of an uneven batch dropped; times are of three epochs of both.
RASBT_STEPS, RASBT_VALIDATION_STEPS = 2916, 416
FORWARD_SHARE = 1 / 3
"""Of a micro-step: a forward pass against forward and backward of all weights."""


def _rasbt() -> dict[str, Timed]:
    timed = {}
    table = published()
    steps = 3 * (RASBT_STEPS + FORWARD_SHARE * RASBT_VALIDATION_STEPS)
    for name, plan in plans().items():
        if not name.startswith("rasbt"):
            continue
        minutes = float(table[name]["throughput"])
        timed[name] = Timed(
            plan=plan,
            group="DistilBERT, A100",
            published_seconds=minutes * 60 / steps,
            evidence="B",
            assumed=(
                "validation inside the total: a third of a step for each of its batches",
                "which A100 is not stated: taken to be the one of 40 GB",
                "its loop computes an accuracy in every step",
            ),
            resolution=0.005 / minutes,
        )
    return timed


def _hfperf() -> dict[str, Timed]:
    timed = {}
    table = published()
    for name, plan in plans().items():
        if not name.startswith("hfperf"):
            continue
        samples_per_second = float(table[name]["throughput"])
        assumed = ["transformers 4.16, torch 1.10: their attention, today's code else"]
        config = plan.config
        if config.optimizer == "adamw_torch_fused":
            # It reads and writes as many tensors, eighteen, as foreach does.
            config = replace(config, optimizer="adamw_torch")
            assumed.append("transformers' own AdamW, parameter by parameter: taken as foreach")
        timed[name] = Timed(
            plan=replace(plan, config=config),
            group="BERT, V100",
            published_seconds=plan.config.effective_batch_size / samples_per_second,
            evidence="B",
            assumed=tuple(assumed),
            resolution=0.005 / samples_per_second,
        )
    return timed


def _qwen1() -> dict[str, Timed]:
    """QwenLM/Qwen README.md and finetune.py: the Trainer, model code of its own."""
    # id: model, length, seconds of eight micro-steps
    runs = {
        "qwen1-001": ("1.8B", 256, 1.0),
        "qwen1-003": ("1.8B", 1024, 1.1),
        "qwen1-005": ("1.8B", 4096, 3.3),
        "qwen1-025": ("7B", 256, 1.2),
        "qwen1-027": ("7B", 1024, 2.8),
        "qwen1-029": ("7B", 4096, 10.1),
        "qwen1-043": ("14B", 256, 1.6),
        "qwen1-045": ("14B", 1024, 4.4),
        "qwen1-047": ("14B", 4096, 17.0),
    }
    return {
        name: Timed(
            plan=Plan(
                model=QWEN[size],
                gpu="A100-SXM4-80GB",
                config=TrainConfig(
                    method="lora",
                    lora_rank=64,
                    lora_targets="all-linear",
                    micro_batch_size=1,
                    gradient_accumulation_steps=8,
                    sequence_length=length,
                    precision="bf16-autocast",
                    optimizer="adamw_torch",
                    activation_checkpointing=1,
                    attention="flash_attention_2",
                ),
                metric="time",
            ),
            group="Qwen, A100",
            published_seconds=seconds,
            evidence="B",
            assumed=(
                "Qwen 1's own modelling code: taken as Qwen2's of the same shape, whose query, key and "
                "value have an adapter each",
                "rank and targets are finetune.py's defaults",
            ),
            resolution=0.05 / seconds,
        )
        for name, (size, length, seconds) in runs.items()
    }


# Means in tokens. The data set's card: 918 bytes a sample hold instruction, input and output twice, and a
# template of 167 once, so a sample with its template has 534; 4 bytes a token. Of several that are padded
# to the longest: [judgement] the mean and 0.56 or 1.03 standard deviations of 65 (order statistics).
ALPACA_TOKENS = {1: 133, 2: 170, 4: 200, 8: 226}
LITGPT_LENGTH = (
    "Alpaca's lengths vary: taken to be 133 tokens, 170, 200 and 226 for the longest of 2, 4 and 8"
)
LITGPT_CODE = "litgpt's own modelling code and LoRA: taken as Transformers' of the same shape"
LITGPT_WAITS = "its loop reads the loss, and so waits for the GPU, in every micro-step"
# litgpt lora.py @8641822, LoRAQKVLinear.zero_pad: where query, key and value do not all have an adapter.
LITGPT_INDEX = (
    "with adapters on query and value alone it makes, in each layer, an index of as many Python integers "
    "as they have columns, and waits until the GPU has it"
)
OLD_BITSANDBYTES = "bitsandbytes 0.41 to 0.43, whose 4-bit weights are unpacked by branches"


def _litgpt_config(
    micro_batch: int,
    accumulation: int,
    quantization: str,
    *,
    rank: int = 0,
    targets: str = "",
    attention: str = "sdpa",
) -> TrainConfig:
    adapter = {} if rank == 0 else {"lora_rank": rank, "lora_targets": targets}
    quantized = quantization != "none"
    return TrainConfig(
        method="qlora" if quantized else "lora" if adapter else "full",
        quantization=quantization,
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        sequence_length=ALPACA_TOKENS[micro_batch],
        precision="bf16-true",
        optimizer="paged_adamw_32bit" if quantized else "adamw_torch",
        attention=attention,
        **adapter,
    )


def _litgpt_assumed(config: TrainConfig, *, is_partial: bool) -> tuple[str, ...]:
    assumed = [LITGPT_CODE, LITGPT_LENGTH, LITGPT_WAITS]
    if is_partial:
        assumed.append(LITGPT_INDEX)
    if config.quantization != "none":
        assumed.append(OLD_BITSANDBYTES)
    return tuple(assumed)


def _litgpt_table() -> dict[str, Timed]:
    """Lightning-AI/litgpt tutorials/resource-tables.md: minutes of a thousand micro-steps."""
    llama_7b, llama_13b = resolve("meta-llama/Llama-2-7b-hf"), resolve("meta-llama/Llama-2-13b-hf")
    neox, others = "query_key_value", "q_proj,v_proj"
    # id: model, targets, micro-batch, quantisation, minutes
    runs = {
        "litgpt-rt-001": (PHI_1_5, others, 1, "none", 1.62),
        "litgpt-rt-003": (PHI_1_5, others, 1, "nf4-double", 1.87),
        "litgpt-rt-005": (PHI_1_5, others, 4, "none", 1.70),
        "litgpt-rt-007": (STABLELM_3B, neox, 1, "nf4", 1.82),
        "litgpt-rt-009": (STABLELM_3B, neox, 2, "none", 1.33),
        "litgpt-rt-011": (llama_7b, others, 1, "none", 2.36),
        "litgpt-rt-013": (llama_7b, others, 1, "nf4-double", 3.83),
        "litgpt-rt-017": (llama_13b, others, 1, "nf4", 6.38),
    }
    timed = {}
    for name, (model, targets, micro_batch, quantization, minutes) in runs.items():
        accumulation = 128 // micro_batch
        config = _litgpt_config(micro_batch, accumulation, quantization, rank=8, targets=targets)
        timed[name] = Timed(
            plan=Plan(model=model, gpu="A100-SXM4-40GB", config=config, metric="time"),
            group="litgpt query and value, A100",
            published_seconds=minutes * 60 / 1000 * accumulation,
            evidence="C",
            assumed=_litgpt_assumed(config, is_partial=True),
            resolution=0.005 / minutes,
        )
    return timed


ALPACA2K_SAMPLES = 1900
"""2,000, of which a share of 0.05 is for validation: every 100 steps and at the end, 100 samples."""


def _litgpt_hub() -> dict[str, Timed]:
    """Lightning-AI/litgpt config_hub/finetune: minutes of whole runs on an A10G."""
    few, many = "q_proj,v_proj", "all-linear"
    neox, falcon = "query_key_value", "query_key_value"
    # id: model, rank, targets, micro-batch, accumulation, quantisation, epochs
    runs: dict[str, tuple[ModelSource, int, str, int, int, str, int]] = {
        "litgpt-ch-002": (resolve("tiiuae/falcon-7b"), 32, falcon, 1, 8, "nf4", 4),
        "litgpt-ch-008": (resolve("google/gemma-2-2b"), 16, many, 2, 3, "nf4", 2),
        "litgpt-ch-010": (resolve("google/gemma-2-9b"), 16, many, 1, 6, "nf4", 2),
        "litgpt-ch-012": (resolve("meta-llama/Llama-2-7b-hf"), 32, few, 2, 4, "nf4", 4),
        "litgpt-ch-014": (resolve("meta-llama/Meta-Llama-3-8B"), 32, few, 2, 4, "nf4", 2),
        "litgpt-ch-016": (resolve("meta-llama/Llama-3.1-8B"), 32, few, 1, 8, "none", 2),
        "litgpt-ch-018": (resolve("meta-llama/Llama-3.2-1B"), 0, "", 4, 16, "none", 1),
        "litgpt-ch-020": (resolve("meta-llama/Llama-3.2-1B"), 32, few, 2, 4, "nf4", 2),
        "litgpt-ch-022": (resolve("meta-llama/Llama-3.2-3B"), 32, few, 1, 8, "none", 2),
        "litgpt-ch-024": (resolve("mistralai/Mistral-7B-v0.1"), 32, few, 2, 4, "none", 4),
        "litgpt-ch-026": (resolve("mistralai/Mistral-7B-v0.1"), 32, few, 2, 4, "none", 4),
        "litgpt-ch-028": (PHI_2, 8, many, 4, 2, "none", 1),
        "litgpt-ch-030": (resolve("microsoft/Phi-3-mini-4k-instruct"), 0, "", 4, 2, "none", 1),
        "litgpt-ch-032": (resolve("microsoft/Phi-3-mini-4k-instruct"), 8, many, 4, 2, "nf4", 1),
        "litgpt-ch-034": (STABLELM_3B, 32, neox, 1, 8, "nf4", 4),
        "litgpt-ch-036": (
            resolve("TinyLlama/TinyLlama-1.1B-Chat-v1.0"), 32, many, 8, 1, "none", 3,
        ),
    }  # fmt: skip
    table = published()
    timed = {}
    for name, (
        model,
        rank,
        targets,
        micro_batch,
        accumulation,
        quantization,
        epochs,
    ) in runs.items():
        minutes = float(table[name]["throughput"])
        config = _litgpt_config(
            micro_batch,
            accumulation,
            quantization,
            rank=rank,
            targets=targets,
            attention="eager" if model.config["model_type"] == "gemma2" else "sdpa",
        )
        num_steps = epochs * ALPACA2K_SAMPLES / config.effective_batch_size
        num_validations = num_steps // 100 + 1
        validation_steps = FORWARD_SHARE * num_validations * 100 / config.effective_batch_size
        is_partial = targets not in ("", many)
        timed[name] = Timed(
            plan=Plan(model=model, gpu="A10G", config=config, metric="time"),
            group="litgpt query and value, A10G" if is_partial else "litgpt, A10G",
            published_seconds=minutes * 60 / (num_steps + validation_steps),
            evidence="C" if is_partial else "B",
            assumed=(
                *_litgpt_assumed(config, is_partial=is_partial),
                "validation inside the total: a third of a step for as many samples",
                "Alpaca2k's lengths are taken to be Alpaca's",
            ),
            resolution=0.005 / minutes,
        )
    return timed


@functools.cache
def timed_runs() -> dict[str, Timed]:
    """Every row whose time is predicted."""
    return {
        **_peft(),
        **_qwen1(),
        **_rasbt(),
        **_hfperf(),
        **_litgpt_table(),
        **_litgpt_hub(),
    }


_LEFT_OUT = {
    "rasbt-010": "float64 is no precision of autotune",
    "litgpt-ch-004": "the model is not in the catalogue",
    "litgpt-ch-006": "the model is not in the catalogue",
}
_METHODS = {
    "adapter": "LLaMA-Adapter is no method of autotune",
    "qlora (GPTQ int4)": "GPTQ's int4 is no quantisation of autotune; ZeRO-2 on one GPU",
    "full": "DeepSpeed's step: which stage is not stated",
}


def why_left_out(row: dict[str, str]) -> str:
    """Why a row with a throughput is not predicted; raises KeyError for one that should be."""
    name, method = row["id"], row["method"]
    group = name.rpartition("-")[0]
    if name in _LEFT_OUT:
        return _LEFT_OUT[name]
    if group == "ao":
        if row["compile"] == "yes":
            return "torch.compile's kernels are not predicted"
        return "the model's shape or the tokens of a step are not stated"
    if group == "litgpt-rt" and method.startswith("adapter"):
        return _METHODS["adapter"]
    if group == "peft":
        return why_peft_left_out(name)
    if group == "qwen1" and "modules_to_save" in row["lora_targets"]:
        return "whole modules trained beside the adapter are no setting of autotune"
    return _METHODS[method]
