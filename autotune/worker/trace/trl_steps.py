"""Steps of TRL's trainers with tasks of their own in a trace: their own losses run, and what they log.

A pair is two rows of a batch, all chosen answers before all rejected ones. The reference is a frozen copy of
the model, or the model with its adapter switched off; where its scores were worked out before training they
come with the batch. Labels are not known on `meta`: of KTO's, one of each micro-batch is taken to be bad.

Completions are scored by the policy and the reference when they have been generated, a micro-batch at a time;
here each micro-batch before it is trained on, which makes the same passes.

Source: trl 1.16 trainer/dpo_trainer.py, reward_trainer.py, kto_trainer.py, grpo_trainer.py, rloo_trainer.py
(__init__ and the loss of each).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from autotune.memory.traces import Phase
from autotune.records.estimate import TraceSpec
from autotune.space.trainers import TRAINERS
from autotune.worker.build.model import UnsupportedModel
from autotune.worker.build.trl_classes import class_of

OF_MODEL = ("input_ids", "attention_mask")
"""Tensors of a batch that a model is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnStep:
    """The parts of a training step that one of TRL's trainers alone has."""

    loss_of: Callable[[Any, nn.Module | None, dict[str, Any], TraceSpec], Any]
    """Computes the loss of a model, its reference and a batch, with the trainer's own code."""
    outputs: tuple[str, ...] = ()
    """Fields of each token that the model's head works out in chunks; none where it makes its logits."""
    of_tokens: tuple[str, ...] = OF_MODEL
    """Tensors of a batch with a number for each token."""
    of_samples: tuple[tuple[str, torch.dtype], ...] = ()
    """Tensors of a batch with a number for each sample."""
    scores: tuple[str, ...] = ()
    """Further such tensors, where the reference has scored the samples before training."""
    passes: tuple[Phase, ...] = ()
    """Phases of the forward passes that keep nothing, in order."""


def prepare(model: Any, task: str, spec: TraceSpec) -> nn.Module | None:
    """Prepare a model with its adapter as the trainer does; return the reference, where it is a copy.

    Raises UnsupportedModel for another task, or where TRL is not installed.
    """
    row, step = TRAINERS[spec.trainer], STEPS[spec.trainer]
    if task != row.task:
        raise UnsupportedModel(
            f"{row.class_name} trains only on {row.trains_on} (--task {row.task})"
        )
    class_of(row)  # Imported here, since an import may keep a step's tensors.
    from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

    has_adapter = hasattr(model, "get_base_model")
    is_scored = row.has_reference and not spec.precompute_ref_log_probs
    is_copy = (is_scored or bool(spec.kl_beta)) and not has_adapter
    reference = copy.deepcopy(model).eval() if is_copy else None
    if row.has_teacher:
        return None
    if row.generates is None:  # trl 1.16 GRPOConfig and RLOOConfig, disable_dropout
        for each in filter(None, (model, reference)):
            disable_dropout_in_model(each)
    if step.outputs:
        add_fused_lm_head(model.get_base_model() if has_adapter else model, outputs=step.outputs)
    if reference is not None:
        add_fused_lm_head(reference)
    return reference


def batch_of(
    spec: TraceSpec, micro_batch: int, sequence_length: int, empty: Callable[..., torch.Tensor]
) -> dict[str, Any]:
    """The batch of the trainer's collator, of samples at full length."""
    step = STEPS[spec.trainer]
    rows = TRAINERS[spec.trainer].rows_per_sample * micro_batch
    if spec.max_completion_length is not None:
        return _generated(spec, micro_batch, sequence_length, empty)
    scores = [(name, torch.float32) for name in step.scores if spec.precompute_ref_log_probs]
    return {name: empty(rows, sequence_length) for name in step.of_tokens} | {
        name: empty(micro_batch, dtype=dtype) for name, dtype in (*scores, *step.of_samples)
    }


