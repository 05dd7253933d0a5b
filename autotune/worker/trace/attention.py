"""FlashAttention 2 and 3 in a trace: Transformers' own integration runs, with PyTorch's flash operation.

The libraries are not needed. PyTorch's flash attention is FlashAttention 2's code: it saves the same
tensors for the backward pass. FlashAttention 3 differs in what its backward pass allocates inside, and
in speed.

A padded batch is unpadded in every layer and padded again; where padding is, is not known on `meta`:
every place is taken for a token, so that a micro-batch of the longest samples fits. A batch that needs
no padding goes by where its samples begin.

Not modelled: that the host waits for the device in every layer to learn the longest sample.

Source: transformers 5.23 modeling_flash_attention_utils.py; Dao-AILab/flash-attention hopper/
flash_api.cpp and csrc/flash_attn/flash_api.cpp (mha_bwd, mha_varlen_bwd).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from autotune.catalogue.attention import FLASH_ATTENTIONS
from autotune.records.estimate import TraceSpec
from autotune.worker.trace.kernels import Buffer, HiddenBuffers
from autotune.worker.trace.sdpa import flash_attention
from autotune.worker.trace.stand_ins import replaced

aten = torch.ops.aten

_CALL = "_flash_attention_forward"

LARGEST_HEAD = 256
"""Most elements of a head: both versions refuse more."""

_FORWARD = aten._scaled_dot_product_flash_attention.default
_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
_VARLEN_FORWARD = aten._flash_attention_forward.default
_VARLEN_BACKWARD = aten._flash_attention_backward.default


def _names(family: str, forwards: tuple[Any, ...], backwards: tuple[Any, ...]) -> dict[Any, str]:
    forward = f"_scaled_dot_product_{family}_attention"
    return dict.fromkeys(forwards, forward) | dict.fromkeys(backwards, f"{forward}_backward")


KERNEL_NAMES = {
    "flash_attention_2": _names("flash", (_VARLEN_FORWARD,), (_VARLEN_BACKWARD,)),
    "flash_attention_3": _names(
        "flash3", (_FORWARD, _VARLEN_FORWARD), (_BACKWARD, _VARLEN_BACKWARD)
    ),
}
"""Names of an implementation's kernels in speed.roofline, where the operation does not say it."""


