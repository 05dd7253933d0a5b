"""A row of the table of published runs, and how its memory and its time are predicted.

A plan is a row of studies/published-memory/published_memory.csv as a TrainConfig, with the facts of the
row's own program that today's Trainer does otherwise, read from its code. runs.py makes them.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path

from autotune.catalogue.models import ModelSource
from autotune.common.units import GIB, MIB
from autotune.space.config import TrainConfig

STUDIES = Path(__file__).parents[2] / "studies"
MEMORY = STUDIES / "published-memory"
SPEED = STUDIES / "published-speed"
TABLE = MEMORY / "published_memory.csv"

UNIT_BYTES = {"GB (1e9)": 10**9, "GiB": GIB, "MB (MiB as reported by NVML)": MIB}


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What a row's program or its versions did otherwise than today's Trainer."""

    gradients: str = "dropped after the step"
    """Or `dropped before the forward pass`, `dropped before the backward pass` (a loop that calls
    zero_grad there), or `kept` (torch before 2.0: zero_grad fills them with zeros)."""
    clips: bool = True
    """torch.nn.utils.clip_grad_norm_."""
    parameter_groups: int = 2
    """The Trainer's two: weights, and what is not decayed."""
    embedding_state_32bit: bool = True
    """The Trainer registers embeddings with bitsandbytes' GlobalOptimManager."""
    launches_per_tensor: int = 0
    """Launches of an optimizer that goes through the tensors one by one, for each; 0: the Trainer's own."""
    old_attention: str | None = None
    """A key of old_attention.OLD_ATTENTIONS: the modelling code of the row's day."""
    holds_outputs: bool = False
    """The loop's variable holds the model's outputs until the next forward pass: logits, and the cache
    of keys and values that a model makes where `use_cache` is left on."""
    empties_cache: bool = False
    """torch.cuda.empty_cache() before the batch of the figure."""
    frozen: str = ""
    """Part of the names of parameters that its PEFT did not train."""
    kept: int = 0
    """Bytes of what else was alive when the figure was taken."""
    kept_share: float = 1.0
    """Of the steps, that in which it is alive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How a row is predicted."""

    model: ModelSource
    gpu: str
    config: TrainConfig
    metric: str
    """reserved, device (reserved and context), step end (allocated after optimizer.step()), fits."""
    program: Program = field(default_factory=Program)
    quirks: tuple[str, ...] = ()
    context_bytes: int = 0
    task: str = "causal-lm"
    is_used: bool = False
    """Something unknown was solved from its figure, which is then no evidence."""
    mean_tokens: int | None = None
    """Tokens per sample of the mean batch, where batches vary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A published time, and the run that it is of."""

    plan: Plan
    group: str
    """Runs of one program on one card."""
    published_seconds: float
    """Of an optimizer step."""
    evidence: str
    """A: every setting that decides the time is published. B: something is assumed. C: besides, the
    program is known to spend time on what no Trainer does."""
    assumed: tuple[str, ...]
    resolution: float
    """Half of the last digit of the published figure, as a share of it."""


def published() -> dict[str, dict[str, str]]:
    with TABLE.open(newline="", encoding="utf-8") as file:
        return {row["id"]: row for row in csv.DictReader(file)}
