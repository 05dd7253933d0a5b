"""The optimizer's step within the backward pass: each weight is updated as soon as its gradient is there.

The gradient is given up at once, so that never all of them are there. The optimizer is the Trainer's own, one
for all weights, and steps once for each: it passes over weights without a gradient. So learning rates and
checkpoints are as ever. When the Trainer has it step, after the backward pass, no gradient is left. Nothing
is clipped: the norm is known when all gradients are there.

What follows the imports is put into train.py and train_sft.py as it stands (autotune.export.train_py).

Sources: torch 2.13 Tensor.register_post_accumulate_grad_hook; transformers 5.23 trainer_optimizer.py,
_setup_low_rank_optimizer, which does the same with an optimizer of its own for each weight.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback


class UpdateInBackward(TrainerCallback):
    """Lets the Trainer's optimizer update each weight in the backward pass: nothing is clipped."""

    is_trial = False
    """Whether each update is taken back at once, so that a backward pass only shows what memory it takes."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        self.undo = update_in_backward(model, optimizer, args, lambda: self.is_trial)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.undo()


def why_not_in_backward(args: Any) -> str:
    """The reason why weights cannot be updated in the backward pass so; empty where they can."""
    for is_so, reason in (
        (args.gradient_accumulation_steps > 1, "gradient_accumulation_steps is above 1"),
        (args.world_size > 1 or args.n_gpu > 1, "several GPUs share the run"),
        (args.fp16, "fp16 scales the gradients"),
    ):
        if is_so:
            return f"Weights cannot be updated in the backward pass: {reason}"
    return ""


def update_in_backward(model: Any, optimizer: Any, args: Any, is_trial: Any = lambda: False) -> Any:
    """Let the optimizer update each weight as soon as its gradient is there, and give the gradient up.

    Return a function that undoes it. Raises ValueError with the reason against it. `is_trial` tells whether
    updates are taken back.
    """
    if reason := why_not_in_backward(args):
        raise ValueError(reason)
    clipped_at = args.max_grad_norm
    vars(args).update(max_grad_norm=0.0)
    # Accelerate's wrapper steps when it takes an update to be due.
    inner = getattr(optimizer, "optimizer", optimizer)

    def update(weight: Any) -> None:
        take_back = remembered(inner, weight) if is_trial() else None
        inner.step()
        weight.grad = None
        if take_back is not None:
            take_back()

    handles = [
        weight.register_post_accumulate_grad_hook(update)
        for weight in model.parameters()
        if weight.requires_grad
    ]

    def undo() -> None:
        vars(args).update(max_grad_norm=clipped_at)
        for handle in handles:
            handle.remove()

    return undo


def remembered(optimizer: Any, weight: Any) -> Any:
    """Keep a weight and its optimizer's state in host memory; return a function that puts them back."""
    state = optimizer.state.get(weight, {})
    before = dict(state)
    places = [weight.detach(), *(value for value in before.values() if hasattr(value, "copy_"))]
    copies = [place.to("cpu", copy=True) for place in places]

    def take_back() -> None:
        for place, value in zip(places, copies, strict=True):
            place.copy_(value)
        state.clear()
        state.update(before)

    return take_back
