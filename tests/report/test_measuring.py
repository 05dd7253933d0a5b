"""What is told while probes run: the funnel, the probe that runs, the best, the most time it can take."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

import answers
import pytest

from autotune.report.measuring import Tally, measuring_on_stderr
from autotune.search.listener import Measuring

PROBE = answers.measurement().spec
CONFIRMATION = answers.measurement(confirm_steps=50).spec
OOM = answers.measurement(config=answers.BASE, outcome="oom", message="out of \x1b[2J memory")


@pytest.fixture(autouse=True)
def _nothing_is_said_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_the_time_left_is_at_most_that_of_the_probes_that_are_allowed() -> None:
    clock, best = Clock(), answers.measurement(step_seconds=2.0)
    tally = Tally(max_probes=10, confirm_steps=50, clock=clock)
    assert tally.most_seconds_left is None
    assert tally.left() == "at most 10 probes; how long one takes is not known yet"
    tally.on_run(answers.BASE, PROBE)  # the base's, which is none of the ten
    clock.seconds = 4.0
    tally.on_end(answers.BASE, PROBE)
    tally.on_run(answers.CONFIG, PROBE)
    # 10 of 4 s each; nothing to confirm is known yet.
    assert tally.most_seconds_left == 40
    clock.seconds = 14.0
    tally.on_end(answers.CONFIG, PROBE)
    tally.on_probe(1, best, best)
    # 9 of 10 s; 50 steps with 10 of warm-up of 2 s each, and what a probe takes beside.
    assert tally.most_seconds_left == 9 * 10 + 130
    tally.on_probe(2, best, best)  # known from before: it took no time, and is one less
    assert tally.most_seconds_left == 8 * 10 + 130
    tally.on_run(answers.CONFIG, PROBE)
    clock.seconds = 17.0
    assert tally.most_seconds_left == 8 * 10 - 3 + 130
    assert tally.left().startswith("at most 8 probes and the confirmation: 3 min 27 s, until ")
    tally.on_end(answers.CONFIG, PROBE)
    tally.on_probe(3, best, best)
    tally.on_run(answers.CONFIG, CONFIRMATION)
    clock.seconds = 27.0
    assert tally.most_seconds_left == 130 - 10
    clock.seconds = 1000.0
    assert tally.most_seconds_left is None
    assert "longer" in tally.left()


def test_one_probe_is_one_probe() -> None:
    clock = Clock()
    tally = Tally(max_probes=1, confirm_steps=0, clock=clock)
    assert tally.left() == "at most 1 probe; how long one takes is not known yet"
    tally = Tally(max_probes=2, confirm_steps=0, clock=clock)
    tally.on_run(answers.CONFIG, PROBE)
    clock.seconds = 4.0
    tally.on_end(answers.CONFIG, PROBE)
    tally.on_probe(1, answers.measurement(), answers.measurement())
    assert tally.left().startswith("at most 1 probe: 4 s, until ")


def test_a_confirmation_before_which_nothing_ran_is_not_said_to_be_late() -> None:
    """All probes were known: there is nothing yet that could be compared with."""
    clock, best = Clock(), answers.measurement(step_seconds=2.0)
    tally = Tally(max_probes=1, confirm_steps=50, clock=clock)
    tally.on_probe(1, best, best)
    tally.on_run(answers.CONFIG, CONFIRMATION)
    clock.seconds = 5.0
    assert tally.left() == "how long the confirmation takes is not known: nothing was run before it"


def test_a_probe_that_is_slower_than_all_before_pushes_the_end_out() -> None:
    clock = Clock()
    tally = Tally(max_probes=10, confirm_steps=0, clock=clock)
    tally.on_run(answers.CONFIG, PROBE)
    clock.seconds = 4.0
    tally.on_end(answers.CONFIG, PROBE)
    tally.on_probe(1, answers.measurement(), answers.measurement())
    tally.on_run(answers.CONFIG, PROBE)
    clock.seconds = 14.0
    # 8 more of at least 10 s; nothing is said of a confirmation that is not made.
    assert tally.most_seconds_left == 80
    assert tally.left().startswith("at most 9 probes: 80 s, until ")


def told(*, quiet: bool = False) -> list[str]:
    """What a short search says, line by line."""
    screen = io.StringIO()
    with contextlib.redirect_stderr(screen), measuring(quiet=quiet) as heard:
        search(heard)
    return screen.getvalue().splitlines()


@contextlib.contextmanager
def measuring(*, quiet: bool) -> Iterator[Measuring]:
    counts = answers.answer().counts
    with measuring_on_stderr(counts, 20, 50, quiet=quiet) as heard:
        yield heard


def search(heard: Measuring) -> None:
    best = answers.measurement()
    for number, seen in enumerate((best, OOM), start=1):
        heard.on_run(seen.config, PROBE)
        heard.on_end(seen.config, PROBE)
        heard.on_probe(number, seen, best)
    heard.on_run(best.config, CONFIRMATION)


def test_a_log_gets_a_line_per_probe_with_the_time_left() -> None:
    first, probe, oom, confirming = told()
    assert first == "measuring: at most 20 probes"
    assert probe.startswith("probe 1: full fine-tune, bf16-true, adamw_bnb_8bit")
    assert "ok, 3,277 tokens/s +- 0.4 %, 10.00 GiB" in probe
    # 60 steps of 10 s.
    assert "; left: at most 19 probes and the confirmation: 10 min" in probe
    assert "oom, out of \\x1b[2J memory; best so far 3,277 tokens/s" in oom
    assert confirming.startswith("confirming full fine-tune")
    assert told(quiet=True) == []


def test_a_ci_job_gets_the_new_best_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")
    _, probe, confirming = told()
    assert probe.endswith("best so far 3,277 tokens/s +- 0.4 %")
    assert confirming.startswith("confirming")
    assert told(quiet=True) == []


def test_a_terminal_gets_a_screen_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Terminal()
    with contextlib.redirect_stderr(screen), measuring(quiet=False) as heard:
        best = answers.measurement()
        heard.on_run(answers.BASE, PROBE)
        heard.on_end(answers.BASE, PROBE)
        heard.on_probe(1, OOM, None)
        heard.on_probe(2, best, best)
        heard.on_run(answers.ADAPTER, PROBE)
        heard.on_run(answers.CONFIG, PROBE)  # on another card
    shown = screen.getvalue()
    for part in (
        "space 18,432 > valid 11,204 > predicted to fit 3,871 > probed 2 (1 ok, 1 oom)",
        "probing LoRA r=64 on all-linear",
        "probing full fine-tune, bf16-true, adamw_bnb_8bit",
        "3,277 tokens/s +- 0.4 %, 10.00 GiB: full fine-tune",
        "at most 18 probes and the confirmation: 10 min",
    ):
        assert part in shown, part
    assert "\x1b[3" not in shown  # no colour
    assert shown.endswith("\x1b[2K")
