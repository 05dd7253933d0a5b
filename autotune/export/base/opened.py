"""A `--base` that was opened: its files, and the table that reads them.

READERS is the table of YAML's and JSON's formats, told apart by what is in the file; Python programs have
tables made for what they hold (sections).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from autotune.errors import ConfigError
from autotune.export import axolotl, installed, llama_factory, train_config
from autotune.export.base import huggingface, launch, torchtune
from autotune.export.base.command_line import says_how_it_trains
from autotune.export.base.edit import parsed
from autotune.export.base.mapping_read import notes, read
from autotune.export.base.own_files import found_beside
from autotune.export.base.parts import RunFile, all_of, read_part
from autotune.export.base.program_options import is_trls, with_usual_names
from autotune.export.base.section_rows import ADAPTER, QUANTIZATION, RECIPE
from autotune.export.base.sections import Shape, target_for
from autotune.export.mapping import NotLiteral, Spelling, TrainerFile
from autotune.export.trainer_rows import FSDP2_BY_ACCELERATE
from autotune.export.training_args import installed_fields
from autotune.export.trl_config import trl_fields
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.trainers import BY_TASK, EMBEDDERS, TRAINERS


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """A reader of one format."""

    target: TrainerFile
    recognise: Callable[[Mapping[str, Any]], bool]
    fitted: Callable[[Mapping[str, Any], str], TrainerFile] | None = None
    """Returns the table for what is in a file, and for the method where it leaves that open. May raise
    ValueError."""
    prefix: str = ""
    """Prefix of its keys in the table."""


def _has(*keys: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda content: any(key in content for key in keys)


def _part(name: str, prefix: str) -> dict[str, Any]:
    """Return the arguments of a Reader of a file that says one section alone."""
    shape = Shape(name=name, sections=frozenset({prefix}), is_part=True)
    return {
        "target": target_for(shape, {}, "lora"),
        "fitted": lambda content, method: target_for(shape, content, method),
        "prefix": prefix,
    }


READERS: tuple[Reader, ...] = (
    Reader(
        target=torchtune.TARGET,
        recognise=torchtune.is_torchtune,
        fitted=torchtune.fitted,
    ),
    Reader(target=axolotl.TARGET, recognise=axolotl.is_axolotl, fitted=axolotl.fitted),
    Reader(
        target=launch.ACCELERATE,
        recognise=_has("distributed_type", "compute_environment", "num_processes"),
        fitted=launch.fitted_accelerate,
    ),
    Reader(
        target=launch.DEEPSPEED,
        recognise=_has("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"),
        fitted=launch.fitted_deepspeed,
    ),
    Reader(
        **_part("PEFT's adapter_config.json", ADAPTER),
        recognise=_has("peft_type"),
    ),
    Reader(
        target=llama_factory.TARGET,
        recognise=llama_factory.is_llama_factory,
        fitted=llama_factory.fitted,
    ),
    Reader(
        target=huggingface.EXAMPLE,
        recognise=huggingface.is_example,
        fitted=huggingface.of_example,
    ),
    Reader(
        target=huggingface.SFT,
        recognise=_has("model_name_or_path", "max_length", "packing", "use_peft", "dataset_name"),
    ),
    Reader(
        target=huggingface.TRAINING_ARGUMENTS,
        recognise=_has(
            "per_device_train_batch_size", "gradient_accumulation_steps", "optim", "output_dir"
        ),
    ),
    Reader(
        **_part("bitsandbytes' quantization_config.json", QUANTIZATION),
        recognise=_has("load_in_4bit", "load_in_8bit", "quant_method"),
    ),
)
"""Readers in order: the first that recognises a file reads it."""
_OF_PROGRAMS = (huggingface.EXAMPLE, huggingface.TRAINING_ARGUMENTS)
"""Tables of files for programs that have options of their own beside them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """The files and the table that reads them."""

    parts: tuple[RunFile, ...]
    target: TrainerFile | None
    """Table of the trainer; None: the file is ours."""
    content: Mapping[str, Any]
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ours: train_config.SavedRun | None = None
    """Content of our own file, or of the one beside them."""
    task: str | None = None
    """Task of the class that a program loads the model with."""
    starts: tuple[str, int] | None = None
    """The place that says how many processes a script starts, and their number; None where none does."""


