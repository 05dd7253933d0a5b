"""What is predicted now, against what PyTorch's CUDA build allocated and reserved where there was no card."""

from __future__ import annotations

import json
from pathlib import Path

import here
import pytest

from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.models import resolve
from autotune.predict.estimator import Estimator
from autotune.predict.tracing import trace_all
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig

PATH = Path(__file__).parents[2] / "studies/no-card/h200/predicted_vs_measured.jsonl"
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
