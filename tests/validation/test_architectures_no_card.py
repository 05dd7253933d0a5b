"""What studies/architectures-no-card/ says of its rows is what they hold."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

STUDY = Path(__file__).parents[2] / "studies" / "architectures-no-card"
LARGEST_ERROR = {"allocated": 0.0002, "reserved": 0.003}
MEDIAN_ERROR = {"allocated": 0.000005, "reserved": 0.0}
NUM_EQUAL = {"allocated": 0, "reserved": 170}
NOT_COMPARED = {"gemma3n_text", "inkling2_text", "llama4_text", "mamba2", "modernbert-decoder"}
"""Some case of theirs; the README says why."""


def _rows() -> list[dict[str, Any]]:
    text = (STUDY / "rows.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(("figure", "column"), [("allocated", 0), ("reserved", 1)])
def test_predictions_are_as_near_as_is_said(figure: str, column: int) -> None:
    errors = {
        row["key"]: row["predicted"][column] / row["pytorch"][column] - 1
        for row in _rows()
        if row["outcome"] == "ok"
    }
    assert len(errors) >= 160
    for key, error in errors.items():
        assert abs(error) <= LARGEST_ERROR[figure], key
    assert statistics.median(map(abs, errors.values())) <= MEDIAN_ERROR[figure]
    assert list(errors.values()).count(0.0) >= NUM_EQUAL[figure]


def test_the_others_are_named() -> None:
    rows = _rows()
    assert {row["model_type"] for row in rows if row["outcome"] != "ok"} == NOT_COMPARED
    readme = (STUDY / "README.md").read_text(encoding="utf-8")
    assert all(name in readme for name in NOT_COMPARED)
    assert len({row["key"] for row in rows}) == len(rows)