def open_mapping(part: RunFile, method: str, task: str | None = None) -> Opened:
    """Open a YAML or JSON file by the first of READERS that knows it, else as ours. Raises ConfigError."""
    import yaml

    try:
        content = parsed(part.text)
    except yaml.YAMLError:
        content = None  # train_config says where it is broken
    except (ValueError, RecursionError) as error:
        why = "It is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{part.path} is not a YAML document", why=why) from error
    reader = None
    if isinstance(content, dict) and "config" not in content:
        content = {str(key): value for key, value in content.items()}
        reader = next((each for each in READERS if each.recognise(content)), None)
        if reader is None or reader.target in (axolotl.TARGET, huggingface.SFT, *_OF_PROGRAMS):
            _check_sections(part.path, content)
    if reader is None or content is None:
        ours = train_config.from_yaml(part.text, source=str(part.path))
        return Opened(parts=(part,), target=None, content={}, ours=ours)
    part = dataclasses.replace(part, prefix=reader.prefix)
    content = {f"{reader.prefix}{key}": value for key, value in content.items()}
    parts: tuple[RunFile, ...] = (part,)
    if reader.target is launch.ACCELERATE:
        parts = (part, *_beside(part.path, content))
        content = all_of(parts)
    target, fit = reader.target, reader.fitted
    if target is huggingface.SFT:
        target = fit_table(part.path, None, lambda: huggingface.of_trl(content, task))
    if fit is not None:
        target = fit_table(part.path, target, lambda: fit(content, method))
    if reader.target in _OF_PROGRAMS or (reader.target is huggingface.SFT and not is_trls(content)):
        target = with_usual_names(target, content)
    trainer = BY_TASK.get(task or "")
    if trainer is not None and (reader.prefix or target is huggingface.TRAINING_ARGUMENTS):
        target = huggingface.trained_by(target, trainer)
    target, said = shared_among_gpus(part.path, target, content)
    if reader.target is huggingface.SFT and (others := _not_of_trl(target, content)):
        command = " ".join(target.launch.split()[:2])
        shown = ", ".join(others[:5])
        said = (*said, f"`{command}` takes no {shown}: start its edited copy with your own program")
        target = dataclasses.replace(target, launch="")
    return Opened(parts=parts, target=target, content=content, notes=said)


_OF_COMMANDS = (
    ("trainer/model_config.py", "ModelConfig"),
    ("scripts/utils.py", "ScriptArguments"),
    ("scripts/utils.py", "DatasetMixtureConfig"),
    ("scripts/grpo.py", "GRPOScriptArguments"),
)
"""Classes whose fields TRL's commands take beside those of the trainer's arguments (trl 1.16 scripts)."""


def _not_of_trl(target: TrainerFile, content: Mapping[str, Any]) -> list[str]:
    """Return the keys that TRL's command does not take, by any name it had; none where TRL is not here."""
    fields = trl_fields(TRAINERS[target.fixed["trainer"]])
    beside = [installed.fields("trl", *place) or {} for place in _OF_COMMANDS]
    known = {*(fields or content), *(name for each in beside for name in each), "env"}
    known |= target.renamed.keys() | target.flags.keys()
    return [key for key in content if key not in known and key not in _OLDER]


_OLDER = (
    "evaluation_strategy", "fsdp_transformer_layer_cls_to_wrap", "no_cuda", "overwrite_output_dir",
    "push_to_hub_model_id", "tokenizer_name_or_path", "use_mps_device", "warmup_ratio",
)  # fmt: skip
"""Keys that older versions took."""


