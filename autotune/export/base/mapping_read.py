"""Reading of another trainer's file as settings of ours: what its keys say, and every problem with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.errors import nearest
from autotune.export.mapping import (
    NotLiteral,
    Row,
    Spelling,
    TrainerFile,
    entries,
    not_literal,
    same,
    value_at,
)
from autotune.space.config import METHODS
from autotune.space.knobs import KNOBS
from autotune.space.values import positive


def read(target: TrainerFile, content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return (our settings, every problem with its key). Where there are problems, settings are missing."""
    content = in_current_words(target, content)
    values: dict[str, Any] = dict(target.fixed)
    refused = {key for key in target.refused if _is_on(content, key)}
    problems = [f"{in_words(key)}: {why}" for key, why in target.refused.items() if key in refused]
    for row in target.rows:
        method = values.get("method")
        if method is None and row.methods != METHODS:
            continue
        if method is not None and method not in row.methods:
            continue
        is_only_said = row.say is not None and row.hear is None
        if is_only_said or refused.intersection(row.keys):
            continue
        try:
            read_values = _read_row(target, row, content)
        except ValueError as error:
            problems.append(str(error))
            continue
        values |= zip(row.ours, read_values, strict=True)
    return values, problems


def in_current_words(target: TrainerFile, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content without older names and switches."""
    current = dict(content)
    for old, new in target.renamed.items():
        if old in current:
            value = current.pop(old)
            current.setdefault(new, value)
    for old, (new, value) in target.flags.items():
        if current.pop(old, None) and not current.get(new):
            current[new] = value
    return current


def notes(target: TrainerFile, content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return notes on keys of the file that change memory or speed and are in no prediction."""
    ours = [
        (key, entry)
        for row in target.rows
        for choice in row.choices
        for key, entry in choice.within.items()
    ]
    added = {
        key: [entry for entry in entries(content.get(key)) if (key, entry) not in ours]
        for key in dict.fromkeys(key for key, _ in ours)
    }
    unpredicted = {key: f"{how}: not predicted" for key, how in target.unpredicted.items()}
    return (
        *(
            f"{in_words(key)}: {_shown(value_at(content, key))} {how}"
            for key, how in {**unpredicted, **target.noted}.items()
            if _is_on(content, key)
        ),
        *(
            f"{key}: {_shown(', '.join(map(str, left)))} may change the model, which is not predicted"
            for key, left in added.items()
            if left
        ),
    )


def _is_on(content: Mapping[str, Any], key: str) -> bool:
    """Return whether a key is switched on. A degree of 1 is not."""
    value = value_at(content, key)
    return bool(value) and (value is True or value != 1)


_TARGETS_MISSING = ": name the modules, or say by --model which known model PEFT has its own for"


def _read_row(target: TrainerFile, row: Row, content: Mapping[str, Any]) -> tuple[Any, ...]:
    said = {key: value_at(content, key, target.defaults.get(key)) for key in row.keys}
    for key in row.keys if row.choices else row.keys[:1]:
        _check_kind(key, content, said[key])
    if row.hear is not None:
        (name,) = row.ours
        in_file = (key for key in row.keys if value_at(content, key) is not None)
        key = next(in_file, row.keys[0])
        may_be_off = name in KNOBS and KNOBS[name].default in (0, 0.0)
        if all(value is None for value in said.values()) and not may_be_off:
            more = _TARGETS_MISSING if name == "lora_targets" else ""
            raise ValueError(f"{in_words(key)} is missing{more}")
        knob = KNOBS.get(name)
        check = positive if knob is None else knob.read
        try:
            value = row.hear(said)
            return (check(0 if value is None else value),)
        except ValueError as error:
            raise ValueError(f"{in_words(key)} {error}") from error
    choice = choice_read(row, said)
    if choice is None:
        raise ValueError(_unknown(row, said, content))
    return choice.ours


def choice_read(row: Row, said: Mapping[str, Any]) -> Spelling | None:
    """Return the first of the row's choices that the values say; None where none does."""
    for choice in row.choices:
        if all(same(said[key], value) for key, value in choice.theirs.items()) and all(
            entry in entries(said[key]) for key, entry in choice.within.items()
        ):
            return choice
    return None


def _check_kind(key: str, content: Mapping[str, Any], value: object) -> None:
    """Raise ValueError for what cannot be read, or stands where other keys should."""
    folder = key.rpartition(".")[0]
    above = value_at(content, folder) if folder else None
    if above is not None and not isinstance(above, (Mapping, NotLiteral)):
        raise ValueError(f"{in_words(folder)} must be a mapping of settings to values")
    for each in (above, value):
        if isinstance(each, NotLiteral):
            raise ValueError(not_literal(in_words(key), each))


def in_words(key: str) -> str:
    """The key for people: that of a section behind the section's name."""
    section, colon, own = key.partition(":")
    return f"{section} {own}" if colon else key


def _unknown(row: Row, said: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    known = {
        value
        for choice in row.choices
        for value in choice.theirs.values()
        if isinstance(value, str)
    }
    in_file = {key: value for key, value in said.items() if value_at(content, key) is not None}
    shown = ", ".join(
        f"{in_words(key)}: {_shown(value)}" for key, value in (in_file or said).items()
    )
    if len(row.keys) == 1:
        (value,) = said.values()
        return f"{shown} is not predicted. {nearest(str(value)[:80], known)}"
    instead = _one_step_away(row, said)
    if not in_file and instead:
        return f"{instead} is missing"
    together = " together" if len(in_file) > 1 else ""
    return f"{shown} is not predicted{together}{f'; {instead} would be' if instead else ''}"


def _one_step_away(row: Row, said: Mapping[str, Any]) -> str:
    """Return predicted values that differ in one key, as a remedy: of the last keys first."""
    steps: dict[str, int] = {}
    for choice in row.choices:
        differing = [key for key, value in choice.theirs.items() if not same(said[key], value)]
        if len(differing) == 1 and choice.theirs[differing[0]] is not None:
            (key,) = differing
            steps[f"{in_words(key)}: {_shown(choice.theirs[key])}"] = row.keys.index(key)
    return " or ".join(sorted(steps, key=lambda step: -steps[step])[:3])


def _shown(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, str) and text.lower() in ("true", "false", "none"):
        text = repr(value)  # a text that looks like another value
    # On one line, and nothing that a terminal cannot be sent: JSON may have half of a surrogate pair.
    text = " ".join(text.split()).encode("utf-8", "replace").decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
