"""The textbook's sum of a training step beside the traced figure, and what makes the difference.

The textbook: weights, gradients and optimizer moments, all in the precision of the weights
(P x bytes, P x bytes, moments x P x bytes), and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autotune.common.dtypes import DTYPE_BYTES
from autotune.common.units import format_count
from autotune.records.estimate import Estimate
from autotune.space.adapters import ADAPTERS
from autotune.space.config import TrainConfig
from autotune.space.optimizers import OPTIMIZERS, UPDATERS
from autotune.space.precisions import PRECISIONS, QUANTIZATIONS, dtype_beside
from autotune.space.trainers import TRAINERS


@dataclass(frozen=True, kw_only=True, slots=True)
class SumLine:
    """One line of the sum.

    None stands where the textbook has no such line, or where there is no such state.
    """

    name: str
    formula: str
    textbook_bytes: int | None
    state_bytes: int | None
    """Bytes of the state once all of it exists."""
    peak_bytes: int
    """Bytes of the state that are alive at the peak."""
    why: str
    """The reason why the figures differ; empty where they do not."""


def explain(estimate: Estimate) -> tuple[SumLine, ...]:
    """The lines of the sum, the total last; `peak_bytes` add up to peak_device_bytes."""
    names = [field.name for field in dataclasses.fields(SumLine)]
    rows = (*_states(estimate), *_beyond(estimate))
    lines = [SumLine(**dict(zip(names, row, strict=True))) for row in rows]
    total = SumLine(
        name="total",
        formula="",
        textbook_bytes=sum(line.textbook_bytes or 0 for line in lines),
        state_bytes=None,
        peak_bytes=sum(line.peak_bytes for line in lines),
        why="",
    )
    assert total.peak_bytes == estimate.peak_device_bytes
    return (*lines, total)


def _states(estimate: Estimate) -> Iterator[tuple[Any, ...]]:
    """Yield the fields of a line of each state."""
    config, parts, state = estimate.config, estimate.breakdown, estimate.state
    trainable = estimate.parameters.trainable
    frozen = estimate.parameters.total - trainable
    bits = 8 * DTYPE_BYTES[PRECISIONS[config.precision].parameter_dtype]
    base_bits = QUANTIZATIONS[config.quantization].bits if config.quantization != "none" else bits
    moments = OPTIMIZERS[config.optimizer].moments
    each, taught = _product(trainable, bits), trainable * bits // 8
    weights, formula = taught, each
    if config.method != "full":
        weights = (frozen * base_bits + trainable * bits) // 8
        formula = f"{_product(frozen, base_bits)} + {each}"
    why = _why_weights(estimate, weights)
    yield "weights", formula, weights, state.parameters_bytes, parts.parameters_bytes, why
    why = _why_gradients(estimate, taught)
    yield "gradients", each, taught, state.gradients_bytes, parts.gradients_bytes, why
    formula = f"{moments} x {each}" if moments else "no moments"
    taught = moments * trainable * bits // 8
    why, kept_bytes = _why_optimizer(estimate, taught), state.optimizer_state_bytes
    yield "optimizer", formula, taught, kept_bytes, parts.optimizer_state_bytes, why


def _beyond(estimate: Estimate) -> Iterator[tuple[Any, ...]]:
    """Yield the fields of a line of each part that the textbook does not have."""
    parts = estimate.breakdown
    cached_bytes = estimate.peak_reserved_bytes - estimate.peak_allocated_bytes
    outside = "CUDA context and kernels"
    if estimate.state.optimizer_state_managed_bytes:
        outside += ", and paged state that finds room"
    for name, size_bytes, why in (
        ("activations", parts.activations_bytes, "kept for the backward pass"),
        ("logits", parts.logits_bytes, "as wide as the vocabulary, in float32 for the loss"),
        (
            "temporaries",
            parts.temporaries_bytes,
            "as the model is loaded" if parts.is_of_loading else "of the operation at the peak",
        ),
        ("workspace", parts.workspace_bytes, "cuBLAS keeps it"),
        ("rounding", parts.rounding_bytes, "the allocator's blocks are larger than the tensors"),
        (
            "cached",
            cached_bytes,
            "reserved by the allocator, in no tensor: gaps and blocks kept for reuse",
        ),
        ("vLLM", estimate.vllm_bytes, _why_vllm(estimate.config)),
        ("outside", estimate.nontorch_bytes - estimate.vllm_bytes, outside),
    ):
        if name != "vLLM" or size_bytes:
            yield name, "", None, None, size_bytes, why


def _why_vllm(config: TrainConfig) -> str:
    share = f"{100 * config.vllm_gpu_memory_utilization:.4g} % of the card"
    if config.vllm_enable_sleep_mode:
        return f"kept asleep, or what its {share} comes to beyond training's peak while it writes"
    return f"its {share}: its own copy of the weights, its cache of keys and values, CUDA graphs"


def _product(count: int, bits: int) -> str:
    return f"{format_count(count)} x {bits / 8:g} bytes"


def _same(state_bytes: int, textbook_bytes: int) -> bool:
    """Whether two sizes are closer than the eye can tell apart in the table."""
    return abs(state_bytes - textbook_bytes) <= max(0.002 * textbook_bytes, 4096)


def _trains_float32(config: TrainConfig) -> bool:
    """Whether what trains is in float32, as PEFT makes adapters."""
    is_cast = config.method != "full" and ADAPTERS[config.method].is_float32
    beside = dtype_beside(config.precision, config.quantization, config.quantization_storage)
    return (is_cast and not config.adapter_in_base_dtype) or beside == "float32"


def _why_shared(estimate: Estimate, textbook_bytes: int, state_bytes: int) -> str:
    """The effect of several GPUs on a state, in words; empty where it is one GPU's, or whole on each."""
    if estimate.per_gpu is None or _same(state_bytes, textbook_bytes):
        return ""
    if state_bytes > textbook_bytes:
        return f"copies that {estimate.config.parallelism} keeps to exchange or to update"
    return f"each of {estimate.per_gpu.num_gpus} GPUs keeps its part"


