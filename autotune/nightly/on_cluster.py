"""A night on a Ray cluster: each kind of card is a machine with a history of its own; cells run side by side.

Each card has a thread, in which one cell after another is searched and measured on it, and in which the
cell's study and databases stay. What is to be printed goes to the thread that started the night.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import AutotuneError, HardwareError, StorageError
from autotune.nightly import draw, run
from autotune.nightly.cell import Place
from autotune.nightly.digest import ClusterDigest, Digest, Done, NightProblem
from autotune.nightly.journal import locked
from autotune.nightly.machine_night import MachineNight, prepared
from autotune.nightly.matrix import Matrix
from autotune.nightly.plan import Prepared
from autotune.probe.fleet import on_ray
from autotune.probe.fleet.fleet import CardsLostError
from autotune.probe.fleet.ray_cards import RayCards
from autotune.probe.fleet.ray_head import gone
from autotune.report.files import write
from autotune.search.fleet import Cards, Where
from autotune.search.listener import SILENT, Listener, Progress

DIGEST = "digest.md"
"""File of the whole cluster's digest, beside the machines' folders."""
_HEAR_SECONDS = 0.5

OnDone = Callable[[str, Done], None]
"""A function that hears the name of a card and a cell that has ended on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterReport:
    """A cluster's digest and what was written of it."""

    digest: ClusterDigest
    files: list[Path]


def dry_run(
    matrix: Matrix, where: Where, place: Place, *, budget_seconds: float
) -> tuple[list[Prepared], list[NightProblem]]:
    """Return what a night would do on each kind of card, and why others cannot be used.

    It measures and writes nothing.
    """
    now = datetime.datetime.now(datetime.UTC)
    with _taken(where, place, place.listener.note) as fleets:
        plans, problems = _plans(matrix, place, fleets, budget_seconds=budget_seconds, now=now)
    looked = (
        run.looked_up(plan, functools.partial(Cards(fleet=fleet, gpu=fleet.gpu).chosen, None))
        for fleet, plan in plans
    )
    return list(looked), problems


def night(
    matrix: Matrix,
    where: Where,
    place: Place,
    *,
    budget_seconds: float,
    on_plan: Callable[[Prepared], None] = lambda _: None,
    on_done: OnDone = lambda *_: None,
) -> ClusterReport:
    """Run a night on every kind of card at once, to its end or to an interruption, which the digest says.

    Raises StorageError where another one runs here, HardwareError where no card can be used, and what
    on_ray.connected raises.
    """
    now, began = datetime.datetime.now(datetime.UTC), time.monotonic()
    voice = _Voice(place.listener.note)
    with locked(place.storage, place.out), _taken(where, place, voice.note) as fleets:
        plans, problems = _plans(matrix, place, fleets, budget_seconds=budget_seconds, now=now)
        workers: list[_Worker] = []
        predicting = threading.Lock()
        for fleet, plan in plans:
            on_plan(plan)
            one = MachineNight(
                plan,
                matrix,
                dataclasses.replace(place, listener=_listener(fleet, predicting, voice)),
                now=now,
                began=began,
                budget_seconds=budget_seconds,
            )
            workers += [_Worker(one, each, voice, on_done) for each in fleet.apart()]
        is_interrupted = _work(workers, voice)
    nights = list(dict.fromkeys(worker.night for worker in workers))
    digest = ClusterDigest(
        made_at=now.isoformat(timespec="seconds"),
        digests=tuple(each.digest(is_interrupted=is_interrupted) for each in nights),
        problems=(*problems, *(_lost(each) for each in nights if each.lost)),
        is_interrupted=is_interrupted,
        notes=tuple(voice.heard),
    )
    return _written(place.out, digest)


def _taken(
    where: Where, place: Place, note: Callable[[str], None]
) -> contextlib.AbstractContextManager[list[RayCards]]:
    assert where.on is not None
    return on_ray.connected_kinds(where.on, backend=place.backend, wanted=where.number, note=note)


def _plans(
    matrix: Matrix,
    place: Place,
    fleets: Sequence[RayCards],
    *,
    budget_seconds: float,
    now: datetime.datetime,
) -> tuple[list[tuple[RayCards, Prepared]], list[NightProblem]]:
    """Return the plan of each kind of card, and why others cannot be used.

    Raises HardwareError and WorkerError where none can.
    """
    plans: list[tuple[RayCards, Prepared]] = []
    errors: dict[str, AutotuneError] = {}
    for fleet in fleets:
        try:
            fingerprint = fleet.fingerprint(place.backend)
        except AutotuneError as error:
            errors[fleet.alike.kind] = error
            continue
        plan = prepared(
            matrix,
            place,
            fingerprint,
            budget_seconds=fleet.num_cards * budget_seconds,
            now=now,
            capacity_bytes=None if fleet.gpu is None else fleet.gpu.capacity_bytes,
        )
        plans.append((fleet, plan))
    if not plans:
        raise next(iter(errors.values()))
    return plans, [_problem(kind, error) for kind, error in errors.items()]


