"""Predictions against what exported programs held of a card that is not there (studies/exported-programs)."""

from __future__ import annotations

import pytest

from validation import exported_programs
from validation.exported_programs import CASES, predicted
from validation.recorded_cases import recorded


@pytest.mark.parametrize("name", CASES)
def test_a_program_holds_what_is_predicted(name: str) -> None:
    (held,) = recorded(exported_programs.RECORD)[name]
    found = predicted(CASES[name])
    assert found.peak_allocated_bytes == pytest.approx(held["allocated_bytes"], rel=0.003)
    # Small programs: a segment of small tensors.
    reserved = pytest.approx(held["reserved_bytes"], rel=0.002, abs=2 << 20)
    assert found.peak_reserved_bytes == reserved
