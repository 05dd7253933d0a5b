"""What vLLM's share of a card holds, worked out by hand."""

from __future__ import annotations

import pytest

from autotune.common.units import GIB, MIB
from autotune.memory.vllm import Served, share_bytes

SERVED = Served(
    capacity_bytes=24 * GIB, num_parameters=GIB, vocab_size=2**15, cache_bytes_per_token=2**18
)
"""Two GiB of weights in 16 bits, half a GiB of graphs, nine times 128 KiB of logits for each sequence."""


def test_the_cache_has_what_weights_graphs_and_logits_leave() -> None:
    assert SERVED.weights_bytes == 2 * GIB
    assert SERVED.logits_bytes(32) == 36 * MIB
    assert SERVED.cache_bytes(0.5, 32) == 12 * GIB - 2 * GIB - GIB // 2 - 36 * MIB
    assert SERVED.cache_bytes(0.1, 32) < 0
    # A part of a byte is a byte.
    assert [share_bytes(share, 10) for share in (0.3, 0.31, 0.399)] == [3, 4, 4]


@pytest.mark.parametrize(
    ("more_bytes", "num_running"), [(-1, 1), (0, 2), (256 * MIB - 1, 2), (256 * MIB, 3)]
)
def test_whole_sequences_run(more_bytes: int, num_running: int) -> None:
    """One of 1,024 tokens takes 256 MiB; two fit exactly."""
    taken = 2 * GIB + GIB // 2 + 36 * MIB + 512 * MIB + more_bytes
    share, asked = taken / SERVED.capacity_bytes, {"num_sequences": 32, "sequence_length": 1024}
    assert SERVED.num_running(share, **asked) == num_running
    assert SERVED.starts(share, **asked)


def test_no_more_run_than_there_are_and_none_where_the_share_is_too_small() -> None:
    asked = {"num_sequences": 5, "sequence_length": 1024}
    assert SERVED.num_running(0.9, **asked) == 5
    assert SERVED.num_running(0.05, **asked) == 0
    assert not SERVED.starts(0.05, **asked)
    # A model without a cache: all run where there is any room.
    bare = Served(capacity_bytes=GIB, num_parameters=0, vocab_size=0, cache_bytes_per_token=0)
    assert bare.num_running(0.75, **asked) == 5
