"""Opening of a `--base`: its files, and the table that reads them.

READERS is the table of YAML's and JSON's formats, told apart by what is in the file; Python programs and
folders have tables made for what they hold (sections), shell scripts the table of what they start.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from autotune.errors import ConfigError
from autotune.export import axolotl, llama_factory, train_config
from autotune.export.base import huggingface, launch, torchtune
from autotune.export.base.command_line import Command
from autotune.export.base.edit import parsed
from autotune.export.base.mapping_read import notes, read
from autotune.export.base.parts import OURS, RunFile, all_of, read_folder, read_part
from autotune.export.base.program_options import (
    defaults_of,
    notes_on_launch,
    reads_recipe,
    table_of,
    takes_all_options,
    task_of,
)
from autotune.export.base.section_rows import ADAPTER, QUANTIZATION, RECIPE
from autotune.export.base.sections import Shape, target_for
from autotune.export.mapping import NotLiteral, Spelling, TrainerFile, choices
from autotune.export.training_args import installed_fields
from autotune.space.knobs import KNOBS
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
    Reader(target=axolotl.TARGET, recognise=_has("base_model"), fitted=axolotl.fitted),
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


_COMMAND = re.compile(
    r"(\.py|\b(python3?|torchrun|accelerate|deepspeed|trl|llamafactory-cli)) .*--\w"
)
_TYPED = Path("run.sh")
"""Name of the script that a typed command is taken for, and whose copy has the answer."""


def is_typed(path: Path) -> bool:
    """Return whether a base is no file but a command as it is typed: a program, with an option at least."""
    return _COMMAND.search(str(path)) is not None and not os.path.lexists(path)


def open_base(path: Path, method: str, *, has_bf16: bool, task: str | None = None) -> Opened:
    """Open the files at a path, or a command that is typed in place of one. Raises ConfigError.

    `method` is for formats that say nothing of it; `task` None: what the file is marked by. A file that says
    nothing of its trainer has that of the task.
    """
    if os.path.isdir(path):
        return _open_folder(path, method)
    if is_typed(path):
        typed = RunFile(path=_TYPED, text=f"{path}\n", has_bf16=has_bf16)
        opened = _open_script(typed, method, task)
        if opened.parts[0].path != _TYPED:  # The program has the settings.
            return opened
        said = "it stands for the command that was typed"
        return dataclasses.replace(opened, notes=(said, *opened.notes))
    part = read_part(path, has_bf16=has_bf16)
    read_part_of = _open_program if part.is_program else _open_mapping
    return (_open_script if part.is_script else read_part_of)(part, method, task)


def _open_mapping(part: RunFile, method: str, task: str | None = None) -> Opened:
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
        target = _fitted(part.path, None, lambda: huggingface.of_trl(content, task))
    if fit is not None:
        target = _fitted(part.path, target, lambda: fit(content, method))
    trainer = BY_TASK.get(task or "")
    if trainer is not None and (reader.prefix or target is huggingface.TRAINING_ARGUMENTS):
        target = huggingface.trained_by(target, trainer)
    target, said = _shared_by_deepspeed(part.path, target, content)
    return Opened(parts=parts, target=target, content=content, notes=said)


def _beside(path: Path, content: Mapping[str, Any]) -> tuple[RunFile, ...]:
    """Return DeepSpeed's own file, where accelerate's names one."""
    try:
        name = launch.named_beside(content)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be used", why=str(error)) from error
    return () if name is None else (read_part(path.parent / name, launch.BESIDE),)


def _shared_by_deepspeed(
    path: Path, target: TrainerFile, content: Mapping[str, Any]
) -> tuple[TrainerFile, tuple[str, ...]]:
    """Return the table with the parallelism of DeepSpeed's file, where one is named, and notes on that file.

    It is looked for here, beside the user's file and in the two folders above. Raises ConfigError.
    """
    named = content.get("deepspeed")
    if "deepspeed" not in target.refused or not isinstance(named, str | Mapping) or not named:
        return target, ()
    said: Mapping[str, Any] = named if isinstance(named, Mapping) else {}
    if isinstance(named, str):
        place = _found(path, named)
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
    row = next(each for each in target.rows if each.ours == ("parallelism",))
    others = (each for each in row.choices if each.ours != (name,))
    known = Spelling(ours=(name,), theirs={"deepspeed": named})
    read_row = dataclasses.replace(row, choices=(known, *others))
    target = dataclasses.replace(
        target,
        rows=tuple(read_row if each is row else each for each in target.rows),
        refused={key: why for key, why in target.refused.items() if key != "deepspeed"},
    )
    return target, tuple(
        f"deepspeed: {note}" for note in (*notes(fitted, said), *launch.further(said, name))
    )


def _found(path: Path, named: str) -> Path | None:
    """Return the file that a user's file names: here, beside it or in the two folders above."""
    folders = (Path(), path.parent, *path.absolute().parents[1:3])
    return next((each / named for each in folders if os.path.isfile(each / named)), None)


_LAUNCHES = {".slurm": "sbatch {file}", ".sbatch": "sbatch {file}"}


