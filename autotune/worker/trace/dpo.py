"""TRL's DPOTrainer in a trace: its own loss runs, with the reference's pass and what it logs.

A pair is two rows of a batch, all chosen answers before all rejected ones. The reference is a frozen copy of
the model, or the model with its adapter switched off; where its scores were worked out before training they
come with the batch.

Source: trl 1.16 trainer/dpo_trainer.py (__init__, _compute_loss).
"""

from __future__ import annotations

import copy
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from autotune.space.trainers import PREFERENCES
from autotune.worker.build.model import UnsupportedModel
from autotune.worker.trace.sft import cast_adapter

OUTPUTS = ("log_probs", "entropy", "mean_logits", "is_top1")
"""Fields of each token that the policy's head works out."""


OF_PAIRS = ("completion_mask", "ref_chosen_logps", "ref_rejected_logps")
"""Tensors of a batch that no model is given: which tokens are answers, and the reference's scores."""


def prepare(model: Any, task: str, *, is_quantized: bool, is_precomputed: bool) -> nn.Module | None:
    """Prepare a model with its adapter as DPOTrainer does; return the reference, where it is a copy.

    Raises UnsupportedModel for another task, or where TRL is not installed.
    """
    if task != PREFERENCES:
        raise UnsupportedModel("DPOTrainer trains on pairs of answers only (--task dpo)")
    try:
        from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model
    except ImportError as error:
        raise UnsupportedModel(
            f"TRL is not installed here ({error}). It needs: pip install trl"
        ) from error
    has_adapter = hasattr(model, "get_base_model")
    if is_quantized:
        cast_adapter(model)
    reference = None if has_adapter or is_precomputed else copy.deepcopy(model).eval()
    for each in filter(None, (model, reference)):
        disable_dropout_in_model(each)
    add_fused_lm_head(model.get_base_model() if has_adapter else model, outputs=OUTPUTS)
    if reference is not None:
        add_fused_lm_head(reference)
    return reference


def loss_of(model: Any, reference: nn.Module | None, inputs: dict[str, Any]) -> Any:
    """Compute the loss with DPOTrainer's own code, on one device."""
    from trl.trainer.dpo_trainer import DPOTrainer

    text = model.config.get_text_config()
    coefficient = getattr(text, "router_aux_loss_coef", 0.0)
    trainer: Any = SimpleNamespace(
        model=model,
        ref_model=reference,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        accelerator=SimpleNamespace(
            device=torch.device("meta"),
            gather=lambda tensor: tensor,
            gather_for_metrics=lambda tensor: tensor,
            unwrap_model=lambda model: model,
        ),
        aux_loss_enabled=hasattr(text, "output_router_logits") and coefficient != 0.0,
        router_aux_loss_coef=coefficient,
        precompute_ref_logps="ref_chosen_logps" in inputs,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        beta=0.1,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    return DPOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)
