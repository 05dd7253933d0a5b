"""An Optuna sampler that spends each probe where an improvement that fits is most likely.

It proposes from a finite list of Candidates, each with a predicted speed and a predicted peak, and none
of them twice. Measurements correct the predictions: log(measured / predicted), of time and of memory,
each follow a Bayesian linear regression on a bias and the knobs of a configuration, so one probe tells
about every candidate that shares a knob with it. How far to trust the prior's widths is learnt as well:
surprises widen all of them. The acquisition is the probability that a candidate fits times its expected
improvement of the log speed over the best that was measured to fit (Gardner et al., "Bayesian
Optimization with Inequality Constraints", ICML 2014).

What a trial of the study says; one whose user attribute `evidence` is "predicted" says nothing:

| trial    | constraint `memory` | time                                    | memory                   |
|----------|---------------------|-----------------------------------------|--------------------------|
| COMPLETE | peak - budget       | its value, tokens per second            | peak                     |
| PRUNED   | the excess, > 0     | at most the speed last reported, if any | at least budget + excess |
| PRUNED   | <= 0, or none       | the same                                | peak, if it is there     |
| FAIL     | -                   | nothing                                 | nothing                  |

A COMPLETE trial fits when all its constraints are at most 0, as everywhere in Optuna. A candidate that
failed is proposed once more, and again for each failure whose user attribute `outcome` is INTERRUPTED.
One that its OWNER left untold, killed with its process or its machine, is proposed again as well, until
MAX_ABANDONED have gone that way. What a killed process left RUNNING is not proposed
until it is told to have failed.

What was measured on the same card with another driver, or other libraries, is where the beliefs begin
(`near`): the weights and the residuals that it teaches, with room for all of them to have changed. It is
no measurement: a candidate with it is proposed as any other, and is not the best before it was measured.

Nothing is kept between calls: a study read from its database goes on where it stopped. With
`study.optimize` the study stops by itself; to ask and tell:

    while not sampler.should_stop(study):
        candidate = sampler.propose(study)
        trial = study.ask(sampler.search_space(candidate))

Not modelled: knobs that act on each other; errors of the micro-step and the optimizer step apart.
Processes that propose at the same moment may propose the same: see autotune.turns.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import optuna
from optuna.distributions import BaseDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from autotune.config import TrainConfig
from autotune.knobs import KNOBS
from autotune.pruner import is_feasible
from autotune.results import NOISE
from autotune.store import CONSTRAINT

Floats = npt.NDArray[np.float64]

INTERRUPTED = "interrupted"
"""User attribute `outcome` of a FAIL trial that was killed from outside, through no fault of its own."""
OWNER = "owner"
"""User attribute of a trial: the process that runs it, and on what (autotune.turns)."""
MAX_ABANDONED = 5
"""[judgement] Machines are lost by chance; a probe that so many did not survive is what killed them."""
_NEVER_FAIL = ("ok", "oom")
"""Outcomes of which a FAIL trial was abandoned while it was told (autotune.trials)."""
MAX_ATTEMPTS = 2
"""A candidate that failed is tried once again (DESIGN.md section 5)."""
STOP_BELOW = 0.05
"""Stop when no candidate is more likely than this to fit and to be faster by more than the noise.
[judgement] One probe in twenty that pays off is not worth the wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prior:
    """Widths of log(measured / predicted) before anything is measured, where their scale is 1."""

    bias: float
    """Common to all candidates: the card, its clocks, the machine."""
    knob: float
    """Of each value of each knob; of a number, from the middle of its range to an end."""
    residual: float
    """Of each candidate alone: knobs that act on each other, and noise."""


_DEGREES_OF_FREEDOM = 4
"""Of the scale that all widths of a prior share. [judgement] The widths below weigh as much as four
measurements: surprised by more than that, the sampler believes the surprises."""

# [judgement] The roofline is 35 % too fast for published kernels of an A100 (README, "How good it is"),
# most of it alike for all configurations of a model; of what is left a knob may be a factor of 1.2.
_TIME = _Prior(bias=0.35, knob=0.15, residual=0.05)
# [judgement] Peaks of published runs are predicted within 7 % (studies/published-memory): the context's
# size, common to all configurations of a card, and what a knob's kernels and fragments add.
_MEMORY = _Prior(bias=0.05, knob=0.03, residual=0.01)


