"""Real probes on pictures on the CPU, against the prediction: bytes as in test_probe_sft.py."""

from __future__ import annotations

import dataclasses
import math

import pytest
import seeing
from test_probe import (
    FULL,
    LORA,
    QLORA,
    _quiet_and_steady,  # noqa: F401
    estimated,
    run,
)
from test_probe_sft import _folded_in_registers  # noqa: F401

from autotune.common.dtypes import DTYPE_BYTES
from autotune.common.units import MIB
from autotune.worker.build import model as models

pytest.importorskip("trl")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

TASK = "image-text-to-text"
LENGTH = 192
OF_TRL = {"trainer": "trl-sft", "batching": "padded", "sequence_length": LENGTH}
SEEN_FULL = dataclasses.replace(FULL, **OF_TRL)
SEEN_LORA = dataclasses.replace(LORA, **OF_TRL, precision="fp32")
CONFIGS = {
    "smolvlm": dataclasses.replace(SEEN_LORA, activation_checkpointing=1),
    "gemma3": dataclasses.replace(SEEN_FULL, micro_batch_size=1),
    "llava": SEEN_FULL,
    "qwen2_vl": dataclasses.replace(SEEN_LORA, activation_checkpointing=1),
    "qwen2_5_vl": SEEN_FULL,
    "qwen3_vl": dataclasses.replace(SEEN_FULL, micro_batch_size=1),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_probe_needs_what_was_predicted(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, model = CONFIGS[family], seeing.CONFIGS[family]
    pictures = seeing.pictures_of(models.load_config(model), 2)
    measured = run(config, model, task=TASK, pictures=pictures)
    predicted = estimated(config, monkeypatch, model, TASK, pictures)
    assert (measured.outcome, measured.message) == ("ok", "")
    assert measured.loss_is_finite
    assert measured.peak_allocated_bytes is not None
    assert measured.peak_reserved_bytes is not None
    difference = measured.peak_allocated_bytes - predicted.peak_allocated_bytes
    # On a CPU a batch is there as it is collated, before a step begins.
    num_texts = 3 + len(pictures.of_text)
    of_pictures = sum(math.prod(t.shape) * DTYPE_BYTES[t.dtype] for t in pictures.tensors)
    batch_bytes = config.micro_batch_size * (num_texts * LENGTH * 8 + of_pictures)
    # A block of few numbers: the grids; another: what the model keeps for text that it might generate.
    batch_bytes += 2 * 512 * bool(pictures.grids)
    assert 0 <= difference <= batch_bytes
    assert abs(measured.peak_reserved_bytes - predicted.peak_reserved_bytes) <= 2 * MIB


def test_in_16_bits_a_probe_needs_a_little_more(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(QLORA, **OF_TRL)
    model = seeing.CONFIGS["smolvlm"]
    pictures = seeing.pictures_of(models.load_config(model), 1)
    measured = run(config, model, task=TASK, pictures=pictures)
    predicted = estimated(config, monkeypatch, model, TASK, pictures)
    assert (measured.outcome, measured.message) == ("ok", "")
    assert measured.peak_allocated_bytes is not None
    assert 1 <= measured.peak_allocated_bytes / predicted.peak_allocated_bytes < 1.04


def test_a_confirmation_evaluates_saves_and_goes_on_with_varied_lengths() -> None:
    model = seeing.CONFIGS["smolvlm"]
    pictures = seeing.pictures_of(models.load_config(model), 1)
    config = dataclasses.replace(SEEN_LORA, sequence_length=100)
    spec = {"confirm_steps": 2, "varied_steps": 4, "lengths": (4, 100)}
    measured = run(config, model, task=TASK, pictures=pictures, **spec)
    assert (measured.outcome, measured.message) == ("ok", "")
    assert (measured.num_steps, measured.num_varied_steps) == (2, 4)
