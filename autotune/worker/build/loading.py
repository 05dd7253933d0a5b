"""The order in which Transformers' loader brings a quantised base to the card, and the block it takes first.

`from_pretrained` takes one block as large as what will stay, gives it back to the allocator, and then brings
tensor after tensor by name. Each is cut from what is left of that block: a weight to be quantised is there
in 16 bits until it has codes and scales, so that codes lie between the holes of other weights. A base that is
not quantised is loaded in the host's memory, and moved module by module.

Not modelled: tensors that are made of several (fused experts); weights that the checkpoint lacks (a new
head), which come last; a loader that reads ahead with threads (transformers 5.0; 5.13 and later do not).

Source: transformers 5.23 modeling_utils.py, _load_pretrained_model and caching_allocator_warmup;
core_model_loading.py, convert_and_load_state_dict_in_model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers.core_model_loading import dot_natural_key

from autotune.worker.build.quantize import is_quantized

_BYTES_OF_CODES = {"Linear4bit": 0.5, "Linear8bitLt": 1.0}
"""Bytes that the loader reckons an element of a quantised weight to take: quantizers/quantizer_bnb_*.py,
quantized_element_size."""


def checkpointed(model: Any) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield (module, tensor's name in it, whole name) in the loader's order; a tied weight comes once."""
    names = model.state_dict().keys() - model.all_tied_weights_keys.keys()
    for name in sorted(names, key=dot_natural_key):
        path, _, own = name.rpartition(".")
        yield model.get_submodule(path), own, name


def is_to_be_quantized(module: nn.Module, name: str) -> bool:
    """Whether the tensor of that name is what the layer quantises: not its bias."""
    return is_quantized(module) and name == "weight"


def block_bytes(model: Any, num_copies: Callable[[str], int] = lambda _: 1) -> int:
    """Bytes of the block. `num_copies`: how many tensors one stands for, by its whole name."""
    total = sum(
        num_copies(whole) * _bytes(module, name) for module, name, whole in checkpointed(model)
    )
    return int(total // 2) * 2  # it is of float16 numbers


def _bytes(module: nn.Module, name: str) -> float:
    tensor = getattr(module, name)
    of_element = tensor.element_size()
    if is_to_be_quantized(module, name):
        of_element = _BYTES_OF_CODES[type(module).__name__]
    return float(tensor.numel() * of_element)