def _generated(
    spec: TraceSpec, micro_batch: int, sequence_length: int, empty: Callable[..., torch.Tensor]
) -> dict[str, Any]:
    """A micro-batch of completions with their prompts, advantages and scores."""
    length = num_completion_tokens(spec, sequence_length)
    batch = {
        f"{part}_{name}": empty(micro_batch, tokens)
        for part, tokens in (("prompt", sequence_length - length), ("completion", length))
        for name in ("ids", "mask")
    }
    of_each = (micro_batch,) if spec.trainer == "trl-rloo" else (micro_batch, length)
    scores = {
        "trl-rloo": ["old_logps"],
        "trl-distillation": [],
        "trl-grpo": [
            *(["old_per_token_logps"] if spec.scores_policy else []),
            *(["ref_per_token_logps"] if spec.kl_beta else []),
            *(["sampling_per_token_logps"] if spec.vllm_gpu_memory_utilization else []),
        ],
    }
    batch |= {name: empty(*of_each, dtype=torch.float32) for name in scores[spec.trainer]}
    if spec.vllm_gpu_memory_utilization and spec.trainer == "trl-grpo":
        # Of whole completions: GRPOConfig's vllm_importance_sampling_mode is "sequence_mask".
        batch["importance_sampling_ratio"] = empty(micro_batch, 1, dtype=torch.float32)
    if TRAINERS[spec.trainer].is_rewarded:
        batch["advantages"] = empty(micro_batch, dtype=torch.float32)
    if spec.trainer != "trl-rloo":
        batch["num_items_in_batch"] = empty()
    return batch


def num_completion_tokens(spec: TraceSpec, sequence_length: int) -> int:
    """Tokens of a row that are a completion's, of which one at least is the prompt's."""
    assert spec.max_completion_length is not None
    return min(spec.max_completion_length, sequence_length - 1)


def num_scored(spec: TraceSpec, sequence_length: int) -> int:
    """Tokens of a row that the head scores, where a mask says which."""
    if spec.max_completion_length is None:
        return sequence_length - 1
    return num_completion_tokens(spec, sequence_length)


