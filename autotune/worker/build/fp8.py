"""Linear layers that multiply in float8: torchao's, put in as accelerate puts them in for the Trainer.

Without torch.compile each cast is several kernels (absolute value, maximum, a float32 copy, clamp,
conversion), and each operand is cast twice: a trace shows all of them.

Known limitation: which of the card's kernels multiplies, and what it allocates, is not looked at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def convert(model: nn.Module) -> None:
    """Convert a model's linear layers to float8.

    It is done as accelerate's Accelerator.prepare does with export.training_args.environment.
    """
    from accelerate.utils.ao import convert_model_to_fp8_ao
    from torchao.float8 import Float8LinearConfig

    config = Float8LinearConfig(pad_inner_dim=True, enable_fsdp_float8_all_gather=False)
    convert_model_to_fp8_ao(model, config=config)


def is_converted(module: nn.Module) -> bool:
    return type(module).__name__ == "Float8Linear"


def wrappers() -> tuple[type[torch.Tensor], ...]:
    """Classes of torchao's tensors, which are made of others: a trace looks at operations on those."""
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    return (Float8TrainingTensor,)


def check_trained(model: nn.Module, optimizer: Any) -> list[str]:
    """Check that layers are converted, and that the optimizer updates the weights they multiply with.

    Returns complaints, none when all is well.
    """
    layers: list[Any] = [module for module in model.modules() if is_converted(module)]
    weights = [layer.weight for layer in layers]
    if not weights:
        return ["no layer multiplies in float8"]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    lost = sum(weight.requires_grad and id(weight) not in held for weight in weights)
    return [f"the optimizer has not {lost} of the {len(weights)} weights in float8"] if lost else []
