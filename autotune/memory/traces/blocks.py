"""A block of a traced step: its phase, its kernels, its events with and without gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.memory.traces.copies import Layers
from autotune.memory.traces.terms import Term

Place = tuple[str, int]
"""A block's place as (stack, layer): which of several stacks, empty for the first; layer -1 outside of
all."""

SETUP_PHASES = ("weights", "adapter", "settled")
FETCH_PHASES = ("batch", "count")
"""`batch`: a micro-batch reaches the device; `count`: its labels are counted."""
FORWARD_PHASES = ("embed", "forward", "head")
# A second stack of layers (a decoder's, beside an encoder's) has its number behind the phase.


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
    chunk_moved: tuple[Term, ...] | None = None
    """Bytes per token of a chunk; where not None, the kernel handles a chunk of tokens, and `flops` is per
    token of it."""
    repeated: bool = False
    """Whether it is launched for each chunk but the first."""


def is_setup(phase: str) -> bool:
    return phase.partition(" ")[0] in SETUP_PHASES


def is_fetch(phase: str) -> bool:
    return phase in FETCH_PHASES


def is_forward(phase: str) -> bool:
    return phase.partition(" ")[0] in FORWARD_PHASES


def cut(
    events: list[int], starts: Sequence[tuple[str, int, int]]
) -> list[tuple[str, Place, list[int]]]:
    """Return the events by block; the phase without the stack, which the place names."""
    ends = [*(start for *_, start in starts[1:]), len(events)]
    blocks = []
    for (phase, layer, start), end in zip(starts, ends, strict=True):
        name, _, stack = phase.partition(" ")
        blocks.append((name, (stack, layer), events[start:end]))
    return blocks


def adding(tensors: Sequence[Mapping[str, Any]], block: Mapping[str, Any]) -> list[int]:
    """Return a block's events where gradients exist already: the new one is added to the old and freed."""
    shadow = len(tensors)
    handed_over: dict[int, list[int]] = {}
    for position, gradient in block["accumulate"]:
        handed_over.setdefault(position, []).append(~(gradient + shadow))
    events: list[int] = []
    for position, event in enumerate([*block["events"], None]):
        events += handed_over.get(position, ())
        if event is None:
            break
        category = tensors[event if event >= 0 else ~event].get("category")
        if category == "gradient":
            events.append(event + shadow if event >= 0 else event - shadow)
        elif category != "workspace":
            events.append(event)
    return events


def giving_up(block: Mapping[str, Any]) -> list[int]:
    """Return a block's events where a gradient is given up as soon as its parameter has it."""
    handed_over: dict[int, list[int]] = {}
    for position, gradient in block["accumulate"]:
        handed_over.setdefault(position, []).append(~gradient)
    events: list[int] = []
    for position, event in enumerate([*block["events"], None]):
        events += handed_over.get(position, ())
        if event is not None:
            events.append(event)
    return events


def count_kernels(blocks: Iterable[Mapping[str, Any]], layers: Layers) -> list[TracedKernel]:
    """Return the kernels of a micro-step, equal ones once with their number."""
    counts: dict[tuple[Any, ...], int] = {}
    for block in blocks:
        if is_setup(block["phase"]) or is_fetch(block["phase"]):
            continue
        copies = layers.copies(block["layer"])
        pass_of_block = "forward" if is_forward(block["phase"]) else "backward"
        for name, dtype, flops, moved, recomputed, count, *chunked in block["kernels"]:
            chunk_moved, repeated = (
                (tuple(map(tuple, chunked[0])), chunked[1]) if chunked else (None, False)
            )
            terms = tuple(map(tuple, moved))
            phase = "recompute" if recomputed else pass_of_block
            key = (name, dtype, tuple(flops), terms, phase, chunk_moved, repeated)
            counts[key] = counts.get(key, 0) + count * copies
    return [
        TracedKernel(
            name=name,
            dtype=dtype,
            flops=flops,
            moved=moved,
            phase=phase,
            count=count,
            chunk_moved=chunk_moved,
            repeated=repeated,
        )
        for (name, dtype, flops, moved, phase, chunk_moved, repeated), count in counts.items()
    ]
