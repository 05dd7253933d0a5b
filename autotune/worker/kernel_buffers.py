"""Buffers that CUDA kernels allocate and free inside one call.

Sources: pytorch v2.13 aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp,
aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu, Indexing.cu, Reduce.cuh and SoftMax.cu.

Not modelled: cuDNN attention's own workspace (no closed form: taken to be flash attention's),
cub's temporary storage (in an embedding's backward it is free again before the partial sums are made).
"""

from __future__ import annotations

from typing import Any

import torch

from autotune.traces.terms import column_sums, flash_splits
from autotune.worker.cuda import Device
from autotune.worker.tracker import Buffer, HiddenBuffers

aten = torch.ops.aten


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


_SM_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
"""Threads that a multiprocessor holds, by compute capability; 2,048 elsewhere (CUDA C++ Programming Guide
13.0, technical specifications)."""


def _column_sum_buffers(matrix: torch.Tensor, dims: Any, device: Device) -> tuple[Buffer, ...]:
    """Of a sum over all dimensions but the last, as a bias' gradient is one; others need a few KiB."""
    leading = range(matrix.dim() - 1)
    summed = {dim % matrix.dim() for dim in dims or ()}
    if summed != set(leading) or not leading or matrix.stride(-1) != 1:
        return ()
    columns = matrix.shape[-1]
    # The same columns of each row, as many as are aligned (get_output_vec_size).
    steps = (columns, matrix.storage_offset(), *(matrix.stride(dim) for dim in leading))
    vector = next(n for n in (4, 2, 1) if all(step % n == 0 for step in steps))
    rows = matrix.numel() // columns
    threads = _SM_THREADS.get(device.compute_capability, 2048)
    numbers = rows, columns, vector, threads, device.num_sms
    return (Buffer(column_sums(numbers), rule=("column sums", *numbers)),)


def _flash_forward_buffers(
    q: torch.Tensor, k: torch.Tensor, dropout_p: float, device: Device
) -> tuple[Buffer, ...]:
    """Sums of the parts that the keys are split into, and their logarithms; never with dropout."""
    batch, heads, length, size = q.shape
    if dropout_p:
        return ()
    rounded_size = _ceil_to(size, 32) if size <= 192 else 256
    numbers = batch, heads, length, k.shape[2], size, device.num_sms
    rules = [("flash splits", *numbers, num_floats) for num_floats in (1, rounded_size)]
    return tuple(Buffer(flash_splits(rule[1:]), rule=rule) for rule in rules)


def buffers_on(device: Device) -> HiddenBuffers:
    """hidden_buffers, and those whose size depends on the card."""

    def buffers(func: Any, args: tuple[Any, ...], out: Any) -> tuple[Buffer, ...]:
        if func is aten.sum.dim_IntList and args[0].is_floating_point() and args[0].numel():
            return _column_sum_buffers(args[0], args[1], device)
        if func is aten._scaled_dot_product_flash_attention.default:
            dropout_p = args[3] if len(args) > 3 else 0.0
            return _flash_forward_buffers(args[0], args[1], dropout_p, device)
        return hidden_buffers(func, args, out)

    return buffers


def hidden_buffers(func: Any, args: tuple[Any, ...], out: Any) -> tuple[Buffer, ...]:
    """Buffers that the CUDA kernel of `func` allocates and frees inside the call."""
    if func is aten.embedding_dense_backward.default:
        return _embedding_backward_buffers(args[0], args[1], args[2])
    if func is aten._index_put_impl_.default and len(args) > 3 and args[3]:
        # Adding goes by sorted places (index_put_with_sort_kernel): linear, sorted, original, range.
        return 4 * (Buffer(8 * max(index.numel() for index in args[1])),)
    if func is aten._softmax_backward_data.default:  # SoftMax.cu: `tmp = grad * output`
        return (Buffer(args[0].numel() * args[0].element_size()),)
    if func is aten._scaled_dot_product_flash_attention_backward.default:
        # Copied where they do not lie token by token: partly rotated queries (Phi) give their layout on.
        lying = [t for t in (args[0], args[4]) if not t.transpose(1, 2).is_contiguous()]
        copies = tuple(t.numel() * t.element_size() for t in lying)
        return tuple(Buffer(size) for size in copies + _flash_backward_buffers(args[1], args[2]))
    if func is aten._scaled_dot_product_cudnn_attention_backward.default:
        return tuple(Buffer(size) for size in _flash_backward_buffers(args[1], args[1]))
    if func is aten._scaled_dot_product_efficient_attention_backward.default:
        return tuple(Buffer(size) for size in _efficient_backward_buffers(args[1]))
    return ()
