"""The table of speed-ups: what is compared, how a step is priced, and what is drawn of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.models import ModelSource, resolve
from autotune.records.fingerprint import Fingerprint
from autotune.records.measurement import Measurement, ProbeSpec, measurement_from_dict
from autotune.space.config import TrainConfig
from autotune.space.defaults import default_base
from autotune.space.rules import Context, broken_rules
from tools.gpu_check import cases as gpu_cases
from tools.gpu_check import speedup_table, speedups

ROOT = Path(__file__).parents[2]
RECORDED = sorted((ROOT / "studies").glob("*/speedups.jsonl"))
BASE = TrainConfig(
    method="full",
    micro_batch_size=1,
    gradient_accumulation_steps=20,
    sequence_length=128,
    precision="bf16-true",
    optimizer="adamw_torch_fused",
)


def source(**config: Any) -> ModelSource:
    return ModelSource(name="m", config=config, origin="file", path=Path("m"))


def measured(config: TrainConfig, micro_seconds: float, **changes: Any) -> Measurement:
    figures: dict[str, Any] = {
        "outcome": "ok",
        "message": "",
        "micro_step_seconds": micro_seconds,
        "optimizer_step_seconds": 0.5,
        "peak_reserved_bytes": 10,
        "nontorch_bytes": 0,
        **changes,
    }
    spec = ProbeSpec(task="causal-lm", backend="cpu", memory_budget_bytes=100, max_seconds=1.0)
    here = Fingerprint(device="", driver="", cuda="", versions=(), allocator="")
    return Measurement(config=config, spec=spec, fingerprint=here, **figures)


def test_a_hand_tries_powers_of_two_and_checkpointing_last() -> None:
    tried = [(c.micro_batch_size, c.activation_checkpointing) for c in speedups.hand_tuned(BASE)]
    assert tried == [(size, every) for every in (0, 1) for size in (16, 8, 4, 2, 1)]
    whole = dataclasses.replace(BASE, gradient_accumulation_steps=16)
    for config in speedups.hand_tuned(whole):
        assert config.effective_batch_size == 16
        assert (config.precision, config.optimizer) == ("bf16-true", "adamw_torch_fused")


def test_defaults_never_take_more_than_the_effective_batch() -> None:
    small = dataclasses.replace(BASE, gradient_accumulation_steps=3)
    sizes = [c.micro_batch_size for c in speedups.defaults(small, source())]
    assert sizes == [3, 2, 1]


@pytest.mark.parametrize(
    ("config", "base", "precision"),
    [
        ({"torch_dtype": "bfloat16"}, {}, "bf16-true"),
        ({"dtype": "float32"}, {}, "fp32"),
        # A checkpoint that says nothing is in fp32: so were they before the field was there.
        ({}, {}, "fp32"),
        ({"torch_dtype": "float16"}, {"precision": "fp16-mixed"}, "fp16-mixed"),
        (
            {"torch_dtype": "bfloat16"},
            {
                "method": "qlora",
                "quantization": "nf4",
                "lora_rank": 16,
                "lora_targets": "all-linear",
                "precision": "bf16-autocast",
            },
            "bf16-autocast",
        ),
    ],
)
def test_defaults_have_the_checkpoints_precision(
    config: dict[str, Any], base: dict[str, Any], precision: str
) -> None:
    first = next(speedups.defaults(dataclasses.replace(BASE, **base), source(**config)))
    assert first.precision == precision


def test_a_step_has_the_same_samples_whatever_the_micro_batch() -> None:
    """20 samples are 2.5 micro-batches of 8."""
    config = speedups.with_micro_batch(BASE, 8)
    assert config.gradient_accumulation_steps == 3
    # 2.5 x 0.4 + 0.5 s for 20 x 128 tokens.
    assert speedup_table.tokens_per_second(measured(config, 0.4), 20) == pytest.approx(2560 / 1.5)
    even = speedups.with_micro_batch(BASE, 4)
    seen = measured(even, 0.4)
    assert speedup_table.tokens_per_second(seen, 20) == seen.tokens_per_second


def record(**micro_seconds: list[float]) -> dict[str, Any]:
    """Micro-batch 4, 5 of them in a step, and 0.5 s for the optimizer."""
    config = speedups_config(4)
    return {
        "model": "tiny",
        "gpu_mem": "1GB",
        "method": "full",
        "sequence_length": 128,
        "effective_batch_size": 20,
        "find": {"class": "exact"},
        "contenders": {
            name: {"measurements": [measured(config, s).to_dict() for s in seconds]}
            for name, seconds in micro_seconds.items()
        },
    }


def speedups_config(size: int) -> TrainConfig:
    return dataclasses.replace(BASE, micro_batch_size=size, gradient_accumulation_steps=20 // size)


def test_the_table_compares_medians() -> None:
    # Steps of 3.0, 2.0 and 1.0 s; the defaults' own rounds are 2.5, 3.0 and 3.5 s.
    told = record(defaults=[0.5, 0.4, 0.6], hand=[0.3] * 3, find=[0.1] * 3)
    lines = speedup_table.table([told])
    assert lines[2] == (
        "| tiny | full | 1GB | 128 x 20 | 853 (4) | 1,280 (4) | 2,560 (4) | 3.00x | 2.00x | exact | 34.3% |"
    )
    assert lines[-3] == "Geometric mean: 3.00x over defaults (of 1), 2.00x over hand (of 1)."
    assert lines[-2].startswith("UNSTEADY: 1 of 1 rows")
    steady = speedup_table.table([record(defaults=[0.5], hand=[0.3] * 3, find=[0.1, 0.1, 0.101])])
    assert steady[-2].startswith("Geometric mean")


def test_what_does_not_fit_is_no_speed() -> None:
    told = record(defaults=[], hand=[0.3] * 3, find=[0.1] * 3)
    (row,) = (line for line in speedup_table.table([told]) if line.startswith("| tiny"))
    assert "| does not fit | 1,280 (4) | 2,560 (4) |  | 2.00x |" in row
    assert speedup_table.table([]) == []


def test_a_geometric_mean_is_over_those_that_both_fit() -> None:
    first = record(defaults=[], hand=[0.3], find=[0.1])
    second = record(defaults=[1.5], hand=[1.5], find=[0.1])
    # 2 and 8, of steps of 1, 2 and 8 s.
    (mean,) = (
        line for line in speedup_table.table([first, second]) if line.startswith("Geometric")
    )
    assert mean == "Geometric mean: 8.00x over defaults (of 1), 4.00x over hand (of 2)."


def test_the_cases_are_what_a_card_could_run() -> None:
    cases = gpu_cases.COMPARISONS
    assert len({case.key for case in cases}) == len(cases) >= 6
    assert {case.method for case in cases} == {"full", "lora", "qlora"}
    for case in cases:
        model = resolve(case.model)
        base = default_base(speedups.workload(case, model), find_gpu("h200"), model)
        context = Context(effective_batch_size=case.effective_batch_size, compute_capability=(9, 0))
        for config in itertools.islice(speedups.hand_tuned(base), 3):
            assert broken_rules(config, context) == [], case


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.parent.name)
def test_what_is_recorded_is_what_the_table_says(path: Path) -> None:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert records
    for each in records:
        for name, seen in each["contenders"].items():
            for measurement in map(measurement_from_dict, seen["measurements"]):
                assert measurement.spec.memory_budget_bytes == each["memory_budget_bytes"], name
    text = "".join(file.read_text(encoding="utf-8") for file in path.parent.glob("*.md"))
    for row in speedup_table.table(records)[:-1]:
        assert row in text
