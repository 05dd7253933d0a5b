"""A literal table between our settings and another trainer's keys, read in both directions.

A TrainerFile is the table of one trainer. autotune.export.mapping_write says a TrainConfig in its words,
autotune.export.base.mapping_read takes them back.
Keys below others are written with dots: `bnb_config_kwargs.bnb_4bit_quant_type`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from autotune.space.adapters import ATTENTION_PROJECTIONS, is_attention, lora_alpha, whole_alpha
from autotune.space.config import METHODS, TrainConfig
from autotune.space.knobs import KNOBS
from autotune.space.values import positive


@dataclass(frozen=True, slots=True)
class NotLiteral:
    """A value of a program that only running it would tell: it is equal to any other."""

    source: str = field(compare=False)
    line: int = field(compare=False)

    def __str__(self) -> str:
        return f"{self.source} (line {self.line})"


def not_literal(key: str, value: NotLiteral) -> str:
    """Return the problem with a key of such a value."""
    return f"{key}: {value} is not a literal, and nothing is run: write its value"


@dataclass(frozen=True, kw_only=True, slots=True)
class Spelling:
    """A way to say some of our settings."""

    ours: tuple[Any, ...]
    theirs: Mapping[str, Any]
    """Values of their keys. None: the key is not there."""
    beside: Mapping[str, Any] = field(default_factory=dict)
    """Keys written with it where the file does not have them; not asked for when it is read."""
    within: Mapping[str, str] = field(default_factory=dict)
    """Entries of lists that are otherwise the user's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A table's row: some of our settings, with the choices there are, or how one of them is said and heard.

    Of choices for the same settings the first is written; all are read.
    """

    ours: tuple[str, ...]
    """Fields of TrainConfig that the row is about."""
    keys: tuple[str, ...]
    choices: tuple[Spelling, ...] = ()
    say: Callable[..., Mapping[str, Any]] | None = None
    hear: Callable[[Mapping[str, Any]], Any] | None = None
    """Reads their value. May raise ValueError; the setting's own check comes after it."""
    can_say: Callable[[Any], bool] | None = None
    """Tells whether there are words for a value; None: for every one."""
    methods: tuple[str, ...] = METHODS
    """Training methods that the row is about."""
    also: tuple[str, ...] = ()
    """Further settings that `say` is given: what it writes depends on them."""
    nearest: Mapping[tuple[Any, ...], tuple[Any, ...]] = field(default_factory=dict)
    """Values written instead of what no choice says; the empty key is for all others."""
    unheard: tuple[str, ...] = ()
    """Keys that `say` writes and `hear` does not ask for."""

    def says(self, value: Any) -> bool:
        return self.can_say is None or self.can_say(value)

    def told(self, config: TrainConfig) -> tuple[Any, ...]:
        """Return the values that decide how the row is said."""
        return tuple(getattr(config, name) for name in (*self.ours, *self.also))

    def choice_for(self, values: tuple[Any, ...]) -> Spelling | None:
        return next((choice for choice in self.choices if choice.ours == values), None)

    def choice_said(self, values: tuple[Any, ...]) -> Spelling | None:
        """Return the choice for the values, or what is nearest to them."""
        nearest = self.nearest.get(values, self.nearest.get((), ()))
        return self.choice_for(values) or self.choice_for(nearest)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerFile:
    """Another trainer's configuration file."""

    name: str
    """Name of the trainer for people."""
    source: str
    """Classes that the keys and defaults were taken from."""
    rows: tuple[Row, ...]
    """Rows of the table, the one that says the method first."""
    defaults: Mapping[str, Any]
    """Trainer's own values of the keys in `rows`; what is not in it is off, or must be named."""
    model_key: str = ""
    model_of: Callable[[Mapping[str, Any]], str | None] | None = None
    """Returns the model, where no key names it as it is."""
    launch: str = ""
    """Command that trains from a file: `{file}` is its path, `{gpus}` what several GPUs add. Empty: only
    train.py does."""
    launch_several: str = ""
    """Text for `{gpus}` where there are several: `{number}` is how many."""
    peft_names: str = ""
    """Key of LoRA's modules, which PEFT chooses by the model where the file does not name them."""
    several_gpus: str = "ddp"
    """Parallelism of a run with several GPUs whose file does not say."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings that every file of this trainer has, by what it is."""
    auto_bf16: str = ""
    """Key whose `auto`, its default, is float16 on a card without bfloat16."""
    elsewhere: tuple[str, ...] = ()
    """Settings that are made outside the file, which leaves them open."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Key in `rows` by its older name. A file keeps to the name it has."""
    flags: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Key and value that an older switch stands for."""
    of_adapters: tuple[str, ...] = ()
    """Keys that say nothing without an adapter."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Keys that, switched on, change the run, and why that is not predicted."""
    unpredicted: Mapping[str, str] = field(default_factory=dict)
    """Keys that, switched on, change memory or speed as no prediction does, and how."""
    noted: Mapping[str, str] = field(default_factory=dict)
    """Keys that, switched on, are told of in other words than that they are not predicted."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Trainer's keys for TrainingArguments that no setting decides, where they have other names; else what is
    a field of that class is one."""
    has_own_names: bool = False
    """Whether only `arguments` are TrainingArguments: another key of such a name is something else."""
    follows: Callable[[TrainConfig], Mapping[str, Any]] | None = None
    """Returns keys that no setting decides alone."""
    caveats: tuple[tuple[Callable[[TrainConfig], bool], str], ...] = ()
    """Cases in which the trainer does what was not predicted, whatever its file says."""


