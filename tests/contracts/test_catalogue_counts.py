"""Every model of the catalogue can be traced, and has the number of parameters that is published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.catalogue.models import CatalogueEntry, catalogue, resolve
from autotune.memory.traces import Trace
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.worker.build.model import build_base, load_config
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.step import trace_step

A100 = Device(compute_capability=(8, 0), cublas_workspace_bytes=8_519_680)
CONFIG = TrainConfig(
    method="full",
    micro_batch_size=2,
    gradient_accumulation_steps=1,
    sequence_length=128,
    precision="bf16-true",
    optimizer="adamw_torch",
)
OF_SAMPLES = {
    "qwen2_5_vl": "image-text-to-text",
    "vit": "image-classification",
    "wav2vec2": "ctc",
    "whisper": "automatic-speech-recognition",
}
"""Tasks of models whose steps want pictures or sound, which are built and not traced."""


NUM_ACTIVE_PARAMETERS = {
    "mistralai/Mixtral-8x7B-v0.1": 12.9e9,
    "Qwen/Qwen3-30B-A3B": 3.3e9,
    "openai/gpt-oss-20b": 3.6e9,
}
"""Per token, as the models' cards say."""


def _trace(hub_id: str) -> Trace:
    source = resolve(hub_id)
    return Trace(
        trace_step(
            load_config(source.config),
            source.task,
            TraceSpec.of(replace(CONFIG, attention=source.attentions[0])),
            sequence_length=CONFIG.sequence_length,
            device=A100,
        )
    )


@pytest.mark.parametrize("entry", catalogue(), ids=lambda entry: entry.short_name)
def test_traced_parameters_are_the_published_ones(entry: CatalogueEntry) -> None:
    source = resolve(entry.hub_id)
    task = OF_SAMPLES.get(source.config["model_type"])
    if task is None:
        counted = _trace(entry.hub_id).num_parameters(0)
        assert counted == (entry.num_parameters, entry.num_parameters)
        return
    model = build_base(load_config(source.config), task, TraceSpec.of(CONFIG))
    assert sum(weight.numel() for weight in model.parameters()) == entry.num_parameters


@pytest.mark.parametrize("hub_id", NUM_ACTIVE_PARAMETERS)
def test_experts_compute_what_is_active(hub_id: str) -> None:
    """Six operations per active parameter and token, and little besides at this length."""
    trace = _trace(hub_id)
    launches = trace.launches(CONFIG.micro_batch_size, 0)
    num_flops = sum(each.count * each.flops for each in launches)
    per_token = num_flops / (CONFIG.micro_batch_size * CONFIG.sequence_length)
    assert per_token == pytest.approx(6 * NUM_ACTIVE_PARAMETERS[hub_id], rel=0.12)
