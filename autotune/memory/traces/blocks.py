"""A block of a traced step: its phase, its kernels, its events with and without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune.memory.traces.copies import order_of
from autotune.memory.traces.layers import Stacks
from autotune.memory.traces.phases import (
    FETCH_PHASES,
    FORWARD_PHASES,
    SETUP_PHASES,
    Phase,
    Place,
)
from autotune.memory.traces.terms import Term


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedKernel:
    """A kernel of a traced step, its sizes still symbolic."""

    name: str
    dtype: str
    flops: Term
    moved: tuple[Term, ...]
    """Bytes read and written, as a sum of terms."""
    phase: str
    """One of forward, backward, or recompute: activation checkpointing's second forward pass."""
    count: int
    shape: tuple[tuple[int, int, int, int], ...] = ()
    """Sizes that its speed depends on: each a term, and 1 where that is per token of a chunk, or 0."""
    chunk_moved: tuple[Term, ...] | None = None
    """Bytes per token of a chunk; where not None, the kernel handles a chunk of tokens, and `flops` is per
    token of it."""
    repeated: bool = False
    """Whether it is launched for each chunk but the first."""
    of_each: bool = False
    """Whether it is launched for each sample of a micro-batch, `count` times."""


def cut(
    events: list[int], starts: Sequence[tuple[Phase, Place, int]]
) -> list[tuple[Phase, Place, list[int]]]:
    """Events by block."""
    ends = [*(start for *_, start in starts[1:]), len(events)]
    return [
        (phase, place, events[start:end])
        for (phase, place, start), end in zip(starts, ends, strict=True)
    ]


def adding(tensors: Sequence[Mapping[str, Any]], block: Mapping[str, Any]) -> list[int]:
    """Return a block's events where gradients exist already: the new one is added to the old and freed.

    One that is a copy is not made: what it is a copy of is added. One that others share is freed by them.
    """
    shadow = len(tensors)
    handed_over: dict[int, list[int]] = {}
    for position, gradient in block["accumulate"]:
        if not (tensors[gradient].get("copied") or tensors[gradient].get("shared")):
            handed_over.setdefault(position, []).append(~(gradient + shadow))
    events: list[int] = []
    for position, event in enumerate([*block["events"], None]):
        events += handed_over.get(position, ())
        if event is None:
            break
        tensor = tensors[event if event >= 0 else ~event]
        category = tensor.get("category")
        if tensor.get("copied"):
            continue
        if category == "gradient":
            events.append(event + shadow if event >= 0 else event - shadow)
        elif category != "workspace":
            events.append(event)
    return events


def keeping(tensors: Sequence[Mapping[str, Any]], block: Mapping[str, Any]) -> list[int]:
    """Return a block's events where gradients stay, those that others share among them."""
    return [e for e in block["events"] if e >= 0 or not tensors[~e].get("shared")]


def giving_up(tensors: Sequence[Mapping[str, Any]], block: Mapping[str, Any]) -> list[int]:
    """Return a block's events where a gradient is given up as soon as its parameter has it."""
    handed_over: dict[int, list[int]] = {}
    for position, gradient in block["accumulate"]:
        if not tensors[gradient].get("shared"):
            handed_over.setdefault(position, []).append(~gradient)
    events: list[int] = []
    for position, event in enumerate([*block["events"], None]):
        events += handed_over.get(position, ())
        if event is not None:
            events.append(event)
    return events


_KernelKey = tuple[Any, ...]
"""All that tells kernels apart, in the order of TracedKernel's fields but for the number."""


def _counted(
    blocks: Iterable[Mapping[str, Any]], copies_of: Callable[[int, int], int]
) -> dict[_KernelKey, int]:
    """Count the kernels of a micro-step, `copies_of` its stack and layer times each."""
    counts: dict[_KernelKey, int] = {}
    for block in blocks:
        if block["phase"] in SETUP_PHASES or block["phase"] in FETCH_PHASES:
            continue
        copies = copies_of(block["stack"], block["layer"])
        pass_of_block = "forward" if block["phase"] in FORWARD_PHASES else "backward"
        for name, dtype, flops, moved, recomputed, count, shape, *chunked in block["kernels"]:
            of_each = chunked == ["each"]
            chunk_moved, repeated = (
                (tuple(map(tuple, chunked[0])), chunked[1])
                if chunked and not of_each
                else (None, False)
            )
            terms = tuple(map(tuple, moved))
            phase = "recompute" if recomputed else pass_of_block
            sizes = tuple(map(tuple, shape))
            key = (name, dtype, tuple(flops), terms, phase, sizes, chunk_moved, repeated, of_each)
            counts[key] = counts.get(key, 0) + count * copies
    return counts


def count_kernels(blocks: Iterable[Mapping[str, Any]], stacks: Stacks) -> list[TracedKernel]:
    """Return the kernels of a micro-step, equal ones once with their number."""
    return [
        TracedKernel(
            name=name,
            dtype=dtype,
            flops=flops,
            moved=moved,
            phase=phase,
            count=count,
            shape=shape,
            chunk_moved=chunk_moved,
            repeated=repeated,
            of_each=of_each,
        )
        for (
            name,
            dtype,
            flops,
            moved,
            phase,
            shape,
            chunk_moved,
            repeated,
            of_each,
        ), count in _counted(blocks, stacks.copies).items()
    ]


def stretches(
    blocks: Sequence[Mapping[str, Any]], stacks: Stacks, kernels: Sequence[TracedKernel]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return the share of each kernel's launches in each block, and the blocks in order of execution.

    `kernels` are those of count_kernels. Shares: blocks x kernels; of a layer that stands for many, in one.
    """
    index_of = {
        key: index
        for index, k in enumerate(kernels)
        for key in [
            (
                *(k.name, k.dtype, k.flops, k.moved, k.phase, k.shape),
                *(k.chunk_moved, k.repeated, k.of_each),
            )
        ]
    }
    shares = np.zeros((len(blocks), len(kernels)))
    for position, block in enumerate(blocks):
        for key, count in _counted([block], lambda *_: 1).items():
            index = index_of[key]
            shares[position, index] = count / kernels[index].count
    empty = {position for position, of_block in enumerate(shares) if not of_block.any()}
    order = [position for position, _ in order_of(blocks, stacks) if position not in empty]
    return shares, np.asarray(order, dtype=np.int64)
