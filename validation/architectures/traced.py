"""Every architecture that Transformers has for causal language models: can its training step be traced?

Each is taken as its configuration class makes it, without a setting changed: sizes are those of a real
model, the weights are on `meta`. For full fine-tuning, with and without checkpointing, and LoRA on all
linear layers, a trace of a few layers is held against one of all layers: events, kernels and parameters.

Nothing here is measured; what a few layers are held against is a trace as well.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from validation.architectures.each_type import refused

RECORD = "rows.jsonl"
SEQUENCE_LENGTH = 512
MICRO_BATCH, RANK = 4, 16
LORA = {
    "method": "lora",
    "lora_rank": RANK,
    "lora_targets": "all-linear",
    "precision": "bf16-autocast",
}
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "checkpointed": {"activation_checkpointing": 1},
    "lora": LORA,
}
ATTENTIONS = ("sdpa", "eager")
"""The second where the model has no first."""


def prepare() -> None:
    """Import everything once, before processes are forked: it takes ten seconds."""
    import peft  # noqa: F401
    import transformers

    import autotune.worker.trace.step  # noqa: F401

    transformers.logging.set_verbosity_error()


def compare(kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    from autotune.memory.traces import BrokenTrace, Stacks, Trace
    from autotune.worker.build.model import load_config

    config = load_config({"model_type": kind})
    began = time.monotonic()
    attention, few = _traced(config, changes)
    layers = Stacks.of_answer(few).text
    said: dict[str, Any] = {
        "attention": attention,
        "traced": layers.traced,
        "layers": layers.full,
        "seconds": round(time.monotonic() - began, 2),
    }
    try:
        trace = Trace(few)
    except BrokenTrace:
        # As a search does: all layers, when a few do not add up.
        said["traced"] = layers.full
        trace = Trace(_traced(config, changes, attention=attention, whole=True)[1])
    said["parameters"], said["trainable"] = trace.num_parameters(RANK)
    if said["traced"] < layers.full:
        whole = Trace(_traced(config, changes, attention=attention, whole=True)[1])
        said["differs"] = [part for part in _PARTS if _PARTS[part](trace) != _PARTS[part](whole)]
    return said


def _traced(
    config: Any, changes: dict[str, Any], *, attention: str | None = None, whole: bool = False
) -> tuple[str, dict[str, Any]]:
    """By the first attention that the model has."""
    from autotune.records.estimate import TraceSpec
    from autotune.space.config import TrainConfig
    from autotune.worker.build import model as models
    from autotune.worker.trace.cuda import Device
    from autotune.worker.trace.step import trace_step

    refused: Exception | None = None
    for name in ATTENTIONS if attention is None else (attention,):
        fields: dict[str, Any] = {"method": "full", "precision": "bf16-true", **changes}
        wanted = TrainConfig(
            micro_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=1,
            sequence_length=SEQUENCE_LENGTH,
            optimizer="adamw_torch",
            attention=name,
            **fields,
        )
        try:
            answer = trace_step(
                config,
                "causal-lm",
                TraceSpec.of(wanted),
                sequence_length=SEQUENCE_LENGTH,
                device=Device(compute_capability=(8, 9), cublas_workspace_bytes=8_519_680),
                whole=whole,
            )
        except models.UnsupportedModel as error:
            refused = refused or error
        else:
            return name, answer
    assert refused is not None
    raise refused


def _events(name: str) -> Any:
    """Sizes and categories in order; frees next to each other have none (an allocator cannot tell)."""

    def events(trace: Any) -> list[Any]:
        sizes = trace.sizes(MICRO_BATCH, RANK)
        seen: list[Any] = []
        frees: list[tuple[int, str]] = []
        for event in [*getattr(trace, name), None]:
            if event is not None and event < 0:
                frees.append((sizes[~event], trace.categories[~event]))
                continue
            seen += sorted(frees)
            frees = []
            if event is not None:
                seen.append(("made", sizes[event], trace.categories[event]))
        return seen

    return events


def _kernels(trace: Any) -> Counter[Any]:
    counts: Counter[Any] = Counter()
    for launch in trace.launches(MICRO_BATCH, RANK):
        kernel = launch.kernel
        counts[kernel.name, kernel.dtype, launch.flops, launch.bytes_moved] += launch.count
    return counts


_PARTS: dict[str, Any] = {
    **{name: _events(name) for name in ("setup", "first", "again", "next")},
    "kernels": _kernels,
    "parameters": lambda trace: trace.num_parameters(RANK),
}


def table(rows: list[dict[str, Any]]) -> Iterable[str]:
    import transformers

    yield f"transformers {transformers.__version__}, {len(rows)} model types\n"
    yield "| | traced | by a few layers | of which equal all layers in everything | refused |"
    yield "|---|---:|---:|---:|---:|"
    for name in CASES:
        said = [row[name] for row in rows]
        traced = [one for one in said if "traced" in one]
        few = [one for one in traced if "differs" in one]
        equal = [one for one in few if not one["differs"]]
        yield (
            f"| {name} | {len(traced)} | {len(few)} | {len(equal)} | {len(said) - len(traced)} |"
        )
    different = [
        f"- {row['model_type']}, {name}: differs in {', '.join(row[name]['differs'])}"
        for row in rows
        for name in CASES
        if row[name].get("differs")
    ]
    yield from ["\nDifferent:\n", *different] if different else []
    yield f"\nRefused, `rows.jsonl` says why: {refused(rows, CASES)}"
