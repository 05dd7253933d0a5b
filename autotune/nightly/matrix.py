"""Reads the matrix of a night from YAML, and says everything that is wrong with it at once.

studies/nightly.yaml explains each line; in short:

    models: [Qwen/Qwen2.5-1.5B]             required; as --model takes them
    budgets: [all, 12GB]                    default [all]: of the card
    lengths: [1024, 4096]                   tokens per sample; default [1024]
    methods: [lora, [full, qlora]]          a list in the list is one search over several; default: all
    effective_batch, effort, space ...:     fields of FindOptions, for every cell
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
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from autotune.common.units import parse_bytes
from autotune.errors import ConfigError, nearest
from autotune.records.question import SEQUENCE_LENGTH, FindOptions
from autotune.search import budget as inputs
from autotune.space.config import METHODS
from autotune.store.recommendations import question_key, question_of
from autotune.store.study_names import slug

ALL_OF_THE_CARD = "all"
MAX_CELLS = 10_000
"""Of one matrix: more is a slip, and no night would do."""

AXES = ("model", "budget", "length", "methods")
OPTIONS = (
    "effective_batch",
    "effort",
    "space",
    "allow",
    "task",
    "base",
    "dataset",
    "text_field",
    "tokenizer",
    "confirm_steps",
    "compile_mode",
    "train_steps",
)
"""Fields of FindOptions that a matrix sets for all cells, or for some."""

_PATHS = ("base", "dataset")
_REMEDY = "Copy studies/nightly.yaml and edit it; it explains each line"
_DURATION = re.compile(r"\s*([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*([a-z]+)\s*")
_SECONDS_PER_UNIT = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400}
_MAX_PROBLEMS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One question of the matrix."""

    options: FindOptions
    priority: float = 1.0
    name: str = ""
    """Fit for a file's name, and its own in the matrix."""

    @property
    def question(self) -> dict[str, Any]:
        """What is asked, as JSON has it: what differs from find's defaults, and no absolute path."""
        return {
            field.name: _portable(value)
            for field in dataclasses.fields(FindOptions)
            if (value := getattr(self.options, field.name)) != field.default
            and field.name not in ("backend", "study")
        }

    @property
    def key(self) -> str:
        """Of the question, as the database has it."""
        return question_key(question_of(self.options))


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """What a night is asked for."""

    cells: tuple[Cell, ...]
    num_skipped: int = 0
    """That the file leaves out."""
    time_budget_seconds: float = 8 * 3600.0
    retune_after_seconds: float = 30 * 86_400.0
    measure_again_after_seconds: float = 12 * 3600.0
    probes: int = 3
    max_probes: int = 12


def read(path: Path) -> Matrix:
    """Read a matrix. Raises ConfigError, with every problem of the file and its place."""
    if not path.exists():
        raise ConfigError(
            f"There is no matrix {path}",
            remedy="Name a file, whose smallest is one line: models: [Qwen/Qwen2.5-1.5B]",
        )
    document = inputs.read_yaml(path)
    try:
        if not isinstance(document, dict):
            raise _Problems([f"the file must be a mapping with `models`, not {_kind(document)}"])
        return _matrix(document)
    except _Problems as error:
        shown = [*error.problems[:_MAX_PROBLEMS]]
        if more := len(error.problems) - _MAX_PROBLEMS:
            shown += [f"and {more} more"] if more > 0 else []
        raise ConfigError(
            f"The matrix {path} cannot be used", why="; ".join(shown), remedy=_REMEDY
        ) from None


def parse_seconds(value: object) -> float:
    """Read a duration such as `6h`, `90 min`, `30d`. Raises ValueError."""
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in _SECONDS_PER_UNIT:
        raise ValueError("should be a duration: a number and s, min, h or d, such as 6h")
    return float(match[1]) * _SECONDS_PER_UNIT[match[2]]


class _Problems(Exception):
    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__(*problems)


