"""Shell scripts that start a training: their options, or the program that they start with these options.

What a script's `--config` and accelerate's own file say is read beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError
from autotune.export.base import huggingface, launch
from autotune.export.base.command_line import Command, says_how_it_trains
from autotune.export.base.mapping_read import notes as mapping_notes
from autotune.export.base.mapping_read import read
from autotune.export.base.opened import (
    SEVERAL_PROCESSES,
    Opened,
    fit_table,
    open_mapping,
    open_program,
    shared_among_gpus,
)
from autotune.export.base.own_files import SETTINGS, found_beside
from autotune.export.base.parts import RunFile, all_of, read_part
from autotune.export.base.program_options import (
    defaults_of,
    notes_on_launch,
    reads_recipe,
    table_of,
    takes_all_options,
    task_of,
)
from autotune.export.base.section_rows import MIXED
from autotune.export.mapping import Row, Spelling, choices
from autotune.export.trainer_rows import FP8_IS_OURS

_NAMES_SETTINGS = ("config", "config_file", "config_path", "train_args_file")
"""Options of programs that name a file of settings."""
_FROM_FILE = re.compile(r"\.parse_(json|yaml)_file\(")
"""Methods of HfArgumentParser that read settings of a file, and take no options beside it."""
_STARTS_SEVERAL = ("accelerate", "deepspeed", "torchrun", "torch.distributed")
_SWITCHES = ("bf16", "fp16")
"""Arguments of Trainer's that switch mixed precision on."""
_IS_ASKED = "--parallelism says how GPUs share the run"
_LAUNCHES = {".slurm": "sbatch {file}", ".sbatch": "sbatch {file}"}


def open_script(part: RunFile, method: str, task: str | None = None) -> Opened:
    """Open a shell script: the options that it starts a program with, or the program with these options."""
    command = part.command()
    path, content = part.path, dict(command.content)
    place = _place_of(path, command.program)
    program = None if place is None else read_part(place, has_bf16=part.has_bf16)
    text = None if program is None else program.text
    is_recipe = reads_recipe(command, text)
    files = [each for each in command.positional if each.endswith(SETTINGS)]
    named = [] if files or is_recipe else _options_with_settings(path, content)
    files += [content.pop(name) for name in named]
    file = next(iter(files), None)
    takes_options = text is None or (takes_all_options(text) and not _FROM_FILE.search(text))
    if file is not None and not (takes_options and content.keys() - {"env"}):
        raise ConfigError(
            f"{path} cannot be used (a shell script)",
            why=f"{command.program} takes its settings from {file}",
            remedy="Give that file as --base",
        )
    said = notes_on_launch(command)
    is_alone = _starts_one(command)
    number = 1 if is_alone else command.num_processes
    starts = None if number is None else (f"line {command.line}", number)
    if program is not None and not takes_all_options(program.text):
        opened = open_program(dataclasses.replace(program, given=content), method, task)
        assert opened.target is not None
        launch = f"{_escaped(command.before)} {{gpus}}{{file}} {_escaped(command.rest)}".strip()
        several = SEVERAL_PROCESSES if is_alone else ""
        target = dataclasses.replace(opened.target, launch=launch, launch_several=several)
        notes = (*opened.notes, *said)
        opened = dataclasses.replace(opened, target=target, notes=notes, starts=starts)
        return _as_launched(path, opened, command)
    defaults = {} if text is None else defaults_of(text)
    if file is not None:
        defaults |= _named(path, file, file)
    elif is_recipe:
        named = content.pop("config", None)
        defaults |= {} if named is None else _named(path, str(named), f"--config {named}")
    content = {**defaults, **content}
    target, takes, notes_on_options = fit_table(
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
    target, of_deepspeed = shared_among_gpus(path, target, content)
    opened = Opened(
        parts=(part,),
        target=target,
        content=content,
        notes=(*said, *notes_on_options, *of_deepspeed),
        task=task_of(command, text or ""),
        starts=starts,
    )
    return _as_launched(path, opened, command)


def _starts_one(command: Command) -> bool:
    """Return whether Python itself starts the program, in one process."""
    words = command.launcher
    return any(Path(word).name.startswith("python") for word in words) and not any(
        launcher in word for word in words for launcher in _STARTS_SEVERAL
    )


def _options_with_settings(path: Path, content: Mapping[str, Any]) -> list[str]:
    """Return the option that names a file here with settings of a training, if there is one."""
    for name in _NAMES_SETTINGS:
        file = str(content.get(name))
        place = found_beside(path, file) if file.endswith(SETTINGS) else None
        with contextlib.suppress(ConfigError):  # It is the program's own.
            if place is not None and says_how_it_trains(all_of((read_part(place),))):
                return [name]
    return []


def _place_of(path: Path, program: str) -> Path | None:
    """Return the place of a script's program, or None; `$HERE/train.py` is looked for as `train.py`."""
    parts = program.split("/")
    names = ["/".join(parts[at:]) for at in range(len(parts))] if "$" in program else [program]
    names.append(f"{program.replace('.', '/')}.py")
    return next((place for name in names if (place := found_beside(path, name))), None)


def _named(path: Path, file: str, words: str) -> dict[str, Any]:
    """Return the content of a file of settings that a script names, in these words. Raises ConfigError."""
    place = found_beside(path, file)
    if place is None:
        raise ConfigError(
            f"{path} cannot be used (a shell script)",
            why=f"{words} is no file here or beside it",
            remedy="Ask in the folder that it is named from",
        )
    return all_of((read_part(place),))


def _as_launched(path: Path, opened: Opened, command: Command) -> Opened:
    """Return the run as accelerate launches it: by its file, before which go the launcher's options."""
    if not any("accelerate" in word for word in command.launcher):
        return opened
    named = command.launched.get("config_file")
    place, words = None, f"line {command.line}"
    if named is not None:
        place, words = found_beside(path, str(named)), str(named)
    elif os.path.isfile(usual := _usual_config()):
        place, words = usual, "accelerate's own configuration"
        opened = _noting(
            opened, f"{place} says how accelerate launches it: --config_file names another"
        )
    said: dict[str, Any] = {}
    try:
        if named is not None and place is None:
            raise ConfigError(f"{named} is no file here or beside it")
        said = all_of((read_part(place),)) if place is not None else {}
        said = launch.with_options(said, command.launched)
        if "distributed_type" in said:
            file = place or path.with_name("accelerate launch")
            # Where no number is said, accelerate starts a process for each card that it finds.
            text = json.dumps({"num_processes": 1, **said}, default=str, skipkeys=True)
            opened = _shared(opened, RunFile(path=file, text=text), words)
    except ConfigError as error:
        opened = _noting(opened, f"{str(error).rstrip('.')}: {_IS_ASKED}")
    return _with_mixed_precision(opened, str(said.get("mixed_precision")))


def _noting(opened: Opened, *notes: str) -> Opened:
    return dataclasses.replace(opened, notes=(*opened.notes, *notes))


def _usual_config() -> Path:
    """Return the place of the file that accelerate takes where none is named: `accelerate config` writes it.

    Source: accelerate 1.15 commands/config/config_args.py.
    """
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(caches, "huggingface"))
    return Path(os.path.expanduser(home), "accelerate", "default_config.yaml")


