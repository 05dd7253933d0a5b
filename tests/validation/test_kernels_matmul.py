"""What studies/kernels/matmul.md says, asked again of the rows of one card that nothing was fitted to."""

from __future__ import annotations

import csv
import gzip
import json

import numpy as np
import pytest

from autotune.catalogue.gpus import find_gpu
from autotune.speed.matmul import REGIMES
from autotune.speed.matmul_cards import data
from validation.kernels import matmul
from validation.kernels.matmul_held_out import by_shape, cards_of_kind
from validation.kernels.matmul_rates import shares_by_class
from validation.kernels.measured_products import Products, bfloat16_products
from validation.kernels.public_tables import STUDY, TABLES

PROJECTIONS = ("qkv", "out", "up", "down")


def test_the_layers_of_a_card_without_a_table() -> None:
    layers = matmul.vidur("NVIDIA A40")
    seconds = matmul.priced(find_gpu("A40"), "float16", layers)
    now = {e.regime: e for e in matmul.errors("", "", layers, seconds)}
    assert now["large"].num_rows == 1935
    assert now["large"].median < 0.06
    assert now["large"].percentile_90 < 0.15
    recorded = json.loads((STUDY / "matmul.json").read_text())
    for row in recorded:
        if row["card"] == "NVIDIA A40" and row["regime"] == "large":
            assert row["median"] == pytest.approx(now["large"].median, abs=1e-3)
            break
    else:
        pytest.fail("the study has no A40")


def test_vidurs_products_have_their_shapes() -> None:
    with gzip.open(TABLES / "vidur.csv.gz", "rt") as file:
        row = next(csv.DictReader(file))
    first = matmul.vidur("A100 80GB").where(slice(4))
    # Llama 2 7B, one token: qkv, out, gate with up, down.
    assert (row["model"], row["shards"], row["tokens"]) == ("meta-llama/Llama-2-7b-hf", "1", "1")
    assert first.m.tolist() == [1] * 4
    assert first.n.tolist() == [3 * 4096, 4096, 2 * 11008, 4096]
    assert first.k.tolist() == [4096, 4096, 4096, 11008]
    assert first.seconds.tolist() == [float(row[f"{p}_proj_ms"]) / 1e3 for p in PROJECTIONS]


def test_shares_of_the_peak_are_what_the_package_reads() -> None:
    shares = shares_by_class()
    of_peak = {name: np.median(values) for name, values in shares.items()}
    assert of_peak == pytest.approx(data()["of_peak"], abs=1e-3)
    # GeForce cards reach their peaks; the others, power permitting, four fifths.
    assert 0.95 < of_peak["tensor_halved"] < 1.1
    assert 0.7 < of_peak["tensor"] < 0.85
    assert min(shares["float32_own_lanes"]) == pytest.approx(4.35 / 8.1)  # the T4, with its 70 W


def test_rows_are_predicted_without_their_fold() -> None:
    """A row whose time is absurd does not move its own prediction."""
    table = bfloat16_products()["NVIDIA A100-SXM4-80GB"].sample(400)
    at = (table.n == table.n[0]) & (table.k == table.k[0])
    absurd = Products(
        batch=table.batch,
        m=table.m,
        n=table.n,
        k=table.k,
        seconds=np.where(at, 1e3, table.seconds),
    )
    card = "NVIDIA A100-SXM4-80GB"
    assert by_shape(card, absurd)[at] == pytest.approx(by_shape(card, table)[at])


def test_kinds_of_memory() -> None:
    tables = bfloat16_products()
    assert len(cards_of_kind(tables, hbm=True)) == 4
    assert len(cards_of_kind(tables, hbm=False)) == 2


def test_the_interval_of_a_row() -> None:
    ones = np.ones(4)
    table = Products(batch=ones, m=ones, n=ones, k=ones, seconds=ones)
    spreads = dict.fromkeys(REGIMES, np.log(2) / 1.2816)
    predicted = np.array([1.9, 2.1, 1 / 1.9, 1 / 2.1])
    assert matmul.covered_by(table, predicted, spreads)["few_rows"] == 0.5