def buffers_of(attention: str, default: HiddenBuffers) -> HiddenBuffers:
    """A function that finds the buffers inside kernels, for this implementation of attention."""
    if attention not in FLASH_ATTENTIONS:
        return default
    backward = _third_backward if attention == "flash_attention_3" else _second_backward

    def buffers(func: Any, args: tuple[Any, ...], out: Any) -> tuple[Buffer, ...]:
        if func is _VARLEN_BACKWARD:
            # Each sample's rows are rounded up, by less than a block.
            num_rows = args[1].shape[0] + _BLOCK_ROWS * (args[6].shape[0] - 1)
            sizes = backward(
                args[1], num_rows, args[1].shape[1], args[2].shape[1], args[2].shape[0]
            )
            return tuple(Buffer(size) for size in sizes)
        if func is _BACKWARD and attention == "flash_attention_3":
            batch, heads, length, _ = args[1].shape
            num_rows = batch * -(-length // _BLOCK_ROWS) * _BLOCK_ROWS
            sizes = backward(args[1], num_rows, heads, args[2].shape[1], 0)
            return tuple(Buffer(size) for size in sizes)
        if func is _FORWARD and attention == "flash_attention_3":
            return ()  # Unless it is told to it does not split the keys.
        return default(func, args, out)

    return buffers


_BLOCK_ROWS = 128
"""Number of queries in a block. FlashAttention 3 has smaller ones too."""


def _second_backward(
    q: torch.Tensor, num_rows: int, heads: int, key_heads: int, num_keys: int
) -> tuple[int, ...]:
    """Sizes of FlashAttention 2's backward buffers.

    They are softmax_d and dq_accum in fp32; dK and dV for every query head where heads are grouped.
    """
    buffers = [4 * num_rows * heads, 4 * num_rows * heads * _rounded_size(q.shape[-1])]
    if key_heads != heads:
        buffers += 2 * [num_keys * heads * q.shape[-1] * q.element_size()]
    return tuple(buffers)


def _third_backward(
    q: torch.Tensor, num_rows: int, heads: int, key_heads: int, _: int
) -> tuple[int, ...]:
    """Sizes of FlashAttention 3's backward buffers.

    They are softmax_d, lse_log2 and dq_accum, and dk_accum and dv_accum where heads are grouped; all in fp32.
    """
    per_head = 4 * num_rows * _rounded_size(q.shape[-1])
    buffers = [4 * num_rows * heads, 4 * num_rows * heads, heads * per_head]
    if key_heads != heads:
        buffers += 2 * [key_heads * per_head]
    return tuple(buffers)


def _rounded_size(head_size: int) -> int:
    step = 32 if head_size <= 128 else 64
    return -(-head_size // step) * step


def decompositions(spec: TraceSpec, sequence_length: int) -> dict[Any, Callable[..., Any]]:
    """Answers to what unpadding asks of values, for a batch whose every place holds a token."""
    if spec.attention not in FLASH_ATTENTIONS or spec.batching != "padded":
        return {}

    def every_place(tensor: torch.Tensor) -> Any:
        if not tensor.is_meta:
            return NotImplemented
        shape = (tensor.numel(), tensor.dim())
        return torch.empty(shape, dtype=torch.int64, device=tensor.device)

    def longest(tensor: torch.Tensor) -> Any:
        return sequence_length if tensor.is_meta and tensor.dtype is torch.int32 else NotImplemented

    return {aten.nonzero.default: every_place, aten._local_scalar_dense.default: longest}


@contextlib.contextmanager
def without_library(attention: str) -> Iterator[None]:
    """Let models be made and trained with an implementation that is not installed."""
    if attention not in FLASH_ATTENTIONS:
        yield
        return
    from transformers import PreTrainedModel, modeling_utils
    from transformers import modeling_flash_attention_utils as utils

    # Transformers' own unpadding is FlashAttention 2's.
    functions = (
        (flash, varlen, None, utils._pad_input, utils._unpad_input),
        (utils._lazy_define_process_function(varlen), dict),
    )
    is_packed = utils._is_packed_sequence
    falcon = sys.modules.get("transformers.models.falcon.modeling_falcon")
    # It imports the function where the library is installed, and calls it itself (transformers 5.23).
    called = [] if falcon is None else [(falcon, _CALL, getattr(utils, _CALL))]
    with replaced(
        [
            *called,
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
    """Stand in for flash_attn_func: (batch, length, heads, size), in 16 bits.

    Raises ValueError for heads or dtypes that FlashAttention refuses.
    """
    _require(q)
    query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out = flash_attention(query, key, value, dropout_p, causal, scale=softmax_scale)
    return out.transpose(1, 2)


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """Stand in for flash_attn_varlen_func: (tokens, heads, size), in 16 bits.

    Raises ValueError for heads or dtypes that FlashAttention refuses.
    """
    _require(q)
    padding = -q.shape[-1] % 8
    if padding:
        softmax_scale = softmax_scale if softmax_scale is not None else q.shape[-1] ** -0.5
        q, k, v = (F.pad(tensor, (0, padding)) for tensor in (q, k, v))
    starts = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    out = varlen_attention(q, k, v, *starts, dropout_p, causal, False, scale=softmax_scale)[0]
    return out[..., : out.shape[-1] - padding]


varlen_attention: Callable[..., Any] = aten._flash_attention_forward


def _require(q: torch.Tensor) -> None:
    if q.shape[-1] > LARGEST_HEAD:
        raise ValueError(f"FlashAttention has no heads of {q.shape[-1]}: up to {LARGEST_HEAD}")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"FlashAttention does not compute in {q.dtype}")
