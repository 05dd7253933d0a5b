"""A model of PyTorch's CUDA caching allocator: a list of allocations and frees -> predicted peaks.

A `Tape` lists what a training step allocates and frees, in order; `replay` runs it through the
rules by which torch rounds, pools, splits, merges, caches and flushes, and says what torch's own
counters would say: `max_memory_allocated`, `max_memory_reserved`, `num_alloc_retries`, or the
request that failed.

Source of every rule: pytorch c10/cuda/CUDACachingAllocator.cpp @001074d2 and
c10/core/AllocatorConfig.h @007b9bc0 (2.13 adds `large_segment_size_mb`).

Known limitations
- One stream. Blocks of other streams, and those that `record_stream` holds back, are not modelled.
- Addresses. Among free blocks of equal size torch takes the lowest address. Here a later segment
  has a higher address; cudaMalloc may reuse the address of a segment that was released.
- The cap is one number. Fragmentation of physical memory, other processes and memory outside the
  allocator are the caller's: subtract them from the cap.
- `garbage_collection_threshold`, CUDA graph pools, user pools, `cudaMallocAsync`, and a
  `max_non_split_rounding_mb` other than its default of 20 MiB are not modelled.
- Expandable segments: the address range never runs out (torch reserves 9/8 of the card). The cap is
  compared as torch compares `set_per_process_memory_fraction`: with the whole request, rounded to
  2 MiB, whatever the range already holds free at its end, and not with the pages to be mapped. So
  reserved bytes may pass the cap by less than a page.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

CATEGORIES = (
    "parameter",
    "gradient",
    "optimizer_state",
    "activation",
    "logits",
    "temporary",
    "workspace",
)
"""What a tensor is for."""

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch reads its settings; the newer name wins (torch 2.13 c10/core/AllocatorConfig.cpp)."""

_MIB = 1 << 20
# c10/core/AllocatorConfig.h: kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc, kRoundLarge.
_BLOCK_BYTES = 512
_SMALL_REQUEST_BYTES = _MIB
_SMALL_SEGMENT_BYTES = 2 * _MIB
_OWN_SEGMENT_BYTES = 10 * _MIB
_SEGMENT_ROUNDING_BYTES = 2 * _MIB
_LARGE_SEGMENT_BYTES = 20 * _MIB
# Default of max_non_split_rounding_size: by how much an oversize block may exceed its request.
_OVERSIZE_SLACK_BYTES = 20 * _MIB

# A free block is one integer, size << _ADDRESS_BITS | address: sorted integers are then in torch's
# best-fit order (size, address), and bisect compares them at C speed.
_ADDRESS_BITS = 56
_ADDRESS_MASK = (1 << _ADDRESS_BITS) - 1


EMPTY_CACHE_BYTES = -_BLOCK_BYTES
"""Size of what is no tensor: where it is allocated, torch.cuda.empty_cache() runs."""


