"""Replays of configurations' first steps by the allocator model, each made once and as short as will do."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from autotune.catalogue.installed import takes_lowest_address
from autotune.memory.allocator import Replay
from autotune.memory.replayer import Replayer
from autotune.predict.expandable_segments import grown
from autotune.predict.kept_prices import KeptPrices
from autotune.predict.kept_replays import KeptReplays
from autotune.predict.steps import Steps
from autotune.space.config import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayable:
    """A configuration's first steps on one card."""

    config: TrainConfig
    identity: str
    """The trace's."""
    steps: Callable[[], Steps]
    room_bytes: int | None
    """Bytes within which segments grow; None where they are of fixed size."""
    start: tuple[object, ...] | None
    """Facts that the steps before the first update depend on; None where they are more than these."""
    least: Callable[[], Replayable]
    """The same with an optimizer that keeps nothing."""

    @property
    def name(self) -> str:
        return name_of(self.config)


class Replays:
    """Replays of runs, and what is known of those that reserve too much."""

    def __init__(self, prices: KeptPrices, kept: KeptReplays) -> None:
        self._prices = prices
        self._kept = kept
        self._replayer = Replayer()
        self._made: dict[tuple[TrainConfig, int | None], Replay] = {}
        """Replays by configuration, and by the room where segments grow."""
        self._misfits: set[tuple[TrainConfig, int | None, int]] = set()
        """Configurations whose replay reserved more than some bytes, by the room and those bytes."""
        self._starts_of_misfits: dict[tuple[object, ...], bool] = {}
        """Whether a start of steps that reserve more than some bytes does so with any optimizer."""

    def whole(self, run: Replayable) -> Replay:
        """Return the replay of all steps."""
        key = run.config, run.room_bytes
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._replay(run)
        return found

    def is_within(self, run: Replayable, most_bytes: int) -> bool:
        """Whether no more bytes are reserved, by a replay up to there."""
        misfit = run.config, run.room_bytes, most_bytes
        if misfit in self._misfits or self._begins_like_a_misfit(run, most_bytes):
            return False
        if not self._is_replayed_within(run, most_bytes):
            self._misfits.add(misfit)
            return False
        return True

    def _is_replayed_within(self, run: Replayable, most_bytes: int) -> bool:
        """Replay the run as long as it reserves no more; note whether its start alone does."""
        key = run.config, run.room_bytes
        known = found = self._made.get(key)
        if found is None:
            found = self._replay(run, most_bytes=most_bytes if run.room_bytes is None else None)
        fits = found.failed_event is None and found.peak_reserved_bytes <= most_bytes
        if fits:
            self._made[key] = found
        elif known is None and run.start is not None:
            num_before = self._prices.price(
                int,
                run.identity,
                f"before update {run.name}",
                lambda: run.steps().num_events_before_update(),
            )
            passes = found.failed_event is not None and found.failed_event < num_before
            self._starts_of_misfits.setdefault((run.start, run.room_bytes, most_bytes), passes)
        return fits

    def _begins_like_a_misfit(self, run: Replayable, most_bytes: int) -> bool:
        """Whether something was replayed that begins alike, and that start reserves more by itself.

        Optimizers differ in the first update at the earliest: one start stands for many of them. Where
        segments grow within a room, the first updates decide: what does not even fit with an optimizer that
        keeps nothing is taken to fit with none. [judgement] Of 23 such starts in three searches, replayed
        with up to six optimizers, none fitted. In segments of fixed size all 13 fitted so.
        """
        begins = run.start, run.room_bytes, most_bytes
        if run.start is None or begins not in self._starts_of_misfits:
            return False
        if run.room_bytes is not None and not self._starts_of_misfits[begins]:
            least = run.least()
            is_alike = least.start == run.start
            fits = not is_alike or self._is_replayed_within(least, most_bytes)
            self._starts_of_misfits[begins] = not fits
        return self._starts_of_misfits[begins]

    def _replay(self, run: Replayable, *, most_bytes: int | None = None) -> Replay:
        identity, name, room_bytes = run.identity, run.name, run.room_bytes
        if room_bytes is not None:

            def growing() -> Replay:
                steps = run.steps()
                return self._kept.growing(
                    steps, room_bytes, lambda: grown(steps, room_bytes, self._replayer)
                )

            return self._prices.price(Replay, identity, f"growing {room_bytes} {name}", growing)
        whole, within = f"replay {name}", f"replay {most_bytes} {name}"
        known = self._prices.known(Replay, identity, whole)
        if known is not None and (most_bytes is None or known.peak_reserved_bytes <= most_bytes):
            return known
        known = self._prices.known(Replay, identity, within)
        if known is None:
            steps = run.steps()
            known = self._kept.whole(
                steps, most_bytes, lambda: steps.replay(most_bytes, self._replayer)
            )
            is_whole = known.failed_event is None
            self._prices.note(identity, whole if is_whole else within, known)
        return known


def name_of(config: TrainConfig) -> str:
    """Return a text that no other configuration has, nor libraries that replay it in another way."""
    text = f"{config!r} {takes_lowest_address()}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]
