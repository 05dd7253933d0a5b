"""Steps whose segments grow (expandable_segments), in a given room.

Where there is no room left, torch unmaps every page that is free and maps pages anew where they are
wanted. That costs milliseconds: in the first steps, while what stays finds its place, it is no harm; in every
step it is. How much is reserved hangs on the room, then: without a limit it may even be more than by
segments of fixed size.
"""

from __future__ import annotations

import dataclasses

from autotune.allocator import OVERSHOOT_BYTES, PAGE_BYTES, Replay, replay
from autotune.step_events import Steps

NUM_STEPS = 4
"""[judgement] In three of them what is cached may be given back, in the last no more."""


def grown(steps: Steps, room_bytes: int) -> Replay:
    """The replay of the steps within so many reserved bytes.

    It passes them where the steps do not fit: by what is live, or by what the request that failed lacked,
    or by a page where the last step still has to give back what is cached. They may need
    more than that.
    """
    numbers = sorted({part.step for part in steps.parts})[: NUM_STEPS + 1]
    *settling, last = [
        [event for part in steps.parts if part.step == number for event in part.events]
        for number in numbers
    ]
    settled = [event for events in settling for event in events]
    within = replay(
        steps.sizes,
        [*settled, *last],
        cap_bytes=max(room_bytes - OVERSHOOT_BYTES, 0),
        expandable_segments=True,
    )
    if within.last_retry_event is None or (
        within.failed_request_bytes is None and within.last_retry_event < len(settled)
    ):
        return within
    alone = replay(steps.sizes, [*settled, *last], expandable_segments=True)
    needed = room_bytes + PAGE_BYTES
    if within.failed_request_bytes is not None:
        needed = within.final_reserved_bytes + within.failed_request_bytes + OVERSHOOT_BYTES
    return dataclasses.replace(
        alone, peak_reserved_bytes=max(needed, alone.peak_allocated_bytes + OVERSHOOT_BYTES)
    )
