"""The nearest to a base that a card can run, where it cannot run the base itself."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from autotune.catalogue.gpus import Gpu
from autotune.export import mapping_write
from autotune.export.base.read import BaseRun
from autotune.export.carried import words_of
from autotune.space.config import TrainConfig
from autotune.space.rules import Context, Rule, broken_rules

_OTHERS: dict[str, dict[object, tuple[object, ...]]] = {
    "precision": {
        "bf16-mixed": ("fp16-mixed",),
        "bf16-autocast": ("fp16-autocast", "fp16-mixed"),
        "bf16-true": ("fp16-autocast", "fp16-mixed"),
        "fp8-mixed": ("bf16-mixed", "fp16-mixed"),
        "fp8-autocast": ("bf16-autocast", "fp16-autocast", "fp16-mixed"),
        "tf32": ("fp32",),
    },
    "attention": {
        "flash_attention_3": ("flash_attention_2", "sdpa"),
        "flash_attention_2": ("sdpa",),
        "flex_attention": ("sdpa",),
        "sdpa_expanded": ("sdpa",),
    },
    "liger": {True: (False,)},
    "batching": {"padding-free": ("padded",)},
}
"""Other values of a setting that needs a newer card, the nearest first."""


def on_card(run: BaseRun, card: Gpu, note: Callable[[str], None]) -> BaseRun:
    """Return the run as the card can have it, and say what is another.

    A run that breaks no rule about cards is returned as it is, and so is one that no change helps.
    """
    reasons = _of_the_card(run.config, card)
    if not reasons:
        return run
    possible = [each for each in _near(run.config) if not _of_the_card(each, card)]
    kept = len(_broken(run.config, None))
    possible = [each for each in possible if len(_broken(each, card)) <= kept]
    if not possible:
        return run
    config = min(possible, key=lambda each: (not _is_said(run, each), _changed(run, each)))
    names = _changed_names(run.config, config)
    taken = ", ".join(f"{name}: {words_of(config, name)}" for name in names)
    why = "; ".join(rule.reason for rule in reasons)
    note(f"{run.path.name} cannot run on this card ({why}). Its nearest is the base: {taken}.")
    told = {name: getattr(run.config, name) for name in names}
    return dataclasses.replace(run, config=config, replaced=told)


def _near(config: TrainConfig) -> Iterator[TrainConfig]:
    offered = [
        [(name, value) for value in (mine, *others.get(mine, ()))]
        for name, others in _OTHERS.items()
        for mine in [getattr(config, name)]
    ]
    for values in itertools.product(*offered):
        yield dataclasses.replace(config, **dict(values))


def _of_the_card(config: TrainConfig, card: Gpu) -> list[Rule]:
    """Return the rules that the configuration breaks on this card, and not on an unknown one."""
    elsewhere = _broken(config, None)
    return [rule for rule in _broken(config, card) if rule not in elsewhere]


def _broken(config: TrainConfig, card: Gpu | None) -> list[Rule]:
    capability = None if card is None else card.compute_capability
    context = Context(
        effective_batch_size=config.effective_batch_size, compute_capability=capability
    )
    return broken_rules(config, context)


def _is_said(run: BaseRun, config: TrainConfig) -> bool:
    """Return whether the run's own file has words for all that is another."""
    target = run.target
    return target is None or all(
        mapping_write.allows(target, config.method, name, getattr(config, name))
        for name in _changed_names(run.config, config)
    )


def _changed(run: BaseRun, config: TrainConfig) -> int:
    return len(_changed_names(run.config, config))


def _changed_names(before: TrainConfig, after: TrainConfig) -> list[str]:
    return [name for name in _OTHERS if getattr(before, name) != getattr(after, name)]
