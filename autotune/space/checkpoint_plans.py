"""Plans of activation checkpointing, beside Transformers' every n-th layer: what which layers keep."""

from __future__ import annotations

from dataclasses import dataclass

INTERVAL = "interval"
"""The plan of those that have none: `activation_checkpointing` says all."""
SOLVE = -1
"""The value of `activation_checkpointing` in a space or a question that asks for the best plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPlan:
    """A plan: what the first layers of a model keep for the backward pass, and what the others do.

    `inputs`: nothing but what the layer is given; `products`: also what costly products and attention have
    made; `offloaded`: the same, which waits in host memory; `all`: everything, so that nothing is computed
    again (autotune.worker.build.checkpoint_plan).
    """

    first_keep: str
    others_keep: str
    words: str
    """Words for the layers that keep more than their inputs and less than all; empty where none does."""

    def has(self, *kept: str) -> bool:
        """Whether some layers keep one of these."""
        return not {self.first_keep, self.others_keep}.isdisjoint(kept)


CHECKPOINT_PLANS = {
    "recompute": CheckpointPlan(first_keep="inputs", others_keep="all", words=""),
    "products": CheckpointPlan(first_keep="products", others_keep="all", words=", products kept"),
    "recompute-products": CheckpointPlan(
        first_keep="inputs", others_keep="products", words=", the others with products kept"
    ),
    "offload": CheckpointPlan(
        first_keep="offloaded", others_keep="all", words=", products in host memory"
    ),
    "offload-products": CheckpointPlan(
        first_keep="offloaded",
        others_keep="products",
        words=", products in host memory, the others with products kept",
    ),
    "recompute-offload": CheckpointPlan(
        first_keep="inputs",
        others_keep="offloaded",
        words=", the others with products in host memory",
    ),
}


def plan_offloads(plan: str) -> bool:
    """Say whether a plan, or INTERVAL, lets something wait in host memory."""
    return plan in CHECKPOINT_PLANS and CHECKPOINT_PLANS[plan].has("offloaded")


def plan_words(plan: str, num_layers: int) -> str:
    """Return a plan in words, for people. `num_layers`: how many the first are.

    A plan that is not known here, as a later version or a damaged file may have it, stands by its name.
    """
    layers = "layer" if num_layers == 1 else f"{num_layers} layers"
    row = CHECKPOINT_PLANS.get(plan)
    return f"checkpoint the first {layers}{f', {plan}' if row is None else row.words}"
