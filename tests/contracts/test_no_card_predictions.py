"""What is predicted now, against what PyTorch's CUDA build allocated and reserved where there was no card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import here
import pytest

from autotune.catalogue.attention import EXPANDED
from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.models import resolve
from autotune.predict.estimator import Estimator
from autotune.predict.tracing import trace_all
from autotune.records.estimate import Estimate, TraceSpec
from autotune.space.config import TrainConfig
from validation.no_card_fuzz import cut

STUDY = Path(__file__).parents[2] / "studies" / "no-card"
PATH = STUDY / "h200" / "predicted_vs_measured.jsonl"
PARTS = [json.loads(line) for line in (STUDY / "chunked_loss.jsonl").read_text().splitlines()]
T4 = [json.loads(line) for line in (STUDY / "t4_attention.jsonl").read_text().splitlines()]
SHORT = 1024


@pytest.mark.parametrize("model", ["HuggingFaceTB/SmolLM2-135M", "openai-community/gpt2"])
def test_as_pytorch_allocates(model: str) -> None:
    records = [json.loads(line) for line in PATH.read_text(encoding="utf-8").splitlines()]
    seen = {
        TrainConfig(**r["measurement"]["config"]): r["measurement"]
        for r in records
        if r["model"] == model
        and not r["capped_at_prediction"]
        and r["measurement"]["config"]["sequence_length"] == SHORT
    }
    assert len(seen) >= 2
    card = find_gpu("h200")
    specs = {TraceSpec.of(config) for config in seen}
    traces = trace_all(resolve(model), "causal-lm", SHORT, card, specs, server=here.workers)
    estimator = Estimator(traces, card, memory_budget_bytes=card.capacity_bytes)
    for config, measurement in seen.items():
        estimate = estimator.estimate(config)
        for name, share in (("peak_allocated_bytes", 1e-4), ("peak_reserved_bytes", 1e-3)):
            found = getattr(estimate, name)
            assert found == pytest.approx(measurement[name], rel=share), (name, config)


def predicted(record: dict[str, Any], gpu: str) -> Estimate:
    config = TrainConfig(**record["measurement"]["config"])
    card, source = find_gpu(gpu), cut(record["model"], record["num_layers"])
    specs = {TraceSpec.of(config)}
    length = config.sequence_length
    traces = trace_all(source, "causal-lm", length, card, specs, server=here.workers)
    return Estimator(traces, card, memory_budget_bytes=card.capacity_bytes).estimate(config)


def expanded_on_a_t4() -> list[dict[str, Any]]:
    """Runs with expanded key heads that ended without asking torch for its cache back."""
    return [
        record
        for record in T4
        if record["measurement"]["config"]["attention"] == EXPANDED
        and record["measurement"]["outcome"] == "ok"
        and not record["measurement"]["num_alloc_retries"]
        # Which expert a token goes to depends on values, of which there are none.
        and "30B-A3B" not in record["model"]
    ]


def in_parts() -> list[dict[str, Any]]:
    """Runs on an RTX 4090 with the loss in parts that ended."""
    return [
        record
        for record in PARTS
        if record["measurement"]["config"]["chunked_loss"]
        and record["measurement"]["outcome"] == "ok"
    ]


@pytest.mark.parametrize("number", range(len(in_parts())))
def test_a_loss_in_parts_is_as_pytorch_allocates(number: int) -> None:
    record = in_parts()[number]
    seen, estimate = record["measurement"], predicted(record, "rtx-4090")
    allocated, reserved = seen["peak_allocated_bytes"], seen["peak_reserved_bytes"]
    assert estimate.peak_allocated_bytes == pytest.approx(allocated, rel=1.1e-3)
    is_low = (record["model"], seen["config"]["method"]) == ("meta-llama/Llama-3.2-3B", "vera")
    # studies/no-card/README.md names the one that reserves 6 % more than predicted.
    assert estimate.peak_reserved_bytes == pytest.approx(reserved, rel=0.07 if is_low else 1e-3)


@pytest.mark.parametrize("number", range(len(expanded_on_a_t4())))
def test_expanded_key_heads_on_a_card_without_flash_attention(number: int) -> None:
    """The memory-efficient kernel runs in the model that the program registers: bytes are equal."""
    record = expanded_on_a_t4()[number]
    seen = record["measurement"]
    estimate = predicted(record, "t4")
    assert estimate.peak_allocated_bytes == pytest.approx(seen["peak_allocated_bytes"], rel=1e-5)
    assert estimate.peak_reserved_bytes == seen["peak_reserved_bytes"]
