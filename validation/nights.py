"""How often a night finds a regression, and how often it cries wolf: 30 nights, simulated many times.

    python -m validation.nights [--seeds 100]

writes the table of studies/nights/README.md. A run is 30 nights of 12 cells whose speeds are those of
studies/cpu-sweep/sweep.jsonl. What two processes of the same configuration differ by is drawn from the
36 recorded residuals of studies/cpu-speedups/speedups.jsonl (12 configurations, three rounds each, on a
CPU). On a tenth of the nights a library changes: every cell is stale then, is searched, and a
challenger of the same true speed is measured beside the standing answer. Six cells become slower on a
night of their own, half of these with such a change. Found is a regression that is called on that night
or the next. A false alarm is any other call: a regression or an improvement that is none, a challenger that
takes the standing one's place. What decides is autotune.nightly itself: plan, history, drift.

Recorded are processes, minutes apart; nights were not. So the rows with a deviation of nights, or with
bad nights, are ASSUMPTIONS: they show what noise can be borne.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.nightly import drift
from autotune.nightly.history import NEW, Night, levels
from autotune.nightly.plan import changes
from autotune.records.fingerprint import Fingerprint
from autotune.records.measurement import Measurement, measurement_from_dict
from autotune.space.config import TrainConfig

ROOT = Path(__file__).parents[1] / "studies"
README = ROOT / "nights" / "README.md"
NUM_NIGHTS, NUM_CELLS, NUM_REGRESSIONS = 30, 12, 6
FIRST_SEED = 1000
"""Thresholds were chosen on seeds below."""
START = datetime.datetime(2026, 1, 1, 2, 17, tzinfo=datetime.UTC)
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """What a machine is like."""

    name: str
    scale: float = 1.0
    """Of the recorded residuals."""
    night_sd: float = 0.0
    """Of log speed, shared by a night's processes of a cell."""
    bad_share: float = 0.0
    """Of a cell's nights that are 3 to 8 % slow, and no regression."""
    regression: float = 0.05
    max_probes: int = 12


