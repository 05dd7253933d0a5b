"""How sure predicted times are: a spread by cause, and the odds that one time is shorter than others.

A step's seconds are parted by cause (matmul, attention, host, ...). Each part is off by a factor whose
logarithm is normal around 0. Of its variance a share is common to all configurations on one card, as its
rate is taken wrongly for all of them; the rest is of the shapes of one configuration, and of those that have
the same part. So two configurations that spend their time alike are told apart by a small difference, and
two that do not are not, however precise the digits are.

The host is another matter: a GPU that is busy hides it, until it is slower than was thought. So what a slow
host adds is worked out (`Part.slow_seconds`), and the interval reaches further up than down.

Not modelled: errors that several causes have in common, as of a card that throttles. For the interval of
a whole step STEP_SPREAD stands for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autotune.speed.origin import RatesFrom

COMMON_SHARE = 0.75
"""Share of a part's variance that configurations have in common. [judgement] studies/published-speed shows
how often odds that rest on it come true."""
STEP_SPREAD = 0.235
"""Spread of a whole step's time beside that of its parts: a program's own work, the machine, clocks. It is
common to all configurations, so it changes no order. With it 80 % of a source's published runs lie in their
interval, on average over 49 programs and cards, each of which counts alike, and is held against the figure
that the others give (studies/sureness, python -m validation.step_spread)."""
Z_OF_80_PERCENT = 1.2816
"""Quantile of the normal distribution that 80 % lie within, both sides."""
_NUM_DRAWS = 400
_ALIKE = 5e-3
"""Share to which parts of times are the same. [judgement] Other shapes, or a layer more, differ by more."""
_DIGITS = 6
"""Decimal places to which parts of times are compared, as shares of the first time."""
_SEED = 0
"""Draws are the same every time: an answer does not depend on when it was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Seconds that go to one cause."""

    seconds: float
    spread: float
    """Standard deviation of the logarithm of the factor by which they are off."""
    seconds_from: Mapping[RatesFrom, float] = field(default_factory=dict, hash=False)
    """The seconds by the evidence that they rest on."""
    slow_seconds: float = 0.0
    """Seconds besides, where the cause is as slow as one in ten: of the host, which the GPU hides else."""

    def __add__(self, other: Part) -> Part:
        """Both together, where one factor holds for both."""
        seconds = self.seconds + other.seconds
        off = self.seconds * self.spread + other.seconds * other.spread
        seconds_from = dict(self.seconds_from)
        for rates_from, its in other.seconds_from.items():
            seconds_from[rates_from] = seconds_from.get(rates_from, 0.0) + its
        return Part(
            seconds=seconds,
            spread=off / seconds if seconds else 0.0,
            seconds_from=seconds_from,
            slow_seconds=self.slow_seconds + other.slow_seconds,
        )

    def times(self, count: float) -> Part:
        """The part that many times."""
        seconds_from = {rates_from: count * its for rates_from, its in self.seconds_from.items()}
        return Part(
            seconds=count * self.seconds,
            spread=self.spread,
            seconds_from=seconds_from,
            slow_seconds=count * self.slow_seconds,
        )


Parts = Mapping[str, Part]
"""A time by cause; the time is their sum."""


def part(seconds: float, spread: float, rates_from: RatesFrom) -> Part:
    """Seconds that rest on one kind of evidence."""
    return Part(seconds=seconds, spread=spread, seconds_from={rates_from: seconds})


def added(*times: Parts) -> dict[str, Part]:
    """The sum of several times, cause by cause."""
    total: dict[str, Part] = {}
    for parts in times:
        for cause, part in parts.items():
            total[cause] = total[cause] + part if cause in total else part
    return total


def repeated(parts: Parts, count: float) -> dict[str, Part]:
    """The time of so many of the same, cause by cause."""
    return {cause: part.times(count) for cause, part in parts.items()}


def spread_of(parts: Parts) -> float:
    """Standard deviation of the logarithm of a whole time's factor: causes are off independently."""
    total = sum(part.seconds for part in parts.values())
    if not total:
        return 0.0
    return math.hypot(*(part.seconds * part.spread / total for part in parts.values()))


