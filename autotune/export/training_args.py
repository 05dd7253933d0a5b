"""Keyword arguments of `transformers.TrainingArguments`: as JSON, as YAML and as Python.

Holds what autotune decides, what the user has set beside it (extra_arguments), and a default learning
rate: epochs and logging stay the user's.
The names are those of the installed version, or of one that is named (targets).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from autotune.export import installed, targets
from autotune.export.carried import Unsaid, heading, keywords, unsaid
from autotune.export.exporter import Exporter
from autotune.memory.alloc_conf import EXPANDABLE, VARIABLES
from autotune.space.config import (
    LOADER_SETTINGS,
    OF_COMPLETIONS,
    OF_VLLM,
    TrainConfig,
    Workload,
)
from autotune.space.knobs import KNOBS
from autotune.space.learning_rates import default_rate
from autotune.space.optimizers import OPTIMIZERS
from autotune.space.precisions import PRECISIONS
from autotune.space.trainers import TRAINERS

LIBRARIES = ("transformers",)

OUTPUT_FOLDER = "output"
"""Value of `output_dir` until the user names another."""

IN_ENVIRONMENT = ("expandable_segments",)
_USERS = ("output_dir", "max_grad_norm", "per_device_eval_batch_size", "learning_rate")
"""Arguments written out in the files, and never changed in arguments that somebody has."""
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
"""Arguments that `training_arguments` leaves out where a configuration does without."""

_CHECKPOINTING = ("activation_checkpointing", "activation_checkpointing_kwargs")
_OLD_CHECKPOINTING = ("gradient_checkpointing", "gradient_checkpointing_kwargs")
_CHECKPOINTING_OPTIONS = ("every_n_layers", "offload")
"""Options that are Transformers' own. The others among them go to torch."""


CARRIED = (
    "micro_batch_size",
    "gradient_accumulation_steps",
    "optimizer",
    "activation_checkpointing",
    "activation_offloading",
    *LOADER_SETTINGS,
    *(knob.name for knob in KNOBS.values() if knob.arguments is not None),
)
"""Settings that TrainingArguments says in full."""


def write(*, workload: Workload, config: TrainConfig, result: Mapping[str, object]) -> str:  # noqa: ARG001
    """Return a JSON object for `TrainingArguments(**json.load(file))` of the installed version."""
    return json.dumps(known_arguments(workload, config), indent=2) + "\n"


def _write_yaml(*, workload: Workload, config: TrainConfig, result: Mapping[str, object]) -> str:
    """Return a YAML document for HfArgumentParser's parse_yaml_file, opened by what is not in it."""
    import yaml

    arguments = known_arguments(workload, config)
    return _head(workload, config, result) + yaml.safe_dump(arguments, sort_keys=False)


def _write_python(*, workload: Workload, config: TrainConfig, result: Mapping[str, object]) -> str:
    """Return a Python module that makes `arguments`. Every value in it is an ASCII literal."""
    head = _head(workload, config, result, IN_ENVIRONMENT)
    first = set_environment(config)
    imports = "import os\n\n" if first else ""
    return f"""{head}{imports}{first}from transformers import TrainingArguments

arguments = TrainingArguments(
{keywords(known_arguments(workload, config))})
"""


def cannot_express(config: TrainConfig, carried: Collection[str] = ()) -> tuple[Unsaid, ...]:
    """Return words for the model, the adapter and the data, which are not TrainingArguments'.

    `carried`: what a program says beside them.
    """
    fields = installed_fields()
    dtype = PRECISIONS[config.precision].parameter_dtype
    fp8 = ", products in float8: accelerate_config.yaml" if PRECISIONS[config.precision].fp8 else ""
    batching = {"batching"} if config.batching == "grouped" else set()
    return (
        Unsaid("precision", f"weights in {dtype}{fp8}", in_part=True),
        *unsaid(config, {*CARRIED, *carried, "precision", *batching}),
        *installed.unknown(training_arguments(config, fields), fields, "transformers"),
        *unknown_values(training_arguments(config, fields)),
    )


