"""What Optuna is told of a probe: its speed while it runs, and what became of it (DESIGN section 5)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import optuna
from optuna.trial import TrialState

from autotune.pruner import SpeedPruner
from autotune.results import Estimate, Measurement
from autotune.sampler import INTERRUPTED
from autotune.store import CONSTRAINT

Watch = Callable[[int, float], str]
"""(timed steps, tokens per second at most) -> why the probe should stop; empty to go on."""


def watched(study: optuna.Study, trial: optuna.Trial) -> Watch:
    """Reports each step of a probe to its trial, and has the study's pruner say when it is enough."""
    pruner = study.pruner
    best_speed = pruner.best_speed(study) if isinstance(pruner, SpeedPruner) else None

    def watch(step: int, tokens_per_second_at_most: float) -> str:
        trial.report(tokens_per_second_at_most, step)
        if not trial.should_prune():
            return ""
        if best_speed is None:
            return f"pruned at {tokens_per_second_at_most:,.0f} tokens/s"
        return f"at most {100 * tokens_per_second_at_most / best_speed:.0f} % of the best"

    return watch


def tell(
    study: optuna.Study,
    trial: optuna.Trial,
    measurement: Measurement,
    predicted: Estimate | None = None,
) -> None:
    """DESIGN section 5: what becomes of each outcome. What was predicted is kept beside it."""
    attributes: dict[str, object] = {
        "evidence": "measured",
        "config": measurement.config.to_dict(),
        "outcome": measurement.outcome,
        "message": measurement.message,
        "measurement": measurement.to_dict(),
    }
    if predicted is not None:
        attributes["predicted_tokens_per_second"] = predicted.tokens_per_second
        attributes["predicted_peak_device_bytes"] = predicted.peak_device_bytes
    for name, value in attributes.items():
        trial.set_user_attr(name, value)
    over_bytes = measurement.over_budget_bytes
    if over_bytes is None:
        study.tell(trial, state=TrialState.FAIL)
        return
    trial.set_constraint(CONSTRAINT, float(over_bytes))
    if measurement.outcome == "ok":
        study.tell(trial, measurement.tokens_per_second)
    else:
        study.tell(trial, state=TrialState.PRUNED)


@contextlib.contextmanager
def told_when_interrupted(study: optuna.Study, trial: optuna.Trial) -> Iterator[None]:
    """No trial stays open when a probe is broken off."""
    try:
        yield
    except BaseException:
        trial.set_user_attr("outcome", INTERRUPTED)
        study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
        raise


def close_interrupted(study: optuna.Study) -> None:
    """Trials that a killed process left running: told so, and proposed again."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        optuna.trial.Trial(study, trial._trial_id).set_user_attr("outcome", INTERRUPTED)
        study.tell(trial.number, state=TrialState.FAIL)
