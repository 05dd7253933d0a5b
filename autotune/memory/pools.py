"""The two pools of PyTorch's caching allocator, each by itself: blocks of up to 1 MiB, and larger ones.

A request is served from its own pool alone, and of the other one only the reserved bytes matter, to a limit:
a stretch of events does to a pool what the pool and its own events say.
Rules and their source: autotune.memory.allocator.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Self

MIB = 1 << 20
# c10/core/AllocatorConfig.h: kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc, kRoundLarge.
BLOCK_BYTES = 512
SMALL_REQUEST_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
OWN_SEGMENT_BYTES = 10 * MIB
SEGMENT_ROUNDING_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
# A remainder in the large pool is split off where it is larger (should_split).
_LARGE_SLACK_BYTES = MIB

# A free block is one integer, size << _ADDRESS_BITS | address: sorted integers are then in torch's
# best-fit order (size, address or age of the segment), and bisect compares them at C speed.
_ADDRESS_BITS = 56
_ADDRESS_MASK = (1 << _ADDRESS_BITS) - 1
NO_LIMIT_BYTES = 1 << 80
_FIRST_ADDRESS = 1 << 55
_RANGE_BYTES = LARGE_SEGMENT_BYTES << 28
"""Addresses of an expandable segment."""


def segment_bytes(size: int) -> int:
    """Return the bytes that cudaMalloc is asked for on behalf of a request (get_allocation_size)."""
    if size <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES


@dataclass(frozen=True, slots=True)
class Growth:
    """A request that no free block had room for."""

    event: int
    """Index into the pool's events."""
    asked_bytes: int
    """Bytes of the segment that is compared with a cap."""
    reserved_bytes: int
    """Bytes that were reserved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """The change that events made to a pool."""

    taken_bytes: list[int]
    """Bytes that each event took, negative where it gave some back; of events that ran alone."""
    growths: list[Growth]


class Pool:
    """Blocks of one pool, its segments of fixed size.

    `free` has sorted keys (see _ADDRESS_BITS); `end_of` and `start_of` give the other border of a free block,
    for merging. Segments are 512 B apart, so that blocks of two segments never touch.
    """

    def __init__(self, *, is_small: bool, falls: bool = False) -> None:
        """Make an empty pool. `falls`: later segments lie below earlier ones."""
        self.is_small = is_small
        self.free: list[int] = []
        self.end_of: dict[int, int] = {}
        self.start_of: dict[int, int] = {}
        self.used: dict[int, tuple[int, int]] = {}
        """Borders of each tensor's block."""
        self.reserved_bytes = 0
        self.slack_bytes = 0 if is_small else _LARGE_SLACK_BYTES
        self.holes: dict[int, int] = {}
        """Start -> end of what is not mapped, of segments that grow."""
        self._segments: dict[int, int] = {}
        self._falls = falls
        self._next_address = _FIRST_ADDRESS

    def copied(self) -> Self:
        """Return a pool that is the same, and changes by itself."""
        other = copy.copy(self)
        for name in ("free", "end_of", "start_of", "used", "holes", "_segments"):
            setattr(other, name, getattr(self, name).copy())
        return other

    def is_like(self, other: Pool) -> bool:
        """Whether the same events do the same to both."""
        return self.__dict__ == other.__dict__

    def run(
        self,
        events: Sequence[int],
        sizes: Sequence[int],
        *,
        start: int = 0,
        stop: int | None = None,
        cap_bytes: int = NO_LIMIT_BYTES,
        most_bytes: int = NO_LIMIT_BYTES,
    ) -> Ran:
        """Run the pool's events from `start` to `stop`, both indices. `sizes`: by tensor, in whole blocks.

        It ends at a request whose segment would pass `cap_bytes` of this pool alone, which reserves nothing
        then, and at one with which the pool reserves more than `most_bytes`. Neither takes anything.

        One long function on purpose: it runs for every configuration near the budget, at about half a
        microsecond an event, and a call per event would show. What is rare has a method.
        """
        free, used, holes, slack = self.free, self.used, self.holes, self.slack_bytes
        end_of, start_of = self.end_of, self.start_of
        taken: list[int] = []
        growths: list[Growth] = []
        note = taken.append
        for tensor in islice(events, start, stop):
            if tensor >= 0:
                size = sizes[tensor]
                index = bisect_left(free, size << _ADDRESS_BITS)
                if index < len(free):
                    address = free[index] & _ADDRESS_MASK
                    if holes and end_of[address] in holes:
                        index = self._best_fit(index)
                        address = free[index] & _ADDRESS_MASK
                    end = end_of.pop(address)
                else:
                    index = -1
                    asked, before = segment_bytes(size), self.reserved_bytes
                    if before + asked > cap_bytes:
                        growths.append(Growth(start + len(taken), asked, 0))
                        break
                    address, end = self._grow(size)
                    growth = Growth(start + len(taken), asked, self.reserved_bytes - before)
                    growths.append(growth)
                    if self.reserved_bytes > most_bytes:
                        break
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
                note(end - address)
            else:
                address, end = used.pop(~tensor)
                note(address - end)
                if (before := start_of.pop(address, -1)) >= 0:
                    del free[bisect_left(free, (address - before) << _ADDRESS_BITS | before)]
                    address = before
                if (after := end_of.pop(end, -1)) >= 0:
                    del free[bisect_left(free, (after - end) << _ADDRESS_BITS | end)]
                    end = after
                end_of[address] = end
                start_of[end] = address
                insort(free, (end - address) << _ADDRESS_BITS | address)
        return Ran(taken_bytes=taken, growths=growths)

    def release_cached(self) -> None:
        """Give back every segment that is free as a whole."""
        for start, nbytes in list(self._segments.items()):
            end = start + nbytes
            if self.end_of.get(start) == end:
                self._remove(start, end)
                del self._segments[start]
                self.reserved_bytes -= nbytes

    def _best_fit(self, index: int) -> int:
        """Return the place of the free block to take, from the first that is large enough: it."""
        return index

    def _grow(self, size: int) -> tuple[int, int]:
        """Return a new block (start, end) of `size` bytes or more, which is not free."""
        segment = segment_bytes(size)
        step = segment + BLOCK_BYTES
        start = self._next_address - step if self._falls else self._next_address
        self._next_address += -step if self._falls else step
        self._segments[start] = segment
        self.reserved_bytes += segment
        return start, start + segment

    def _remove(self, start: int, end: int) -> None:
        """Take a free block out of the pool."""
        del self.free[bisect_left(self.free, (end - start) << _ADDRESS_BITS | start)]
        del self.end_of[start], self.start_of[end]


