"""The model of what memory and instructions bound, fitted to kernels that were measured on one card.

A family's rate is scaled by the median of measured over predicted; of softmax and norms the time of rows and
columns is, once elementwise kernels have said how fast bytes move; where instructions bound a kernel, the
rate of its elements. Factors stay between a fifth and five, but for copies to the host: a card may have one
lane of sixteen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.catalogue.own_rates import OwnMoving
from autotune.speed.moving import ROWWISE, SHORT_ROW, MovingRates, moving_seconds, table

_MOST = 5.0
_ROW_FAMILIES = ("softmax", "layer_norm")


@dataclass(frozen=True, kw_only=True, slots=True)
class MovingTime:
    """One measured kernel."""

    family: str
    bytes_moved: float
    rows: float
    row_length: float
    seconds: float
    elements: float = 0.0
    """Elements that instructions may bound; 0 of other kernels."""
    work: str = ""
    """Kind of work that each of them is."""


def predicted(rates: MovingRates, row: MovingTime) -> float:
    """Seconds of the kernel."""
    return float(
        moving_seconds(
            rates,
            row.family,
            bytes_moved=row.bytes_moved,
            rows=row.rows,
            row_length=row.row_length,
            elements=row.elements,
            work=row.work,
        )
    )


def fitted_moving(rates: MovingRates, rows: Sequence[MovingTime]) -> MovingRates:
    """The parameters scaled so that they fit the rows; families without a row of their own follow."""
    counted = [row for row in rows if row.elements]
    rows = [row for row in rows if not row.elements]
    families = {row.family for row in rows}
    if "elementwise" in families:
        factor = _factor(rates, _of(rows, "elementwise"))
        shared = {"elementwise", *_ROW_FAMILIES, *table()["share_of_elementwise"]}
        rates = _scaled(rates, shared, factor)
    for family in families - {"elementwise"}:
        its = _of(rows, family)
        if family in _ROW_FAMILIES:
            rates = _with_rows(rates, its)
        elif family == "dequantize" and rates.weights_per_second is not None:
            factor = _factor(rates, its)
            rates = replace(rates, weights_per_second=rates.weights_per_second / factor)
            rates = _scaled(rates, {"dequantize"}, factor)
        elif family == "copy_host":
            slower = [row.seconds / predicted(rates, row) for row in its]
            rates = _scaled(rates, {family}, float(np.median(slower)))
        else:
            rates = _scaled(rates, {family}, _factor(rates, its))
    known = {**rates.elements_per_second}
    for work in known.keys() & {row.work for row in counted}:
        known[work] /= _factor(rates, [row for row in counted if row.work == work])
    return replace(rates, elements_per_second=known)


def own_moving(rates: MovingRates, rows: Iterable[MovingTime]) -> OwnMoving:
    """The record of fitted parameters, of the families that were measured."""
    rows = list(rows)
    families = {row.family for row in rows if not row.elements}
    works = {row.work for row in rows if row.elements}
    return OwnMoving(
        bytes_per_second={
            family: rate for family, rate in rates.bytes_per_second.items() if family in families
        },
        row_seconds={
            name: pair
            for name, pair in rates.row_seconds.items()
            if name.removeprefix("short_") in families
        },
        weights_per_second=rates.weights_per_second if "dequantize" in families else None,
        elements_per_second={
            work: rate for work, rate in rates.elements_per_second.items() if work in works
        },
    )


def _of(rows: Iterable[MovingTime], family: str) -> list[MovingTime]:
    return [row for row in rows if row.family == family]


def _factor(rates: MovingRates, rows: Iterable[MovingTime]) -> float:
    """Measured over predicted, in the middle."""
    return _median([row.seconds / predicted(rates, row) for row in rows])


def _median(ratios: Sequence[float]) -> float:
    return float(np.clip(np.median(ratios), 1 / _MOST, _MOST))


def _scaled(rates: MovingRates, families: Iterable[str], factor: float) -> MovingRates:
    """The rates of families divided by how much longer they take."""
    known = {**rates.bytes_per_second}
    known |= {family: known[family] / factor for family in families if family in known}
    return replace(rates, bytes_per_second=known)


def _with_rows(rates: MovingRates, rows: Sequence[MovingTime]) -> MovingRates:
    """The times of rows scaled, of short and of long ones by themselves."""
    known = {**rates.row_seconds}
    for name in ROWWISE:
        its = [row for row in rows if name.removeprefix("short_") == row.family]
        its = [row for row in its if (row.row_length <= SHORT_ROW) == name.startswith("short_")]
        if not its or name not in known:
            continue
        ratios = []
        for row in its:
            of_bytes = predicted(rates, replace(row, rows=0.0))
            ratios.append((row.seconds - of_bytes) / (predicted(rates, row) - of_bytes))
        first, each = known[name]
        factor = _median(ratios)
        known[name] = (factor * first, factor * each)
    return replace(rates, row_seconds=known)
