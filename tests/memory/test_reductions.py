"""What reductions share among blocks of threads, against what PyTorch's CUDA build allocated."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from autotune.memory.reductions import shared_bytes

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
