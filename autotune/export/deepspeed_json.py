"""deepspeed.json: ZeRO as predicted. What TrainingArguments also has is `auto`, and taken from there.

Keys of deepspeed 0.19.8 runtime/zero/config.py; what may be `auto` is in transformers 5.23
integrations/deepspeed.py: batch sizes, clipping and precision as TrainingArguments has them, the sizes of
buckets by the model's hidden_size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from autotune.export.carried import Unsaid, unsaid
from autotune.export.exporter import Exporter
from autotune.space.config import TrainConfig, Workload
from autotune.space.parallelisms import PARALLELISMS, ZERO3_SUB_GROUP_ELEMENTS

filename = "deepspeed.json"

_ON_HOST = {"device": "cpu", "pin_memory": True}


def applies(config: TrainConfig) -> bool:
    return PARALLELISMS[config.parallelism].is_deepspeed


def cannot_express(config: TrainConfig) -> tuple[Unsaid, ...]:
    """Return words for all settings but the GPUs'."""
    return unsaid(config, {"parallelism"})


def write(*, workload: Workload, config: TrainConfig, result: Mapping[str, object]) -> str:  # noqa: ARG001
    """Return a JSON object, for accelerate's `deepspeed_config_file` or TrainingArguments(deepspeed=...)."""
    return json.dumps(content(config), indent=2) + "\n"


def content(config: TrainConfig) -> dict[str, object]:
    """The object that the file has."""
    row = PARALLELISMS[config.parallelism]
    zero: dict[str, object] = {
        "stage": row.stage,
        "contiguous_gradients": True,
        "overlap_comm": row.stage == 3,
        "reduce_scatter": True,
        "reduce_bucket_size": "auto",
    }
    if row.stage == 3:
        zero |= {
            # Nothing is gathered ahead: DeepSpeed would run on to what the backward pass uses, and keep up to
            # stage3_max_live_parameters weights, a billion, until then (0.19.8 runtime/zero/
            # partitioned_param_coordinator.py, __params_to_release).
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": "auto",
            # Weights are dropped after each use: by default the last billion is kept.
            "stage3_max_reuse_distance": 0,
            "sub_group_size": ZERO3_SUB_GROUP_ELEMENTS,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    if row.offload:
        zero["offload_optimizer"] = _ON_HOST
        if row.stage == 3:
            zero["offload_param"] = _ON_HOST
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": zero,
    }


EXPORTER = Exporter(
    name="deepspeed",
    filename=filename,
    write=write,
    applies=applies,
    cannot_express=cannot_express,
    part="ZeRO",
)
