"""Replays steps whose segments grow (expandable_segments), in a given room.

Where there is no room left, torch unmaps every page that is free and maps pages anew where they are wanted.
That costs milliseconds: in the first steps, while what stays finds its place, it is no harm; in every step it
is. How much is reserved then depends on the room: without a limit it may even be more than by segments of
fixed size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import chain

import numpy as np

from autotune.memory.allocator import EMPTY_CACHE, OVERSHOOT_BYTES, PAGE_BYTES, Replay
from autotune.memory.replayer import Replayer
from autotune.memory.traces.running import in_blocks, running
from autotune.predict.steps import Order, Steps

_NUM_STEADY = 2
"""Most steps that are replayed behind those in which all state is made: one, where it is steady."""


def grown(steps: Steps, room_bytes: int, replayer: Replayer | None = None) -> Replay:
    """The replay of the steps within so many reserved bytes. `replayer`: may know parts of it.

    Where the steps do not fit, the replay ends at the request that failed, but its peaks are those of all
    steps, and its reserved bytes pass the room: by what is live, or by what that request lacked, or by a page
    where the last of two steady steps still has to give back what is cached. The steps may need more.
    """
    last_to_settle = max(steps.sure_step, 1)
    together, *further = steps.by_step(last_to_settle)[: 1 + _NUM_STEADY]
    within = (replayer or Replayer()).replay(
        steps.sizes,
        together,
        until_steady=further,
        cap_bytes=max(room_bytes - OVERSHOOT_BYTES, 0),
        expandable_segments=True,
        aside=steps.aside,
    )
    last = min(steps.parts[-1].step, last_to_settle + _NUM_STEADY)
    settled = sum(len(part.events) for part in steps.parts if part.step < last)
    if within.last_retry_event is None or (
        within.failed_request_bytes is None and within.last_retry_event < settled
    ):
        return within
    live_bytes, event = _live_peak(steps.sizes, np.concatenate(list(chain(together, *further))))
    needed = room_bytes + PAGE_BYTES
    if within.failed_request_bytes is not None:
        needed = within.final_reserved_bytes + within.failed_request_bytes + OVERSHOOT_BYTES
    return dataclasses.replace(
        within,
        peak_allocated_bytes=live_bytes,
        peak_allocated_event=event,
        peak_reserved_bytes=max(needed, live_bytes + OVERSHOOT_BYTES),
    )


def _live_peak(sizes: Sequence[int], order: Order) -> tuple[int, int]:
    """Peak of live bytes, and its event: of allocated ones, too, since every block is split that can be."""
    positions = np.flatnonzero(order != EMPTY_CACHE)
    live = running(order[positions], in_blocks(sizes))
    at = int(live.argmax())
    return int(live[at]), int(positions[at])