def _open_script(part: RunFile, method: str, task: str | None = None) -> Opened:
    """Open a shell script: the options that it starts a program with, or the program with these options."""
    command = part.command()
    path, content = part.path, dict(command.content)
    files = (each for each in command.positional if each.endswith((".yaml", ".yml", ".json")))
    if (file := next(files, None)) is not None:
        raise ConfigError(
            f"{path} cannot be used (a shell script)",
            why=f"{command.program} takes its settings from {file}",
            remedy="Give that file as --base",
        )
    place = _found(path, command.program) or _found(path, f"{command.program.replace('.', '/')}.py")
    program = None if place is None else read_part(place, has_bf16=part.has_bf16)
    said = notes_on_launch(command)
    if program is not None and not takes_all_options(program.text):
        opened = _open_program(dataclasses.replace(program, given=content), method, task)
        assert opened.target is not None
        before = shlex.join(command.launcher)
        launch = f"{_escaped(before)} {{file}} {_escaped(command.rest)}".strip()
        target = dataclasses.replace(opened.target, launch=launch, launch_several="")
        return dataclasses.replace(opened, target=target, notes=(*opened.notes, *said))
    text = None if program is None else program.text
    defaults = {} if text is None else defaults_of(text)
    if reads_recipe(command, text):
        defaults |= _named_by_option(path, content.pop("config", None))
    content = {**defaults, **content}
    target, takes, notes_on_options = _fitted(
        path, None, lambda: table_of(command, content, text, method, task)
    )
    part = dataclasses.replace(part, defaults=defaults, takes=takes)
    rows = target.rows
    if not any("expandable_segments" in row.ours for row in rows):
        rows = (*rows, huggingface.OF_ENVIRONMENT)
    elsewhere = tuple(name for name in target.elsewhere if name != "expandable_segments")
    target = dataclasses.replace(
        target,
        name=f"the options of {command.program}",
        rows=rows,
        elsewhere=elsewhere,
        launch=_LAUNCHES.get(path.suffix, "bash {file}"),
        launch_several="",
    )
    target, of_deepspeed = _shared_by_deepspeed(path, target, content)
    target, of_accelerate = _shared_by_accelerate(path, target, command)
    said = [*said, *notes_on_options, *of_deepspeed, *of_accelerate]
    return Opened(
        parts=(part,),
        target=target,
        content=content,
        notes=tuple(said),
        task=task_of(command, text or ""),
    )


def _named_by_option(path: Path, named: object) -> dict[str, Any]:
    """Return the content of the file that a script's `--config` names. Raises ConfigError."""
    if named is None:
        return {}
    place = _found(path, str(named))
    if place is None:
        raise ConfigError(
            f"{path} cannot be used (a shell script)",
            why=f"--config {named} is no file here or beside it",
            remedy="Ask in the folder that it is named from",
        )
    return all_of((read_part(place),))


def _shared_by_accelerate(
    path: Path, target: TrainerFile, command: Command
) -> tuple[TrainerFile, tuple[str, ...]]:
    """Return the table with what accelerate's file shares, if the launcher names one, and a note."""
    named = command.launched.get("config_file")
    if named is None:
        return target, ()
    place = _found(path, str(named))
    problem = f"{named} is no file here or beside it"
    if place is not None:
        try:
            opened = _open_mapping(read_part(place), "full")
            assert opened.target is not None
            values, problems = read(opened.target, opened.content)
            problem = "; ".join(problems)
        except ConfigError as error:
            problem = str(error)
        if not problem:
            # The script can say no other; on one GPU it shares nothing.
            names = (values["parallelism"], "none")
            row = choices(("parallelism",), *(Spelling(ours=(name,), theirs={}) for name in names))
            others = (each for each in target.rows if each.ours != row.ours)
            return dataclasses.replace(target, rows=(*others, row)), ()
    return target, (f"{problem}: --parallelism says how GPUs share the run",)


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _open_program(part: RunFile, method: str, task: str | None = None) -> Opened:
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
    target = _fitted(part.path, None, lambda: target_for(shape, content, method))
    target, said = _shared_by_deepspeed(part.path, target, content)
    if RECIPE not in shape.sections:
        # Ours is run anew: its plan B is of the earlier answer.
        target = dataclasses.replace(
            target,
            launch="python {gpus}{file}",
            launch_several="-m torch.distributed.run --nproc_per_node {number} ",
        )
    read_keys = {*(key for row in target.rows for key in row.keys), *target.renamed}
    others = installed_fields().keys() - read_keys
    left = [
        f"{key}: {value}"
        for key, value in content.items()
        if isinstance(value, NotLiteral) and key in others
    ]
    further = [*program.notes, *said]
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


def _open_folder(folder: Path, method: str) -> Opened:
    """Open files of ours as `autotune find` writes them, perhaps edited: together they are one run."""
    try:
        parts = read_folder(folder)
    except ConfigError:
        if os.path.isfile(folder / OURS):
            return _open_mapping(read_part(folder / OURS), method)
        raise
    ours = None
    if os.path.isfile(folder / OURS):
        ours = train_config.read_train_config(folder / OURS)
        method = ours.config.method
    content = all_of(parts)
    sections = frozenset(part.prefix or "arguments" for part in parts)
    shape = Shape(name="a folder of ours", sections=sections, is_part=True)
    target = _fitted(folder, None, lambda: target_for(shape, content, method))
    # The other files of the folder say it.
    fixed = {name: value for name, value in target.fixed.items() if name != "trainer"}
    said = {*fixed, *(name for row in target.rows for name in row.ours)}
    if ours is not None:
        said.discard("precision")  # The dtype of the weights is in our own file.
    target = dataclasses.replace(
        target,
        fixed=fixed,
        elsewhere=tuple(name for name in ("method", *KNOBS) if name not in said),
        caveats=(),
    )
    return Opened(parts=parts, target=target, content=content, ours=ours)


_T = TypeVar("_T")


def _fitted(path: Path, target: TrainerFile | None, fit: Callable[[], _T]) -> _T:
    try:
        return fit()
    except ValueError as error:
        name = "" if target is None else f" ({target.name})"
        raise ConfigError(f"{path} cannot be used{name}", why=str(error)) from error
