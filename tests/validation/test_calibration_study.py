"""What studies/calibration says of two cards, asked again."""

from __future__ import annotations

import json

import pytest

from autotune.catalogue.gpus import find_gpu
from autotune.speed.attention import rates_from_rows
from autotune.speed.calibration_plan import PRODUCTS
from validation.kernels import attention, calibration
from validation.kernels.calibration import FOLDER, Errors
from validation.kernels.fit_attention import all_rows
from validation.kernels.measured_products import bfloat16_products

A100, L40S = "NVIDIA A100-SXM4-80GB", "NVIDIA L40S"


def check_recorded(found: list[Errors]) -> dict[tuple[str, str], Errors]:
    """By kind of row and way of predicting."""
    recorded = [Errors(**row) for row in json.loads((FOLDER / "rows.json").read_text())]
    for each in found:
        (same,) = (
            row
            for row in recorded
            if (row.card, row.kernel, row.rows, row.by)
            == (each.card, each.kernel, each.rows, each.by)
        )
        assert (same.num_timed, same.num_rows) == (each.num_timed, each.num_rows)
        assert same.median == pytest.approx(each.median, abs=2e-3)
    return {(each.rows, each.by): each for each in found}


def test_products_of_the_a100() -> None:
    by = check_recorded(calibration.products_of(A100, bfloat16_products()))
    for kind in ("large", "thin", "other"):
        before, after = by[kind, "transferred"], by[kind, "calibrated"]
        assert after.num_timed == len(PRODUCTS)
        assert after.median < before.median
        assert after.percentile_90 < before.percentile_90
        assert after.median < by[kind, "own table"].median + 0.01
    # A factor on the rate alone is no substitute.
    assert by["large", "rate alone"].median > 2 * by["large", "calibrated"].median


def test_attention_of_the_l40s() -> None:
    fits = attention.fits()
    others = [
        row for row in all_rows(fits.values()) if row["card"] != L40S and row["kernel"] == "flash"
    ]
    before = rates_from_rows(find_gpu(L40S), "flash", others)
    assert before is not None
    by = check_recorded(calibration.attention_of(fits[L40S, "flash"], before))
    assert by["512 and more", "transferred"].median > 0.2
    assert by["512 and more", "calibrated"].median < 0.1
    assert by["below 512", "calibrated"].median < by["below 512", "transferred"].median