def has_no_words_for(workload: Workload) -> tuple[Unsaid, ...]:
    """Return words for the user's extra arguments, which an older version may not have."""
    return installed.unknown(workload.extra, installed_fields(), "transformers")


def _head(
    workload: Workload,
    config: TrainConfig,
    result: Mapping[str, object],
    carried: Collection[str] = (),
) -> str:
    """Return the opening of the arguments as Python or YAML: what they are, and what is not in them."""
    what = f"transformers.TrainingArguments{targets.said(*LIBRARIES)}"
    lost = (*cannot_express(config, carried), *has_no_words_for(workload))
    return heading(what, config, result["evidence"], lost)


def known_arguments(workload: Workload, config: TrainConfig) -> dict[str, object]:
    """Return the keyword arguments that the installed or named TrainingArguments takes."""
    fields = installed_fields()
    arguments = known_values(training_arguments(config, fields, workload.extra))
    return {key: arguments[key] for key in arguments if key in fields}


def unknown_values(arguments: Mapping[str, object]) -> tuple[Unsaid, ...]:
    """Return words for an optimizer and for options of checkpointing that a named version does not have."""
    known = known_values(arguments)
    lost = []
    for name, value in arguments.items():
        if name not in known:
            lost.append(f"{name}={value}")
        elif isinstance(value, dict):
            lost += [f"{name}.{key}" for key in value if key not in known[name]]
    return installed.unknown(lost, (), "transformers")


