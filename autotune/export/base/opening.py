"""Opening of a `--base`: a file, a folder of ours, a script, or a command that is typed in place of one."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from autotune.errors import ConfigError
from autotune.export import train_config
from autotune.export.base.launch_script import open_script
from autotune.export.base.opened import Opened, fit_table, open_mapping, open_program
from autotune.export.base.parts import OURS, RunFile, all_of, read_folder, read_part
from autotune.export.base.sections import Shape, target_for
from autotune.space.knobs import KNOBS

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
        opened = open_script(typed, method, task)
        if opened.parts[0].path != _TYPED:  # The program has the settings.
            return opened
        said = "it stands for the command that was typed"
        return dataclasses.replace(opened, notes=(said, *opened.notes))
    part = read_part(path, has_bf16=has_bf16)
    read_part_of = open_program if part.is_program else open_mapping
    return (open_script if part.is_script else read_part_of)(part, method, task)


def _open_folder(folder: Path, method: str) -> Opened:
    """Open files of ours as `autotune find` writes them, perhaps edited: together they are one run."""
    try:
        parts = read_folder(folder)
    except ConfigError:
        if os.path.isfile(folder / OURS):
            return open_mapping(read_part(folder / OURS), method)
        raise
    ours = None
    if os.path.isfile(folder / OURS):
        ours = train_config.read_train_config(folder / OURS)
        method = ours.config.method
    content = all_of(parts)
    sections = frozenset(part.prefix or "arguments" for part in parts)
    shape = Shape(name="a folder of ours", sections=sections, is_part=True)
    target = fit_table(folder, None, lambda: target_for(shape, content, method))
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
