"""Writing of a TrainConfig in another trainer's words: what its keys say, and what they cannot."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

from autotune.export.carried import Unsaid, with_plan
from autotune.export.mapping import Row, TrainerFile
from autotune.space.config import TrainConfig
from autotune.space.knobs import KNOBS
from autotune.space.words import has_meaning

_PLAIN = {field.name: field.default for field in dataclasses.fields(TrainConfig)}


def keys_of(target: TrainerFile, config: TrainConfig) -> dict[str, Any]:
    """Return the target's keys that say the configuration, or what is nearest, those at their default too."""
    keys: dict[str, Any] = {}
    for row in _rows(target, config.method):
        if row.say is not None:
            is_said = row.says(getattr(config, row.ours[0]))
            keys |= row.say(*row.told(config)) if is_said else {}
            continue
        choice = row.choice_said(row.told(config))
        if choice is not None:
            lists = {key: [entry] for key, entry in choice.within.items()}
            keys |= {**choice.theirs, **choice.beside, **lists}
    return keys


def unsaid(target: TrainerFile, config: TrainConfig) -> tuple[Unsaid, ...]:
    """Each setting that the target has no key for."""
    lost = [
        each
        for row in _rows(target, config.method)
        for each in _unsaid_by(row, config)
        if has_meaning(each.setting, config)
    ]
    said = {"num_gpus", *target.fixed, *(name for row in target.rows for name in row.ours)}
    plain = {name: _PLAIN[name] for name in KNOBS if name not in said}
    lost += [
        Unsaid(name, _words(name, config))
        for name, value in (plain | {**target.fixed}).items()
        if has_meaning(name, config) and getattr(config, name) != value
    ]
    if config.num_gpus > 1 and not any("num_gpus" in row.ours for row in target.rows):
        words = f"{_words('num_gpus', config)} (that is said where it is launched)"
        lost.append(Unsaid("num_gpus", words))
    return with_plan(config, tuple(lost))


def _unsaid_by(row: Row, config: TrainConfig) -> Iterator[Unsaid]:
    if row.say is None:
        values = tuple(getattr(config, name) for name in row.ours)
        if row.choices and row.choice_for(values) is None:
            differing = [name for name in row.ours if not _is_said_somehow(row, name, config)]
            yield from (Unsaid(name, _words(name, config)) for name in differing or row.ours)
    elif not row.says(getattr(config, row.ours[0])):
        yield Unsaid(row.ours[0], _words(row.ours[0], config))
    elif (nearest_said := _nearest_said(row, config)) is not None:
        words = f"{_words(row.ours[0], config)} ({nearest_said} here)"
        yield Unsaid(row.ours[0], words)


def says_method(target: TrainerFile, method: str) -> bool:
    """Return whether the target trains that way at all."""
    if "method" in target.elsewhere:
        return True
    if "method" in target.fixed:
        return bool(method == target.fixed["method"])
    row = target.rows[0]
    return any(choice.ours[0] == method for choice in row.choices)


def allows(target: TrainerFile, method: str, name: str, value: object) -> bool:
    """Return whether the target can express the setting's value, alone or with some value of another."""
    if not says_method(target, method):
        return False
    if name in target.elsewhere:
        return True
    if name in target.fixed:
        return bool(value == target.fixed[name])
    rows = [row for row in _rows(target, method) if name in row.ours]
    if not rows:
        return bool(value == _PLAIN[name])
    row = rows[0]
    if row.say is not None:
        return row.says(value)
    place = row.ours.index(name)
    return any(
        choice.ours[place] == value and (row.ours[0] != "method" or choice.ours[0] == method)
        for choice in row.choices
    )


def _nearest_said(row: Row, config: TrainConfig) -> str | None:
    """Return words for the number that is heard where another was meant, which the key cannot hold."""
    if row.say is None or row.hear is None:
        return None
    meant, *_ = row.told(config)
    heard = row.hear({**dict.fromkeys(row.keys), **row.say(*row.told(config))})
    if not isinstance(meant, float) or math.isclose(meant, heard or 0.0):
        return None
    return KNOBS[row.ours[0]].words(heard)


def _is_said_somehow(row: Row, name: str, config: TrainConfig) -> bool:
    place = row.ours.index(name)
    return any(choice.ours[place] == getattr(config, name) for choice in row.choices)


def _words(name: str, config: TrainConfig) -> str:
    knob = KNOBS.get(name)
    value = getattr(config, name)
    return str(value) if knob is None else knob.words(value)


def _rows(target: TrainerFile, method: str) -> Iterable[Row]:
    return (row for row in target.rows if method in row.methods)
