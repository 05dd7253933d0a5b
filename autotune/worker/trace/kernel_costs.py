"""Costs of one ATen call on a GPU: whether it launches a kernel, its arithmetic, the bytes it moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


def count_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Count the floating-point operations of a call, a causal attention's by half."""
    operands = _PRODUCT_OPERANDS.get(func)
    if operands is not None:
        left, right = args[operands].shape, args[operands + 1].shape
        return 2 * math.prod(left) * right[-1]
    if func in _GROUPED_PRODUCTS:  # each row meets one expert, or each expert some rows
        return 2 * math.prod(args[0].shape[-2:]) * args[1].shape[-1]
    if func in _ATTENTION:
        first, of_scores, of_values = _ATTENTION[func]
        query, key, value = args[first : first + 3]
        pairs = math.prod(query.shape[:-1]) * key.shape[-2]
        flops = 2 * pairs * (of_scores * query.shape[-1] + of_values * value.shape[-1])
    elif func in _VARLEN_ATTENTION:
        total, heads, size = args[_VARLEN_ATTENTION[func][0]].shape
        num_samples = next(t for t in args if t is not None and t.dtype is torch.int32).shape[0] - 1
        flops = _VARLEN_ATTENTION[func][1] * total * (total // num_samples) * heads * size
    else:
        counter = flop_registry.get(func._overloadpacket)
        if counter is None:
            return 0
        flops = int(counter(*args, **kwargs, out_val=out))
    return flops // 2 if _is_causal(func, args, kwargs) else flops


_PRODUCT_OPERANDS = {
    aten.mm.default: 0,
    aten.mm.out: 0,
    aten.bmm.default: 0,
    aten.addmm.default: 1,
    aten.addmm.out: 1,
    aten.addmm.dtype_out: 1,
    aten.baddbmm.default: 1,
    aten._int_mm.default: 0,
}
"""Position of a product's left matrix among the arguments."""
_ATTENTION = {
    aten._scaled_dot_product_cudnn_attention.default: (0, 1, 1),
    aten._scaled_dot_product_efficient_attention.default: (0, 1, 1),
    aten._scaled_dot_product_flash_attention.default: (0, 1, 1),
    aten._scaled_dot_product_cudnn_attention_backward.default: (1, 3, 2),
    aten._scaled_dot_product_efficient_attention_backward.default: (1, 3, 2),
    aten._scaled_dot_product_flash_attention_backward.default: (1, 3, 2),
}
"""Position of the queries (batch, heads, tokens, size) among the arguments, keys and values after them;
numbers of products over the size of queries, and over that of values. PyTorch's own counter refuses fewer
heads of keys than of queries before 2.13."""
_VARLEN_ATTENTION = {
    aten._flash_attention_forward.default: (0, 4),
    aten._flash_attention_backward.default: (1, 10),
}
"""Attention over samples in one row: position of the queries (tokens, heads, size), and operations per
element: two products, or five. PyTorch's own counter makes a list of the samples, a million in a trace."""
_GROUPED_PRODUCTS = {aten._grouped_mm.default}


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an attention kernel skips the half of the square that the mask hides."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            return bool(args[position] if position < len(args) else kwargs.get("is_causal"))
    return False


_EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
_ALIAS = {
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.detach.default,
    aten.alias.default,
    aten.set_.source_Storage,
}


_GATHERS = {
    aten.embedding.default,
    aten.gather.default,
    aten.index_select.default,
    aten.nll_loss_forward.default,
}
"""Operations that read no more of their input than they write."""


def launches(func: Any, fresh: bool) -> bool:
    """Whether a call launches a kernel.

    Views, aliases and uninitialised memory cost none; a view that had to copy does.
    """
    if func in _EMPTY:
        return False
    return fresh or not (func in _ALIAS or func.is_view)


def tensor_bytes(
    func: Any, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[int, ...]:
    """Bytes that the kernel writes and reads, tensor by tensor."""
    written = tuple(map(moved_bytes, outputs))
    if func in _GATHERS:
        return 2 * written
    if func is aten.nll_loss_backward.default:
        return written
    return written + tuple(map(moved_bytes, inputs))


def moved_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor that a kernel touches: an expanded tensor is read once."""
    num_elements = tensor.numel()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if not stride and size:
            num_elements //= size
    return min(num_elements * tensor.element_size(), tensor.untyped_storage().nbytes())


def dtype_of(func: Any, args: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype that a call computes with: what a product adds to may be wider than what it multiplies."""
    operands = _PRODUCT_OPERANDS.get(func, 0)
    dtype: torch.dtype = (args[operands] if operands else tensors[0]).dtype
    return dtype
