"""Flat dataclasses read from JSON: every field is there, known, and of its type."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, cast


def record(kind: type[Any], values: Any, what: str) -> Any:
    """The dataclass of these fields. Raises ValueError, which names the field below `what`.

    Types are read off annotations such as `int | None`; of `tuple[...]` the outermost counts. A whole
    number may stand for a float, a bool never for a number. NaN and infinity are refused.
    """
    prefix = f"{what}." if what else ""
    fields = _fields(cast(Hashable, kind))
    given = mapping(values, what)
    for name in given:
        if name not in fields:
            raise ValueError(f"{prefix}{str(name)[:80]} is unknown")
    for name, field in fields.items():
        if name in given:
            value = given[name]
            if field.types is not None and type(value).__name__ not in field.types:
                raise ValueError(
                    f"{prefix}{name} is {shown(value)} and should be of type {field.in_words}"
                )
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{prefix}{name} is {value}")
        elif field.is_required:
            raise ValueError(f"{prefix}{name} is missing")
    return kind(**given)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Field:
    types: frozenset[str] | None
    """Names of the types that a value may have; None: any."""
    in_words: str
    is_required: bool


@functools.cache
def _fields(kind: Any) -> dict[str, _Field]:
    return {field.name: _field(field) for field in dataclasses.fields(kind)}


def _field(field: dataclasses.Field[Any]) -> _Field:
    allowed = [part.partition("[")[0] for part in str(field.type).split(" | ")]
    types = {"NoneType" if name == "None" else name for name in allowed}
    if "float" in types:
        types.add("int")
    return _Field(
        types=None if "object" in types else frozenset(types),
        in_words=" or ".join(allowed),
        is_required=field.default is dataclasses.MISSING,
    )


def mapping(values: Any, what: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"{what} is {shown(values)} and should be an object")
    return values


def shown(value: object) -> str:
    return repr(value)[:80]
