"""TrainingArguments that a user has set and autotune does not decide: they go untouched to exports.

None of it changes what a step allocates or launches, so that neither a prediction nor a probe depends
on it. What would (label smoothing), and what a setting decides (the batch size), is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from autotune.errors import nearest
from autotune.export.training_args import installed_fields

MAX_LENGTH = 20_000
"""Most characters of all of them, as JSON."""

_PLAIN_TYPES = {"str", "int", "float", "bool", "None", "list", "dict"}

_DECIDED_BY = {
    "parallelism": "accelerator_config ddp_broadcast_buffers ddp_bucket_cap_mb "
    "ddp_find_unused_parameters ddp_static_graph deepspeed fsdp fsdp_config parallelism_config",
    "activation_checkpointing": "activation_checkpointing activation_checkpointing_kwargs "
    "gradient_checkpointing gradient_checkpointing_kwargs",
    "micro_batch_size": "auto_find_batch_size per_device_train_batch_size",
    "precision": "bf16 fp16 tf32",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "batching": "group_by_length train_sampling_strategy",
    "liger": "liger_kernel_config use_liger_kernel",
    "neftune_noise_alpha": "neftune_noise_alpha",
    "optimizer": "optim optim_args optim_target_modules",
    "torch_compile": "torch_compile torch_compile_backend torch_compile_mode",
    "torch_empty_cache_steps": "torch_empty_cache_steps",
}
DECIDED = {name: setting for setting, names in _DECIDED_BY.items() for name in names.split()}
"""Field of TrainConfig that decides a field of TrainingArguments."""

CHANGES_STEP: dict[str, str] = {
    "debug": "its hooks are not modelled",
    "full_determinism": "its kernels are not modelled",
    "hub_token": "it would be written into files: set HF_TOKEN instead",
    "label_smoothing_factor": "its loss, with a copy of the logits, is not modelled",
    "use_cache": "the cache that it keeps is not modelled",
    "use_cpu": "the run is planned for a GPU",
}
"""Fields that are refused where they are on, and why."""


def read_extra_arguments(values: object, place: str = "extra_arguments.") -> str:
    """Return a mapping from field to JSON value as canonical JSON. ValueError says everything that is wrong.

    `place`: what stands before a field's name there.

    Names and types are those of the installed TrainingArguments. A number in quotes becomes one: YAML takes
    2e-4 for text.
    """
    if not isinstance(values, dict):
        raise ValueError("extra_arguments must be a mapping of TrainingArguments to their values")
    fields = installed_fields()
    problems = [
        f"{place}{str(name)[:80]} {problem}"
        for name, value in values.items()
        if (problem := _problem(name, value, fields))
    ]
    if problems:
        raise ValueError("; ".join(problems))
    return _encoded({name: _number(value, fields[name]) for name, value in values.items()})


def _problem(name: Any, value: object, fields: Mapping[str, str]) -> str:
    if name in DECIDED:
        return f"is decided by config.{DECIDED[name]}"
    if name not in fields:
        known = [field for field in fields if field not in DECIDED]
        return f"is no field of TrainingArguments. {nearest(str(name)[:80], known)}"
    if not isinstance(name, str):
        return "is no name"
    if value and name in CHANGES_STEP:
        return f"cannot be on: {CHANGES_STEP[name]}"
    if name == "max_grad_norm" and not value:
        return "must be a positive number: the predicted step clips its gradients"
    allowed = [part.partition("[")[0] for part in fields[name].split(" | ")]
    # Another name in an annotation, such as an enumeration's, is for Transformers to read.
    if not _PLAIN_TYPES.issuperset(allowed):
        return ""
    number = _number(value, fields[name])
    kind = "None" if value is None else type(number).__name__
    if kind not in allowed and not (kind == "int" and "float" in allowed):
        return f"is of type {kind} and should be {' or '.join(allowed)}"
    return ""


def _number(value: object, annotation: str) -> object:
    """Return the number that a text is, where the field takes a float and no text."""
    kinds = annotation.split(" | ")
    if not isinstance(value, str) or "float" not in kinds or "str" in kinds:
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _encoded(values: Mapping[str, object]) -> str:
    text = ""
    try:
        # Piece by piece: a few aliases in YAML can stand for more than memory holds.
        for piece in json.JSONEncoder(allow_nan=False).iterencode(values):
            text += piece
            if len(text) > MAX_LENGTH:
                break
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError("extra_arguments must be text, numbers, lists and mappings") from error
    if len(text) > MAX_LENGTH:
        raise ValueError(f"extra_arguments have more than {MAX_LENGTH:,} characters")
    return text
