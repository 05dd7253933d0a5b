"""More room where batches of varied lengths leave memory in more pieces than a search keeps free.

A search keeps VARIED_SHARE of what is reserved for pieces, which is enough for most runs. How much they take
is known when steps are replayed (autotune.predict.varied_steps), which takes a second or more: the answer's
are. Where they run out of memory the search is made again, with as much room as they need.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from autotune.errors import NothingFitsError
from autotune.search.prediction import Prediction
from autotune.space.headroom import VARIED_SHARE

SHARES = (0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
"""Shares of what is reserved that are tried beyond VARIED_SHARE. [judgement]"""


def with_room(search: Callable[[float], Prediction], note: Callable[[str], None]) -> Prediction:
    """Search with the usual room for pieces, and again with more where the answer needs it.

    `search`: takes the share of what is reserved that is kept for them.
    """
    started = time.monotonic()
    found, share = search(VARIED_SHARE), VARIED_SHARE
    while not found.goes_on():
        larger = [each for each in SHARES if each > share]
        share = next(filter(found.goes_on_with, larger), larger[-1] if larger else share)
        said = f"Batches of these lengths leave memory in pieces: {share:.0%} of what is reserved"
        try:
            again = search(share) if larger else None
        except NothingFitsError:
            again = None
        if again is None:
            note(
                f"{said} is needed for that, and nothing leaves it: the answer may run out of memory."
            )
            return found
        found = again
    if share > VARIED_SHARE:
        seconds = time.monotonic() - started
        found.answer = dataclasses.replace(found.answer, elapsed_seconds=seconds)
        note(f"{said} is kept free for that, not the usual {VARIED_SHARE:.0%}.")
    return found
