"""The advice where nothing fits: of how many samples one whole step would fit."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.search.nothing_fits import _smaller_step, _smallest
from autotune.space.config import TrainConfig

PLAIN = TrainConfig(
    method="full",
    micro_batch_size=64,
    gradient_accumulation_steps=1,
    sequence_length=8,
    precision="fp32",
    optimizer="sgd",
)


def test_the_smallest_is_known_by_its_replay() -> None:
    """What lies free between live tensors decides, and the room that a configuration leaves."""
    plain, growing, quantized, larger = (
        dataclasses.replace(PLAIN, **changes)
        for changes in (
            {},
            {"expandable_segments": True},
            {"method": "qlora", "quantization": "nf4"},
            {"micro_batch_size": 128},
        )
    )
    # Live bytes, reserved bytes and room of each.
    known = {plain: (10, 18, 1), growing: (10, 11, 1), quantized: (9, 9, 5), larger: (30, 30, 1)}

    def estimated(config: TrainConfig) -> Any:
        reserved_bytes = known[config][1]
        assert config is not larger, "its live tensors alone are more than the least"
        return SimpleNamespace(
            config=config, peak_reserved_bytes=reserved_bytes, peak_device_bytes=reserved_bytes
        )

    estimator: Any = SimpleNamespace(
        floor_bytes=lambda config: known[config][0],
        estimate=estimated,
        headroom=SimpleNamespace(room_bytes=lambda _, config: known[config][2]),
    )
    assert _smallest(estimator, list(known)).config is growing


def fits_up_to(size: int) -> Any:
    return SimpleNamespace(
        supports=lambda _: True,
        floor_bytes=lambda config: config.micro_batch_size,
        fitting=lambda config: True if config.micro_batch_size <= size else None,
    )


@pytest.mark.parametrize(
    ("changes", "most", "found"),
    [
        ({}, 64, None),
        ({"update_in_backward": True}, 8, 8),
        ({"update_in_backward": True}, 1, 1),
        ({"trainer": "sentence-transformers"}, 8, 8),
        # One pair has no negatives.
        ({"trainer": "sentence-transformers"}, 1, None),
        ({"trainer": "sentence-transformers", "loss_mini_batches": 16}, 8, None),
    ],
)
def test_a_step_that_is_one_micro_batch_is_halved_until_it_fits(
    changes: dict[str, Any], most: int, found: int | None
) -> None:
    config = dataclasses.replace(PLAIN, **changes)
    smaller = _smaller_step(fits_up_to(most), [config])
    assert (None if smaller is None else smaller.micro_batch_size) == found
