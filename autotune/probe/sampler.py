"""An Optuna sampler that spends each probe where an improvement that fits is most likely.

It proposes from a finite list of Candidates, each with a predicted speed and a predicted peak, and none
of them twice. Measurements correct the predictions: log(measured / predicted), of time and of memory,
each follow a Bayesian linear regression on a bias and the knobs of a configuration (Correction), so one
probe tells about every candidate that shares a knob with it. How far to trust the prior's widths is
learnt as well: surprises widen all of them. The acquisition is the probability that a candidate fits
times its expected improvement of the log speed over the best that was measured to fit (Gardner et al.,
"Bayesian Optimization with Inequality Constraints", ICML 2014). What the trials of a study say, and which
candidates are proposed again: autotune.probe.trial_history.

What was measured on the same card with another driver, or other libraries, is where the beliefs begin
(`near`): the weights and the residuals that it teaches, with room for all of them to have changed. It is
no measurement: a candidate with it is proposed as any other, and is not the best before it was measured.

Nothing is kept between calls: a study read from its database goes on where it stopped. With
`study.optimize` the study stops by itself; to ask and tell:

    while not sampler.should_stop(study):
        candidate = sampler.propose(study)
        trial = study.ask(sampler.search_space(candidate))

Where several probes run at once, each that runs is believed to end as predicted, with the corrections so far
("kriging believer": Ginsbourger, Le Riche and Carraro, 2010): what is proposed beside it tells of something
else. Whether a card that is free gets a probe at all (`has_another`), and whether those that run may end
(`should_stop`), goes by what was measured alone.

Not modelled: knobs that act on each other; errors of the micro-step and the optimizer step apart.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import optuna
from optuna.distributions import BaseDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from autotune.probe.correction import Correction, Floats, Prior, below, density, design_of
from autotune.probe.trial_history import History, key_of
from autotune.records.measurement import NOISE
from autotune.space.config import TrainConfig
from autotune.space.knobs import KNOBS

STOP_BELOW = 0.05
"""Chance below which a search stops: no candidate is more likely than this to fit and to be faster by more
than the noise. [judgement] One probe in twenty that pays off is not worth the wait."""

_USUAL_SECONDS = 10.0
"""Seconds of a probe that compiles nothing: what one may bring is weighed by its seconds. [judgement] On an
H200 they took 4 to 15 s, timed steps included."""

# [judgement] The roofline is 35 % too fast for published kernels of an A100 (docs/evidence.md),
# most of it alike for all configurations of a model; of what is left a knob may be a factor of 1.2.
_TIME = Prior(bias=0.35, knob=0.15, residual=0.05)
# [judgement] Peaks of published runs are predicted within 7 % (studies/published-memory): the context's
# size, common to all configurations of a card, and what a knob's kernels and fragments add.
_MEMORY = Prior(bias=0.05, knob=0.03, residual=0.01)

# [judgement] What another driver or library changes: one setting by up to a tenth (a kernel of attention),
# a configuration alone by a few per cent; memory by less (a context, a workspace).
_TIME_DRIFT = Prior(bias=0.05, knob=0.05, residual=0.03)
_MEMORY_DRIFT = Prior(bias=0.02, knob=0.01, residual=0.01)


@dataclass(frozen=True, kw_only=True, slots=True)
class Near:
    """A candidate's probe on the same card, with another driver or other libraries."""

    tokens_per_second: float | None
    """Measured speed; None where it did not run."""
    peak_device_bytes: int | None
    least_bytes: int | None
    """Bytes that it needs at least, because it ran out of memory; None where it did not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A configuration that may be proposed, and its predicted speed and memory."""

    params: Mapping[str, Any]
    """Parameters as Optuna's trials hold them. They tell candidates apart."""
    knobs: Mapping[str, str | bool | float]
    """Settings for which corrections are learnt: text and bools by value, numbers as a slope."""
    tokens_per_second: float
    """Predicted speed."""
    peak_device_bytes: int
    """Predicted peak on the device."""
    compile_seconds: float = 0.0
    """Predicted seconds that a probe compiles for, before its steps are timed."""

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        names: Iterable[str],
        *,
        tokens_per_second: float,
        peak_device_bytes: int,
        compile_seconds: float = 0.0,
    ) -> Candidate:
        """Make a Candidate from a TrainConfig; `names` are the fields that the study has as parameters."""
        settings = {name: getattr(config, name) for name in names}
        return cls(
            params={name: value for name, value in settings.items() if value is not None},
            knobs=knobs(config),
            tokens_per_second=tokens_per_second,
            peak_device_bytes=peak_device_bytes,
            compile_seconds=compile_seconds,
        )


