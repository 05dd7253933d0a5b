"""What reductions share among blocks of threads, against what PyTorch's CUDA build allocated."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from autotune.memory.reductions import buffer_bytes, may_be_shared, shared_bytes

ROWS = Path(__file__).parents[2] / "studies/reductions/rows.jsonl"


def test_as_pytorch_allocates() -> None:
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        length, width = row["shape"]
        along = (length, width, width) if row["dim"] == 0 else (width, length, 0)
        sizes = shared_bytes(*along, 4, *row["multiprocessors"])
        assert [size for size in sizes if size] == row["allocated"], row
    # Of each card, some need a buffer and some need none.
    shares = Counter((tuple(row["multiprocessors"]), bool(row["allocated"])) for row in rows)
    assert len(shares) == 6
    assert min(shares.values()) >= 30


@pytest.mark.parametrize(("num_in_row", "least"), [(0, 32 * 256), (1, 256), (64, 256)])
def test_few_values_are_left_to_one_block_of_any_card(num_in_row: int, least: int) -> None:
    """A thread sums 256 values by itself; where those of one output lie side by side, 32 share them."""
    assert [may_be_shared(number, num_in_row) for number in (least - 1, least)] == [False, True]
    for num_sms in (1, 132, 1000):
        of_few = shared_bytes(least - 1, 1, num_in_row, 4, num_sms, 2048)
        assert of_few == (0, 0)
        assert buffer_bytes(least - 1, 1, num_in_row, 4, (num_sms, 2048)) == ()


@pytest.mark.parametrize(
    ("num_outputs", "shares"), [(108, 4), (144, 3), (216, 2), (432, 0), (433, 0)]
)
def test_blocks_share_an_output_where_the_card_has_room(num_outputs: int, shares: int) -> None:
    """108 multiprocessors have room for 4 blocks of 512 threads each, of which 32 x 16 sum 131,072 values.

    An output takes a partial result in float32 of each block, and a semaphore.
    """
    found = shared_bytes(131_072, num_outputs, 0, 4, 108, 2048)
    assert found == (4 * num_outputs * shares, 4 * num_outputs * bool(shares))