def step_spread_of(parts: Parts) -> float:
    """Spread of a whole step, with what all steps have in common."""
    return math.hypot(spread_of(parts), STEP_SPREAD)


def slow_share_of(parts: Parts) -> float:
    """Seconds that a slow host adds to a whole time, as a share of it."""
    total = sum(part.seconds for part in parts.values())
    return sum(part.slow_seconds for part in parts.values()) / total if total else 0.0


def slow_spread_of(parts: Parts) -> float:
    """Spread of a whole step towards longer times, to which a slow host adds."""
    of_host = math.log1p(slow_share_of(parts)) / Z_OF_80_PERCENT
    return math.hypot(spread_of(parts), STEP_SPREAD, of_host)


def within(value: float, below: float, above: float | None = None) -> tuple[float, float]:
    """The interval around a value that holds 80 % of what it may be, by its spread below and above it.

    `above`: None where it is the same.
    """
    over = below if above is None else above
    return value / math.exp(Z_OF_80_PERCENT * below), value * math.exp(Z_OF_80_PERCENT * over)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedWork:
    """A time per unit of work, to be compared with others."""

    parts: Parts = field(hash=False)
    work: float = 1.0
    """Work done in the time, such as tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Odds:
    """How sure it is that a time is the shortest."""

    of_first: float
    """Odds that no rival needs less by more than the tolerance."""
    of_rivals: NDArray[np.float64]
    """Odds of each rival that it is the shortest of all, and shorter by more than the tolerance."""


def odds_of(first: TimedWork, rivals: Sequence[TimedWork], *, tolerance: float) -> Odds:
    """Odds that a time per work is the shortest but for a share of `tolerance`, 0 to 1.

    Parts that take as long per work are the same kernels, and off alike: two configurations that differ in
    their optimizers alone have one error of matmul. Of rivals that are alike in all parts the first stands
    for all.
    """
    times = [first, *rivals]
    causes = sorted({cause for timed in times for cause in timed.parts})
    nothing = Part(seconds=0.0, spread=0.0)
    table = [[timed.parts.get(cause, nothing) for cause in causes] for timed in times]
    seconds = np.array([[part.seconds for part in row] for row in table], float)
    spreads = np.array([[part.spread for part in row] for row in table], float)
    slow = np.array([[part.slow_seconds for part in row] for row in table], float)
    work = np.array([timed.work for timed in times])[:, None]
    seconds, slow = seconds / work, slow / work
    seconds, slow = seconds / seconds[0].sum(), slow / seconds[0].sum()
    both = np.stack([seconds, slow], axis=-1).round(_DIGITS)
    seconds, slow = both[:, :, 0], both[:, :, 1]
    draws = np.random.default_rng(_SEED)
    common = draws.standard_normal((_NUM_DRAWS, 1, len(causes)))
    own = draws.standard_normal((len(times), _NUM_DRAWS, len(causes))).swapaxes(0, 1)
    for number in range(len(causes)):
        of_cause = both[:, number]
        is_alike = np.isclose(of_cause[:, None], of_cause, rtol=_ALIKE, atol=0).all(axis=2)
        firsts = is_alike.argmax(axis=1)
        own[:, :, number] = own[:, firsts[firsts], number]
    off = math.sqrt(COMMON_SHARE) * common + math.sqrt(1 - COMMON_SHARE) * own
    slower = seconds + slow * np.maximum(off, 0) / Z_OF_80_PERCENT
    is_hidden = (slow > 0) & (off > 0)
    drawn = np.where(is_hidden, slower, seconds * np.exp(spreads * off)).sum(axis=2)
    is_first = drawn[:, 0] <= (1 + tolerance) * drawn.min(axis=1)
    beaten_by = drawn[~is_first].argmin(axis=1)
    of_rivals = np.bincount(beaten_by, minlength=len(times)) / _NUM_DRAWS
    return Odds(of_first=float(is_first.mean()), of_rivals=of_rivals[1:])
