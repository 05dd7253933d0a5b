"""Tapes in parts, and what a Replayer remembers of them: the same as each tape in one part, by a new one."""

from __future__ import annotations

from itertools import chain
from random import Random
from typing import Any

import pytest

from autotune.memory.allocator import EMPTY_CACHE, Tape
from autotune.memory.pools import Pool
from autotune.memory.replayer import Replayer, replay

MIB = 1 << 20


def parts_of(tape: Tape, random: Random, *, num_parts: int) -> list[list[int]]:
    """Write parts that leave some of what they allocate; what is left at the end is freed in the last one."""
    kinds = [(1, MIB), (MIB, 10 * MIB), (10 * MIB, 60 * MIB)]
    sizes = [random.randrange(*random.choice(kinds)) for _ in range(8)]
    live, parts = list[int](), list[list[int]]()
    for _ in range(num_parts):
        start = len(tape.events)
        for _ in range(60):
            if live and random.random() < 0.5:
                tape.free(live.pop(random.randrange(len(live))))
            else:
                live.append(tape.alloc(random.choice(sizes), "temporary"))
        if random.random() < 0.3:
            tape.events.append(EMPTY_CACHE)
        parts.append(tape.events[start:])
    parts[-1] += [~tensor for tensor in live]
    return parts


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("share", [None, 0.97, 0.8])
@pytest.mark.parametrize("seed", range(8))
def test_tapes_that_begin_alike_are_replayed_as_each_by_itself(
    seed: int, share: float | None, expandable: bool
) -> None:
    """Some come to a limit early, some late, some never; a second round finds what is remembered."""
    random, tape = Random(seed), Tape()
    start = parts_of(tape, random, num_parts=4)
    ends = [parts_of(tape, random, num_parts=2) for _ in range(3)]
    step = list(chain.from_iterable(start))
    shared = Replayer()
    for end in (*ends, *ends):
        told: dict[str, Any] = {"expandable_segments": expandable}
        whole = [*step, *chain.from_iterable(end)]
        if share is not None:
            peak_bytes = replay(tape.sizes, whole, **told).peak_reserved_bytes
            told[random.choice(["cap_bytes", "most_bytes"])] = int(share * peak_bytes)
        alone = replay(tape.sizes, whole, until_steady=3 * [step], **told)
        in_parts = shared.replay(tape.sizes, [*start, *end], until_steady=3 * [start], **told)
        assert in_parts == alone
        assert share is None or alone.num_alloc_retries or alone.failed_event is not None


def test_what_is_remembered_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = Tape()
    start, end, other_end = (parts_of(tape, Random(n), num_parts=3) for n in range(3))
    num_run: list[int] = []
    real = Pool.run

    def run(self: Pool, events: list[int], *args: Any, **rest: Any) -> Any:
        num_run.append(len(events))
        return real(self, events, *args, **rest)

    monkeypatch.setattr(Pool, "run", run)
    replayer = Replayer()
    first = replayer.replay(tape.sizes, [*start, *end])
    num_run.clear()
    assert replayer.replay(tape.sizes, [*start, *end]) == first
    assert not num_run
    replayer.replay(tape.sizes, [*start, *other_end])
    assert 0 < sum(num_run) <= sum(map(len, other_end))
    # Also where a step comes to its cap in between, and under that cap alone.
    cap_bytes = int(0.97 * first.peak_reserved_bytes)
    capped = replayer.replay(tape.sizes, [*start, *end], cap_bytes=cap_bytes)
    assert capped.num_alloc_retries
    num_run.clear()
    assert replayer.replay(tape.sizes, [*start, *end], cap_bytes=cap_bytes) == capped
    assert not num_run
    for share in (0.96, 0.9, 0.8):
        lower_bytes = int(share * first.peak_reserved_bytes)
        whole = list(chain.from_iterable([*start, *end]))
        found = replayer.replay(tape.sizes, [*start, *end], cap_bytes=lower_bytes)
        assert found == replay(tape.sizes, whole, cap_bytes=lower_bytes)
