"""What every piece is given, and the card that it is about."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.catalogue.gpus import Gpu, cpu_stand_in, detect, find_gpu
from autotune.errors import HardwareError
from autotune.search import budget
from autotune.space.config import TrainConfig
from autotune.space.words import describe
from autotune.worker.client.forkserver import ForkServer
from tools.gpu_check.deadline import Deadline
from tools.gpu_check.records import Records

ROOT = Path(__file__).parents[2]
"""The checkout's."""
TINY_BUDGET = "200MB"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Where and with what a piece runs."""

    backend: str
    tiny: bool
    card: Gpu
    budget_bytes: int
    folder: Path
    deadline: Deadline
    server: ForkServer
    """Of the probes of all pieces."""
    seconds: float | None = None
    """Of timed steps of a probe at most [default: the piece's own]."""

    def records(self, name: str) -> Records:
        return Records(self.folder / f"{name}.jsonl")


class Nothing:
    """Stands for the table of probes: the records remember."""

    def find(self, *_: Any, **__: Any) -> None:
        return None

    def add(self, *_: Any, **__: Any) -> None:
        pass


def card_and_budget(backend: str, recorded: str | None) -> tuple[Gpu, int]:
    """The card of this machine and all of its memory, or the one that records are of."""
    if recorded is not None:
        card = cpu_stand_in() if recorded == "cpu" else find_gpu(recorded)
        return card, card.capacity_bytes
    if backend == "cpu":
        chosen = budget.cpu_as_card(None, TINY_BUDGET)
        card, budget_bytes = chosen.gpu, chosen.budget_bytes
        return card, budget_bytes
    here = detect()
    if not here:
        raise HardwareError(
            "There is no CUDA GPU here",
            why="NVIDIA's driver reports none on this machine",
            remedy="--backend cpu --tiny tries the pieces without one",
        )
    card = here[0]
    if card.peak_flop_per_second:
        return card, budget.card_here(None, None).budget_bytes
    raise HardwareError(
        f"The {card.name} is not in the catalogue",
        why="Its speed is unknown, so that nothing can be predicted",
        remedy="Add its row to autotune/catalogue/data/gpus.toml (CONTRIBUTING.md)",
    )


def shown(config: TrainConfig) -> str:
    return f"{describe(config)}, {config.sequence_length} tokens"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
