"""Prices that were worked out before, in the user's cache folder: most traces of a search are not read again.

A price is the value of a function of one trace (or of one list of parameters) and of what its name says. Kept
are whole numbers and records of them, which JSON gives back as they were; what it would not is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import msgspec

from autotune.common import json_records
from autotune.store.trace_cache import PriceCache

T = TypeVar("T")

TRAINABLE = "trainable "
"""Beginning of the names of lists of parameters: pairs of an identity, and how many they are."""
_MOST = 2**53
"""Largest whole number that is kept: beyond 64 bits JSON's readers differ."""


class KeptPrices:
    """Prices by identity of what they are of, and by name; each is worked out once."""

    def __init__(
        self,
        cache: PriceCache | None,
        machine: str,
        identities: Callable[[], Collection[str]],
    ) -> None:
        """`machine`: all that a time depends on beside code. `identities`: those that may be asked for."""
        self._cache = cache
        self._machine = hashlib.sha256(machine.encode()).hexdigest()[:32]
        self._identities = identities
        self._known: dict[str, dict[str, Any]] = {}
        self._changed: set[str] = set()

    def price(self, kind: Any, identity: str, name: str, make: Callable[[], T]) -> T:
        """Return a price that is the same on every machine; `kind` is its type."""
        if self._cache is None or not identity:
            return make()
        if name in (known := self._of(identity)):
            # What is spoilt is made again.
            with contextlib.suppress(ValueError):
                found: T = json_records.read_part(kind, known[name])
                return found
        made = make()
        self.note(identity, name, made)
        return made

    def known(self, kind: type[T], identity: str, name: str) -> T | None:
        """Return a price that is kept; None where there is none."""
        if self._cache is None or not identity:
            return None
        with contextlib.suppress(KeyError, ValueError):
            return json_records.read_part(kind, self._of(identity)[name])
        return None

    def note(self, identity: str, name: str, made: object) -> None:
        """Take a price for one that is to be kept."""
        if self._cache is None or not identity:
            return
        value = msgspec.to_builtins(made)
        if _is_exact(value):
            self._of(identity)[name] = value
            self._changed.add(identity)

    def time(self, kind: Any, identity: str, name: str, make: Callable[[], T]) -> T:
        """Return a price that is of this machine."""
        return self.price(kind, identity, f"{self._machine} {name}", make)

    def keep(self) -> None:
        """Keep what was worked out since the last time."""
        if self._cache is not None and self._changed:
            self._cache.add({identity: self._known[identity] for identity in self._changed})
            self._changed.clear()

    def _of(self, identity: str) -> dict[str, Any]:
        if identity not in self._known:
            self._find({identity, *self._identities()})
        return self._known[identity]

    def _find(self, identities: Collection[str]) -> None:
        """Find what is kept of them, and of the lists of parameters that they name."""
        assert self._cache is not None
        asked = set(identities) - self._known.keys()
        if not asked:
            return
        found = self._cache.find(asked)
        lists: set[str] = set()
        for each in asked:
            known = found.get(each)
            self._known[each] = known if isinstance(known, dict) else {}
            for name, value in self._known[each].items():
                if name.startswith(TRAINABLE):
                    lists.update(value[:1])
        self._find(lists)


def _is_exact(value: Any) -> bool:
    """Whether JSON gives the value back as it is."""
    if isinstance(value, dict):
        return all(map(_is_exact, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_exact, value))
    if isinstance(value, int):
        return abs(value) <= _MOST
    return not isinstance(value, float) or math.isfinite(value)
