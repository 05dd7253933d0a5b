"""Predictions of steps that others measured on a Tesla T4: four of them here, the others from the record."""

from __future__ import annotations

import statistics

import pytest

from validation import published_t4

HERE = ("t4-sweep-20", "t4-sweep-21", "t4-sweep-29", "t4-sweep-31")


def test_the_first_prediction_is_of_every_row() -> None:
    held_out = published_t4.read("held_out.json")
    assert [row.id for row in held_out] == [row["id"] for row in published_t4.measured()]
    errors = [abs(error) for row in held_out if (error := row.error("allocated_bytes")) is not None]
    assert len(errors) == 67
    assert statistics.median(errors) < 0.01


def test_bytes_of_the_record() -> None:
    rows = published_t4.read("rows.json")
    for name, most in (("allocated_bytes", 0.001), ("reserved_bytes", 0.01)):
        assert statistics.median(abs(row.error(name) or 0) for row in rows) < most, name
    unquantised = [row for row in rows if " float16 " in row.run]
    assert len(unquantised) == 24
    for row in unquantised:
        assert abs(row.error("allocated_bytes") or 0) < 0.001, row.id
        assert abs(row.error("reserved_bytes") or 0) < 0.01, row.id


def test_the_record_is_what_is_predicted_here() -> None:
    recorded = {row.id: row for row in published_t4.read("rows.json")}
    rows = published_t4.predict(HERE)
    assert [row.id for row in rows] == list(HERE)
    for row in rows:
        for name in published_t4.COLUMNS:
            wanted = pytest.approx(recorded[row.id].predicted[name], rel=0.001)
            assert row.predicted[name] == wanted, (row.id, name)
