"""Predicted against real compiled steps: writes studies/compiled/.

    python -m validation.compiled             (some ten minutes; a C++ compiler is needed for the peaks)

Three questions. Are the kernels and their bytes those that Inductor makes? A CPU's Inductor is asked how it
fuses small models, whose graphs the model of fusion gets too, with the CPU's rules. Does the forward pass
save what torch.compile saves, and is the peak that of a real compiled step? And how much faster is a compiled
step: published runs with torch.compile and without. The rules were corrected after mismatches on several of
these models, OLMo 2 alone was first run after that; no constant is fitted to any row.

A GPU's Inductor fuses by rules of its own. It can be asked without a card, for its kernels alone:

    python -m tools.no_card --gpu H200 -- CUDA_PYTHON -m validation.compiled --cuda
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch._inductor import compile_fx, scheduler

from autotune.memory.traces import Trace
from autotune.records.estimate import TraceSpec
from autotune.worker.build.model import load_config
from autotune.worker.probe.compiling import AllocationProfile, cold_caches
from autotune.worker.trace import fusion, lowering
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.step import trace_step
from validation.published.compiled_gains import gains

STUDY = Path(__file__).parents[1] / "studies" / "compiled"
BATCH, LENGTH, VOCABULARY, LAYERS = 4, 128, 2000, 2

_SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
}
_GATED = {**_SIZES, "intermediate_size": 688, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1,
          "bos_token_id": 1}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("llama", "causal-lm", _GATED),
    "Qwen 3": ("qwen3", "causal-lm", {**_GATED, "head_dim": 64}),
    "Gemma 2": ("gemma2", "causal-lm", {**_GATED, "head_dim": 64, "sliding_window": 64}),
    "Phi 3": ("phi3", "causal-lm", _GATED),
    "OLMo 2": ("olmo2", "causal-lm", _GATED),
    "BERT": ("bert", "sequence-classification", {**_SIZES, "intermediate_size": 1024}),
}
"""Architectures by name: model_type, task, settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fused:
    """One pass of a compiled model: what Inductor's scheduler made, and what is predicted."""

    model: str
    precision: str
    direction: str
    real_kernels: int
    predicted_kernels: int
    real_bytes: int
    predicted_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """Bytes that a forward pass saves, and the graphs that a step takes."""

    model: str
    precision: str
    graphs: int
    real_bytes: int
    predicted_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """Peak bytes of activations and gradients in a real step on a CPU, and predicted."""

    model: str
    precision: str
    eager_bytes: int
    real_bytes: int
    predicted_bytes: int


def _config(name: str) -> dict[str, Any]:
    model_type, task, settings = MODELS[name]
    kind = transformers.AutoConfig.for_model(model_type)
    architecture = {
        "causal-lm": "AutoModelForCausalLM",
        "sequence-classification": "AutoModelForSequenceClassification",
    }[task]
    mapping = getattr(transformers, architecture)._model_mapping
    named: dict[str, Any] = {"architectures": [mapping[type(kind)].__name__], "use_cache": False}
    made = type(kind)(**settings, **named)
    return {**made.to_dict(), "model_type": model_type}


def _model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = load_config(_config(name))
    config.use_cache = False
    auto = {
        "causal-lm": transformers.AutoModelForCausalLM,
        "sequence-classification": transformers.AutoModelForSequenceClassification,
    }[MODELS[name][1]]
    return auto.from_config(config, attn_implementation=_attention(name)).train()


def _attention(name: str) -> str:
    return "eager" if name == "Gemma 2" else "sdpa"


def _batch(name: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    if MODELS[name][1] == "causal-lm":
        return {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(ids.numel())}
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.zeros(BATCH, dtype=torch.int64),
    }


class _Scheduled(Exception):
    """Raised where Inductor would write code."""


