"""Text of users: YAML and JSON, or one kind of error that says what is wrong; and what a terminal shows.

A whole number that no float can hold is refused in both: nothing that is set has such a value, and half of
what computes with numbers would stumble over it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

MAX_DIGITS = 300
"""Most digits of a whole number; the largest float has 309."""


def load_json(text: str, not_finite: Callable[[str], Any] = float) -> Any:
    """Parse JSON. Raises ValueError (json.JSONDecodeError where it is no JSON), RecursionError.

    `not_finite`: makes the value of `Infinity`, `-Infinity` and `NaN`, which Python's JSON writes and reads,
    and of a number beyond what a float can hold.
    """

    def number(digits: str) -> Any:
        value = float(digits)
        return value if math.isfinite(value) else not_finite(json.dumps(value))

    return json.loads(text, parse_int=_whole, parse_float=number, parse_constant=not_finite)


def load_yaml(text: str, loader: type[Any] | None = None) -> Any:
    """Parse YAML. Raises yaml.YAMLError, ValueError, RecursionError."""
    import yaml

    return yaml.load(text, loader or yaml_loader())


def yaml_loader() -> type[Any]:
    """PyYAML's safe loader, in which a value that is not what its tag says is an error with its place.

    PyYAML 6.0 lets some of them through as whatever Python raised: `!!timestamp x` is an AttributeError,
    `!!bool x` a KeyError, `!!int ""` an IndexError.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                value = super().construct_object(node, deep)
                if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
                    raise ValueError
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                kind = node.tag.rpartition(":")[2]
                shown = repr(node.value[:40]) if isinstance(node.value, str) else "this"
                problem = f"{shown} cannot be read as {kind}"
                raise yaml.constructor.ConstructorError(
                    None, None, problem, node.start_mark
                ) from error
            return value

    return Loader


def printable(text: str) -> str:
    """Others' text on one line: control characters, line breaks and the like escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"{digits[:20]}... is a number of {len(digits):,} digits")
    return int(digits)
