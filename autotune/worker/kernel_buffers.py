"""Buffers that CUDA kernels allocate and free inside one call.

Sources: pytorch v2.13 aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp,
aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu, Indexing.cu, SoftMax.cu, Reduce.cuh and
ScanUtils.cuh, aten/src/ATen/native/Convolution.cpp and ReduceOpsUtils.h.

Not modelled: cuDNN attention's own workspace (no closed form: taken to be flash attention's),
cub's temporary storage (in an embedding's backward it is free again before the partial sums are made),
reductions in chunks of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from autotune.traces.reduction import reduction_bytes
from autotune.worker.chunks import CHUNK_ROWS
from autotune.worker.cuda import Device
from autotune.worker.tracker import Buffer

aten = torch.ops.aten

_SM_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
"""Threads of a multiprocessor by compute capability; 2,048 of the others (CUDA C++ Programming Guide 13.0,
"Technical Specifications per Compute Capability")."""
_HALF = (torch.float16, torch.bfloat16)


def _ceil_to(value: int, step: int) -> int:
    return -(-value // step) * step


def _flash_backward_buffers(q: torch.Tensor, k: torch.Tensor) -> tuple[int, ...]:
    """dq_accum and softmax_d in fp32; dK and dV for every query head when heads are grouped."""
    batch, heads, length, size = q.shape
    rounded_size = _ceil_to(size, 32 if size <= 128 else 64)
    rounded_length = _ceil_to(length, 128)
    buffers = [
        batch * heads * rounded_length * 4,
        batch * heads * rounded_length * rounded_size * 4,
    ]
    if k.shape[1] != heads:
        buffers += 2 * [batch * k.shape[2] * heads * size * q.element_size()]
    return tuple(buffers)


def _efficient_backward_buffers(q: torch.Tensor) -> tuple[int, ...]:
    """The fp32 accumulator of dQ in global memory."""
    batch, heads, length, size = q.shape
    return (batch * heads * _ceil_to(length * size, 4) * 4,)


EMBEDDING_SORT_THRESHOLD = 3072
"""Up to so many indices the backward of an embedding needs no buffer (Embedding.cu)."""


def _embedding_backward_buffers(
    gradient: torch.Tensor, indices: torch.Tensor, rows: int
) -> tuple[Buffer, ...]:
    """What is alive together when the partial sums are made (EmbeddingBackwardKernel.cu).

    Per index: the sorted ones, where they stood, where segments start. Per segment, of which there
    are at most `rows`: its number of partial sums and their offset. Two counters. Per partial sum:
    where it starts, and the sum.
    """
    tokens = indices.numel()
    if tokens <= EMBEDDING_SORT_THRESHOLD:
        return ()
    accumulate_bytes = max(gradient.element_size(), 4)
    segments = min(tokens, rows)
    partials = tokens // 10 + segments

    def per_partial(row_bytes: int) -> Buffer:
        return Buffer(partials * row_bytes, rule=("embedding", tokens, rows, row_bytes))

    return (
        *(Buffer(tokens * 8) for _ in range(3)),
        *(Buffer(segments * 8) for _ in range(2)),
        *(Buffer(8) for _ in range(2)),
        per_partial(8),
        per_partial(accumulate_bytes * gradient.shape[-1]),
    )


def _copies(*tensors: torch.Tensor) -> tuple[Buffer, ...]:
    """What a kernel that wants its operands in order makes of those that are not."""
    return tuple(
        Buffer(tensor.numel() * tensor.element_size())
        for tensor in tensors
        if not tensor.is_contiguous()
    )


def _sum_buffers(device: Device, args: tuple[Any, ...], out: torch.Tensor) -> tuple[Buffer, ...]:
    """Partial sums; a copy where the elements are of another dtype than the sums."""
    tensor = args[0]
    if tensor.dtype != out.dtype and not (tensor.dtype in _HALF and out.dtype is torch.float32):
        return (Buffer(tensor.numel() * out.element_size()),)
    dims = args[1] if len(args) > 1 else None
    summed = {dim % tensor.dim() for dim in dims or range(tensor.dim())} if tensor.dim() else set()
    steps = [
        (size, step, dim in summed)
        for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if size > 1
    ]
    kept = [(size, step) for size, step, is_summed in steps if not is_summed]
    nearest = min((step for _, step, is_summed in steps if is_summed), default=0)
    if not kept or nearest < kept[-1][1]:
        return ()  # Threads that sum up neighbours leave little.
    num_sums = math.prod(size for size, _ in kept)
    num_elements = math.prod(size for size, _, is_summed in steps if is_summed)
    if num_elements % CHUNK_ROWS == 0:
        return ()
    numbers = (
        num_sums,
        num_elements,
        tensor.element_size(),
        max(tensor.element_size(), 4),
        _vector(steps, kept),
        device.num_sms,
        _SM_THREADS.get(device.compute_capability, 2048),
    )
    return (Buffer(reduction_bytes(numbers), rule=("reduction", *numbers)),)


def _vector(steps: list[tuple[int, int, bool]], kept: list[tuple[int, int]]) -> int:
    """Sums whose elements a thread reads at once: Reduce.cuh, get_output_vec_size."""
    size, step = kept[-1]
    if step != 1:
        return 1
    others = [step for _, step, _ in steps]
    others.remove(1)
    return math.gcd(4, size, *others)


def hidden_buffers(
    device: Device, func: Any, args: tuple[Any, ...], out: Any
) -> tuple[Buffer, ...]:
    """Buffers that the CUDA kernel of `func` allocates and frees inside the call."""
    buffers = _BUFFERS.get(func)
    return () if buffers is None else buffers(device, args, out)


def _index_put_buffers(_: Device, args: tuple[Any, ...], out: Any) -> tuple[Buffer, ...]:
    """Adding goes by sorted places (index_put_with_sort_kernel): linear, sorted, original, range."""
    if len(args) < 4 or not args[3]:
        return ()
    indices = [index for index in args[1] if index is not None]
    return 4 * (Buffer(8 * max(index.numel() for index in indices)),)


def _safe_softmax_buffers(_: Device, args: tuple[Any, ...], out: Any) -> tuple[Buffer, ...]:
    """Which elements are masked, and which rows as a whole (transformers/attention.cpp, _safe_softmax)."""
    return Buffer(out.numel()), Buffer(out.numel() // out.shape[args[1]])


_BUFFERS: dict[Any, Callable[[Device, tuple[Any, ...], Any], tuple[Buffer, ...]]] = {
    aten.embedding_dense_backward.default: lambda _, args, out: _embedding_backward_buffers(
        args[0], args[1], args[2]
    ),
    aten.index_put.default: _index_put_buffers,
    aten.index_put_.default: _index_put_buffers,
    aten._index_put_impl_.default: _index_put_buffers,
    # SoftMax.cu: `tmp = grad * output`
    aten._softmax_backward_data.default: lambda _, args, out: (
        Buffer(args[0].numel() * args[0].element_size()),
    ),
    aten._safe_softmax.default: _safe_softmax_buffers,
    aten._scaled_dot_product_flash_attention_backward.default: lambda _, args, out: tuple(
        map(Buffer, _flash_backward_buffers(args[1], args[2]))
    ),
    aten._scaled_dot_product_cudnn_attention_backward.default: lambda _, args, out: tuple(
        map(Buffer, _flash_backward_buffers(args[1], args[1]))
    ),
    aten._scaled_dot_product_efficient_attention_backward.default: lambda _, args, out: tuple(
        map(Buffer, _efficient_backward_buffers(args[1]))
    ),
    aten.sum.dim_IntList: _sum_buffers,
    aten.sum.default: _sum_buffers,
    aten.mean.dim: _sum_buffers,
    aten.cumsum.default: lambda _, args, out: _copies(args[0]),
    # In one dimension it is taken for one in two, of operands in order.
    aten.convolution.default: lambda _, args, out: _copies(*args[:1]) if args[0].dim() == 3 else (),
    aten.convolution_backward.default: lambda _, args, out: (
        _copies(*args[:2]) if args[0].dim() == 3 else ()
    ),
}