def _why_weights(estimate: Estimate, textbook_bytes: int) -> str:
    if _same(estimate.state.parameters_bytes, textbook_bytes):
        return ""
    if shared := _why_shared(estimate, textbook_bytes, estimate.state.parameters_bytes):
        return shared
    row = TRAINERS[estimate.config.trainer]
    if row.has_teacher:
        return "of the model, and of its teacher"
    if estimate.config.quantization != "none":
        return "embeddings, norms and head are not quantised; scales; adapters in float32"
    if estimate.config.method != "full":
        return "adapters are in float32"
    is_scored = row.has_reference and not estimate.config.precompute_ref_log_probs
    if is_scored or estimate.config.kl_beta:
        return "of the model, and of its reference"
    return "buffers, or weights that are shared"


def _why_gradients(estimate: Estimate, textbook_bytes: int) -> str:
    if shared := _why_shared(estimate, textbook_bytes, estimate.state.gradients_bytes):
        return shared
    if not _same(estimate.state.gradients_bytes, textbook_bytes):
        return "adapters are in float32" if estimate.config.method != "full" else "shared weights"
    if estimate.breakdown.gradients_bytes < 0.9 * estimate.state.gradients_bytes:
        if UPDATERS[estimate.config.updater].updates:
            return "each is used up in the backward pass: never all of them exist"
        return "not all of them exist at the peak"
    return ""


def _why_optimizer(estimate: Estimate, textbook_bytes: int) -> str:
    row, state = OPTIMIZERS[estimate.config.optimizer], estimate.state
    if state.optimizer_state_managed_bytes:
        kind = "8-bit moments" if row.state_format == "8bit" else "float32 moments"
        return f"{kind}, in managed memory outside of torch"
    if _same(state.optimizer_state_bytes, textbook_bytes):
        return ""
    if shared := _why_shared(estimate, textbook_bytes, state.optimizer_state_bytes):
        return shared
    if row.state_note and not (row.note_of_16_bits and _trains_float32(estimate.config)):
        return row.state_note
    if estimate.config.method != "full" or row.state_format == "32bit":
        return "float32 moments"
    return "step counters"