_OF_SECTIONS = {"batch_size", "epochs", "lr", "num_epochs"}
"""Keys in sections of other programs' files, AutoTrain's for one, that say how a run trains."""


def _check_sections(path: Path, content: Mapping[str, Any]) -> None:
    """Raise ConfigError for a program's own file, whose sections say how it trains: none is known here."""
    of_training = [
        name
        for name, said in content.items()
        if isinstance(said, Mapping)
        and (says_how_it_trains(said) or not _OF_SECTIONS.isdisjoint(said))
    ]
    if of_training and not says_how_it_trains(content) and "micro_batch_size" not in content:
        raise ConfigError(
            f"{path} cannot be used",
            why=f"{', '.join(of_training[:5])}: it is a program's own file, in sections that only it knows",
            remedy="Give the program that reads it, or the settings of one section as TrainingArguments",
        )


def _beside(path: Path, content: Mapping[str, Any]) -> tuple[RunFile, ...]:
    """Return DeepSpeed's own file, where accelerate's names one."""
    try:
        name = launch.named_beside(content)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be used", why=str(error)) from error
    return () if name is None else (read_part(path.parent / name, launch.BESIDE),)


def shared_among_gpus(
    path: Path, target: TrainerFile, content: Mapping[str, Any]
) -> tuple[TrainerFile, tuple[str, ...]]:
    """Return the table with the parallelism that `fsdp` or DeepSpeed's file says, and notes on that file.

    Files that are named are looked for here, beside the user's and in the two folders above. Raises
    ConfigError.
    """
    target = _shared_by_fsdp(path, target, content)
    named = content.get("deepspeed")
    if "deepspeed" not in target.refused or not isinstance(named, str | Mapping) or not named:
        return target, ()
    said: Mapping[str, Any] = named if isinstance(named, Mapping) else {}
    if isinstance(named, str):
        place = found_beside(path, named)
        if place is None:
            raise ConfigError(
                f"{path} cannot be used ({target.name})",
                why=f"deepspeed: {named[:80]} is no file here or beside it",
                remedy="Ask in the folder that it is named from, or take it out and give --num-gpus and "
                "--parallelism",
            )
        said = all_of((read_part(place),))
    fitted = launch.fitted_deepspeed(said, "")
    values, problems = read(fitted, said)
    if problems:
        raise ConfigError(
            f"{path} cannot be used ({target.name})", why=f"deepspeed: {'; '.join(problems)}"
        )
    name = values["parallelism"]
    target = _with_parallelism(target, name, {"deepspeed": named})
    return target, tuple(
        f"deepspeed: {note}" for note in (*notes(fitted, said), *launch.further(said, name))
    )


def _with_parallelism(target: TrainerFile, name: str, said: Mapping[str, Any]) -> TrainerFile:
    """Return the table with what a file says where it shares the run in that way, and nothing in others."""
    row = next(each for each in target.rows if each.ours == ("parallelism",))
    without = {key: None for key in said if key not in row.keys}
    others = tuple(
        dataclasses.replace(each, theirs={**each.theirs, **without})
        for each in row.choices
        if each.ours != (name,)
    )
    known = Spelling(ours=(name,), theirs=said)
    keys = tuple(dict.fromkeys((*row.keys, *said)))
    read_row = dataclasses.replace(row, keys=keys, choices=(known, *others))
    return dataclasses.replace(
        target,
        rows=tuple(read_row if each is row else each for each in target.rows),
        refused={key: why for key, why in target.refused.items() if key not in said},
    )


_FSDP = {"full_shard", "auto_wrap", "offload"}
_OF_FSDP2: dict[str, tuple[Any, ...]] = {
    "version": (2, None),
    "reshard_after_forward": (True, False, None),
    "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", None),
    **dict.fromkeys(("min_num_params", "activation_checkpointing", "xla"), (False, 0, None)),
}
"""Values in `fsdp_config` of FSDP2 as it is predicted, which is Transformers' own (5.23 training_args.py)."""