_DURATIONS = ("time_budget", "retune_after", "measure_again_after")
_COUNTS = ("probes", "max_probes")
_LISTS = ("models", "budgets", "lengths", "methods", "cells")
_TOP = (*_LISTS, *OPTIONS, *_DURATIONS, *_COUNTS)
_OF_A_CELL = ("where", "priority", "skip", *OPTIONS)


def _matrix(document: Mapping[Any, Any]) -> Matrix:
    problems = [*_unknown(document, _TOP, "")]
    lists = {name: document[name] for name in _LISTS if name in document}
    for name, values in lists.items():
        if not isinstance(values, list) or (not values and name != "cells"):
            problems.append(f"{name}: should be a list with something in it")
            lists[name] = []
    if not lists.get("models") and "models" not in document:
        problems.append("models: is missing")
    settings: dict[str, Any] = {}
    for name in _DURATIONS:
        if name in document:
            try:
                settings[f"{name}_seconds"] = parse_seconds(document[name])
            except ValueError as error:
                problems.append(f"{name}: is {_shown(document[name])} and {error}")
    for name in _COUNTS:
        if name in document:
            settings[name] = document[name]
            if type(document[name]) is not int or not 2 <= document[name] <= 1000:
                problems.append(f"{name}: is {_shown(document[name])} and should be 2 to 1000")
    overrides = [*_overrides(lists.get("cells", []), problems)]
    axes = {
        "model": _axis(lists.get("models", []), _check_model, "models", problems),
        "budget": _axis(
            lists.get("budgets", [ALL_OF_THE_CARD]), _check_budget, "budgets", problems
        ),
        "length": _axis(
            lists.get("lengths", [SEQUENCE_LENGTH]), _check_length, "lengths", problems
        ),
        "methods": _axis(lists.get("methods", [[]]), _check_methods, "methods", problems),
    }
    if problems:
        raise _Problems(problems)
    for number, override in enumerate(overrides):
        for name, values in override["where"].items():
            if not set(values) & set(axes[name]):
                known = ", ".join(map(str, axes[name]))
                problems.append(
                    f"cells, item {number + 1}.where.{name}: matches nothing of {known}"
                )
    if settings.get("probes", 3) > settings.get("max_probes", 12):
        problems.append("probes: is more than max_probes")
    points = [*itertools.product(*axes.values())]
    if len(points) > MAX_CELLS:
        problems.append(f"{len(points):,} cells are more than {MAX_CELLS:,}")
    if problems:
        raise _Problems(problems)
    common = {name: document[name] for name in OPTIONS if name in document}
    cells = [*_cells(points, common, overrides, problems)]
    if not problems and not cells:
        problems.append("cells: every cell is skipped")
    if problems:
        raise _Problems([*dict.fromkeys(problems)])
    return Matrix(cells=tuple(_named(cells)), num_skipped=len(points) - len(cells), **settings)


def _cells(
    points: Sequence[tuple[Any, ...]],
    common: Mapping[str, Any],
    overrides: Sequence[Mapping[str, Any]],
    problems: list[str],
) -> Iterator[Cell]:
    for point in points:
        model, budget, length, methods = point
        own: dict[str, Any] = {}
        for override in overrides:
            where = override["where"].items()
            if all(point[AXES.index(name)] in values for name, values in where):
                own |= {name: value for name, value in override.items() if name != "where"}
        if own.pop("skip", False):
            continue
        priority = own.pop("priority", 1.0)
        options = dict(common) | own
        paths = {name: Path(options[name]) for name in _PATHS if isinstance(options.get(name), str)}
        try:
            yield Cell(
                options=FindOptions(
                    model=model,
                    gpu_mem=None if budget == ALL_OF_THE_CARD else budget,
                    seq_len=length,
                    methods=methods,
                    **(options | paths),
                ),
                priority=float(priority),
            )
        except ConfigError as error:
            problems.append(str(error).rstrip("."))


def _named(cells: Sequence[Cell]) -> Iterator[Cell]:
    """Each with a name of its own; where two would share one, both have part of their key in it."""
    names = [_name(cell.options) for cell in cells]
    for cell, name in zip(cells, names, strict=True):
        unique = name if names.count(name) == 1 else f"{name}-{cell.key[:6]}"
        yield dataclasses.replace(cell, name=unique)


