"""The base that trains where the user has named none: TrainingArguments' defaults (transformers 5.23)."""

from __future__ import annotations

import dataclasses
from typing import Any

from autotune.catalogue.gpus import Gpu
from autotune.catalogue.models import ModelSource
from autotune.space.adapters import TARGETS_BY_COLUMN
from autotune.space.config import METHODS, TrainConfig, Workload
from autotune.space.knobs import KNOBS, REQUIRED
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import PRECISIONS, shared_storage
from autotune.space.search_space import usual_batching
from autotune.space.trainers import TRAINERS, Trainer, trainers_of

OPTIMIZER = "adamw_torch_fused"
PRECISION_OF = {
    (True, True): "bf16-true",
    (True, False): "bf16-autocast",
    (False, True): "fp16-mixed",
    (False, False): "fp16-autocast",
}
"""Default precision by whether the card has bfloat16, and whether all weights train. The weights keep the
checkpoint's bfloat16 (`bf16` left False); a card without units for it gets what its owner would choose,
fp16."""
FLOAT32_PRECISION = "fp32"
"""Precision of a float32 checkpoint, whose weights keep that on every card; quantised ones are no longer
float32."""
_WITH_FLOAT32_WEIGHTS = {
    "bf16-true": "bf16-mixed",
    "bf16-autocast": "bf16-mixed",
    "fp16-autocast": "fp16-mixed",
}
"""Precisions by those that differ in the weights' dtype alone."""


def usual_precision(
    method: str, parallelism: str, trainer: str, *, has_bfloat16: bool, is_float32: bool = False
) -> str:
    """Return the trainer's default precision, where the library that shares the run can have it.

    TRL's trainers load every checkpoint as float32 and turn bfloat16 on (trl 1.16 create_model_from_path,
    _BaseConfig.bf16); a student's loss is outside of autocast, and weights that an adapter freezes get the
    checkpoint's bfloat16, as in its examples. Trainer has PRECISION_OF's value, and `is_float32` weights as
    they are. DeepSpeed takes bfloat16 weights for float32 ones unless it keeps float32 ones beside them.
    Losses cannot be scaled where weights are split.
    """
    row = PARALLELISMS[parallelism]
    is_trl = TRAINERS[trainer].is_trl and not TRAINERS[trainer].has_teacher
    if is_float32 and not is_trl:
        return FLOAT32_PRECISION
    precision = PRECISION_OF[has_bfloat16, method == "full"]
    if row.splits and PRECISIONS[precision].grad_scaler:
        return FLOAT32_PRECISION
    trains_float32 = method == "full" and (is_trl or row.library == "deepspeed")
    if is_float32 or trains_float32:
        return _WITH_FLOAT32_WEIGHTS.get(precision, precision)
    return precision


def default_base(
    workload: Workload, gpu: Gpu, model: ModelSource, *, parallelism: str | None = None
) -> TrainConfig:
    """Return TrainingArguments' defaults (transformers 5.23), the least micro-batch: where a search begins.

    An adapter has what KNOBS says of its method. `parallelism` None: ddp on several GPUs.
    """
    method = workload.methods[0]
    if parallelism is None:
        parallelism = "ddp" if workload.num_gpus > 1 else "none"
    is_float32 = model.is_float32 and KNOBS["quantization"].default_for(method) == "none"
    trainer, *_ = trainers_of(workload.task)
    degree = PARALLELISMS[parallelism].data_parallel_size(workload.num_gpus)
    micro_batch = least_micro_batch_for(workload.effective_batch_size // degree, TRAINERS[trainer])
    config = TrainConfig(
        method=method,
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=max(1, workload.effective_batch_size // (micro_batch * degree)),
        sequence_length=workload.sequence_length,
        precision=usual_precision(
            method, parallelism, trainer, has_bfloat16=gpu.has_bfloat16, is_float32=is_float32
        ),
        optimizer=OPTIMIZER,
        attention="sdpa" if "sdpa" in model.attentions else model.attentions[0],
        batching=usual_batching(workload.task),
        trainer=trainer,
        parallelism=parallelism,
        num_gpus=workload.num_gpus,
        **completions_of(TRAINERS[trainer], workload.sequence_length),
        **{
            knob.name: default
            for knob in KNOBS.values()
            if method in knob.methods != METHODS
            and (default := knob.default_for(method)) is not REQUIRED
        },
    )
    if model.checkpoint is not None and method in KNOBS["quantization"].methods:
        config = dataclasses.replace(config, quantization=model.checkpoint.quantization)
    if config.num_splits > 1:
        optimizer, *_ = PARALLELISMS[parallelism].optimizers
        config = dataclasses.replace(config, optimizer=optimizer)
        if method == "lora":
            config = dataclasses.replace(config, lora_targets=TARGETS_BY_COLUMN)
    if PARALLELISMS[parallelism].shares_packed:
        storage = shared_storage(config.precision, config.quantization)
        config = dataclasses.replace(config, quantization_storage=storage)
    return config


def completions_of(trainer: Trainer, sequence_length: int) -> dict[str, Any]:
    """Return the settings of completions that the trainer's own arguments have; none where it writes none."""
    generates = trainer.generates
    if generates is None:
        return {}
    length = generates.max_completion_length
    return {
        "num_generations": generates.num_generations,
        "max_completion_length": length if length < sequence_length else sequence_length // 2,
        "kl_beta": generates.kl_beta,
    }


def least_micro_batch_for(samples: int, trainer: Trainer) -> int:
    """Return the smallest micro-batch that the trainer takes and that divides so many samples.

    All of them where the trainer compares each with all others: more micro-batches would be another run.
    """
    least = max(samples, 2) if trainer.compares_all else trainer.least_micro_batch
    return next((size for size in range(least, samples + 1) if samples % size == 0), least)


def larger_micro_batches(config: TrainConfig) -> list[TrainConfig]:
    """The same settings at each doubled micro-batch that divides the effective batch, largest first."""
    effective = config.effective_batch_size // config.data_parallel_size
    doublings = (config.micro_batch_size * 2**n for n in range(effective.bit_length()))
    sizes = [size for size in doublings if effective % size == 0]
    return [
        dataclasses.replace(
            config, micro_batch_size=size, gradient_accumulation_steps=effective // size
        )
        for size in reversed(sizes)
    ]
