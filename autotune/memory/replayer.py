"""Replays tapes through the model of CUDA's caching allocator (autotune.memory.allocator).

The pools of small and of large blocks run one after the other, a stretch of events at a time: they meet where
segments come to a limit, and where cached ones are given back. A stretch then ends there.
"""

from __future__ import annotations

import hashlib
import operator
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune.memory.allocator import EMPTY_CACHE, Replay
from autotune.memory.pools import (
    NO_LIMIT_BYTES,
    SMALL_REQUEST_BYTES,
    ExpandablePool,
    Growth,
    Pool,
)
from autotune.memory.traces.running import in_blocks

_MOST_REMEMBERED = 256
"""Most stretches that a Replayer remembers. [judgement] One takes up to half a MB."""

Events = Sequence[int] | npt.NDArray[np.int64]


def replay(
    sizes: Sequence[int],
    events: Sequence[int],
    *,
    until_steady: Sequence[Sequence[int]] = (),
    cap_bytes: int | None = None,
    most_bytes: int | None = None,
    expandable_segments: bool = False,
    by_address: bool = False,
    aside: Sequence[Collection[int]] = (),
) -> Replay:
    """Run a tape through the allocator, as Replayer.replay does a tape in parts."""
    return Replayer().replay(
        sizes,
        [events],
        until_steady=[[step] for step in until_steady],
        cap_bytes=cap_bytes,
        most_bytes=most_bytes,
        expandable_segments=expandable_segments,
        by_address=by_address,
        aside=aside,
    )


class Replayer:
    """Replays tapes, and remembers what their parts did to a pool: tapes that are alike have much in common.

    Steps are alike to the pool of large blocks, and so are optimizers whose state is small.
    """

    def __init__(self) -> None:
        self._remembered: OrderedDict[tuple[Any, ...], _Passage] = OrderedDict()

    def replay(
        self,
        sizes: Events,
        parts: Iterable[Events],
        *,
        until_steady: Iterable[Iterable[Events]] = (),
        cap_bytes: int | None = None,
        most_bytes: int | None = None,
        expandable_segments: bool = False,
        by_address: bool = False,
        aside: Sequence[Collection[int]] = (),
    ) -> Replay:
        """Run the parts of a tape through the allocator, under a cap on reserved bytes if one is given.

        `until_steady`: the parts of further steps, which run until one ends with as much reserved as it began
        with, and did not come to the cap. Where nothing is given back in between, it leaves what it found:
        all others are alike.

        A request whose segment would pass the cap releases cached segments and tries again; if that does not
        help, the replay stops there and says so. A tensor may be allocated again after its free, so a steady
        step can be repeated. Raises KeyError when a tensor is freed that is not allocated.

        most_bytes: the replay ends, as if it had failed, at the request with which more than these are
        reserved: what does not fit is not replayed to its end.

        expandable_segments: as under PYTORCH_ALLOC_CONF=expandable_segments:True. Torch compares the cap with
        the segment it would ask for otherwise and then maps whole pages: reserved bytes may pass it by
        OVERSHOOT_BYTES.

        by_address: of free blocks of equal size the one with the lowest address is taken, as before torch
        2.12, and later segments lie below earlier ones. Since then it is the one in the oldest segment,
        wherever that lies. Both orders are those of PyTorch's own builds (studies/no-card); no document says
        where cudaMalloc takes addresses, but steps on a T4 reserve what they did with falling ones alone
        (studies/published-t4).

        aside: the numbers of the tensors that each further CUDA stream allocates. A stream's blocks lie in
        segments of its own, and no other stream gets what it has freed (c10/cuda/CUDACachingAllocator.cpp,
        get_free_block).
        """
        pools: list[Pool] = [
            ExpandablePool(is_small=is_small)
            if expandable_segments
            else Pool(is_small=is_small, falls=by_address)
            for _ in range(1 + len(aside))
            for is_small in (True, False)
        ]
        running = _Running(
            sizes,
            pools,
            self._remembered,
            cap_bytes=NO_LIMIT_BYTES if cap_bytes is None else cap_bytes,
            most_bytes=NO_LIMIT_BYTES if most_bytes is None else most_bytes,
            aside=aside,
        )
        if not all(map(running.goes_through, parts)):
            return running.ended()
        for step in until_steady:
            before = running.reserved_bytes, running.num_alloc_retries
            if not all(map(running.goes_through, step)):
                break
            if (running.reserved_bytes, running.num_alloc_retries) == before:
                break
        return running.ended()


@dataclass(frozen=True, slots=True)
class _Passage:
    """A pool before and after events, and what they did to it."""

    before: Pool
    after: Pool
    taken_bytes: npt.NDArray[Any]
    """Bytes that each event took; negative: gave back."""
    growths: list[Growth]


