"""The sampler against a sweep of real runs (studies/cpu-sweep, made by benchmarks/cpu_sweep.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from autotune.config import TrainConfig
from autotune.results import Measurement, measurement_from_dict
from autotune.sampler import Candidate, PredictionSampler
from autotune.store import CONSTRAINT, parameter_distributions

RECORDS = Path(__file__).parents[1] / "studies" / "cpu-sweep" / "sweep.jsonl"
NUM_SEEDS = 20
MAX_PROBES = 12


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def table(records: list[dict[str, Any]]) -> dict[TrainConfig, Measurement]:
    measurements = [measurement_from_dict(record["measurement"]) for record in records]
    return {m.config: m for m in measurements}


def speed(measurement: Measurement) -> float:
    return (measurement.tokens_per_second or 0.0) if measurement.fits else 0.0


def best_found(
    records: list[dict[str, Any]], table: dict[TrainConfig, Measurement], seed: int
) -> float:
    """Speed of the fastest that fits among the first probes of a search."""
    budget_bytes = next(iter(table.values())).spec.memory_budget_bytes
    study = optuna.create_study(direction="maximize")
    distributions = parameter_distributions(study, list(table))
    configs: dict[frozenset[Any], TrainConfig] = {}
    candidates = []
    for record in records:
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
        candidates, distributions=distributions, budget_bytes=budget_bytes, seed=seed
    )
    found = 0.0
    for _ in range(MAX_PROBES):
        proposed = sampler.propose(study)
        if proposed is None or sampler.should_stop(study):
            break
        study.sampler = sampler
        trial = study.ask(sampler.search_space(proposed))
        measurement = table[configs[frozenset(proposed.params.items())]]
        over_bytes = measurement.over_budget_bytes
        assert over_bytes is not None
        trial.set_constraint(CONSTRAINT, float(over_bytes))
        if measurement.outcome == "oom":
            study.tell(trial, state=TrialState.PRUNED)
            continue
        study.tell(trial, measurement.tokens_per_second)
        found = max(found, speed(measurement))
    return found


def test_the_sweep_is_one_of_real_runs(table: dict[TrainConfig, Measurement]) -> None:
    assert len(table) >= 150
    outcomes = {m.outcome for m in table.values()}
    assert outcomes == {"ok", "oom"}
    assert {m.spec.backend for m in table.values()} == {"cpu"}


def test_memory_was_predicted_within_two_per_cent(records: list[dict[str, Any]]) -> None:
    errors = []
    for record in records:
        seen = record["measurement"]["peak_allocated_bytes"]
        if seen is not None:
            errors.append(record["prediction"]["peak_allocated_bytes"] / seen - 1)
    errors.sort(key=abs)
    assert abs(errors[len(errors) // 2]) < 0.02
    assert min(errors) > -0.03


def test_the_best_is_found_in_a_dozen_probes(
    records: list[dict[str, Any]], table: dict[TrainConfig, Measurement]
) -> None:
    best = max(map(speed, table.values()))
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    reached = [best_found(records, table, seed) >= 0.98 * best for seed in range(NUM_SEEDS)]
    assert sum(reached) >= 18
