"""Shell scripts that start a training: their options, or the program that they start with these options.

What a script's `--config` and accelerate's own file say is read beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError
from autotune.export.base import huggingface, launch
from autotune.export.base.command_line import Command, says_how_it_trains
from autotune.export.base.mapping_read import read
from autotune.export.base.opened import (
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
from autotune.export.mapping import Spelling, TrainerFile, choices

_NAMES_SETTINGS = ("config", "config_file", "config_path", "train_args_file")
"""Options of programs that name a file of settings."""
_FROM_FILE = re.compile(r"\.parse_(json|yaml)_file\(")
"""Methods of HfArgumentParser that read settings of a file, and take no options beside it."""
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
    number = command.num_processes
    starts = (f"line {command.line}", number) if number is not None and number > 1 else None
    if program is not None and not takes_all_options(program.text):
        opened = open_program(dataclasses.replace(program, given=content), method, task)
        assert opened.target is not None
        launch = f"{_escaped(command.before)} {{file}} {_escaped(command.rest)}".strip()
        target = dataclasses.replace(opened.target, launch=launch, launch_several="")
        notes = (*opened.notes, *said)
        return dataclasses.replace(opened, target=target, notes=notes, starts=starts)
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
    target, of_accelerate, started = _shared_by_accelerate(path, target, command)
    said = [*said, *notes_on_options, *of_deepspeed, *of_accelerate]
    return Opened(
        parts=(part,),
        target=target,
        content=content,
        notes=tuple(said),
        task=task_of(command, text or ""),
        starts=starts or (started if number is None else None),
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


def _shared_by_accelerate(
    path: Path, target: TrainerFile, command: Command
) -> tuple[TrainerFile, tuple[str, ...], tuple[str, int] | None]:
    """Return the table with what accelerate's file shares, if the launcher names one, notes, and `starts`."""
    named = command.launched.get("config_file")
    if named is None:
        return target, (), None
    place = found_beside(path, str(named))
    starts = None
    problem = f"{named} is no file here or beside it"
    said: list[str] = []
    if place is not None:
        try:
            opened = open_mapping(read_part(place), "full")
            assert opened.target is not None
            values, problems = read(opened.target, opened.content)
            problem = "; ".join(problems)
            said += (f"{named}: {note}" for note in launch.numbers_of_batches(opened.content))
            number = opened.content.get("num_processes")
            if type(number) is int and number > 1:
                starts = str(named), number
        except ConfigError as error:
            problem = str(error)
        if not problem:
            # The script can say no other; on one GPU it shares nothing.
            names = (values["parallelism"], "none")
            row = choices(("parallelism",), *(Spelling(ours=(name,), theirs={}) for name in names))
            others = (each for each in target.rows if each.ours != row.ours)
            return dataclasses.replace(target, rows=(*others, row)), tuple(said), starts
        problem = f"{named}: {problem}"
    return target, (f"{problem}: --parallelism says how GPUs share the run", *said), starts


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
