"""Flat dataclasses read from JSON: every field is there, known, and of its type."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


def record(kind: type[Any], values: Any, what: str) -> Any:
    """The dataclass of these fields. Raises ValueError, which names the field below `what`.

    Types are read off annotations such as `int | None`; of `tuple[...]` the outermost counts. A whole
    number may stand for a float, a bool never for a number. NaN and infinity are refused.
    """
    prefix = f"{what}." if what else ""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    given = mapping(values, what)
    for name in given:
        if name not in fields:
            raise ValueError(f"{prefix}{str(name)[:80]} is unknown")
    for name, field in fields.items():
        if name in given:
            _require(given[name], str(field.type), f"{prefix}{name}")
        elif field.default is dataclasses.MISSING:
            raise ValueError(f"{prefix}{name} is missing")
    return kind(**given)


def mapping(values: Any, what: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"{what} is {shown(values)} and should be an object")
    return values


def shown(value: object) -> str:
    return repr(value)[:80]


def _require(value: object, annotation: str, name: str) -> None:
    allowed = [part.partition("[")[0] for part in annotation.split(" | ")]
    found = "None" if value is None else type(value).__name__
    is_any = "object" in allowed
    if not is_any and found not in allowed and not (found == "int" and "float" in allowed):
        raise ValueError(f"{name} is {shown(value)} and should be of type {' or '.join(allowed)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}")
