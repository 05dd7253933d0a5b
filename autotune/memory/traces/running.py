"""Tensors that events leave, and bytes alive after each event, from sizes by number of the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune.memory.traces.copies import numbers_of
from autotune.memory.traces.terms import Array, summable


def left_by(events: Sequence[int]) -> list[int]:
    """Tensors that events leave, in the order in which they were made."""
    freed = {~event for event in events if event < 0}
    return [event for event in events if event >= 0 and event not in freed]


def in_blocks(sizes: Sequence[int] | Array) -> Array:
    """Sizes as the allocator rounds them: up to 512 B (autotune.memory.allocator)."""
    rounded: Array = (summable(sizes) + 511) & -512
    return rounded


def changes(events: npt.NDArray[Any], sizes: Array) -> Array:
    """Bytes that each event adds, or gives back."""
    changed: Array = sizes[numbers_of(events)]
    return np.where(events < 0, -changed, changed)


def running(events: npt.NDArray[Any], sizes: Array) -> Array:
    """Bytes alive after each event, from zero."""
    return np.cumsum(changes(events, sizes))
