"""Data of a report's charts beside an Answer: memory over a step, and the way from the base to the answer.

All of it is predicted. Computed once, by the search that has the traces, and kept with the study.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_POINTS = 200
"""Most points of a Timeline: more than a chart has room for, and few enough for a row of a database (64
KiB)."""
MIN_POINTS_OF_PHASE = 16
"""Least points of a phase that has as many events: a short phase is to be seen."""
MAX_PRICED = 600
"""Most points of the space that are listed with their prices."""


class StepPhase(StrEnum):
    """A part of the first optimizer steps, as charts and files call it."""

    SETUP = "set-up"
    GENERATION = "generation"
    """Completions are written, where a trainer does that itself."""
    FORWARD = "forward"
    BACKWARD = "backward"
    FORWARD_AND_BACKWARD = "forward and backward"
    """Both, for several GPUs that share the run: the two are not told apart there."""
    FORWARD_AGAIN = "forward, further micro-batches"
    """Further micro-batches are alike: one is replayed, however many the configuration accumulates."""
    BACKWARD_AGAIN = "backward, further micro-batches"
    FORWARD_AND_BACKWARD_AGAIN = "forward and backward, further micro-batches"
    OPTIMIZER = "optimizer"
    BACKWARD_AND_OPTIMIZER = "backward and optimizer"
    """Both, for optimizers that update each weight as soon as it has its gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Bytes alive during the optimizer step in which the replay peaks; 512 B blocks.

    A point is the fullest instant of a stretch of allocations and frees; there is no clock in it.
    """

    phases: dict[StepPhase, int]
    """The first point of each, in order."""
    bytes_by_category: dict[str, tuple[int, ...]]
    """Figures per point by category (allocator.CATEGORIES)."""
    peak_point: int
    """Point at which allocated memory peaks."""

    def __post_init__(self) -> None:
        lengths = {len(figures) for figures in self.bytes_by_category.values()}
        if len(lengths) != 1 or not 0 <= self.peak_point < min(lengths):
            raise ValueError("its figures are not of the same points")

    @property
    def num_points(self) -> int:
        return len(next(iter(self.bytes_by_category.values())))

    def at(self, point: int) -> int:
        """Bytes alive at a point, all categories together."""
        return sum(values[point] for values in self.bytes_by_category.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A configuration on the way from the base to the answer."""

    changed: dict[str, object]
    """Fields of TrainConfig that differ from the step before; empty at the start."""
    tokens_per_second: float
    peak_device_bytes: int
    paged_in_bytes: int = 0
    """Bytes of those that are paged optimizer state, which gives way to all else."""
    all_host_bytes: int = 0
    """Bytes of host memory that all GPUs take."""

    @property
    def resident_bytes(self) -> int:
        """Bytes that have to be on the device."""
        return self.peak_device_bytes - self.paged_in_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Details:
    """Data of the charts for one answer."""

    answer: Timeline
    base: Timeline | None
    """Timeline of the base; None where the base could not be traced."""
    path: tuple[Step, ...]
    """Steps from the base to the answer, one change at a time where what lies between was traced, the base
    first; empty without a base, or where the base is the answer."""
    priced: tuple[tuple[float, int], ...]
    """Pairs (tokens per second, device bytes at least) of points that were priced: a sample of all."""
