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


def loss_of(
    model: Any, trainer: Trainer, inputs: dict[str, Any], num_mini_batches: int
) -> torch.Tensor:
    """The loss of a micro-batch, cached where it is in several mini-batches."""
    from sentence_transformers import SentenceTransformerTrainer

    num_pairs = next(iter(inputs.values())).shape[0]
    mini_batch = num_pairs // num_mini_batches if num_mini_batches > 1 else None
    own = SimpleNamespace(loss=make_loss(model, trainer, mini_batch), model_wrapped=model)
    own.collect_features = functools.partial(SentenceTransformerTrainer.collect_features, own)
    loss: torch.Tensor = SentenceTransformerTrainer.compute_loss(own, model, inputs)
    return loss
