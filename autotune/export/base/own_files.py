"""Files of settings that a Python program loads: `config = yaml.safe_load(f)`, `cfg = load_config(path)`.

A program is never run, so the file is the one that it names anywhere and that is here, with settings of a
training in it or in a section; two of them are none. The options that the program is started with come first.
"""

from __future__ import annotations

import ast
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.common.files import read_text
from autotune.errors import ConfigError
from autotune.export.base import edit
from autotune.export.base.command_line import says_how_it_trains
from autotune.export.base.own_fields import asked
from autotune.export.train_config import MAX_FILE_BYTES

SETTINGS = (".yaml", ".yml", ".json")
_LOADS = re.compile(
    r"load|load\w*_(config|settings|yaml|json)|(safe|full)_load|(get|read|parse)_config"
)


def found_beside(path: Path, named: str) -> Path | None:
    """Return the file that a user's file names: here, beside it or in the two folders above."""
    folders = (Path(), path.parent, *path.absolute().parents[1:3])
    return next((each / named for each in folders if os.path.isfile(each / named)), None)


def loaded_by(
    text: str, path: Path, given: Mapping[str, Any]
) -> tuple[str, Mapping[str, ast.expr]]:
    """Return the name of the file that a program loads, and its values by what asks for them."""
    if "yaml" not in text and "json" not in text:
        return "", {}
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "", {}
    names = _loaded_names(tree)
    literals = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    for said in (given.values(), literals) if names else ():
        files = {each for each in said if isinstance(each, str) and each.endswith(SETTINGS)}
        found = {file: content for file in sorted(files) if (content := _settings(path, file))}
        if found:
            ((file, content),) = list(found.items())[:1]
            if len(found) > 1:
                break
            return file, {
                key: value
                for name in names
                for way in ("{}[{}]", "{}.{}")
                for key, value in [(name, _constant(content)), *_values(name, content, way)]
            }
    return "", {}


def _loaded_names(tree: ast.Module) -> list[str]:
    """Return names that are bound once, to what a function loads, or that are parameters beside that."""
    bound: Counter[str] = Counter()
    loaded: set[str] = set()
    changed: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=function)) if (
                _LOADS.fullmatch(asked(function).rpartition(".")[2])
            ):
                loaded.add(name)
            case (
                ast.Subscript(value=value, ctx=ast.Store())
                | ast.Call(func=ast.Attribute(value=value, attr="update" | "pop" | "setdefault"))
            ):
                changed.add(re.split(r"[.\[]", asked(value))[0])
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound[node.id] += 1
    return [name for name in sorted(loaded - changed) if bound[name] == 1]


def _settings(path: Path, named: str) -> dict[str, Any] | None:
    """Return the content of a file that says how a run trains, itself or in a section; None for others."""
    place = found_beside(path, named)
    if place is None:
        return None
    import yaml

    try:
        content = edit.parsed(
            read_text(place, MAX_FILE_BYTES, usual="A configuration has a few KiB")
        )
    except (ConfigError, yaml.YAMLError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    sections = [content, *(each for each in content.values() if isinstance(each, dict))]
    return content if any(map(says_how_it_trains, sections)) else None


def _values(owner: str, content: Mapping[str, Any], way: str) -> Iterator[tuple[str, ast.expr]]:
    """Yield the values of a file, and of its sections, as constants: no place of the program has them."""
    for name, value in content.items():
        key = way.format(owner, name)
        yield key, _constant(value)
        if isinstance(value, Mapping):
            yield from _values(key, value, way)


def _constant(value: Any) -> ast.Constant:
    return ast.Constant(value, lineno=1, col_offset=0, end_lineno=1, end_col_offset=0)
