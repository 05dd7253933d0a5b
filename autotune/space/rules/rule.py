"""A rule, the facts beside a configuration that it may ask for, and what several rules ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune.catalogue.checkpoint import Checkpoint
from autotune.catalogue.tasks import Task
from autotune.memory.vllm import Served
from autotune.space.adapters import ADAPTERS, adapter_of
from autotune.space.config import TrainConfig
from autotune.space.trainers import TRAINERS, row_of

# CUDA C++ Programming Guide, arithmetic instructions: the first with tensor cores, with those for int8,
# with bfloat16 and TF32 units, and with float8.
VOLTA = (7, 0)
TURING = (7, 5)
AMPERE = (8, 0)
ADA = (8, 9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Facts that a rule may ask about beyond the TrainConfig. None: not known, the rule lets pass."""

    effective_batch_size: int
    num_layers: int | None = None
    compute_capability: tuple[int, int] | None = None
    precisions: tuple[str, ...] = ()
    """Precisions that the space offers to this method."""
    max_sequence_length: int | None = None
    """Tokens that the model has learned positions for."""
    weight_decay: bool = False
    """Whether the user has set a weight decay."""
    head_size: int | None = None
    """Elements of an attention head."""
    task: str | None = None
    checkpoint: Checkpoint | None = None
    """Choices that a checkpoint which is quantised already leaves."""

    served: Served | None = None
    """The model as vLLM holds it on the card."""
    is_estimate: bool = False
    """Whether the configuration is only priced: nobody asks for a program that trains with it."""

    @property
    def task_row(self) -> Task | None:
        """The row of the task's model."""
        return None if self.task is None else row_of(self.task)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A combination that is never tried, and why."""

    name: str
    reason: str
    breaks: Callable[[TrainConfig, Context], bool]


def is_before(context: Context, capability: tuple[int, int]) -> bool:
    """Whether the card is known to be older than the first of that compute capability."""
    return context.compute_capability is not None and context.compute_capability < capability


def is_prompt(config: TrainConfig) -> bool:
    return config.method in ADAPTERS and adapter_of(config).is_prompt


def has_reference(config: TrainConfig) -> bool:
    return TRAINERS[config.trainer].has_reference


def names_of(targets: str | None) -> list[str]:
    return [name.strip() for name in (targets or "").split(",")]
