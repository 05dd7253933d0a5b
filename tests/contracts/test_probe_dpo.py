"""Real probes of TRL's DPOTrainer on the CPU, against the prediction: bytes as in test_probe_sft.py."""

from __future__ import annotations

import dataclasses

import pytest
from test_probe import (
    FULL,
    LORA,
    QLORA,
    SEQUENCE_LENGTH,
    _quiet_and_steady,  # noqa: F401
    estimated,
    run,
)
from test_probe_sft import _folded_in_registers  # noqa: F401

from autotune.common.units import MIB

pytest.importorskip("trl")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

DPO = dataclasses.replace(FULL, trainer="trl-dpo", batching="padded")
OF_LORA = dataclasses.replace(LORA, trainer="trl-dpo", batching="padded", precision="fp32")
CONFIGS = {
    "full": DPO,
    "full, scored before": dataclasses.replace(
        DPO, precompute_ref_log_probs=True, activation_checkpointing=2
    ),
    "full checkpointed": dataclasses.replace(DPO, activation_checkpointing=1, micro_batch_size=1),
    "lora": OF_LORA,
    "lora plan, scored before": dataclasses.replace(
        OF_LORA,
        precompute_ref_log_probs=True,
        activation_checkpointing=1,
        checkpoint_plan="recompute",
        checkpoint_layers=2,
    ),
    "lora checkpointed": dataclasses.replace(OF_LORA, activation_checkpointing=1),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_probe_needs_what_was_predicted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS[name]
    measured, predicted = run(config, task="dpo"), estimated(config, monkeypatch, task="dpo")
    assert (measured.outcome, measured.message) == ("ok", "")
    assert measured.loss_is_finite
    assert measured.peak_allocated_bytes is not None
    assert measured.peak_reserved_bytes is not None
    difference = measured.peak_allocated_bytes - predicted.peak_allocated_bytes
    # Token ids and two masks of both answers.
    batch_bytes = 3 * 2 * config.micro_batch_size * SEQUENCE_LENGTH * 8
    assert 0 <= difference <= 4 * batch_bytes
    assert abs(measured.peak_reserved_bytes - predicted.peak_reserved_bytes) <= 2 * MIB


def test_in_16_bits_a_probe_needs_a_little_more(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(QLORA, trainer="trl-dpo", batching="padded")
    measured, predicted = run(config, task="dpo"), estimated(config, monkeypatch, task="dpo")
    assert (measured.outcome, measured.message) == ("ok", "")
    assert measured.peak_allocated_bytes is not None
    assert 1 <= measured.peak_allocated_bytes / predicted.peak_allocated_bytes < 1.04


def test_a_confirmation_evaluates_saves_and_goes_on_with_varied_lengths() -> None:
    measured = run(OF_LORA, task="dpo", confirm_steps=2, varied_steps=4, lengths=(4, 40))
    assert (measured.outcome, measured.message) == ("ok", "")
    assert (measured.num_steps, measured.num_varied_steps) == (2, 4)


def test_it_trains_on_pairs_alone() -> None:
    measured = run(DPO)
    assert measured.outcome == "invalid"
    assert measured.message == "DPOTrainer trains on pairs of answers only (--task dpo)"
