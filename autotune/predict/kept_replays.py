"""Replays that were made before, in the user's cache folder.

A replay is kept by a digest of all that it reads: the tensors' sizes, the events of each step, the limits and
the code. Neither the budget nor the card is in it where they change nothing: a replay that ends within its
limit serves every higher one.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

from autotune.catalogue.installed import takes_lowest_address
from autotune.common import json_records
from autotune.memory.allocator import Replay
from autotune.predict.steps import Steps
from autotune.store.trace_cache import ReplayCache


class KeptReplays:
    """Replays of steps, each made once and kept; without a cache each is made."""

    def __init__(self, cache: ReplayCache | None = None) -> None:
        self._cache = cache

    def whole(self, steps: Steps, most_bytes: int | None, make: Callable[[], Replay]) -> Replay:
        """Return a replay in segments of fixed size, which ends where more than `most_bytes` are reserved."""
        if self._cache is None:
            return make()
        of_steps = _digest(steps)
        by_most = f"{of_steps} within {most_bytes}"
        found = self._found(of_steps, by_most)
        if (kept := found.get(of_steps)) is not None and (
            most_bytes is None or kept.peak_reserved_bytes <= most_bytes
        ):
            return kept
        if (kept := found.get(by_most)) is not None:
            return kept
        made = make()
        self._keep(of_steps if made.failed_event is None else by_most, made)
        return made

    def growing(self, steps: Steps, room_bytes: int, make: Callable[[], Replay]) -> Replay:
        """Return a replay in segments that grow within so many bytes."""
        if self._cache is None:
            return make()
        request = f"{_digest(steps)} growing within {room_bytes}"
        kept = self._found(request).get(request)
        if kept is None:
            kept = make()
            self._keep(request, kept)
        return kept

    def _found(self, *requests: str) -> dict[str, Replay]:
        assert self._cache is not None
        found = {}
        for request, answer in self._cache.find(requests).items():
            try:
                found[request] = json_records.read(Replay, answer)
            except ValueError:  # Spoilt: it is made again.
                continue
        return found

    def _keep(self, request: str, replay: Replay) -> None:
        assert self._cache is not None
        self._cache.add({request: json_records.plain(replay)})


def _digest(steps: Steps) -> str:
    """Return a digest of what a replay of the steps reads of them."""
    digest = hashlib.sha256(f"{steps.sure_step} {takes_lowest_address()} ".encode())
    digest.update(_bytes_of(steps.sizes))
    for tensors in steps.aside:
        digest.update(b" aside " + _bytes_of(tensors))
    for part in steps.parts:
        digest.update(f" {part.step} {part.phase} {len(part.events)} ".encode())
        digest.update(part.events.data)
    return digest.hexdigest()


def _bytes_of(numbers: Sequence[int]) -> bytes:
    try:
        return array("q", numbers).tobytes()
    except OverflowError:  # of a model that no card holds
        return repr(numbers).encode()