# [judgement] What another driver or library changes: one setting by up to a tenth (a kernel of attention),
# a configuration alone by a few per cent; memory by less (a context, a workspace).
_TIME_DRIFT = _Prior(bias=0.05, knob=0.05, residual=0.03)
_MEMORY_DRIFT = _Prior(bias=0.02, knob=0.01, residual=0.01)


@dataclass(frozen=True, kw_only=True, slots=True)
class Near:
    """What a probe of a candidate measured on the same card, with another driver or other libraries."""

    tokens_per_second: float | None
    """None where it did not run."""
    peak_device_bytes: int | None
    least_bytes: int | None
    """It ran out of memory: it needs so much or more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A configuration that may be proposed, and what is predicted of it."""

    params: Mapping[str, Any]
    """As Optuna's trials hold them. Tells candidates apart."""
    knobs: Mapping[str, str | bool | float]
    """What corrections are learnt for: text and bools by value, numbers as a slope."""
    tokens_per_second: float
    """Predicted."""
    peak_device_bytes: int
    """Predicted."""

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        names: Iterable[str],
        *,
        tokens_per_second: float,
        peak_device_bytes: int,
    ) -> Candidate:
        """From a TrainConfig; `names` are the fields that the study has as parameters."""
        settings = {name: getattr(config, name) for name in names}
        return cls(
            params={name: value for name, value in settings.items() if value is not None},
            knobs=knobs(config),
            tokens_per_second=tokens_per_second,
            peak_device_bytes=peak_device_bytes,
        )


def knobs(config: TrainConfig) -> dict[str, str | bool | float]:
    """What may bend the prediction of a configuration, as Candidate.knobs."""
    found: dict[str, str | bool | float] = {"method": config.method}
    for name, knob in KNOBS.items():
        value = getattr(config, name)
        if value is None:
            continue
        if knob.is_slope:
            found[f"log2_{name}"] = math.log2(value)
        else:
            found[name] = value if knob.choices else str(value)
    return found


