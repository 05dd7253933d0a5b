"""Buffers that CUDA kernels allocate and free inside one call.

Sources: pytorch v2.13 aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp,
aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu, IndexKernel.cpp, Indexing.cu,
LossCTC.cu, Reduce.cuh, ScanUtils.cuh and SoftMax.cu; aten/src/ATen/native/Convolution.cpp and
transformers/attention.cpp;
transformers/cuda/attention_backward.cu and mem_eff_attention/kernel_backward.h;
cudnn_frontend 1.18 node/scaled_dot_product_flash_attention.h.

Not modelled: what a plan of cuDNN's attention wants besides (no closed form); cub's temporary storage (in an
embedding's backward it is free again before the partial sums are made); cuDNN's workspaces for convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from autotune.memory.reductions import may_be_shared, shared_bytes
from autotune.memory.traces.terms import efficient_splits, flash_splits
from autotune.worker.trace.kernels import Buffer
from autotune.worker.trace.meta_values import FUSED_RMS_NORM

aten = torch.ops.aten


class Multiprocessors(NamedTuple):
    """The card's multiprocessors."""

    number: int
    num_threads: int
    """Threads of each."""
    compute_capability: tuple[int, int]


Found = tuple[Buffer, ...]
Args = tuple[Any, ...]


def _ceil_to(value: int, step: int) -> int:
    return -(-value // step) * step


def _flash_head(size: int) -> int:
    """Elements that a head has in flash attention's sums."""
    return _ceil_to(size, 32 if size <= 128 else 64)


def _of_flash_forward(multiprocessors: Multiprocessors, args: Args, out: Any) -> Found:
    """Logarithms and sums of the parts where flash attention splits the keys; never with dropout."""
    if len(args) > 3 and args[3]:
        return ()
    batch, heads, length, size = args[0].shape
    numbers = batch, heads, length, args[1].shape[2], size, multiprocessors.number
    rules = [("flash splits", *numbers, num_floats) for num_floats in (1, _flash_head(size))]
    return tuple(Buffer(flash_splits(rule[1:]), rule=rule) for rule in rules)


def _of_flash_backward(_: Multiprocessors, args: Args, out: Any) -> Found:
    """Buffers of flash attention's backward.

    First copies of what does not lie token by token: the result does not where queries are partly rotated
    (Phi; pytorch v2.13 aten/src/ATen/native/transformers/cuda/attention_backward.cu,
    _flash_attention_backward). Then dq_accum and softmax_d in fp32; dK and dV for every query head when
    heads are grouped.
    """
    q, k = args[1], args[2]
    batch, heads, length, size = q.shape
    rounded_length = _ceil_to(length, 128)
    sizes = [
        batch * heads * rounded_length * 4,
        batch * heads * rounded_length * _flash_head(size) * 4,
    ]
    if k.shape[1] != heads:
        sizes += 2 * [batch * k.shape[2] * heads * size * q.element_size()]
    return (*_copies_by_token((args[0], args[4])), *map(Buffer, sizes))


def _copies_by_token(tensors: Iterable[torch.Tensor]) -> Found:
    """Copies of tensors of (samples, heads, tokens, size) that do not lie token by token."""
    lying = (t for t in tensors if not t.transpose(1, 2).is_contiguous())
    return tuple(Buffer(t.nbytes, comes_first=True) for t in lying)


_LARGE_SHARED_MEMORY = frozenset({(8, 0), (8, 7), (9, 0), (10, 0), (10, 3)})
"""Compute capabilities whose blocks may share 163 KiB or more."""


def _efficient_tile(
    compute_capability: tuple[int, int], is_half: bool, size: int, *, drops: bool
) -> tuple[int, int, bool]:
    """Return the (rows, columns) of a tile of dQ, and whether dK and dV are accumulated outside registers.

    Of the kernels whose heads are large enough the one of the smallest, there the one with most rows whose
    shared memory the card has (mem_eff_attention/kernels/generate_kernels.py, BwdKernel).
    """
    is_large = compute_capability in _LARGE_SHARED_MEMORY
    if size <= 64:
        return 64, 64, False
    if not is_half:
        return 128 if is_large else 64, 64, False
    if size > 128:
        return 128, 64, True
    if is_large:
        return 128, 128, False
    fits_registers = compute_capability < (8, 0) or (
        compute_capability in ((8, 6), (8, 9)) and size <= 96 and not drops
    )
    return (128, 64, False) if fits_registers else (64, 64, True)


_SIZE_IN_REGISTERS = 128
"""Largest head whose output memory-efficient attention keeps in registers (attention.cu, kMaxK)."""


def _of_efficient_forward(_: Multiprocessors, args: Args, out: Any) -> Found:
    """Sums of 16-bit outputs in fp32, where a head is too large for registers (attention.cu output_accum)."""
    query, _key, value = args[:3]
    batch, heads, length, size = query.shape
    value_size = value.shape[-1]
    if query.element_size() != 2 or max(size, value_size) <= _SIZE_IN_REGISTERS:
        return ()
    return (Buffer(4 * batch * heads * length * value_size),)


def _of_efficient_backward(multiprocessors: Multiprocessors, args: Args, out: Any) -> Found:
    """Buffers of memory-efficient attention's backward.

    First a copy of a gradient that does not lie token by token. Where heads are grouped, which it takes since
    torch 2.14, dK and dV for every query head. The sum of output x gradient in each row, in fp32; in float32
    it is made by two operations and turned round. Then a workspace: dQ in tiles of fp32, each with a lock of
    16 bytes, and dK and dV where they do not stay in registers.
    """
    gradient, query, key, value = args[:4]
    batch, heads, length, size = query.shape
    value_size = value.shape[-1]
    grouped = (key, value) if key.shape[1] != heads else ()
    expanded = (Buffer(each.nbytes // each.shape[1] * heads) for each in grouped)
    is_half = query.element_size() == 2
    rows, columns, is_staged = _efficient_tile(
        multiprocessors.compute_capability,
        is_half,
        max(size, value_size),
        drops=len(args) > 9 and bool(args[9]),
    )
    num_tiles = math.ceil(length / rows) * math.ceil(size / columns)
    workspace = Buffer(batch * heads * num_tiles * (rows * columns * 4 + 16))
    if is_staged:
        head = _ceil_to(size, rows) + _ceil_to(value_size, rows)
        numbers = batch, heads, key.shape[2], columns, head, workspace.size_bytes
        workspace = Buffer(efficient_splits(numbers), rule=("efficient splits", *numbers))
    sums_bytes = batch * heads * length * 4
    num_sums = 2 if heads > 1 and length > 1 else 1
    made_of = () if is_half else (gradient.nbytes, *num_sums * [sums_bytes])
    brief = (Buffer(size_bytes, goes_first=True) for size_bytes in made_of)
    return (*_copies_by_token((gradient,)), *expanded, *brief, Buffer(sums_bytes), workspace)


def _of_cudnn_backward(_: Multiprocessors, args: Args, out: Any) -> Found:
    """softmax_sum and dQ_accum in fp32, in one workspace (get_fe_workspace_size_node)."""
    batch, heads, length, size = args[1].shape
    return (Buffer(4 * batch * heads * length * (size + 1)),)


EMBEDDING_SORT_THRESHOLD = 3072
"""Most indices with which the backward of an embedding needs no buffer (Embedding.cu)."""


def _of_embedding_backward(_: Multiprocessors, args: Args, out: Any) -> Found:
    """Buffers alive together when an embedding's partial sums are made (EmbeddingBackwardKernel.cu).

    Per index: the sorted ones, where they stood, where segments start. Per segment, of which there
    are at most `rows`: its number of partial sums and their offset. Two counters. Per partial sum:
    where it starts, and the sum.
    """
    gradient, indices, rows, *_padding = args
    tokens = indices.numel()
    if tokens <= EMBEDDING_SORT_THRESHOLD:
        return ()
    accumulate_bytes = max(gradient.element_size(), 4)
    segments = min(tokens, rows)
    partials = tokens // 10 + segments

    def per_partial(row_bytes: int) -> Buffer:
        return Buffer(partials * row_bytes, rule=("embedding", tokens, rows, row_bytes))

    def sorted_by(size_bytes: int) -> Buffer:
        return Buffer(size_bytes, rule=("embedding sort", tokens, size_bytes))

    return (
        *(sorted_by(tokens * 8) for _ in range(3)),
        *(Buffer(segments * 8, rule=("embedding rows", tokens, rows)) for _ in range(2)),
        *(sorted_by(8) for _ in range(2)),
        per_partial(8),
        per_partial(accumulate_bytes * gradient.shape[-1]),
    )


def _reduction_buffers(
    multiprocessors: Multiprocessors, tensor: torch.Tensor, out: torch.Tensor, dims: set[int]
) -> Found:
    """Buffers of a reduction: partial results, and a semaphore for each block that shares an output."""
    kept = [d for d in range(tensor.ndim) if d not in dims and tensor.shape[d] > 1]
    reduced = [d for d in dims if tensor.shape[d] > 1]
    num_outputs = math.prod(tensor.shape[d] for d in kept)
    row = 0
    if kept and (not reduced or _least_stride(tensor, kept) < _least_stride(tensor, reduced)):
        row = _row_of(tensor, kept)
    num_inputs = math.prod(tensor.shape[d] for d in reduced)
    if not may_be_shared(num_inputs, row):
        return ()
    item_bytes = max(out.element_size(), 4)
    numbers = (num_inputs, num_outputs, row, item_bytes, *multiprocessors[:2])
    sizes = shared_bytes(*numbers)
    return tuple(
        Buffer(size, rule=("reduction", part, *numbers)) for part, size in enumerate(sizes)
    )


def _least_stride(tensor: torch.Tensor, dims: Iterable[int]) -> int:
    return min(tensor.stride(d) for d in dims)


def _row_of(tensor: torch.Tensor, dims: Sequence[int]) -> int:
    """Number of items that lie side by side along these dimensions; 1 where none do."""
    items = 1
    for d in sorted(dims, key=tensor.stride):
        if tensor.stride(d) != items:
            break
        items *= tensor.shape[d]
    return items


def _sums(multiprocessors: Multiprocessors, tensor: torch.Tensor, dims: Any, out: Any) -> Found:
    reduced = {dim % tensor.ndim for dim in dims or range(tensor.ndim)}
    return _cast(tensor, out) + _reduction_buffers(multiprocessors, tensor, out, reduced)


def _cast(tensor: torch.Tensor, out: torch.Tensor) -> Found:
    """The float copy of integers that are summed (ReduceOpsUtils.h, make_reduction)."""
    is_cast = tensor.dtype is not out.dtype and not tensor.is_floating_point()
    return (Buffer(tensor.numel() * out.element_size()),) if is_cast else ()


def _of_sum(multiprocessors: Multiprocessors, args: Args, out: Any) -> Found:
    return _sums(multiprocessors, args[0], args[1] if len(args) > 1 else None, out)


def _of_norm(multiprocessors: Multiprocessors, args: Args, out: Any) -> Found:
    return _sums(multiprocessors, args[0], args[2] if len(args) > 2 else None, out)


def _of_index_put(_: Multiprocessors, args: Args, out: Any) -> Found:
    """Buffers of adding by sorted places (index_put_with_sort_kernel): linear, sorted, original, range."""
    if len(args) < 4 or not args[3]:
        return ()
    return 4 * (Buffer(8 * max(index.numel() for index in args[1] if index is not None)),)


def _of_safe_softmax(_: Multiprocessors, args: Args, out: Any) -> Found:
    """Masks of a safe softmax: which scores are masked, and which rows as a whole."""
    return Buffer(out.numel()), Buffer(out.numel() // out.shape[args[1]])


def _of_softmax_backward(_: Multiprocessors, args: Args, out: Any) -> Found:
    """The product `tmp = grad * output` in the backward of a softmax (SoftMax.cu)."""
    return (Buffer(args[0].nbytes),)


def _of_cumsum(_: Multiprocessors, args: Args, out: Any) -> Found:
    """Copy of the input of a cumulative sum (ScanUtils.cuh, scan_dim; ReduceOps.cpp, impl_func_cum_ops)."""
    if cast := _cast(args[0], out):
        return cast
    return () if args[0].is_contiguous() else (Buffer(args[0].nbytes),)


def _of_masked_scatter(_: Multiprocessors, args: Args, out: Any) -> Found:
    """Numbers of the places before each one, and the mask, where it is stretched (IndexKernel.cpp)."""
    counts = Buffer(8 * out.numel())
    return (counts,) if args[1].numel() == out.numel() else (counts, Buffer(out.numel()))


def _copies(
    tensors: Iterable[torch.Tensor], *, comes_first: bool = True, goes_first: bool = False
) -> Found:
    """Copies in order of operands that lie in another.

    A convolution in one dimension, which is taken for two, makes them; a layer norm makes one of its input,
    and of a gradient, behind its own results. Sources: Convolution.cpp, _convolution and
    convolution_backward; layer_norm_kernel.cu, layer_norm_cuda and layer_norm_backward_cuda.
    """
    out_of_order = (t for t in tensors if not t.is_contiguous())
    return tuple(
        Buffer(each.nbytes, comes_first=comes_first, goes_first=goes_first) for each in out_of_order
    )


def _of_norm_of_rows(_: Multiprocessors, args: Args, out: Any) -> Found:
    return _copies(args[:1])


def _of_norm_of_rows_backward(_: Multiprocessors, args: Args, out: Any) -> Found:
    return *_copies(args[1:2]), *_copies(args[:1], comes_first=False)


def _rows(operands: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    """Operands of a convolution in one dimension."""
    return (operand for operand in operands if operand.ndim == 3)


def _of_convolution_backward(multiprocessors: Multiprocessors, args: Args, out: Any) -> Found:
    """Copies of the input and of the gradient, and what adding up the bias's gradient needs."""
    gradient, has_bias = args[0], args[10][2]
    copies = _copies(_rows(args[1:2])) + _copies(_rows(args[:1]), goes_first=True)
    if not has_bias:
        return copies
    return copies + _sums(multiprocessors, gradient, [0, *range(2, gradient.ndim)], gradient)


def _of_masked_select(_: Multiprocessors, args: Args, out: Any) -> Found:
    """Places that are selected, found as those of an index (TensorAdvancedIndexing.cpp, Indexing.cu)."""
    return (Buffer(8 * out.numel() * args[1].dim()),)


def _of_ctc(_: Multiprocessors, args: Args, out: Any) -> Found:
    """Lengths of targets and of inputs, and where targets begin, on the device (LossCTC.cu)."""
    return 3 * (Buffer(8 * out[0].numel(), comes_first=True),)


def _of_ctc_backward(_: Multiprocessors, args: Args, out: Any) -> Found:
    """Buffers of CTC's backward: the same numbers, sums over paths from the end, sums of blanks.

    Of long inputs, or large vocabularies, blanks go apart: each second number of both sums is added up, the
    rows' largest are taken away, and what is left is summed. Others need no sums of blanks, which are counted
    all the same. Source: LossCTC.cu, ctc_loss_backward_gpu_template; ReduceOps.cpp, logsumexp_out_impl.
    """
    sums = args[6]
    samples, frames, size = sums.shape
    of_blanks = Buffer(4 * samples * frames * (size // 2 + 1))
    of_rows = Buffer(4 * samples * frames)
    numbers = 3 * (Buffer(8 * samples, comes_first=True),)
    blanks = (of_blanks, of_rows, of_rows, of_blanks, of_rows)
    return (*numbers, Buffer(sums.nbytes, comes_first=True), *blanks)


_BUFFERS: dict[Any, Callable[[Multiprocessors, Args, Any], Found]] = {
    aten.sum.default: _of_sum,
    aten.sum.dim_IntList: _of_sum,
    aten.mean.default: _of_sum,
    aten.mean.dim: _of_sum,
    aten.linalg_vector_norm.default: _of_norm,
    aten._scaled_dot_product_flash_attention.default: _of_flash_forward,
    aten._scaled_dot_product_flash_attention_backward.default: _of_flash_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _of_cudnn_backward,
    aten._scaled_dot_product_efficient_attention.default: _of_efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: _of_efficient_backward,
    aten.embedding_dense_backward.default: _of_embedding_backward,
    aten.index_put.default: _of_index_put,
    aten.index_put_.default: _of_index_put,
    aten._index_put_impl_.default: _of_index_put,
    aten.masked_select.default: _of_masked_select,
    aten._ctc_loss.Tensor: _of_ctc,
    aten._ctc_loss_backward.Tensor: _of_ctc_backward,
    aten._safe_softmax.default: _of_safe_softmax,
    aten._softmax_backward_data.default: _of_softmax_backward,
    aten._log_softmax_backward_data.default: lambda _, args, out: _copies(
        args[:2], comes_first=False
    ),
    aten.cumsum.default: _of_cumsum,
    aten.masked_scatter.default: _of_masked_scatter,
    aten.masked_scatter_.default: _of_masked_scatter,
    aten.convolution.default: lambda _, args, out: _copies(_rows(args[:1])),
    aten.convolution_backward.default: _of_convolution_backward,
    aten.native_layer_norm.default: _of_norm_of_rows,
    FUSED_RMS_NORM: _of_norm_of_rows,
    aten.native_layer_norm_backward.default: _of_norm_of_rows_backward,
    aten._fused_rms_norm_backward.default: _of_norm_of_rows_backward,
}


def hidden_buffers(
    multiprocessors: Multiprocessors, func: Any, args: tuple[Any, ...], out: Any
) -> tuple[Buffer, ...]:
    """Buffers that the CUDA kernel of `func` allocates and frees inside the call."""
    buffers = _BUFFERS.get(func)
    return () if buffers is None else buffers(multiprocessors, args, out)
