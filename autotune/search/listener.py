"""Listeners, who hear how far a search is: the terminal, a log, nobody."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from autotune.records.answer import Counts
from autotune.records.estimate import Estimate

if TYPE_CHECKING:
    from autotune.probe.loop import OnProbe
    from autotune.probe.run_one import OnRun

Progress = Callable[[str, int, int], None]
"""(what, done, of how many)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measuring:
    """Calls for each run as it starts and ends, and for each probe's result."""

    on_run: OnRun
    on_end: OnRun
    on_probe: OnProbe


class OnMeasuring(Protocol):
    """Called before anything is measured."""

    def __call__(
        self, counts: Counts, max_probes: int, confirm_steps: int
    ) -> AbstractContextManager[Measuring]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """A hearer of how far a search is."""

    note: Callable[[str], None]
    """Called with remarks on what was made of the options."""
    searching: Callable[[], AbstractContextManager[Progress]]
    """Around the prediction."""
    measuring: OnMeasuring
    """Around the probes and the confirmation."""
    so_far: Callable[[Estimate], None] | None = None
    """Called with the best so far by prediction, while others are traced; None: nobody wants to hear."""
    meanwhile: Callable[[], None] | None = None
    """Called once while worker processes start, of which the search must wait for the first."""


def _nothing(*_: object) -> None:
    pass


SILENT = Listener(
    note=_nothing,
    searching=lambda: contextlib.nullcontext(_nothing),
    measuring=lambda *_: contextlib.nullcontext(
        Measuring(on_run=_nothing, on_end=_nothing, on_probe=_nothing)
    ),
)