def _shared(opened: Opened, part: RunFile, words: str) -> Opened:
    """Return the run with how GPUs share it by accelerate's settings. Raises ConfigError."""
    launched = open_mapping(part, "full")
    target = opened.target
    assert launched.target is not None
    assert target is not None
    values, problems = read(launched.target, launched.content)
    further = mapping_notes(launched.target, launched.content)
    further += launch.numbers_of_batches(launched.content)
    opened = _noting(opened, *(f"{words}: {note}" for note in further))
    number = launched.content.get("num_processes")
    if opened.starts is None and type(number) is int and number > 1:
        opened = dataclasses.replace(opened, starts=(words, number))
    if problems:
        return _noting(opened, f"{words}: {'; '.join(problems)}: {_IS_ASKED}")
    # The script can say no other; on one GPU it shares nothing.
    names = (values["parallelism"], "none")
    row = choices(("parallelism",), *(Spelling(ours=(name,), theirs={}) for name in names))
    others = (each for each in target.rows if each.ours != row.ours)
    return dataclasses.replace(opened, target=dataclasses.replace(target, rows=(*others, row)))


def _with_mixed_precision(opened: Opened, mixed: str) -> Opened:
    """Return the run with the launcher's precision, which holds where the program switches none on.

    No run is without one then. Source: transformers 5.23 TrainingArguments.__post_init__; accelerate 1.15
    Accelerator.
    """
    if mixed == "fp8":
        return _noting(opened, f"mixed_precision: fp8 {FP8_IS_OURS}")
    if mixed not in _SWITCHES:
        return opened
    target = opened.target
    assert target is not None

    def left(row: Row) -> Row:
        if "precision" not in row.ours:
            return row
        said = {*_SWITCHES} & {*row.keys}
        kept = (each for each in row.choices if any(map(each.theirs.get, said)) or not said)
        return dataclasses.replace(row, choices=tuple(kept))

    target = dataclasses.replace(
        target,
        rows=tuple(map(left, target.rows)),
        defaults={**target.defaults, mixed: True, MIXED: mixed},
    )
    is_on = any(map(opened.content.get, _SWITCHES))
    content = opened.content if is_on else {**opened.content, mixed: True}
    return dataclasses.replace(opened, target=target, content=content)


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
