"""Records as JSON and back: msgspec reads their annotations, so that no record is written out twice."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def plain(record: object) -> Any:
    """The record as objects, lists, texts and numbers: what `json` writes and `read` takes."""
    return msgspec.to_builtins(record)


def read(kind: type[T], values: Any, what: str = "it") -> T:
    """The record of that kind from what `plain` gave, after JSON as well.

    Every field without a default is there, known, and of its type; a whole number may stand for a float,
    a bool never for a number; NaN and infinity are refused. Raises ValueError, which names the field
    below `what`.
    """
    mapping(values, what)
    record = read_part(kind, values, what)
    _check(values, plain(record), what)
    return record


def read_part(kind: type[T], values: Any, what: str = "it") -> T:
    """The record of that kind from what another program wrote: what it has no field for is passed over.

    Raises ValueError, which names the field below `what`.
    """
    try:
        return msgspec.convert(values, kind, strict=True)
    except msgspec.ValidationError as error:
        said, _, place = str(error).partition(" - at `$")
        raise ValueError(f"{what}{place.rstrip('`')}: {said.replace('`', '')}") from error


def _check(values: Any, known: Any, place: str) -> None:
    if isinstance(values, dict):
        for name, value in values.items():
            if not isinstance(known, dict) or name not in known:
                raise ValueError(f"{place}.{str(name)[:80]} is unknown")
            _check(value, known[name], f"{place}.{name}")
    elif isinstance(values, list | tuple):
        for value, one in zip(values, known, strict=True):
            _check(value, one, place)
    elif isinstance(values, float) and not math.isfinite(values):
        raise ValueError(f"{place} is {values}")


def mapping(values: Any, what: str) -> dict[str, Any]:
    """The values, where they are an object. Raises ValueError."""
    if not isinstance(values, dict):
        raise ValueError(f"{what} is {shown(values)} and should be an object")
    return values


def shown(value: object) -> str:
    """A value in a message: at most 80 characters of it."""
    return repr(value)[:80]
