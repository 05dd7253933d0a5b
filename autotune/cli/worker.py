"""autotune worker: answers the questions of other machines."""

from __future__ import annotations

import signal
from types import FrameType

import click

from autotune.cli.options import Minutes, one_of, storage_option
from autotune.cli.output import say
from autotune.store import database

BACKENDS = ("auto", "cuda", "cpu")
AGAIN_SECONDS = 4.0
"""Longer than a probe takes to end, so that it is seldom needed."""
IMPORT_SECONDS = 0.05
"""Until it is asked again whether an import has ended."""


@click.command()
@storage_option("jobs")
@click.option(
    "--backend",
    type=one_of(BACKENDS),
    default="auto",
    help="Measure on this machine's CUDA card or on its CPU; auto takes the CPU where there is no card.",
)
@click.option("--once", is_flag=True, help="End after one job, or when none is there.")
@click.option(
    "--max-minutes",
    type=Minutes(0, 100_000, min_open=True),
    metavar="N",
    help="Stop then, as on SIGTERM [default: never].",
)
def worker(*, storage: str, backend: str, once: bool, max_minutes: float | None) -> None:
    """Take the jobs of `find --enqueue` that this machine can answer, until SIGTERM.

    It measures on one card, the first that CUDA_VISIBLE_DEVICES leaves. Without a job it helps with one that
    runs on a machine like this. On SIGTERM or Ctrl-C what is worked on goes back into the queue, with all
    that was measured of it kept.

    Example: autotune worker --storage postgresql+psycopg://me@db/autotune
    """
    from autotune.jobs import serving
    from autotune.store.jobs import open_jobs

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, _stop)
    if max_minutes is not None:
        signal.setitimer(signal.ITIMER_REAL, 60 * max_minutes)
    try:
        with open_jobs(storage):
            pass  # What is wrong with it is said at once.
        at = serving.here(backend)
        machine = at.machine
        say(f"{machine.worker.split()[0]}: {machine.card}, jobs of {database.shown_url(storage)}")
        serving.serve(storage, at, once=once, log=say, heard=_heard)
    except KeyboardInterrupt:
        _heard()
        say("Stopped.")


def _stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    """Once is enough; but what is raised in a destructor is lost, so again until somebody heard it.

    Not in the middle of an import: a KeyboardInterrupt that passes through exec() of a text, as
    dataclasses' does, makes the interpreter end by SIGINT although it was caught (CPython 3.11,
    Python/pythonrun.c, run_eval_code_obj; Modules/main.c, exit_sigint).
    """
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, _stop)
    if _is_importing(frame):
        signal.setitimer(signal.ITIMER_REAL, IMPORT_SECONDS)
        return
    signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
    raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False


def _heard() -> None:
    """Giving back what is worked on must not be broken off."""
    signal.setitimer(signal.ITIMER_REAL, 0)
