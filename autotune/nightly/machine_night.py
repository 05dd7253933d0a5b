"""A night of one machine, or of a cluster's cards of one kind: its plan, its cells in their turn, its digest.

Several threads may work at it, each with a card of its own: each takes the next cell.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

from autotune.catalogue import nvml
from autotune.nightly import drift, ledger
from autotune.nightly.cell import CellNight, Place, TimeIsUp
from autotune.nightly.digest import Digest, Done
from autotune.nightly.history import levels
from autotune.nightly.journal import Journal
from autotune.nightly.matrix import Matrix
from autotune.nightly.plan import Planned, Prepared, expected_seconds, plan
from autotune.records.fingerprint import Fingerprint, fingerprint_for
from autotune.search.fleet import Cards
from autotune.store.locks import StudyBusyError
from autotune.worker.client.forkserver import ForkServer

MAX_LOST = 3
"""Cards that a cell may lose in a night. [judgement] One that so many did not survive is what took them."""

BUSY_SECONDS = 5.0
"""Time before the next cell where another search works in the study of one. [judgement]"""


def prepared(
    matrix: Matrix,
    place: Place,
    fingerprint: Fingerprint,
    *,
    budget_seconds: float,
    now: datetime.datetime,
    capacity_bytes: int | None,
) -> Prepared:
    """Return the plan of a night on the machine with that fingerprint."""
    planned = plan(
        matrix,
        ledger.nights(place.storage, matrix.cells, place.machine_name(fingerprint.device)),
        fingerprint_of=lambda night: fingerprint_for(night.config, fingerprint),
        backend=place.backend,
        now=now,
        budget_seconds=budget_seconds,
        begun=Journal(place.folder(fingerprint.device), now).begun,
        capacity_bytes=capacity_bytes,
    )
    return Prepared(backend=place.backend, fingerprint=fingerprint, planned=tuple(planned))


class MachineNight:
    """The cells that a machine's night has done, and those that wait for their turn."""

    def __init__(
        self,
        plan: Prepared,
        matrix: Matrix,
        place: Place,
        *,
        now: datetime.datetime,
        began: float,
        budget_seconds: float,
    ) -> None:
        """Take the plan and the time. `began` is of time.monotonic."""
        self.plan = plan
        self._matrix, self._place, self._now = matrix, place, now
        self._began, self._give_up = began, began + budget_seconds
        self._folder = place.folder(plan.fingerprint.device)
        self._journal = Journal(self._folder, now)
        known = [levels(each.nights) for each in plan.planned]
        self._prior = drift.noise_of(
            [each for level, earlier in known for each in (*earlier, level.nights)]
        )
        self._lock = threading.Lock()
        # Those that were not chosen, too: the plan of a first night knows no cell's time, this one does.
        self._waiting = deque(each for each in plan.planned if each.has_work)
        self._has_begun = False
        self._losses: Counter[str] = Counter()
        self._done: list[Done] = []
        self._notes: dict[str, None] = {}

    def work(
        self,
        on_done: Callable[[Done], None],
        *,
        server: ForkServer | None = None,
        cards: Cards | None = None,
    ) -> None:
        """Do cell after cell until none is left, or the time is over.

        Raises KeyboardInterrupt, CardsLostError and what is nothing of the cell, which then goes to whoever
        else works at the night.
        """
        while (planned := self._next()) is not None:
            one = CellNight(
                planned,
                self._matrix,
                self._place,
                server=server,
                cards=cards,
                journal=self._journal,
                prior=self._prior,
                give_up=self._give_up,
            )
            try:
                done = one.run()
            except TimeIsUp:
                continue
            except StudyBusyError:
                # Another card's thread has it: two cells may have one study, and so have two kinds of CPU.
                with self._lock:
                    self._waiting.append(planned)
                time.sleep(BUSY_SECONDS)
                continue
            except Exception:
                # CardsLostError, and whatever Ray raises once its cluster is gone.
                self._give_back(planned)
                raise
            with self._lock:
                self._done.append(done)
                if cards is None:
                    self._notes |= disturbed(self._place.backend)
            on_done(done)

    @property
    def lost(self) -> list[str]:
        """Return the names of cells that lost their card and did not go on."""
        return [each.cell.name for each in self._left() if self._losses[each.cell.name]]

    def digest(self, *, is_interrupted: bool) -> Digest:
        return Digest(
            made_at=self._now.isoformat(timespec="seconds"),
            machine=self._folder.name,
            fingerprint=self.plan.fingerprint,
            done=tuple(self._done),
            left=tuple(self._left()),
            elapsed_seconds=time.monotonic() - self._began,
            is_interrupted=is_interrupted,
            notes=tuple(self._notes),
        )

    def _left(self) -> list[Planned]:
        ended = {each.planned.cell.name for each in self._done}
        return [each for each in self.plan.planned if each.cell.name not in ended]

    def _next(self) -> Planned | None:
        """Take the next cell that there is time for; one at least, which if need be goes on another night."""
        nights = [night for each in self.plan.planned for night in each.nights]
        with self._lock:
            seen = [each.night for each in self._done if each.night is not None]
            while self._waiting:
                planned = self._waiting.popleft()
                needed_seconds = expected_seconds(
                    planned, [*nights, *seen], self._matrix, self._place.backend
                )
                if not self._has_begun or needed_seconds <= self._give_up - time.monotonic():
                    self._has_begun = True
                    return planned
        return None

    def _give_back(self, planned: Planned) -> None:
        """Let another card go on with the cell, before those that were not begun."""
        with self._lock:
            self._losses[planned.cell.name] += 1
            if self._losses[planned.cell.name] < MAX_LOST:
                self._waiting.appendleft(planned)


def disturbed(backend: str) -> dict[str, None]:
    """Return who else holds some of the card here, once a cell has ended."""
    taken = nvml.occupancy() if backend == "cuda" else None
    if taken is None or taken.used_bytes <= nvml.IDLE_BYTES:
        return {}
    return {f"Others used the card meanwhile, and its speeds may be theirs: {taken}": None}
