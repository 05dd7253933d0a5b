"""What a study is told of a probe, while it runs and in the end."""

from __future__ import annotations

from typing import Any

import answers
import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from autotune.common.units import GIB
from autotune.probe.pruner import SpeedPruner
from autotune.probe.tell_optuna import tell, watched
from autotune.records.measurement import measurement_from_dict
from autotune.store.predicted_trials import CONSTRAINT, OVER_BUDGET


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


@pytest.mark.parametrize(
    ("changes", "state", "value", "over_bytes"),
    [
        ({}, TrialState.COMPLETE, 3276.8, 10 * GIB - answers.BUDGET_BYTES),
        (
            {"peak_reserved_bytes": 12 * GIB},
            TrialState.COMPLETE,
            3276.8,
            13 * GIB - answers.BUDGET_BYTES,
        ),
        ({"outcome": "slow"}, TrialState.PRUNED, None, 10 * GIB - answers.BUDGET_BYTES),
        (
            {"outcome": "oom", "excess_bytes": 7, "peak_reserved_bytes": None},
            TrialState.PRUNED,
            None,
            7,
        ),
        ({"outcome": "crashed", "message": "it died"}, TrialState.FAIL, None, None),
        ({"outcome": "timeout", "message": "too long"}, TrialState.FAIL, None, None),
    ],
)
def test_what_becomes_of_a_trial(
    changes: dict[str, Any], state: TrialState, value: float | None, over_bytes: int | None
) -> None:
    """32 x 1024 tokens in 10 s; 10 GiB of 12 GB."""
    study = optuna.create_study(direction="maximize")
    seen = answers.measurement(**changes)
    tell(study, study.ask(), seen, answers.estimate())
    (trial,) = study.trials
    assert (trial.state, trial.value) == (state, value)
    assert trial.constraints.get(CONSTRAINT) == over_bytes
    assert trial.user_attrs.get(OVER_BUDGET) == over_bytes
    assert trial.user_attrs["evidence"] == "measured"
    assert trial.user_attrs["outcome"] == seen.outcome
    assert trial.user_attrs["message"] == seen.message
    assert trial.user_attrs["predicted_tokens_per_second"] == 4096.0
    assert trial.user_attrs["predicted_peak_device_bytes"] == 10 * GIB
    assert measurement_from_dict(trial.user_attrs["measurement"]) == seen
    tell(study, study.ask(), seen)
    assert "predicted_tokens_per_second" not in study.trials[1].user_attrs
