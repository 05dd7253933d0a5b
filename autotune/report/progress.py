"""Progress of a search, on stderr: a bar on a terminal, lines in a log."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator

from autotune.common import log
from autotune.common.units import format_bytes
from autotune.common.user_text import printable
from autotune.records.estimate import Estimate
from autotune.report import words
from autotune.report.measuring import measuring_on_stderr
from autotune.report.stderr import Output, output, tell
from autotune.search.listener import Listener, Progress
from autotune.space.words import describe

_log = log.logger(__name__)

_PROGRESS = {
    "host": "this machine's host is timed, once",
    "dataset": "the dataset is read",
    "space": "{done:,} of {total:,} points of the space are valid",
    "trace": "{done} of {total} training steps traced",
    "priced": "{done:,} of {total:,} may fit",
    "replayed": "{done:,} of {total:,} replayed",
    "timed": "{done} of {total} kernels timed",
    "tried": "values tried: {done:,}, training steps traced: {total:,}",
}
_FUNNEL = {
    "space": "space {total:,} > valid {done:,}",
    "priced": "may fit {done:,}",
    "replayed": "replayed {done:,}",
}
"""The parts of the funnel that stay on the bar's line."""
_COUNTED = ("trace", "timed")
"""Steps that come one by one, to a total that is known."""
_LINE_EVERY = 20
"""Number of these between two lines of a log."""
_NEEDED_LATER = (
    *("alembic.migration", "jinja2", "optuna"),
    *("rich.table", "sqlalchemy.dialects.sqlite", "sqlalchemy.orm"),
)
"""Libraries that an answer is stored and shown with."""


def on_stderr(*, quiet: bool) -> Listener:
    """A Listener that reports all of a search on stderr.

    `quiet` leaves only the notes in a log.
    """
    return Listener(
        note=_note,
        searching=functools.partial(progress_on_stderr, quiet=quiet),
        measuring=functools.partial(measuring_on_stderr, quiet=quiet),
        so_far=_so_far if output(quiet=quiet) in (Output.SCREEN, Output.LINES) else None,
        meanwhile=_import_libraries,
    )


def _import_libraries() -> None:
    """Import what is needed later: half a second, which a search has to spare."""
    for name in _NEEDED_LATER:
        importlib.import_module(name)


def _so_far(best: Estimate) -> None:
    """Say the best so far: on a terminal above the bar, which stays below what is printed."""
    memory = format_bytes(best.resident_bytes)
    text = f"best so far: {describe(best.config)}: {words.speed(best)}, {memory} (predicted)"
    tell(printable(text))


def _note(text: str) -> None:
    _log.warning("note: %s", text, extra=log.SAID)
    tell(printable(f"note: {' '.join(text.split())}"))


@contextlib.contextmanager
def progress_on_stderr(*, quiet: bool) -> Iterator[Progress]:
    """Show a search's progress on stderr, through a function that the search calls.

    `quiet` keeps it out of a log, not off a terminal.
    """
    kind = output(quiet=quiet)
    if kind is not Output.SCREEN:
        yield functools.partial(_log_progress, kind)
        return
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        line = bar.add_task("starting", total=None)
        funnel: list[str] = []

        def show(what: str, done: int, total: int) -> None:
            if what in _FUNNEL:
                funnel.append(_FUNNEL[what].format(done=done, total=total))
                bar.update(line, description=" > ".join(funnel))
                return
            text = " > ".join([*funnel, _PROGRESS[what].format(done=done, total=total)])
            if what in _COUNTED:
                bar.update(line, description=text, completed=done, total=total)
            else:
                bar.update(line, description=text)

        yield show


def _log_progress(kind: Output, what: str, done: int, total: int) -> None:
    is_told = {
        Output.LINES: what not in _COUNTED or done == total or done % _LINE_EVERY == 0,
        Output.MILESTONES: what in _FUNNEL,
    }
    if is_told.get(kind):
        tell(_PROGRESS[what].format(done=done, total=total))
