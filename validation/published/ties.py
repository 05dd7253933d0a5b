"""What it costs, and saves, to leave a setting as it is where it is not likely that a change pays.

Each pair of published runs is asked twice: one of them is the base, the other the change. Today's rule
changes where the prediction is faster by more than the noise. The rules beside it ask besides for odds that
the change is faster at all. Regret is what the faster one of the two, as published, has over the one chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from autotune.records.measurement import NOISE
from autotune.speed.sureness import Parts, TimedWork, odds_of

LEAST_ODDS = (0.0, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9)
"""Odds from which each rule changes; with the first, the prediction's order alone counts: today's rule."""


class Run(Protocol):
    """A published run with its predicted time."""

    @property
    def parts(self) -> Parts:
        """Predicted seconds by cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A change of one setting, by rates of the changed run over the base's."""

    setting: str
    published: float
    predicted: float
    odds: float
    """Odds that the changed run is the faster one, as predicted."""

    def is_changed(self, least_odds: float) -> bool:
        return self.predicted > 1 / (1 - NOISE) and self.odds >= least_odds

    def regret(self, least_odds: float) -> float:
        """Share by which the better one of the two, as published, is faster than the one chosen."""
        chosen = self.published if self.is_changed(least_odds) else 1.0
        return max(self.published, 1.0) / chosen - 1


R = TypeVar("R", bound=Run)


def choices(
    runs: Iterable[R],
    setting_of: Callable[[R, R], str | None],
    ratios: Callable[[R, R], tuple[float, float]],
    work: Callable[[R, R], float],
) -> list[Choice]:
    """Both changes of every pair that differs in one setting.

    `ratios`: (published, predicted) rate of the first over the second. `work`: what the first does in its
    time.
    """
    found = []
    for one, other in itertools.combinations(runs, 2):
        setting = setting_of(one, other)
        if setting is None:
            continue
        published, predicted = ratios(one, other)
        timed = TimedWork(parts=one.parts, work=work(one, other))
        rival = TimedWork(parts=other.parts, work=work(other, one))
        odds = odds_of(timed, [rival], tolerance=0).of_first
        found += [
            Choice(setting=setting, published=published, predicted=predicted, odds=odds),
            Choice(
                setting=setting, published=1 / published, predicted=1 / predicted, odds=1 - odds
            ),
        ]
    return found


def markdown(kinds: Mapping[str, Sequence[Choice]]) -> str:
    """A row for each rule; for each kind of choices, mean regret, changes, and those to what is slower."""
    titles = [
        f"{name}: {what}"
        for name in kinds
        for what in ("mean regret", "changes", "to what is slower")
    ]
    lines = [f"| odds from which a setting is changed | {' | '.join(titles)} |"]
    lines.append(f"|---|{'---:|' * len(titles)}")
    for least in LEAST_ODDS:
        cells = []
        for members in kinds.values():
            changed = [choice for choice in members if choice.is_changed(least)]
            num_slower = sum(choice.published < 1 for choice in changed)
            regret = sum(choice.regret(least) for choice in members) / len(members)
            cells += [f"{regret:.2%}", f"{len(changed)} of {len(members)}", str(num_slower)]
        rule = f"{least:.0%}" if least else "any: today's rule"
        lines.append(f"| {rule} | {' | '.join(cells)} |")
    return "\n".join(lines)
