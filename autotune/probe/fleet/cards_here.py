"""Cards of this machine side by side: as many probes at once, each on a card of its own.

They share power, PCIe and the host's cores, so that a probe beside others may be slower than alone: the
winner is confirmed alone. Not yet run on GPUs.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Mapping, Sequence

from autotune.catalogue import nvml
from autotune.catalogue.nvml import Occupancy
from autotune.common.units import counted
from autotune.errors import HardwareError
from autotune.probe.fleet.card_thread import CardThread, Said, ended
from autotune.probe.fleet.fleet import Job
from autotune.records.fingerprint import Fingerprint
from autotune.worker.client.isolate import WorkerEnd


class CardsHere:
    """Several cards of this machine, to be closed."""

    def __init__(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Take a card for each; its processes see these variables: see `environments_of`."""
        self._environments = list(environments)
        self._says: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self._cards = [CardThread(each, self._says) for each in self._environments]
        self._last: CardThread | None = None

    def close(self) -> None:
        """End all probes and servers."""
        for card in self._cards:
            card.close()
        for card in self._cards:
            card.join()

    @property
    def num_cards(self) -> int:
        return len(self._cards)

    def fingerprint(self, backend: str) -> Fingerprint:
        self._cards[0].ask_fingerprint(backend)
        found = ended(self._says.get())
        assert isinstance(found, Fingerprint)
        return found

    def start(self, job: Job) -> None:
        next(card for card in self._cards if card.job is None).run(job)

    def wait(self) -> tuple[Job, WorkerEnd]:
        while True:
            said = self._says.get()
            card, job = said.card, said.card.job
            assert job is not None
            if isinstance(said.what, dict):
                reason = job.on_answer(said.what)
                if reason:
                    card.stop(reason)
                continue
            card.job, self._last = None, card
            end = ended(said)
            assert isinstance(end, WorkerEnd)
            return job, end

    def drop(self) -> None:
        busy = [card for card in self._cards if card.job is not None]
        for card in busy:
            card.drop()
        for card in busy:
            card.await_idle()
        with contextlib.suppress(queue.Empty):
            while True:
                self._says.get_nowait()

    def taken_of(self, job: Job, budget_bytes: int) -> Occupancy | None:  # noqa: ARG002  # the last one
        if self._last is None or not self._environments[0]:
            return None
        at = self._cards.index(self._last)
        num_gpus = self._environments[at]["CUDA_VISIBLE_DEVICES"].count(",") + 1
        seen = (nvml.taken_of(budget_bytes, number=at * num_gpus + gpu) for gpu in range(num_gpus))
        return next(filter(None, seen), None)


def environments_of(backend: str, wanted: int | None, *, num_gpus: int = 1) -> list[dict[str, str]]:
    """Variables with which a process sees the cards of a probe, for each place that probes run at.

    `wanted`: number of places; None: all that cards like the first make. `num_gpus`: cards that a probe runs
    on. On a CPU a card is a process.

    Raises HardwareError where there are fewer.
    """
    if backend == "cpu":
        return [{} for _ in range(wanted or 1)]
    alike = nvml.alike()
    needed = (wanted or 1) * num_gpus
    if len(alike) < needed:
        option = f"--num-gpus {num_gpus}" if wanted in (None, 1) and num_gpus > 1 else "--cards"
        raise HardwareError(
            f"{option} needs {counted(needed, 'GPU')} of one kind",
            why=f"This machine shows {len(alike)}",
            remedy=f"Lower {option.partition(' ')[0]}, or leave it out",
        )
    groups = [alike[n : n + num_gpus] for n in range(0, len(alike) - num_gpus + 1, num_gpus)]
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(group), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        for group in groups[:wanted]
    ]
