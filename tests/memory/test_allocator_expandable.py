"""The allocator model with expandable segments, by hand and against what PyTorch's own counted.

tests/data/expandable_tapes.jsonl was recorded with torch 2.13.0+cu130 on no card (tests/data/README.md).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.memory.allocator import EMPTY_CACHE, Replay, Tape
from autotune.memory.replayer import replay

MIB = 1 << 20
RECORDED = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data/expandable_tapes.jsonl").read_text().splitlines()
]
INPUTS = ("sizes", "events", "cap_bytes")


def run(*steps: int | str, cap: int | None = None) -> Replay:
    """Replay a script: a number allocates so many bytes (as a, b, c, ...), a letter frees."""
    tape = Tape()
    for step in steps:
        if isinstance(step, str):
            tape.free(ord(step) - ord("a"))
        elif step == EMPTY_CACHE:
            tape.events.append(step)
        else:
            tape.alloc(step, "activation")
    return replay(tape.sizes, tape.events, cap_bytes=cap, expandable_segments=True)


def said(recorded: dict[str, Any], *, expandable_segments: bool) -> dict[str, Any]:
    """What the replay says where PyTorch said something."""
    inputs = {key: recorded[key] for key in INPUTS}
    result = replay(**inputs, expandable_segments=expandable_segments)
    return {key: getattr(result, key) for key in recorded if key not in INPUTS}


# --- against PyTorch


@pytest.mark.parametrize("index", range(len(RECORDED)))
def test_equals_pytorch(index: int) -> None:
    recorded = RECORDED[index]
    counted = {key: value for key, value in recorded.items() if key not in INPUTS}
    assert said(recorded, expandable_segments=True) == counted
    assert said(recorded, expandable_segments=False) != counted


def test_what_is_recorded_has_every_kind_of_tape() -> None:
    failed = [row["failed_event"] is not None for row in RECORDED]
    assert any(failed)
    assert not all(failed)
    assert any(row["num_alloc_retries"] and row["failed_event"] is None for row in RECORDED)
    assert any(row["peak_reserved_bytes"] > row["cap_bytes"] for row in RECORDED)
    assert any(EMPTY_CACHE in row["events"] for row in RECORDED)
    assert sum(len(row["events"]) for row in RECORDED) > 5000


# --- by hand


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (0, 0, 0),
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (13 * MIB, 13 * MIB, 20 * MIB),  # 7 MiB remain: split off, as anything from 512 B
        (20 * MIB, 20 * MIB, 20 * MIB),
        (20 * MIB + 1, 20 * MIB + 512, 40 * MIB),
    ],
)
def test_one_request_maps_whole_pages(nbytes: int, allocated: int, reserved: int) -> None:
    result = run(nbytes)
    assert (result.peak_allocated_bytes, result.peak_reserved_bytes) == (allocated, reserved)
    assert run(nbytes, "a").final_reserved_bytes == reserved
    assert run(nbytes, "a", EMPTY_CACHE).final_reserved_bytes == 0


def test_the_free_end_is_part_of_what_comes_next() -> None:
    # 30 of 40 MiB; 25 more take the 10 that are left and one page.
    assert run(30 * MIB, 25 * MIB).peak_reserved_bytes == 60 * MIB


def test_what_two_requests_left_serves_a_third() -> None:
    # Without expandable segments these are three segments of 30, 30 and 60 MiB.
    assert run(30 * MIB, 30 * MIB, "a", "b", 60 * MIB).peak_reserved_bytes == 60 * MIB


def test_the_end_which_may_grow_is_not_the_best_fit() -> None:
    # 10 | 25 used | 5 that may grow. 4 MiB fit 5 better, and are cut from 10: 25 more then take the 5
    # and one page.
    script = (10 * MIB, 25 * MIB, "a", 4 * MIB, 25 * MIB)
    assert run(*script).peak_reserved_bytes == 60 * MIB


def test_emptying_the_cache_unmaps_pages_within_free_blocks() -> None:
    # 5 used | 50 free | 5 used: the page from 20 to 40 MiB is free as a whole.
    script = (5 * MIB, 50 * MIB, 5 * MIB, "b", EMPTY_CACHE)
    assert run(*script).final_reserved_bytes == 40 * MIB
    # 50 MiB go where they were, and map that page again.
    assert run(*script, 50 * MIB).final_reserved_bytes == 60 * MIB
    # 51 do not fit there.
    assert run(*script, 51 * MIB).final_reserved_bytes == 100 * MIB


def test_the_segment_counts_against_the_cap_and_pages_are_mapped() -> None:
    result = run(21 * MIB, cap=22 * MIB)
    assert (result.failed_event, result.peak_reserved_bytes) == (None, 40 * MIB)
    result = run(21 * MIB, cap=22 * MIB - 1)
    assert (result.failed_event, result.failed_request_bytes) == (0, 22 * MIB)
    assert result.num_alloc_retries == 1


def test_flush_and_retry_under_a_cap() -> None:
    # As above, 60 MiB of which one page of 20 can go: 60 more fit under 100 after a retry.
    script = (5 * MIB, 50 * MIB, 5 * MIB, "b", 60 * MIB)
    result = run(*script, cap=100 * MIB)
    assert (result.num_alloc_retries, result.failed_event) == (1, None)
    assert result.final_reserved_bytes == result.peak_reserved_bytes == 100 * MIB
    result = run(*script, cap=100 * MIB - 1)
    assert (result.num_alloc_retries, result.failed_event) == (1, 4)
    assert result.final_reserved_bytes == 40 * MIB


def test_a_cap_of_the_own_peak_may_cost_a_retry() -> None:
    # 40 MiB free and 20 more to be mapped, and the cap is held against all 60.
    script = (40 * MIB, "a", 60 * MIB)
    assert run(*script).peak_reserved_bytes == 60 * MIB
    result = run(*script, cap=60 * MIB)
    assert (result.num_alloc_retries, result.failed_event) == (1, None)
    assert result.peak_reserved_bytes == 60 * MIB