def choices(ours: tuple[str, ...], *rows: Spelling, **more: Any) -> Row:
    """Return a row that is one of some choices."""
    keys = dict.fromkeys(key for row in rows for key in (*row.theirs, *row.within))
    return Row(ours=ours, keys=tuple(keys), choices=rows, **more)


def table(
    ours: str,
    keys: str,
    *lines: tuple[Any, ...],
    beside: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> Row:
    """Return a row of choices, one a line: the values of `ours`, then those of `keys`.

    Both are names with spaces between. A key whose value is `...`, or whose value a short line leaves
    out, is not asked for. `beside` are a Spelling's, where the first of `ours` is on.
    """
    names, theirs = ours.split(), keys.split()
    return choices(
        tuple(names),
        *(
            Spelling(
                ours=line[: len(names)],
                theirs={
                    key: value
                    for key, value in zip(theirs, line[len(names) :], strict=False)
                    if value is not ...
                },
                beside=beside if line[:1] and line[0] else {},
            )
            for line in lines
        ),
        **more,
    )


def of_key(name: str, key: str | None = None, *, off: Any = None, **more: Any) -> Row:
    """Return a row whose key holds the setting as it is.

    What is off is left out, or `off` where that is not the trainer's default.
    """
    key = key or name
    return Row(
        ours=(name,),
        keys=(key,),
        say=lambda value: {key: value or off},
        hear=lambda said: said[key],
        **more,
    )


def said_only(*names: str) -> tuple[Row, ...]:
    """Return rows of settings that are said by the same name where chosen, and else left to the user."""
    return tuple(
        Row(ours=(name,), keys=(name,), say=lambda value, name=name: {name: value})
        for name in names
    )


def of_values(name: str, key: str, values: Mapping[Any, Any], **more: Any) -> Row:
    """Return a row that maps one of ours to one of theirs."""
    rows = (Spelling(ours=(ours,), theirs={key: said}) for ours, said in values.items())
    return choices((name,), *rows, **more)


def of_alpha(
    rank_key: str,
    key: str = "lora_alpha",
    *,
    is_twice: bool = False,
    is_whole: bool = True,
    **more: Any,
) -> Row:
    """Return a row of LoRA's alpha beside the rank.

    `is_twice`: without the key it is twice the rank. `is_whole`: it must be a whole number.
    """

    def hear(said: Mapping[str, Any]) -> Any:
        alpha, rank = said[key], said[rank_key]
        if not alpha and is_twice:
            return KNOBS["lora_alpha_ratio"].default
        if alpha is None:
            raise ValueError("has no lora_alpha beside it")
        try:
            return alpha if isinstance(alpha, bool) else float(alpha) / positive(rank)
        except (OverflowError, TypeError, ValueError):
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
    """Return the modules that a value of lora_targets names; `all-linear` is one for PEFT."""
    return list(ATTENTION_PROJECTIONS) if targets == "attention" else targets.split(",")


_NAMES = re.compile(r"[\w.,\s-]*")
_ENDINGS = re.compile(r"\^?\.\*(\\\.)?(\w*)(?:\((?:\?:)?(\w+(?:\|\w+)*)\))?(\w*)\$?")
"""A pattern of PEFT's that says what modules are called, such as `.*\\.(q|v)_proj`: it is a list of names."""
_WHOLE = re.compile(r"[a-z]+_proj")
"""Names that are whole, where a pattern does not say so by a dot."""


def names_of(pattern: str) -> list[str]:
    """Return the names that a pattern of modules stands for. ValueError where it says more, or less."""
    dot, *ends = found.groups("") if (found := _ENDINGS.fullmatch(pattern)) else ("", "", "", "")
    names = [f"{ends[0]}{name}{ends[2]}" for name in ends[1].split("|")]
    if not all(names if dot else map(_WHOLE.fullmatch, names)):
        raise ValueError("is a pattern of more than whole names: name the modules in a list")
    return names


def targets_of(names: object) -> str:
    """Return the value of lora_targets for a list of modules. ValueError where it is none."""
    if isinstance(names, str):
        names = names.split(",") if _NAMES.fullmatch(names) else names_of(names)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("must be a list of names")
    names = [name.strip() for name in names]
    return "attention" if is_attention(names) else ",".join(names)


def same(left: object, right: object) -> bool:
    """Return whether a trainer makes no difference between the two: what is off is left out as well."""
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
