"""Traces -> Estimates: predicted memory and time of any number of configurations on one card.

Memory: the events of two optimizer steps (weights, micro-steps, clipping, optimizer, zero_grad) go
through the allocator model, so that state exists when the second step peaks. Time: the kernels of a
micro-step and of an optimizer step go through the roofline, apart, so that any accumulation is priced.

A full replay takes milliseconds; `floor_bytes` takes microseconds and cannot be too high, `seconds`
likewise is exact but for paging. A search needs the replay only of what could win.

Not modelled: torch.compile, several streams, kernels outside the trace (data loading, logging,
evaluation, checkpoints), fragmentation left by earlier work in the process.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune import roofline
from autotune.allocator import EMPTY_CACHE_BYTES, Tape, replay
from autotune.config import PRECISIONS, TrainConfig
from autotune.gpus import Gpu
from autotune.optimizer_steps import (
    StepCost,
    TensorSpec,
    clip_cost,
    unscale_cost,
    write_clip,
    write_unscale,
)
from autotune.optimizers import OPTIMIZERS
from autotune.results import Breakdown, Estimate, ParameterCount, StateBytes, TraceSpec
from autotune.traces import Trace

_BREAKDOWN_OF_CATEGORY = {
    "parameter": "parameters_bytes",
    "gradient": "gradients_bytes",
    "optimizer_state": "optimizer_state_bytes",
    "activation": "activations_bytes",
    "logits": "logits_bytes",
    "temporary": "temporaries_bytes",
    "workspace": "workspace_bytes",
}


# "about 10% slower" (transformers 5.23 TrainingArguments.torch_empty_cache_steps, its issue 31372):
# what giving segments back and asking for them again adds to a step that does it.
_EMPTY_CACHE_SHARE = 0.10


@dataclass(frozen=True, kw_only=True, slots=True)
class _MicroStep:
    """Bytes of one (trace, micro-batch, rank), rounded as the allocator rounds."""

    weights_bytes: int
    workspace_bytes: int
    gradients_bytes: int
    peak_first_bytes: int
    """Above weights, workspaces and optimizer state."""
    peak_next_bytes: int
    """Above those and the gradients, while a second micro-batch adds to them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _OptimizerStep:
    sizes: list[int]
    categories: list[str]
    first: list[int]
    later: list[int]
    state_bytes: int
    managed_bytes: int
    temporary_peak_bytes: int
    """Above weights, gradients and state."""
    cost: StepCost


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeconds:
    """Predicted times of one configuration."""

    micro_step_seconds: float
    optimizer_step_seconds: float
    total_seconds: float
    bound: str


