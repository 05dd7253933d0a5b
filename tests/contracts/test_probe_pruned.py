"""A real probe on the CPU, followed step by step through Optuna and stopped part-way by its pruner."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import here
import optuna
import pytest
from optuna.trial import TrialState
from optuna_storage import unpooled

from autotune.catalogue.models import resolve
from autotune.common.units import MIB
from autotune.probe.fleet.one_card import OneCard
from autotune.probe.pruner import SpeedPruner
from autotune.probe.run_one import Prober
from autotune.probe.tell_optuna import tell, watched
from autotune.records.measurement import ProbeSpec
from autotune.space.config import TrainConfig
from autotune.store.predicted_trials import CONSTRAINT
from autotune.store.probe_table import open_probes

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-llama.json"
CONFIG = TrainConfig(
    method="full",
    micro_batch_size=8,
    gradient_accumulation_steps=2,
    sequence_length=128,
    precision="fp32",
    optimizer="adamw_torch_fused",
    attention="eager",
)
SPEC = ProbeSpec(
    task="causal-lm",
    backend="cpu",
    memory_budget_bytes=200 * MIB,
    max_seconds=60.0,
    target_spread=0.0,
    max_steps=400,
)
"""20 s at 50 ms a step, unless it is stopped."""


@pytest.fixture(scope="module")
def prober(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prober]:
    url = f"sqlite:///{tmp_path_factory.mktemp('pruned')}/probes.db"
    with open_probes(url) as table:
        yield Prober(OneCard(here.workers), table, resolve(str(EXAMPLE)), SPEC)


def probed(prober: Prober, url: str, best_tokens_per_second: float) -> optuna.trial.FrozenTrial:
    """The trial of a probe in a study whose best has that speed, as the database has it."""
    study = optuna.create_study(
        direction="maximize", storage=unpooled(url), study_name="s", pruner=SpeedPruner()
    )
    study.add_trial(
        optuna.trial.create_trial(value=best_tokens_per_second, constraints={CONSTRAINT: -1.0})
    )
    trial = study.ask()
    assert prober.begin(CONFIG, watch=watched(study, trial)) is None
    _, measurement = prober.wait()
    tell(study, trial, measurement)
    return optuna.load_study(study_name="s", storage=unpooled(url)).trials[1]


def test_a_hopeless_probe_is_pruned_while_it_runs(
    prober: Prober, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    trial = probed(prober, f"sqlite:///{tmp_path}/study.db", 1e9)
    assert trial.state is TrialState.PRUNED
    message = trial.user_attrs["message"]
    assert message.startswith("stopped after ")
    assert message.endswith(" steps: at most 0 % of the best")
    # Every step that it timed is there, and it was stopped long before the last.
    record = trial.user_attrs["measurement"]
    assert record["outcome"] == "slow"
    assert list(trial.intermediate_values) == list(range(1, record["num_steps"] + 1))
    assert 2 <= record["num_steps"] < 200
    speeds = list(trial.intermediate_values.values())
    assert speeds == sorted(speeds)
    # Its memory is known all the same.
    assert record["peak_reserved_bytes"] > MIB
    assert trial.constraints[CONSTRAINT] == record["peak_reserved_bytes"] - 200 * MIB
    assert not list((tmp_path / "temporary").iterdir())


def test_a_probe_that_is_fast_enough_runs_to_its_end(
    prober: Prober, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prober, "spec", dataclasses.replace(SPEC, max_steps=6))
    trial = probed(prober, f"sqlite:///{tmp_path}/study.db", 1.0)
    assert trial.state is TrialState.COMPLETE
    assert set(trial.intermediate_values) == {1, 2, 3, 4, 5, 6}
    # The fastest step bounds what all of them took, as the medians of their parts tell it.
    assert trial.value is not None
    assert max(trial.intermediate_values.values()) >= 0.98 * trial.value
