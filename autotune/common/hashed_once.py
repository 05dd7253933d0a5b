"""Immutable records of many fields that are keys of many tables: each works its hash out once.

What is asked of each many times may be derived from it once, too.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any


class HashedOnce:
    """Base of a frozen dataclass with slots, which takes over `__hash__` in its own body.

    The hash is in no copy and in no pickle: that of a text differs from process to process.
    """

    __slots__ = ("_derived", "_hash")
    _derived: tuple[Callable[[Any], Any], Any]
    _hash: int

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            kind: Any = type(self)
            found = hash(_values_of(kind)(self))
            object.__setattr__(self, "_hash", found)
            return found

    def derived(self, make: Callable[[Any], Any]) -> Any:
        """Return what `make` makes of this record, once for as long as nothing else is asked for."""
        kept = getattr(self, "_derived", None)
        if kept is None or kept[0] is not make:
            kept = make, make(self)
            object.__setattr__(self, "_derived", kept)
        return kept[1]


@functools.cache
def _values_of(record: Any) -> Callable[[Any], Any]:
    return operator.attrgetter(*(field.name for field in dataclasses.fields(record)))
