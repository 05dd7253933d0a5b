"""Liger in a trace, against its published memory on an A100 and against itself loop for loop.

The real Trainer with Liger is compared in test_trace_is_the_trainer.py.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama.configuration_llama import LlamaConfig

from autotune.catalogue.liger import families
from autotune.common.units import MIB
from autotune.memory.replayer import replay
from autotune.memory.traces import Trace
from autotune.records.estimate import TraceSpec
from autotune.worker.build import model as models
from autotune.worker.build.model import UnsupportedModel
from autotune.worker.trace import liger
from autotune.worker.trace import step as trace_module
from autotune.worker.trace.chunks import Chunks
from autotune.worker.trace.cuda import Device, Workspaces, device_choices
from autotune.worker.trace.kernel_buffers import hidden_buffers
from autotune.worker.trace.tracker import Tracker

pytest.importorskip("liger_kernel.transformers")

TABLE = Path(__file__).parents[1] / "data" / "op_memory_a100.csv"
"""Rows of provider liger: versions 0.2.1. Kernels that allocate otherwise today (rms_norm, rope,
fused_linear_cross_entropy) have no figure to compare with."""

A100 = Device(compute_capability=(8, 0), cublas_workspace_bytes=8_519_680, num_sms=108)

SPEC = TraceSpec(
    method="full",
    lora_targets=None,
    quantization="none",
    precision="bf16-true",
    activation_checkpointing=0,
    activation_offloading=False,
    attention="eager",
    single=False,
    liger=True,
)
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "vocab_size": 1000,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 176,
}


def _mlp(name: str) -> Callable[..., Callable[[], None]]:
    def set_up(length: int, settings: dict[str, Any]) -> Callable[[], None]:
        import liger_kernel.transformers as kernels

        config = LlamaConfig(
            hidden_size=settings["hidden_size"],
            intermediate_size=settings["intermediate_size"],
            hidden_act=settings["hidden_act"],
        )
        shape = (settings.get("bsz") or settings["B"], length, config.hidden_size)
        hidden = torch.randn(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
        with torch.device("meta"):
            layer = getattr(kernels, name)(config).to(torch.bfloat16)

        def run() -> None:
            out = layer(hidden)
            out.backward(torch.randn_like(out), retain_graph=True)

        return run

    return set_up


def _layer_norm(width: int, settings: dict[str, Any]) -> Callable[[], None]:
    from liger_kernel.transformers import LigerLayerNorm

    with torch.device("meta"):
        layer, other = LigerLayerNorm(width), nn.LayerNorm(width)
    hidden = torch.randn(settings["M"], width, device="meta")
    gradient = torch.randn_like(hidden)
    hidden.requires_grad_(True)

    def run(_: nn.Module) -> None:
        layer(hidden).backward(gradient, retain_graph=True)

    return functools.partial(run, other)  # alive meanwhile, as in the benchmark


SETUPS = {
    "geglu": _mlp("LigerGEGLUMLP"),
    "layer_norm": _layer_norm,
    "swiglu": _mlp("LigerSwiGLUMLP"),
}


@pytest.mark.parametrize("kernel", SETUPS)
def test_predicted_peak_equals_published(kernel: str) -> None:
    num_rows = 0
    with TABLE.open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["kernel_name"], row["kernel_provider"]) != (kernel, "liger"):
                continue
            if row["metric_name"] != "memory":
                continue
            num_rows += 1
            settings = json.loads(row["extra_benchmark_config_str"])
            predicted_bytes = _peak_bytes(SETUPS[kernel], int(row["x_value"]), settings)
            assert predicted_bytes / MIB == float(row["y_value_50"])
    assert num_rows >= 4


def _peak_bytes(set_up: Any, x: int, settings: dict[str, Any]) -> int:
    workspaces = Workspaces(A100.cublas_workspace_bytes, are_kept=True)
    tracker = Tracker(
        "meta",
        hidden_buffers=functools.partial(hidden_buffers, A100.multiprocessors),
        at_launch=workspaces.at_launch,
    )
    chunks = Chunks(tracker, False, Workspaces(0))
    with device_choices(A100), liger.on_meta(tracker, A100, chunks), tracker:
        run = set_up(x, settings)
        for _ in range(3):
            run()
    sizes = [tensor.size_bytes for tensor in tracker.recording.tensors]
    return replay(sizes, list(tracker.recording.events)).peak_allocated_bytes


def _trace(sequence_length: int, **changes: Any) -> Trace:
    answer = trace_module.trace_step(
        models.load_config(SMALL),
        "causal-lm",
        dataclasses.replace(SPEC, **changes),
        sequence_length=sequence_length,
        device=A100,
    )
    return Trace(json.loads(json.dumps(answer)))


# 1,000 words of 64: sixteenths of the tokens, up to the next power of two. The last chunk has fewer.
@pytest.mark.parametrize(("sequence_length", "num_chunks"), [(64, 12), (50, 10), (100, 10)])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_one_chunk_stands_for_all(
    sequence_length: int, num_chunks: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace of three samples that runs Liger's loop itself comes to the same as the symbolic one."""
    symbolic = _trace(sequence_length, precision=precision)
    monkeypatch.setattr(trace_module, "MICRO_BATCH", 3)
    monkeypatch.setattr(
        trace_module, "Chunks", lambda tracker, _, workspaces: Chunks(tracker, False, workspaces)
    )
    looped = _trace(sequence_length, precision=precision)

    def totals(trace: Trace) -> tuple[int, float, float]:
        launches = trace.launches(3, 0)
        losses = [x for x in launches if x.kernel.name == "liger_cross_entropy_kernel"]
        return (
            sum(launch.count for launch in losses),
            sum(launch.count * launch.flops for launch in launches),
            sum(launch.count * launch.bytes_moved for launch in launches),
        )

    assert totals(looped)[0] == totals(symbolic)[0] == num_chunks
    assert totals(symbolic)[1:] == pytest.approx(totals(looped)[1:])
    for events in ("setup", "again", "next"):
        peaks = {int(trace.running_bytes(events, 3, 0).max()) for trace in (looped, symbolic)}
        assert len(peaks) == 1


