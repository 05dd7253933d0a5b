"""The tables of studies/kernels/tables as columns of numpy, and the cards that gpus.toml does not have."""

from __future__ import annotations

import csv
import gzip
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autotune.catalogue.gpus import Gpu, catalogue, find_gpu

TABLES = Path(__file__).parents[2] / "studies" / "kernels" / "tables"
STUDY = TABLES.parent

Columns = dict[str, NDArray]


def columns(
    name: str, numbers: Sequence[str], *, keep: tuple[str, frozenset[str]] | None = None
) -> Columns:
    """Every column of a table, those of `numbers` as floats. `keep`: rows of a column's values alone."""
    opened = gzip.open if name.endswith(".gz") else open
    with opened(TABLES / name, "rt", encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if keep is None or row[keep[0]] in keep[1]]
    return {
        column: np.array([row[column] for row in rows], float if column in numbers else str)
        for column in rows[0]
    }


def chosen(table: Columns, mask: NDArray) -> Columns:
    return {name: column[mask] for name, column in table.items()}


def fold_of(table: Columns, names: Sequence[str], num_folds: int) -> NDArray:
    """A fold for each row by the shape alone: a shape is in the same fold on every card."""
    shapes = zip(*(table[name].astype(str) for name in names), strict=True)
    folds = [int(hashlib.sha256(" ".join(shape).encode()).hexdigest()[:8], 16) for shape in shapes]
    return np.array(folds) % num_folds


def card(name: str) -> Gpu:
    """A card of the tables. NVIDIA's datasheets: those of P100 PCIe 16 GB and P4.

    The tables' rows are too large for a cache of a few megabytes to matter.
    """
    if name in {gpu.name for gpu in catalogue()}:
        return find_gpu(name)
    base = find_gpu("V100 32GB")
    capability, num_sms, clock_hertz, bandwidth, float32 = {
        "NVIDIA P100-PCIE-16GB": ((6, 0), 56, 1303e6, 732e9, 9.3e12),
        "NVIDIA P4": ((6, 1), 20, 1063e6, 192e9, 5.5e12),
    }[name]
    return replace(
        base,
        name=name,
        aliases=(),
        compute_capability=capability,
        num_sms=num_sms,
        boost_clock_hertz=clock_hertz,
        memory_bandwidth_bytes_per_second=bandwidth,
        peak_flop_per_second={"float32": float32},
    )


def errors(predicted: NDArray, measured: NDArray) -> dict[str, float]:
    """Share of the measured time that a prediction is off by: median and 90th percentile, and the bias."""
    off = np.abs(predicted / measured - 1)
    return {
        "rows": len(off),
        "median": round(float(np.median(off)), 4),
        "p90": round(float(np.quantile(off, 0.9)), 4),
        "median ratio": round(float(np.median(predicted / measured)), 4),
    }
