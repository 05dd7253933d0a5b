"""Reading of a night's matrix from YAML, with everything that is wrong with it said at once.

studies/nightly.yaml explains each line; in short:

    models: [Qwen/Qwen2.5-1.5B]             required; as --model takes them
    budgets: [all, 12GB]                    default [all]: of the card
    lengths: [1024, 4096]                   tokens per sample; default [1024]
    methods: [lora, [full, qlora]]          a list in the list is one search over several; default: all
    effective_batch, effort, space ...:     fields of Question, for every cell
    time_budget: 6h                         of a night; default 8h
    retune_after: 30d                       a cell is due then, whatever changed; default 30d
    measure_again_after: 12h                what was measured since is left alone; default 12h
    probes: 3                               of the standing winner, at least; default 3
    max_probes: 12                          and at most; default 12
    cells: [{where: {model: ..., budget: ..., length: ..., methods: ...}, priority: 2, skip: true, ...}]

A cell is a model under a budget at a length by methods: one question to `find`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from autotune.common.units import parse_bytes
from autotune.errors import ConfigError, nearest
from autotune.records.question import SEQUENCE_LENGTH, Question
from autotune.search.budget import read_yaml
from autotune.space import values as readers
from autotune.space.config import METHODS
from autotune.space.values import kind
from autotune.space.yaml_schema import a_list, a_mapping, joined, validated
from autotune.store.recommendations import question_key, question_of
from autotune.store.study_names import slug

ALL_OF_THE_CARD = "all"
MAX_CELLS = 10_000
"""Most cells of one matrix: more is a slip, and no night would do."""

AXES = ("model", "budget", "length", "methods")
_NOT_OPTIONS = {
    *("model", "gpu", "gpu_mem", "num_gpus", "seq_len", "methods", "backend", "peft", "study"),
    *("accumulation", "settings"),
}
OPTIONS = tuple(each.name for each in dataclasses.fields(Question) if each.name not in _NOT_OPTIONS)
"""Fields of Question that a matrix sets for all cells, or for some."""

_KEYS = {
    **{f"--{name.replace('_', '-')}": name for name in OPTIONS},
    "--model": "models",
    "--gpu-mem": "budgets",
    "--seq-len": "lengths",
    "--method": "methods",
}
"""Keys of the file by the options of `find` that they stand for."""
_OPTION = re.compile(rf"(--[a-z][a-z-]*)( (?=[0-9]|(?:{'|'.join(METHODS)})\b))?")
"""An option in words, and the space before a value that is given with it."""
_PATHS = ("base",)
_REMEDY = "Copy studies/nightly.yaml and edit it; it explains each line"
_DURATION = re.compile(r"\s*([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*([a-z]+)\s*")
_SECONDS_PER_UNIT = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A question of the matrix."""

    options: Question
    priority: float = 1.0
    name: str = ""
    """Name of the cell, fit for a file's name, and its own in the matrix."""

    @property
    def question(self) -> dict[str, Any]:
        """Return the question as JSON has it: what differs from find's defaults, and no absolute path."""
        return {
            name: _portable(value)
            for name, value in self.options.given.items()
            if name not in ("backend", "study")
        }

    @property
    def key(self) -> str:
        """Return the question's key in the database."""
        return question_key(question_of(self.options))


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """The cells of a night, and the rules for it."""

    cells: tuple[Cell, ...]
    num_skipped: int = 0
    """Number of cells that the file leaves out."""
    time_budget_seconds: float = 8 * 3600.0
    retune_after_seconds: float = 30 * 86_400.0
    measure_again_after_seconds: float = 12 * 3600.0
    probes: int = 3
    max_probes: int = 12


