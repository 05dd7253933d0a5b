"""Starts of steps that stand for several optimizers: how many are replayed until none is known to fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.memory.allocator import Replay
from autotune.predict import replays
from autotune.predict.kept_prices import KeptPrices
from autotune.predict.kept_replays import KeptReplays
from autotune.predict.replays import Replayable, Replays, name_of
from autotune.space.config import TrainConfig
from autotune.space.optimizers import KEEPS_NOTHING, OPTIMIZERS
from autotune.store.trace_cache import PriceCache

ROOM_BYTES = 100
CONFIG = TrainConfig(
    method="lora",
    micro_batch_size=1,
    gradient_accumulation_steps=1,
    sequence_length=64,
    precision="bf16-true",
    optimizer="adamw_torch",
    expandable_segments=True,
)
NAMES = ("adamw_torch_fused", "adamw_torch", "lion_32bit", "adamw_bnb_8bit")


def test_the_one_that_keeps_nothing_has_no_state() -> None:
    assert OPTIMIZERS[KEEPS_NOTHING].moments == 0
    assert not OPTIMIZERS[KEEPS_NOTHING].updates


def test_a_name_is_of_one_configuration_and_one_order_of_ties(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes: list[dict[str, Any]] = [
        {}, {"lora_rank": 8}, {"micro_batch_size": 2}, {"optimizer": "sgd"}, {"sequence_length": 65}
    ]  # fmt: skip
    names = [name_of(dataclasses.replace(CONFIG, **change)) for change in changes]
    assert name_of(dataclasses.replace(CONFIG)) == names[0]
    is_lowest = replays.takes_lowest_address()
    monkeypatch.setattr(replays, "takes_lowest_address", lambda: not is_lowest)
    names.append(name_of(CONFIG))
    assert len(set(names)) == len(changes) + 1
    assert all(len(name) == 32 for name in names)


@pytest.mark.parametrize(
    ("room_bytes", "least_bytes", "most_bytes", "replayed"),
    [
        # Not even what keeps nothing fits: the others are not replayed.
        (ROOM_BYTES, ROOM_BYTES + 1, ROOM_BYTES + 1, [NAMES[0], KEEPS_NOTHING]),
        # It fits, and so may any.
        (ROOM_BYTES, ROOM_BYTES, ROOM_BYTES + 1, [NAMES[0], KEEPS_NOTHING, *NAMES[1:]]),
        # All fit: it is not asked.
        (ROOM_BYTES, ROOM_BYTES, ROOM_BYTES, list(NAMES)),
        # In segments of fixed size it tells of no other.
        (None, ROOM_BYTES + 1, ROOM_BYTES + 1, list(NAMES)),
    ],
)
def test_one_start_is_replayed_until_none_is_known_to_fit(
    monkeypatch: pytest.MonkeyPatch,
    room_bytes: int | None,
    least_bytes: int,
    most_bytes: int,
    replayed: list[str],
) -> None:
    made: list[str] = []

    class Steps:
        def num_events_before_update(self) -> int:
            return 1

    def run_of(name: str) -> Replayable:
        return Replayable(
            config=dataclasses.replace(CONFIG, optimizer=name),
            identity="",
            steps=Steps,  # type: ignore[arg-type]
            room_bytes=room_bytes,
            start=("alike",),
            least=lambda: run_of(KEEPS_NOTHING),
        )

    def replay(_: Replays, run: Replayable, **__: Any) -> Replay:
        made.append(run.config.optimizer)
        is_least = run.config.optimizer == KEEPS_NOTHING
        return Replay(
            peak_allocated_bytes=0,
            peak_reserved_bytes=least_bytes if is_least else most_bytes,
            num_alloc_retries=0,
            last_retry_event=None,
            failed_event=None,
            failed_request_bytes=None,
            peak_allocated_event=-1,
            final_allocated_bytes=0,
            final_reserved_bytes=0,
        )

    monkeypatch.setattr(Replays, "_replay", replay)
    replays = Replays(KeptPrices(None, "", lambda: ()), KeptReplays())
    for _ in range(2):
        for name in NAMES:
            assert replays.is_within(run_of(name), ROOM_BYTES) == (most_bytes <= ROOM_BYTES)
    assert made == replayed


def ended(reserved_bytes: int, failed_event: int | None = None) -> Replay:
    return Replay(
        peak_allocated_bytes=0,
        peak_reserved_bytes=reserved_bytes,
        num_alloc_retries=0,
        last_retry_event=None,
        failed_event=failed_event,
        failed_request_bytes=None if failed_event is None else 1,
        peak_allocated_event=-1,
        final_allocated_bytes=0,
        final_reserved_bytes=0,
    )


class StandInSteps:
    """Steps whose update begins with event 10, and which reserve so many bytes."""

    def __init__(self, reserved_bytes: int, failing_event: int = 5) -> None:
        self.reserved_bytes, self.failing_event = reserved_bytes, failing_event
        self.asked: list[int | None] = []

    def num_events_before_update(self) -> int:
        return 10

    def replay(self, most_bytes: int | None, _: object) -> Replay:
        self.asked.append(most_bytes)
        fits = most_bytes is None or self.reserved_bytes <= most_bytes
        return ended(self.reserved_bytes, None if fits else self.failing_event)


class KeepsNothing(KeptReplays):
    """Replays are made each time that they are asked for."""

    def whole(self, _: Any, __: Any, make: Callable[[], Replay]) -> Replay:
        return make()

    def growing(self, _: Any, __: Any, make: Callable[[], Replay]) -> Replay:
        return make()


def run_of(
    name: str, steps: StandInSteps, *, room_bytes: int | None = None, start: str | None = "alike"
) -> Replayable:
    def least() -> Replayable:
        raise AssertionError("only where segments grow")

    return Replayable(
        config=dataclasses.replace(CONFIG, optimizer=name),
        identity="a trace",
        steps=lambda: steps,  # type: ignore[arg-type,return-value]
        room_bytes=room_bytes,
        start=None if start is None else (start,),
        least=least,
    )


def test_what_fits_is_replayed_once_and_known_to_reserve_no_more(tmp_path: Path) -> None:
    kept = KeptPrices(PriceCache(tmp_path), "a machine", lambda: ("a trace",))
    found, steps = Replays(kept, KeepsNothing()), StandInSteps(100)
    run = run_of(NAMES[0], steps)
    assert [found.is_within(run, most) for most in (100, 100, 99, 101)] == [True, True, False, True]
    assert found.whole(run) == ended(100)
    # A replay that ended says what is reserved: nobody asks for another.
    assert steps.asked == [100]
    # So it does in the next command.
    kept.keep()
    kept = KeptPrices(PriceCache(tmp_path), "a machine", lambda: ("a trace",))
    later = Replays(kept, KeepsNothing())
    assert later.is_within(run, 100)
    assert later.whole(run) == ended(100)
    assert steps.asked == [100]


def test_what_does_not_fit_is_replayed_once_for_each_budget() -> None:
    found = Replays(KeptPrices(None, "", lambda: ()), KeepsNothing())
    steps = StandInSteps(100)
    run = run_of(NAMES[0], steps, start=None)
    for most_bytes in (99, 99, 98, 99, 98):
        assert not found.is_within(run, most_bytes)
    assert steps.asked == [99, 98]
    # It says nothing of the whole.
    assert found.whole(run) == ended(100)
    assert steps.asked == [99, 98, None]


@pytest.mark.parametrize(
    ("failing_event", "start", "is_asked"),
    [
        # The first steps alone do not fit, and an optimizer has no part in them.
        (9, "alike", False),
        # It ended in the update, which another optimizer has otherwise.
        (10, "alike", True),
        (9, None, True),
    ],
)
def test_a_start_that_does_not_fit_speaks_for_all_that_begin_so(
    failing_event: int, start: str | None, is_asked: bool
) -> None:
    found = Replays(KeptPrices(None, "", lambda: ()), KeepsNothing())
    first, second = StandInSteps(100, failing_event), StandInSteps(50)
    assert not found.is_within(run_of(NAMES[0], first, start=start), 60)
    assert found.is_within(run_of(NAMES[1], second, start=start), 60) == is_asked
    assert second.asked == ([60] if is_asked else [])
    # Of another budget or another start it says nothing.
    third = StandInSteps(50)
    assert found.is_within(run_of(NAMES[2], third, start=start), 61)
    assert found.is_within(run_of(NAMES[3], third, start="another"), 60)
    assert third.asked == [61, 60]


def test_segments_that_grow_are_replayed_within_their_room(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, asked = StandInSteps(100), []

    def grown(of: object, room_bytes: int, _: object) -> Replay:
        assert of is steps
        asked.append(room_bytes)
        return ended(80)

    monkeypatch.setattr(replays, "grown", grown)
    found = Replays(KeptPrices(None, "", lambda: ()), KeepsNothing())
    run = run_of(NAMES[0], steps, room_bytes=90)
    assert found.is_within(run, 80)
    assert found.whole(run) == ended(80)
    assert not found.is_within(run_of(NAMES[0], steps, room_bytes=91, start=None), 79)
    assert asked == [90, 91]
    assert steps.asked == []
