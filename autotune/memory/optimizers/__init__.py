"""Allocations, frees and costs of an optimizer step, clipping and unscaling on the GPU.

An Algorithm writes onto a Tape what the real code does, in its order. All of it is predicted from the sources
named at each; tests/contracts/test_optimizers_real.py runs the real code and compares.

    core.py         parameters, state, costs, the Algorithm that each optimizer is
    torch_lists.py  foreach and fused kernels over lists of tensors; clipping and unscaling
    kernels.py      one kernel of its own per parameter: bitsandbytes, torchao, optimi
    eager.py        written in plain tensor operations, parameter by parameter
    low_rank.py     the same after a projection of the gradient: GaLore, APOLLO

Optimizers are called as transformers.Trainer calls them (5.23, trainer_optimizer.py): weight_decay 0 (more of
it costs foreach AdamW a pass over the parameters, and foreach SGD, Adagrad and RMSprop a copy of the
gradients: a rule of the search leaves them out); SGD without momentum; Adafactor without relative_step and
scale_parameter.

Known limitations

- Scratch that a CUDA reduction takes for itself (Adafactor's norms and means: some KiB) is missing,
  and so is cuSOLVER's workspace for GaLore's SVD.
- With parameters of several dtypes, foreach visits the dtypes in the order of a hash table. Written
  is what CPU and meta do: the dtype seen last comes first.
- State in managed memory (paged optimizers) is priced as if it were resident on the device.
- The scalar that a fused optimizer holds under GradScaler is missing.
- State that is made with the optimizer (Adagrad, AdaLomo) is written at the first step.
"""

from autotune.memory.optimizers.core import Algorithm, StateTensor, StepCost, TensorSpec
from autotune.memory.optimizers.torch_lists import (
    clip_cost,
    unscale_cost,
    write_clip,
    write_unscale,
)

__all__ = [
    "Algorithm",
    "StateTensor",
    "StepCost",
    "TensorSpec",
    "clip_cost",
    "unscale_cost",
    "write_clip",
    "write_unscale",
]
