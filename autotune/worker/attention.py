"""FlashAttention 2 and 3 in a trace: Transformers' own integration runs, with PyTorch's flash operation.

The libraries are not needed. PyTorch's flash attention is FlashAttention 2's code: it saves the same
tensors for the backward pass. FlashAttention 3 differs in what its backward pass allocates inside, and
in speed. An unpadded, unpacked batch, as everywhere.

Source: transformers 5.23 modeling_flash_attention_utils.py; Dao-AILab/flash-attention hopper/
flash_api.cpp and csrc/flash_attn/flash_api.cpp.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autotune.worker.cuda import flash_attention, hidden_buffers
from autotune.worker.stand_ins import replaced
from autotune.worker.tracker import Buffer, HiddenBuffers

aten = torch.ops.aten

FLASH = ("flash_attention_2", "flash_attention_3")
LARGEST_HEAD = 256
"""Elements. Both versions refuse more."""

_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
KERNEL_NAMES = {
    "flash_attention_3": {
        aten._scaled_dot_product_flash_attention.default: "_scaled_dot_product_flash3_attention",
        _BACKWARD: "_scaled_dot_product_flash3_attention_backward",
    }
}
"""What autotune.roofline calls the kernels of an implementation, where the operation does not say it."""


def buffers_of(attention: str, default: HiddenBuffers = hidden_buffers) -> HiddenBuffers:
    """The buffers inside kernels, by the implementation of attention."""
    if attention != "flash_attention_3":
        return default

    def buffers(func: Any, args: tuple[Any, ...], out: Any) -> tuple[Buffer, ...]:
        if func is _BACKWARD:
            return tuple(Buffer(size) for size in _third_backward(args[1], args[2]))
        return default(func, args, out)

    return buffers


def _third_backward(q: torch.Tensor, k: torch.Tensor) -> tuple[int, ...]:
    """softmax_d, lse_log2 and dq_accum, and dk_accum and dv_accum where heads are grouped; fp32.

    Lengths are rounded to 128, the usual block; heads to 32 up to 128 and to 64 beyond.
    """
    batch, heads, length, size = q.shape
    rounded_length = -(-length // 128) * 128
    step = 32 if size <= 128 else 64
    rounded_size = -(-size // step) * step
    row_bytes = batch * rounded_length * 4
    buffers = [row_bytes * heads, row_bytes * heads, row_bytes * heads * rounded_size]
    if k.shape[1] != heads:
        buffers += 2 * [row_bytes * k.shape[1] * rounded_size]
    return tuple(buffers)


@contextlib.contextmanager
def without_library(attention: str) -> Iterator[None]:
    """Models can be made with, and trained with, an implementation that is not installed."""
    if attention not in FLASH:
        yield
        return
    from transformers import PreTrainedModel, modeling_utils
    from transformers import modeling_flash_attention_utils as utils

    functions = (flash, None, None, None, None), (utils._lazy_define_process_function(flash), dict)
    is_packed = utils._is_packed_sequence
    with replaced(
        [
            (utils, "lazy_import_flash_attention", lambda *_, **__: functions),
            (modeling_utils, "lazy_import_flash_attention", lambda *_, **__: functions),
            # Else its own kernels would be fetched from the Hub.
            (modeling_utils, "is_kernels_available", lambda *_: False),
            (utils, "_is_packed_sequence", _asked_in_vain(is_packed)),
            (PreTrainedModel, "_flash_attn_import_error", lambda *_, **__: None),
        ]
    ):
        yield


def _asked_in_vain(is_packed: Callable[..., Any]) -> Callable[..., bool]:
    def asked(*args: Any) -> bool:
        is_packed(*args)
        return False

    return asked


def flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """flash_attn_func of (batch, length, heads, size), in 16 bits."""
    if q.shape[-1] > LARGEST_HEAD:
        raise ValueError(f"FlashAttention has no heads of {q.shape[-1]}: up to {LARGEST_HEAD}")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"FlashAttention does not compute in {q.dtype}")
    query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out = flash_attention(query, key, value, dropout_p, causal, scale=softmax_scale)
    return out.transpose(1, 2)
