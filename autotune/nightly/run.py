"""A whole night: the lock, the plan, each chosen cell in its turn, the digest.

Killed at any moment: probes are in the database, repeated measurements in the journal, and a cell that
was begun goes on the next night. When the time is over a search ends after its current probe, and goes
on so too.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autotune.catalogue import gpus, models, nvml
from autotune.errors import AutotuneError, HardwareError, StorageError
from autotune.nightly import draw
from autotune.nightly.cell import Place
from autotune.nightly.digest import Digest, Done
from autotune.nightly.journal import locked
from autotune.nightly.machine_night import MachineNight, prepared
from autotune.nightly.matrix import Matrix, in_keys
from autotune.nightly.plan import Planned, Prepared
from autotune.probe import fingerprint as fingerprints
from autotune.probe.fingerprint import fingerprint_here
from autotune.report.files import write
from autotune.search.budget import CHOOSERS, ChosenCard
from autotune.search.resolve import resolve
from autotune.worker.client.forkserver import ForkServer


@dataclass(frozen=True, kw_only=True, slots=True)
class NightReport:
    """A night's digest and what was written of it."""

    digest: Digest
    files: list[Path]


def backend_here(asked: str) -> str:
    """Return cuda or cpu. `auto` is the card of this machine. Raises HardwareError without one."""
    if asked != "auto":
        return asked
    if gpus.detect():
        return "cuda"
    raise HardwareError(
        "There is no CUDA GPU to tune for",
        why=nvml.why_no_card() or "NVIDIA's driver reports none on this machine",
        remedy="--backend cpu runs the matrix on the CPU, as a trial of it",
    )


def dry_run(matrix: Matrix, place: Place, *, budget_seconds: float) -> Prepared:
    """Return what a night would do, and why; measures and writes nothing."""
    with ForkServer() as server:
        now = datetime.datetime.now(datetime.UTC)
        # Where that is known without torch it takes a second.
        known = fingerprints.assumed_fingerprint(place.backend)
        fingerprint = known or fingerprint_here(server, place.backend)
    plan = prepared(
        matrix,
        place,
        fingerprint,
        budget_seconds=budget_seconds,
        now=now,
        capacity_bytes=_capacity_bytes(place.backend),
    )
    return looked_up(plan, functools.partial(CHOOSERS[place.backend], None))


def looked_up(plan: Prepared, choose: Callable[[str | None], ChosenCard]) -> Prepared:
    """Return the plan with the cells that cannot begin, or not without the network.

    `choose` returns the card with a budget on it.
    """
    looked = (
        _looked_up(each, plan.backend, choose) if each.has_work else each for each in plan.planned
    )
    return dataclasses.replace(plan, planned=tuple(looked))


def _looked_up(
    planned: Planned, backend: str, choose: Callable[[str | None], ChosenCard]
) -> Planned:
    """Return the cell with why a search cannot begin, or not without the network.

    One that cannot begin takes no time.
    """
    options, asks_hub = planned.cell.options, False
    try:
        for model in filter(None, (options.model, options.teacher)):
            asks_hub = models.is_of_hub(model)
            models.resolve(model, asks_hub=False)
        asks_hub = False
        resolve(dataclasses.replace(options, backend=backend), card=choose(options.gpu_mem))
    except AutotuneError as error:
        told = dataclasses.replace(planned, problem=in_keys(str(error)))
        if asks_hub:
            return told
        return dataclasses.replace(told, can_begin=False, is_chosen=False, expected_seconds=0.0)
    return planned


def night(
    matrix: Matrix,
    place: Place,
    *,
    budget_seconds: float,
    on_plan: Callable[[Prepared], None] = lambda _: None,
    on_done: Callable[[Done], None] = lambda _: None,
) -> NightReport:
    """Run a night, to its end, to the end of its time or to an interruption, which the digest says.

    Raises StorageError where another one runs here, HardwareError where nothing can be measured.
    """
    with locked(place.storage, place.out):
        digest = _run(
            matrix, place, budget_seconds=budget_seconds, on_plan=on_plan, on_done=on_done
        )
        digest, files = written(place.out / digest.machine, digest)
        return NightReport(digest=digest, files=files)


def written(folder: Path, digest: Digest) -> tuple[Digest, list[Path]]:
    """Write the files of a digest, and return the digest and their paths.

    Where there is no writing them that is a note, and the night is not lost by it.
    """
    texts = {"digest.md": draw.markdown(digest), "digest.html": draw.html(digest)}
    try:
        for name, text in texts.items():
            write(folder / name, text)
    except StorageError as error:
        notes = dict.fromkeys((*digest.notes, str(error)))
        return dataclasses.replace(digest, notes=tuple(notes), is_unwritten=True), []
    return digest, [folder / name for name in texts]


def _capacity_bytes(backend: str) -> int | None:
    here = gpus.detect() if backend == "cuda" else []
    return here[0].capacity_bytes if here else None


def _run(
    matrix: Matrix,
    place: Place,
    *,
    budget_seconds: float,
    on_plan: Callable[[Prepared], None],
    on_done: Callable[[Done], None],
) -> Digest:
    now = datetime.datetime.now(datetime.UTC)
    began = time.monotonic()
    is_interrupted = False
    with ForkServer() as server:
        server.start("probe")
        plan = prepared(
            matrix,
            place,
            fingerprint_here(server, place.backend),
            budget_seconds=budget_seconds,
            now=now,
            capacity_bytes=_capacity_bytes(place.backend),
        )
        on_plan(plan)
        night = MachineNight(
            plan, matrix, place, now=now, began=began, budget_seconds=budget_seconds
        )
        try:
            night.work(on_done, server=server)
        except KeyboardInterrupt:
            is_interrupted = True
    return night.digest(is_interrupted=is_interrupted)