class ExpandablePool(Pool):
    """Pool of an expandable segment: a range of addresses, of which whole pages are mapped."""

    def __init__(self, *, is_small: bool) -> None:
        super().__init__(is_small=is_small)
        self.slack_bytes = 0
        self._page_bytes = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        # What lies before none of them cannot grow.
        self.holes = {0: _RANGE_BYTES}

    def release_cached(self) -> None:
        """Unmap every page that is free as a whole (unmap_block)."""
        page = self._page_bytes
        for key in list(self.free):
            start = key & _ADDRESS_MASK
            end = start + (key >> _ADDRESS_BITS)
            first, last = -(-start // page) * page, end // page * page
            if first < last:
                self._remove(start, end)
                self._insert(start, first)
                self._insert(last, end)
                self.holes[first] = last
                self.reserved_bytes -= last - first
        merged: dict[int, int] = {}
        hole = -1
        for start, end in sorted(self.holes.items()):
            hole = hole if merged.get(hole) == start else start
            merged[hole] = end
        self.holes = merged

    def _best_fit(self, index: int) -> int:
        """Return the place of the free block to take, from the smallest one, which lies before a hole.

        A block before a hole counts as large as it may grow: the next larger one that may grow to
        less is taken in its place (get_free_block).
        """
        free = self.free
        room = self._room(free[index])
        while index + 1 < len(free) and (next_room := self._room(free[index + 1])) < room:
            index += 1
            room = next_room
        return index

    def _grow(self, size: int) -> tuple[int, int]:
        """Return a new block of pages, mapped where the lowest room is (find_expandable_block, map_block)."""
        page = self._page_bytes
        start = end = self._lowest_room(size)
        while end in self.end_of or end - start < size:
            if end in self.end_of:
                behind, end = end, self.end_of[end]
                self._remove(behind, end)
            else:
                hole_end = self.holes.pop(end)
                mapped_end = min(end + -(-(start + size - end) // page) * page, hole_end)
                if mapped_end < hole_end:
                    self.holes[mapped_end] = hole_end
                self.reserved_bytes += mapped_end - end
                end = mapped_end
        return start, end

    def _lowest_room(self, size: int) -> int:
        """Return the start of the first holes, free blocks between and before them included, of that size."""
        for hole in sorted(self.holes):
            start = end = self.start_of.get(hole, hole)
            while end - start < size and (end in self.holes or end in self.end_of):
                end = self.holes.get(end) or self.end_of[end]
            if end - start >= size:
                return start
        raise AssertionError(size)

    def _room(self, key: int) -> int:
        """Return the bytes of a free block and of the hole behind it."""
        size = key >> _ADDRESS_BITS
        end = (key & _ADDRESS_MASK) + size
        return size + self.holes.get(end, end) - end

    def _insert(self, start: int, end: int) -> None:
        """Put a free block into the pool, unless it is empty."""
        if start < end:
            insort(self.free, (end - start) << _ADDRESS_BITS | start)
            self.end_of[start] = end
            self.start_of[end] = start
