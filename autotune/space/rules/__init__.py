"""Combinations of settings that are never tried, and why (RULES)."""

from __future__ import annotations

from autotune.space.config import TrainConfig
from autotune.space.rules import layers, methods, sharing, training_step
from autotune.space.rules.rule import Context, Rule

__all__ = ["RULES", "Context", "Rule", "broken_rules"]

RULES: tuple[Rule, ...] = (
    *methods.RULES,
    *layers.RULES,
    *training_step.RULES,
    *sharing.RULES,
)
"""All of them, in the order in which broken ones are counted."""


def broken_rules(config: TrainConfig, context: Context) -> list[Rule]:
    """Return every rule that the configuration breaks."""
    return [rule for rule in RULES if rule.breaks(config, context)]
