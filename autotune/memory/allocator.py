"""A model of PyTorch's CUDA caching allocator: a list of allocations and frees -> predicted peaks.

A `Tape` lists what a training step allocates and frees, in order; `autotune.memory.replayer` runs it
through the rules by which torch rounds, pools, splits, merges, caches and flushes
(`autotune.memory.pools`), and says in a `Replay` what torch's own counters would say:
`max_memory_allocated`, `max_memory_reserved`, `num_alloc_retries`, or the request that failed.

Source of every rule: pytorch c10/cuda/CUDACachingAllocator.cpp @001074d2 and
c10/core/AllocatorConfig.h @007b9bc0.

Known limitations
- PYTORCH_ALLOC_CONF is not read: settings are torch's defaults, or these and expandable segments;
  no `max_split_size_mb`, `roundup_power2_divisions` or `garbage_collection_threshold`.
- One stream. Blocks of other streams, and those that `record_stream` holds back, are not modelled.
- Addresses. Where they decide (`by_address`) a later segment lies below an earlier one; cudaMalloc may
  reuse the address of a segment that was released. torch 2.12 alone orders free blocks of equal size by
  when each was cut, not by when its segment came.
- The cap is one number. Fragmentation of physical memory, other processes and memory outside the
  allocator are the caller's: subtract them from the cap. It is a memory fraction's: where the card
  itself has no page left, expandable segments fail otherwise.
- An expandable segment's addresses do not end; torch's are 9/8 of the card's memory.
- CUDA graph pools, user pools and `cudaMallocAsync` are not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune.memory.pools import (
    BLOCK_BYTES,
    LARGE_SEGMENT_BYTES,
    SEGMENT_ROUNDING_BYTES,
    SMALL_REQUEST_BYTES,
    SMALL_SEGMENT_BYTES,
)

CATEGORIES = (
    "parameter",
    "gradient",
    "optimizer_state",
    "activation",
    "logits",
    "temporary",
    "workspace",
)
"""The purposes that a tensor may serve."""

PAGE_BYTES = LARGE_SEGMENT_BYTES
"""Bytes by which a segment for large blocks grows."""
OVERSHOOT_BYTES = PAGE_BYTES - SEGMENT_ROUNDING_BYTES
"""How far reserved bytes may pass a cap where segments grow: torch compares the cap with a segment of 22 MiB,
say, and maps two pages of 20."""

EMPTY_CACHE = -(1 << 62)
"""The event at which torch.cuda.empty_cache() runs: no tensor's allocation or free."""


@dataclass(slots=True)
class Tape:
    """An ordered list of allocations and frees, built by alloc() and free()."""

    sizes: list[int] = field(default_factory=list)
    """Bytes requested, per tensor; 0 takes no memory."""
    categories: list[str] = field(default_factory=list)
    """Category of each tensor, one of CATEGORIES."""
    events: list[int] = field(default_factory=list)
    """In order: i when tensor i is allocated, ~i when it is freed, EMPTY_CACHE where it runs."""
    multiprocessors: tuple[int, int] | None = None
    """The card's multiprocessors (how many, threads of each), which reductions share their work out to.

    None: a device whose reductions need no memory of their own, a CPU.
    """
    product_bytes: int = 0
    """Bytes of the workspace that each matrix product makes and gives back."""

    def alloc(self, nbytes: int, category: str) -> int:
        """Append a tensor's allocation; return the tensor's index."""
        assert nbytes >= 0, nbytes
        assert category in CATEGORIES, category
        index = len(self.sizes)
        self.sizes.append(nbytes)
        self.categories.append(category)
        self.events.append(index)
        return index

    def alloc_all(self, sizes: Sequence[int], category: str) -> range:
        """Append the allocations of tensors of one category; return their indices."""
        assert category in CATEGORIES, category
        indices = range(len(self.sizes), len(self.sizes) + len(sizes))
        self.sizes += sizes
        self.categories += [category] * len(sizes)
        self.events += indices
        return indices

    def free(self, index: int) -> None:
        """Append the free of tensor `index`."""
        assert 0 <= index < len(self.sizes), index
        self.events.append(~index)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Predicted values of torch's counters after a tape, or up to the request that failed."""

    peak_allocated_bytes: int
    """Value of torch.cuda.max_memory_allocated: rounded sizes, remainders too small to split included."""
    peak_reserved_bytes: int
    """Value of torch.cuda.max_memory_reserved: segments held."""
    num_alloc_retries: int
    """Times the cap was hit and every cached segment was released; the failing request counts."""
    last_retry_event: int | None
    """Index into events of the request that hit the cap last; None when none did."""
    failed_event: int | None
    """Index into all events of the request that did not fit; None when all did."""
    failed_request_bytes: int | None
    """Bytes of the segment that the failed request asked for ("Tried to allocate"): with final_reserved_bytes
    beyond the cap."""
    peak_allocated_event: int
    """Index of the event at which allocated bytes first stood at their peak; -1: empty tape."""
    final_allocated_bytes: int
    final_reserved_bytes: int


def together(size_bytes: int, num: int) -> list[int]:
    """Return the sizes of fewer allocations that fill segments as `num` of this size do.

    For tensors that are allocated one after the other and freed at once. Those of more than 1 MiB stay alone.
    """
    block_bytes = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
    if not 0 < block_bytes <= SMALL_REQUEST_BYTES:
        return num * [size_bytes]
    most = SMALL_REQUEST_BYTES // block_bytes
    segments, rest = divmod(num, SMALL_SEGMENT_BYTES // block_bytes)
    counts = segments * _parted(SMALL_SEGMENT_BYTES // block_bytes, most) + _parted(rest, most)
    return [count * block_bytes for count in counts]


def _parted(num: int, most: int) -> list[int]:
    return [most] * (num // most) + [num % most] * (num % most > 0)
