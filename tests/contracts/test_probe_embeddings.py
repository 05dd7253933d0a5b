"""Real probes of sentence-transformers' trainer on the CPU, against the prediction.

Bytes as in test_probe.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from test_probe import (
    FULL,
    LORA,
    MODEL,
    QLORA,
    SEQUENCE_LENGTH,
    _quiet_and_steady,  # noqa: F401
    estimated,
    run,
)

from autotune.catalogue.tasks import EMBEDDINGS
from autotune.common.units import MIB
from autotune.space.config import TrainConfig
from autotune.space.trainers import TRAINERS

pytest.importorskip("sentence_transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings(
        "ignore:.*only defines `gradient_checkpointing_enable`:FutureWarning"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def of(config: TrainConfig = FULL, **changes: Any) -> TrainConfig:
    own = {"trainer": "sentence-transformers", "batching": "padded", "micro_batch_size": 8}
    return dataclasses.replace(config, **{**own, "gradient_accumulation_steps": 1, **changes})


OF_LORA = dataclasses.replace(LORA, precision="fp32")
PLAN = {
    "activation_checkpointing": 1, "checkpoint_plan": "recompute", "checkpoint_layers": 1
}  # fmt: skip
CONFIGS = {
    "full": of(),
    "full cached": of(loss_mini_batches=4),
    "full cached, checkpointed": of(loss_mini_batches=2, activation_checkpointing=1),
    "full every 2nd layer, accumulated": of(
        activation_checkpointing=2, micro_batch_size=2, gradient_accumulation_steps=2
    ),
    "lora plan, cached": of(OF_LORA, loss_mini_batches=2, **PLAN),
    "lora cached, one by one": of(OF_LORA, loss_mini_batches=8),
    "lora cached, triplets": of(
        OF_LORA, trainer="sentence-transformers-triplets", loss_mini_batches=2
    ),
    "full checkpointed, ratings": of(
        trainer="sentence-transformers-ratings", activation_checkpointing=1
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_probe_needs_what_was_predicted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS[name]
    task = TRAINERS[config.trainer].task
    measured = run(config, task=task)
    predicted = estimated(config, monkeypatch, task=task)
    assert (measured.outcome, measured.message) == ("ok", "")
    assert measured.loss_is_finite
    assert measured.peak_allocated_bytes is not None
    assert measured.peak_reserved_bytes is not None
    difference = measured.peak_allocated_bytes - predicted.peak_allocated_bytes
    # Token ids and masks of all texts.
    batch_bytes = 2 * config.rows_per_sample * config.micro_batch_size * SEQUENCE_LENGTH * 8
    assert 0 <= difference <= 3 * batch_bytes
    assert abs(measured.peak_reserved_bytes - predicted.peak_reserved_bytes) <= 2 * MIB


@pytest.mark.parametrize("config", [QLORA, LORA], ids=["qlora", "lora"])
def test_in_16_bits_a_probe_needs_a_little_more(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = of(config, loss_mini_batches=2)
    model = {**MODEL, "num_hidden_layers": 4}  # beside fewer a little is more
    is_enabled = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: is_enabled("cpu"))
    measured = run(config, model, task=EMBEDDINGS)
    predicted = estimated(config, monkeypatch, model, EMBEDDINGS)
    assert (measured.outcome, measured.message) == ("ok", "")
    assert measured.peak_allocated_bytes is not None
    assert 1 <= measured.peak_allocated_bytes / predicted.peak_allocated_bytes < 1.04


def test_a_confirmation_evaluates_saves_and_goes_on_with_varied_lengths() -> None:
    config = of(OF_LORA, loss_mini_batches=2)
    measured = run(config, task=EMBEDDINGS, confirm_steps=2, varied_steps=4, lengths=(4, 40))
    assert (measured.outcome, measured.message) == ("ok", "")
    assert (measured.num_steps, measured.num_varied_steps) == (2, 4)


def test_a_trainer_of_another_task_is_refused() -> None:
    measured = run(dataclasses.replace(FULL, batching="padded"), task=EMBEDDINGS)
    assert measured.outcome == "invalid"
    assert measured.message == "sentence-similarity is trained by SentenceTransformerTrainer alone"
