"""Speed of loading batches beside the speed of a step, and the loader settings that follow.

A loader without workers loads while the device waits, as far as the host does; one with workers loads beside
the step, and only what it is slower makes anybody wait. The least that lets nobody wait is chosen. Each
setting is timed by itself: what workers take from a step that runs on the same cores is not measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autotune.common import json_records
from autotune.space.config import TrainConfig

MAX_WAIT = 0.02
"""Share of a micro-step that may be spent waiting: as much as speeds that count as equal differ."""
MAX_WORKERS = 16
"""Most workers of a loader. [judgement] Beyond it each costs memory and start-up for little."""
PREFETCH_FACTORS = (2, 4)
"""Factors that are timed: torch's default (2.13 torch/utils/data/dataloader.py), and twice as many for
batches that vary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderTime:
    """One setting of the loader, timed."""

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool | None
    """Whether memory is pinned; None: the Trainer's default, where there is nothing to pin for."""
    batch_seconds: float
    """Seconds from one micro-batch to the next, when nothing else is done."""
    num_batches: int
    """Number of batches that were timed."""

    def wait_seconds(self, micro_step_seconds: float) -> float:
        """Seconds that a micro-step waits for its batch."""
        if not self.num_workers:
            return self.batch_seconds
        return max(self.batch_seconds - micro_step_seconds, 0.0)

    def keeps_up(self, micro_step_seconds: float) -> bool:
        return self.wait_seconds(micro_step_seconds) <= MAX_WAIT * micro_step_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderTimes:
    """The settings that were timed on this machine, smallest first, up to one that keeps up."""

    micro_step_seconds: float
    """Seconds that the answer took when measured, for a batch of average length."""
    times: tuple[LoaderTime, ...]

    def __post_init__(self) -> None:
        if not self.times:
            raise ValueError("no setting of the loader was timed")

    @property
    def chosen(self) -> LoaderTime:
        """The first that keeps up with the step; where none does, the one that delays it least."""
        needed = self.micro_step_seconds
        enough = (time for time in self.times if time.keeps_up(needed))
        return next(enough, min(self.times, key=lambda time: time.wait_seconds(needed)))

    def apply(self, config: TrainConfig) -> TrainConfig:
        """The configuration with the chosen settings."""
        chosen = self.chosen
        return dataclasses.replace(
            config,
            dataloader_num_workers=chosen.num_workers,
            dataloader_prefetch_factor=chosen.prefetch_factor,
            dataloader_pin_memory=chosen.pin_memory,
        )

    def to_dict(self) -> dict[str, object]:
        return {
            **json_records.plain(self),
            "chosen": json_records.plain(self.chosen),
            "keeps_up": self.chosen.keeps_up(self.micro_step_seconds),
        }


def settings_to_time(
    num_cores: int, *, has_cuda: bool, least_workers: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield fields of LoaderTime, what takes least of the machine first."""
    pinned = (False, True) if has_cuda else (None,)
    counts = [least_workers]
    while (count := max(2 * counts[-1], 1)) <= min(num_cores, MAX_WORKERS):
        counts.append(count)
    for count in counts:
        for prefetch in PREFETCH_FACTORS if count == counts[-1] and count else PREFETCH_FACTORS[:1]:
            for pin_memory in pinned:
                yield {
                    "num_workers": count,
                    "prefetch_factor": prefetch if count else None,
                    "pin_memory": pin_memory,
                }