def read(path: Path) -> Matrix:
    """Read a matrix. Raises ConfigError, with every problem of the file and its place."""
    if not os.path.exists(path):  # Path.exists raises for a name that is too long
        raise ConfigError(
            f"There is no matrix {path}",
            remedy="Name a file, whose smallest is one line: models: [Qwen/Qwen2.5-1.5B]",
        )
    read, problems = validated(_schema(), read_yaml(path), _KNOWN_KEYS, "models")
    matrix = None if problems else _matrix(read, problems)
    if matrix is None or problems:
        why = joined([*dict.fromkeys(problems)])
        raise ConfigError(f"The matrix {path} cannot be used", why=why, remedy=_REMEDY)
    return matrix


def in_keys(words: str) -> str:
    """Return words about a cell with the file's keys for options that a command line has."""

    def key(option: re.Match[str]) -> str:
        name = _KEYS.get(option[1])
        return option[0] if name is None else f"{name}{': ' if option[2] else ''}"

    return _OPTION.sub(key, words)


def parse_seconds(value: object) -> float:
    """Read a duration such as `6h`, `90 min`, `30d`. Raises ValueError."""
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in _SECONDS_PER_UNIT:
        raise ValueError(
            f"must be a duration, a number and s, min, h or d, such as 6h, not {kind(value)}"
        )
    return float(match[1]) * _SECONDS_PER_UNIT[match[2]]


_DURATIONS = ("time_budget", "retune_after", "measure_again_after")
_COUNTS = ("probes", "max_probes")
_OF_A_CELL = ("where", "priority", "skip", *OPTIONS)
_KNOWN_KEYS = {
    (): ("models", "budgets", "lengths", "methods", "cells", *OPTIONS, *_DURATIONS, *_COUNTS),
    ("cells",): _OF_A_CELL,
    ("cells", "where"): AXES,
}


@functools.cache
def _schema() -> Any:
    """Return the file's pydantic model. Question checks its own fields, once a cell is made."""
    from typing import Annotated

    from pydantic import AfterValidator, BeforeValidator

    def value(read: Callable[[Any], Any]) -> Any:
        return (Annotated[Any, AfterValidator(read)], None)

    def some_of(axis: str) -> Any:
        one_is = tuple if axis == "methods" else list
        listed = BeforeValidator(lambda each: each if isinstance(each, one_is) else [each])
        return (Annotated[a_list(_CHECKS[axis]), listed], None)

    options = dict.fromkeys(OPTIONS, (Any, None))
    where = a_mapping("where", **{axis: some_of(axis) for axis in AXES})
    cell = a_mapping(
        "cell",
        where=(where, where()),
        priority=value(readers.above_zero),
        skip=value(readers.flag),
        **options,
    )
    return a_mapping(
        "matrix",
        models=(a_list(_check_model), ...),
        budgets=(a_list(_check_budget), (ALL_OF_THE_CARD,)),
        lengths=(a_list(_check_length), (SEQUENCE_LENGTH,)),
        methods=(a_list(_check_methods), ((),)),
        cells=(list[cell], ()),  # type: ignore[valid-type]
        **dict.fromkeys(_DURATIONS, value(parse_seconds)),
        **dict.fromkeys(_COUNTS, value(_check_count)),
        **options,
    )


