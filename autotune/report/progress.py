"""How far the work is, on stderr: a bar on a terminal, lines in a log."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from autotune.config import TrainConfig
from autotune.knobs import describe
from autotune.probing import OnConfirm, OnProbe
from autotune.report import words
from autotune.results import Measurement
from autotune.tune import Progress

_PROGRESS = {
    "space": "{done:,} of {total:,} points of the space are valid",
    "trace": "{done} of {total} training steps traced",
    "priced": "{done:,} of {total:,} may fit",
    "replayed": "{done:,} of {total:,} replayed",
    "tried": "values tried: {done:,}, training steps traced: {total:,}",
}
_LINE_EVERY = 20
"""Traces per line of a log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """Who hears how far a search is."""

    note: Callable[[str], None]
    """What the user should know of what was made of the options."""
    searching: Callable[[], AbstractContextManager[Progress]]
    """Around the prediction."""
    on_probe: OnProbe
    on_confirm: OnConfirm


def _nothing(*_: object) -> None:
    pass


SILENT = Listener(
    note=_nothing,
    searching=lambda: contextlib.nullcontext(_nothing),
    on_probe=_nothing,
    on_confirm=_nothing,
)


def on_stderr(*, quiet: bool) -> Listener:
    """All of it on stderr. `quiet` leaves a log the notes alone."""
    return Listener(
        note=_note,
        searching=functools.partial(progress_on_stderr, quiet=quiet),
        on_probe=probes_on_stderr(quiet=quiet),
        on_confirm=confirmation_on_stderr(quiet=quiet),
    )


def _note(text: str) -> None:
    print(words.printable(f"note: {' '.join(text.split())}"), file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_on_stderr(*, quiet: bool) -> Iterator[Progress]:
    """Something that `tune.find` can call. `quiet` keeps it out of a log, not off a terminal."""
    if not sys.stderr.isatty():
        yield functools.partial(_log_progress, quiet=quiet)
        return
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        line = bar.add_task("starting", total=None)

        def show(what: str, done: int, total: int) -> None:
            text = _PROGRESS[what].format(done=done, total=total)
            if what == "trace":
                bar.update(line, description=text, completed=done, total=total)
            else:
                bar.update(line, description=text)

        yield show


def _log_progress(what: str, done: int, total: int, *, quiet: bool) -> None:
    if not quiet and (what != "trace" or done == total or done % _LINE_EVERY == 0):
        print(_PROGRESS[what].format(done=done, total=total), file=sys.stderr, flush=True)


def probes_on_stderr(*, quiet: bool) -> Callable[[int, Measurement, Measurement | None], None]:
    """Something that `probing.search` can call: a line per probe."""

    def show(number: int, measurement: Measurement, best: Measurement | None) -> None:
        if quiet and not sys.stderr.isatty():
            return
        said = measurement.message if measurement.outcome != "ok" else words.measured(measurement)
        so_far = "" if best is None else f"; best so far {words.measured_speed(best)}"
        print(
            f"probe {number}: {describe(measurement.config)}: {measurement.outcome}, "
            f"{words.printable(said)}{so_far}",
            file=sys.stderr,
            flush=True,
        )

    return show


def confirmation_on_stderr(*, quiet: bool) -> Callable[[TrainConfig], None]:
    """Something that `probing.search` can call before each confirmation, which takes a while."""

    def show(config: TrainConfig) -> None:
        if not quiet or sys.stderr.isatty():
            print(f"confirming {describe(config)}", file=sys.stderr, flush=True)

    return show
