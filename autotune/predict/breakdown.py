"""Parts of a predicted peak, by what the memory is for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.memory.allocator import EMPTY_CACHE, Replay
from autotune.memory.traces import Trace
from autotune.memory.traces.copies import numbers_of
from autotune.predict.optimizer_update import Update
from autotune.predict.sharding.shared_trace import SharedTrace
from autotune.predict.steps import Order, Steps
from autotune.records.estimate import Breakdown, ParameterCount, StateBytes

_BREAKDOWN_OF_CATEGORY = {
    "parameter": "parameters_bytes",
    "gradient": "gradients_bytes",
    "optimizer_state": "optimizer_state_bytes",
    "activation": "activations_bytes",
    "logits": "logits_bytes",
    "temporary": "temporaries_bytes",
    "workspace": "workspace_bytes",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Figures of one configuration that an estimate has beside its peak and its times."""

    breakdown: Breakdown
    state: StateBytes
    parameters: ParameterCount
    flops: tuple[float, float]
    """Floating-point operations of one optimizer step: (all, without recomputation)."""


def memory_of(
    trace: Trace | SharedTrace,
    steps: Steps,
    optimizer: Update,
    result: Replay,
    rank: int,
    flops: tuple[float, float],
) -> Memory:
    """Return what is alive at the peak of a replay of these steps, and what their state takes."""
    sizes, categories = steps.sizes, steps.categories
    total, trainable = trace.num_parameters(rank)
    return Memory(
        breakdown=breakdown(
            sizes,
            categories,
            steps.order()[: result.peak_allocated_event + 1],
            result.peak_allocated_bytes,
        ),
        state=StateBytes(
            parameters_bytes=sum_of(sizes, categories, trace.setup, "parameter"),
            gradients_bytes=sum_of(sizes, categories, trace.setup, "gradient")
            + sum(sizes[number] for number in trace.gradients),
            optimizer_state_bytes=optimizer.managed_bytes
            + sum_of(sizes, categories, trace.setup, "optimizer_state")
            + optimizer.device_state_bytes,
            optimizer_state_managed_bytes=optimizer.managed_bytes,
        ),
        parameters=ParameterCount(total=total, trainable=trainable),
        flops=flops,
    )


def sum_of(
    sizes: Sequence[int], categories: Sequence[str], events: Iterable[int], category: str
) -> int:
    """Return the bytes of the tensors of one category that these events allocate."""
    return sum(sizes[e] for e in events if e >= 0 and categories[e] == category)


def breakdown(
    sizes: Sequence[int], categories: Sequence[str], events: Order, peak_bytes: int
) -> Breakdown:
    """Return what is alive after these events, by category; the rest of the peak is rounding."""
    events = events[events != EMPTY_CACHE]
    made, freed = (
        np.bincount(numbers_of(events[chosen]), minlength=len(sizes))
        for chosen in (events >= 0, events < 0)
    )
    totals = dict.fromkeys(_BREAKDOWN_OF_CATEGORY.values(), 0)
    for number in np.flatnonzero(made > freed).tolist():
        totals[_BREAKDOWN_OF_CATEGORY[categories[number]]] += sizes[number]
    return Breakdown(**totals, rounding_bytes=peak_bytes - sum(totals.values()))
