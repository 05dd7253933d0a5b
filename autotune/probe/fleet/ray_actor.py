"""The part of a Ray fleet that runs on a cluster's machine: an actor that holds one card.

It knows nothing of Ray, which calls its methods one after the other, in a process that ends when its owner
does or kills it. Its card's thread keeps the fork server, so that imports are paid once.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.catalogue import gpus, installed, nvml
from autotune.catalogue.gpus import Gpu
from autotune.catalogue.nvml import Occupancy
from autotune.common.version import __version__
from autotune.probe.fleet.card_thread import CardThread, Said
from autotune.probe.fleet.fleet import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class CardThere:
    """A card of a cluster's machine, as its actor sees it."""

    node: str
    kind: str
    """Name of the card, or of the CPU."""
    gpu: Gpu | None
    """The card by the catalogue; None on a CPU, or where its driver shows none."""
    why_no_card: str
    versions: tuple[tuple[str, str], ...]
    """Names and versions of autotune and of what may change a measurement."""


class CardActor:
    """One card of a cluster, or those of a machine that a probe runs on together."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """Start the card's thread. `variables`: of the search's environment that its probes need."""
        os.environ.update(variables)
        self._says: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self._card = CardThread({}, self._says)

    def describe(self, backend: str) -> CardThere:
        found = gpus.detect() if backend == "cuda" else []
        return CardThere(
            node=socket.gethostname(),
            kind=found[0].name if found else installed.cpu_name(),
            gpu=found[0] if found else None,
            why_no_card="" if found or backend == "cpu" else nvml.why_no_card(),
            versions=(("autotune", __version__), *installed.versions()),
        )

    def ask_fingerprint(self, backend: str) -> None:
        self._card.ask_fingerprint(backend)

    def start(self, request: Mapping[str, Any], deadline_seconds: float) -> None:
        self._card.job = None
        self._card.run(Job(request=request, deadline_seconds=deadline_seconds))

    def poll(self, seconds: float) -> list[Any]:
        """Return what the card has said since the last call, waiting for it so long at most."""
        heard: list[Any] = []
        with contextlib.suppress(queue.Empty):
            heard.append(self._says.get(timeout=seconds).what)
            while True:
                heard.append(self._says.get_nowait().what)
        return heard

    def stop(self, reason: str) -> None:
        self._card.stop(reason)

    def drop(self) -> None:
        """End the probe that runs, and forget what it said."""
        self._card.drop()
        self._card.await_idle()
        self.poll(0)

    def taken_of(self, budget_bytes: int) -> Occupancy | None:
        numbers = range(max(len(nvml.alike()), 1))
        seen = (nvml.taken_of(budget_bytes, number=number) for number in numbers)
        return next(filter(None, seen), None)

    def close(self) -> None:
        """End the probe and the server."""
        self._card.close()
        self._card.join()