def _problem(of: str, error: AutotuneError) -> NightProblem:
    return NightProblem(of=of, problem=str(error), exit_code=error.exit_code)


def _lost(night: MachineNight) -> NightProblem:
    error = HardwareError(
        f"Cards were lost with {', '.join(night.lost)}, and none was left to go on",
        remedy="What was measured is kept, and the next night goes on",
    )
    return _problem(night.plan.fingerprint.device, error)


def _written(out: Path, digest: ClusterDigest) -> ClusterReport:
    """Write the files of each kind of card, and of all together.

    Where there is no writing them that is a note or a problem, and the night is not lost by it.
    """
    digests: list[Digest] = []
    files: list[Path] = []
    for each in digest.digests:
        of_kind, paths = run.written(out / each.machine, each)
        digests.append(of_kind)
        files += paths
    digest = dataclasses.replace(digest, digests=tuple(digests))
    try:
        write(out / DIGEST, draw.cluster_markdown(digest))
        files.append(out / DIGEST)
    except StorageError as error:
        problems = (*digest.problems, _problem(DIGEST, error))
        digest = dataclasses.replace(digest, problems=problems)
    return ClusterReport(digest=digest, files=files)


class _Voice:
    """Words of all threads, said in the one that made it."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._owner = threading.current_thread()
        self._queued: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.heard: list[str] = []
        """Notes on the cards, for the digest."""

    def note(self, text: str) -> None:
        """Say what has become of a card."""
        self.heard.append(text)
        self.say(functools.partial(self._note, text))

    def remark(self, text: str) -> None:
        """Say what a search remarks."""
        self.say(functools.partial(self._note, text))

    def say(self, words: Callable[[], None]) -> None:
        if threading.current_thread() is self._owner:
            words()
        else:
            self._queued.put(words)

    def speak(self, seconds: float) -> None:
        """Say what others have left to say, waiting for it so long at most."""
        with contextlib.suppress(queue.Empty):
            self._queued.get(timeout=seconds)()
            while True:
                self._queued.get_nowait()()


def _listener(fleet: RayCards, predicting: threading.Lock, voice: _Voice) -> Listener:
    """Return a listener for the searches on cards of that kind, which says remarks alone.

    One prediction at a time has this machine's cores, and it ends where the night is interrupted.
    """

    @contextmanager
    def searching() -> Iterator[Progress]:
        with predicting:
            yield lambda *_: fleet.go_on()

    return dataclasses.replace(
        SILENT,
        note=lambda text: voice.remark(f"{fleet.alike.kind}: {text}"),
        searching=searching,
    )


class _Worker(threading.Thread):
    """A card's thread: one cell after another, until none is left for it."""

    def __init__(
        self, night: MachineNight, fleet: RayCards, voice: _Voice, on_done: OnDone
    ) -> None:
        super().__init__(daemon=True)
        self.night, self.fleet = night, fleet
        self.error: Exception | None = None
        """Error of the thread that is neither a cell's nor a card's: one of this program."""
        self._voice, self._on_done = voice, on_done

    def run(self) -> None:
        device = self.night.plan.fingerprint.device
        try:
            self.night.work(
                lambda done: self._voice.say(functools.partial(self._on_done, device, done)),
                cards=Cards(fleet=self.fleet, gpu=self.fleet.gpu),
            )
        except KeyboardInterrupt:
            pass
        except Exception as error:  # the night's to raise, where the cluster is there
            if isinstance(error, CardsLostError):
                self._voice.note(f"{device}: {error}")
            elif not self.fleet.ray.is_initialized():  # Ray Client has given up
                self._voice.note(f"{device}: {gone(str(error))}")
            else:
                self.error = error
        finally:
            # A card that is done with its cells takes the place of one that is lost.
            self.fleet.close()


def _work(workers: Sequence[_Worker], voice: _Voice) -> bool:
    """Let all cards work, and return whether that was interrupted. Raises what a thread could not handle."""
    is_interrupted = False
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        try:
            voice.speak(_HEAR_SECONDS)
        except KeyboardInterrupt:
            if is_interrupted:
                raise
            is_interrupted = True
        if is_interrupted or any(worker.error for worker in workers):
            for worker in workers:
                worker.fleet.interrupted.set()
    voice.speak(0)
    for worker in workers:
        if worker.error is not None:
            raise worker.error
    return is_interrupted
