"""Predicted against published memory peaks of single operations, forward and backward, on an A100.

Run: python -m validation.op_memory_a100

The published figures are Liger-Kernel's (linkedin/Liger-Kernel, benchmark/data/, the table
all_benchmark_data.csv; here the rows of provider huggingface, which are PyTorch's own operations
and Transformers' modelling code). Each is the median, over ten runs of a function, of
torch.cuda.max_memory_allocated, in float32 MiB (benchmark/scripts/utils.py, _test_memory).

The same operations, shapes and dtypes are set up here on `meta`, run three times under the tracker,
and replayed through the allocator model from an empty heap. What Liger's scripts keep alive beside
the operation (Liger's own module, which these rows do not call) is kept alive here as weights.
Nothing is fitted to a row.

Not modelled: what a long process has left behind. It shows in the rows of `embedding` alone: see
studies/op-memory-a100/README.md, which this command writes the tables of.
"""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
)

from autotune.common.units import MIB
from autotune.memory.replayer import replay
from autotune.worker.trace.cuda import Device, Workspaces, device_choices
from autotune.worker.trace.kernel_buffers import hidden_buffers
from autotune.worker.trace.tracker import Tracker

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "data" / "op_memory_a100.csv"
STUDY = ROOT / "studies" / "op-memory-a100"

A100 = Device(compute_capability=(8, 0), cublas_workspace_bytes=8_519_680)
"""cuBLAS' default workspace `:4096:2:16:8` (pytorch aten/src/ATen/cuda/CublasHandlePool.cpp)."""

NUM_RUNS = 3
"""The first run has no gradients yet; from the second on every run is the same."""

Setup = Callable[[int, dict[str, Any]], tuple[Callable[[], None], object]]
"""(x of the row, its settings) -> the measured function, and what stays alive beside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published peak beside the predicted one."""

    kernel: str
    x_name: str
    x: int
    settings: dict[str, Any]
    published_mib: float
    predicted_bytes: int

    @property
    def predicted_mib(self) -> float:
        """As the benchmark would have written it: in float32."""
        return torch.tensor(self.predicted_bytes / MIB, dtype=torch.float32).item()

    @property
    def error_mib(self) -> float:
        return self.predicted_mib - self.published_mib

    @property
    def relative_error(self) -> float:
        return self.error_mib / self.published_mib

    @property
    def shape(self) -> str:
        settings = {self.x_name: self.x, **self.settings}
        return " ".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in settings.items())


def _random(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device="meta", requires_grad=grad)


def _tokens(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, dtype=torch.int64, device="meta")


def _cross_entropy(vocabulary: int, settings: dict[str, Any]) -> tuple[Callable[[], None], object]:
    rows = settings["B"] * settings["T"]
    loss = nn.CrossEntropyLoss()
    logits = _random(rows, vocabulary)
    target = _tokens(vocabulary, rows, 1).squeeze(1)
    return lambda: loss(logits, target).backward(), None


def _fused_linear_cross_entropy(
    rows: int, settings: dict[str, Any]
) -> tuple[Callable[[], None], object]:
    """The head and loss of PyTorch; fused is what Liger does in the rows that are left out."""
    width, vocabulary = settings["H"], settings["V"]
    dtype = torch.bfloat16
    head = nn.Linear(width, vocabulary, bias=False, dtype=dtype, device="meta")
    liger_head = nn.Linear(width, vocabulary, bias=False, dtype=dtype, device="meta")
    loss = nn.CrossEntropyLoss()
    hidden = _random(rows, width, dtype=dtype)
    target = _tokens(vocabulary, rows, 1).squeeze(1)
    return lambda: loss(head(hidden), target).backward(), liger_head


def _embedding(vocabulary: int, settings: dict[str, Any]) -> tuple[Callable[[], None], object]:
    embedding = nn.Embedding(vocabulary, settings["D"], device="meta")
    liger_embedding = nn.Embedding(vocabulary, settings["D"], device="meta")
    input_ids = _tokens(vocabulary, settings["B"], settings["T"])

    def run() -> None:
        out = embedding(input_ids)
        out.backward(torch.randn_like(out))

    return run, liger_embedding


def _mlp(length: int, settings: dict[str, Any]) -> tuple[Callable[[], None], object]:
    width = settings["hidden_size"]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=settings["intermediate_size"],
        hidden_act=settings["hidden_act"],
    )
    batch = settings.get("bsz") or settings["B"]
    hidden = _random(batch, length, width, dtype=torch.bfloat16)
    with torch.device("meta"):
        layer = LlamaMLP(config).to(torch.bfloat16)

    def run() -> None:
        out = layer(hidden)
        out.backward(torch.randn_like(out), retain_graph=True)

    return run, None


def _norm(
    layer: nn.Module, liger_layer: nn.Module, rows: int, width: int, dtype: torch.dtype
) -> tuple[Callable[[], None], object]:
    hidden = _random(rows, width, dtype=dtype, grad=False)
    gradient = torch.randn_like(hidden)
    hidden.requires_grad_(True)
    return lambda: layer(hidden).backward(gradient, retain_graph=True), liger_layer


