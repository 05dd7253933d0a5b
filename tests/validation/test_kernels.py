"""The tables of autotune/speed are what their fits make of the public tables, and come out as recorded."""

from __future__ import annotations

import json
import tomllib

import numpy as np
import pytest

from autotune.speed import attention, moving
from validation.kernels import fit_moving
from validation.kernels.fit_attention import Fitted, published_rows
from validation.kernels.public_tables import STUDY, fold_of


def test_a_shape_is_in_one_fold_on_every_card() -> None:
    table = {"card": np.array(["a", "b", "a"]), "b": np.array([1, 1, 2]), "n": np.array([3, 3, 4])}
    folds = fold_of(table, ("b", "n"), 1000)
    assert folds[0] == folds[1] != folds[2]


@pytest.mark.parametrize("split", ["held out by shape", "card left out"])
def test_attention_meets_its_targets(split: str) -> None:
    found = json.loads((STUDY / "attention.json").read_text(encoding="utf-8"))
    median, p90 = found["targets"][split]
    (row,) = (
        row
        for row in found["errors"][split]
        if row["card"] == "all" and row["lengths"] == "512 and more"
    )
    assert row["median"] <= median
    assert row["p90"] <= p90


def test_what_memory_bounds_meets_its_target() -> None:
    found = json.loads((STUDY / "moving.json").read_text(encoding="utf-8"))
    target = found["targets"]["held out by shape"]
    by_family = {
        row["family"]: row["median"]
        for row in found["errors"]["held out by shape"]
        if row["card"] == "all"
    }
    assert set(by_family) == {"elementwise", "softmax", "layer_norm"}
    assert all(median <= target for median in by_family.values())


@pytest.mark.parametrize("study", ["attention", "moving"])
def test_80_percent_lie_within_the_80_percent_interval(study: str) -> None:
    found = json.loads((STUDY / f"{study}.json").read_text(encoding="utf-8"))
    for shares in found["inside the 80 % interval"].values():
        assert all(share >= 0.79 for share in shares.values())


@pytest.mark.slow
def test_the_table_of_moving_is_its_fit() -> None:
    spread = moving.table()["spread"]
    made = tomllib.loads(fit_moving.written(fit_moving.fits(), spread))
    assert made == moving.table()


def test_published_rows_of_attention_are_their_fit() -> None:
    """Those from others.csv; the forward tables, which give the costs of few blocks, take a minute."""
    kept = attention.table()["kernel"]
    fits = [
        Fitted(
            card=row["card"],
            kernel=row["kernel"],
            share=row["share"],
            start_columns=row["start_columns"],
            alone=row["alone"],
            blend=row["blend"],
            chain_microseconds=row["chain_microseconds"],
            table_start_microseconds=0,
            cache_gigabytes_per_second=1,
            cache_gain_in_l2=0,
        )
        for row in kept
        if row["source"] == "attention_forward.csv.gz"
    ]
    of_papers = [row for row in kept if row["source"] == "others.csv"]
    made = {(row["card"], row["kernel"], row["direction"]): row for row in published_rows(fits)}
    assert len(made) == len(of_papers)
    for row in of_papers:
        again = made[row["card"], row["kernel"], row["direction"]]
        assert again["start_columns"] == pytest.approx(row["start_columns"], rel=0.1)
        for dim, share in again["share"].items():
            assert share == pytest.approx(row["share"][dim], rel=0.02), (row["card"], dim)