def _name(options: FindOptions) -> str:
    path = PurePath(options.model or "")
    model = path.parent.name if path.name == "config.json" else path.name
    budget = slug(options.gpu_mem or ALL_OF_THE_CARD)
    return "-".join([slug(model), budget, f"seq{options.seq_len}", *(options.methods or ("any",))])


def _overrides(values: Sequence[Any], problems: list[str]) -> Iterator[dict[str, Any]]:
    for number, value in enumerate(values):
        place = f"cells, item {number + 1}"
        if not isinstance(value, dict):
            problems.append(f"{place}: should be a mapping, not {_kind(value)}")
            continue
        problems += _unknown(value, _OF_A_CELL, f"{place}.")
        where = value.get("where", {})
        if not isinstance(where, dict):
            problems.append(f"{place}.where: should be a mapping, not {_kind(where)}")
            continue
        problems += _unknown(where, AXES, f"{place}.where.")
        if type(value.get("skip", False)) is not bool:
            problems.append(f"{place}.skip: should be true or false")
        priority = value.get("priority", 1)
        if type(priority) not in (int, float) or not 0 < priority <= 1e6:
            problems.append(f"{place}.priority: is {_shown(priority)} and should be more than 0")
        read = {
            name: _axis(
                each if isinstance(each, list) and name != "methods" else [each],
                _CHECKS[name],
                f"{place}.where.{name}",
                problems,
            )
            for name, each in where.items()
            if name in AXES
        }
        yield {"where": read} | {k: v for k, v in value.items() if k in _OF_A_CELL[1:]}


def _axis(values: Sequence[Any], check: Any, place: str, problems: list[str]) -> list[Any]:
    read = []
    for value in values:
        try:
            read.append(check(value))
        except ValueError as error:
            problems.append(f"{place}: {_shown(value)} {error}")
    repeated = [
        value for value in dict.fromkeys(map(str, read)) if [*map(str, read)].count(value) > 1
    ]
    problems += [f"{place}: {value} is given twice" for value in repeated]
    return read


def _check_model(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError("is no name of a model")
    return value


def _check_budget(value: object) -> str:
    if value == ALL_OF_THE_CARD:
        return ALL_OF_THE_CARD
    if not isinstance(value, str):
        raise ValueError(f"should be {ALL_OF_THE_CARD} or a size such as 12GB")
    try:
        parse_bytes(value)
    except ConfigError as error:
        raise ValueError(f"should be {ALL_OF_THE_CARD} or a size: {error}".rstrip(".")) from error
    return value


def _check_length(value: object) -> int:
    if type(value) is not int or not 1 <= value <= 10_000_000:
        raise ValueError("should be a whole number of tokens")
    return value


def _check_methods(value: object) -> tuple[str, ...]:
    names = value if isinstance(value, list) else [value]
    for name in names:
        if name not in METHODS or name == "peft":
            raise ValueError(f"is no method. {nearest(str(name)[:40], set(METHODS) - {'peft'})}")
    return tuple(dict.fromkeys(names))


_CHECKS = {
    "model": _check_model,
    "budget": _check_budget,
    "length": _check_length,
    "methods": _check_methods,
}


def _unknown(given: Mapping[Any, Any], known: Sequence[str], place: str) -> Iterator[str]:
    for key in given:
        name = "on" if key is True and "on" in known else key
        if name not in known:
            shown = str(name)[:40]
            yield f"{place}{shown}: unknown key. {nearest(shown, known)}".rstrip(".")


def _portable(value: object) -> Any:
    """As JSON has it; of an absolute path its last part."""
    if isinstance(value, PurePath):
        return value.name
    if isinstance(value, str) and PurePath(value).is_absolute():
        path = PurePath(value)
        return path.parent.name if path.name == "config.json" else path.name
    return list(value) if isinstance(value, tuple) else value


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__


def _shown(value: object) -> str:
    return repr(value)[:60]
