"""Reports of a probe to Optuna: its speed while it runs, and its outcome.

The table of outcomes is in docs/ARCHITECTURE.md, "What becomes of a trial".
"""

from __future__ import annotations

from collections.abc import Callable

import optuna
from optuna.trial import TrialState

from autotune.probe.pruner import SpeedPruner
from autotune.records.estimate import Estimate
from autotune.records.measurement import Measurement
from autotune.store.predicted_trials import CONSTRAINT, OVER_BUDGET

Watch = Callable[[int, float], str]
"""A function (timed steps, tokens per second at most) -> why the probe should stop; empty to go on."""


def watched(study: optuna.Study, trial: optuna.Trial) -> Watch:
    """A Watch that reports each step to the trial and asks the study's pruner whether to go on."""
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


class Failed(Exception):
    """The outcome of a trial that Optuna is to hold as FAIL."""


def ended(
    trial: optuna.Trial, measurement: Measurement, predicted: Estimate | None = None
) -> float:
    """Keep a measurement with its trial, and return the trial's value.

    The rules are in docs/ARCHITECTURE.md, "What becomes of a trial". What was predicted is kept
    beside it. Raises TrialPruned, or Failed, for outcomes without a value.
    """
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
        raise Failed(measurement.message)
    trial.set_constraint(CONSTRAINT, float(over_bytes))
    trial.set_user_attr(OVER_BUDGET, over_bytes)
    if measurement.outcome != "ok":
        raise optuna.TrialPruned(measurement.message)
    assert measurement.tokens_per_second is not None
    return measurement.tokens_per_second


def tell(
    study: optuna.Study,
    trial: optuna.Trial,
    measurement: Measurement,
    predicted: Estimate | None = None,
) -> None:
    """Tell the study of a measurement, for callers that ask for trials by hand."""
    try:
        study.tell(trial, ended(trial, measurement, predicted))
    except optuna.TrialPruned:
        study.tell(trial, state=TrialState.PRUNED)
    except Failed:
        study.tell(trial, state=TrialState.FAIL)