class Estimator:
    """Prices configurations of one model on one card under one budget."""

    def __init__(
        self, traces: Mapping[TraceSpec, Trace], gpu: Gpu, *, memory_budget_bytes: int
    ) -> None:
        assert gpu.context_bytes is not None
        self.gpu = gpu
        self.memory_budget_bytes = memory_budget_bytes
        self._traces = traces
        self._context_bytes = gpu.context_bytes
        self._machine = roofline.ceilings(gpu)
        self._micro_step = functools.cache(self._price_micro_step)
        self._optimizer_step = functools.cache(self._price_optimizer_step)
        self._lists: dict[tuple[TensorSpec, ...], int] = {}
        self._list = functools.cache(self._list_number)
        self._forward_backward = functools.cache(self._price_forward_backward)
        self._accumulation = functools.cache(self._price_accumulation)

    def with_budget(self, memory_budget_bytes: int) -> Estimator:
        """The same with another budget; what is priced already is shared."""
        other = copy.copy(self)
        other.memory_budget_bytes = memory_budget_bytes
        return other

    def supports(self, config: TrainConfig) -> bool:
        """Whether the model could be traced with this configuration."""
        return TraceSpec.of(config) in self._traces

    def floor_bytes(self, config: TrainConfig) -> int:
        """A lower bound of peak_device_bytes: live tensors and the context, nothing cached."""
        spec, rank = TraceSpec.of(config), config.lora_rank or 0
        micro = self._micro_step(spec, config.micro_batch_size, rank)
        optimizer = self._update(spec, rank, config.optimizer)
        above = max(
            micro.peak_first_bytes,
            micro.gradients_bytes + optimizer.temporary_peak_bytes,
            micro.gradients_bytes + micro.peak_next_bytes
            if config.gradient_accumulation_steps > 1
            else 0,
        )
        state = optimizer.state_bytes
        return self._context_bytes + micro.weights_bytes + micro.workspace_bytes + state + above

    def seconds(self, config: TrainConfig, resident_bytes: int | None = None) -> StepSeconds | None:
        """Predicted time of an optimizer step; None where the card's rates are unknown.

        `resident_bytes`: what the device holds besides managed memory (peak reserved and context).
        Without it the floor is taken, so paging is not overestimated.
        """
        spec, rank = TraceSpec.of(config), config.lora_rank or 0
        micro = self._forward_backward(spec, config.micro_batch_size, rank, config.precision)
        added = self._accumulation(self._list(spec, rank))
        optimizer = self._update(spec, rank, config.optimizer)
        if resident_bytes is None:
            resident_bytes = self.floor_bytes(config) if optimizer.managed_bytes else 0
        paged = self._paged_out_bytes(optimizer, resident_bytes)
        update = self._time(_optimizer_kernels(optimizer.cost, paged))
        if micro is None or added is None or update is None:
            return None
        accumulation = config.gradient_accumulation_steps
        steps = accumulation * micro.total_seconds + (accumulation - 1) * added.total_seconds
        if config.torch_empty_cache_steps:
            steps *= 1 + _EMPTY_CACHE_SHARE / config.torch_empty_cache_steps
        return StepSeconds(
            micro_step_seconds=steps / accumulation,
            optimizer_step_seconds=update.total_seconds,
            total_seconds=steps + update.total_seconds,
            bound=micro.bound if steps > update.total_seconds else update.bound,
        )

    def tokens_per_second(self, config: TrainConfig) -> float | None:
        """Predicted speed, an upper bound where a paged optimizer has to page."""
        seconds = self.seconds(config)
        return None if seconds is None else config.tokens_per_step / seconds.total_seconds

    def estimate(self, config: TrainConfig) -> Estimate:
        """Predicted peaks, breakdown and time by a full replay."""
        spec, rank = TraceSpec.of(config), config.lora_rank or 0
        trace = self._traces[spec]
        optimizer = self._update(spec, rank, config.optimizer)
        micro_sizes = trace.sizes(config.micro_batch_size, rank)
        sizes = [*micro_sizes, *optimizer.sizes, EMPTY_CACHE_BYTES]
        events = self._two_steps(trace, optimizer, len(micro_sizes), config)
        result = replay(sizes, events)
        resident = result.peak_reserved_bytes + self._context_bytes
        managed = optimizer.managed_bytes - self._paged_out_bytes(optimizer, resident)
        seconds = self.seconds(config, resident)
        flops, model_flops = self._flops(config, spec, rank)
        categories = [*trace.categories, *optimizer.categories, "temporary"]
        total, trainable = trace.num_parameters(rank)
        return Estimate(
            config=config,
            gpu=self.gpu.name,
            peak_allocated_bytes=result.peak_allocated_bytes,
            peak_reserved_bytes=result.peak_reserved_bytes,
            nontorch_bytes=self._context_bytes + managed,
            breakdown=_breakdown(
                sizes,
                categories,
                events[: result.peak_allocated_event + 1],
                result.peak_allocated_bytes,
            ),
            state=StateBytes(
                parameters_bytes=_sum_of(sizes, categories, trace.setup, "parameter"),
                gradients_bytes=_sum_of(sizes, categories, trace.first, "gradient"),
                optimizer_state_bytes=optimizer.managed_bytes
                + _sum_of(
                    optimizer.sizes, optimizer.categories, optimizer.first, "optimizer_state"
                ),
                optimizer_state_managed_bytes=optimizer.managed_bytes,
            ),
            parameters=ParameterCount(total=total, trainable=trainable),
            micro_step_seconds=None if seconds is None else seconds.micro_step_seconds,
            optimizer_step_seconds=None if seconds is None else seconds.optimizer_step_seconds,
            flops_per_step=flops,
            model_flops_per_step=model_flops,
            mfu=None
            if seconds is None
            else roofline.mfu(
                model_flops=model_flops,
                step_seconds=seconds.total_seconds,
                gpu=self.gpu,
                dtype=_compute_dtype(config.precision),
            ),
            bound=None if seconds is None else seconds.bound,
        )

    def _two_steps(
        self, trace: Trace, optimizer: _OptimizerStep, offset: int, config: TrainConfig
    ) -> list[int]:
        every, marker = config.torch_empty_cache_steps, offset + len(optimizer.sizes)

        def micro_step(events: list[int], step: int, more: int = 0) -> list[int]:
            """The Trainer empties the cache between forward and backward (training_step)."""
            if not every or step % every:
                return events
            middle = trace.num_forward_events + more
            return [*events[:middle], marker, ~marker, *events[middle:]]

        is_more = config.gradient_accumulation_steps > 1
        first_more, later_more = (
            micro_step(trace.next, step) if is_more else [] for step in (0, 1)
        )
        zero_grad = [~gradient for gradient in trace.gradients]
        first, later = (
            [e + offset if e >= 0 else e - offset for e in events]
            for events in (optimizer.first, optimizer.later)
        )
        first_step = micro_step(trace.first, 0, trace.num_forward_workspaces)
        events = [*trace.setup, *first_step, *first_more, *first, *zero_grad]
        return [*events, *micro_step(trace.again, 1), *later_more, *later, *zero_grad]

    def _paged_out_bytes(self, optimizer: _OptimizerStep, resident_bytes: int) -> int:
        """Managed state that the budget has no room for beside what torch holds."""
        room = max(self.memory_budget_bytes - resident_bytes, 0)
        return max(optimizer.managed_bytes - room, 0)

    def _price_micro_step(self, spec: TraceSpec, micro_batch: int, rank: int) -> _MicroStep:
        trace = self._traces[spec]
        return _MicroStep(
            weights_bytes=int(trace.running_bytes("setup", micro_batch, rank)[-1]),
            workspace_bytes=trace.bytes_of(trace.workspaces, micro_batch, rank),
            gradients_bytes=trace.bytes_of(trace.gradients, micro_batch, rank),
            peak_first_bytes=int(trace.running_bytes("again", micro_batch, rank).max()),
            peak_next_bytes=int(trace.running_bytes("next", micro_batch, rank).max()),
        )

    def _list_number(self, spec: TraceSpec, rank: int) -> int:
        """Number of the list of trainable parameters: traces that train the same share it."""
        specs = tuple(self._traces[spec].trainable(rank))
        return self._lists.setdefault(specs, len(self._lists))

    def _trainable(self, list_number: int) -> tuple[TensorSpec, ...]:
        return next(specs for specs, number in self._lists.items() if number == list_number)

    def _update(self, spec: TraceSpec, rank: int, name: str) -> _OptimizerStep:
        scaled = PRECISIONS[spec.precision].grad_scaler
        return self._optimizer_step(self._list(spec, rank), scaled, name)

    def _price_optimizer_step(self, list_number: int, scaled: bool, name: str) -> _OptimizerStep:
        specs = self._trainable(list_number)
        algorithm = OPTIMIZERS[name].algorithm
        tape = Tape()
        first, states = _write_update(tape, specs, algorithm, None, scaled=scaled)
        state_bytes = sum(
            (size + 511) // 512 * 512
            for size, category in zip(tape.sizes, tape.categories, strict=True)
            if category == "optimizer_state"
        )
        num_first = len(tape.sizes)
        later, _ = _write_update(tape, specs, algorithm, states, scaled=scaled)
        rounded = (np.asarray(tape.sizes, dtype=np.int64) + 511) // 512 * 512
        temporaries = [e for e in later if (e if e >= 0 else ~e) >= num_first]
        costs = [algorithm.cost(specs), clip_cost(specs)]
        if scaled:
            costs.append(unscale_cost(specs))
        managed = sum(t.size_bytes for s in specs for t in algorithm.state(s) if t.managed)
        return _OptimizerStep(
            sizes=tape.sizes,
            categories=tape.categories,
            first=first,
            later=later,
            state_bytes=state_bytes,
            managed_bytes=managed,
            temporary_peak_bytes=int(_running(rounded, temporaries).max()),
            cost=StepCost(
                bytes_moved=sum(c.bytes_moved for c in costs),
                num_kernels=sum(c.num_kernels for c in costs),
                num_synchronizations=sum(c.num_synchronizations for c in costs),
            ),
        )

    def _price_forward_backward(
        self, spec: TraceSpec, micro_batch: int, rank: int, precision: str
    ) -> roofline.StepTime | None:
        tf32 = PRECISIONS[precision].tf32
        kernels = []
        for launch in self._traces[spec].launches(micro_batch, rank):
            k = launch.kernel
            kind = "copy_host" if k.name == "copy_host" else roofline.kind_of(k.name)
            kernels.append(
                roofline.Kernel(
                    name=k.name,
                    kind=kind,
                    dtype="tf32" if tf32 and kind == "matmul" and k.dtype == "float32" else k.dtype,
                    flops=launch.flops,
                    bytes_moved=launch.bytes_moved,
                    count=launch.count,
                )
            )
        return self._time(kernels)

    def _price_accumulation(self, list_number: int) -> roofline.StepTime | None:
        """Adding each gradient to the one that is there: two reads and a write."""
        specs = self._trainable(list_number)
        return self._time(
            roofline.Kernel(
                name="add_",
                kind="elementwise",
                dtype=s.dtype,
                flops=0,
                bytes_moved=3 * s.size_bytes,
            )
            for s in specs
        )

    def _time(self, kernels: Iterable[roofline.Kernel]) -> roofline.StepTime | None:
        return roofline.seconds(kernels, self._machine)

    def _flops(self, config: TrainConfig, spec: TraceSpec, rank: int) -> tuple[float, float]:
        """(all, without recomputation) of one optimizer step."""
        total = model = 0.0
        for launch in self._traces[spec].launches(config.micro_batch_size, rank):
            flops = launch.count * launch.flops
            total += flops
            model += 0 if launch.kernel.recomputed else flops
        accumulation = config.gradient_accumulation_steps
        return float(total * accumulation), float(model * accumulation)


