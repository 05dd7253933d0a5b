"""Rows of studies/kernels/tables, as numpy arrays."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from autotune.speed.matmul import Floats

TABLES = Path(__file__).parents[2] / "studies" / "kernels" / "tables"


@dataclass(frozen=True, kw_only=True, slots=True)
class Products:
    """Measured matrix products, arrays of one length."""

    batch: Floats
    m: Floats
    n: Floats
    k: Floats
    seconds: Floats

    def __len__(self) -> int:
        return len(self.m)

    def where(self, index: object) -> Products:
        """Return the rows of an index or a mask."""
        return Products(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def sample(self, num_rows: int) -> Products:
        """Return that many rows, always the same ones; all of them where there are fewer."""
        if len(self) <= num_rows:
            return self
        return self.where(np.random.default_rng(0).choice(len(self), num_rows, replace=False))


def rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file of the tables, gzip'd or not."""
    path = TABLES / name
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return list(csv.DictReader(file))


def products(name: str, which: Callable[[dict[str, str]], bool]) -> dict[str, Products]:
    """Return the chosen rows of a table of products by card; without a column `b` one product a row."""
    by_card: dict[str, list[dict[str, str]]] = {}
    for row in rows(name):
        if which(row):
            by_card.setdefault(row["card"], []).append(row)

    def column(chosen: list[dict[str, str]], key: str) -> Floats:
        return np.array([float(row.get(key, 1)) for row in chosen])

    return {
        card: Products(
            batch=column(chosen, "b"),
            m=column(chosen, "m"),
            n=column(chosen, "n"),
            k=column(chosen, "k"),
            seconds=column(chosen, "ms") / 1e3,
        )
        for card, chosen in by_card.items()
    }


def bfloat16_products() -> dict[str, Products]:
    """Return gemm_bf16.csv.gz by card."""
    return products("gemm_bf16.csv.gz", lambda _: True)


def float32_products(operation: str) -> dict[str, Products]:
    """Return the rows of `linear` or `bmm` in fp32_kernels.csv.gz by card."""
    return products("fp32_kernels.csv.gz", lambda row: row["operation"] == operation)
