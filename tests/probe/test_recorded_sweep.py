"""The sampler against a sweep of real runs (studies/cpu-sweep, made by validation/cpu_sweep.py)."""

from __future__ import annotations

import sweep

from autotune.records.measurement import Measurement

NUM_SEEDS = 20
MAX_PROBES = 12


def speed(measurement: Measurement) -> float:
    return (measurement.tokens_per_second or 0.0) if measurement.fits else 0.0


def test_the_sweep_is_one_of_real_runs() -> None:
    table = sweep.measured()
    assert len(table) >= 150
    assert {m.outcome for m in table.values()} == {"ok", "oom"}
    assert {m.spec.backend for m in table.values()} == {"cpu"}


def test_memory_was_predicted_within_two_per_cent() -> None:
    errors = []
    for record in sweep.records():
        seen = record["measurement"]["peak_allocated_bytes"]
        if seen is not None:
            errors.append(record["prediction"]["peak_allocated_bytes"] / seen - 1)
    errors.sort(key=abs)
    assert abs(errors[len(errors) // 2]) < 0.02
    assert min(errors) > -0.03


def test_the_best_is_found_in_a_dozen_probes() -> None:
    table = sweep.measured()
    best = max(map(speed, table.values()))
    found = [
        max(map(speed, sweep.search(table, seed=seed, max_probes=MAX_PROBES)))
        for seed in range(NUM_SEEDS)
    ]
    assert sum(each >= 0.98 * best for each in found) >= 18
