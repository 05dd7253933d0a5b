"""Progress of measuring, on stderr: a screen that goes away on a terminal, lines in a log.

The time left is an upper end by what was seen so far: all the probes that are still allowed, each as long
as the longest, and the confirmation at the speed of the best. The search usually stops before; a slower
probe, a large checkpoint or a winner that fails its confirmation push it out.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from autotune.common.units import counted, format_seconds
from autotune.records.answer import Counts
from autotune.records.measurement import (
    NUM_CONFIRMATION_WARM_UP_STEPS,
    Measurement,
    ProbeSpec,
    varied_steps,
)
from autotune.report import measured_words
from autotune.report.stderr import Output, output, tell
from autotune.search.listener import Measuring
from autotune.space.config import TrainConfig
from autotune.space.words import describe

if TYPE_CHECKING:
    from rich.table import Table

_REFRESHES_PER_SECOND = 4


class Tally:
    """The state of a search while probes run: the run now, the best so far, the most time the rest takes."""

    def __init__(
        self,
        *,
        max_probes: int,
        confirm_steps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_probes = max_probes
        self.num_probes = 0
        self.outcomes: Counter[str] = Counter()
        self.best: Measurement | None = None
        self.running: dict[TrainConfig, float] = {}
        """The configurations that run, and since when by the clock; one for each card at most."""
        self.confirms = False
        """Whether what runs is a confirmation."""
        self._confirm_steps = confirm_steps
        self._clock = clock
        self._longest_seconds: float | None = None

    def on_run(self, config: TrainConfig, spec: ProbeSpec) -> None:
        self.confirms = spec.confirm_steps > 0
        self.running[config] = self._clock()

    def on_end(self, config: TrainConfig, spec: ProbeSpec) -> None:
        seconds = self._clock() - self.running.pop(config)
        if not spec.confirm_steps:
            self._longest_seconds = max(self._longest_seconds or 0.0, seconds)

    def on_probe(self, number: int, measurement: Measurement, best: Measurement | None) -> None:
        self.num_probes, self.best = number, best
        self.outcomes[measurement.outcome] += 1

    @property
    def running_seconds(self) -> float:
        """Time for which the longest of them has run."""
        return self._clock() - min(self.running.values()) if self.running else 0.0

    def running_for(self) -> list[tuple[TrainConfig, float]]:
        """The configurations that run, and for how many seconds."""
        now = self._clock()
        return [(config, now - since) for config, since in self.running.items()]

    @property
    def most_seconds_left(self) -> float | None:
        """Seconds that the rest takes at most; None where that is not known.

        It is not known before anything has run, nor when a confirmation takes longer than planned.
        """
        longest_seconds, running_seconds = self._longest_seconds, self.running_seconds
        if longest_seconds is None:
            return None
        best = self.best
        confirmation_seconds = 0.0
        if self._confirm_steps and best is not None and best.step_seconds is not None:
            num_steps = self._confirm_steps + NUM_CONFIRMATION_WARM_UP_STEPS
            num_steps += varied_steps(best.config, best.spec.backend)
            # It is built as a probe is; an evaluation and a checkpoint are at its end.
            confirmation_seconds = num_steps * best.step_seconds + longest_seconds
        if self.confirms and self.running:
            left_seconds = confirmation_seconds - running_seconds
            return left_seconds if left_seconds > 0 else None
        num_left = self.max_probes - self.num_probes
        probes_seconds = num_left * max(longest_seconds, running_seconds) - running_seconds
        return max(probes_seconds, 0.0) + confirmation_seconds

    def left(self) -> str:
        """The time left in words."""
        seconds, num_left = self.most_seconds_left, self.max_probes - self.num_probes
        if self.confirms and self._longest_seconds is None:
            return "how long the confirmation takes is not known: nothing was run before it"
        if self.confirms and seconds is None:
            return "the confirmation takes longer than expected"
        if seconds is None:
            return f"at most {counted(num_left, 'probe')}; how long one takes is not known yet"
        until = datetime.datetime.now() + datetime.timedelta(seconds=seconds)
        what = [counted(num_left, "probe")] if num_left and not self.confirms else []
        what += ["the confirmation"] if self._confirm_steps else []
        if not what:
            return "nothing"
        return f"at most {' and '.join(what)}: {_rounded(seconds)}, until {until:%H:%M:%S}"


def _rounded(seconds: float) -> str:
    """The time in whole seconds: the rest is no news."""
    return format_seconds(seconds) if seconds >= 100 else f"{seconds:.0f} s"


@contextlib.contextmanager
def measuring_on_stderr(
    counts: Counts, max_probes: int, confirm_steps: int, *, quiet: bool
) -> Iterator[Measuring]:
    """Listen to the probes and report them on stderr, in the way that autotune.report.stderr names."""
    tally = Tally(max_probes=max_probes, confirm_steps=confirm_steps)
    kind = output(quiet=quiet)
    if kind is Output.SCREEN:
        with _screen(functools.partial(_drawn, tally, counts)):
            yield Measuring(on_run=tally.on_run, on_end=tally.on_end, on_probe=tally.on_probe)
    elif kind is Output.NONE:
        yield Measuring(on_run=tally.on_run, on_end=tally.on_end, on_probe=tally.on_probe)
    else:
        _print(f"measuring: at most {counted(max_probes, 'probe')}")
        yield _lines(tally, milestones=kind is Output.MILESTONES)


def _lines(tally: Tally, *, milestones: bool) -> Measuring:
    """Report in lines: one per probe, or per new best only; and one per confirmation."""

    def on_run(config: TrainConfig, spec: ProbeSpec) -> None:
        tally.on_run(config, spec)
        if tally.confirms:
            _print(f"confirming {describe(config)}: {tally.left()}")

    def on_probe(number: int, measurement: Measurement, best: Measurement | None) -> None:
        tally.on_probe(number, measurement, best)
        if milestones and measurement is not best:
            return
        so_far = "" if best is None else f"; best so far {measured_words.measured_speed(best)}"
        left = "" if milestones or tally.most_seconds_left is None else f"; left: {tally.left()}"
        _print(f"probe {number}: {measured_words.probed(measurement)}{so_far}{left}")

    return Measuring(on_run=on_run, on_end=tally.on_end, on_probe=on_probe)


def _print(text: str) -> None:
    tell(text)


@contextlib.contextmanager
def _screen(draw: Callable[[], Table]) -> Iterator[None]:
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    with Live(
        get_renderable=draw,
        console=console,
        transient=True,
        refresh_per_second=_REFRESHES_PER_SECOND,
    ):
        yield


def _drawn(tally: Tally, counts: Counts) -> Table:
    """A table for the screen: the funnel, the probe that runs, the best, what is left, a row each."""
    from rich.table import Table
    from rich.text import Text

    num_valid = counts.enumerated - counts.invalid
    ended = ", ".join(f"{count} {name}" for name, count in sorted(tally.outcomes.items()))
    probed = f"probed {tally.num_probes}" + (f" ({ended})" if ended else "")
    verb = "confirming" if tally.confirms else "probing"
    now = "\n".join(
        f"{verb} {describe(config)}, for {seconds:.0f} s" for config, seconds in tally.running_for()
    )
    rows = [
        (
            "funnel",
            f"space {counts.enumerated:,} > valid {num_valid:,} > predicted to fit "
            f"{counts.feasible:,} > {probed}",
        ),
        ("now", now or "choosing what to probe"),
        ("left", tally.left()),
    ]
    if tally.best is not None:
        best = f"{measured_words.measured(tally.best)}: {describe(tally.best.config)}"
        rows.insert(2, ("best", best))
    table = Table.grid(padding=(0, 2, 0, 0))
    for label, text in rows:
        table.add_row(Text(label, "dim"), Text(text, "bold green" if label == "best" else ""))
    return table