class PredictionSampler(optuna.samplers.BaseSampler):
    """Proposes Candidates for a study that maximizes tokens per second within a memory budget.

    `distributions`: of every parameter, as the study's trials have or will have them. `noise`:
    speeds that differ by less are tied. `leave_out`: numbers of trials that say nothing; it may grow.
    `seed` only orders candidates that are equally promising. `near`: by the items of a candidate's
    parameters.
    Raises ValueError for two candidates with the same parameters.
    """

    def __init__(
        self,
        candidates: Iterable[Candidate],
        *,
        distributions: Mapping[str, BaseDistribution],
        budget_bytes: int,
        noise: float = NOISE,
        leave_out: Collection[int] = (),
        seed: int = 0,
        near: Mapping[frozenset[Any], Near] = MappingProxyType({}),
    ) -> None:
        listed = list(candidates)
        order = np.random.default_rng(seed).permutation(len(listed))
        self._candidates = [listed[int(i)] for i in order]
        self._numbers = {_key(c.params): i for i, c in enumerate(self._candidates)}
        if len(self._numbers) < len(listed):
            raise ValueError("Two candidates have the same parameters.")
        self._distributions = dict(distributions)
        self._log_budget = math.log(budget_bytes)
        self._budget_bytes = budget_bytes
        self._noise = noise
        self._leave_out = leave_out
        self._design, self._is_bias = _design([c.knobs for c in self._candidates])
        self._log_speed = np.log([c.tokens_per_second for c in self._candidates])
        self._log_bytes = np.log([c.peak_device_bytes for c in self._candidates])
        self._is_warm = False
        self._time = _Correction(self._design, self._is_bias, _TIME)
        self._memory = _Correction(self._design, self._is_bias, _MEMORY)
        self._begin_with({self._numbers[k]: seen for k, seen in near.items() if k in self._numbers})

    def _begin_with(self, near: Mapping[int, Near]) -> None:
        """Take in what was measured under another fingerprint."""
        for number, seen in near.items():
            if seen.tokens_per_second is not None:
                seconds = self._log_speed[number] - math.log(seen.tokens_per_second)
                self._time.is_equal(number, seconds)
                self._is_warm = True
            if seen.peak_device_bytes is not None:
                peak = math.log(seen.peak_device_bytes) - self._log_bytes[number]
                self._memory.is_equal(number, peak)
        for number, seen in near.items():
            if seen.least_bytes is not None:
                least = math.log(seen.least_bytes) - self._log_bytes[number]
                self._memory.is_at_least(number, least)
        if near:
            self._time.drift(_TIME_DRIFT)
            self._memory.drift(_MEMORY_DRIFT)

    def propose(self, study: optuna.Study) -> Candidate | None:
        """The candidate to probe next; None when all have been."""
        return self._next(self._history(study))

    def should_stop(self, study: optuna.Study) -> bool:
        """Whether no probe is likely to find what fits and is faster by more than the noise."""
        return self._is_over(self._history(study))

    def search_space(self, candidate: Candidate) -> dict[str, BaseDistribution]:
        """The distributions of the parameters that the candidate has."""
        return {name: self._distributions[name] for name in candidate.params}

    def infer_relative_search_space(
        self,
        study: optuna.Study,
        trial: FrozenTrial,  # noqa: ARG002  # Optuna's signature
    ) -> dict[str, BaseDistribution]:
        candidate = self.propose(study)
        return {} if candidate is None else self.search_space(candidate)

    def sample_relative(
        self,
        study: optuna.Study,
        trial: FrozenTrial,  # noqa: ARG002  # Optuna's signature
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        candidate = self.propose(study) if search_space else None
        return {} if candidate is None else dict(candidate.params)

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,  # noqa: ARG002  # Optuna's signature
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Raise TrialPruned when every candidate has been tried, else ValueError."""
        if self.propose(study) is None:
            raise optuna.TrialPruned("Every candidate has been tried.")
        raise ValueError(f"The proposed candidate has no {param_name} of {param_distribution}.")

    def after_trial(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        # Optuna stores the trial's state and value only after this call.
        ended = copy.copy(trial)
        ended.state = state
        ended.values = values
        if self._is_over(self._history(study, ended)):
            # There is no loop to stop where the trial was told.
            with contextlib.suppress(RuntimeError):
                study.stop()

    def _history(self, study: optuna.Study, ended: FrozenTrial | None = None) -> _History:
        """Of the study, whose own record of the trial `ended` is out of date."""
        if study.direction != StudyDirection.MAXIMIZE:
            raise ValueError("A study of speeds maximizes them.")
        trials = study.get_trials(deepcopy=False)
        if ended is not None:
            trials = [ended if trial.number == ended.number else trial for trial in trials]
        told = (trial for trial in trials if trial.number not in self._leave_out)
        return _History.of(told, self._numbers)

    def _next(self, history: _History) -> Candidate | None:
        free = self._free(history)
        if not free.size:
            return None
        if not history.tried and not self._is_warm:
            fitting = free[self._log_bytes[free] <= self._log_budget]
            if fitting.size:
                return self._candidates[int(fitting[self._log_speed[fitting].argmax()])]
        log_speed, sd = self._speed(history)
        chance = self._chance_to_fit(history)
        if history.best_speed is None:
            # Over nothing at all, the improvement is the speed itself.
            worth = chance * np.exp(log_speed)
        else:
            z = (log_speed - math.log(history.best_speed)) / sd
            worth = chance * sd * (_density(z) + z * _below(z))
        return self._candidates[int(free[worth[free].argmax()])]

    def _is_over(self, history: _History) -> bool:
        free = self._free(history)
        if not free.size:
            return True
        promise = self._chance_to_fit(history)
        if history.best_speed is not None:
            log_speed, sd = self._speed(history)
            target = math.log(history.best_speed * (1 + self._noise))
            promise = promise * _below((log_speed - target) / sd)
        return bool(promise[free].max() < STOP_BELOW)

    def _free(self, history: _History) -> npt.NDArray[np.intp]:
        """Numbers of the candidates that may be proposed."""
        free = np.ones(len(self._candidates), dtype=bool)
        free[list(history.tried)] = False
        return np.flatnonzero(free)

    def _speed(self, history: _History) -> tuple[Floats, Floats]:
        """Mean and standard deviation of each candidate's log speed."""
        # log(measured / predicted) of a time is log(predicted / measured) of its speed.
        time = copy.copy(self._time)
        for number, speed in history.speeds.items():
            time.is_equal(number, self._log_speed[number] - math.log(speed))
        for number, speed in history.most_speeds.items():
            time.is_at_least(number, self._log_speed[number] - math.log(speed))
        mean, sd = time.beliefs()
        return self._log_speed - mean, sd

    def _chance_to_fit(self, history: _History) -> Floats:
        """Probability of each candidate to stay within the budget."""
        memory = copy.copy(self._memory)
        for number, excess_bytes in history.peaks.items():
            memory.is_equal(number, self._excess(number, excess_bytes))
        for number, excess_bytes in history.least_excesses.items():
            memory.is_at_least(number, self._excess(number, excess_bytes))
        mean, sd = memory.beliefs()
        return _below((self._log_budget - self._log_bytes - mean) / sd)

    def _excess(self, number: int, excess_bytes: float) -> float:
        """log(measured / predicted) of the peak of a candidate that passed the budget by so much."""
        peak_bytes = max(self._budget_bytes + excess_bytes, 1.0)
        return float(math.log(peak_bytes) - self._log_bytes[number])


@dataclass(frozen=True, kw_only=True, slots=True)
class _History:
    """What the trials of a study say, by number of candidate."""

    tried: set[int]
    """Not to be proposed again: finished, running, or failed too often."""
    speeds: dict[int, float]
    """Tokens per second, measured."""
    most_speeds: dict[int, float]
    """Stopped part-way: tokens per second at most."""
    peaks: dict[int, float]
    """Peak minus the budget, bytes."""
    least_excesses: dict[int, float]
    """Out of memory: at least so many bytes over the budget."""
    best_speed: float | None
    """Of all that fit, whether or not they are candidates."""

    @classmethod
    def of(cls, trials: Iterable[FrozenTrial], numbers: Mapping[frozenset[Any], int]) -> _History:
        history: dict[str, dict[int, float]] = {
            name: {} for name in ("speeds", "most_speeds", "peaks", "least_excesses")
        }
        tried: set[int] = set()
        num_failures: Counter[int] = Counter()
        num_abandoned: Counter[int] = Counter()
        best_speed: float | None = None
        for trial in trials:
            if trial.user_attrs.get("evidence") == "predicted":
                continue
            if trial.state == TrialState.COMPLETE and is_feasible(trial):
                assert trial.value is not None
                best_speed = max(trial.value, best_speed or 0.0)
            number = numbers.get(_key(trial.params))
            if number is None:
                continue
            if trial.state == TrialState.FAIL:
                outcome = trial.user_attrs.get("outcome")
                is_abandoned = outcome in (None, *_NEVER_FAIL) and OWNER in trial.user_attrs
                num_abandoned[number] += is_abandoned
                num_failures[number] += not is_abandoned and outcome != INTERRUPTED
                continue
            tried.add(number)
            for name, value in _said(trial):
                history[name][number] = value
        tried.update(n for n, failures in num_failures.items() if failures >= MAX_ATTEMPTS)
        tried.update(n for n, times in num_abandoned.items() if times >= MAX_ABANDONED)
        return cls(tried=tried, best_speed=best_speed, **history)


def _said(trial: FrozenTrial) -> Iterator[tuple[str, float]]:
    """(field of _History, value) of one trial. What is no size or speed is passed over."""
    is_complete = trial.state == TrialState.COMPLETE
    last = None if trial.last_step is None else trial.intermediate_values[trial.last_step]
    speed = trial.value if is_complete else last
    if trial.state.is_finished() and speed is not None and 0 < speed < math.inf:
        yield "speeds" if is_complete else "most_speeds", speed
    excess_bytes = trial.constraints.get(CONSTRAINT)
    if trial.state.is_finished() and excess_bytes is not None and math.isfinite(excess_bytes):
        yield "peaks" if is_complete or excess_bytes <= 0 else "least_excesses", excess_bytes


def _key(params: Mapping[str, Any]) -> frozenset[Any]:
    return frozenset(params.items())


class _Correction:
    """Beliefs about the log ratio of each candidate: y = design @ weights + its own residual.

    Weights and residuals are Gaussian about 0, with the prior's widths times one unknown scale whose
    square follows a scaled inverse chi-squared distribution: the conjugate prior, so conditioning is
    closed form (Gelman et al., Bayesian Data Analysis, 3rd ed., section 14.2), here one observation
    at a time. The marginals, Student's t, are handed out as Gaussians of the same variance.

    A bound (out of memory: at least so much) conditions by moments: what the candidate's Gaussian
    becomes, cut off at the bound, has a mean and a variance, and those are what is taken in (assumed
    density filtering; Minka, "A family of algorithms for approximate Bayesian inference", 2001,
    chapter 3). Its order matters little, but bounds come after all equalities, which set the scale.
    """

    def __init__(self, design: Floats, is_bias: npt.NDArray[np.bool_], prior: _Prior) -> None:
        self._design = design
        self._is_bias = is_bias
        self._residual = np.zeros(len(design))
        """What is known of each candidate's own, before `is_equal`."""
        self._residual_variance = np.full(len(design), prior.residual**2)
        self._mean = np.zeros(design.shape[1])
        self._covariance = np.diag(np.where(is_bias, prior.bias, prior.knob) ** 2)
        self._known: dict[int, float] = {}
        self._num_equal = 0
        self._surprise = 0.0
        """Sum of squared standardized errors of the forecasts: a chi-squared, were the scale 1."""

    def is_equal(self, number: int, value: float) -> None:
        """Take in that the ratio of that candidate is `value`."""
        mean, variance = self._belief(number)
        self._num_equal += 1
        self._surprise += (value - mean) ** 2 / variance
        self._known = {**self._known, number: value}
        self._condition(number, value, 0.0)

    def drift(self, prior: _Prior) -> None:
        """Let everything have changed since by as much, and the residuals stay what they were."""
        scale = self._scale
        residual = np.zeros(len(self._design))
        variance = self._residual_variance * scale
        for number, value in self._known.items():
            residual[number] = value - self._design[number] @ self._mean
            variance[number] = 0.0
        self._residual = residual
        self._residual_variance = variance + prior.residual**2
        widths = np.where(self._is_bias, prior.bias, prior.knob)
        self._covariance = self._covariance * scale + np.diag(widths**2)
        self._known = {}
        self._num_equal, self._surprise = 0, 0.0

    def is_at_least(self, number: int, bound: float) -> None:
        """Take in that the ratio of that candidate is `bound` or more."""
        mean, variance = self._belief(number)
        sd = math.sqrt(variance * self._scale)
        z = (bound - mean) / sd
        # Mills: the ratio of density and tail tends to z + 1/z, before the tail underflows.
        hazard = float(_density(z) / _below(-z)) if z < 30 else z + 1 / z
        shrink = min(max(1 - hazard * (hazard - z), 0.0), 1.0)
        self._condition(number, mean + sd * hazard, shrink * variance)

    def beliefs(self) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the ratio of each candidate."""
        variance = np.einsum("ij,jk,ik->i", self._design, self._covariance, self._design)
        return self._design @ self._mean + self._residual, np.sqrt(
            (variance + self._residual_variance) * self._scale
        )

    @property
    def _scale(self) -> float:
        """Variance of Student's t over the squared widths as they are here."""
        degrees = _DEGREES_OF_FREEDOM + self._num_equal
        return (_DEGREES_OF_FREEDOM + self._surprise) / (degrees - 2)

    def _belief(self, number: int) -> tuple[float, float]:
        """Mean and variance of one candidate's ratio, at scale 1."""
        row = self._design[number]
        return float(row @ self._mean + self._residual[number]), float(
            row @ self._covariance @ row + self._residual_variance[number]
        )

    def _condition(self, number: int, mean: float, variance: float) -> None:
        """Let the ratio of a candidate have these moments, and the weights follow."""
        before, before_variance = self._belief(number)
        shared = self._covariance @ self._design[number]
        gain = shared / before_variance
        self._mean = self._mean + gain * (mean - before)
        self._covariance = self._covariance - np.outer(gain, shared) * (
            1 - variance / before_variance
        )


def _design(
    settings: Sequence[Mapping[str, str | bool | float]],
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """(matrix of candidates x weights, which weights are the bias).

    A column per value of each knob that varies; one from -1 to 1 for a knob that is a number. A
    candidate without the knob has 0 there.
    """
    columns = [np.ones(len(settings))]
    for name in sorted({name for each in settings for name in each}):
        values = [each.get(name) for each in settings]
        known = sorted({value for value in values if value is not None}, key=str)
        if isinstance(known[0], str | bool):
            if len(set(values)) > 1:
                columns += [np.array([float(v == k) for v in values]) for k in known]
            continue
        numbers = np.array([np.nan if v is None else v for v in values], dtype=np.float64)
        low, high = np.nanmin(numbers), np.nanmax(numbers)
        if low < high:
            columns.append(np.nan_to_num((2 * numbers - low - high) / (high - low)))
    design = np.stack(columns, axis=1)
    return design, np.arange(design.shape[1]) == 0


def _density(z: Floats | float) -> Floats:
    """Of the standard Gaussian."""
    density: Floats = np.exp(-np.square(z) / 2) / math.sqrt(2 * math.pi)
    return density


_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _below(z: Floats | float) -> Floats:
    """Probability of the standard Gaussian to be below z."""
    below: Floats = _erfc(-np.asarray(z) / math.sqrt(2)) / 2
    return below