def _shared_by_fsdp(path: Path, target: TrainerFile, content: Mapping[str, Any]) -> TrainerFile:
    """Return the table with TrainingArguments' `fsdp`, where it is FSDP2 as it is predicted."""
    said, more = content.get("fsdp"), content.get("fsdp_config")
    if not said or "fsdp" not in target.refused or "fsdp_config" in target.refused:
        return target
    words = {"full_shard"} if said is True else {*str(said).split()}
    if isinstance(said, list):
        words = {*map(str, said)}
    place = found_beside(path, more) if isinstance(more, str) else None
    more = all_of((read_part(place),)) if place is not None else more
    config = (
        {str(key).removeprefix("fsdp_"): value for key, value in more.items()}
        if isinstance(more, Mapping)
        else {}
    )
    is_known = more is None or isinstance(more, Mapping)
    is_second = all(config.get(key) in values for key, values in _OF_FSDP2.items())
    if not (is_known and is_second and "full_shard" in words <= _FSDP):
        return target
    offloads = "offload" in words or config.get("cpu_offload") or config.get("offload_params")
    keeps_gathered = config.get("reshard_after_forward") is False
    for name in FSDP2_BY_ACCELERATE:
        row = PARALLELISMS[name]
        if (row.offload, row.keeps_gathered) == (bool(offloads), keeps_gathered):
            return _with_parallelism(target, name, {"fsdp": said})
    return target


def open_program(part: RunFile, method: str, task: str | None = None) -> Opened:
    """Open a Python program by a table of what it makes. Raises ConfigError."""
    program = part.program()
    shape, content = program.shape, program.content
    asked, read_as = EMBEDDERS.get(task or ""), TRAINERS[shape.trainer]
    alike = [row for row in EMBEDDERS.values() if row.loss == read_as.loss]
    if asked in alike:
        shape = dataclasses.replace(shape, trainer=asked.name, task=asked.task)
    if not shape.sections:
        raise ConfigError(
            f"{part.path} has no settings that can be read",
            why="; ".join(program.problems)
            or "No TrainingArguments, SFTConfig, LoraConfig, BitsAndBytesConfig or model is made in it",
            remedy="Name the file that makes them",
        )
    target = fit_table(part.path, None, lambda: target_for(shape, content, method))
    target, said = shared_among_gpus(part.path, target, content)
    if RECIPE not in shape.sections:
        # Ours is run anew: its plan B is of the earlier answer.
        target = dataclasses.replace(
            target,
            launch="python {gpus}{file}",
            launch_several=SEVERAL_PROCESSES,
        )
    read_keys = {*(key for row in target.rows for key in row.keys), *target.renamed}
    others = installed_fields().keys() - read_keys
    left = [
        f"{key}: {value}"
        for key, value in content.items()
        if isinstance(value, NotLiteral) and key in others
    ]
    further = [*program.notes, *said]
    if part.loaded[0]:
        further.append(f"what it loads is read in {part.loaded[0]}")
    if asked is None:
        further += [
            f"its samples are taken for {read_as.format}: --task {row.task} has {row.format}"
            for row in alike
            if row is not read_as
        ]
    if left:
        further.append(f"not literal values, so not in the other files: {', '.join(left)}")
    return Opened(
        parts=(part,),
        target=target,
        content=content,
        problems=tuple(program.problems),
        notes=tuple(further),
        task=shape.task,
    )


SEVERAL_PROCESSES = "-m torch.distributed.run --nproc_per_node {number} "
"""Words behind `python` that start a program once for each GPU."""
_T = TypeVar("_T")


def fit_table(path: Path, target: TrainerFile | None, fit: Callable[[], _T]) -> _T:
    """Return what makes a table for a file. Raises ConfigError for its ValueError."""
    try:
        return fit()
    except ValueError as error:
        name = "" if target is None else f" ({target.name})"
        raise ConfigError(f"{path} cannot be used{name}", why=str(error)) from error
