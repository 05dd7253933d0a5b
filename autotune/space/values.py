"""Readers of settings: values as YAML or the command line has them become those of TrainConfig.

ValueError says what is wrong with one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from autotune.errors import nearest
from autotune.space.checkpoint_plans import SOLVE
from autotune.space.optimizers import DROPPED, LEFT_OUT, OPTIMIZERS

MAX_NUMBER = 1_000_000
"""Largest micro-batch size, rank or layer interval."""


def kind(value: object) -> str:
    """Name the kind of a wrong value; never its repr, which aliases can make endless."""
    if isinstance(value, (bool, int, float)):
        return str(value)[:40]
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    names = {list: "a list", dict: "a mapping", type(None): "nothing"}
    return names.get(type(value), f"a {type(value).__name__}")


def one_of(known: Sequence[str], what: str) -> Callable[[object], str]:
    def read(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"must be a name, not {kind(value)}")
        if value not in known:
            raise ValueError(f"unknown {what} {value[:40]!r}. {nearest(value[:40], known)}")
        return value

    return read


def optimizer(value: object) -> str:
    if isinstance(value, str) and value in LEFT_OUT:
        raise ValueError(f"is not predicted: it {LEFT_OUT[value]}")
    if isinstance(value, str) and value in DROPPED:
        raise ValueError(f"is in Transformers no longer: {DROPPED[value]} computes the same")
    return one_of(tuple(OPTIMIZERS), "optimizer")(value)


def positive(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"must be a whole number, not {kind(value)}")
    if not 0 < value <= MAX_NUMBER:
        raise ValueError(f"must be from 1 to {MAX_NUMBER:,}")
    return value


def from_zero(value: object) -> int:
    return 0 if value == 0 and not isinstance(value, bool) else positive(value)


def strength(value: object) -> float:
    try:
        number = float(value) if isinstance(value, (int, float, str)) else -1.0
    except (OverflowError, ValueError):
        number = -1.0
    if isinstance(value, bool) or not 0 <= number <= MAX_NUMBER:
        raise ValueError(f"must be a number from 0 to {MAX_NUMBER:,}")
    return number


def above_zero(value: object) -> float:
    number = strength(value)
    if not number:
        raise ValueError("must be a number above 0")
    return number


def share(value: object) -> float:
    try:
        number = strength(value)
    except ValueError:
        number = 1.0
    if number >= 1:
        raise ValueError("must be a number from 0 to below 1")
    return number


def flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {kind(value)}")
    return value


def checkpointing(value: object) -> int:
    """Interval of layers that are checkpointed. none: 0; full: 1; every-N: N; solve: SOLVE.

    A whole number is that interval, as TrainConfig has it.
    """
    if type(value) is int and 0 <= value < 10**6:
        return value
    if value == "solve":
        return SOLVE
    if value in ("none", "full"):
        return int(value == "full")
    pattern = r"every-([1-9][0-9]{0,5})"
    match = re.fullmatch(pattern, value, re.ASCII) if isinstance(value, str) else None
    if match is None:
        raise ValueError("must be none, full, every-N (every-2: each second layer) or solve")
    return int(match[1])


def targets(value: object) -> str:
    """Target modules: all-linear, attention, or names of modules joined by commas."""
    if isinstance(value, str) and len(value) <= 1000:
        names = [name.strip() for name in value.split(",")]
        if value == "all-linear" or all(
            re.fullmatch(r"[\w.]{1,100}", name, re.ASCII) for name in names
        ):
            return ",".join(names)
    raise ValueError("must be all-linear, attention, or module names joined by commas")
