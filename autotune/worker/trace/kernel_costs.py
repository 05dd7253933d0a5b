"""Costs of one ATen call on a GPU: whether it launches a kernel, its arithmetic, the bytes it moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from autotune.worker.trace.meta_values import FUSED_RMS_NORM

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


def shape_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> tuple[int, ...]:
    """Sizes that the call's speed depends on, as autotune.speed.roofline.Kernel has them."""
    operands = _PRODUCT_OPERANDS.get(func)
    if operands is not None or func in _GROUPED_PRODUCTS or func is aten._scaled_mm.default:
        first = operands or 0
        *batch, rows, inner = args[first].shape
        return math.prod(batch), rows, args[first + 1].shape[-1], inner
    if func in _ATTENTION:
        query, key = args[_ATTENTION[func][0] :][:2]
        return attention_shape(query, key, _is_causal(func, args, kwargs))
    if func in _VARLEN_ATTENTION:
        query, key = args[_VARLEN_ATTENTION[func][0] :][:2]
        total, heads, size = query.shape
        num_samples = next(t for t in args if t is not None and t.dtype is torch.int32).shape[0] - 1
        length, is_causal = total // num_samples, int(_is_causal(func, args, kwargs))
        return num_samples, heads, key.shape[1], length, length, size, is_causal
    if func in _ROW_LENGTHS:
        return _rows_and_columns(args[0].numel(), _row_length(args, _ROW_LENGTHS[func]))
    if func in FILLS_A_COPY:
        return _strided_elements(out, args[:2], {})
    if func in _INTO_ZEROS:
        # A part along the first dimension lies as its gradient does.
        is_alike = args[2] == 0 and args[0].is_contiguous()
        return () if is_alike else (args[0].numel(),)
    if func is aten.cat.default:
        return () if all(part.is_contiguous() for part in args[0]) else (out.numel(),)
    if is_pointwise(func):
        return _strided_elements(out, args, kwargs)
    if func._overloadpacket in _REDUCTIONS and isinstance(out, torch.Tensor) and out.numel():
        shape = _rows_and_columns(args[0].numel(), args[0].numel() // out.numel())
        return (*shape, 1) if _is_over_columns(func, args, kwargs) else shape
    return ()


def attention_shape(query: torch.Tensor, key: torch.Tensor, is_causal: bool) -> tuple[int, ...]:
    """Sizes that an attention's speed depends on: queries and keys are (samples, heads, tokens, size)."""
    batch_size, heads, length, size = query.shape
    return batch_size, heads, key.shape[1], length, key.shape[2], size, int(is_causal)


def is_pointwise(func: Any) -> bool:
    """Whether the operation makes each element of its result from one of each operand, by TensorIterator."""
    return torch.Tag.pointwise in func.tags or func in _COPIES


def _strided_elements(out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """(elements,) where the kernel takes one after the other; empty where it takes several at a time.

    Vectorised kernels want operands of one type that lie alike: torch 2.13 native/cuda/CUDALoops.cuh,
    gpu_kernel_impl, asks TensorIterator.is_contiguous() and needs_dynamic_casting. A number, or a
    tensor of one on the host, is no operand there. Float32 to 16 bits has a kernel without casting (Copy.cu).
    """
    given = (value for value in (out, *args, *kwargs.values()) if isinstance(value, torch.Tensor))
    operands = [tensor for tensor in given if tensor.dim() or tensor.device.type != "cpu"]
    if not operands:
        return ()
    layouts = {_layout(tensor) for tensor in operands}
    if len(layouts) == 1 and _is_dense(*layouts) and not _casts(operands):
        return ()
    return (max(tensor.numel() for tensor in operands),)


def _casts(operands: Sequence[torch.Tensor]) -> bool:
    """Whether a kernel casts as it reads or writes: `operands` begin with its result."""
    floating = [tensor.dtype for tensor in operands if tensor.is_floating_point()]
    is_narrowed = len(floating) == 2 and floating[0].itemsize == 2 and floating[1].itemsize == 4
    return len(set(floating)) > 1 and not is_narrowed


_Layout = tuple[tuple[int, int], ...]


def _layout(tensor: torch.Tensor) -> _Layout:
    """Sizes and strides of the dimensions that have more than one element."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple((size, stride) for size, stride in dims if size != 1)


def _is_dense(layout: _Layout) -> bool:
    reach = 1 + sum((size - 1) * stride for size, stride in layout)
    return math.prod(size for size, _ in layout) == reach


def _row_length(args: tuple[Any, ...], position: int) -> int:
    """Elements of a row: of the dimension at that position of the arguments, or of a shape that it gives."""
    given = args[position]
    return math.prod(given) if isinstance(given, (list, tuple)) else int(args[0].shape[given])


def _is_over_columns(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a reduction leaves the dimension along which its input's numbers lie together."""
    reduced = _argument(func, "dim", args, kwargs)
    sizes, strides = args[0].shape, args[0].stride()
    dims = [dim for dim, size in enumerate(sizes) if size > 1 and strides[dim]]
    if reduced is None or reduced == [] or not dims:
        return False
    reduced = reduced if isinstance(reduced, (list, tuple)) else [reduced]
    return min(dims, key=lambda dim: strides[dim]) not in {dim % len(sizes) for dim in reduced}


def _argument(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call's argument by its name; None where it is not given."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name)
    return None


def _rows_and_columns(num_elements: int, num_columns: int) -> tuple[int, ...]:
    return (num_elements // num_columns, num_columns) if num_columns else ()


_ROW_LENGTHS = {
    aten._softmax.default: 1,
    aten._softmax_backward_data.default: 2,
    aten._log_softmax.default: 1,
    aten._log_softmax_backward_data.default: 2,
    aten.native_layer_norm.default: 1,
    aten.native_layer_norm_backward.default: 2,
    aten._fused_rms_norm.default: 1,
    aten._fused_rms_norm_backward.default: 2,
    FUSED_RMS_NORM: 1,
}
"""Position of the dimension, or of the shape, that a row-wise operation goes along."""
_NORMS_BACKWARD = {func for func in _ROW_LENGTHS if func.name().endswith("norm_backward")}
"""Backward passes with a kernel for the gradients of weights besides, where there are any (torch 2.13
native/cuda/layer_norm_kernel.cu)."""
_COPIES = {aten._to_copy.default, aten.copy_.default, aten.clone.default}
_REDUCTIONS = {aten.sum, aten.mean, aten.amax, aten.var_mean, aten.linalg_vector_norm}
"""Operations that reduce rows to numbers."""
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
    return bool(_argument(func, "is_causal", args, kwargs))


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


FILLS_A_COPY = {aten.masked_fill.Scalar, aten.masked_fill.Tensor}
"""Operations that copy their input, and write into the copy by a kernel that reads it too (torch 2.13
native/cuda/Indexing.cu, native/TensorAdvancedIndexing.cpp)."""
_INTO_ZEROS = {aten.slice_backward.default, aten.select_backward.default}
"""Operations that make zeros, and copy their input into a part of them: two kernels by one call of the
host, which count as one launch (torch 2.13 native/TensorShape.cpp)."""
_INTO_PLACES = {aten.scatter_add_.default, aten.index_add_.default}
"""Operations that read and write as many places of their first input as the last one has numbers."""
_PATH_PASSES = 8
"""How often CTC's backward goes through as many bytes as it has sums over paths, beside reading them: sums
from the end are filled and made, read with the others for labels, and for blanks added up by a row-wise
logsumexp (torch 2.13 native/cuda/LossCTC.cu)."""
_GATHERS = {
    aten.embedding.default,
    aten.gather.default,
    aten.index_select.default,
    aten.nll_loss_forward.default,
}
"""Operations that read no more of their input than they write."""


def is_alias(func: Any) -> bool:
    """Whether an operation is made to return a part of its argument; it may have to copy all the same."""
    return func.is_view or func in _ALIAS or _is_collective(func, *_HANDED_ON)


def launches(func: Any, fresh: bool) -> bool:
    """Whether a call launches a kernel. `fresh`: whether it returns new memory.

    Views, aliases and uninitialised memory cost none; a view that had to copy does.
    """
    if func in _EMPTY:
        return False
    return fresh or not is_alias(func)


def tensor_bytes(
    func: Any, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[int, ...]:
    """Bytes that the kernel writes and reads, tensor by tensor; a collective's whole buffer."""
    written = tuple(map(moved_bytes, outputs))
    if _is_collective(func):
        return (max(map(moved_bytes, (*outputs, *inputs))),)
    if func in _GATHERS:
        return 2 * written
    if func is aten.nll_loss_backward.default:
        return written
    if func is aten._ctc_loss_backward.Tensor:
        return 4 * written + tuple(map(moved_bytes, inputs)) + _PATH_PASSES * (inputs[-1].nbytes,)
    if func in _INTO_PLACES:
        return tuple(map(moved_bytes, (*inputs[1:], inputs[-1], inputs[-1])))
    if func in _INTO_ZEROS:
        return written + 2 * tuple(map(moved_bytes, inputs))
    if func in _NORMS_BACKWARD and len(outputs) > 1:
        # Gradient and input once more, for the weights' gradients.
        return (
            written + 2 * tuple(map(moved_bytes, inputs[:2])) + tuple(map(moved_bytes, inputs[2:]))
        )
    return written + tuple(map(moved_bytes, inputs))


def _is_collective(func: Any, *names: str) -> bool:
    """Whether an operation is a collective of several processes, one of those names if there are any."""
    if func.namespace != "_c10d_functional":
        return False
    return not names or func._overloadpacket.__name__ in names


_HANDED_ON = ("wait_tensor", "_wrap_tensor_autograd")
"""Operations beside collectives that return what they are given."""


def moved_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor that a kernel touches: an expanded tensor is read once."""
    num_elements = tensor.numel()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if not stride and size:
            num_elements //= size
    return min(num_elements * tensor.element_size(), tensor.untyped_storage().nbytes())


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether some of a tensor's elements share memory, those that are expanded aside.

    The bytes that a kernel touches then depend on the tensor's storage, and not on its layout alone.
    """
    dims = [(n, stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    reach = 1 + sum((n - 1) * stride for n, stride in dims)
    return math.prod(n for n, _ in dims) > reach


def dtype_of(func: Any, args: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype that a call computes with: what a product adds to may be wider than what it multiplies."""
    operands = _PRODUCT_OPERANDS.get(func, 0)
    dtype: torch.dtype = (args[operands] if operands else tensors[0]).dtype
    return dtype