def known_values(arguments: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments without values that a named version does not know: they would stop the run."""
    known: dict[str, Any] = dict(arguments)
    target = targets.of("transformers")
    if target is None:
        return known
    if f"optim={known['optim']}" not in target.names:
        del known["optim"]
    missing = {
        name for name in _CHECKPOINTING_OPTIONS if f"checkpointing.{name}" not in target.names
    }
    for name in {_CHECKPOINTING[1], _OLD_CHECKPOINTING[1]} & known.keys():
        known[name] = {key: known[name][key] for key in known[name] if key not in missing}
    return known


def training_arguments(
    config: TrainConfig,
    fields: Collection[str] | None = None,
    extra: Mapping[str, object] = MappingProxyType({}),
) -> dict[str, object]:
    """Return the keyword arguments. `fields` are those of the class at hand; None means the newest names.

    `extra` are a Workload's, over which goes what a setting decides. `max_grad_norm` is Trainer's
    default, written out because clipping's memory was predicted. An evaluation takes as many samples at
    once as training does, unless the user says otherwise: that is what a confirmation has seen fit, where
    Trainer's default of 8 may need several times the memory.
    `tf32` needs an Ampere card or later, as TrainingArguments itself says when it is loaded.
    """
    precision = PRECISIONS[config.precision]
    arguments: dict[str, object] = {
        "output_dir": OUTPUT_FOLDER,
        "max_grad_norm": 1.0,
        "per_device_eval_batch_size": config.micro_batch_size,
        "learning_rate": default_rate(config),
        **extra,
        "per_device_train_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "optim": config.optimizer,
        **dict(OPTIMIZERS[config.optimizer].arguments),
        # What is left off here can come from the environment: `environment`.
        "bf16": precision.autocast and precision.compute_dtype == "bfloat16" and not precision.fp8,
        "fp16": precision.autocast and precision.compute_dtype == "float16",
    }
    if config.accumulates_shards:
        # Left out it is False (accelerate 1.15 Accelerator.no_sync).
        arguments["accelerator_config"] = {
            "gradient_accumulation_kwargs": {"sync_each_batch": not config.no_sync}
        }
    if config.num_splits > 1:
        # transformers 5.23 Trainer refuses to checkpoint optimizer state that is split.
        arguments["save_only_model"] = True
    if precision.compute_dtype == "float32":
        arguments["tf32"] = precision.tf32
    if config.batching == "grouped":
        is_new = fields is None or "train_sampling_strategy" in fields
        newest = {"train_sampling_strategy": "group_by_length"}
        arguments |= newest if is_new else {"group_by_length": True}
    arguments |= checkpointing_arguments(
        config.activation_checkpointing, fields, offloading=config.activation_offloading
    )
    for knob in KNOBS.values():
        if knob.arguments is not None:
            arguments |= knob.arguments(getattr(config, knob.name))
    return arguments | config.loader_arguments


def checkpointing_arguments(
    interval: int, fields: Collection[str] | None = None, *, offloading: bool = False
) -> dict[str, object]:
    """Return what TrainingArguments is told about checkpointing: every `interval`-th layer, 0 for none.

    `fields` are those of the class at hand; None means the newest names.
    """
    is_new = fields is None or _CHECKPOINTING[0] in fields
    switch, options = _CHECKPOINTING if is_new else _OLD_CHECKPOINTING
    if not interval:
        return {switch: False}
    # Options that say what is the case anyway are left out: older versions refuse them.
    choices: dict[str, object] = {"use_reentrant": False}
    if interval > 1:
        choices["every_n_layers"] = interval
    if offloading:
        choices["offload"] = True
    return {switch: True, options: choices}


def without_checkpointing(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with Trainer's own checkpointing off, for a model that has a plan in it."""
    options = (_CHECKPOINTING[1], _OLD_CHECKPOINTING[1])
    switches = (_CHECKPOINTING[0], _OLD_CHECKPOINTING[0])
    return {
        key: False if key in switches else value
        for key, value in arguments.items()
        if key not in options
    }


class _Code(str):
    """An expression of Python, which stands in a written program as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


_HAS_CARD = _Code("torch.cuda.is_available()")
_NEED_A_CARD = ("fp16", "tf32", "use_liger_kernel")


def tried_on_a_cpu(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments for a program that runs without a card, too: there without what needs one.

    A tiny model is tried so before a card is rented. Read back as `--base`, they are those of a card.
    """
    tried = {**arguments, "use_cpu": _Code(f"not {_HAS_CARD}")}
    tried |= {name: _HAS_CARD for name in _NEED_A_CARD if arguments.get(name)}
    for name in (_CHECKPOINTING[1], _OLD_CHECKPOINTING[1]):
        if arguments.get(name, {}).get("offload"):
            tried[name] = {**arguments[name], "offload": _HAS_CARD}
    return tried


def attention_there(attention: str) -> str:
    """Return what a written program has for attention: PyTorch's own where a kernel's card is missing."""
    if not attention.startswith(("flash", "flex")):
        return attention
    return _Code(f"{attention!a} if {_HAS_CARD} else 'sdpa'")


def environment(config: TrainConfig) -> dict[str, str]:
    """Return the environment variables that the Trainer's process needs.

    TrainingArguments has fields neither for fp8 nor for torch's allocator.

    The allocator reads them when CUDA is first used (torch c10/core/AllocatorConfig.cpp). For fp8
    transformers 5.23 training_args.py takes the mixed precision from the first; accelerate 1.15
    (utils/dataclasses.py, AORecipeKwargs) would by default prepare the weights for FSDP2, which on one GPU
    puts tensors into the model that the optimizer does not have: they would never be trained.
    """
    variables: dict[str, str] = {}
    if PRECISIONS[config.precision].fp8:
        variables |= _FP8_VARIABLES
    if config.expandable_segments:
        variables |= dict.fromkeys(VARIABLES, EXPANDABLE)
    return variables


_FP8_VARIABLES = {
    "ACCELERATE_MIXED_PRECISION": "fp8",
    "ACCELERATE_FP8_BACKEND": "AO",
    "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "false",
    "ACCELERATE_FP8_PAD_INNER_DIM": "true",
}


def set_environment(config: TrainConfig) -> str:
    """Return code that sets what no argument can; empty where nothing is to be set.

    It stands behind `import os` and before all other imports: some use CUDA, and torch's allocator reads its
    settings then.
    """
    variables = environment(config)
    if not variables:
        return ""
    entries = "".join(f"    {key!a}: {value!a},\n" for key, value in variables.items())
    return f"# Before what follows is imported.\nos.environ |= {{\n{entries}}}\n\n"


_ONE_CARD = """\
if __name__ == "__main__" and "LOCAL_RANK" not in os.environ:
    # The Trainer takes every card that it sees, and a batch for each.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
"""


def see_one_card(config: TrainConfig) -> str:
    """Return code that lets a program of one GPU see the first alone; it stands as `set_environment`'s does.

    Source: transformers 5.23 TrainingArguments.n_gpu, Trainer._wrap_model; TRL's trainers refuse several.
    """
    return _ONE_CARD if config.num_gpus == 1 else ""


_OF_COMPLETIONS = {name: name for name in OF_COMPLETIONS} | {"kl_beta": "beta"}
"""TRL's names of settings that a trainer which writes completions has besides."""


def completion_arguments(config: TrainConfig) -> dict[str, object]:
    """Return arguments of a trainer that writes completions, those left out that follow from others."""
    if TRAINERS[config.trainer].has_teacher:
        return {"max_completion_length": config.max_completion_length}
    served: dict[str, object] = {}
    if config.writes_with_vllm:
        # Without a length vLLM's cache must hold one as long as the model can read (trl 1.16 GRPOConfig).
        served = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            **{name: getattr(config, name) for name in OF_VLLM},
            "vllm_max_model_length": config.sequence_length,
        }
    return served | {
        theirs: value
        for ours, theirs in _OF_COMPLETIONS.items()
        if (value := getattr(config, ours)) is not None
    }


