"""Measured matrix products of studies/kernels/tables, by card."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from autotune.speed.matmul import Floats
from validation.kernels.public_tables import Columns, chosen, columns


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


def bfloat16_products() -> dict[str, Products]:
    """Return gemm_bf16.csv.gz by card."""
    return _by_card(columns("gemm_bf16.csv.gz", ("m", "n", "k", "ms")))


def float32_products(operation: str) -> dict[str, Products]:
    """Return the rows of `linear` or `bmm` in fp32_kernels.csv.gz by card."""
    numbers = ("b", "m", "n", "k", "ms")
    kept = ("operation", frozenset({operation}))
    return _by_card(columns("fp32_kernels.csv.gz", numbers, keep=kept))


def _by_card(table: Columns) -> dict[str, Products]:
    """Without a column `b`, a row is one product."""
    products = {}
    for card in sorted(set(table["card"])):
        of_card = chosen(table, table["card"] == card)
        products[str(card)] = Products(
            batch=of_card.get("b", np.ones(len(of_card["m"]))),
            m=of_card["m"],
            n=of_card["n"],
            k=of_card["k"],
            seconds=of_card["ms"] / 1e3,
        )
    return products