def fused(name: str, precision: str, backend: str) -> tuple[list[Fused], int, int]:
    """Ask Inductor how it fuses both passes of a small model, and the model of it too.

    Returns the rows, the number of graphs, and the bytes that the forward passes save.
    """
    rows: list[Fused] = []
    saved: list[int] = []
    real: list[tuple[int, int]] = []

    def stop(self: Any, *_: Any) -> None:
        nodes = [
            node
            for node in self.nodes
            if not isinstance(
                node, (scheduler.NopKernelSchedulerNode, scheduler.ExternKernelSchedulerNode)
            )
        ]
        real.append((len(nodes), sum(n.get_read_write_buffers_sizes() for n in nodes)))
        raise _Scheduled

    inner = compile_fx.compile_fx_inner

    def compile_inner(gm: Any, inputs: Any, **rest: Any) -> Any:
        graph = copy.deepcopy(gm)
        kernels = [k for k in fusion.kernels_of(graph.graph, backend) if not k.is_of_library]
        with_stop = copy.deepcopy(gm)
        try:
            inner(with_stop, inputs, **rest)
        except Exception as error:
            if "_Scheduled" not in f"{type(error).__name__} {error!r}":
                raise
        kernel_bytes = sum(
            sum(k.reads.values())
            + sum(map(lowering.bytes_of, k.writes))
            + sum(part.extra_bytes for part in k.parts)
            for k in kernels
        )
        is_backward = bool(rest.get("is_backward"))
        rows.append(
            Fused(
                model=name,
                precision=precision,
                direction="backward" if is_backward else "forward",
                real_kernels=real[-1][0],
                predicted_kernels=len(kernels),
                real_bytes=real[-1][1],
                predicted_bytes=kernel_bytes,
            )
        )
        if not is_backward:
            bases = {lowering.base_of(node) for node in lowering.outputs_of(graph.graph)}
            saved.append(sum(lowering.bytes_of(n) for n in bases if n.op != "placeholder"))
        return make_boxed_func(graph.forward)

    def compiled(gm: Any, inputs: Any) -> Any:
        return compile_fx.compile_fx(gm, inputs, inner_compile=compile_inner)

    model = _model(name).to(backend)
    batch = {key: tensor.to(backend) for key, tensor in _batch(name).items()}
    torch.compiler.reset()
    with (
        mock.patch.object(scheduler.Scheduler, "codegen", stop),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch.autocast(backend, dtype=torch.bfloat16, enabled=precision == "bf16-mixed"),
    ):
        loss = torch.compile(model, backend=compiled)(**batch)["loss"]
    with mock.patch.object(scheduler.Scheduler, "codegen", stop):
        loss.backward()
    return rows, len(saved), sum(saved)


def _spec(name: str, precision: str, *, is_compiled: bool) -> TraceSpec:
    return TraceSpec(
        method="full", lora_targets=None, quantization="none", precision=precision,
        activation_checkpointing=0, activation_offloading=False, attention=_attention(name), single=False,
        is_compiled=is_compiled,
        batching="packed" if MODELS[name][1] == "causal-lm" else "padded",
    )  # fmt: skip


_CPU = Device(compute_capability=(8, 0), cublas_workspace_bytes=0, backend="cpu")


def _trace(name: str, precision: str, *, is_compiled: bool) -> Trace:
    spec = _spec(name, precision, is_compiled=is_compiled)
    return Trace(
        trace_step(
            load_config(_config(name)), MODELS[name][1], spec, sequence_length=LENGTH, device=_CPU,
            whole=True,
        )
    )  # fmt: skip


def saved_bytes(name: str, precision: str) -> int:
    """Bytes that the forward pass of the trace leaves, the loss and the batch aside."""
    trace = _trace(name, precision, is_compiled=True)
    sizes = trace.sizes(BATCH, 1)
    alive: set[int] = set()
    for event in trace.again[: trace.num_forward_events]:
        (alive.discard(~event) if event < 0 else alive.add(event))
    return sum(sizes[number] for number in alive)


def peak(name: str, precision: str) -> Peak:
    """Run a compiled step on this machine's CPU, and replay its allocations."""

    def real(model: Callable[..., Any]) -> int:
        batch = _batch(name)
        profile = AllocationProfile()
        for number in range(3):
            for parameter in parameters:
                parameter.grad = None
            recording = profile if number == 2 else None
            with recording or _nothing():
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
                    outputs = model(**batch)
                    loss = outputs["loss"]
                    if precision == "bf16-mixed":
                        outputs = {k: v.float() for k, v in outputs.items() if v is not None}
                        loss = outputs["loss"]
                del outputs
                loss.backward()
        sizes, events = profile.sizes_and_events()
        return _highest(sizes, events)

    model = _model(name)
    parameters = list(model.parameters())
    eager_bytes = real(model)
    torch.compiler.reset()
    with tempfile.TemporaryDirectory() as folder, cold_caches(folder):
        real_bytes = real(torch.compile(model))
    trace = _trace(name, precision, is_compiled=True)
    return Peak(
        model=name,
        precision=precision,
        eager_bytes=eager_bytes,
        real_bytes=real_bytes,
        predicted_bytes=int(trace.running_bytes("again", BATCH, 1).max()),
    )


def _highest(sizes: list[int], events: list[int]) -> int:
    alive = highest = 0
    for event in events:
        alive += sizes[event] if event >= 0 else -sizes[~event]
        highest = max(highest, alive)
    return highest


@contextmanager
def _nothing() -> Iterator[None]:
    yield


# --- what is written


def _ratio(predicted: float, real: float) -> str:
    return f"{predicted / real:.2f}"


def _fused_line(r: Mapping[str, Any]) -> str:
    return (
        f"| {r['model']} | {r['precision']} | {r['direction']} | {r['real_kernels']} | "
        f"{r['predicted_kernels']} | {r['real_bytes'] / 1e6:.1f} | {r['predicted_bytes'] / 1e6:.1f} | "
        f"{_ratio(r['predicted_bytes'], r['real_bytes'])} |"
    )


