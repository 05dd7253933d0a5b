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
from autotune.nightly import draw, drift, ledger
from autotune.nightly.cell import CellNight, Place, TimeIsUp
from autotune.nightly.digest import Digest, Done
from autotune.nightly.history import levels
from autotune.nightly.journal import Journal, locked
from autotune.nightly.matrix import Matrix
from autotune.nightly.plan import Prepared, expected_seconds, plan
from autotune.probe import fingerprint as fingerprints
from autotune.probe.fingerprint import fingerprint_here
from autotune.records.fingerprint import Fingerprint, fingerprint_for
from autotune.report.files import write
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
    prepared = _prepared(matrix, place, fingerprint, budget_seconds=budget_seconds, now=now)
    problem_of = functools.cache(_why_not_found)
    looked = (
        dataclasses.replace(each, problem=problem_of(each.cell.options.model))
        for each in prepared.planned
    )
    return dataclasses.replace(prepared, planned=tuple(looked))


def _why_not_found(model: str | None) -> str:
    """Return why the model cannot be read here without the network.

    Empty where it can, or the base names it.
    """
    if model is None:
        return ""
    try:
        models.resolve(model, asks_hub=False)
    except AutotuneError as error:
        return str(error)
    return ""


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
        digest, written = _written(place.out / digest.machine, digest)
        return NightReport(digest=digest, files=written)


def _written(folder: Path, digest: Digest) -> tuple[Digest, list[Path]]:
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


def _prepared(
    matrix: Matrix,
    place: Place,
    fingerprint: Fingerprint,
    *,
    budget_seconds: float,
    now: datetime.datetime,
) -> Prepared:
    here = gpus.detect() if place.backend == "cuda" else []
    planned = plan(
        matrix,
        ledger.nights(place.storage, matrix.cells, place.machine_name(fingerprint.device)),
        fingerprint_of=lambda night: fingerprint_for(night.config, fingerprint),
        backend=place.backend,
        now=now,
        budget_seconds=budget_seconds,
        begun=Journal(place.folder(fingerprint.device), now).begun,
        capacity_bytes=here[0].capacity_bytes if here else None,
    )
    return Prepared(backend=place.backend, fingerprint=fingerprint, planned=tuple(planned))


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
    done: list[Done] = []
    notes: dict[str, None] = {}
    is_interrupted = False
    with ForkServer() as server:
        server.start("probe")
        fingerprint = fingerprint_here(server, place.backend)
        prepared = _prepared(matrix, place, fingerprint, budget_seconds=budget_seconds, now=now)
        on_plan(prepared)
        folder = place.folder(prepared.fingerprint.device)
        journal = Journal(folder, now)
        nights = [night for each in prepared.planned for night in each.nights]
        known = [levels(each.nights) for each in prepared.planned]
        prior = drift.noise_of(
            [each for level, earlier in known for each in (*earlier, level.nights)]
        )
        try:
            has_begun = False
            # Those that were not chosen, too: the plan of a first night knows no cell's time, this one does.
            for planned in prepared.planned:
                if not planned.has_work:
                    continue
                seen = [each.night for each in done if each.night is not None]
                needed_seconds = expected_seconds(planned, [*nights, *seen], matrix, place.backend)
                left_seconds = began + budget_seconds - time.monotonic()
                if has_begun and needed_seconds > left_seconds:
                    continue
                has_begun = True
                one = CellNight(
                    planned,
                    matrix,
                    place,
                    server=server,
                    journal=journal,
                    prior=prior,
                    give_up=began + budget_seconds,
                )
                try:
                    done.append(one.run())
                except TimeIsUp:
                    continue
                on_done(done[-1])
                notes |= _disturbed(place.backend)
        except KeyboardInterrupt:
            is_interrupted = True
    ended = {each.planned.cell.name for each in done}
    return Digest(
        made_at=now.isoformat(timespec="seconds"),
        machine=folder.name,
        fingerprint=prepared.fingerprint,
        done=tuple(done),
        left=tuple(each for each in prepared.planned if each.cell.name not in ended),
        elapsed_seconds=time.monotonic() - began,
        is_interrupted=is_interrupted,
        notes=tuple(notes),
    )


def _disturbed(backend: str) -> dict[str, None]:
    """Return who else holds some of the card, once a cell has ended."""
    taken = nvml.occupancy() if backend == "cuda" else None
    if taken is None or taken.used_bytes <= nvml.IDLE_BYTES:
        return {}
    return {f"Others used the card meanwhile, and its speeds may be theirs: {taken}": None}
