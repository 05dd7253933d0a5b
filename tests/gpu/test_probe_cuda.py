"""Probes on a CUDA device, each in a process of its own: `pytest -m gpu tests/gpu`. Not yet run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from autotune.catalogue.gpus import detect
from autotune.common.units import GIB, MIB
from autotune.records.measurement import STOP_FILE, Measurement, ProbeSpec, measurement_from_dict
from autotune.space.config import TrainConfig
from autotune.worker.client import isolate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not detect(), reason="NVML finds no card here"),
]

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "vocab_size": 32_000,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 8,
    "max_position_embeddings": 1024,
}
FULL = TrainConfig(
    method="full",
    micro_batch_size=2,
    gradient_accumulation_steps=8,
    sequence_length=512,
    precision="bf16-mixed",
    optimizer="adamw_torch_fused",
)
LORA = dataclasses.replace(
    FULL, method="lora", precision="bf16-autocast", lora_rank=16, lora_targets="all-linear"
)
QLORA = dataclasses.replace(LORA, method="qlora", quantization="nf4-double")
CONFIGS = {
    "full": FULL,
    "full offloaded": dataclasses.replace(
        FULL, activation_checkpointing=1, activation_offloading=True
    ),
    "full tf32": dataclasses.replace(FULL, precision="tf32"),
    "full fp16-mixed": dataclasses.replace(FULL, precision="fp16-mixed"),
    "full 8-bit": dataclasses.replace(FULL, optimizer="adamw_bnb_8bit"),
    "full paged": dataclasses.replace(FULL, optimizer="paged_adamw_32bit"),
    "lora every 2nd layer": dataclasses.replace(LORA, activation_checkpointing=2),
    "qlora checkpointed": dataclasses.replace(QLORA, activation_checkpointing=1),
}
SPEC = ProbeSpec(task="causal-lm", backend="cuda", memory_budget_bytes=6 * GIB, max_seconds=5.0)


def run(config: TrainConfig, folder: Path | None = None, **spec: Any) -> Measurement:
    request = {
        "config": MODEL,
        "train_config": config.to_dict(),
        "spec": dataclasses.asdict(dataclasses.replace(SPEC, **spec)),
        "folder": None if folder is None else str(folder),
    }
    end = isolate.run("probe", request, deadline_seconds=120)
    assert end.how == "ok", end.stderr_tail
    return measurement_from_dict(end.answers[-1]["measurement"])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_probe_fits_its_budget(name: str) -> None:
    measured = run(CONFIGS[name])
    assert (measured.outcome, measured.message) == ("ok", "")
    assert measured.fits
    assert measured.peak_allocated_bytes is not None
    assert measured.peak_reserved_bytes is not None
    assert measured.nontorch_bytes is not None
    assert 0 < measured.peak_allocated_bytes <= measured.peak_reserved_bytes
    assert 100 * MIB < measured.nontorch_bytes < 4 * GIB
    assert measured.spread is not None
    assert measured.spread < 0.1


def test_the_budget_is_real() -> None:
    """Out of memory happens under a budget that the card itself is larger than."""
    whole = run(FULL)
    assert whole.peak_device_bytes is not None
    assert whole.nontorch_bytes is not None
    budget = whole.nontorch_bytes + (whole.peak_device_bytes - whole.nontorch_bytes) // 2
    measured = run(FULL, memory_budget_bytes=budget)
    assert measured.outcome == "oom"
    assert measured.excess_bytes is not None
    assert 0 < measured.excess_bytes < whole.peak_device_bytes


def test_two_probes_agree() -> None:
    first, second = run(LORA), run(LORA)
    assert first.peak_reserved_bytes == second.peak_reserved_bytes
    assert first.tokens_per_second == pytest.approx(second.tokens_per_second, rel=0.1)
    assert first.fingerprint == second.fingerprint
    assert first.fingerprint.driver


@pytest.mark.parametrize("name", ["full", "full paged", "qlora checkpointed"])
def test_a_confirmation_survives_what_its_probe_needed(name: str) -> None:
    probed = run(CONFIGS[name])
    confirmed = run(CONFIGS[name], confirm_steps=10)
    assert (confirmed.outcome, confirmed.problem) == ("ok", "")
    assert confirmed.num_steps >= 10
    assert confirmed.tokens_per_second == pytest.approx(probed.tokens_per_second, rel=0.1)


def test_a_probe_is_stopped_by_its_file(tmp_path: Path) -> None:
    (tmp_path / STOP_FILE).write_text("too slow")
    measured = run(FULL, tmp_path, target_spread=0.0)
    assert measured.outcome == "slow"
    assert measured.num_steps < SPEC.max_steps
