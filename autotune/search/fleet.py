"""The cards that a search measures on: the one here, several here, or a Ray cluster's."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autotune.catalogue.gpus import Gpu
from autotune.common.units import parse_bytes
from autotune.errors import ConfigError, HardwareError
from autotune.probe.fleet.cards_here import CardsHere, environments_of
from autotune.probe.fleet.fleet import Fleet
from autotune.probe.fleet.one_card import OneCard
from autotune.records.question import Question
from autotune.search import budget
from autotune.search.budget import CardSource, ChosenCard
from autotune.worker.client.forkserver import ForkServer

ALL = "all"
MOST_CARDS = 1000
"""More are a mistake in typing. [judgement]"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """The place that probes run at. Making one raises ConfigError for what is no number of cards."""

    cards: str | None = None
    """Number of cards, or ALL; None: one here, or all of a cluster."""
    on: str | None = None
    """Address of a Ray cluster; None: this machine."""

    def __post_init__(self) -> None:
        if self.cards in (None, ALL):
            return
        if not (
            self.cards.isascii() and self.cards.isdigit() and 1 <= int(self.cards) <= MOST_CARDS
        ):
            raise ConfigError(
                f"--cards {self.cards[:40]!r} is no number of cards",
                remedy=f"Give a number from 1 to {MOST_CARDS}, or {ALL}",
            )

    @property
    def number(self) -> int | None:
        """Number of cards; None: all."""
        return None if self.cards in (None, ALL) else int(self.cards)


HERE = Where()


@dataclass(frozen=True, kw_only=True, slots=True)
class Cards:
    """Cards that were taken for searches: those of a cluster."""

    fleet: Fleet
    gpu: Gpu | None
    """The kind that they are; None where probes run on CPUs."""
    num_gpus: int = 1
    """Number of them that each probe runs on, on one machine."""

    def chosen(self, name: str | None, size: str | None) -> ChosenCard:
        """Return the card with the budget on it, of the size or of all of its memory.

        `name` is of a card that was asked for, on CPUs too. Raises ConfigError, HardwareError.
        """
        gpu = self.gpu
        if gpu is None:
            return budget.cpu_as_card(name, size)
        budget_bytes = gpu.capacity_bytes if size is None else parse_bytes(size)
        if budget_bytes > gpu.capacity_bytes:
            raise HardwareError(
                f"--gpu-mem {size} is more than the {gpu.name} of the cluster has",
                remedy="Lower --gpu-mem",
            )
        return ChosenCard(gpu=gpu, source=CardSource.CLUSTER, budget_bytes=budget_bytes)


@contextlib.contextmanager
def fleet_here(
    where: Where, backend: str, server: ForkServer, *, num_gpus: int = 1
) -> Iterator[Fleet]:
    """The cards of this machine. `server`: of the one card. `num_gpus`: that each probe runs on.

    Raises HardwareError.
    """
    is_one = where.cards is None or where.number == 1
    if is_one and (num_gpus == 1 or backend == "cpu"):
        yield OneCard(server)
        return
    if backend == "cpu" and where.number is None:
        raise ConfigError("--cards all does not go with --backend cpu", remedy="Give a number")
    number = 1 if is_one else where.number
    environments = environments_of(backend, number, num_gpus=num_gpus)
    with contextlib.closing(CardsHere(environments)) as cards:
        yield cards


def backend_there(asked: str) -> str:
    """Return the backend of probes on a cluster. Raises ConfigError where nothing is to be probed."""
    if asked == "predict":
        raise ConfigError(
            "--backend predict does not go with --on",
            why="A prediction needs no cluster",
            remedy="Leave one of them out",
        )
    return "cpu" if asked == "cpu" else "cuda"


@contextlib.contextmanager
def fleet_on_ray(
    where: Where, question: Question, note: Callable[[str], None]
) -> Iterator[tuple[Question, Cards]]:
    """Cards of the Ray cluster, and the question with its backend.

    Raises ConfigError, HardwareError and WorkerError.
    """
    from autotune.catalogue import gpus
    from autotune.probe.fleet import on_ray

    assert where.on is not None
    backend = backend_there(question.backend)
    is_cpu = backend == "cpu"
    if is_cpu:
        budget.cpu_as_card(
            question.gpu, question.gpu_mem
        )  # What is wrong is said before a cluster is asked.
    name = None if is_cpu or question.gpu is None else gpus.find_gpu(question.gpu).name
    num_gpus = question.num_gpus or 1
    with on_ray.connected(
        where.on,
        backend=backend,
        wanted=where.number,
        name=name,
        note=note,
        num_gpus=num_gpus,
    ) as cards:
        taken = Cards(fleet=cards, gpu=cards.gpu, num_gpus=num_gpus)
        yield dataclasses.replace(question, backend=backend), taken
