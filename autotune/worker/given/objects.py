"""A configuration as the objects of Transformers, TRL, PEFT and bitsandbytes that code hands to a trainer.

The values are those of the exported files (autotune.export): only their form differs.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from peft import PeftConfig
from transformers import BitsAndBytesConfig, TrainingArguments
from transformers.utils.quantization_config import QuantizationConfigMixin

from autotune.catalogue.attention import EXPANDED
from autotune.errors import ConfigError, nearest
from autotune.export.quantization_config import quantization_fields
from autotune.export.training_args import decided_arguments, environment
from autotune.export.training_args import training_arguments as keyword_arguments
from autotune.memory.alloc_conf import EXPANDABLE, VARIABLES
from autotune.records.estimate import TraceSpec
from autotune.space import adapters as fields_of
from autotune.space.config import TrainConfig
from autotune.space.precisions import PRECISIONS
from autotune.space.trainers import TRAINERS, row_of
from autotune.worker.build import adapters
from autotune.worker.build import model as models
from autotune.worker.build.expanded_heads import expand_key_heads
from autotune.worker.probe import checks

ONLY_CUDA = ("fp16", "tf32", "use_liger_kernel")
"""TrainingArguments that mean nothing without a CUDA device, or are refused there."""

_MIXED_PRECISION = "ACCELERATE_MIXED_PRECISION"
OF_DATASET = ("max_length", "packing", "packing_strategy")
"""Fields of SFTConfig that say how TRL prepares the dataset."""


def training_arguments(
    config: TrainConfig, extra: Mapping[str, object], overrides: Mapping[str, Any]
) -> TrainingArguments:
    """Make new arguments: a workload's extra ones, then what was decided, then the overrides.

    An SFTConfig or its like for a configuration of another library's trainer. Raises ConfigError for an
    unknown override.
    """
    _set_environment(config)
    kind: Any = TrainingArguments
    row = TRAINERS[config.trainer]
    if row.library != "transformers":
        kind = getattr(importlib.import_module(row.module), row.arguments_class)
    known = field_names(kind)
    for name in overrides:
        if name not in known:
            raise ConfigError(f"{kind.__name__} has no field {name[:40]}", nearest(name, known))
    # One that the user sets is the user's, and not taken away where there is no CUDA device.
    decided = {**keyword_arguments(config, known, extra), **decided_arguments(config, known)}
    return kind(**{**_for_this_machine(decided, overrides), **overrides})


def applied(config: TrainConfig, arguments: TrainingArguments) -> TrainingArguments:
    """Copy somebody's arguments, keeping their class and all that was not decided here."""
    if not isinstance(arguments, TrainingArguments):
        raise ConfigError(
            f"arguments is {str(arguments)[:40]}",
            why="It should be TrainingArguments, or an SFTConfig or its like",
        )
    _warn_of_other_trainers(config, type(arguments))
    _set_environment(config)
    decided = decided_arguments(config, field_names(type(arguments)))
    if "accelerator_config" in decided:
        theirs: Any = arguments.accelerator_config
        theirs = theirs if isinstance(theirs, dict) else theirs.to_dict()
        decided["accelerator_config"] = {**theirs, **decided["accelerator_config"]}
    os.environ.update(environment(config))
    if hasattr(arguments, "generation_batch_size"):
        # One follows from the other, and only one may be given.
        decided |= {
            "generation_batch_size": None, "steps_per_generation": config.steps_per_generation
        }  # fmt: skip
    return dataclasses.replace(arguments, **_for_this_machine(decided, {}))


def _warn_of_other_trainers(config: TrainConfig, kind: type[TrainingArguments]) -> None:
    """Warn where the arguments are another trainer's: its step is not what was predicted or measured.

    SFTTrainer may run what was asked for Trainer.
    """
    row = TRAINERS[config.trainer]
    names = {each.__name__ for each in kind.__mro__}
    usual = {"TrainingArguments", *(() if row.task else ("SFTConfig",)), row.arguments_class}
    others = names & {each.arguments_class for each in TRAINERS.values()} - usual
    if others or (row.task and row.arguments_class not in names):
        warnings.warn(
            f"The answer is for {row.class_name} with {row.arguments_class}, and these are {kind.__name__}: "
            "neither memory nor speed is that of another trainer",
            stacklevel=4,
        )


def _set_environment(config: TrainConfig) -> None:
    """Set the environment variables of the configuration in this process.

    The Trainer reads them as its arguments are made (fp8, or not), torch's allocator when CUDA is first used.
    """
    wanted = environment(config)
    os.environ.update(wanted)
    if config.expandable_segments and torch.cuda.is_initialized():
        # By an import, say: it has read its variable already. Older versions have the second function.
        newest = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (newest or torch.cuda.memory._set_allocator_settings)(EXPANDABLE)
    if _MIXED_PRECISION not in wanted and os.environ.get(_MIXED_PRECISION) == "fp8":
        del os.environ[_MIXED_PRECISION]


