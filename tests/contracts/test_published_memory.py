"""Predicted memory of whole runs against published figures, as far as it is reached.

The figures are in studies/published-memory/, the benchmark is validation/published_memory.py. The runs of
the material that this project started from have counts and state bytes that are exact.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from typing import Any

import pytest

from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.models import resolve
from autotune.common.units import GIB
from autotune.memory.traces import Trace
from autotune.predict.estimator import Estimator
from autotune.records.estimate import Estimate, TraceSpec
from autotune.space.config import TrainConfig
from autotune.space.optimizers import OPTIMIZERS, state_bytes
from autotune.worker.build.model import load_config
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.step import trace_step
from validation import published_memory
from validation.published import blind

MEDIAN_ERROR = {"peft": 0.0033, "others": 0.0013}
LARGEST_ERROR = {"peft": 0.016, "kbook": 0.011, "rasbt": 0.003, "hfperf": 0.019}
"""Of each source's rows."""
LARGEST_STEP_END_ERROR = 0.0013
UNEXPLAINED = {"peft-043": (-0.057, -0.055), "peft-015": (0.016, 0.018)}
WRONG_VERDICTS = {"hf4bit-009", "hf4bit-010", "hf4bit-012"}
"""Runs that ran out of memory and are predicted to fit. The first two are 0.4 and 0.5 GiB below the card's
capacity, in 2023, when a process held more of a T4 outside torch's allocator than the 136 MiB of today."""

PEFT_HERE = ("peft-001", "peft-015", "peft-033", "peft-035", "peft-051")
"""Those that are predicted here; the others' predictions are read from the study's record."""