def page(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The tables of the README."""
    lines = [
        "<!-- made by python -m validation.compiled -->",
        "",
        "## Kernels and bytes, by Inductor's scheduler on a CPU",
        "",
        "| model | precision | pass | kernels | predicted | MB moved | predicted | ratio |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    lines += [_fused_line(r) for r in found["fused"]]
    held_out = [r for r in found["fused"] if r["model"] != "Llama"]
    if held_out:
        ratios = sorted(r["predicted_bytes"] / r["real_bytes"] for r in held_out)
        lines += [
            "",
            f"Without Llama: bytes {ratios[0]:.2f} to {ratios[-1]:.2f} of the real ones, median "
            f"{statistics.median(ratios):.2f} ({len(ratios)} passes).",
        ]
    lines += [
        "",
        "## What the forward pass saves",
        "",
        "| model | precision | graphs | MB saved | predicted | ratio |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for r in found["saved"]:
        lines.append(
            f"| {r['model']} | {r['precision']} | {r['graphs']} | {r['real_bytes'] / 1e6:.2f} | "
            f"{r['predicted_bytes'] / 1e6:.2f} | {_ratio(r['predicted_bytes'], r['real_bytes'])} |"
        )
    lines += [
        "",
        "## Peak of a real compiled step on a CPU (activations and gradients)",
        "",
        "| model | precision | eager MB | compiled MB | predicted | ratio |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for r in found["peaks"]:
        lines.append(
            f"| {r['model']} | {r['precision']} | {r['eager_bytes'] / 1e6:.1f} | "
            f"{r['real_bytes'] / 1e6:.1f} | {r['predicted_bytes'] / 1e6:.1f} | "
            f"{_ratio(r['predicted_bytes'], r['real_bytes'])} |"
        )
    lines += [
        "",
        "## Published gains",
        "",
        "| run | published | predicted | off | in today's Trainer |",
        "|---|---:|---:|---:|---:|",
    ]
    for r in found["gains"]:
        lines.append(
            f"| {r['run']} ({r['source']}) | {r['published']:.2f} | {r['predicted']:.2f} | "
            f"{100 * (r['predicted'] / r['published'] - 1):+.0f} % | {r['in_the_trainer']:.2f} |"
        )
    if found["gains"]:
        errors = [abs(math.log(r["predicted"] / r["published"])) for r in found["gains"]]
        ordered = sum((r["predicted"] > 1) == (r["published"] > 1) for r in found["gains"])
        lines += [
            "",
            f"{ordered} of {len(errors)} in order; median error {100 * statistics.median(errors):.0f} %.",
        ]
    return [*lines, "", "<!-- end -->"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=("fused", "peaks", "gains"), help="keep the others' rows")
    parser.add_argument(
        "--peaks-of", default="Llama,BERT", help="models whose steps are compiled for real"
    )
    parser.add_argument(
        "--cuda",
        action="store_true",
        help="print the kernels that Inductor makes for a CUDA card, and end",
    )
    options = parser.parse_args()
    if options.cuda:
        for name in MODELS:
            for precision in ("fp32", "bf16-mixed"):
                rows, _, _ = fused(name, precision, "cuda")
                print(*(_fused_line(asdict(row)) for row in rows), sep="\n", flush=True)
        return
    file = STUDY / "rows.json"
    found: dict[str, list[dict[str, Any]]] = {"fused": [], "saved": [], "peaks": [], "gains": []}
    if file.exists():
        found |= json.loads(file.read_text(encoding="utf-8"))
    if options.only in (None, "fused"):
        found["fused"], found["saved"] = [], []
        for name in MODELS:
            for precision in ("fp32", "bf16-mixed"):
                rows, graphs, real_bytes = fused(name, precision, "cpu")
                found["fused"] += map(asdict, rows)
                saved = Saved(
                    model=name,
                    precision=precision,
                    graphs=graphs,
                    real_bytes=real_bytes,
                    predicted_bytes=saved_bytes(name, precision),
                )
                found["saved"].append(asdict(saved))
                print(*rows, saved, sep="\n", flush=True)
    if options.only in (None, "peaks"):
        found["peaks"] = []
        for name in options.peaks_of.split(","):
            found["peaks"].append(asdict(peak(name, "fp32")))
            print(found["peaks"][-1], flush=True)
    if options.only in (None, "gains"):
        found["gains"] = [asdict(gain) for gain in gains()]
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    readme = STUDY / "README.md"
    text = readme.read_text(encoding="utf-8")
    start, end = "<!-- made by", "<!-- end -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    readme.write_text(before + "\n".join(page(found)) + after, encoding="utf-8")


if __name__ == "__main__":
    main()
