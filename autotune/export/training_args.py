"""training_args.json: keyword arguments of `transformers.TrainingArguments`.

Holds what autotune decides, and what the user has set beside it (extra_arguments): learning rate,
epochs and logging stay the user's.
The names are those of the installed version. It is asked without being imported (7 s, and torch
belongs into the worker): the class's fields are read from the syntax tree of its source file.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autotune.config import PARALLELISMS, PRECISIONS, TrainConfig, Workload
from autotune.knobs import KNOBS
from autotune.optimizers import OPTIMIZERS

name = "training-args"
filename = "training_args.json"

OUTPUT_FOLDER = "output"
"""`output_dir` until the user names another."""

_USERS = ("output_dir", "max_grad_norm")
"""Written out in the files, and never changed in arguments that somebody has."""
_OFF: dict[str, object] = {
    "torch_compile": False,
    "torch_compile_backend": None,
    "torch_compile_mode": None,
    "use_liger_kernel": False,
    "neftune_noise_alpha": None,
    "torch_empty_cache_steps": None,
    "train_sampling_strategy": "random",
    "group_by_length": False,
    "activation_checkpointing_kwargs": None,
    "gradient_checkpointing_kwargs": None,
}
"""What `training_arguments` leaves out where a configuration does without."""

_GROUPING: dict[str, object] = {"train_sampling_strategy": "group_by_length"}
_OLD_GROUPING: dict[str, object] = {"group_by_length": True}
_CHECKPOINTING = ("activation_checkpointing", "activation_checkpointing_kwargs")
_OLD_CHECKPOINTING = ("gradient_checkpointing", "gradient_checkpointing_kwargs")


def write(*, workload: Workload, config: TrainConfig, result: Mapping[str, object]) -> str:  # noqa: ARG001
    """A JSON object for `TrainingArguments(**json.load(file))` of the installed version."""
    return (
        json.dumps(training_arguments(config, installed_fields(), workload.extra), indent=2) + "\n"
    )


def training_arguments(
    config: TrainConfig,
    fields: Collection[str] | None = None,
    extra: Mapping[str, object] = MappingProxyType({}),
) -> dict[str, object]:
    """The keyword arguments. `fields` are those of the class at hand; None means the newest names.

    `extra` are a Workload's, over which goes what a setting decides. `max_grad_norm` is Trainer's
    default, written out because clipping's memory was predicted.
    `tf32` needs an Ampere card or later, as TrainingArguments itself says when it is loaded.
    """
    precision = PRECISIONS[config.precision]
    arguments: dict[str, object] = {
        "output_dir": OUTPUT_FOLDER,
        "max_grad_norm": 1.0,
        **extra,
        "per_device_train_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "optim": config.optimizer,
        **dict(OPTIMIZERS[config.optimizer].arguments),
        # What is left off here can come from the environment: `environment`.
        "bf16": precision.autocast and precision.compute_dtype == "bfloat16" and not precision.fp8,
        "fp16": precision.autocast and precision.compute_dtype == "float16",
    }
    row = PARALLELISMS[config.parallelism]
    if row.library == "torch" and row.stage == 3 and config.gradient_accumulation_steps > 1:
        # FSDP2: without it every GPU keeps whole gradients between micro-steps (accelerate 1.15
        # Accelerator.no_sync). DeepSpeed reduces in every micro-step anyway.
        arguments["accelerator_config"] = {
            "gradient_accumulation_kwargs": {"sync_each_batch": True}
        }
    if precision.compute_dtype == "float32":
        arguments["tf32"] = precision.tf32
    if config.batching == "grouped":
        strategy = (
            _GROUPING if fields is None or "train_sampling_strategy" in fields else _OLD_GROUPING
        )
        arguments |= strategy
    is_new = fields is None or _CHECKPOINTING[0] in fields
    switch, options = _CHECKPOINTING if is_new else _OLD_CHECKPOINTING
    arguments[switch] = config.activation_checkpointing > 0
    if config.activation_checkpointing:
        # Options that say what is the case anyway are left out: older versions refuse them.
        choices: dict[str, object] = {"use_reentrant": False}
        if config.activation_checkpointing > 1:
            choices["every_n_layers"] = config.activation_checkpointing
        if config.activation_offloading:
            choices["offload"] = True
        arguments[options] = choices
    for knob in KNOBS.values():
        if knob.arguments is not None:
            arguments |= knob.arguments(getattr(config, knob.name))
    return arguments | config.loader_arguments


def environment(config: TrainConfig) -> dict[str, str]:
    """Variables that the Trainer's process needs: TrainingArguments has no field for fp8.

    transformers 5.23 training_args.py takes the mixed precision from the first; accelerate 1.15
    (utils/dataclasses.py, AORecipeKwargs) would by default prepare the weights for FSDP2, which on one
    GPU puts tensors into the model that the optimizer does not have: they would never be trained.
    """
    if not PRECISIONS[config.precision].fp8:
        return {}
    return {
        "ACCELERATE_MIXED_PRECISION": "fp8",
        "ACCELERATE_FP8_BACKEND": "AO",
        "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "false",
        "ACCELERATE_FP8_PAD_INNER_DIM": "true",
    }


def decided_arguments(config: TrainConfig, fields: Collection[str]) -> dict[str, Any]:
    """What arguments that somebody has must say to be this configuration: off included, no more.

    `fields` are those of their class; an SFTConfig's say how the dataset is cut, too.
    """
    newest = "activation_checkpointing" in fields
    alias = "gradient_checkpointing" if newest else "activation_checkpointing"
    known = [name for name in fields if not name.startswith(alias)]
    decided = {name: value for name, value in _OFF.items() if name in known}
    decided |= training_arguments(config, fields)
    for name in _USERS:
        del decided[name]
    if "padding_free" in fields:
        decided["padding_free"] = config.batching == "padding-free"
    if "packing" in fields:
        # Padding-free SFTTrainer wants samples that are cut off already (trl 1.16, its __init__).
        length = None if config.batching == "padding-free" else config.sequence_length
        decided |= {"max_length": length, "packing": config.batching == "packed"}
        if config.batching == "packed":
            # One stream cut into blocks: what was priced. TRL's own default joins samples unpadded.
            decided["packing_strategy"] = "wrapped"
    return decided


@functools.cache
def installed_fields() -> Mapping[str, str] | None:
    """Fields of the installed TrainingArguments and their annotations; None without Transformers."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    return fields_of(Path(spec.origin).with_name("training_args.py").read_text(encoding="utf-8"))


def fields_of(source: str) -> Mapping[str, str]:
    """Names that the body of class TrainingArguments annotates, and as what."""
    (body,) = (
        node.body
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments"
    )
    return MappingProxyType(
        {
            node.target.id: ast.unparse(node.annotation)
            for node in body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
    )