SCENARIOS = (
    Scenario(name="recorded noise"),
    Scenario(name="recorded noise, 6 processes at most", max_probes=6),
    Scenario(name="recorded noise, 24 processes at most", max_probes=24),
    Scenario(name="half of it", scale=0.5),
    Scenario(name="a quarter of it", scale=0.25),
    Scenario(name="twice", scale=2.0),
    Scenario(name="regressions of 3 %", regression=0.03),
    Scenario(name="regressions of 10 %", regression=0.1),
    Scenario(name="and 0.5 % between nights", night_sd=0.005),
    Scenario(name="and 1 % between nights", night_sd=0.01),
    Scenario(
        name="and 1 % between nights, a quarter of it between processes", scale=0.25, night_sd=0.01
    ),
    Scenario(name="and a bad night in 100", bad_share=0.01),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """What 30 nights came to."""

    num_found: int
    num_found_at_all: int
    num_false: int
    num_processes: int
    num_attributed: int
    """Of those found that came with a change: said to."""
    num_with_change: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What the simulation draws from."""

    residuals: tuple[float, ...]
    """Of log speed between processes, scaled for the mean that was taken off them."""
    measurements: tuple[Measurement, ...]
    """Of cells, with their speeds."""


def recorded() -> Recorded:
    residuals: list[float] = []
    for line in (ROOT / "cpu-speedups" / "speedups.jsonl").read_text("utf-8").splitlines():
        for contender in json.loads(line)["contenders"].values():
            logs = [
                math.log(measurement_from_dict(each).tokens_per_second or math.nan)
                for each in contender["measurements"]
            ]
            mean, scale = statistics.fmean(logs), math.sqrt(len(logs) / (len(logs) - 1))
            residuals += [scale * (log - mean) for log in logs]
    lines = (ROOT / "cpu-sweep" / "sweep.jsonl").read_text("utf-8").splitlines()
    read = [measurement_from_dict(json.loads(line)["measurement"]) for line in lines]
    fast = sorted((m for m in read if m.fits), key=lambda m: -(m.tokens_per_second or 0.0))
    return Recorded(residuals=tuple(residuals), measurements=tuple(fast[:NUM_CELLS]))


def simulate(scenario: Scenario, drawn_from: Recorded, seed: int) -> Ran:
    """30 nights."""
    rng = random.Random(seed)
    versions = dict.fromkeys(LIBRARIES, 1)
    changed_on = {night for night in range(1, NUM_NIGHTS) if rng.random() < 0.1}
    quiet = [night for night in range(1, NUM_NIGHTS - 1) if night not in changed_on]
    loud = [night for night in sorted(changed_on) if night < NUM_NIGHTS - 1]
    regressing = {
        cell: rng.choice(loud if number % 2 and loud else quiet)
        for number, cell in enumerate(rng.sample(range(NUM_CELLS), NUM_REGRESSIONS))
    }
    cells = [
        _Cell(scenario, drawn_from, rng, number, regressing.get(number))
        for number in range(NUM_CELLS)
    ]
    fingerprint = drawn_from.measurements[0].fingerprint
    for night in range(NUM_NIGHTS):
        if night in changed_on:
            versions[rng.choice(LIBRARIES)] += 1
            pairs = tuple(sorted((name, f"{major}.0") for name, major in versions.items()))
            fingerprint = dataclasses.replace(fingerprint, versions=pairs)
        prior = drift.noise_of([level for cell in cells for level in cell.levels])
        for cell in cells:
            cell.night(night, fingerprint, prior)
    on_change = [c for c in cells if c.found_on is not None and c.regresses_on in changed_on]
    return Ran(
        num_found=sum(
            c.found_on is not None and c.found_on - (c.regresses_on or 0) <= 1 for c in cells
        ),
        num_found_at_all=sum(c.found_on is not None for c in cells),
        num_false=sum(c.num_false for c in cells),
        num_processes=sum(c.num_processes for c in cells),
        num_attributed=sum(c.is_attributed for c in on_change),
        num_with_change=len(on_change),
    )


class _Cell:
    def __init__(
        self,
        scenario: Scenario,
        drawn_from: Recorded,
        rng: random.Random,
        number: int,
        regresses_on: int | None,
    ) -> None:
        self._scenario, self._residuals, self._rng = scenario, drawn_from.residuals, rng
        measurement = drawn_from.measurements[number]
        self._config: TrainConfig = measurement.config
        self._log_speed = math.log(measurement.tokens_per_second or 1.0)
        self.regresses_on = regresses_on
        self.found_on: int | None = None
        self.is_attributed = False
        self.num_false = 0
        self.num_processes = 0
        self._nights: list[Night] = []

    @property
    def levels(self) -> list[Sequence[Sequence[float]]]:
        level, earlier = levels(self._nights)
        return [*earlier, level.nights]

    def night(self, number: int, fingerprint: Fingerprint, prior: drift.Noise) -> None:
        if number == self.regresses_on:
            self._log_speed += math.log1p(-self._scenario.regression)
        shift = self._rng.gauss(0, self._scenario.night_sd)
        if self._rng.random() < self._scenario.bad_share:
            shift -= self._rng.uniform(0.03, 0.08)
        level, earlier = levels(self._nights)
        history = [*earlier, level.nights]
        tonight = self._processes(shift, history, prior)
        if not self._nights:
            self._add(number, NEW, tonight, fingerprint)
            return
        verdict = drift.judge(tonight, level, earlier, prior=prior)
        last = self._nights[-verdict.num_nights]
        self._count(number, verdict.kind, bool(changes(last.fingerprint, fingerprint)))
        if changes(self._nights[-1].fingerprint, fingerprint):
            challenger = self._processes(shift, history, prior)
            noise = drift.noise_of([*history, [tonight]], prior)
            gained = drift.gain(challenger, tonight, noise)
            self.num_false += gained.kind == drift.IMPROVEMENT
        self._add(number, verdict.kind, tonight, fingerprint, num_nights=verdict.num_nights)

    def _count(self, number: int, kind: str, is_attributed: bool) -> None:
        if kind not in (drift.REGRESSION, drift.IMPROVEMENT):
            return
        is_due = self.regresses_on is not None and self.regresses_on <= number
        if kind == drift.REGRESSION and is_due and self.found_on is None:
            self.found_on, self.is_attributed = number, is_attributed
        else:
            self.num_false += 1

    def _processes(
        self, shift: float, history: drift.History, prior: drift.Noise
    ) -> tuple[float, ...]:
        speeds: list[float] = []
        while drift.wants_more(
            speeds,
            history,
            at_least=3,
            at_most=self._scenario.max_probes,
            prior=prior,
        ):
            noise = self._scenario.scale * self._rng.choice(self._residuals)
            speeds.append(math.exp(self._log_speed + shift + noise))
        self.num_processes += len(speeds)
        return tuple(speeds)

    def _add(
        self,
        number: int,
        kind: str,
        speeds: tuple[float, ...],
        fingerprint: Fingerprint,
        num_nights: int = 1,
    ) -> None:
        at = START + datetime.timedelta(days=number)
        self._nights.append(
            Night(
                made_at=at.isoformat(),
                kind=kind,
                reason="",
                fingerprint=fingerprint,
                config=self._config,
                tokens_per_second=speeds,
                peak_device_bytes=None,
                has_searched=kind == NEW,
                num_nights=num_nights,
            )
        )


def row(scenario: Scenario, ran: Sequence[Ran]) -> str:
    injected = NUM_REGRESSIONS * len(ran)
    found = sum(each.num_found for each in ran)
    all_found = statistics.fmean(each.num_found == NUM_REGRESSIONS for each in ran)
    false = statistics.fmean(each.num_false for each in ran)
    at_most_one = statistics.fmean(each.num_false <= 1 for each in ran)
    holds = statistics.fmean(
        each.num_found == NUM_REGRESSIONS and each.num_false <= 1 for each in ran
    )
    processes = statistics.fmean(each.num_processes for each in ran) / (NUM_NIGHTS * NUM_CELLS)
    return (
        f"| {scenario.name} | {100 * scenario.regression:.0f} % | {found:,} of {injected:,} | "
        f"{100 * all_found:.0f} % | {false:.2f} | {100 * at_most_one:.0f} % | "
        f"{100 * holds:.0f} % | {processes:.1f} |"
    )


HEADER = (
    "| noise | regression | found within two nights | runs with all found | false alarms per run | "
    "runs with at most one | runs with both | processes per cell and night |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=100)
    arguments = parser.parse_args()
    drawn_from = recorded()
    rows = [HEADER]
    print(HEADER, flush=True)
    for scenario in SCENARIOS:
        seeds = range(FIRST_SEED, FIRST_SEED + arguments.seeds)
        ran = [simulate(scenario, drawn_from, seed) for seed in seeds]
        rows.append(row(scenario, ran))
        print(rows[-1], flush=True)
    if README.exists():
        before, _, after = README.read_text(encoding="utf-8").partition("<!-- table -->")
        *_, rest = after.partition("<!-- end -->")
        table = "\n".join(rows)
        text = f"{before}<!-- table -->\n{table}\n<!-- end -->{rest}"
        README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
