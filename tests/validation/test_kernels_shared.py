"""What studies/kernels/SHARED.md says of steps that four GPUs share, asked again of one."""

from __future__ import annotations

import json

import pytest

from validation.kernels import shared, steps
from validation.kernels.public_tables import STUDY


def recorded() -> dict[str, shared.SharedStep]:
    found = json.loads((STUDY / "shared.json").read_text(encoding="utf-8"))
    return {row["way"]: shared.SharedStep(**row) for row in found["rows"]}


def test_every_way_meets_the_target() -> None:
    assert sorted(recorded()) == ["dp4", "pp4_1", "tp4"]
    assert all(abs(step.ratio - 1) <= shared.TARGET for step in recorded().values())


def test_a_split_step_is_predicted_as_recorded() -> None:
    (row,) = (row for row in steps.published() if row.option == "tp4")
    again = shared.predicted(row)
    assert again.predicted_ms == pytest.approx(recorded()["tp4"].predicted_ms)
    assert again.communication_ms == pytest.approx(recorded()["tp4"].communication_ms)
