"""An optimizer step over a list of parameters, priced: what it allocates, what it keeps, what it costs."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.memory.allocator import Tape
from autotune.memory.optimizers import (
    Algorithm,
    StepCost,
    TensorSpec,
    clip_cost,
    unscale_cost,
    write_clip,
    write_unscale,
)
from autotune.memory.optimizers.core import NO_COST, States
from autotune.memory.optimizers.torch_lists import OneByOne, TensorLists
from autotune.memory.traces.running import changes, in_blocks, running
from autotune.space.optimizers import Optimizer
from autotune.speed import roofline

MOST_STEPS = 8
"""Most optimizer steps that are replayed. [judgement] Reserved bytes grow in the first two steps, often in a
third."""


@dataclass(frozen=True, slots=True, eq=False)
class Trainable:
    """Trainable parameters: one object for all traces that train the same."""

    identity: str
    """A text that no other list of parameters has."""
    num: int
    read: Callable[[], Sequence[TensorSpec]]


def identity_of(specs: Iterable[TensorSpec]) -> str:
    """Return a digest of parameters, which no other list of them has."""
    return hashlib.sha256("".join(map(_text_of, specs)).encode()).hexdigest()


@functools.cache
def _text_of(spec: TensorSpec) -> str:
    return repr(spec)


@dataclass(frozen=True, kw_only=True)
class UpdateCosts:
    """The bytes and the work of one optimizer on one list of trainable parameters."""

    device_state_bytes: int
    state_bytes: int
    """Bytes of the state on the device, in the allocator's blocks."""
    managed_bytes: int
    host_bytes: int
    temporary_peak_bytes: int
    """Peak of an update above weights, gradients and state."""
    cost: StepCost
    makes_at_once: bool
    """Whether its state is made as the optimizer is, before the first forward pass."""
    num_compiled: int = 0
    """Different updates that it compiles in its first step, one for each shape that is trained."""


@dataclass(frozen=True, kw_only=True)
class Update(UpdateCosts):
    """One optimizer on one list of trainable parameters, with the events of its updates."""

    tape: Tape
    made: list[int]
    """Events before the first forward pass, when the optimizer is made: those of its state, or none."""
    first: list[int]
    """Events of the first step, which makes the state that is not there."""
    write_later: Callable[[], list[list[int]]]
    """Writes what `later` lists."""

    # Few of a search's updates are replayed: for the others two steps are enough.
    @functools.cached_property
    def later(self) -> list[list[int]]:
        """Events of each step after the first: they are alike, but a part of the state may be made anew."""
        return self.write_later()


def costs_of(update: UpdateCosts) -> UpdateCosts:
    """Return the costs of an update without its events."""
    names = (each.name for each in dataclasses.fields(UpdateCosts))
    return UpdateCosts(**{name: getattr(update, name) for name in names})


class LaterUpdate(Update):
    """An update whose costs are known, and whose events are written once they are needed."""

    def __init__(self, costs: UpdateCosts, write: Callable[[], Update]) -> None:
        names = (each.name for each in dataclasses.fields(UpdateCosts))
        self.__dict__.update({name: getattr(costs, name) for name in names}, _write=write)

    def __getattr__(self, name: str) -> Any:
        """Write the events, as the first of them are asked for."""
        write = self.__dict__.pop("_write", None)
        if write is None:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        self.__dict__.update({**vars(write()), **self.__dict__})
        return getattr(self, name)