def knobs(config: TrainConfig) -> dict[str, str | bool | float]:
    """The settings of a configuration that may bend its prediction, as Candidate.knobs."""
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
        self._numbers = {key_of(c.params): i for i, c in enumerate(self._candidates)}
        if len(self._numbers) < len(listed):
            raise ValueError("Two candidates have the same parameters.")
        self._distributions = dict(distributions)
        self._log_budget = math.log(budget_bytes)
        self._budget_bytes = budget_bytes
        self._noise = noise
        self._leave_out = leave_out
        self._design, self._is_bias = design_of([c.knobs for c in self._candidates])
        self._log_speed = np.log([c.tokens_per_second for c in self._candidates])
        self._log_bytes = np.log([c.peak_device_bytes for c in self._candidates])
        self._seconds = np.array([_USUAL_SECONDS + c.compile_seconds for c in self._candidates])
        self._is_warm = False
        self._time = Correction(self._design, self._is_bias, _TIME)
        self._memory = Correction(self._design, self._is_bias, _MEMORY)
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
        """The candidate to probe next; None when all have been probed."""
        return self._next(self._history(study))

    def should_stop(self, study: optuna.Study) -> bool:
        """Whether no candidate is likely to fit and to be faster by more than the noise.

        Those that are probed at this moment count: where this is true their probes are not worth their end.
        """
        return self._is_over(self._history(study))

    def has_another(self, study: optuna.Study) -> bool:
        """Whether a candidate that is not being probed is likely enough to be worth it."""
        history = self._history(study)
        return self._is_likely(history, self._free(history))

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

    def _history(self, study: optuna.Study, ended: FrozenTrial | None = None) -> History:
        """The history of the study, whose own record of the trial `ended` is out of date."""
        if study.direction != StudyDirection.MAXIMIZE:
            raise ValueError("A study of speeds maximizes them.")
        trials = study.get_trials(deepcopy=False)
        if ended is not None:
            trials = [ended if trial.number == ended.number else trial for trial in trials]
        told = (trial for trial in trials if trial.number not in self._leave_out)
        return History.of(told, self._numbers)

    def _next(self, history: History) -> Candidate | None:
        history = self._believed(history)
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
            worth = chance * sd * (density(z) + z * below(z))
        worth = worth / self._seconds
        return self._candidates[int(free[worth[free].argmax()])]

    def _is_over(self, history: History) -> bool:
        open_ones = np.union1d(
            self._free(history), np.array(sorted(history.running), dtype=np.intp)
        )
        return not self._is_likely(history, open_ones)

    def _is_likely(self, history: History, numbers: npt.NDArray[np.intp]) -> bool:
        """Whether one of these is likely enough to fit and to be faster than what was measured."""
        if not numbers.size:
            return False
        promise = self._chance_to_fit(history)
        if history.best_speed is not None:
            log_speed, sd = self._speed(history)
            target = math.log(history.best_speed * (1 + self._noise))
            promise = promise * below((log_speed - target) / sd)
        return bool(promise[numbers].max() >= STOP_BELOW)

    def _believed(self, history: History) -> History:
        """The history as it will be if all that run end as is expected of them by now."""
        if not history.running:
            return history
        log_speed, _ = self._speed(history)
        chance = self._chance_to_fit(history)
        speeds = {number: math.exp(log_speed[number]) for number in history.running}
        fitting = [speed for number, speed in speeds.items() if chance[number] >= 0.5]
        return dataclasses.replace(
            history,
            speeds=history.speeds | speeds,
            best_speed=max([*fitting, history.best_speed or 0.0]) or None,
        )

    def _free(self, history: History) -> npt.NDArray[np.intp]:
        """Numbers of the candidates that may be proposed."""
        free = np.ones(len(self._candidates), dtype=bool)
        free[list(history.tried)] = False
        return np.flatnonzero(free)

    def _speed(self, history: History) -> tuple[Floats, Floats]:
        """Mean and standard deviation of each candidate's log speed."""
        # log(measured / predicted) of a time is log(predicted / measured) of its speed.
        time = copy.copy(self._time)
        for number, speed in history.speeds.items():
            time.is_equal(number, self._log_speed[number] - math.log(speed))
        for number, speed in history.most_speeds.items():
            time.is_at_least(number, self._log_speed[number] - math.log(speed))
        mean, sd = time.beliefs()
        return self._log_speed - mean, sd

    def _chance_to_fit(self, history: History) -> Floats:
        """Probability of each candidate to stay within the budget."""
        memory = copy.copy(self._memory)
        for number, excess_bytes in history.peaks.items():
            memory.is_equal(number, self._excess(number, excess_bytes))
        for number, excess_bytes in history.least_excesses.items():
            memory.is_at_least(number, self._excess(number, excess_bytes))
        mean, sd = memory.beliefs()
        return below((self._log_budget - self._log_bytes - mean) / sd)

    def _excess(self, number: int, excess_bytes: float) -> float:
        """The log(measured / predicted) of a candidate's peak that passed the budget by so much."""
        peak_bytes = max(self._budget_bytes + excess_bytes, 1.0)
        return float(math.log(peak_bytes) - self._log_bytes[number])