class _Stream:
    """The events of a stretch that are of one pool."""

    def __init__(
        self, places: npt.NDArray[np.int64], order: npt.NDArray[np.int64], blocks: npt.NDArray[Any]
    ) -> None:
        """`places`: of the events in the stretch. `blocks`: bytes of each event of the stretch."""
        self.places = places
        self._order = order[places]
        self._blocks = blocks

    @cached_property
    def events(self) -> list[int]:
        listed: list[int] = self._order.tolist()
        return listed

    @cached_property
    def key(self) -> bytes:
        """A digest of all that the events do to a pool."""
        digest = hashlib.blake2b(self._order.tobytes(), digest_size=16)
        blocks = self._blocks[self.places]
        digest.update(
            repr(blocks.tolist()).encode() if blocks.dtype == object else blocks.tobytes()
        )
        return digest.digest()

    def until(self, place: int) -> int:
        """Return how many events come before a place in the stretch."""
        return int(self.places.searchsorted(place))


class _Running:
    """A replay, as far as it has come."""

    def __init__(
        self,
        sizes: Events,
        pools: list[Pool],
        remembered: OrderedDict[tuple[Any, ...], _Passage],
        *,
        cap_bytes: int,
        most_bytes: int,
        aside: Sequence[Collection[int]],
    ) -> None:
        self._blocks = in_blocks(sizes)
        self._stream_of = np.zeros(len(self._blocks), dtype=np.int64)
        for number, tensors in enumerate(aside, start=1):
            self._stream_of[list(tensors)] = number
        self._sizes: list[int] = self._blocks.tolist()
        self._pools = pools
        self._remembered = remembered
        self._cap_bytes, self._most_bytes = cap_bytes, most_bytes
        self._num_events = 0
        """Events that lie behind."""
        self._allocated_bytes = self._peak_bytes = self._peak_reserved_bytes = 0
        self._peak_event = -1
        self.reserved_bytes = self.num_alloc_retries = 0
        self._last_retry: int | None = None
        self._failed: tuple[int, int] | None = None
        """The event that failed, and the bytes of its request."""

    def goes_through(self, events: Events) -> bool:
        """Run a part; return whether it came to its end."""
        if len(events) and self._peak_event < 0:
            self._peak_event = 0
        order = np.asarray(events, dtype=np.int64)
        begin = 0
        for end in (*np.flatnonzero(order == EMPTY_CACHE).tolist(), len(order)):
            if not self._goes_on(order[begin:end], self._num_events + begin):
                return False
            if end < len(order):
                self._release()
            begin = end + 1
        self._num_events += len(order)
        return True

    def ended(self) -> Replay:
        failed_event, failed_request = self._failed or (None, None)
        return Replay(
            peak_allocated_bytes=self._peak_bytes,
            peak_reserved_bytes=self._peak_reserved_bytes,
            num_alloc_retries=self.num_alloc_retries,
            last_retry_event=self._last_retry,
            failed_event=failed_event,
            failed_request_bytes=failed_request,
            peak_allocated_event=self._peak_event,
            final_allocated_bytes=self._allocated_bytes,
            final_reserved_bytes=self.reserved_bytes,
        )

    def _goes_on(self, order: npt.NDArray[np.int64], first: int) -> bool:
        """Run a stretch, whose first event has that number; return whether it came to its end."""
        tensors = np.where(order < 0, ~order, order)
        blocks = self._blocks[tensors]
        is_small = blocks <= SMALL_REQUEST_BYTES
        of_pools = [is_small & (blocks > 0), ~is_small]
        if (num_streams := len(self._pools) // len(of_pools)) > 1:
            of_stream = self._stream_of[tensors]
            of_pools = [
                places & (of_stream == number)
                for number in range(num_streams)
                for places in of_pools
            ]
        streams = [_Stream(np.flatnonzero(places), order, blocks) for places in of_pools]
        begin = 0
        while True:
            passages = self._passages(streams, begin, None)
            stop, asked_bytes, is_at_cap = self._first_to_stop(streams, passages)
            if stop is None:
                self._take(streams, passages, first, begin, len(order))
                return True
            if is_at_cap and not _end_at(stop, streams, begin, passages):
                passages = self._passages(streams, begin, stop)
            self._take(streams, passages, first, begin, stop)
            if is_at_cap:
                self._release()
                self.num_alloc_retries += 1
                self._last_retry = first + stop
            if not is_at_cap or self.reserved_bytes + asked_bytes > self._cap_bytes:
                self._failed = first + stop, asked_bytes
                return False
            begin = stop

    def _passages(self, streams: Sequence[_Stream], begin: int, stop: int | None) -> list[_Passage]:
        """Run the streams from one place in the stretch to another, each to what stops its own pool at most.

        The pool of large blocks first: the other need not go further than where that one stops.
        """
        found: list[_Passage] = []
        for pool, stream in zip(reversed(self._pools), reversed(streams), strict=True):
            start, end = stream.until(begin), None if stop is None else stream.until(stop)
            passage = self._passage(pool, stream, start, end)
            found.insert(0, passage)
            num_run = start + len(passage.taken_bytes)
            if num_run < (len(stream.places) if end is None else end):
                stop = int(stream.places[num_run])
        return found

    def _passage(self, pool: Pool, stream: _Stream, start: int, stop: int | None) -> _Passage:
        others_bytes = self.reserved_bytes - pool.reserved_bytes
        limits = self._cap_bytes - others_bytes, self._most_bytes - others_bytes
        of_any_limits = stream.key, start, stop, pool.reserved_bytes, *pool.free
        # What came to a limit is as far as it goes below that limit alone.
        for key in (of_any_limits, (limits, *of_any_limits)):
            known = self._remembered.get(key)
            if known is not None and (known.before is pool or known.before.is_like(pool)):
                self._remembered.move_to_end(key)
                return known
        after = pool.copied()
        cap_bytes, most_bytes = limits
        ran = after.run(
            stream.events,
            self._sizes,
            start=start,
            stop=stop,
            cap_bytes=cap_bytes,
            most_bytes=most_bytes,
        )
        taken_bytes = np.array(ran.taken_bytes, dtype=self._blocks.dtype)
        passage = _Passage(pool, after, taken_bytes, ran.growths)
        has_ended = start + len(taken_bytes) == (len(stream.places) if stop is None else stop)
        self._remembered[of_any_limits if has_ended else (limits, *of_any_limits)] = passage
        if len(self._remembered) > _MOST_REMEMBERED:
            self._remembered.popitem(last=False)
        return passage

    def _first_to_stop(
        self, streams: Sequence[_Stream], passages: Sequence[_Passage]
    ) -> tuple[int | None, int, bool]:
        """Return the first request that comes to a limit: its place, its bytes, whether it is the cap."""
        reserved_bytes = self.reserved_bytes
        for place, growth in _growths(streams, passages):
            if reserved_bytes + growth.asked_bytes > self._cap_bytes:
                return place, growth.asked_bytes, True
            reserved_bytes += growth.reserved_bytes
            if reserved_bytes > self._most_bytes:
                return place, growth.asked_bytes, False
        return None, 0, False

    def _take(
        self,
        streams: Sequence[_Stream],
        passages: Sequence[_Passage],
        first: int,
        begin: int,
        stop: int,
    ) -> None:
        """Take what was run from one place in the stretch to another for done."""
        self._pools = [passage.after for passage in passages]
        for place, growth in _growths(streams, passages):
            if place <= stop:
                self.reserved_bytes += growth.reserved_bytes
        self._peak_reserved_bytes = max(self._peak_reserved_bytes, self.reserved_bytes)
        if begin == stop:
            return
        taken = np.zeros(stop - begin, dtype=self._blocks.dtype)
        for stream, passage in zip(streams, passages, strict=True):
            start, end = stream.until(begin), stream.until(stop)
            taken[stream.places[start:end] - begin] = passage.taken_bytes[: end - start]
        allocated = self._allocated_bytes + taken.cumsum()
        at = int(allocated.argmax())
        if allocated[at] > self._peak_bytes:
            self._peak_bytes, self._peak_event = int(allocated[at]), first + begin + at
        self._allocated_bytes = int(allocated[-1])

    def _release(self) -> None:
        """Give back what is cached."""
        self._pools = [pool.copied() for pool in self._pools]
        for pool in self._pools:
            pool.release_cached()
        self.reserved_bytes = sum(pool.reserved_bytes for pool in self._pools)


def _end_at(
    place: int, streams: Sequence[_Stream], begin: int, passages: Sequence[_Passage]
) -> bool:
    """Whether passages that begin at a place of the stretch ran what comes before another, and no more."""
    return all(
        len(passage.taken_bytes) == stream.until(place) - stream.until(begin)
        for stream, passage in zip(streams, passages, strict=True)
    )


def _growths(streams: Sequence[_Stream], passages: Sequence[_Passage]) -> list[tuple[int, Growth]]:
    """Return what grew, by place in the stretch, in order."""
    found = [
        (int(stream.places[growth.event]), growth)
        for stream, passage in zip(streams, passages, strict=True)
        for growth in passage.growths
    ]
    return sorted(found, key=operator.itemgetter(0))
