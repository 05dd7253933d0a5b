"""Tensors that a GPU has beside those of a trace, with sizes that go by the LoRA rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from enum import Enum, auto
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.predict.sharding.shards import Shares

Size = Callable[[int], int]
"""A function from the LoRA rank to bytes."""


class Stream(Enum):
    """The CUDA stream that allocates a tensor: what it frees serves no other."""

    COMPUTES = auto()
    GATHERS = auto()
    GATHERS_COPY = auto()
    REDUCES = auto()
    AVERAGES = auto()


class SizesByRank:
    """Sizes that go by the LoRA rank: those that are alike are worked out once for each rank.

    A partial function that names weights (`position`, `positions`) or a `unit` depends on nothing of these
    but the weights' shapes, dtypes and training, which most layers have alike.
    """

    def __init__(self, shares: Shares, sizes: Iterable[Size] = ()) -> None:
        self._like, self._like_unit = shares.like, functools.cache(shares.like_unit)
        self._unlike: list[Size] = []
        self._which: list[int] = []
        """The number of each size among those that are unlike."""
        self._numbers: dict[Hashable, int] = {}
        for size in sizes:
            self.add(size)

    def __len__(self) -> int:
        return len(self._which)

    def add(self, size: Size) -> None:
        """Add a size behind the others."""
        number = self._numbers.setdefault(self._likeness(size), len(self._unlike))
        if number == len(self._unlike):
            self._unlike.append(size)
        self._which.append(number)

    def at(self, rank: int) -> NDArray[np.int64]:
        """Return all sizes in bytes."""
        unlike = np.asarray([size(rank) for size in self._unlike], dtype=np.int64)
        return unlike[np.asarray(self._which, dtype=np.intp)]

    def _likeness(self, size: Size) -> Hashable:
        """Return a key that is equal for sizes that are equal at each rank."""
        if not isinstance(size, functools.partial):
            return size
        named = (self._likeness_of(name, value) for name, value in sorted(size.keywords.items()))
        return size.func, size.args, *named

    def _likeness_of(self, name: str, value: Any) -> Hashable:
        match name:
            case "position":
                like: int = self._like[value]
                return like
            case "positions":
                return tuple(self._like[each] for each in value)
            case "unit":
                return self._like_unit(value)
            case _:
                return name, value


class AddedTensors:
    """Tensors beside the trace's own, numbered on from those."""

    def __init__(self, start: int, shares: Shares) -> None:
        self._start = start
        self.sizes = SizesByRank(shares)
        self.categories: list[str] = []
        self.gathered: set[int] = set()
        self._of_stream: dict[Stream, list[int]] = {}

    @property
    def aside(self) -> list[list[int]]:
        """The tensors of each stream but the one that computes."""
        return list(self._of_stream.values())

    def new(
        self,
        category: str,
        size: Size,
        *,
        is_gathered: bool = False,
        stream: Stream = Stream.COMPUTES,
    ) -> int:
        number = self._start + len(self.sizes)
        if stream is not Stream.COMPUTES:
            self._of_stream.setdefault(stream, []).append(number)
        self.sizes.add(size)
        self.categories.append(category)
        if is_gathered:
            self.gathered.add(number)
        return number