def _write_update(
    tape: Tape, specs: Sequence[TensorSpec], algorithm: Any, states: Any, *, scaled: bool
) -> tuple[list[int], Any]:
    """One optimizer step as the Trainer runs it: unscale, clip, step. Scalars last until its end."""
    start = len(tape.events)
    kept = [write_unscale(tape)] if scaled else []
    kept.append(write_clip(tape, specs))
    states = algorithm.write_step(tape, specs, states)
    for index in kept:
        tape.free(index)
    return tape.events[start:], states


def _optimizer_kernels(cost: StepCost, paged_out_bytes: int) -> list[roofline.Kernel]:
    kernels = [
        roofline.Kernel(
            name="optimizer",
            kind="elementwise",
            dtype="float32",
            flops=0,
            bytes_moved=cost.bytes_moved / cost.num_kernels,
            count=cost.num_kernels,
        )
    ]
    if paged_out_bytes:
        # Each step brings the pages in and puts others out.
        kernels.append(
            roofline.Kernel(
                name="paging",
                kind="copy_host",
                dtype="uint8",
                flops=0,
                bytes_moved=2 * paged_out_bytes,
            )
        )
    return kernels


def _compute_dtype(precision: str) -> str:
    row = PRECISIONS[precision]
    return "tf32" if row.tf32 else row.compute_dtype


def _running(rounded: Any, events: Sequence[int]) -> Any:
    """Bytes alive after each event, from zero."""
    if not events:
        return np.zeros(1, dtype=np.int64)
    order = np.asarray(events, dtype=np.int64)
    frees = order < 0
    deltas = rounded[np.where(frees, ~order, order)]
    return np.cumsum(np.where(frees, -deltas, deltas))


def _sum_of(
    sizes: Sequence[int], categories: Sequence[str], events: Iterable[int], category: str
) -> int:
    return sum(sizes[e] for e in events if e >= 0 and categories[e] == category)


def _breakdown(
    sizes: Sequence[int], categories: Sequence[str], events: Iterable[int], peak_bytes: int
) -> Breakdown:
    live: set[int] = set()
    for event in events:
        if event >= 0:
            live.add(event)
        else:
            live.discard(~event)
    totals = dict.fromkeys(_BREAKDOWN_OF_CATEGORY.values(), 0)
    for number in live:
        totals[_BREAKDOWN_OF_CATEGORY[categories[number]]] += sizes[number]
    return Breakdown(**totals, rounding_bytes=peak_bytes - sum(totals.values()))