def inputs_of(batch: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a batch that a model is given."""
    if "prompt_ids" not in batch:
        return {name: batch[name] for name in OF_MODEL}
    parts = ("ids", "mask")
    joined = [torch.cat([batch[f"prompt_{p}"], batch[f"completion_{p}"]], dim=1) for p in parts]
    return dict(zip(OF_MODEL, joined, strict=True))


def passes_of(spec: TraceSpec) -> tuple[Phase, ...]:
    """Phases of the forward passes that keep nothing, in order."""
    if TRAINERS[spec.trainer].generates is None:
        return STEPS[spec.trainer].passes
    return (
        *([Phase.POLICY] if spec.scores_policy else []),
        *([Phase.GENERATED_REFERENCE] if spec.kl_beta else []),
        *STEPS[spec.trainer].passes,
    )


def decompositions(
    spec: TraceSpec, micro_batch: int, others: Mapping[Any, Callable[..., Any]]
) -> dict[Any, Callable[..., Any]]:
    """Answers to which samples are good, and then which are bad: all but one, and one.

    What else is asked for `others` answer.
    """
    row = TRAINERS[spec.trainer]
    if not (row.compares_samples and row.is_trl):
        return {}
    numbers = itertools.cycle((micro_batch - 1, 1))
    others, nonzero = dict(others), torch.ops.aten.nonzero.default

    def labelled(mask: torch.Tensor) -> Any:
        if not mask.is_meta or mask.shape != (micro_batch,):
            return others[nonzero](mask) if nonzero in others else NotImplemented
        return torch.empty((next(numbers), 1), dtype=torch.int64, device=mask.device)

    return {nonzero: labelled}


def _trainer(model: Any, reference: nn.Module | None, **own: Any) -> Any:
    """Return a stand-in for a trainer, with all that a loss asks of one, on one device."""
    text = model.config.get_text_config()
    coefficient = getattr(text, "router_aux_loss_coef", 0.0)
    return SimpleNamespace(
        model=model,
        ref_model=reference,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, center_rewards_coefficient=None),
        accelerator=SimpleNamespace(
            device=torch.device("meta"),
            gather=lambda tensor: tensor,
            gather_for_metrics=lambda tensor: tensor,
            unwrap_model=lambda model: model,
        ),
        aux_loss_enabled=hasattr(text, "output_router_logits") and coefficient != 0.0,
        router_aux_loss_coef=coefficient,
        beta=0.1,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **own,
    )


def _dpo_loss(model: Any, reference: nn.Module | None, inputs: dict[str, Any], _: TraceSpec) -> Any:
    from trl.trainer.dpo_trainer import DPOTrainer

    trainer = _trainer(
        model,
        reference,
        precompute_ref_logps="ref_chosen_logps" in inputs,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        use_weighting=False,
    )
    return DPOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)


def _reward_loss(
    model: Any, reference: nn.Module | None, inputs: dict[str, Any], _: TraceSpec
) -> Any:
    from trl.trainer.reward_trainer import RewardTrainer

    return RewardTrainer.compute_loss(_trainer(model, reference), model, inputs)


def _kto_loss(model: Any, reference: nn.Module | None, inputs: dict[str, Any], _: TraceSpec) -> Any:
    from trl.trainer.kto_trainer import KTOTrainer

    trainer = _trainer(
        model,
        reference,
        precompute_ref_logps="ref_logps" in inputs,
        calculate_KL=True,
        loss_type="kto",
        desirable_weight=1.0,
        undesirable_weight=1.0,
    )
    trainer._compute_kl_logps = lambda *args: KTOTrainer._compute_kl_logps(trainer, *args)
    return KTOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)


def _generated_loss(
    model: Any, reference: nn.Module | None, inputs: dict[str, Any], spec: TraceSpec
) -> Any:
    """The loss of a micro-batch, after the passes that score it: for it alone, once it was generated."""
    import trl
    from trl.models.utils import disable_gradient_checkpointing
    from trl.trainer.utils import use_adapter

    kind = getattr(trl, TRAINERS[spec.trainer].class_name)
    trainer = _trainer(
        model,
        reference,
        use_vllm=bool(spec.vllm_gpu_memory_utilization),
        vllm_importance_sampling_correction=True,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        loss_type="dapo",
        epsilon_low=0.2,
        epsilon_high=0.2,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
    )
    trainer.beta = spec.kl_beta or 0.0
    trainer.args.delta = None
    trainer.args.use_bias_correction_kl = True
    trainer.args.steps_per_generation = 1
    trainer.accelerator.autocast = contextlib.nullcontext
    trainer.accelerator.reduce = lambda tensor, reduction: tensor.clone()
    trainer.accelerator.num_processes = 1
    score = kind._get_per_token_logps_and_entropies.__wrapped__
    trainer._get_per_token_logps_and_entropies = functools.partial(score, trainer)

    def scored(by: nn.Module) -> None:
        ids, mask = inputs_of(inputs).values()
        score(trainer, by, ids, mask, inputs["completion_ids"].size(1), batch_size=len(ids))

    with torch.no_grad(), disable_gradient_checkpointing(model):
        if spec.scores_policy:
            scored(model)
        if reference is not None:
            scored(reference)
        elif spec.kl_beta:
            with use_adapter(model, adapter_name=None):
                scored(model)
    return kind._compute_loss(trainer, model, inputs)


def _distillation_loss(
    model: Any, teacher: nn.Module | None, inputs: dict[str, Any], _: TraceSpec
) -> Any:
    from trl.models.utils import _ForwardRedirection
    from trl.trainer.distillation_trainer import DistillationTrainer

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    trainer = _trainer(
        model,
        None,
        teacher_model=teacher,
        temperature=1.0,
        model_kwarg_keys=inspect.signature(inner.forward).parameters.keys(),
        _is_vlm=False,
        _forward_redirection=_ForwardRedirection(),
    )
    trainer.beta = 1.0
    trainer.accelerator.num_processes = 1
    kind: Any = DistillationTrainer
    hidden_state = kind._get_last_hidden_state.__wrapped__
    trainer._get_last_hidden_state = functools.partial(hidden_state, trainer)
    trainer._compute_loss = functools.partial(kind._compute_loss, trainer)
    return kind.compute_loss.__wrapped__(trainer, model, inputs)


_OF_COMPLETIONS = OwnStep(loss_of=_generated_loss, outputs=("log_probs", "entropy"))
STEPS = {
    "trl-dpo": OwnStep(
        loss_of=_dpo_loss,
        outputs=("log_probs", "entropy", "mean_logits", "is_top1"),
        of_tokens=(*OF_MODEL, "completion_mask"),
        scores=("ref_chosen_logps", "ref_rejected_logps"),
        passes=(Phase.REFERENCE,),
    ),
    "trl-reward": OwnStep(loss_of=_reward_loss),
    "trl-kto": OwnStep(
        loss_of=_kto_loss,
        outputs=("log_probs", "entropy", "mean_logits"),
        of_tokens=tuple(
            f"{prefix}{name}" for prefix in ("", "KL_") for name in (*OF_MODEL, "completion_mask")
        ),
        of_samples=(("label", torch.bool),),
        scores=("ref_logps", "ref_KL_logps"),
        passes=(Phase.MISMATCHED, Phase.REFERENCE_MISMATCHED, Phase.REFERENCE),
    ),
    "trl-grpo": _OF_COMPLETIONS,
    "trl-rloo": _OF_COMPLETIONS,
    "trl-distillation": OwnStep(loss_of=_distillation_loss, passes=(Phase.REFERENCE,)),
}
"""Trainers that have a task of their own, by their names in TRAINERS."""
