"""A first answer early: the best configuration so far, while other training steps are still traced.

A look prices what has been traced. The Estimator keeps what it has priced, so little of that is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from autotune.records.estimate import Estimate
from autotune.space.config import TrainConfig

PAUSE_SECONDS = 2.0
"""Least time between two looks. [judgement] Traces that are kept arrive in less, and need no first answer."""
MOST_SHARE = 0.2
"""Most of the time that looks may take. [judgement]"""


class FirstAnswers:
    """Looks for the best so far now and then, and tells it where it is another one than before."""

    def __init__(
        self,
        best: Callable[[], Estimate | None],
        tell: Callable[[Estimate], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`best`: prices what there is. `clock`: seconds."""
        self._best = best
        self._tell = tell
        self._clock = clock
        self._next_seconds = clock() + PAUSE_SECONDS
        self._told: TrainConfig | None = None

    def look(self) -> None:
        """Look, unless the last time was but now."""
        began = self._clock()
        if began < self._next_seconds:
            return
        found = self._best()
        ended = self._clock()
        self._next_seconds = ended + max(PAUSE_SECONDS, (ended - began) * (1 / MOST_SHARE - 1))
        if found is not None and found.config != self._told:
            self._told = found.config
            self._tell(found)
