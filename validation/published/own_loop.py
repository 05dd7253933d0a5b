"""A fine-tuning loop without a Trainer, traced and replayed as the program of other people's T4 runs.

The program (studies/published-t4/SOURCE.md): weights in float16 or NF4, PEFT's adapters in float32, no
autocast, no scaler, no clipping; a batch that stays on the card; zero_grad, `out = model(...)`,
`out.loss.backward()`, `optimizer.step()`. The variable `out` holds logits and loss until the step ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

from autotune.catalogue.gpus import Gpu
from autotune.memory.allocator import EMPTY_CACHE, Tape
from autotune.memory.replayer import replay
from autotune.memory.traces import Trace
from autotune.memory.traces.running import changes, in_blocks
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.space.optimizers import OPTIMIZERS
from autotune.space.precisions import PRECISIONS, Precision
from autotune.speed.host import NO_WORK, Host
from autotune.worker.build import adapters
from autotune.worker.build import model as models
from autotune.worker.trace import meta_step, sdpa
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.meta_step import MetaStep
from autotune.worker.trace.step import trace_step

PRECISION = "fp16-true"
_ROW = Precision(parameter_dtype="float16", compute_dtype="float16")
NUM_STEPS = 4
"""Steps that are replayed: one to warm up and one measured is the program's least; later ones are alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """Bytes of torch's counters over a step that has state, and of each part of it."""

    before_step_bytes: int
    forward_bytes: int
    backward_bytes: int
    optimizer_bytes: int
    reserved_bytes: int

    @property
    def allocated_bytes(self) -> int:
        return max(self.forward_bytes, self.backward_bytes, self.optimizer_bytes)


def without_trainer(host: Host) -> Host:
    """The same host under a plain loop: beside the operations it has the optimizer's Python alone."""
    return dataclasses.replace(
        host,
        before_micro_step=NO_WORK,
        after_micro_step=NO_WORK,
        before_update=NO_WORK,
        update=dataclasses.replace(host.update, seconds=0, module_seconds=0),
    )


@contextlib.contextmanager
def precision_of_loop() -> Iterator[None]:
    """The loop's precision beside the Trainer's."""
    with mock.patch.dict(PRECISIONS, {PRECISION: _ROW}):
        yield


def traced(model: dict[str, Any], config: TrainConfig, gpu: Gpu) -> Trace:
    """Trace the loop's step."""
    assert gpu.compute_capability is not None
    assert gpu.cublas_workspace_bytes is not None
    device = Device(
        compute_capability=gpu.compute_capability,
        cublas_workspace_bytes=gpu.cublas_workspace_bytes,
    )
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (MetaStep, "_loss", _loss_of_held_outputs),
            (meta_step, "batch_of", _batch),
            (models, "accepts_loss_kwargs", lambda _: False),
            (sdpa, "attention", functools.partial(_with_heads_expanded, sdpa.attention)),
            (adapters, "add_adapter", functools.partial(_add_adapter, adapters.add_adapter)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        return Trace(
            trace_step(
                models.load_config(model),
                "causal-lm",
                TraceSpec.of(config),
                sequence_length=config.sequence_length,
                device=device,
            )
        )


def _loss_of_held_outputs(step: MetaStep, inputs: dict[str, Any], *, accepts: bool) -> torch.Tensor:
    assert not accepts
    model: Any = step.model
    inputs["outputs"] = outputs = model(**inputs)
    loss: torch.Tensor = outputs["loss"]
    return loss


def _batch(
    _: str, __: TraceSpec, micro_batch: int, sequence_length: int, ___: None = None
) -> dict[str, Any]:
    tokens = torch.empty((micro_batch, sequence_length), dtype=torch.int64, device="meta")
    return {"input_ids": tokens, "labels": tokens}


def _with_heads_expanded(
    attention: Callable[..., torch.Tensor],
    capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *arguments: Any,
    **settings: Any,
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (each.repeat_interleave(groups, dim=-3) for each in (key, value))
        settings.pop("enable_gqa", None)
    return attention(capability, query, key, value, *arguments, **settings)


def _add_adapter(add: Callable[..., Any], model: Any, *arguments: Any) -> Any:
    adapted = add(model, *arguments)
    adapted.enable_input_require_grads()
    return adapted


def peaks(
    trace: Trace,
    config: TrainConfig,
    *,
    empties_cache: bool,
    by_address: bool,
    cap_bytes: int | None = None,
) -> Peaks:
    """Replay the loop. `empties_cache`: before there is an adapter. `cap_bytes`: what may be reserved.

    `by_address`: as by the allocator of torch before 2.12.
    """
    rank = config.lora_rank or 0
    specs = trace.trainable(rank)
    tape = Tape(
        sizes=trace.sizes(config.micro_batch_size, rank),
        categories=list(trace.categories),
        events=list(trace.setup),
    )
    if empties_cache:
        tape.events.insert(trace.num_prepared_events, EMPTY_CACHE)
    loaded = len(tape.events)
    tape.events += trace.batch
    algorithm = OPTIMIZERS[config.optimizer].algorithm
    _, _, held = trace.blocks()[-1]
    held = [*held, *([] if trace.loss is None or ~trace.loss in held else [~trace.loss])]
    states, borders = None, list[int]()
    for step in range(NUM_STEPS):
        events = trace.again if step else trace.first
        middle = trace.num_forward_events + (0 if step else trace.num_forward_workspaces)
        if step:
            tape.events += [~gradient for gradient in trace.gradients]
        borders = [len(tape.events)]
        tape.events += events[:middle]
        borders.append(len(tape.events))
        tape.events += [event for event in events[middle:] if event not in held]
        borders.append(len(tape.events))
        states = algorithm.write_step(tape, specs, states)
        borders.append(len(tape.events))
        tape.events += held
    parts = [_peak(tape, start, end) for start, end in itertools.pairwise(borders)]
    forward, backward, optimizer = parts
    return Peaks(
        before_step_bytes=replay(tape.sizes, tape.events[:loaded]).final_allocated_bytes,
        forward_bytes=forward,
        backward_bytes=backward,
        optimizer_bytes=optimizer,
        reserved_bytes=_reserved(tape, cap_bytes, by_address),
    )


def _reserved(tape: Tape, cap_bytes: int | None, by_address: bool) -> int:
    """Most bytes that are reserved under the cap; where that does not do, without one."""
    capped = replay(tape.sizes, tape.events, cap_bytes=cap_bytes, by_address=by_address)
    if capped.failed_event is None:
        return capped.peak_reserved_bytes
    return replay(tape.sizes, tape.events, by_address=by_address).peak_reserved_bytes


def _peak(tape: Tape, start: int, end: int) -> int:
    """Allocated bytes where most is alive between two events, as the allocator counts them."""
    order = np.asarray([0 if e == EMPTY_CACHE else e for e in tape.events[:end]], dtype=np.int64)
    deltas = changes(order, in_blocks(tape.sizes))
    deltas[[i for i, e in enumerate(tape.events[:end]) if e == EMPTY_CACHE]] = 0
    alive = np.cumsum(deltas)
    most = max(start, 1) - 1 + int(alive[max(start, 1) - 1 :].argmax())
    return replay(tape.sizes, tape.events[: most + 1]).final_allocated_bytes
