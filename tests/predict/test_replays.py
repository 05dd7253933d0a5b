"""Starts of steps that stand for several optimizers: how many are replayed until none is known to fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autotune.memory.allocator import Replay
from autotune.predict import replays
from autotune.predict.kept_prices import KeptPrices
from autotune.predict.kept_replays import KeptReplays
from autotune.predict.replays import Replayable, Replays, name_of
from autotune.space.config import TrainConfig
from autotune.space.optimizers import KEEPS_NOTHING, OPTIMIZERS

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
