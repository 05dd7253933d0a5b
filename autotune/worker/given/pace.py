"""The speed of a real run: its steps between marks of the device, which nobody waits for."""

from __future__ import annotations

from collections import deque
from typing import Any

from autotune.worker.probe.steps import Clock, CpuClock

NUM_WARM_UP_STEPS = 3


class Pace:
    """Tokens per second of this process, over all steps that count and over the last few.

    The first steps do not count, nor does a step after something else was done (`interrupt`). A step
    lasts from the end of the one before to its own, so that waiting for data is part of it.
    """

    def __init__(self, clock: Clock, window_steps: int) -> None:
        self._clock = clock
        self._host = CpuClock()
        self._window: deque[tuple[float, int]] = deque(maxlen=window_steps)
        self._window_steps = window_steps
        self._pending: deque[tuple[Any, int, bool]] = deque()
        self._last_mark: Any = None
        self._seconds = self._host_seconds = self._waiting_seconds = 0.0
        self.num_tokens = 0
        """Number of tokens in the steps that count."""
        self._is_interrupted = False
        self._ended = self._host.mark()
        self._waited_seconds = 0.0
        self.num_steps = 0

    def interrupt(self) -> None:
        """Note that something else than training is done before the next step ends."""
        self._is_interrupted = True

    def begin_step(self) -> None:
        """Begin a step: its batches are here."""
        self._waited_seconds = self._host.seconds(self._ended, self._host.mark())

    def end_step(self, tokens: int) -> None:
        self.num_steps += 1
        counts = not self._is_interrupted and self.num_steps > NUM_WARM_UP_STEPS
        self._pending.append((self._clock.mark(), tokens, counts))
        now = self._host.mark()
        if counts:
            self._host_seconds += self._host.seconds(self._ended, now)
            self._waiting_seconds += self._waited_seconds
        self._ended = now
        self._is_interrupted = False
        self.take()

    def take(self) -> None:
        """Count the steps that the device has finished."""
        while self._pending and self._clock.is_past(self._pending[0][0]):
            mark, tokens, counts = self._pending.popleft()
            if counts:
                seconds = self._clock.seconds(self._last_mark, mark)
                self._window.append((seconds, tokens))
                self._seconds += seconds
                self.num_tokens += tokens
            self._last_mark = mark

    @property
    def waiting_share(self) -> float:
        """Share of the time that was spent before a step began: on the host, which loads the data."""
        return self._waiting_seconds / self._host_seconds if self._host_seconds else 0.0

    @property
    def speed(self) -> float | None:
        """Tokens per second over all steps; None where none counts."""
        return self.num_tokens / self._seconds if self._seconds else None

    @property
    def recent_speed(self) -> float | None:
        """Tokens per second over the window; None until it is full."""
        if len(self._window) < self._window_steps:
            return None
        return sum(tokens for _, tokens in self._window) / sum(s for s, _ in self._window)
