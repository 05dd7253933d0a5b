"""The history of a study's trials, candidate by candidate.

A trial whose user attribute `evidence` is "predicted" says nothing:

| trial    | constraint `memory` | time                                    | memory                   |
|----------|---------------------|-----------------------------------------|--------------------------|
| COMPLETE | peak - budget       | its value, tokens per second            | peak                     |
| PRUNED   | the excess, > 0     | at most the speed last reported, if any | at least budget + excess |
| PRUNED   | <= 0, or none       | the same                                | peak, if it is there     |
| FAIL     | -                   | nothing                                 | nothing                  |

A COMPLETE trial fits when all its constraints are at most 0, as everywhere in Optuna. A candidate that failed
is proposed once more, and again for each failure whose user attribute `outcome` is INTERRUPTED. One without
an `outcome`, whose search was killed, is proposed again as well, until MAX_ABANDONED have gone that way. What
a killed search left RUNNING is not proposed until it is told to have failed (autotune.probe.trials).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from autotune.probe.pruner import is_feasible
from autotune.store.predicted_trials import CONSTRAINT

INTERRUPTED = "interrupted"
"""User attribute `outcome` of a FAIL trial that was killed from outside, through no fault of its own."""
MAX_ABANDONED = 5
"""How many probes of a candidate may be abandoned before it is given up. [judgement] Machines are lost by
chance; a probe that so many did not survive is what killed them."""
_NEVER_FAIL = ("ok", "oom")
"""Outcomes of which a FAIL trial was abandoned while its result was told (autotune.probe.tell_optuna)."""
MAX_ATTEMPTS = 2
"""How often a candidate is tried: one that failed is tried once again.

Source: docs/ARCHITECTURE.md, "What becomes of a trial"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The trials of a study by number of candidate."""

    tried: set[int]
    """Candidates not to be proposed again: finished, running, or failed too often."""
    running: set[int]
    """Candidates that are probed at this moment."""
    speeds: dict[int, float]
    """Measured speeds in tokens per second."""
    most_speeds: dict[int, float]
    """Upper bounds, in tokens per second, of candidates that were stopped part-way."""
    peaks: dict[int, float]
    """Measured peak minus the budget, in bytes."""
    least_excesses: dict[int, float]
    """Bytes over the budget, at least, of candidates that ran out of memory."""
    best_speed: float | None
    """Speed of the fastest trial that fits, candidate or not; None without one."""

    @classmethod
    def of(cls, trials: Iterable[FrozenTrial], numbers: Mapping[frozenset[Any], int]) -> History:
        history: dict[str, dict[int, float]] = {
            name: {} for name in ("speeds", "most_speeds", "peaks", "least_excesses")
        }
        tried: set[int] = set()
        running: set[int] = set()
        num_failures: Counter[int] = Counter()
        num_abandoned: Counter[int] = Counter()
        best_speed: float | None = None
        for trial in trials:
            if trial.user_attrs.get("evidence") == "predicted":
                continue
            if trial.state == TrialState.COMPLETE and is_feasible(trial):
                assert trial.value is not None
                best_speed = max(trial.value, best_speed or 0.0)
            number = numbers.get(key_of(trial.params))
            if number is None:
                continue
            if trial.state == TrialState.FAIL:
                outcome = trial.user_attrs.get("outcome")
                is_abandoned = outcome in (None, *_NEVER_FAIL)
                num_abandoned[number] += is_abandoned
                num_failures[number] += not is_abandoned and outcome != INTERRUPTED
                continue
            tried.add(number)
            if trial.state == TrialState.RUNNING:
                running.add(number)
            for name, value in _said(trial):
                history[name][number] = value
        tried.update(n for n, failures in num_failures.items() if failures >= MAX_ATTEMPTS)
        tried.update(n for n, times in num_abandoned.items() if times >= MAX_ABANDONED)
        return cls(tried=tried, running=running, best_speed=best_speed, **history)


def _said(trial: FrozenTrial) -> Iterator[tuple[str, float]]:
    """The figures of one trial, as (field of History, value); one that is no size or speed is left out."""
    is_complete = trial.state == TrialState.COMPLETE
    last = None if trial.last_step is None else trial.intermediate_values[trial.last_step]
    speed = trial.value if is_complete else last
    if trial.state.is_finished() and speed is not None and 0 < speed < math.inf:
        yield "speeds" if is_complete else "most_speeds", speed
    excess_bytes = trial.constraints.get(CONSTRAINT)
    if trial.state.is_finished() and excess_bytes is not None and math.isfinite(excess_bytes):
        yield "peaks" if is_complete or excess_bytes <= 0 else "least_excesses", excess_bytes


def key_of(params: Mapping[str, Any]) -> frozenset[Any]:
    return frozenset(params.items())