def _given(read: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the values of those fields that the file has."""
    return {name: getattr(read, name) for name in names if name in read.model_fields_set}


def _matrix(read: Any, problems: list[str]) -> Matrix:
    """Make the matrix, and add to the problems what no field shows by itself."""
    axes = dict(zip(AXES, (read.models, read.budgets, read.lengths, read.methods), strict=True))
    overrides = [(_given(cell.where, AXES), _given(cell, _OF_A_CELL[1:])) for cell in read.cells]
    for number, (where, _) in enumerate(overrides):
        for name, values in where.items():
            if not set(values) & set(axes[name]):
                known = ", ".join(map(str, axes[name]))
                problems.append(
                    f"cells, item {number + 1}.where.{name}: matches nothing of {known}"
                )
    seconds = {f"{name}_seconds": value for name, value in _given(read, _DURATIONS).items()}
    made = Matrix(cells=(), **seconds, **_given(read, _COUNTS))
    if made.probes > made.max_probes:
        problems.append("probes: is more than max_probes")
    num_points = math.prod(map(len, axes.values()))
    if num_points > MAX_CELLS:
        problems.append(f"{num_points:,} cells are more than {MAX_CELLS:,}")
    if problems:
        return made
    points = itertools.product(*axes.values())
    cells = [*_cells(points, _given(read, OPTIONS), overrides, problems)]
    if not cells and not problems:
        problems.append("cells: every cell is skipped")
    return dataclasses.replace(
        made, cells=tuple(_named(cells)), num_skipped=num_points - len(cells)
    )


def _cells(
    points: Iterable[tuple[Any, ...]],
    common: Mapping[str, Any],
    overrides: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    problems: list[str],
) -> Iterator[Cell]:
    for point in points:
        model, budget, length, methods = point
        own: dict[str, Any] = {}
        for where, override in overrides:
            if all(point[AXES.index(name)] in values for name, values in where.items()):
                own |= override
        if own.pop("skip", False):
            continue
        priority = own.pop("priority", 1.0)
        options = dict(common) | own
        paths = {name: Path(options[name]) for name in _PATHS if isinstance(options.get(name), str)}
        try:
            yield Cell(
                options=Question(
                    model=model,
                    gpu_mem=None if budget == ALL_OF_THE_CARD else budget,
                    seq_len=length,
                    methods=methods,
                    **(options | paths),
                ),
                priority=float(priority),
            )
        except ConfigError as error:
            problems.append(in_keys(str(error)).rstrip("."))


def _named(cells: Sequence[Cell]) -> Iterator[Cell]:
    """Yield each cell with a name of its own; where two would share one, both get part of their key in it."""
    names = [_name(cell.options) for cell in cells]
    for cell, name in zip(cells, names, strict=True):
        unique = name if names.count(name) == 1 else f"{name}-{cell.key[:6]}"
        yield dataclasses.replace(cell, name=unique)


def _name(options: Question) -> str:
    path = PurePath(options.model or "")
    model = path.parent.name if path.name == "config.json" else path.name
    budget = slug(options.gpu_mem or ALL_OF_THE_CARD)
    return "-".join([slug(model), budget, f"seq{options.seq_len}", *(options.methods or ("any",))])


def _check_model(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError(f"must be the name of a model, not {kind(value)}")
    return value


def _check_budget(value: object) -> str:
    if value == ALL_OF_THE_CARD:
        return ALL_OF_THE_CARD
    if not isinstance(value, str):
        raise ValueError(f"must be {ALL_OF_THE_CARD} or a size such as 12GB, not {kind(value)}")
    try:
        parse_bytes(value)
    except ConfigError as error:
        raise ValueError(f"must be {ALL_OF_THE_CARD} or a size: {error}".rstrip(".")) from error
    return value


def _check_length(value: object) -> int:
    if type(value) is not int or not 1 <= value <= 10_000_000:
        raise ValueError(f"must be a whole number of tokens, not {kind(value)}")
    return value


def _check_count(value: object) -> int:
    if type(value) is not int or not 2 <= value <= 1000:
        raise ValueError(f"must be 2 to 1000, not {kind(value)}")
    return value


def _check_methods(value: object) -> tuple[str, ...]:
    names = value if isinstance(value, list) else [value]
    if not names:
        raise ValueError("must not be empty")
    for name in names:
        if name not in METHODS or name == "peft":
            shown = str(name)[:40]
            raise ValueError(f"{shown!r} is no method. {nearest(shown, set(METHODS) - {'peft'})}")
    return tuple(dict.fromkeys(names))


_CHECKS = {
    "model": _check_model,
    "budget": _check_budget,
    "length": _check_length,
    "methods": _check_methods,
}


def _portable(value: object) -> Any:
    """Return a value as JSON has it, and of an absolute path its last part."""
    if isinstance(value, PurePath):
        return value.name
    if isinstance(value, str) and PurePath(value).is_absolute():
        path = PurePath(value)
        return path.parent.name if path.name == "config.json" else path.name
    return list(value) if isinstance(value, tuple) else value
