"""Judgement of drift and noise: whether a speed that was measured again has changed.

What is compared are logarithms of tokens per second, one per process. Of the standing answer of a cell

    log speed = level + night + process,    night ~ (0, night_sd^2), process ~ (0, process_sd^2)

where `process` is what two fresh processes differ by on one night (the spread within a process is part of
it), and `night` what all of a night's share: heat, neighbours, another clock. Both deviations come from the
cell's own history, pulled towards those of the machine's cells together until there is enough of it, as
towards a prior. The standard error of a night's change against the baseline is

    SE^2 = night_sd^2 (1/n + 1/N) + process_sd^2 (1/k + 1/K)

with n nights and k processes in what is judged, N and K in the baseline: every night since the level last
changed. One night never decides. A night with |change| >= SUSPECT_Z x SE is a suspect; the next night, on
which it is measured first, makes it a regression or an improvement where it is a suspect by itself, of the
same sign, and both together reach CALL_Z. A suspect that the next night does not confirm was a bad night:
part of the noise, not of the baseline. How many processes a night takes follows from the spread alone, never
from what they say, so that looking again cannot find what one look did not.

validation/nights.py compares this with recorded noise; studies/nights has the rates. Not modelled: a creep
that is slower than the baseline learns it.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

PRIOR_PROCESS_SD = 0.0236
"""Standard deviation of log speed between processes: 12 configurations x 3 rounds of
studies/cpu-speedups/speedups.jsonl, root mean square. A GPU's is smaller, and is learnt."""
PRIOR_NIGHT_SD = 0.003
"""Standard deviation between nights. [judgement] Nothing recorded so far separates nights from processes."""
PRIOR_DOF = 4
"""Degrees of freedom that a prior stands for. [judgement]"""

SUSPECT_Z = 2.5
CALL_Z = 4.0
GAIN_Z = 3.5
"""Standard errors that show a gain. [measured] studies/nights: with these a 5 % regression is found, and less
than one alarm in 30 nights is false."""
OUTLIER_Z = 3.0
"""Standard deviations from the level's middle: a night that is further out counts as that far for the
noise."""
LEAST_CHANGE = 0.01
"""Least change of log speed: what is smaller is of no interest, however sure."""
TARGET_SE = 0.007
"""Standard error of a night's mean: a change of 5 % is then 5 to 7 of these."""
FIRST_TARGET_SE = 0.005
FIRST_FACTOR = 2
"""Factor of the most processes on a cell's first night: every later night is compared with that one."""

UNCHANGED, SUSPECT, REGRESSION, IMPROVEMENT = "unchanged", "suspect", "regression", "improvement"


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """Speeds of a cell's answer since it last changed, and on the last nights."""

    baseline: tuple[tuple[float, ...], ...]
    """Tokens per second by night and process; bad nights left out."""
    suspects: tuple[tuple[float, ...], ...] = ()
    """Speeds of the night before, where it was a suspect: not yet part of the baseline."""
    bad: tuple[tuple[float, ...], ...] = ()
    """Speeds of suspects that the next night did not confirm: they are about the noise, not about the
    level."""

    @property
    def nights(self) -> tuple[tuple[float, ...], ...]:
        """Return the nights that the noise is read off."""
        return (*self.baseline, *self.bad)


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Standard deviations of log speed."""

    process_sd: float
    night_sd: float

    def se(self, night: Sequence[float]) -> float:
        """Standard error of a night's mean against what the same night would give again and again."""
        return self.process_sd / math.sqrt(len(night))


PRIOR = Noise(process_sd=PRIOR_PROCESS_SD, night_sd=PRIOR_NIGHT_SD)
"""Noise of a machine that nothing is known of."""
History = Sequence[Sequence[Sequence[float]]]
"""Tokens per second by level, night and process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The judgement on a night, for the answer that stands."""

    kind: str
    change: float
    """Change of tokens per second against the baseline, as a share; of both nights where two decide."""
    low: float
    high: float
    """Upper end of the interval of the change, CALL_Z standard errors to either side."""
    num_nights: int = 1
    """Number of nights that were judged together."""

    @property
    def detectable(self) -> float:
        """The smallest change, as a share, that would be called in 39 of 40 cases (2 SE above CALL_Z)."""
        reach = (math.log1p(self.high) - math.log1p(self.low)) / 2
        return math.expm1(reach * (1 + 2 / CALL_Z))


