"""A literal table between our settings and another trainer's keys, read in both directions.

A Target is the table of one trainer. `keys_of` writes a TrainConfig in its words, `read` takes them
back, `unsaid` names what it has no words for, and `allows` keeps a search to what it has.
Keys below others are written with dots: `bnb_config_kwargs.bnb_4bit_quant_type`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.adapters import ATTENTION_PROJECTIONS, lora_alpha, whole_alpha
from autotune.config import METHODS, TrainConfig
from autotune.errors import nearest
from autotune.knobs import KNOBS

_POSITIVE = KNOBS["micro_batch_size"].read
_PLAIN = {field.name: field.default for field in dataclasses.fields(TrainConfig)}


@dataclass(frozen=True, slots=True)
class NotLiteral:
    """A value of a program that only running it would tell: what it is, it is equal to any other."""

    source: str = field(compare=False)
    line: int = field(compare=False)

    def __str__(self) -> str:
        return f"{self.source} (line {self.line})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One way to say some of our settings."""

    ours: tuple[Any, ...]
    theirs: Mapping[str, Any]
    """None: the key is not there."""
    beside: Mapping[str, Any] = field(default_factory=dict)
    """Written with it where the file does not have the key; not asked for when it is read."""
    within: Mapping[str, str] = field(default_factory=dict)
    """Entries of lists that are the user's otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Some of our settings: either the choices there are, or how one of them is said and heard.

    Of choices for the same settings the first is written; all are read.
    """

    ours: tuple[str, ...]
    """Fields of TrainConfig."""
    keys: tuple[str, ...]
    choices: tuple[Choice, ...] = ()
    say: Callable[..., Mapping[str, Any]] | None = None
    hear: Callable[[Mapping[str, Any]], Any] | None = None
    """May raise ValueError; the setting's own check comes after it."""
    can_say: Callable[[Any], bool] | None = None
    """Whether there are words for a value; None: for every one."""
    methods: tuple[str, ...] = METHODS
    """Training methods that the row is about."""
    also: tuple[str, ...] = ()
    """Further settings that `say` is told: what it writes depends on them."""
    nearest: Mapping[tuple[Any, ...], tuple[Any, ...]] = field(default_factory=dict)
    """Written instead of what no choice says; the empty key is for all others."""

    def says(self, value: Any) -> bool:
        return self.can_say is None or self.can_say(value)

    def told(self, config: TrainConfig) -> tuple[Any, ...]:
        """What decides how the row is said."""
        return tuple(getattr(config, name) for name in (*self.ours, *self.also))

    def choice_for(self, values: tuple[Any, ...]) -> Choice | None:
        return next((choice for choice in self.choices if choice.ours == values), None)

    def choice_said(self, values: tuple[Any, ...]) -> Choice | None:
        """The choice for the values, or what is nearest to them."""
        nearest = self.nearest.get(values, self.nearest.get((), ()))
        return self.choice_for(values) or self.choice_for(nearest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Another trainer's configuration file."""

    name: str
    """For people."""
    source: str
    """Whose classes the keys and defaults were taken from."""
    rows: tuple[Row, ...]
    """The one that says the method first."""
    defaults: Mapping[str, Any]
    """The trainer's own of the keys in `rows`; what is not in it is off, or must be named."""
    model_key: str = ""
    model_of: Callable[[Mapping[str, Any]], str | None] | None = None
    """The model, where no key names it as it is."""
    several_gpus: str = "ddp"
    """How several GPUs share a run whose file does not say."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings that every file of this trainer has, by what it is."""
    auto_bf16: str = ""
    """Key whose `auto`, its default, is float16 on a card without bfloat16."""
    elsewhere: tuple[str, ...] = ()
    """Settings that are made outside the file, which leaves them open."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Older name of a key -> the one in `rows`. A file keeps to the name it has."""
    flags: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Older switch -> the key and value that it stands for."""
    of_adapters: tuple[str, ...] = ()
    """Keys that say nothing without an adapter."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Keys that, switched on, make another run of it, and why that is not predicted."""
    unpredicted: Mapping[str, str] = field(default_factory=dict)
    """Keys that, switched on, change memory or speed as no prediction does, and how."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Its keys for TrainingArguments that no setting decides, where they have other names; else
    what is a field of that class is one."""
    has_own_names: bool = False
    """Only `arguments` are TrainingArguments: another key of such a name is something else."""
    follows: Callable[[TrainConfig], Mapping[str, Any]] | None = None
    """Keys that no setting decides alone."""
    caveats: tuple[tuple[Callable[[TrainConfig], bool], str], ...] = ()
    """Where the trainer does what was not predicted, whatever its file says."""


def choices(ours: tuple[str, ...], *rows: Choice, **more: Any) -> Row:
    """One of some choices."""
    keys = dict.fromkeys(key for row in rows for key in (*row.theirs, *row.within))
    return Row(ours=ours, keys=tuple(keys), choices=rows, **more)


def of_key(name: str, key: str | None = None, *, off: Any = None, **more: Any) -> Row:
    """The key holds the setting as it is; what is off is left out, or `off` where that is not the
    trainer's default."""
    key = key or name
    return Row(
        ours=(name,),
        keys=(key,),
        say=lambda value: {key: value or off},
        hear=lambda said: said[key],
        **more,
    )


def said_only(*names: str) -> tuple[Row, ...]:
    """Settings that are said by the same name where they were chosen, and left to the user else."""
    return tuple(
        Row(ours=(name,), keys=(name,), say=functools.partial(_by_its_name, name)) for name in names
    )


def _by_its_name(name: str, value: Any) -> dict[str, Any]:
    return {name: value}


def of_values(name: str, key: str, values: Mapping[Any, Any], **more: Any) -> Row:
    """One of ours for one of theirs."""
    rows = (Choice(ours=(ours,), theirs={key: said}) for ours, said in values.items())
    return choices((name,), *rows, **more)


def of_alpha(
    rank_key: str,
    key: str = "lora_alpha",
    *,
    is_twice: bool = False,
    is_whole: bool = True,
    **more: Any,
) -> Row:
    """LoRA's alpha beside the rank. `is_twice`: without the key it is twice the rank. `is_whole`: it must
    be a whole number."""

    def hear(said: Mapping[str, Any]) -> Any:
        alpha, rank = said[key], said[rank_key]
        if not alpha and is_twice:
            return KNOBS["lora_alpha_ratio"].default
        if alpha is None:
            raise ValueError("has no lora_alpha beside it")
        try:
            return alpha if isinstance(alpha, bool) else float(alpha) / _POSITIVE(rank)
        except (TypeError, ValueError):
            return alpha  # the rank's own row says what is wrong with the rank

    scaled = whole_alpha if is_whole else lora_alpha
    return Row(
        ours=("lora_alpha_ratio",),
        also=("lora_rank",),
        keys=(key, rank_key),
        say=lambda ratio, rank: {key: scaled(ratio, rank), rank_key: rank},
        hear=hear,
        **more,
    )


def module_names(targets: str) -> list[str]:
    """The modules that a value of lora_targets names; `all-linear` is one for PEFT."""
    return list(ATTENTION_PROJECTIONS) if targets == "attention" else targets.split(",")


def targets_of(names: object) -> str:
    """The value of lora_targets for a list of modules. ValueError where it is none."""
    if isinstance(names, str):
        names = names.split(",")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("must be a list of names")
    names = [name.strip() for name in names]
    return "attention" if tuple(names) == ATTENTION_PROJECTIONS else ",".join(names)


def same(left: object, right: object) -> bool:
    """Whether a trainer makes no difference between the two: what is off is left out as well."""
    return left == right if left and right else not left and not right


def value_at(content: Mapping[str, Any], path: str, default: Any = None) -> Any:
    value: Any = content
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return default
        value = value[name]
    return default if value is None else value


def entries(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def keys_of(target: Target, config: TrainConfig) -> dict[str, Any]:
    """The target's keys that say the configuration, or what is nearest, those at their default too."""
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


def unsaid(target: Target, config: TrainConfig) -> tuple[str, ...]:
    """Words for each setting that the target has no key for."""
    words = []
    said = {*target.fixed, "num_gpus"}
    for row in target.rows:
        said |= {*row.ours}
        if config.method not in row.methods:
            continue
        values = tuple(getattr(config, name) for name in row.ours)
        if (nearest_said := _nearest_said(row, config)) is not None:
            words.append(f"{_words(row.ours[0], config)} ({nearest_said} here)")
        elif row.choices and row.choice_for(values) is None:
            differing = [name for name in row.ours if not _is_said_somehow(row, name, config)]
            words += [_words(name, config) for name in differing or row.ours]
        if config.method in row.methods and row.say is not None and not row.says(values[0]):
            words.append(_words(row.ours[0], config))
    words += [
        _words(name, config)
        for name in KNOBS
        if name not in said and getattr(config, name) != _PLAIN[name]
    ]
    words += [
        _words(name, config)
        for name, value in target.fixed.items()
        if getattr(config, name) != value
    ]
    if config.num_gpus > 1:
        words.append(f"{_words('num_gpus', config)} (that is said where it is launched)")
    return tuple(words)


def says_method(target: Target, method: str) -> bool:
    """Whether the target trains that way at all."""
    if "method" in target.elsewhere:
        return True
    if "method" in target.fixed:
        return bool(method == target.fixed["method"])
    row = target.rows[0]
    return any(choice.ours[0] == method for choice in row.choices)


def allows(target: Target, method: str, name: str, value: object) -> bool:
    """Whether the target can be told the setting's value, alone or with some value of another."""
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


def read(target: Target, content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(our settings, every problem with its key). Where there are problems, settings are missing."""
    content = in_current_words(target, content)
    values: dict[str, Any] = dict(target.fixed)
    refused = {key for key in target.refused if _is_on(content, key)}
    problems = [f"{key}: {why}" for key, why in target.refused.items() if key in refused]
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


def in_current_words(target: Target, content: Mapping[str, Any]) -> dict[str, Any]:
    """The content without older names and switches."""
    current = dict(content)
    for old, new in target.renamed.items():
        if old in current:
            value = current.pop(old)
            current.setdefault(new, value)
    for old, (new, value) in target.flags.items():
        if current.pop(old, None) and not current.get(new):
            current[new] = value
    return current


def notes(target: Target, content: Mapping[str, Any]) -> tuple[str, ...]:
    """What in the file changes memory or speed and is in no prediction."""
    ours = {
        (key, entry)
        for row in target.rows
        for choice in row.choices
        for key, entry in choice.within.items()
    }
    added = {
        key: [entry for entry in entries(content.get(key)) if (key, entry) not in ours]
        for key in dict.fromkeys(key for key, _ in ours)
    }
    switched = {key: value_at(content, key) for key in target.unpredicted if _is_on(content, key)}
    return (
        *(f"{key}: {_shown(value)} {target.unpredicted[key]}" for key, value in switched.items()),
        *(
            f"{key}: {_shown(', '.join(map(str, left)))} may change the model, which is not predicted"
            for key, left in added.items()
            if left
        ),
    )


def _is_on(content: Mapping[str, Any], key: str) -> bool:
    """A degree of 1 is none."""
    value = value_at(content, key)
    return bool(value) and (value is True or value != 1)


def _rows(target: Target, method: str) -> Iterable[Row]:
    return (row for row in target.rows if method in row.methods)


def _read_row(target: Target, row: Row, content: Mapping[str, Any]) -> tuple[Any, ...]:
    said = {key: value_at(content, key, target.defaults.get(key)) for key in row.keys}
    for key in row.keys if row.choices else row.keys[:1]:
        _check_kind(key, content, said[key])
    if row.hear is not None:
        (name,) = row.ours
        in_file = (key for key in row.keys if value_at(content, key) is not None)
        key = next(in_file, row.keys[0])
        if all(value is None for value in said.values()) and not _may_be_off(name):
            raise ValueError(f"{key} is missing")
        knob = KNOBS.get(name)
        check = _POSITIVE if knob is None else knob.read
        try:
            value = row.hear(said)
            return (check(0 if value is None else value),)
        except ValueError as error:
            raise ValueError(f"{key} {error}") from error
    for choice in row.choices:
        if all(same(said[key], value) for key, value in choice.theirs.items()) and all(
            entry in entries(said[key]) for key, entry in choice.within.items()
        ):
            return choice.ours
    raise ValueError(_unknown(row, said, content))


def _check_kind(key: str, content: Mapping[str, Any], value: object) -> None:
    """ValueError for what cannot be read, or stands where other keys should."""
    folder = key.rpartition(".")[0]
    above = value_at(content, folder) if folder else None
    if above is not None and not isinstance(above, (Mapping, NotLiteral)):
        raise ValueError(f"{folder} must be a mapping of settings to values")
    for each in (above, value):
        if isinstance(each, NotLiteral):
            raise ValueError(f"{key}: {each} is no literal, and nothing is run: write its value")


def _may_be_off(name: str) -> bool:
    return name in KNOBS and KNOBS[name].default in (0, 0.0)


def _unknown(row: Row, said: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    known = {
        value
        for choice in row.choices
        for value in choice.theirs.values()
        if isinstance(value, str)
    }
    in_file = {key: value for key, value in said.items() if value_at(content, key) is not None}
    shown = ", ".join(f"{key}: {_shown(value)}" for key, value in (in_file or said).items())
    if len(row.keys) == 1:
        (value,) = said.values()
        return f"{shown} is not predicted. {nearest(str(value)[:80], known)}"
    instead = _one_step_away(row, said)
    return f"{shown} is not predicted together{f'; {instead} would be' if instead else ''}"


def _one_step_away(row: Row, said: Mapping[str, Any]) -> str:
    """What is predicted and differs in one key."""
    steps: dict[str, None] = {}
    for choice in row.choices:
        differing = [key for key, value in choice.theirs.items() if not same(said[key], value)]
        if len(differing) == 1 and choice.theirs[differing[0]] is not None:
            steps[f"{differing[0]}: {_shown(choice.theirs[differing[0]])}"] = None
    return " or ".join(list(steps)[:3])


def _nearest_said(row: Row, config: TrainConfig) -> str | None:
    """Words for the number that is heard where another was meant, which the key cannot hold."""
    if row.say is None or row.hear is None:
        return None
    meant, *_ = row.told(config)
    if not row.says(meant):
        return None
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
    return f"{name}: {value if knob is None else knob.words(value)}"


def _shown(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    # On one line, and nothing that a terminal cannot be sent: JSON may have half of a surrogate pair.
    text = " ".join(text.split()).encode("utf-8", "replace").decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