def priced_update(
    row: Optimizer,
    specs: Sequence[TensorSpec],
    *,
    scaled: bool,
    has_parts: bool = False,
    multiprocessors: tuple[int, int] | None = None,
    product_bytes: int = 0,
) -> Update:
    """Price an optimizer on these parameters: the events, memory and cost of its updates.

    `scaled`: there is a loss scaler, and gradients are unscaled first. `has_parts`: parameters are DTensors,
    for which torch has no foreach kernels. `multiprocessors` and `product_bytes` are the
    card's, as Tape has them.
    """
    lists = row.algorithm
    is_loop = has_parts and multiprocessors is None
    if is_loop and isinstance(lists, TensorLists) and not lists.step_on_device:
        row = dataclasses.replace(row, algorithm=OneByOne(lists=lists))
    tape = Tape(multiprocessors=multiprocessors, product_bytes=product_bytes)
    costs = [row.cost(specs)]
    if row.updates:
        # What a weight's update allocates comes and goes within the backward pass.
        row.write_state(tape, specs)
        first, second = tape.events, list[int]()
        write_later: Callable[[], list[list[int]]] = functools.partial(list, [second])
    else:
        write = functools.partial(_write_step, tape, specs, row.algorithm, scaled=scaled)
        first, norm, states = write(None)
        second, norm, states = write(states, norm=norm)
        write_later = functools.partial(_write_later, write, second, norm, states)
        costs.append(clip_cost(specs))
    if scaled:
        costs.append(unscale_cost(specs))
    sizes = np.asarray(tape.sizes, dtype=np.int64)
    both = np.asarray(first, dtype=np.int64)
    made = list[int]()
    if isinstance(row.algorithm, TensorLists) and row.algorithm.state_at_once:
        made = [event for event in first if _is_state(tape, event)]
        first = [event for event in first if not _is_state(tape, event)]
    is_state = np.asarray(tape.categories) == "optimizer_state"
    temporaries = running(np.asarray(second, dtype=np.int64), in_blocks(sizes))
    return Update(
        tape=tape,
        made=made,
        first=first,
        write_later=write_later,
        device_state_bytes=int(changes(both, np.where(is_state, sizes, 0)).sum()),
        state_bytes=int(changes(both, np.where(is_state, in_blocks(sizes), 0)).sum()),
        managed_bytes=row.managed_bytes(specs),
        host_bytes=row.host_bytes(specs),
        temporary_peak_bytes=int(temporaries.max(initial=0)),
        cost=sum(costs, NO_COST),
        makes_at_once=bool(made),
        num_compiled=len({(spec.shape, spec.dtype) for spec in specs}) if row.compiles else 0,
    )


def _write_later(
    write: Callable[..., tuple[list[int], int, States]],
    second: list[int],
    norm: int,
    states: States,
) -> list[list[int]]:
    later = [second]
    for _ in range(2, MOST_STEPS):
        events, norm, states = write(states, norm=norm)
        later.append(events)
    return later


def _is_state(tape: Tape, event: int) -> bool:
    return event >= 0 and tape.categories[event] == "optimizer_state"


def _write_step(
    tape: Tape,
    specs: Sequence[TensorSpec],
    algorithm: Algorithm,
    states: States | None,
    *,
    norm: int | None = None,
    scaled: bool,
) -> tuple[list[int], int, States]:
    """Write one step as the Trainer runs it (unscale, clip, step): (events, the norm's number, states).

    The Trainer keeps the norm of the gradients until the next step clips: `norm` is of the one before.
    """
    start = len(tape.events)
    if norm is not None:
        tape.free(norm)
    found_inf = write_unscale(tape) if scaled else None
    norm = write_clip(tape, specs)
    states = algorithm.write_step(tape, specs, states)
    if found_inf is not None:
        tape.free(found_inf)
    return tape.events[start:], norm, states


def kernels_of(cost: StepCost, paged_out_bytes: int) -> list[roofline.Kernel]:
    """The kernels that the GPU runs for an update of this cost.

    `paged_out_bytes`: managed state that does not fit on the device.
    """
    num_quantized, quantized_bytes = cost.num_quantized_kernels, cost.quantized_bytes
    values_each = cost.num_quantized_values / max(num_quantized, 1)
    num_other = cost.num_kernels - num_quantized - sum(each.count for each in cost.lists)
    other_bytes = cost.bytes_moved - quantized_bytes
    other_bytes -= sum(each.bytes_moved for each in cost.lists)
    kernels = [
        roofline.Kernel(
            name="optimizer",
            kind="elementwise",
            dtype="float32",
            flops=0,
            bytes_moved=moved / count,
            shape=shape,
            count=count,
        )
        for count, moved, shape in (
            (num_other, other_bytes, ()),
            (num_quantized, quantized_bytes, (values_each,)),
        )
        if count
    ]
    kernels += [
        roofline.Kernel(
            name="optimizer",
            kind="lists",
            dtype="float32",
            flops=0,
            bytes_moved=each.bytes_moved / each.count,
            shape=(
                each.num_blocks / each.count,
                each.num_rounds / each.count,
                float(each.is_fused),
            ),
            count=each.count,
        )
        for each in cost.lists
    ]
    kernels += [
        roofline.Kernel(name="mm", kind="matmul", dtype=dtype, flops=flops, bytes_moved=0, count=1)
        for dtype, flops in cost.matmul_flops
    ]
    # Each step brings the pages in and puts others out.
    copied_bytes = cost.host_bytes + 2 * paged_out_bytes
    if copied_bytes:
        kernels.append(
            roofline.Kernel(
                name="copies", kind="copy_host", dtype="uint8", flops=0, bytes_moved=copied_bytes
            )
        )
    return kernels
