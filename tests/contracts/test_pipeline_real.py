"""What each GPU of a pipeline is predicted to hold, against real processes of torch.distributed.pipelining.

Two to four processes run Schedule1F1B with a tiny Llama over gloo on the CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import here
import pytest
from torch.distributed.pipelining import PipelineStage

from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.installed import releases_messages
from autotune.memory.traces import Trace
from autotune.predict.estimator import Estimator
from autotune.predict.sharding import pipeline
from autotune.predict.sharding.pipeline import PipelineTrace, even_counts
from autotune.predict.tracing import of_card, of_one_gpu
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.worker.build import model as models
from autotune.worker.trace import cuda
from autotune.worker.trace import step as trace_module
from autotune.worker.trace.cuda import Device
from validation.no_card_fuzz import cut

pytestmark = pytest.mark.slow

CHILD = Path(__file__).parents[1] / "support" / "pipeline_child.py"
PIPELINES = Path(__file__).parents[2] / "studies" / "no-card" / "pipelines.jsonl"
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "max_position_embeddings": 128,
}
TWO = TrainConfig(
    method="full",
    micro_batch_size=2,
    gradient_accumulation_steps=4,
    sequence_length=64,
    precision="fp32",
    optimizer="adamw_torch_fused",
    attention="sdpa",
    parallelism="pp",
    num_gpus=2,
)
CONFIGS = {
    "two": TWO,
    "three, bf16-true": dataclasses.replace(
        TWO, num_gpus=3, precision="bf16-true", gradient_accumulation_steps=7
    ),
    "four, uneven": dataclasses.replace(TWO, num_gpus=4, gradient_accumulation_steps=8),
    "two, checkpointed": dataclasses.replace(TWO, activation_checkpointing=1),
}
MOST_OFF_BYTES = 3 * 512
"""Three blocks, of losses and positions; hidden states take 32 KiB and more."""
HELD_BY_2_15 = {
    "two": (18269184, 15398400),
    "three, bf16-true": (8080896, 6191104, 6273536),
    "four, uneven": (17975808, 14340096, 6110720, 7123456),
    "two, checkpointed": (12028928, 12344832),
}
"""Peaks that the same processes report with torch 2.15.0, which lets go of messages."""


def case(config: TrainConfig) -> dict[str, Any]:
    return {
        "config": MODEL,
        "counts": even_counts(MODEL["num_hidden_layers"], config.num_gpus),
        "micro_batches": config.gradient_accumulation_steps,
        "micro_batch": config.micro_batch_size,
        "length": config.sequence_length,
        "dtype": "bfloat16" if config.precision == "bf16-true" else "float32",
        "checkpointing": config.activation_checkpointing > 0,
    }


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Peaks of each process of each case, by rank."""
    folder = tmp_path_factory.mktemp("pipeline")
    cases = {name: case(config) for name, config in CONFIGS.items()}
    (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    files = [str(folder / name) for name in ("cases.json", "report.json")]
    child = here.workers.program(str(CHILD), *files)
    assert child.returncode == 0, child.stderr[-3000:]
    found: dict[str, list[dict[str, Any]]] = json.loads((folder / "report.json").read_text())
    return found


@functools.cache
def traced(name: str) -> Trace:
    config = CONFIGS[name]
    answer = trace_module.trace_step(
        models.load_config(MODEL),
        "causal-lm",
        dataclasses.replace(TraceSpec.of(config), parallelism="none"),
        sequence_length=config.sequence_length,
        device=Device(compute_capability=(8, 9), cublas_workspace_bytes=0, backend="cpu"),
    )
    return Trace(json.loads(json.dumps(answer)))


def check_each(name: str, held_bytes: Iterable[int]) -> None:
    """Check the predicted peak of each process against what it held."""
    config = CONFIGS[name]
    spec = TraceSpec.of(config)
    trace = PipelineTrace(traced(name), spec, num_gpus=config.num_gpus)
    estimator = Estimator({spec: trace}, find_gpu("a100"), memory_budget_bytes=10**9)
    for held, found in zip(held_bytes, estimator.of_each_gpu(config), strict=True):
        assert abs(found.peak_allocated_bytes - held) <= MOST_OFF_BYTES


@pytest.mark.parametrize("name", CONFIGS)
def test_each_process_holds_what_is_predicted(
    name: str, reports: dict[str, list[dict[str, Any]]]
) -> None:
    check_each(name, [held["allocated"] for held in reports[name]])


@pytest.mark.parametrize("name", CONFIGS)
def test_each_process_of_torch_2_15_holds_what_is_predicted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "releases_messages", lambda: True)
    check_each(name, HELD_BY_2_15[name])


def test_what_losses_keep_arrives_with_each_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of four GPUs reserves so much with torch 2.15.0; were all there at first, 7 % more."""
    records = map(json.loads, PIPELINES.read_text(encoding="utf-8").splitlines())
    (record,) = (
        each
        for each in records
        if "TinyLlama" in each["model"]
        and (each["config"]["num_gpus"], each["config"]["precision"]) == (4, "bf16-true")
    )
    config, gpu = TrainConfig(**record["config"]), find_gpu("a100-pcie-80gb")
    monkeypatch.setattr(pipeline, "releases_messages", lambda: True)
    monkeypatch.setattr(cuda, "WORKSPACES_ARE_KEPT", False)
    source = cut(record["model"], record["num_layers"])
    spec = TraceSpec.of(config)
    answer = trace_module.trace_step(
        models.load_config(source.config),
        "causal-lm",
        of_one_gpu(spec),
        sequence_length=config.sequence_length,
        device=Device(**of_card(gpu)),
    )
    trace = PipelineTrace(Trace(json.loads(json.dumps(answer))), spec, num_gpus=config.num_gpus)
    found = Estimator({spec: trace}, gpu, memory_budget_bytes=gpu.capacity_bytes)
    *_, last = found.of_each_gpu(config)
    assert last.peak_reserved_bytes == pytest.approx(
        record["held"][-1]["peak_reserved_bytes"], rel=0.001
    )


def test_whether_messages_are_released_is_asked_of_the_stage() -> None:
    assert releases_messages() == hasattr(PipelineStage, "release_fwd_send_outputs")