def decided_arguments(config: TrainConfig, fields: Collection[str]) -> dict[str, Any]:
    """Return what arguments that somebody has must say to be this configuration: off included, no more.

    `fields` are those of their class; an SFTConfig's and its like say more.
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
    elif "max_length" in fields:
        decided["max_length"] = config.sequence_length
    if config.max_completion_length is not None and "max_completion_length" in fields:
        off = {} if TRAINERS[config.trainer].has_teacher else {"use_vllm": False}
        decided |= off | completion_arguments(config)
    if "precompute_ref_log_probs" in fields:
        decided["precompute_ref_log_probs"] = config.precompute_ref_log_probs
    if TRAINERS[config.trainer].compares_samples and TRAINERS[config.trainer].is_trl:
        # It has paired the answers of each batch beforehand (trl 1.16 KTOTrainer.__init__).
        decided["train_sampling_strategy"] = "sequential"
    return decided


OLDER_NAMES = {"evaluation_strategy": "eval_strategy"}
"""Names that arguments had before Transformers 4.46, with what they are called."""


def installed_fields() -> Mapping[str, str]:
    """Return fields of TrainingArguments and their annotations.

    Of the installed version, or without annotations of the one that files are being written for.
    """
    target = targets.of("transformers")
    if target is not None:
        return target.fields
    found = installed.fields("transformers", "training_args.py", "TrainingArguments")
    assert found is not None
    return found


EXPORTERS = tuple(
    Exporter(
        name=name,
        filename=filename,
        write=writer,
        cannot_express=functools.partial(cannot_express, carried=carried),
        has_no_words_for=has_no_words_for,
        part="Trainer's arguments",
        libraries=LIBRARIES,
    )
    for name, filename, writer, carried in (
        ("training-args", "training_args.json", write, ()),
        ("training-args-yaml", "training_args.yaml", _write_yaml, ()),
        ("training-args-python", "training_args.py", _write_python, IN_ENVIRONMENT),
    )
)
