"""The advice where nothing fits: of how many samples one whole step would fit."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import answers
import pytest

from autotune.records.estimate import PerGpu
from autotune.search.nothing_fits import _lower_most, _smaller_step
from autotune.space.config import TrainConfig

PLAIN = TrainConfig(
    method="full",
    micro_batch_size=64,
    gradient_accumulation_steps=1,
    sequence_length=8,
    precision="fp32",
    optimizer="sgd",
)


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
        # The whole step is none that is smaller.
        ({"update_in_backward": True}, 64, 32),
        ({"update_in_backward": True}, 0, None),
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


def test_where_loading_peaks_it_is_said_on_how_many_gpus() -> None:
    alone = answers.estimate()
    parts = dataclasses.replace(
        alone.breakdown, gradients_bytes=0, activations_bytes=0, logits_bytes=0
    )
    alone = dataclasses.replace(alone, breakdown=parts)
    numbers = {field.name: 0 for field in dataclasses.fields(PerGpu) if field.name != "layers"}
    shared: Any = PerGpu(**{**numbers, "parallelism": "zero2"})
    said = [
        _lower_most(dataclasses.replace(alone, per_gpu=per_gpu), answers.WORKLOAD)
        for per_gpu in (None, shared)
    ]
    assert all(text.startswith("A smaller model lowers it most") for text in said)
    assert [text.partition("as it is loaded")[2] for text in said] == [
        "",
        " on each GPU, before it is shared out",
    ]
