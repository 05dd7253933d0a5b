"""Smaller, larger and chosen numbers, of one number or of arrays.

A formula that is written with them and with arithmetic takes either: arrays of shapes at once, and a
single shape without numpy's cost of a microsecond an operation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = float | NDArray[np.float64]
"""One number, or an array of them."""

Truths = bool | NDArray[np.bool_]


def smaller(one: Numbers, other: Numbers) -> Numbers:
    """The smaller of two, place by place."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.minimum(one, other)
    return one if one < other else other


def larger(one: Numbers, other: Numbers) -> Numbers:
    """The larger of two, place by place."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.maximum(one, other)
    return one if one > other else other


def either(condition: Truths, one: Numbers, other: Numbers) -> Numbers:
    """One where the condition holds, else the other."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, one, other)
    return one if condition else other
