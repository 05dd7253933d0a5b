"""A fleet of cards runs a probe on a free card, and says what became of it.

| fleet                | cards                                                          |
|----------------------|----------------------------------------------------------------|
| one_card.OneCard     | the one that is visible here                                   |
| cards_here.CardsHere | several of this machine, each with a process of its own        |
| ray_cards.RayCards   | those of a Ray cluster, of the kind that was asked for         |

A probe is a request to the verb `probe` (autotune.worker): what runs on the card knows nothing of studies and
databases. They stay with whoever asks, in one thread.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from autotune.catalogue.nvml import Occupancy
from autotune.errors import HardwareError
from autotune.records.fingerprint import Fingerprint
from autotune.records.measurement import STOP_FILE
from autotune.worker.client.forkserver import ForkServer
from autotune.worker.client.isolate import Reply, WorkerEnd, private_folder

Hear = Callable[[Reply], str]
"""A function that hears an answer of a probe that runs, and returns why it should stop; empty to go on."""


def _hear_nothing(_: Reply) -> str:
    return ""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Job:
    """A probe to run."""

    request: Mapping[str, Any]
    """Fields of the verb's request but for `folder`, which whoever runs it makes."""
    deadline_seconds: float
    on_answer: Hear = _hear_nothing


class CardsLostError(HardwareError):
    """Every card of a fleet is lost; another fleet can go on with what was to be probed."""


class Fleet(Protocol):
    """Cards that are alike, each of which runs one probe at a time."""

    @property
    def num_cards(self) -> int:
        """Number of probes that may run at once, at least 1; machines may come and go."""

    def fingerprint(self, backend: str) -> Fingerprint:
        """The fingerprint of measurements made on them. Raises HardwareError, WorkerError."""

    def start(self, job: Job) -> None:
        """Run a probe on a free card; there must be one. Raises WorkerError where it cannot be started."""

    def wait(self) -> tuple[Job, WorkerEnd]:
        """Wait until one of those that were started has ended; answers of all are heard meanwhile.

        Raises CardsLostError where no card is left, HardwareError, WorkerError.
        """

    def drop(self) -> None:
        """End the probes that run, and forget them; their cards are free when this returns."""

    def taken_of(self, job: Job, budget_bytes: int) -> Occupancy | None:
        """Return who else holds what a budget needs of the card of this job, the last to end.

        None: nobody.
        """


def run_job(
    server: ForkServer, job: Job, hear: Hear, *, on_poll: Callable[[], None] | None = None
) -> WorkerEnd:
    """Run a probe on this process's card, in a process of its own."""
    # The folder is made here, so that a checkpoint in it goes however the probe ends.
    with private_folder() as folder:

        def on_answer(answer: Reply) -> None:
            reason = hear(answer)
            if reason:
                ask_to_stop(Path(folder), reason)

        run = server.run if on_poll is None else functools.partial(server.run, on_poll=on_poll)
        return run(
            "probe",
            {**job.request, "folder": folder},
            deadline_seconds=job.deadline_seconds,
            on_answer=on_answer,
        )


def ask_to_stop(folder: Path, reason: str) -> None:
    """Leave the probe that runs in a folder the word to stop."""
    written = folder / f"{STOP_FILE}.new"
    # A full disk: the probe takes its time, and that is all.
    with contextlib.suppress(OSError):
        written.write_text(reason, encoding="utf-8")
        # Renamed into place, so that the probe reads all of it or nothing.
        written.replace(written.with_name(STOP_FILE))
