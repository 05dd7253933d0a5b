"""The loss of SentenceTransformerTrainer in a trace: its own code runs, with the loss of its samples.

A sample's texts are columns of a batch, each of which goes through the model by itself, the anchors first.
All positives of a micro-batch but its own are an anchor's negatives, and so are the third texts of triplets.
In mini-batches the loss is cached: each goes through the model without gradients, then the loss of all of
them has its backward pass down to their vectors, and then, in the outer backward pass, each goes through the
model again and has its own. A trace's micro-batch is such a mini-batch, of which there are as many as the
spec says.

Source: sentence-transformers 6.2 base/trainer.py (compute_loss, collect_features), base/losses/gradcache.py,
sentence_transformer/losses/multiple_negatives_ranking.py, its cached one, cosent.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from autotune.space.trainers import Trainer
from autotune.worker.build.embedder import make_loss, tensors_read
from autotune.worker.trace.tracker import Tracker

aten = torch.ops.aten


def batch_of(
    model: Any,
    trainer: Trainer,
    num_samples: int,
    sequence_length: int,
    empty: Callable[..., torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The batch of the trainer's collator, of texts at full length."""
    rated = {"label": empty(num_samples, dtype=torch.float32)} if trainer.rating else {}
    return rated | {
        f"{column}_{name}": empty(num_samples, sequence_length)
        for column in trainer.columns
        for name in tensors_read(model)
    }


def texts_of(inputs: dict[str, torch.Tensor], trainer: Trainer) -> dict[str, torch.Tensor]:
    """The tensors of a batch's first texts, as the model is given them."""
    prefix = f"{trainer.columns[0]}_"
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in inputs.items()
        if name.startswith(prefix)
    }


def know_last_places(tracker: Tracker) -> None:
    """Let a cached loss ask which place of a mini-batch is the last one with a token: the last of all."""

    def places_of(mask: torch.Tensor) -> Any:
        if not mask.is_meta or mask.dim() != 1:
            return NotImplemented
        places: Any = torch.empty((mask.shape[0], 1), dtype=torch.int64, device=mask.device)
        places.last_place = mask.shape[0] - 1
        return places

    def pass_on(func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> None:
        if func is aten.max.default and hasattr(args[0], "last_place"):
            out.last_place = args[0].last_place

    tracker.answer_too(aten.nonzero.default, places_of)
    tracker.answer_too(
        aten._local_scalar_dense.default,
        lambda number: getattr(number, "last_place", NotImplemented),
    )
    tracker.on_result = pass_on


def backward(loss: torch.Tensor) -> None:
    """Run a backward pass by the engine's own entry: Tensor.backward would switch the function mode off."""
    torch.autograd.graph._engine_run_backward(
        (loss,),
        (torch.ones_like(loss),),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


class _Wrapped(nn.Module):
    """A model as DDP runs it where it looks for unused parameters: it clones what the model returns.

    On a card the model is given a copy of the features, so that these do not keep what it has worked out; on
    a CPU, whose processes are a rehearsal, the features themselves, which is not modelled.
    Source: torch 2.13 nn/parallel/distributed.py, _pre_forward, _post_forward and _DDPSink.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        found = self.module(dict(features))
        cloned = _Cloned.apply(*found.values())
        pairs = zip(found.items(), cloned, strict=True)
        return {name: own if own.grad_fn is None else clone for (name, own), clone in pairs}


class _Cloned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients


def loss_of(
    model: Any,
    trainer: Trainer,
    inputs: dict[str, Any],
    num_mini_batches: int,
    *,
    is_wrapped: bool = False,
) -> torch.Tensor:
    """The loss of a micro-batch, cached where it is in several mini-batches; `is_wrapped`: in DDP."""
    from sentence_transformers import SentenceTransformerTrainer

    num_pairs = next(iter(inputs.values())).shape[0]
    mini_batch = num_pairs // num_mini_batches if num_mini_batches > 1 else None
    wrapped = _Wrapped(model) if is_wrapped else model
    own = SimpleNamespace(loss=make_loss(model, trainer, mini_batch), model_wrapped=wrapped)
    for name in ("collect_features", "override_model_in_loss"):
        setattr(own, name, functools.partial(getattr(SentenceTransformerTrainer, name), own))
    loss: torch.Tensor = SentenceTransformerTrainer.compute_loss(own, wrapped, inputs)
    return loss