@pytest.fixture(scope="module")
def rows() -> list[Any]:
    ids = [name for name in published_memory.plans() if not name.startswith("peft-")]
    predicted: list[Any] = published_memory.predict({*ids, *PEFT_HERE})
    return predicted


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    text = (published_memory.STUDY / "rows.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def test_every_row_is_predicted_or_left_out_for_a_reason() -> None:
    table, plans = published_memory.published(), published_memory.plans()
    assert len(table) == 161
    assert set(plans) <= set(table)
    for name in table:
        assert name in plans or published_memory.why_left_out(published_memory.STUDY, name)


def test_errors_of_the_published_figures(rows: list[Any], record: dict[str, Any]) -> None:
    assert len(rows) == 24 + len(PEFT_HERE)
    recorded = {row["id"]: row for row in record["rows"]}
    assert len(recorded) == 24 + 30
    errors = {name: row["error"] for name, row in recorded.items() if not row["is_used"]}
    errors |= {row.id: row.error for row in rows}
    for name, error in errors.items():
        source = name.partition("-")[0]
        lowest, highest = UNEXPLAINED.get(name, (-LARGEST_ERROR[source], LARGEST_ERROR[source]))
        assert lowest <= error <= highest, name
    of_peft = [abs(error) for name, error in errors.items() if name.startswith("peft-")]
    others = [abs(error) for name, error in errors.items() if not name.startswith("peft-")]
    assert statistics.median(of_peft) <= MEDIAN_ERROR["peft"]
    assert statistics.median(others) <= MEDIAN_ERROR["others"]


def test_the_record_is_what_is_predicted_here(rows: list[Any], record: dict[str, Any]) -> None:
    recorded = {row["id"]: row for row in record["rows"]}
    for row in rows:
        for name in ("published_bytes", "as_trainer_bytes", "as_program_bytes"):
            assert getattr(row, name) == pytest.approx(recorded[row.id][name], rel=0.001), row.id


def test_memory_between_the_steps_of_pefts_runs(record: dict[str, Any]) -> None:
    recorded = {row["id"]: row for row in record["step_ends"]}
    assert len(recorded) == 30
    for name, row in recorded.items():
        assert abs(row["error"]) <= LARGEST_STEP_END_ERROR, name
    here = published_memory.predict_step_ends({"peft-001", "peft-051"})
    assert [row.id for row in here] == ["peft-001", "peft-051"]
    for row in here:
        assert row.as_program_bytes == pytest.approx(recorded[row.id]["as_program_bytes"], rel=1e-4)


def test_the_lengths_of_pefts_batches_are_solved_from_one_row() -> None:
    (name,) = (name for name, plan in published_memory.plans().items() if plan.is_used)
    plan, row = published_memory.plans()[name], published_memory.published()[name]
    peak = round(float(row["mem_value"]) * GIB)

    def peak_at(tokens: int) -> int:
        config = dataclasses.replace(plan.config, sequence_length=tokens)
        size: int = published_memory.loop_bytes(
            dataclasses.replace(plan, config=config), plan.program
        )
        return size

    longest, mean = plan.config.sequence_length, plan.mean_tokens
    assert mean is not None
    assert peak_at(longest) <= peak < peak_at(longest + 1)
    figure = published_memory.step_end_figure(row)
    distances = {
        tokens: abs(published_memory.step_end_bytes(plan, tokens) - figure)
        for tokens in (mean - 1, mean, mean + 1)
    }
    assert min(distances, key=distances.__getitem__) == mean


@pytest.mark.parametrize("name", PEFT_HERE)
def test_pefts_runs_train_as_many_parameters_as_published(name: str) -> None:
    plan = published_memory.plans()[name]
    found = re.search(r"trainable (\d+)", published_memory.published()[name]["notes"])
    assert found
    specs = published_memory.trainable(plan)
    assert sum(spec.num_elements for spec in specs) == int(found[1])


def test_verdicts() -> None:
    labels = published_memory.predict_labels()
    assert len(labels) == 10
    wrong = {label.id for label in labels if label.predicted_fits != label.published_fits}
    assert wrong == WRONG_VERDICTS


@pytest.mark.parametrize("name", ["peft-033", "rasbt-004", "hfperf-002", "hfperf-007"])
def test_the_loop_of_a_trainer_is_the_estimate(name: str) -> None:
    plan = published_memory.plans()[name]
    trainer = published_memory.loop_bytes(plan, published_memory.Program())
    # Beside what the Trainer keeps, and its third step.
    expected = published_memory.estimate(plan).peak_reserved_bytes
    assert trainer == pytest.approx(expected, rel=1e-3)


POLYGLOT = {
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "sequence_length": 256,
    "precision": "bf16-true",  # the runs are float16: the same bytes
    "optimizer": "adamw_torch",
    "attention": "eager",
}


def _trace(config: TrainConfig) -> Trace:
    gpu = find_gpu("T4")
    assert gpu.compute_capability is not None
    assert gpu.cublas_workspace_bytes is not None
    answer = trace_step(
        load_config(resolve("EleutherAI/polyglot-ko-1.3b").config),
        "causal-lm",
        TraceSpec.of(config),
        sequence_length=config.sequence_length,
        device=Device(
            compute_capability=gpu.compute_capability,
            cublas_workspace_bytes=gpu.cublas_workspace_bytes,
        ),
    )
    return Trace(answer)


def _estimate(config: TrainConfig) -> Estimate:
    traces = {TraceSpec.of(config): _trace(config)}
    return Estimator(traces, find_gpu("T4"), memory_budget_bytes=15 * GIB).estimate(config)


def _gib(size_bytes: int) -> float:
    """As the notebook prints it."""
    return round(size_bytes / GIB, 3)


def test_full_fine_tuning_of_polyglot() -> None:
    predicted = _estimate(TrainConfig(method="full", **POLYGLOT))
    assert predicted.parameters.total == predicted.parameters.trainable == 1_331_810_304
    assert _gib(predicted.state.parameters_bytes) == 2.481
    assert _gib(predicted.state.gradients_bytes) == 2.481
    assert _gib(predicted.state.optimizer_state_bytes) == 4.961


def test_lora_of_polyglot() -> None:
    """Published in 16 bits; PEFT has cast 16-bit adapters to float32 since."""
    config = TrainConfig(method="lora", lora_rank=8, lora_targets="query_key_value", **POLYGLOT)
    predicted = _estimate(config)
    assert predicted.parameters.trainable == 1_572_864
    assert predicted.parameters.total == 1_333_383_168
    specs = _trace(config).trainable(8)
    assert {spec.dtype for spec in specs} == {"float32"}
    halves = [dataclasses.replace(spec, dtype="float16") for spec in specs]
    assert _gib(sum(spec.size_bytes for spec in halves)) == 0.003
    assert _gib(state_bytes("adamw_torch", halves)[0]) == 0.006
    assert predicted.state.optimizer_state_bytes == 2 * state_bytes("adamw_torch", halves)[0]


def test_qlora_of_polyglot() -> None:
    config = TrainConfig(
        method="qlora",
        quantization="nf4-double",
        lora_rank=8,
        lora_targets="query_key_value",
        **{**POLYGLOT, "activation_checkpointing": 1},
    )
    predicted = _estimate(config)
    assert predicted.parameters.trainable == 1_572_864
    assert predicted.parameters.total == 1_333_383_168
    assert _gib(predicted.state.gradients_bytes) == 0.006
    assert _gib(predicted.state.optimizer_state_bytes) == 0.012


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_parameter"),
    [
        ("adamw_torch", 4.0),
        ("adamw_bnb_8bit", 2.03125),
        ("lion_8bit", 1.015625),
        ("lion_32bit", 4.0),
        ("sgd", 0.0),
    ],
)
def test_state_of_16_bit_parameters_is_the_textbooks(
    optimizer: str, bytes_per_parameter: float
) -> None:
    assert optimizer in OPTIMIZERS
    specs = [
        dataclasses.replace(spec, embedding=False)
        for spec in _trace(TrainConfig(method="full", **POLYGLOT)).trainable(0)
        if spec.num_elements >= 4096  # bitsandbytes keeps smaller ones in float32
    ]
    num_elements = sum(spec.num_elements for spec in specs)
    on_device, managed = state_bytes(optimizer, specs)
    assert managed == 0
    assert on_device == pytest.approx(bytes_per_parameter * num_elements, rel=1e-5)


def test_runs_that_were_predicted_unseen() -> None:
    errors = {
        row["run"].split("--")[0]: row["predicted_reserved_bytes"] / row["published_reserved_bytes"]
        - 1
        for row in blind.rows()
    }
    assert errors.pop("boft") == pytest.approx(0.094, abs=0.001)  # the README says why
    assert max(map(abs, errors.values())) < 0.005
    # What was predicted then stays as it was; today's model of memory has been mended since.
    vera = next(row for row in blind.rows() if row["run"].startswith("vera"))
    plan = blind.plan(vera)
    today_bytes = published_memory.loop_bytes(plan, plan.program)
    assert today_bytes == pytest.approx(vera["predicted_reserved_bytes"], rel=0.001)
    assert abs(today_bytes / vera["published_reserved_bytes"] - 1) < 0.005
