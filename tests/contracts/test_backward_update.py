"""A step of each weight within the backward pass trains what a step of all of them does, but unclipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from autotune.space.optimizers import OPTIMIZERS
from autotune.worker.build.backward_update import (
    UpdateInBackward,
    update_in_backward,
    why_not_in_backward,
)

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "tie_word_embeddings": True,
}
ALONE = [
    row.name
    for row in OPTIMIZERS.values()
    # On a CPU what is paged is as if it were not.
    if row.steps_alone and not row.only_cuda and not row.paged
]
ROWS = [{"input_ids": torch.arange(16) * (1 + i) % 97} for i in range(8)]
for _row in ROWS:
    _row["labels"] = _row["input_ids"]


def model_of() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))


def trainer_of(folder: Path, model: Any, *, in_backward: bool, **arguments: Any) -> Any:
    values = {
        "max_steps": 3,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        **arguments,
    }
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            activation_checkpointing=True,
            activation_checkpointing_kwargs={"use_reentrant": False},
            **values,
        ),
        train_dataset=ROWS,
        callbacks=[UpdateInBackward()] if in_backward else [],
    )


def weights_of(model: Any) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in model.parameters()]


def are_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(left, right, strict=True))


class Trying(transformers.TrainerCallback):
    """Tries a larger batch after each step, as train.py does after the first: nothing is left of it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        (updating,) = (
            each
            for each in self.trainer.callback_handler.callbacks
            if isinstance(each, UpdateInBackward)
        )
        updating.is_trial = True
        with torch.random.fork_rng():
            batch = {"input_ids": torch.arange(64).reshape(4, 16)}
            self.trainer.training_step(model, {**batch, "labels": batch["input_ids"]})
        updating.is_trial = False
        assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("optimizer", ALONE)
def test_weights_are_those_of_a_step_of_all(optimizer: str, tmp_path: Path) -> None:
    """With weights that are shared and a learning rate that changes, to the bit."""
    pytest.importorskip(OPTIMIZERS[optimizer].module or "torch")
    trained = []
    for in_backward in (False, True):
        model = model_of()
        before = weights_of(model)
        trainer = trainer_of(tmp_path, model, in_backward=in_backward, optim=optimizer)
        if in_backward:
            trainer.add_callback(Trying(trainer))
        trainer.train()
        trained.append(weights_of(model))
        assert not are_equal(before, trained[-1])
    assert are_equal(*trained)


@pytest.mark.parametrize("optimizer", ["schedule_free_adamw", "grokadamw", "stable_adamw"])
def test_what_counts_steps_for_all_weights_is_left_out(optimizer: str) -> None:
    assert not OPTIMIZERS[optimizer].steps_alone


def test_gradients_are_never_there_together_nor_clipped(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, model := model_of(), in_backward=True, max_grad_norm=1e-6)
    num_there = []

    class Watching(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            for weight in model.parameters():
                weight.register_post_accumulate_grad_hook(
                    lambda _: num_there.append(sum(p.grad is not None for p in model.parameters()))
                )

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            num_there.append(sum(p.grad is not None for p in model.parameters()))

    trainer.add_callback(Watching())
    trainer.train()
    assert set(num_there) == {0}
    assert trainer.args.max_grad_norm == 1e-6, "as it was"
    trained, plain = weights_of(model), model_of()
    trainer_of(tmp_path, plain, in_backward=False).train()
    assert are_equal(trained, weights_of(plain)), "max_grad_norm was of no effect"
    clipped = model_of()
    trainer_of(tmp_path, clipped, in_backward=False, max_grad_norm=1e-6).train()
    assert not are_equal(trained, weights_of(clipped))


def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """Moments, step counts and the schedule are in the Trainer's checkpoint."""
    whole = model_of()
    saves = {"save_strategy": "steps", "save_steps": 2}
    trainer_of(tmp_path, whole, in_backward=True, **saves).train()
    resumed = model_of()
    checkpoint = str(tmp_path / "checkpoint-2")
    trainer_of(tmp_path, resumed, in_backward=True).train(resume_from_checkpoint=checkpoint)
    assert are_equal(weights_of(whole), weights_of(resumed))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is above 1"),
        ({"fp16": True}, "fp16 scales the gradients"),
        ({"_n_gpu": 2}, "several GPUs share the run"),
    ],
)
def test_another_run_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert not why_not_in_backward(arguments)
    for name, value in changes.items():
        setattr(arguments, name, value)
    assert why_not_in_backward(arguments).endswith(f": {reason}")
    with pytest.raises(ValueError, match=reason):
        update_in_backward(model_of(), None, arguments)