def differences(config: TrainConfig, arguments: TrainingArguments) -> dict[str, tuple[Any, Any]]:
    """Decided fields that the arguments set otherwise, each with (the argument's value, what was decided)."""
    wanted = decided_arguments(config, field_names(type(arguments)))
    if (getattr(arguments, "dataset_kwargs", None) or {}).get("skip_prepare_dataset"):
        # The rows are cut already, and TRL does not ask how.
        wanted = {name: value for name, value in wanted.items() if name not in OF_DATASET}
    if config.has_plan:
        # The callback puts it into the model, whatever they say.
        wanted = {name: value for name, value in wanted.items() if "checkpointing" not in name}
    if arguments.device.type != "cuda":
        wanted = _without_cuda(wanted)
    found: dict[str, tuple[Any, Any]] = {}
    is_fp8 = PRECISIONS[config.precision].fp8
    mixed_precision = getattr(arguments, "mixed_precision", "unknown")
    if (mixed_precision == "fp8") is not is_fp8:
        found["mixed_precision"] = (mixed_precision, "fp8" if is_fp8 else "without fp8")
    if checks.check_allocator(config, arguments.device.type):
        found[VARIABLES[0]] = (os.environ.get(VARIABLES[0], "unset"), EXPANDABLE)
    for name, value in wanted.items():
        actual = getattr(arguments, name)
        actual = getattr(actual, "value", actual)  # an Enum
        if isinstance(value, dict):
            actual = actual if isinstance(actual, dict) or actual is None else vars(actual)
            actual = {key: (actual or {}).get(key) for key in value}
        # None, False and 0 all leave a thing off.
        if (actual or value) and actual != value:
            found[name] = (actual, value)
    return found


def field_names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.init]


def _for_this_machine(values: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The values without those that need a CUDA device, where there is none; a line on stderr says so."""
    if torch.cuda.is_available():
        return values
    kept = _without_cuda(values)
    lost = [name for name, value in values.items() if value and kept.get(name) != value]
    lost = [name for name in lost if name not in overrides]
    if lost:
        warnings.warn(
            f"No CUDA device is here: left out {', '.join(lost)}, which the plan has", stacklevel=4
        )
    return {**kept, "use_cpu": True}


def _without_cuda(values: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in values.items() if name not in ONLY_CUDA}
    for name, value in kept.items():
        if isinstance(value, dict) and "offload" in value:
            kept[name] = {key: entry for key, entry in value.items() if key != "offload"}
    return kept


def adapter_config(
    config: TrainConfig, task: str, *, model_config: Mapping[str, Any] | None, model: Any = None
) -> PeftConfig | None:
    """Make the PeftConfig of the adapter, with what PEFT leaves to the model; None for a full fine-tune.

    `model` is the one to be trained; without it one of the architecture `model_config` is made, without
    weights. Raises ConfigError where PEFT has no such adapter.
    """
    if config.method == "full":
        return None
    fields = fields_of.peft_fields(config, task=row_of(task))
    try:
        kind = str((model_config or {}).get("model_type"))
        if model is None and (needs_model(config) or fields_of.beside_out_proj(config, kind)):
            assert model_config is not None
            spec = TraceSpec.of(config)
            model = models.build_base(models.load_config(dict(model_config)), task, spec)
        return adapters.peft_config(model, task, fields, config.method)
    except models.UnsupportedModel as error:
        raise ConfigError("The adapter's configuration cannot be made", why=str(error)) from error


def needs_model(config: TrainConfig) -> bool:
    """Whether the adapter's fields depend on the model beyond what PEFT works out itself."""
    if config.method == "full":
        return False
    fields = fields_of.peft_fields(config)
    return (
        (config.method != "peft" and isinstance(fields.get("target_modules"), list))
        or fields.get("adapter_layers") == "all"
        or isinstance(fields.get("token_indices"), int)
    )


def quantization_config(
    config: TrainConfig, task: str, unpacked_by: str | None = None
) -> QuantizationConfigMixin | None:
    """The quantisation of the frozen base for `from_pretrained`; None where it is not quantised.

    `unpacked_by`: the class that loads a quantised checkpoint in 16 bits.
    """
    if unpacked_by is not None:
        unpacking: QuantizationConfigMixin = getattr(transformers, unpacked_by)(dequantize=True)
        return unpacking
    if config.quantization == "none":
        return None
    fields = quantization_fields(config, task)
    if "bnb_4bit_compute_dtype" in fields:
        fields["bnb_4bit_compute_dtype"] = getattr(torch, str(fields["bnb_4bit_compute_dtype"]))
    return BitsAndBytesConfig(**fields)


def model_kwargs(config: TrainConfig, task: str, unpacked_by: str | None = None) -> dict[str, Any]:
    """Keyword arguments of `from_pretrained`: dtype, attention, and the quantisation where there is one.

    Loading quantised weights is the first use of CUDA, so the environment variables are set here.
    """
    _set_environment(config)
    if config.attention == EXPANDED:
        expand_key_heads()
    kwargs: dict[str, Any] = {
        "dtype": getattr(torch, PRECISIONS[config.precision].parameter_dtype),
        "attn_implementation": config.attention,
    }
    quantization = quantization_config(config, task, unpacked_by)
    if quantization is not None:
        kwargs["quantization_config"] = quantization
    return kwargs
