"""Files of a run that a user has: YAML, JSON, Python or a shell script, alone or several in a folder.

A Part is one of them. Its keys have the name of its section before them (`sections`), so that what several
files say is one table, and a change finds its file.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.common.files import read_text
from autotune.errors import ConfigError
from autotune.export.base import command_line, edit
from autotune.export.base.edit import KeyEdit
from autotune.export.base.own_files import loaded_by
from autotune.export.base.section_rows import ADAPTER, QUANTIZATION
from autotune.export.train_config import MAX_FILE_BYTES

if TYPE_CHECKING:
    import ast

    from autotune.export.base.literals import Program

FURTHER_FOLDER = "exports"
OURS = "train_config.yaml"
OF_FOLDER = {
    "": "training_args.json",
    ADAPTER: "adapter_config.json",
    QUANTIZATION: "quantization_config.json",
}
"""File name by the prefix of its keys, in the folder or in its FURTHER_FOLDER."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFile:
    """A file of the run."""

    path: Path
    text: str
    prefix: str = ""
    has_bf16: bool = True
    """Whether the card has bfloat16: what a program asks for."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Options that a program is started with."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Options that a script leaves out, as its program or its recipe has them."""
    takes: frozenset[str] | None = None
    """Options that a script's program takes; None: all that are written."""

    @property
    def is_program(self) -> bool:
        return self.path.suffix == ".py"

    @property
    def is_script(self) -> bool:
        return command_line.is_script(self.path, self.text)

    def command(self) -> command_line.Command:
        """Return the command of a shell script that trains. ConfigError where there is none."""
        try:
            return command_line.parsed(self.text)
        except ValueError as error:
            raise ConfigError(
                f"{self.path} cannot be used (a shell script)", why=str(error)
            ) from error

    @property
    def loaded(self) -> tuple[str, Mapping[str, ast.expr]]:
        """The file of settings that a program loads, and its values (own_files); nothing where it is none."""
        return loaded_by(self.text, self.path, self.given) if self.is_program else ("", {})

    def program(self) -> Program:
        """Return the file as a program. ConfigError where it is none."""
        from autotune.export.base.program import parsed

        try:
            return parsed(
                self.text, has_bf16=self.has_bf16, given=self.given, loaded=self.loaded[1]
            )
        except ValueError as error:
            raise ConfigError(f"{self.path} is not a Python program", why=str(error)) from error

    def content(self) -> Any:
        """Return values by key.

        Raises yaml.YAMLError, ValueError or RecursionError, a program ConfigError.
        """
        if self.is_program:
            return self.program().content
        if self.is_script:
            return {**self.defaults, **self.command().content}
        content = edit.parsed(self.text)
        if not self.prefix or not isinstance(content, dict):
            return content
        return {f"{self.prefix}{key}": value for key, value in content.items()}

    def has(self, key: str) -> bool:
        """Return whether the key is one of this file's."""
        prefix, colon, _ = key.partition(":")
        return self.is_program or self.prefix == (prefix + colon if colon else "")

    def edited(self, changes: Sequence[KeyEdit]) -> tuple[str, bool, list[KeyEdit]]:
        """Return the text with those changes that are this file's.

        Also: whether all comments are still there; what could not be made.
        """
        ours = [change for change in changes if self.has(change.key)]
        if self.is_program:
            from autotune.export.base import program_edit

            text, left = program_edit.edited(
                self.text,
                ours,
                has_bf16=self.has_bf16,
                given=self.given,
                loaded=self.loaded[1],
            )
            return text, True, left
        if self.is_script:
            stuck = [change for change in ours if self._is_stuck(change)]
            made = [change for change in ours if change not in stuck]
            text, left = command_line.edited(self.text, made)
            return text, True, [*stuck, *left]
        cut = [_without(change, self.prefix) for change in ours]
        return *edit.edited(self.text, cut), []

    def _is_stuck(self, change: KeyEdit) -> bool:
        """Return whether a script cannot say the change: its program has it by default, or takes no such."""
        name = change.key.partition(".")[0]
        if change.value is None:
            return name in self.defaults
        return self.takes is not None and name not in self.takes


def read_part(path: Path, prefix: str = "", *, has_bf16: bool = True) -> RunFile:
    """Read a file. Raises ConfigError for what cannot be read, is too large or is no text."""
    text = read_text(path, MAX_FILE_BYTES, usual="A configuration has a few KiB")
    return RunFile(path=path, text=text, prefix=prefix, has_bf16=has_bf16)


def read_folder(folder: Path) -> tuple[RunFile, ...]:
    """Read the files of OF_FOLDER that are there. Raises ConfigError where there is none."""
    parts = []
    for prefix, name in OF_FOLDER.items():
        places = (folder / name, folder / FURTHER_FOLDER / name)
        path = next((place for place in places if os.path.isfile(place)), None)
        if path is not None:
            parts.append(read_part(path, prefix))
    if not parts:
        names = ", ".join(OF_FOLDER.values())
        raise ConfigError(
            f"{folder} cannot be read",
            why=f"It is a folder without {names}",
            remedy="Name a file, or a folder that `autotune find` has written",
        )
    return tuple(parts)


def all_of(parts: Sequence[RunFile]) -> dict[str, Any]:
    """Return the settings of all files together. ConfigError for one that is no mapping."""
    import yaml

    content: dict[str, Any] = {}
    for part in parts:
        try:
            found = part.content()
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            why = getattr(error, "problem", None) or str(error)
            why = "It is nested too deeply" if isinstance(error, RecursionError) else why
            raise ConfigError(f"{part.path} is neither YAML nor JSON", why=why) from error
        if not isinstance(found, Mapping):
            raise ConfigError(f"{part.path} is no mapping of settings to values")
        content |= found
    return content


def _without(change: KeyEdit, prefix: str) -> KeyEdit:
    def cut(key: str) -> str:
        return key.removeprefix(prefix)

    after, instead = tuple(map(cut, change.after)), cut(change.instead)
    return dataclasses.replace(change, key=cut(change.key), after=after, instead=instead)
