"""Replays steps whose segments grow (expandable_segments), in a given room.

Where there is no room left, torch unmaps every page that is free and maps pages anew where they are wanted.
That costs milliseconds: in the first steps, while what stays finds its place, it is no harm; in every step it
is. How much is reserved then depends on the room: without a limit it may even be more than by segments of
fixed size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from autotune.memory.allocator import EMPTY_CACHE, OVERSHOOT_BYTES, PAGE_BYTES, Replay, replay
from autotune.memory.traces.running import in_blocks, running
from autotune.predict.steps import Steps

_NUM_STEADY = 2
"""Number of steps that are replayed behind those in which all state is made."""


def grown(steps: Steps, room_bytes: int) -> Replay:
    """The replay of the steps within so many reserved bytes.

    Where the steps do not fit, the replay ends at the request that failed, but its peaks are those of all
    steps, and its reserved bytes pass the room: by what is live, or by what that request lacked, or by a page
    where the last of two steady steps still has to give back what is cached. The steps may need more.
    """
    most = max(steps.sure_step, 1) + _NUM_STEADY
    parts = [part for part in steps.parts if part.step <= most]
    events = [event for part in parts for event in part.events]
    settled = sum(len(part.events) for part in parts if part.step < parts[-1].step)
    within = replay_within(steps.sizes, events, room_bytes)
    if within.last_retry_event is None or (
        within.failed_request_bytes is None and within.last_retry_event < settled
    ):
        return within
    live_bytes, event = _live_peak(steps.sizes, events)
    needed = room_bytes + PAGE_BYTES
    if within.failed_request_bytes is not None:
        needed = within.final_reserved_bytes + within.failed_request_bytes + OVERSHOOT_BYTES
    return dataclasses.replace(
        within,
        peak_allocated_bytes=live_bytes,
        peak_allocated_event=event,
        peak_reserved_bytes=max(needed, live_bytes + OVERSHOOT_BYTES),
    )


def replay_within(sizes: Sequence[int], events: Sequence[int], room_bytes: int) -> Replay:
    """Replay events in segments that grow, and end where they would reserve more than there is room for."""
    cap_bytes = max(room_bytes - OVERSHOOT_BYTES, 0)
    return replay(sizes, events, cap_bytes=cap_bytes, expandable_segments=True)


def _live_peak(sizes: Sequence[int], events: Sequence[int]) -> tuple[int, int]:
    """Peak of live bytes, and its event: of allocated ones, too, since every block is split that can be."""
    order = np.asarray(events, dtype=np.int64)
    positions = np.flatnonzero(order != EMPTY_CACHE)
    live = running(order[positions], in_blocks(sizes))
    at = int(live.argmax())
    return int(live[at]), int(positions[at])