@dataclass(slots=True)
class Tape:
    """An ordered list of allocations and frees, built by alloc() and free()."""

    sizes: list[int] = field(default_factory=list)
    """Bytes requested, per tensor; 0 takes no memory."""
    categories: list[str] = field(default_factory=list)
    """One of CATEGORIES, per tensor."""
    events: list[int] = field(default_factory=list)
    """In order: i when tensor i is allocated, ~i when it is freed."""

    def alloc(self, nbytes: int, category: str) -> int:
        """Append a tensor's allocation; return the tensor's index."""
        assert nbytes >= 0, nbytes
        assert category in CATEGORIES, category
        index = len(self.sizes)
        self.sizes.append(nbytes)
        self.categories.append(category)
        self.events.append(index)
        return index

    def free(self, index: int) -> None:
        """Append the free of tensor `index`."""
        assert 0 <= index < len(self.sizes), index
        self.events.append(~index)


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """What PYTORCH_ALLOC_CONF may say; the defaults are torch's.

    Raises ValueError for a value torch refuses or this model does not cover.
    """

    roundup_power2_divisions: int = 0
    """0 or 1: round to 512 B; d: round up to the next 1/d step between powers of two."""
    max_split_size_bytes: int | None = None
    """Blocks of this size or more are not split nor given to smaller requests; None: no limit."""
    expandable_segments: bool = False
    """One growing address range per pool instead of one cudaMalloc per segment."""
    large_segment_size_bytes: int = _LARGE_SEGMENT_BYTES
    """Segment for requests over 1 MiB and under 10 MiB, and page of the large expandable range."""

    def __post_init__(self) -> None:
        divisions = self.roundup_power2_divisions
        if divisions < 0 or divisions & (divisions - 1):
            raise ValueError(
                f"roundup_power2_divisions must be 0 or a power of two, got {divisions}"
            )
        segment = self.large_segment_size_bytes
        if segment < _OWN_SEGMENT_BYTES or segment % _SEGMENT_ROUNDING_BYTES:
            raise ValueError(
                f"large_segment_size_bytes must be a multiple of 2 MiB from 10 MiB, got {segment}"
            )
        limit = self.max_split_size_bytes
        if limit is None:
            return
        if limit < max(segment, _LARGE_SEGMENT_BYTES) or limit % _MIB:
            raise ValueError(
                "max_split_size_bytes must be a whole number of MiB, at least 20 and at least one"
                f" large segment, got {limit}"
            )
        if self.expandable_segments:
            raise ValueError(
                "max_split_size_bytes together with expandable_segments is not modelled"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """What torch's counters are predicted to say after a tape, or up to the request that failed."""

    peak_allocated_bytes: int
    """torch.cuda.max_memory_allocated: rounded sizes, remainders too small to split included."""
    peak_reserved_bytes: int
    """torch.cuda.max_memory_reserved: segments held."""
    num_alloc_retries: int
    """Times the cap was hit and every cached segment was released; the failing request counts."""
    failed_event: int | None
    """Index into events of the request that did not fit; None when all did."""
    failed_request_bytes: int | None
    """The segment it asked for ("Tried to allocate"): with final_reserved_bytes beyond the cap."""
    peak_allocated_event: int
    """Index of the event at which allocated bytes first stood at their peak; -1: empty tape."""
    final_allocated_bytes: int
    final_reserved_bytes: int


_DEFAULT_SETTINGS = AllocatorSettings()


def lower_bound(sizes: Sequence[int], events: Sequence[int]) -> int:
    """Bytes that peak_allocated_bytes, and so peak_reserved_bytes, cannot be below.

    The peak of the running sum of sizes rounded to 512 B: under any settings, rounding further,
    remainders and segments only add.
    """
    rounded = [(nbytes + 511) & -512 for nbytes in sizes]
    deltas = [rounded[event] if event >= 0 else -rounded[~event] for event in events]
    return max(accumulate(deltas), default=0)


def live_bytes_by_category(tape: Tape, event: int) -> dict[str, int]:
    """Bytes (rounded to 512 B) of the tensors alive right after events[event], per category.

    At Replay.peak_allocated_event this is the breakdown of the peak, but for remainders too small
    to split.
    """
    totals = dict.fromkeys(CATEGORIES, 0)
    for tensor in tape.events[: event + 1]:
        if tensor >= 0:
            totals[tape.categories[tensor]] += (tape.sizes[tensor] + 511) & -512
        else:
            totals[tape.categories[~tensor]] -= (tape.sizes[~tensor] + 511) & -512
    return totals


def replay(
    sizes: Sequence[int],
    events: Sequence[int],
    *,
    cap_bytes: int | None = None,
    settings: AllocatorSettings = _DEFAULT_SETTINGS,
) -> Replay:
    """Run a tape through the allocator, under a cap on reserved bytes if one is given.

    A request whose segment would pass the cap releases cached segments and tries again; if that
    does not help, the replay stops there and says so. A tensor may be allocated again after its
    free, so a steady step can be repeated. Raises KeyError when a tensor is freed that is not
    allocated.

    One long function on purpose: it runs for every configuration near the budget, at about half a
    microsecond an event, and a call per event would show. What is rare lives in _Heap.
    """
    rounded = _round_sizes(sizes, settings.roundup_power2_divisions)
    heap = _Heap(cap_bytes, settings)
    small_free, large_free = heap.small_free, heap.large_free
    end_of, start_of = heap.end_of, heap.start_of
    max_split = settings.max_split_size_bytes
    expandable = settings.expandable_segments
    # A remainder larger than this is split off. Sizes are multiples of 512 B: 0 is "at least 512".
    large_slack = 0 if expandable else _MIB
    used: dict[int, tuple[int, int]] = {}
    allocated = peak_allocated = 0
    peak_event = -1 if not events else 0
    failed_event = failed_request = None

    for position, tensor in enumerate(events):
        if tensor >= 0:
            size = rounded[tensor]
            if size <= _SMALL_REQUEST_BYTES:
                if size <= 0:
                    if size:
                        heap.release_cached()
                    continue
                free = small_free
                slack = 0
            else:
                free = large_free
                slack = large_slack
            index = bisect_left(free, size << _ADDRESS_BITS)
            if expandable:
                index = heap.prefer_not_expandable(free, index)
            if index < len(free) and (
                max_split is None or _usable(size, free[index] >> _ADDRESS_BITS, max_split)
            ):
                key = free[index]
                address = key & _ADDRESS_MASK
                end = address + (key >> _ADDRESS_BITS)
                del end_of[address]
            else:
                index = -1
                block = heap.grow(size)
                if block is None:
                    failed_event = position
                    failed_request = heap.segment_bytes(size)
                    break
                address, end = block
            rest = end - address - size
            if rest > slack and (max_split is None or size < max_split):
                middle = address + size
                end_of[middle] = end
                start_of[end] = middle
                key = rest << _ADDRESS_BITS | middle
                if index < 0:
                    insort(free, key)
                elif index == 0 or free[index - 1] < key:
                    # The remainder often keeps the place of the block it was cut from.
                    free[index] = key
                else:
                    del free[index]
                    insort(free, key, 0, index)
                end = middle
            elif index >= 0:
                del free[index]
                del start_of[end]
            used[tensor] = (address, end)
            allocated += end - address
            if allocated > peak_allocated:
                peak_allocated = allocated
                peak_event = position
        else:
            tensor = ~tensor
            if rounded[tensor] <= 0:
                continue
            address, end = used.pop(tensor)
            size = end - address
            allocated -= size
            # A block in use is over 1 MiB exactly when it belongs to the large pool.
            free = small_free if size <= _SMALL_REQUEST_BYTES else large_free
            if address in start_of:
                before = start_of.pop(address)
                del free[bisect_left(free, (address - before) << _ADDRESS_BITS | before)]
                address = before
            if end in end_of:
                after = end_of.pop(end)
                del free[bisect_left(free, (after - end) << _ADDRESS_BITS | end)]
                end = after
            end_of[address] = end
            start_of[end] = address
            insort(free, (end - address) << _ADDRESS_BITS | address)

    return Replay(
        peak_allocated_bytes=peak_allocated,
        peak_reserved_bytes=heap.peak_reserved_bytes,
        num_alloc_retries=heap.num_alloc_retries,
        failed_event=failed_event,
        failed_request_bytes=failed_request,
        peak_allocated_event=peak_event,
        final_allocated_bytes=allocated,
        final_reserved_bytes=heap.reserved_bytes,
    )


def _usable(size: int, block: int, max_split: int) -> bool:
    """Whether max_split_size lets a request of `size` bytes take a free block of `block` bytes."""
    if size < max_split:
        return block < max_split
    return block < size + _OVERSIZE_SLACK_BYTES


def _round_sizes(sizes: Sequence[int], divisions: int) -> list[int]:
    """Each request as the allocator rounds it; 0 stays 0, for which CUDA tensors ask nothing."""
    rounded = [(nbytes + 511) & -512 for nbytes in sizes]
    if divisions <= 1:
        return rounded
    for index, nbytes in enumerate(sizes):
        if nbytes > _BLOCK_BYTES * divisions:
            power = 1 << (nbytes.bit_length() - 1)
            step = power // divisions
            rounded[index] = -(-nbytes // step) * step
    return rounded


class _Heap:
    """Segments and free blocks: what the allocator holds besides tensors, and its rare operations.

    `small_free` and `large_free` are the two pools (sorted keys, see _ADDRESS_BITS). `end_of` and
    `start_of` give the other border of a free block, for merging. Segments are 512 B apart, so that
    blocks of two segments never touch.
    """

    __slots__ = (
        "_cap",
        "_large_segment",
        "_max_split",
        "_next_address",
        "_pages",
        "_segments",
        "_unmapped",
        "end_of",
        "large_free",
        "num_alloc_retries",
        "peak_reserved_bytes",
        "reserved_bytes",
        "small_free",
        "start_of",
    )

    def __init__(self, cap_bytes: int | None, settings: AllocatorSettings) -> None:
        self._cap = 1 << _ADDRESS_BITS if cap_bytes is None else cap_bytes
        self._max_split = settings.max_split_size_bytes
        self._large_segment = settings.large_segment_size_bytes
        self._segments: dict[int, int] = {}
        self._next_address = _BLOCK_BYTES
        self.small_free: list[int] = []
        self.large_free: list[int] = []
        self.end_of: dict[int, int] = {}
        self.start_of: dict[int, int] = {}
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_alloc_retries = 0
        # Expandable segments only: page size of each pool (small, large), and the holes of its
        # address range that no page backs, as start -> end. The last hole is practically endless.
        self._pages = (_SMALL_SEGMENT_BYTES, self._large_segment)
        self._unmapped: tuple[dict[int, int], dict[int, int]] | None = None
        if settings.expandable_segments:
            page = self._large_segment
            half = (1 << (_ADDRESS_BITS - 1)) // page * page
            self._unmapped = ({_SMALL_SEGMENT_BYTES: half - page}, {half: 1 << _ADDRESS_BITS})

    def segment_bytes(self, size: int) -> int:
        """Bytes that cudaMalloc is asked for on behalf of a request (get_allocation_size)."""
        if size <= _SMALL_REQUEST_BYTES:
            return _SMALL_SEGMENT_BYTES
        if size < _OWN_SEGMENT_BYTES:
            return self._large_segment
        return -(-size // _SEGMENT_ROUNDING_BYTES) * _SEGMENT_ROUNDING_BYTES

    def grow(self, size: int) -> tuple[int, int] | None:
        """A new block (start, end) of `size` bytes or more, in no pool; None when out of memory."""
        segment = self.segment_bytes(size)
        room = self._cap - segment
        if self.reserved_bytes > room:
            if self._max_split is not None:
                self._release_oversize(size, self._max_split)
            if self.reserved_bytes > room:
                self.release_cached()
                self.num_alloc_retries += 1
                if self.reserved_bytes > room:
                    return None
        if self._unmapped is not None:
            return self._expand(size, large=size > _SMALL_REQUEST_BYTES)
        start = self._next_address
        self._next_address += segment + _BLOCK_BYTES
        self._segments[start] = segment
        self._reserve(segment)
        return start, start + segment

    def _reserve(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _insert(self, free: list[int], start: int, end: int) -> None:
        self.end_of[start] = end
        self.start_of[end] = start
        insort(free, (end - start) << _ADDRESS_BITS | start)

    def _remove(self, free: list[int], start: int) -> int:
        """Take the free block at `start` out of its pool; return its end."""
        end = self.end_of.pop(start)
        del self.start_of[end]
        del free[bisect_left(free, (end - start) << _ADDRESS_BITS | start)]
        return end

    def _release_segment(self, free: list[int], start: int) -> None:
        self._remove(free, start)
        self.reserved_bytes -= self._segments.pop(start)

    def _release_oversize(self, size: int, max_split: int) -> None:
        """Release the smallest oversize block that would do, else the largest until they would.

        No oversize block is ever part of a larger segment: AllocatorSettings sees to that.
        """
        if size <= _SMALL_REQUEST_BYTES:
            return  # The small pool has no oversize block.
        free = self.large_free
        wanted = max(size, max_split)
        index = bisect_left(free, wanted << _ADDRESS_BITS)
        if index < len(free):
            self._release_segment(free, free[index] & _ADDRESS_MASK)
            return
        released = 0
        while free and released < wanted and free[-1] >> _ADDRESS_BITS >= max_split:
            released += free[-1] >> _ADDRESS_BITS
            self._release_segment(free, free[-1] & _ADDRESS_MASK)

    def release_cached(self) -> None:
        """Give back every segment that is free as a whole, or every free page of a range."""
        if self._unmapped is not None:
            for free, page, holes in zip(
                (self.small_free, self.large_free), self._pages, self._unmapped, strict=True
            ):
                self._unmap(free, page, holes)
            return
        for start, nbytes in list(self._segments.items()):
            if self.end_of.get(start) == start + nbytes:
                small = nbytes == _SMALL_SEGMENT_BYTES
                self._release_segment(self.small_free if small else self.large_free, start)

    def prefer_not_expandable(self, free: list[int], index: int) -> int:
        """Best fit where blocks can grow: a block counts with the hole behind it."""
        assert self._unmapped is not None
        holes = self._unmapped[free is self.large_free]

        def reach(key: int) -> int:
            end = (key & _ADDRESS_MASK) + (key >> _ADDRESS_BITS)
            return holes.get(end, end) - (key & _ADDRESS_MASK)

        while index + 1 < len(free) and reach(free[index + 1]) < reach(free[index]):
            index += 1
        return index

    def _expand(self, size: int, *, large: bool) -> tuple[int, int]:
        """Map pages at the lowest address where `size` bytes, free or unmapped, lie together."""
        assert self._unmapped is not None
        free = self.large_free if large else self.small_free
        page, holes = self._pages[large], self._unmapped[large]
        start = next(
            start
            for start in (self.start_of.get(hole, hole) for hole in sorted(holes))
            if self._space(start, size, holes) >= size
        )
        while (end := self.end_of.get(start, start)) - start < size:
            hole_end = holes.pop(end)
            num_pages = -(-(size - (end - start)) // page)
            mapped_end = min(end + num_pages * page, hole_end)
            if mapped_end < hole_end:
                holes[mapped_end] = hole_end
            self._reserve(mapped_end - end)
            if start != end:
                self._remove(free, start)
            if mapped_end in self.end_of:
                mapped_end = self._remove(free, mapped_end)
            self._insert(free, start, mapped_end)
        return start, self._remove(free, start)

    def _space(self, start: int, size: int, holes: dict[int, int]) -> int:
        """Bytes free or unmapped from `start` on without a break; may stop counting at `size`."""
        end = start
        while end - start < size:
            following = self.end_of.get(end) or holes.get(end)
            if following is None:
                break
            end = following
        return end - start

    def _unmap(self, free: list[int], page: int, holes: dict[int, int]) -> None:
        """Unmap the whole pages inside each free block; what is left at its borders stays free."""
        for key in list(free):
            start = key & _ADDRESS_MASK
            end = self.end_of[start]
            first, last = -(-start // page) * page, end // page * page
            if first >= last:
                continue
            self._remove(free, start)
            if start < first:
                self._insert(free, start, first)
            if last < end:
                self._insert(free, last, end)
            self.reserved_bytes -= last - first
            before = next((hole for hole, hole_end in holes.items() if hole_end == first), first)
            holes[before] = holes.pop(last, last)
