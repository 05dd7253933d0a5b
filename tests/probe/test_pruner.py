"""The pruner: a trial stops when it cannot come near the best that fits, in any study of speeds."""

from __future__ import annotations

import math

import optuna
import pytest
from optuna.trial import TrialState

from autotune.probe.pruner import SpeedPruner, is_feasible
from autotune.store.predicted_trials import CONSTRAINT


def study_of(pruner: SpeedPruner) -> optuna.Study:
    return optuna.create_study(direction="maximize", pruner=pruner)


def add(
    study: optuna.Study,
    speed: float | None,
    *,
    excess_bytes: float = -1.0,
    state: TrialState = TrialState.COMPLETE,
    evidence: str = "measured",
) -> None:
    study.add_trial(
        optuna.trial.create_trial(
            state=state,
            value=speed,
            constraints={CONSTRAINT: excess_bytes},
            user_attrs={"evidence": evidence},
        )
    )


def is_pruned(study: optuna.Study, *reported: float) -> bool:
    trial = study.ask()
    for step, speed in enumerate(reported, start=1):
        trial.report(speed, step)
    return trial.should_prune()


@pytest.mark.parametrize(
    ("reported", "pruned"),
    [
        ((), False),
        # One step says little.
        ((10.0,), False),
        ((10.0, 10.0), True),
        ((97.9, 97.9), True),
        ((98.1, 97.0), False),
        # The fastest of them bounds the speed, wherever it comes.
        ((99.0, 10.0, 10.0), False),
        ((10.0, 99.0), False),
        ((120.0, 130.0), False),
        ((math.nan, 10.0), False),
        ((math.nan, 10.0, 10.0), True),
    ],
)
def test_what_cannot_reach_the_best_is_pruned(reported: tuple[float, ...], pruned: bool) -> None:
    study = study_of(SpeedPruner())
    add(study, 60.0)
    add(study, 100.0)
    assert is_pruned(study, *reported) == pruned


def test_the_noise_is_what_it_is_told() -> None:
    for noise, pruned in ((0.02, True), (0.2, False)):
        study = study_of(SpeedPruner(noise=noise))
        add(study, 100.0)
        assert is_pruned(study, 90.0, 90.0) == pruned


def test_without_a_best_nothing_is_pruned() -> None:
    study = study_of(SpeedPruner())
    add(study, 100.0, excess_bytes=1.0)
    add(study, 100.0, evidence="predicted")
    add(study, None, state=TrialState.PRUNED)
    add(study, None, state=TrialState.FAIL)
    assert not is_pruned(study, 1.0, 1.0)
    assert SpeedPruner().best_speed(study) is None


def test_what_is_left_out_is_no_rival() -> None:
    study = study_of(SpeedPruner(leave_out={1}))
    add(study, 50.0)
    add(study, 100.0)
    assert not is_pruned(study, 60.0, 60.0)
    assert is_pruned(study, 40.0, 40.0)


def test_a_budget_of_zero_left_is_kept() -> None:
    study = study_of(SpeedPruner())
    add(study, 100.0, excess_bytes=0.0)
    assert is_feasible(study.trials[0])


def test_a_study_that_minimizes_is_refused() -> None:
    study = optuna.create_study(direction="minimize", pruner=SpeedPruner())
    with pytest.raises(ValueError, match="maximizes"):
        is_pruned(study, 1.0, 1.0)


def test_it_works_in_plain_optimize() -> None:
    """Five configurations, the second the fastest that fits: what follows is stopped after two steps."""
    speeds = (80.0, 100.0, 99.0, 90.0, 110.0)
    num_steps: list[int] = []

    def objective(trial: optuna.Trial) -> float:
        speed = speeds[trial.number]
        trial.set_constraint(CONSTRAINT, -1.0)
        for step in range(1, 6):
            trial.report(speed, step)
            if trial.should_prune():
                num_steps.append(step)
                raise optuna.TrialPruned
        num_steps.append(5)
        return speed

    study = study_of(SpeedPruner())
    study.optimize(objective, n_trials=5)
    assert num_steps == [5, 5, 5, 2, 5]
    states = [trial.state for trial in study.trials]
    assert [state is TrialState.PRUNED for state in states] == [False, False, False, True, False]
    assert study.trials[3].intermediate_values == {1: 90.0, 2: 90.0}
