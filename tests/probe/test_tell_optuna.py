"""What a study is told of a probe while it runs; what it is told in the end is in test_probing.py."""

from __future__ import annotations

import optuna
from optuna.trial import FrozenTrial

from autotune.probe.pruner import SpeedPruner
from autotune.probe.tell_optuna import watched
from autotune.store.predicted_trials import CONSTRAINT


class After(optuna.pruners.BasePruner):
    """Another's pruner: everything is over after so many steps."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        return len(trial.intermediate_values) >= self._num_steps


def test_each_step_is_reported_and_the_pruner_asked() -> None:
    study = optuna.create_study(direction="maximize", pruner=SpeedPruner())
    study.add_trial(optuna.trial.create_trial(value=200.0, constraints={CONSTRAINT: 0.0}))
    trial = study.ask()
    watch = watched(study, trial)
    assert watch(1, 120.0) == ""
    assert watch(2, 122.0) == "at most 61 % of the best"
    assert study.trials[1].intermediate_values == {1: 120.0, 2: 122.0}


def test_any_pruner_of_the_study_decides() -> None:
    study = optuna.create_study(direction="maximize", pruner=After(3))
    watch = watched(study, study.ask())
    assert [watch(step, 1234.0) for step in (1, 2)] == ["", ""]
    assert watch(3, 1234.0) == "pruned at 1,234 tokens/s"