def test_what_liger_patches_is_undone() -> None:
    module = transformers.models.llama.modeling_llama
    before = dict(vars(module))
    _trace(32)
    assert {name: value for name, value in vars(module).items() if name in before} == before
    assert vars(module).keys() == before.keys()


def test_a_head_without_logits_saves_them() -> None:
    """Llama-3.1's vocabulary: the loss of 4,096 tokens takes a chunk of logits, not all of them."""
    wide = {**SMALL, "vocab_size": 128_256, "hidden_size": 512, "tie_word_embeddings": True}
    peaks = {}
    for name, spec in {"liger": SPEC, "plain": dataclasses.replace(SPEC, liger=False)}.items():
        config = models.load_config(wide)
        answer = trace_module.trace_step(
            config, "causal-lm", spec, sequence_length=2048, device=A100
        )
        trace = Trace(json.loads(json.dumps(answer)))
        peaks[name] = int(trace.running_bytes("again", 2, 0).max())
    logits_bytes = 4096 * 128_256 * 2
    # Logits, their float32 copy and its gradient, against a chunk of 16 tokens.
    assert peaks["plain"] - peaks["liger"] > 4 * logits_bytes


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        ("sequence-classification", {}, "causal language models only"),
        ("causal-lm", {"model_type": "gpt_neox"}, "no kernels for model type gpt_neox"),
    ],
)
def test_what_liger_does_not_patch_is_refused(
    task: str, change: dict[str, Any], message: str
) -> None:
    config = models.load_config({**SMALL, **change})
    with pytest.raises(UnsupportedModel, match=message):
        trace_module.trace_step(config, task, SPEC, sequence_length=32, device=A100)


def test_the_families_are_those_that_liger_names() -> None:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    assert families() == set(MODEL_TYPE_TO_APPLY_LIGER_FN)
