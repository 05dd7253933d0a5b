"""Clocks, and the times of optimizer steps: medians, spread, and the speed at any accumulation.

An optimizer step is cut at marks, so that its parts add up to all of it:

    fetch | forward+backward | gap | forward+backward | clip, optimizer, zero_grad

The second micro-step adds to the gradients of the first; a third and a further one cost the same. Where
several GPUs share a run, the last one also sends gradients: so three are run.
A gap holds what the Trainer does between micro-steps, among it the wait for the loss.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """A clock that marks moments of a device, or of the host."""

    def mark(self) -> Any:
        """Return a mark of now: on the device's own time line, where it has one."""

    def is_past(self, mark: Any) -> bool:
        """Whether the device has come to the mark."""

    def seconds(self, first: Any, last: Any) -> float:
        """Seconds between two marks; waits for the second."""


class CpuClock:
    """The host's clock: every mark is past at once."""

    def mark(self) -> float:
        return time.perf_counter()

    def is_past(self, mark: float) -> bool:
        return True

    def seconds(self, first: float, last: float) -> float:
        return last - first


class CudaClock:
    """A clock of CUDA events on the current stream. Run on an H200."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_past(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


@dataclass(slots=True)
class Marks:
    """Marks of one optimizer step: with one or two micro-steps, or with all of them."""

    began: Any
    micro_steps: list[tuple[Any, Any]] = field(default_factory=list)
    ended: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedStep:
    """Parts of one optimizer step at a configuration's accumulation."""

    micro_step_seconds: float
    """Mean time of a micro-step: fetching the batch, forward, backward."""
    optimizer_step_seconds: float
    total_seconds: float


def step_seconds(clock: Clock, marks: Marks, accumulation: int) -> TimedStep:
    """Extrapolate a step's marks to `accumulation` micro-steps.

    Waits for the step's end.
    """
    first, last = marks.micro_steps[0], marks.micro_steps[-1]
    num_run = len(marks.micro_steps)
    optimizer = clock.seconds(last[1], marks.ended)
    fetch = clock.seconds(marks.began, first[0]) / num_run
    micro = clock.seconds(first[0], last[1])
    if accumulation > num_run:
        # The second stands for those that were not run, with the gap before it.
        assert num_run > 1
        micro += (accumulation - num_run) * clock.seconds(first[1], marks.micro_steps[1][1])
    micro += accumulation * fetch
    return TimedStep(
        micro_step_seconds=micro / accumulation,
        optimizer_step_seconds=optimizer,
        total_seconds=micro + optimizer,
    )


def whole_step_seconds(clock: Clock, marks: Marks) -> TimedStep:
    """Times of a step that ran all its micro-steps.

    Waits for the step's end.
    """
    micro_steps_ended = marks.micro_steps[-1][1]
    micro = clock.seconds(marks.began, micro_steps_ended)
    optimizer = clock.seconds(micro_steps_ended, marks.ended)
    return TimedStep(
        micro_step_seconds=micro / len(marks.micro_steps),
        optimizer_step_seconds=optimizer,
        total_seconds=micro + optimizer,
    )


def mean_step(steps: Sequence[TimedStep]) -> TimedStep:
    """Return a step as long as these are on average."""
    names = ("micro_step_seconds", "optimizer_step_seconds", "total_seconds")
    return TimedStep(
        **{name: statistics.fmean(getattr(step, name) for step in steps) for name in names}
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """Measurement's fields about the times of several steps."""

    micro_step_seconds: float
    optimizer_step_seconds: float
    spread: float | None
    num_steps: int


def summarize(steps: Sequence[TimedStep]) -> Timings:
    return Timings(
        micro_step_seconds=statistics.median(s.micro_step_seconds for s in steps),
        optimizer_step_seconds=statistics.median(s.optimizer_step_seconds for s in steps),
        spread=spread(steps),
        num_steps=len(steps),
    )


def spread(steps: Sequence[TimedStep]) -> float | None:
    """Standard error of the mean step, relative to it; None for fewer than two steps."""
    if len(steps) < 2:
        return None
    totals = [s.total_seconds for s in steps]
    return statistics.stdev(totals) / statistics.fmean(totals) / math.sqrt(len(totals))
