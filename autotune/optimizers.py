"""The optimizers that TrainingArguments(optim=...) may name, one row each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.allocator import Tape
from autotune.optimizer_steps import Adafactor, Algorithm, BitsAndBytes, TensorLists, TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """One `optim` value of TrainingArguments."""

    name: str
    family: str
    """adamw, lion, adafactor or sgd: another family is another training run."""
    state_format: str
    """`parameter` (the dtype of the parameter), `32bit`, `8bit` or `none`: within a family, another
    format is another rounding."""
    tradeoff: str
    """Of TRADEOFF_CLASSES, against adamw_torch on the same parameters."""
    needs: str
    """Library beyond torch and transformers, or nothing."""
    algorithm: Algorithm
    summary: str
    source: str

    @property
    def paged(self) -> bool:
        """State may live in CUDA managed memory."""
        return isinstance(self.algorithm, BitsAndBytes) and self.algorithm.paged


_TORCH_ADAMW = "torch 2.13 optim/adam.py, transformers 5.23 trainer_optimizer.py"
_BITSANDBYTES = "bitsandbytes 0.50 optim/optimizer.py, transformers 5.23 trainer_optimizer.py"

# Kernels with weight_decay 0, as (tensor lists in the launch, tensors read or written).
# _multi_tensor_adam: lerp_, mul_, addcmul_, sqrt, div_, add_, addcdiv_.
_FOREACH_ADAMW = ((2, 3), (1, 2), (3, 3), (2, 2), (1, 2), (1, 2), (3, 4))
# _fused_adamw_: parameter and two moments are read and written, the gradient read.
_FUSED_ADAMW = ((4, 7),)
# _foreach_add_(parameters, gradients, alpha=-lr).
_FOREACH_SGD = ((2, 3),)

OPTIMIZERS: dict[str, Optimizer] = {
    optimizer.name: optimizer
    for optimizer in (
        Optimizer(
            name="adamw_torch",
            family="adamw",
            state_format="parameter",
            tradeoff="exact",
            needs="",
            algorithm=TensorLists(num_moments=2, passes=_FOREACH_ADAMW, full_size_temporary=True),
            summary="AdamW, foreach kernels: a temporary as large as the parameters",
            source=f"{_TORCH_ADAMW}: _multi_tensor_adam",
        ),
        Optimizer(
            name="adamw_torch_fused",
            family="adamw",
            state_format="parameter",
            tradeoff="exact",
            needs="",
            algorithm=TensorLists(num_moments=2, passes=_FUSED_ADAMW, step_on_device=True),
            summary="AdamW in one kernel, no temporaries: the Trainer's default",
            source=f"{_TORCH_ADAMW}: _fused_adam",
        ),
        Optimizer(
            name="adamw_bnb_8bit",
            family="adamw",
            state_format="8bit",
            tradeoff="numerics",
            needs="bitsandbytes",
            algorithm=BitsAndBytes(num_states=2, bits=8),
            summary="AdamW with moments in 8 bits, blocks of 256",
            source=_BITSANDBYTES,
        ),
        Optimizer(
            name="paged_adamw_8bit",
            family="adamw",
            state_format="8bit",
            tradeoff="numerics",
            needs="bitsandbytes",
            algorithm=BitsAndBytes(num_states=2, bits=8, paged=True),
            summary="AdamW with moments in 8 bits that may move to host memory",
            source=_BITSANDBYTES,
        ),
        Optimizer(
            name="paged_adamw_32bit",
            family="adamw",
            state_format="32bit",
            tradeoff="numerics",
            needs="bitsandbytes",
            algorithm=BitsAndBytes(num_states=2, bits=32, paged=True),
            summary="AdamW with float32 moments that may move to host memory",
            source=_BITSANDBYTES,
        ),
        Optimizer(
            name="lion_32bit",
            family="lion",
            state_format="32bit",
            tradeoff="recipe",
            needs="bitsandbytes",
            algorithm=BitsAndBytes(num_states=1, bits=32),
            summary="Lion, one float32 moment",
            source=_BITSANDBYTES,
        ),
        Optimizer(
            name="lion_8bit",
            family="lion",
            state_format="8bit",
            tradeoff="recipe",
            needs="bitsandbytes",
            algorithm=BitsAndBytes(num_states=1, bits=8),
            summary="Lion, one moment in 8 bits",
            source=_BITSANDBYTES,
        ),
        Optimizer(
            name="paged_lion_8bit",
            family="lion",
            state_format="8bit",
            tradeoff="recipe",
            needs="bitsandbytes",
            algorithm=BitsAndBytes(num_states=1, bits=8, paged=True),
            summary="Lion, one moment in 8 bits that may move to host memory",
            source=_BITSANDBYTES,
        ),
        Optimizer(
            name="adafactor",
            family="adafactor",
            state_format="32bit",
            tradeoff="recipe",
            needs="",
            algorithm=Adafactor(),
            summary="Adafactor: row and column statistics, large float32 temporaries",
            source="transformers 5.23 optimization.py Adafactor, trainer_optimizer.py",
        ),
        Optimizer(
            name="sgd",
            family="sgd",
            state_format="none",
            tradeoff="recipe",
            needs="",
            algorithm=TensorLists(num_moments=0, passes=_FOREACH_SGD),
            summary="plain SGD without momentum, no state",
            source="torch 2.13 optim/sgd.py: _multi_tensor_sgd",
        ),
    )
}


def state_bytes(name: str, specs: Sequence[TensorSpec]) -> tuple[int, int]:
    """Return the bytes of the whole optimizer state: (on the device, in managed memory)."""
    algorithm = OPTIMIZERS[name].algorithm
    tape = Tape()
    algorithm.write_step(tape, specs, None)
    device_bytes = sum(
        size_bytes
        for size_bytes, category in zip(tape.sizes, tape.categories, strict=True)
        if category == "optimizer_state"
    )
    managed_bytes = sum(
        tensor.size_bytes for spec in specs for tensor in algorithm.state(spec) if tensor.managed
    )
    return device_bytes, managed_bytes
