"""Predicted peaks of single operations against those published for an A100.

The published figures are float32 MiB, so equal means equal to the byte up to 8 GiB, and to 1, 2 or
4 KiB beyond.
"""

from __future__ import annotations

import pytest

from validation import op_memory_a100 as op_memory

NUM_ROWS = {
    "cross_entropy": 6,
    "fused_linear_cross_entropy": 4,
    "geglu": 4,
    "layer_norm": 5,
    "rms_norm": 6,
    "rope": 8,
    "swiglu": 4,
}

EMBEDDING_LEFT_BEHIND_MIB = {768: 12_240.0, 4096: 13_769.59375}
"""By width: the part of the published peaks that was there before the operation ran."""


@pytest.mark.parametrize("kernel", NUM_ROWS)
def test_predicted_peak_equals_published(kernel: str) -> None:
    rows = op_memory.predict_rows([kernel])
    assert len(rows) == NUM_ROWS[kernel]
    assert [row.predicted_mib for row in rows] == [row.published_mib for row in rows]


def test_head_and_loss_to_the_byte() -> None:
    """The sum that the published figures were taken apart into, in bytes."""
    hidden, vocabulary = 4096, 128_256
    weight_bytes = 2 * hidden * vocabulary
    for row in op_memory.predict_rows(["fused_linear_cross_entropy"]):
        logits_bytes, hidden_bytes = 2 * row.x * vocabulary, 2 * row.x * hidden
        expected = 3 * weight_bytes + 3 * logits_bytes + 2 * hidden_bytes
        expected += 2 * 8_519_680 + 8 * row.x + 1024
        assert row.predicted_bytes == expected


@pytest.mark.parametrize("width", EMBEDDING_LEFT_BEHIND_MIB)
def test_embedding_is_off_by_one_constant_over_a_sweep(width: int) -> None:
    rows = [row for row in op_memory.predict_rows(["embedding"]) if row.settings["D"] == width]
    assert len(rows) == 8
    missing_mib = {row.published_mib - row.predicted_mib for row in rows}
    assert missing_mib == {EMBEDDING_LEFT_BEHIND_MIB[width]}
