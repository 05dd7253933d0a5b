"""Real probes of TRL's trainers of preferences and rewards on the CPU, against the prediction.

Bytes as in test_probe_sft.py.
"""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
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
from test_probe_sft import _folded_in_registers  # noqa: F401

from autotune.common.units import MIB
from autotune.space.config import TrainConfig
from autotune.space.teacher import Teacher
from autotune.space.trainers import TRAINERS, TRL_BY_TASK
from autotune.worker.build.model import load_config
from autotune.worker.build.real_model import build
from autotune.worker.probe import trl_trainers

pytest.importorskip("trl")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def of(
    trainer: str, config: TrainConfig = FULL, *, written_length: int = 32, **changes: Any
) -> TrainConfig:
    """`written_length`: where completions are written, each token with a forward pass of its own."""
    written = completions(written_length) if TRAINERS[trainer].generates is not None else {}
    if TRAINERS[trainer].has_teacher:
        written |= {"num_generations": 1}
    return dataclasses.replace(config, trainer=trainer, batching="padded", **{**written, **changes})


def taught(config: TrainConfig) -> dict[str, Any]:
    """Return the teacher that a probe of a trainer with one needs: a deeper model, with a head of its own."""
    if not TRAINERS[config.trainer].has_teacher:
        return {}
    larger = {**MODEL, "num_hidden_layers": 6, "hidden_size": 2 * MODEL["hidden_size"]}
    return {"teacher": Teacher(name="larger", config_json=json.dumps(larger))}


def completions(length: int) -> dict[str, Any]:
    """On a CPU the head scores prompts as well, which are a token each."""
    return {
        "sequence_length": length,
        "num_generations": 2,
        "max_completion_length": length - 1,
        "kl_beta": 0.0,
    }


OF_LORA = dataclasses.replace(LORA, precision="fp32")
PLAN = {
    "activation_checkpointing": 1, "checkpoint_plan": "recompute", "checkpoint_layers": 2
}  # fmt: skip
BEFORE = {"precompute_ref_log_probs": True}
CONFIGS = {
    "dpo full": of("trl-dpo"),
    "dpo full, scored before": of("trl-dpo", **BEFORE, activation_checkpointing=2),
    "dpo full checkpointed": of("trl-dpo", activation_checkpointing=1, micro_batch_size=1),
    "dpo lora": of("trl-dpo", OF_LORA),
    "dpo lora plan, scored before": of("trl-dpo", OF_LORA, **BEFORE, **PLAN),
    "dpo lora checkpointed": of("trl-dpo", OF_LORA, activation_checkpointing=1),
    "reward full checkpointed": of("trl-reward", activation_checkpointing=2, micro_batch_size=1),
    "reward lora plan": of("trl-reward", OF_LORA, **PLAN),
    "kto full": of("trl-kto"),
    "kto lora checkpointed": of("trl-kto", OF_LORA, activation_checkpointing=1),
    "kto lora, scored before": of("trl-kto", OF_LORA, **BEFORE),
    "grpo full, with reference": of("trl-grpo", kl_beta=0.04),
    "rloo lora checkpointed, with reference": of(
        "trl-rloo", OF_LORA, activation_checkpointing=1, kl_beta=0.05
    ),
    "distillation full": of("trl-distillation"),
    "distillation lora checkpointed": of("trl-distillation", OF_LORA, activation_checkpointing=1),
}
TRAINERS_OF_OWN = [row.name for row in TRL_BY_TASK.values()]


def task_of(config: TrainConfig) -> str:
    return TRAINERS[config.trainer].task


@pytest.mark.parametrize("name", CONFIGS)
def test_a_probe_needs_what_was_predicted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS[name]
    task = task_of(config)
    more = taught(config)
    measured = run(config, task=task, **more)
    predicted = estimated(config, monkeypatch, task=task, **more)
    assert (measured.outcome, measured.message) == ("ok", "")
    assert measured.loss_is_finite
    assert measured.peak_allocated_bytes is not None
    assert measured.peak_reserved_bytes is not None
    difference = measured.peak_allocated_bytes - predicted.peak_allocated_bytes
    # Token ids and two masks of both answers, or of two batches.
    batch_bytes = 3 * 2 * config.micro_batch_size * config.sequence_length * 8
    # What is kept of ids while completions are written is taken to be a little more than it is.
    is_written = TRAINERS[config.trainer].generates is not None
    assert -batch_bytes * is_written <= difference <= 4 * batch_bytes
    assert abs(measured.peak_reserved_bytes - predicted.peak_reserved_bytes) <= 2 * MIB


@pytest.mark.parametrize("trainer", TRAINERS_OF_OWN)
def test_in_16_bits_a_probe_needs_a_little_more(
    trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Beside fewer layers, or fewer tokens, a little is more. Each token of a completion is a forward pass.
    config = of(trainer, QLORA, written_length=16)
    if TRAINERS[trainer].generates is not None:
        num_rows = SEQUENCE_LENGTH // config.sequence_length
        config = dataclasses.replace(config, micro_batch_size=num_rows * config.micro_batch_size)
    task = task_of(config)
    model = {**MODEL, "num_hidden_layers": 4}
    more = taught(config)
    measured = run(config, model, task=task, **more)
    predicted = estimated(config, monkeypatch, model, task, **more)
    assert (measured.outcome, measured.message) == ("ok", "")
    assert measured.peak_allocated_bytes is not None
    assert 1 <= measured.peak_allocated_bytes / predicted.peak_allocated_bytes < 1.04


@pytest.mark.parametrize("trainer", TRAINERS_OF_OWN)
def test_a_confirmation_evaluates_saves_and_goes_on_with_varied_lengths(trainer: str) -> None:
    config = of(trainer, OF_LORA, written_length=12)
    longest = min(24, config.sequence_length)
    varied = {"confirm_steps": 2, "varied_steps": 4, "lengths": (4, longest)}
    measured = run(config, task=task_of(config), **varied, **taught(config))
    assert (measured.outcome, measured.message) == ("ok", "")
    assert (measured.num_steps, measured.num_varied_steps) == (2, 4)


def test_under_zero_the_reference_of_completions_is_deepspeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DeepSpeed, which holds it in 16 bits, is not installed here."""
    given: list[Any] = []
    monkeypatch.setattr(
        "trl.models.utils.prepare_deepspeed", lambda *each: given.append(each) or "engine"
    )
    config = of("trl-grpo", kl_beta=0.04)
    reference = build(load_config(MODEL), "grpo", config, torch.device("cpu"))
    trainer = SimpleNamespace(
        is_deepspeed_enabled=True, temperature=1.0, accelerator="its", args=SimpleNamespace()
    )
    trl_trainers.give_reference(trainer, reference, config)
    assert given == [(reference, "its")]
    assert (trainer.ref_model, trainer.beta, trainer.args.beta) == ("engine", 0.04, 0.04)


@pytest.mark.parametrize("trainer", TRAINERS_OF_OWN)
def test_it_trains_its_own_task_alone(trainer: str) -> None:
    measured, row = run(of(trainer)), TRAINERS[trainer]
    assert measured.outcome == "invalid"
    assert (
        measured.message == f"{row.class_name} trains only on {row.trains_on} (--task {row.task})"
    )