def _layer_norm(width: int, settings: dict[str, Any]) -> tuple[Callable[[], None], object]:
    with torch.device("meta"):
        liger_layer, layer = nn.LayerNorm(width), nn.LayerNorm(width)
    return _norm(layer, liger_layer, settings["M"], width, torch.float32)


def _rms_norm(width: int, settings: dict[str, Any]) -> tuple[Callable[[], None], object]:
    with torch.device("meta"):
        liger_layer, layer = LlamaRMSNorm(width), LlamaRMSNorm(width)
    return _norm(layer, liger_layer, settings["M"], width, torch.bfloat16)


def _rotary(head_size: int, length: int) -> tuple[torch.Tensor, ...]:
    """cos and sin by the matrix product of transformers 4.44; 5.x multiplies, without cuBLAS.

    Returns the buffer of frequencies and the positions too, which the benchmark keeps.
    """
    exponents = torch.arange(0, head_size, 2, device="meta").float() / head_size
    frequencies = 1.0 / 10000.0**exponents
    positions = torch.arange(length, device="meta").unsqueeze(0)
    angles = (frequencies[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
    return cos, sin, frequencies, positions


def _rope(x: int, settings: dict[str, Any]) -> tuple[Callable[[], None], object]:
    """x is the width of all query heads, or the sequence length: whichever the settings lack."""
    length = settings.get("seq_len", x)
    heads, key_heads = settings["num_q_heads"], settings["num_kv_heads"]
    head_size = settings.get("hidden_size", x) // heads
    q = _random(1, length, heads, head_size, dtype=torch.bfloat16).transpose(1, 2)
    k = _random(1, length, key_heads, head_size, dtype=torch.bfloat16).transpose(1, 2)
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    cos, sin, *kept = _rotary(head_size, length)

    def run() -> None:
        outputs = apply_rotary_pos_emb(q, k, cos, sin)
        torch.autograd.grad(outputs, (q, k), (dq, dk), allow_unused=True, retain_graph=True)

    return run, kept


SETUPS: dict[str, Setup] = {
    "cross_entropy": _cross_entropy,
    "embedding": _embedding,
    "fused_linear_cross_entropy": _fused_linear_cross_entropy,
    "geglu": _mlp,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "swiglu": _mlp,
}


def predict_peak_bytes(kernel: str, x: int, settings: dict[str, Any]) -> int:
    """Predicted torch.cuda.max_memory_allocated of a steady run."""
    workspaces = Workspaces(
        A100.cublas_workspace_bytes, are_kept=True
    )  # As of the torch that was measured.
    tracker = Tracker(
        "meta",
        hidden_buffers=functools.partial(hidden_buffers, A100.multiprocessors),
        at_launch=workspaces.at_launch,
    )
    with device_choices(A100), tracker:
        run, alive = SETUPS[kernel](x, settings)
        num_set_up_events = len(tracker.recording.events)
        for _ in range(NUM_RUNS):
            run()
    recording = tracker.recording
    sizes = [tensor.size_bytes for tensor in recording.tensors]
    replayed = replay(sizes, list(recording.events))
    assert replayed.peak_allocated_event >= num_set_up_events
    del run, alive
    return replayed.peak_allocated_bytes


def predict_rows(kernels: Collection[str] = tuple(SETUPS)) -> list[Row]:
    """Every published memory row of PyTorch's own operations, with its prediction."""
    rows = []
    with TABLE.open(newline="") as file:
        for entry in csv.DictReader(file):
            if entry["metric_name"] != "memory" or entry["kernel_provider"] != "huggingface":
                continue
            kernel, x = entry["kernel_name"], int(entry["x_value"])
            if kernel not in kernels:
                continue
            settings = json.loads(entry["extra_benchmark_config_str"])
            rows.append(
                Row(
                    kernel=kernel,
                    x_name=entry["x_name"],
                    x=x,
                    settings=settings,
                    published_mib=float(entry["y_value_50"]),
                    predicted_bytes=predict_peak_bytes(kernel, x, settings),
                )
            )
    return rows


def markdown(rows: Sequence[Row]) -> str:
    lines = [
        "| operation | shape | predicted, MiB | published, MiB | error, MiB | error |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.kernel} | {row.shape} | {row.predicted_mib} | {row.published_mib}"
            f" | {row.error_mib:g} | {row.relative_error:.2%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    rows = predict_rows()
    record = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "rows": [
            {
                "operation": row.kernel,
                "shape": row.shape,
                "predicted_bytes": row.predicted_bytes,
                "predicted_mib": row.predicted_mib,
                "published_mib": row.published_mib,
            }
            for row in rows
        ],
    }
    STUDY.mkdir(parents=True, exist_ok=True)
    (STUDY / "rows.json").write_text(json.dumps(record, indent=1) + "\n")
    (STUDY / "rows.md").write_text(markdown(rows))
    num_equal = sum(row.predicted_mib == row.published_mib for row in rows)
    print(markdown(rows))
    print(f"{num_equal} of {len(rows)} predicted peaks equal the published ones.")


if __name__ == "__main__":
    main()
