"""A model of PyTorch's CUDA caching allocator: a list of allocations and frees -> predicted peaks.

A `Tape` lists what a training step allocates and frees, in order; `replay` runs it through the
rules by which torch rounds, pools, splits, merges, caches and flushes, and says what torch's own
counters would say: `max_memory_allocated`, `max_memory_reserved`, `num_alloc_retries`, or the
request that failed.

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

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

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

_MIB = 1 << 20
# c10/core/AllocatorConfig.h: kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc, kRoundLarge.
_BLOCK_BYTES = 512
_SMALL_REQUEST_BYTES = _MIB
_SMALL_SEGMENT_BYTES = 2 * _MIB
_OWN_SEGMENT_BYTES = 10 * _MIB
_SEGMENT_ROUNDING_BYTES = 2 * _MIB
_LARGE_SEGMENT_BYTES = 20 * _MIB
# A remainder in the large pool is split off where it is larger (should_split).
_LARGE_SLACK_BYTES = _MIB

PAGE_BYTES = _LARGE_SEGMENT_BYTES
"""Bytes by which a segment for large blocks grows."""
OVERSHOOT_BYTES = PAGE_BYTES - _SEGMENT_ROUNDING_BYTES
"""How far reserved bytes may pass a cap where segments grow: torch compares the cap with a segment of 22 MiB,
say, and maps two pages of 20."""

# A free block is one integer, size << _ADDRESS_BITS | address: sorted integers are then in torch's
# best-fit order (size, address or age of the segment), and bisect compares them at C speed.
_ADDRESS_BITS = 56
_ADDRESS_MASK = (1 << _ADDRESS_BITS) - 1

# Addresses of an expandable segment, one per pool; those of the two never touch.
_RANGE_BYTES = _LARGE_SEGMENT_BYTES << 28

_FIRST_ADDRESS = 1 << 55

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
    block_bytes = -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
    if not 0 < block_bytes <= _SMALL_REQUEST_BYTES:
        return num * [size_bytes]
    most = _SMALL_REQUEST_BYTES // block_bytes
    segments, rest = divmod(num, _SMALL_SEGMENT_BYTES // block_bytes)
    counts = segments * _parted(_SMALL_SEGMENT_BYTES // block_bytes, most) + _parted(rest, most)
    return [count * block_bytes for count in counts]


def _parted(num: int, most: int) -> list[int]:
    return [most] * (num // most) + [num % most] * (num % most > 0)


def replay(
    sizes: Sequence[int],
    events: Sequence[int],
    *,
    until_steady: Sequence[Sequence[int]] = (),
    cap_bytes: int | None = None,
    most_bytes: int | None = None,
    expandable_segments: bool = False,
    by_address: bool = False,
) -> Replay:
    """Run a tape through the allocator, under a cap on reserved bytes if one is given.

    `until_steady`: the events of further steps, which run until one ends with as much reserved as it began
    with, and did not come to the cap. Where nothing is given back in between, it leaves what it found: all
    others are alike.

    A request whose segment would pass the cap releases cached segments and tries again; if that does not
    help, the replay stops there and says so. A tensor may be allocated again after its free, so a steady step
    can be repeated. Raises KeyError when a tensor is freed that is not allocated.

    most_bytes: the replay ends, as if it had failed, at the request with which more than these are reserved:
    what does not fit is not replayed to its end.

    expandable_segments: as under PYTORCH_ALLOC_CONF=expandable_segments:True. Torch compares the cap with the
    segment it would ask for otherwise and then maps whole pages: reserved bytes may pass it by
    OVERSHOOT_BYTES.

    by_address: of free blocks of equal size the one with the lowest address is taken, as before torch 2.12,
    and later segments lie below earlier ones. Since then it is the one in the oldest segment, wherever that
    lies. Both orders are those of PyTorch's own builds (studies/no-card); no document says where cudaMalloc
    takes addresses, but steps on a T4 reserve what they did with falling ones alone (studies/published-t4).

    One long function on purpose: it runs for every configuration near the budget, at about half a microsecond
    an event, and a call per event would show. What is rare lives in _Heap.
    """
    rounded = [(nbytes + 511) & -512 for nbytes in sizes]
    expandable = _ExpandableHeap(cap_bytes) if expandable_segments else None
    heap = expandable or _Heap(cap_bytes, by_address=by_address)
    most = 1 << _ADDRESS_BITS if most_bytes is None else most_bytes
    large_slack = 0 if expandable_segments else _LARGE_SLACK_BYTES
    small_free, large_free = heap.small_free, heap.large_free
    end_of, start_of = heap.end_of, heap.start_of
    used: dict[int, tuple[int, int]] = {}
    allocated = peak_allocated = 0
    peak_event = -1 if not events else 0
    failed_event = failed_request = last_retry = None

    for position, tensor in enumerate(chain.from_iterable(_steps(events, until_steady, heap))):
        if tensor >= 0:
            size = rounded[tensor]
            if size <= _SMALL_REQUEST_BYTES:
                if not size:
                    continue
                free = small_free
                slack = 0
            else:
                free = large_free
                slack = large_slack
            index = bisect_left(free, size << _ADDRESS_BITS)
            if index < len(free):
                key = free[index]
                address = key & _ADDRESS_MASK
                end = address + (key >> _ADDRESS_BITS)
                if expandable is not None and end in expandable.holes:
                    index = expandable.best_fit(free, index)
                    key = free[index]
                    address = key & _ADDRESS_MASK
                    end = address + (key >> _ADDRESS_BITS)
                del end_of[address]
            else:
                index = -1
                num_retries = heap.num_alloc_retries
                block = heap.grow(size)
                if heap.num_alloc_retries > num_retries:
                    last_retry = position
                if block is None or heap.reserved_bytes > most:
                    failed_event = position
                    failed_request = _segment_bytes(size)
                    break
                address, end = block
            rest = end - address - size
            if rest > slack:
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
            block = used.pop(~tensor, None)
            if block is None:
                if tensor == EMPTY_CACHE:
                    heap.release_cached()
                elif rounded[~tensor]:
                    raise KeyError(~tensor)
                continue
            address, end = block
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
        last_retry_event=last_retry,
        failed_event=failed_event,
        failed_request_bytes=failed_request,
        peak_allocated_event=peak_event,
        final_allocated_bytes=allocated,
        final_reserved_bytes=heap.reserved_bytes,
    )


def _steps(
    events: Sequence[int], until_steady: Sequence[Sequence[int]], heap: _Heap
) -> Iterator[Sequence[int]]:
    yield events
    for step in until_steady:
        before = heap.reserved_bytes, heap.num_alloc_retries
        yield step
        if (heap.reserved_bytes, heap.num_alloc_retries) == before:
            return


def _segment_bytes(size: int) -> int:
    """Bytes that cudaMalloc is asked for on behalf of a request (get_allocation_size)."""
    if size <= _SMALL_REQUEST_BYTES:
        return _SMALL_SEGMENT_BYTES
    if size < _OWN_SEGMENT_BYTES:
        return _LARGE_SEGMENT_BYTES
    return -(-size // _SEGMENT_ROUNDING_BYTES) * _SEGMENT_ROUNDING_BYTES


class _Heap:
    """Segments and free blocks: what the allocator holds besides tensors, and its rare operations.

    `small_free` and `large_free` are the two pools (sorted keys, see _ADDRESS_BITS). `end_of` and
    `start_of` give the other border of a free block, for merging. Segments are 512 B apart, so that
    blocks of two segments never touch.
    """

    __slots__ = (
        "_cap",
        "_falls",
        "_next_address",
        "_segments",
        "end_of",
        "large_free",
        "num_alloc_retries",
        "peak_reserved_bytes",
        "reserved_bytes",
        "small_free",
        "start_of",
    )

    def __init__(self, cap_bytes: int | None, *, by_address: bool = False) -> None:
        self._cap = 1 << _ADDRESS_BITS if cap_bytes is None else cap_bytes
        self._segments: dict[int, int] = {}
        self._falls = by_address
        self._next_address = _FIRST_ADDRESS
        self.small_free: list[int] = []
        self.large_free: list[int] = []
        self.end_of: dict[int, int] = {}
        self.start_of: dict[int, int] = {}
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_alloc_retries = 0

    def grow(self, size: int) -> tuple[int, int] | None:
        """A new block (start, end) of `size` bytes or more, in no pool; None when out of memory."""
        segment = _segment_bytes(size)
        if not self._has_room(segment):
            return None
        step = segment + _BLOCK_BYTES
        start = self._next_address - step if self._falls else self._next_address
        self._next_address += -step if self._falls else step
        self._segments[start] = segment
        self._reserve(segment)
        return start, start + segment

    def release_cached(self) -> None:
        """Give back every segment that is free as a whole."""
        for start, nbytes in list(self._segments.items()):
            end = start + nbytes
            if self.end_of.get(start) == end:
                free = self.small_free if nbytes == _SMALL_SEGMENT_BYTES else self.large_free
                self._remove(free, start, end)
                del self._segments[start]
                self.reserved_bytes -= nbytes

    def _has_room(self, segment: int) -> bool:
        """Whether the cap allows a segment, if need be without what is cached."""
        room = self._cap - segment
        if self.reserved_bytes > room:
            self.release_cached()
            self.num_alloc_retries += 1
        return self.reserved_bytes <= room

    def _reserve(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes

    def _remove(self, free: list[int], start: int, end: int) -> None:
        """Take a free block out of its pool."""
        del free[bisect_left(free, (end - start) << _ADDRESS_BITS | start)]
        del self.end_of[start], self.start_of[end]


class _ExpandableHeap(_Heap):
    """Heap with expandable segments: a range of addresses per pool, of which whole pages are mapped."""

    def __init__(self, cap_bytes: int | None) -> None:
        super().__init__(cap_bytes)
        # Free blocks, where the range starts, bytes of a page.
        self._pools = (
            (self.small_free, 0, _SMALL_SEGMENT_BYTES),
            (self.large_free, 2 * _RANGE_BYTES, _LARGE_SEGMENT_BYTES),
        )
        # Start -> end of what is not mapped. What lies before none of them cannot grow.
        self.holes = {base: base + _RANGE_BYTES for _, base, _ in self._pools}

    def best_fit(self, free: list[int], index: int) -> int:
        """Index of the block to take, from the smallest that is large enough and lies before a hole.

        A block before a hole counts as large as it may grow: the next larger one that may grow to
        less is taken in its place (get_free_block).
        """
        room = self._room(free[index])
        while index + 1 < len(free) and (next_room := self._room(free[index + 1])) < room:
            index += 1
            room = next_room
        return index

    def grow(self, size: int) -> tuple[int, int] | None:
        """Return a new block of pages, mapped where the lowest room is (find_expandable_block, map_block)."""
        if not self._has_room(_segment_bytes(size)):
            return None
        free, base, page = self._pools[size > _SMALL_REQUEST_BYTES]
        start = end = self._lowest_room(base, size)
        while end in self.end_of or end - start < size:
            if end in self.end_of:
                behind, end = end, self.end_of[end]
                self._remove(free, behind, end)
            else:
                hole_end = self.holes.pop(end)
                mapped_end = min(end + -(-(start + size - end) // page) * page, hole_end)
                if mapped_end < hole_end:
                    self.holes[mapped_end] = hole_end
                self._reserve(mapped_end - end)
                end = mapped_end
        return start, end

    def release_cached(self) -> None:
        """Unmap every page that is free as a whole (unmap_block)."""
        for free, _, page in self._pools:
            for key in list(free):
                start = key & _ADDRESS_MASK
                end = start + (key >> _ADDRESS_BITS)
                first, last = -(-start // page) * page, end // page * page
                if first < last:
                    self._remove(free, start, end)
                    self._insert(free, start, first)
                    self._insert(free, last, end)
                    self.holes[first] = last
                    self.reserved_bytes -= last - first
        merged: dict[int, int] = {}
        hole = -1
        for start, end in sorted(self.holes.items()):
            hole = hole if merged.get(hole) == start else start
            merged[hole] = end
        self.holes = merged

    def _lowest_room(self, base: int, size: int) -> int:
        """Start of the first holes, free blocks between and before them included, of that size."""
        for hole in sorted(self.holes):
            if hole >= base:
                start = end = self.start_of.get(hole, hole)
                while end - start < size and (end in self.holes or end in self.end_of):
                    end = self.holes.get(end) or self.end_of[end]
                if end - start >= size:
                    return start
        raise AssertionError(size)

    def _room(self, key: int) -> int:
        """Bytes of a free block and of the hole behind it."""
        size = key >> _ADDRESS_BITS
        end = (key & _ADDRESS_MASK) + size
        return size + self.holes.get(end, end) - end

    def _insert(self, free: list[int], start: int, end: int) -> None:
        """Put a free block into its pool, unless it is empty."""
        if start < end:
            insort(free, (end - start) << _ADDRESS_BITS | start)
            self.end_of[start] = end
            self.start_of[end] = start
