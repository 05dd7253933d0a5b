"""Immutable records of many fields that are keys of many tables: each works its hash out once."""

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

    __slots__ = ("_hash",)
    _hash: int

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            kind: Any = type(self)
            found = hash(_values_of(kind)(self))
            object.__setattr__(self, "_hash", found)
            return found


@functools.cache
def _values_of(record: Any) -> Callable[[Any], Any]:
    return operator.attrgetter(*(field.name for field in dataclasses.fields(record)))
