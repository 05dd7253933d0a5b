"""What comes back: Estimate (predicted), and the records of the child protocol that carry it.

SCHEMA_VERSION is written into every file and checked on reading; a newer file is refused.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from autotune.config import TrainConfig

SCHEMA_VERSION = 1
"""Version of result.json and of the worker's request and result files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """Bytes alive, by category, at the instant when allocated memory peaks. Sums to peak_allocated_bytes."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    activations_bytes: int
    """Saved for the backward pass."""
    logits_bytes: int
    """Tensors as wide as the vocabulary: logits, their fp32 copy, their gradient."""
    temporaries_bytes: int
    """Allocated and freed within one phase."""
    workspace_bytes: int
    """cuBLAS workspaces and other buffers that libraries keep."""
    rounding_bytes: int
    """The allocator's blocks are larger than what was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes of the training state once all of it exists, whether or not it lives at the peak."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    optimizer_state_managed_bytes: int
    """Part of the optimizer state in CUDA managed memory (paged optimizers): outside torch's counters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCount:
    total: int
    trainable: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Predicted memory and time of one TrainConfig on one Gpu. Never measured."""

    config: TrainConfig
    gpu: str
    peak_allocated_bytes: int
    """As torch.cuda.max_memory_allocated would say."""
    peak_reserved_bytes: int
    """As torch.cuda.max_memory_reserved would say, without a cap."""
    nontorch_bytes: int
    """CUDA context, kernels, managed memory: outside the allocator."""
    breakdown: Breakdown
    state: StateBytes
    parameters: ParameterCount
    micro_step_seconds: float | None
    """One forward and backward. None where the card's rates are unknown."""
    optimizer_step_seconds: float | None
    """Clipping, optimizer and zero_grad."""
    flops_per_step: float
    """Floating-point operations of one optimizer step, recomputation included."""
    model_flops_per_step: float
    """The same without recomputation: what `mfu` counts."""
    mfu: float | None
    bound: str | None
    """What limits the step: compute, memory bandwidth, or launch."""

    @property
    def peak_device_bytes(self) -> int:
        """Reserved and everything outside it: what is compared with the budget."""
        return self.peak_reserved_bytes + self.nontorch_bytes

    @property
    def step_seconds(self) -> float | None:
        if self.micro_step_seconds is None or self.optimizer_step_seconds is None:
            return None
        accumulation = self.config.gradient_accumulation_steps
        return accumulation * self.micro_step_seconds + self.optimizer_step_seconds

    @property
    def tokens_per_second(self) -> float | None:
        seconds = self.step_seconds
        return None if seconds is None else self.config.tokens_per_step / seconds

    def to_dict(self, budget_bytes: int) -> dict[str, object]:
        """The fields of `estimate --json`, budget comparison included."""
        return {
            "config": self.config.to_dict(),
            "gpu": self.gpu,
            "memory_budget_bytes": budget_bytes,
            "fits": self.peak_device_bytes <= budget_bytes,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "nontorch_bytes": self.nontorch_bytes,
            "peak_device_bytes": self.peak_device_bytes,
            "headroom_bytes": budget_bytes - self.peak_device_bytes,
            "breakdown": dataclasses.asdict(self.breakdown),
            "state": dataclasses.asdict(self.state),
            "parameters": dataclasses.asdict(self.parameters),
            "step_seconds": self.step_seconds,
            "micro_step_seconds": self.micro_step_seconds,
            "optimizer_step_seconds": self.optimizer_step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "flops_per_step": self.flops_per_step,
            "mfu": self.mfu,
            "bound": self.bound,
        }
