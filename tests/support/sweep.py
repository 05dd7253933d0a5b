"""Searches in the recorded sweep of real runs (studies/cpu-sweep, made by validation/cpu_sweep.py)."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.records.measurement import Measurement, measurement_from_dict
from autotune.space.config import TrainConfig

if TYPE_CHECKING:
    from autotune.probe.sampler import Near

FILE = Path(__file__).parents[2] / "studies" / "cpu-sweep" / "sweep.jsonl"
Table = Mapping[TrainConfig, Measurement]


@functools.cache
def records() -> tuple[dict[str, Any], ...]:
    """The records of the sweep, each a `prediction` and a `measurement`."""
    return tuple(json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines())


@functools.cache
def measured() -> Table:
    found = [measurement_from_dict(record["measurement"]) for record in records()]
    return {measurement.config: measurement for measurement in found}


def search(
    table: Table,
    *,
    seed: int,
    max_probes: int,
    near: Mapping[TrainConfig, Near] | None = None,
) -> list[Measurement]:
    """Search in the sweep until the search stops, by itself or at `max_probes`; return what was probed.

    The predictions are the recorded ones; what a probe says is in the table.
    """
    # Cards of a cluster, which import this module, do without.
    import optuna
    from optuna.trial import TrialState

    from autotune.probe.sampler import Candidate, PredictionSampler
    from autotune.store.predicted_trials import CONSTRAINT, parameter_distributions

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    near = near or {}
    study = optuna.create_study(direction="maximize")
    distributions = parameter_distributions(study, list(table))
    configs, candidates = {}, []
    for record in records():
        config = TrainConfig(**record["prediction"]["config"])
        candidate = Candidate.of(
            config,
            distributions,
            tokens_per_second=record["prediction"]["tokens_per_second"],
            peak_device_bytes=record["prediction"]["peak_device_bytes"],
        )
        configs[frozenset(candidate.params.items())] = config
        candidates.append(candidate)
    sampler = PredictionSampler(
        candidates,
        distributions=distributions,
        budget_bytes=next(iter(table.values())).spec.memory_budget_bytes,
        seed=seed,
        near={params: near[config] for params, config in configs.items() if config in near},
    )
    probed: list[Measurement] = []
    while len(probed) < max_probes and not sampler.should_stop(study):
        proposed = sampler.propose(study)
        if proposed is None:
            break
        study.sampler = sampler
        trial = study.ask(sampler.search_space(proposed))
        seen = table[configs[frozenset(proposed.params.items())]]
        assert seen.over_budget_bytes is not None
        trial.set_constraint(CONSTRAINT, float(seen.over_budget_bytes))
        if seen.outcome == "oom":
            study.tell(trial, state=TrialState.PRUNED)
        else:
            study.tell(trial, seen.tokens_per_second)
        probed.append(seen)
    return probed
