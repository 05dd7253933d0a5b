"""The one thing outside the space that an answer should hear of: told by what its estimate spends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from autotune.catalogue.attention import EXPANDED
from autotune.catalogue.gpus import Gpu
from autotune.catalogue.models import ModelSource
from autotune.catalogue.tasks import CAUSAL
from autotune.records.answer import Tip
from autotune.records.estimate import Estimate
from autotune.space.compilation import why_not_predicted
from autotune.space.lengths import BY_TOKENS
from autotune.space.precisions import fuses_grouped_heads
from autotune.space.rules import Context, broken_rules
from autotune.space.search_space import SearchSpace
from autotune.space.tradeoffs import LEVEL, tradeoff_class
from autotune.space.trainers import TASK_NAMES

LARGE_SHARE = 0.1
"""Share of the peak from which a part is worth a tip. [judgement]"""
LARGE_PADDING = 0.2
"""Share of a micro-batch's tokens from which padding is worth a tip. [judgement]"""
SHARE_OF_VLLM = 0.3
"""Share of the card on which vLLM is to write completions, where it is not searched: TRL 1.16's default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    tip: Tip
    changes: dict[str, Any]
    """Settings of TrainConfig that it stands for."""
    pays: Callable[[Estimate, Context], bool]
    without: dict[str, Any] = field(default_factory=dict)
    """Settings that exclude it, with the values that they have beside it."""
    others: tuple[tuple[str, Any], ...] = ()
    """Settings that do as much, of which nothing more needs to be said where the space has them."""
    model_has_it: Callable[[ModelSource], bool] = lambda _: True
    tasks: tuple[str, ...] = TASK_NAMES
    saves_memory_alone: bool = False
    """Whether it is told only where the allocator holds as much idle as the budget has to spare."""
    any_class: bool = False
    """Whether it is told where a lower class is wanted, too: the tip says so."""


def _has_padding(best: Estimate) -> bool:
    return best.config.batching == "padded" and 1 - best.useful_share >= LARGE_PADDING


_CANDIDATES = (
    _Candidate(
        tip=Tip.VLLM,
        changes={"vllm_gpu_memory_utilization": SHARE_OF_VLLM},
        pays=lambda best, _: best.bound == "generation" and not best.config.writes_with_vllm,
        tasks=("grpo", "rloo"),
        any_class=True,
    ),
    _Candidate(
        tip=Tip.BY_TOKENS,
        changes={"batching": BY_TOKENS},
        others=(("batching", "grouped"),),
        pays=lambda best, _: _has_padding(best),
    ),
    _Candidate(
        tip=Tip.GROUPED,
        changes={"batching": "grouped"},
        pays=lambda best, _: _has_padding(best),
        any_class=True,
    ),
    _Candidate(
        tip=Tip.FLASH_ATTENTION,
        changes={"attention": "flash_attention_2"},
        pays=lambda best, _: best.config.attention == "eager",
        model_has_it=lambda model: "flash_attention_2" in model.attentions,
    ),
    _Candidate(
        tip=Tip.EXPANDED_HEADS,
        changes={"attention": EXPANDED},
        pays=lambda best, context: (
            best.config.attention == "sdpa"
            and context.compute_capability is not None
            and fuses_grouped_heads(best.config.precision, context.compute_capability) is False
        ),
        model_has_it=lambda model: EXPANDED in model.attentions,
    ),
    _Candidate(
        tip=Tip.LIGER,
        changes={"liger": True},
        without={"chunked_loss": False},
        # A loss in parts was chosen for its logits; a pair of answers has twice as many.
        pays=lambda best, _: (
            best.breakdown.logits_bytes >= LARGE_SHARE * best.peak_device_bytes
            or best.config.chunked_loss
            or best.config.trainer in ("trl-dpo", "trl-kto")
        ),
        model_has_it=lambda model: model.has_liger,
        tasks=(CAUSAL, "dpo", "kto"),
    ),
    _Candidate(
        tip=Tip.CHUNKED_LOSS,
        changes={"chunked_loss": True},
        others=(("liger", True),),
        pays=lambda best, _: (
            best.breakdown.logits_bytes >= LARGE_SHARE * best.peak_device_bytes
            and not best.config.liger
        ),
        tasks=(CAUSAL,),
    ),
    _Candidate(
        tip=Tip.EXPANDABLE_SEGMENTS,
        changes={"expandable_segments": True},
        pays=lambda best, _: (
            best.peak_reserved_bytes - best.peak_allocated_bytes
            >= LARGE_SHARE * best.peak_device_bytes
        ),
        saves_memory_alone=True,
    ),
    _Candidate(
        tip=Tip.COMPILE,
        changes={"torch_compile": "default"},
        pays=lambda best, _: best.bound in ("memory bandwidth", "launch"),
    ),
)
"""Tips in the order of what they save, most first."""


def best_tip(
    best: Estimate,
    model: ModelSource,
    space: SearchSpace,
    context: Context,
    allow: str,
    *,
    gpu: Gpu,
    memory_budget_bytes: int,
    of_classes: Iterable[Estimate] = (),
) -> Tip | None:
    """Return what the answer should hear of; None where the space has it or it would not pay.

    `space`: what was searched. `allow`: the highest trade-off class that is wanted. `of_classes`: the best of
    the classes that are wanted, which `--compile` would compile.
    """
    can_compile = any(
        not why_not_predicted(dataclasses.replace(each.config, torch_compile="default"))
        for each in (best, *of_classes)
    )
    offered = {
        (name, value)
        for section in space.methods
        if section.method == best.config.method
        for name, values in section.domains.items()
        for value in values
    }
    spare_bytes = memory_budget_bytes - best.peak_device_bytes
    is_scarce = best.peak_reserved_bytes - best.peak_allocated_bytes >= spare_bytes
    for candidate in _CANDIDATES:
        config = dataclasses.replace(best.config, **candidate.changes, **candidate.without)
        if (
            config != best.config
            and offered.isdisjoint({*candidate.changes.items(), *candidate.others})
            and candidate.pays(best, context)
            and (can_compile or candidate.tip is not Tip.COMPILE)
            and (is_scarce or not candidate.saves_memory_alone)
            and not (gpu.in_wsl and config.expandable_segments)
            and candidate.model_has_it(model)
            and context.task in candidate.tasks
            and (candidate.any_class or LEVEL[tradeoff_class(config, best.config)] <= LEVEL[allow])
            and not broken_rules(config, context)
        ):
            return candidate.tip
    return None