def noise_of(history: History, prior: Noise = PRIOR) -> Noise:
    """Noise read off levels, each a list of nights, each a list of speeds.

    Never raises; the prior where there are none.
    """
    squares, dof = PRIOR_DOF * prior.process_sd**2, PRIOR_DOF
    for level in history:
        for night in level:
            squares += _moments(tuple(night))[1]
            dof += len(night) - 1
    process_variance = squares / dof
    night_squares, night_dof = PRIOR_DOF * prior.night_sd**2, PRIOR_DOF
    for level in history:
        if len(level) < 2:
            continue
        means = [_moments(tuple(night))[0] for night in level]
        middle = statistics.median(means)
        share = statistics.fmean(1 / len(night) for night in level)
        # One bad night is no reason to expect more: further out than this counts as this.
        most = OUTLIER_Z * math.sqrt(prior.night_sd**2 + process_variance * share)
        off = [max(-most, min(mean - middle, most)) for mean in means]
        # E[variance of means] = night_sd^2 + process_sd^2 x mean of 1/k.
        night_squares += (len(level) - 1) * (statistics.variance(off) - process_variance * share)
        night_dof += len(level) - 1
    return Noise(
        process_sd=math.sqrt(process_variance),
        night_sd=math.sqrt(max(night_squares / night_dof, 0.0)),
    )


def wants_more(
    tonight: Sequence[float],
    history: History,
    *,
    at_least: int,
    at_most: int,
    prior: Noise = PRIOR,
) -> bool:
    """Return whether another process is worth its time: decided by the spread alone."""
    target_se = TARGET_SE
    if not any(history):
        target_se, at_most = FIRST_TARGET_SE, FIRST_FACTOR * at_most
    if not at_least <= len(tonight) < at_most:
        return len(tonight) < at_least
    return noise_of([*history, [tonight]], prior).se(tonight) > target_se


def judge(
    tonight: Sequence[float], level: Level, earlier: History = (), *, prior: Noise = PRIOR
) -> Verdict:
    """Judge tonight's processes against the level.

    `earlier` levels of the cell are about the noise alone; so is `prior`, which is noise_of the machine.
    """
    noise = noise_of([*earlier, level.nights, [tonight]], prior)
    alone = _compared([tonight], level.baseline, noise)
    if _z(alone) < SUSPECT_Z or abs(alone.change) < LEAST_CHANGE:
        return alone
    if level.suspects:
        both = _compared([*level.suspects, tonight], level.baseline, noise)
        before = _compared(level.suspects, level.baseline, noise)
        alike = before.change * alone.change > 0
        if alike and _z(both) >= CALL_Z and abs(both.change) >= LEAST_CHANGE:
            return replace(both, kind=REGRESSION if both.change < 0 else IMPROVEMENT)
    return replace(alone, kind=SUSPECT)


def gain(new: Sequence[float], old: Sequence[float], noise: Noise) -> Verdict:
    """Compare two configurations measured on the same night: the night's share cancels.

    An improvement or a regression where GAIN_Z standard errors say so; otherwise unchanged.
    """
    alone = _compared([new], [old], Noise(process_sd=noise.process_sd, night_sd=0.0))
    if _z(alone) < GAIN_Z or abs(alone.change) < LEAST_CHANGE:
        return alone
    return replace(alone, kind=IMPROVEMENT if alone.change > 0 else REGRESSION)


def _compared(
    window: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]], noise: Noise
) -> Verdict:
    (difference, variance) = (0.0, 0.0)
    for sign, nights in ((1, window), (-1, baseline)):
        weights = [1 / (noise.night_sd**2 + noise.process_sd**2 / len(night)) for night in nights]
        means = [_moments(tuple(night))[0] for night in nights]
        difference += sign * sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights)
        variance += 1 / sum(weights)
    reach = CALL_Z * math.sqrt(variance)
    return Verdict(
        kind=UNCHANGED,
        change=math.expm1(difference),
        low=math.expm1(difference - reach),
        high=math.expm1(difference + reach),
        num_nights=len(window),
    )


def _z(verdict: Verdict) -> float:
    half_width = (math.log1p(verdict.high) - math.log1p(verdict.low)) / 2
    return abs(math.log1p(verdict.change)) / half_width * CALL_Z


@functools.lru_cache(maxsize=65_536)
def _moments(night: tuple[float, ...]) -> tuple[float, float]:
    """Return (mean, sum of squared deviations) of the logarithms."""
    logs = [*map(math.log, night)]
    mean = statistics.fmean(logs)
    return mean, sum((log - mean) ** 2 for log in logs)
