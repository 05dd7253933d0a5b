"""An Optuna pruner for speeds: stops a trial that cannot come near the best that fits any more.

A trial reports tokens per second while it runs, a value per timed step: of that step, or the most that
the steps so far allow. The fastest of them is taken for the upper bound of its speed, because what
disturbs a step only slows it down. Whether the bound is too low is read off the values that the study
has stored, so that it works in plain `study.optimize` as well:

    study = optuna.create_study(direction="maximize", pruner=SpeedPruner())
    ...
    trial.report(tokens_per_second, step)
    if trial.should_prune():
        raise optuna.TrialPruned
"""

from __future__ import annotations

import math
from collections.abc import Collection

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from autotune.records.measurement import NOISE

MIN_STEPS = 2
"""Steps that are reported before a trial is called too slow: the first timed step may have been disturbed."""


class SpeedPruner(optuna.pruners.BasePruner):
    """Prunes where the upper bound of a speed is below the best feasible one by more than the noise.

    `noise`: speeds that differ by less are tied. `leave_out`: numbers of trials that do not count as
    the best (refused since, or measured elsewhere); it may grow.
    """

    def __init__(self, *, noise: float = NOISE, leave_out: Collection[int] = ()) -> None:
        self._noise = noise
        self._leave_out = leave_out

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Whether to stop the trial: its fastest step is slower than the best trial by more than the noise.

        False before MIN_STEPS reports, and before there is a best. Raises ValueError for a study that does
        not maximize.
        """
        if study.direction != StudyDirection.MAXIMIZE:
            raise ValueError("A study of speeds maximizes them.")
        speeds = [v for v in trial.intermediate_values.values() if not math.isnan(v)]
        if len(speeds) < MIN_STEPS:
            return False
        best = self.best_speed(study)
        return best is not None and max(speeds) < best * (1 - self._noise)

    def best_speed(self, study: optuna.Study) -> float | None:
        """Tokens per second of the fastest trial that fits; None before there is one."""
        complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        speeds = (t.value for t in complete if t.number not in self._leave_out and is_feasible(t))
        return max((speed for speed in speeds if speed is not None), default=None)


def is_feasible(trial: FrozenTrial) -> bool:
    """Whether a complete trial was measured, and kept all its constraints."""
    is_predicted = trial.user_attrs.get("evidence") == "predicted"
    return not is_predicted and all(value <= 0 for value in trial.constraints.values())
