"""scaled_dot_product_attention by the kernel that a CUDA device would run, or a CPU.

Sources: pytorch v2.13 aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, sdp_utils_cpp.cpp and
attention.cpp beside it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from autotune.worker.autocast import HALF

aten = torch.ops.aten


def attention(
    compute_capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """scaled_dot_product_attention by the kernel that the card would run."""
    size = query.shape[-1]
    kernel = attention_kernel(
        compute_capability, query.dtype, size, value.shape[-1], attn_mask is not None
    )
    if _broadcasts_heads(query, key, enable_gqa=enable_gqa and kernel != "efficient"):
        kernel = "math"
    if kernel == "flash":
        return flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    if kernel == "math":
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    bias = _additive_mask(attn_mask, query, aligned=kernel == "efficient")
    if kernel == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, True, dropout_p, is_causal, False, scale=scale
        )[0]
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout_p, is_causal, scale=scale
    )[0]


def attention_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """By a CPU's one fused kernel, which has neither dropout nor a gradient of the mask; else unfused."""
    learns_mask = attn_mask is not None and attn_mask.requires_grad
    broadcasts = _broadcasts_heads(query, key, enable_gqa=enable_gqa)
    if dropout_p or learns_mask or broadcasts or query.shape[-1] != value.shape[-1]:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    mask = attn_mask if attn_mask is None else _as_added(attn_mask, query)
    out: torch.Tensor = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
    )[0]
    return out


def _broadcasts_heads(query: torch.Tensor, key: torch.Tensor, *, enable_gqa: bool) -> bool:
    """Fewer heads of keys, as Falcon's one: a plain product takes them, and no fused kernel does that is
    not told of groups. The efficient kernel knows none (torch 2.13 sdp_utils_cpp.h,
    check_batch_size_and_num_heads_dense; sdp_utils.cpp, can_use_mem_efficient_attention)."""
    return key.shape[1] != query.shape[1] and not enable_gqa


def attention_kernel(
    compute_capability: tuple[int, int],
    dtype: torch.dtype,
    head_size: int,
    value_head_size: int,
    has_mask: bool,
) -> str:
    """cudnn, flash, efficient or math: the first of PyTorch's order that can train with these inputs."""
    half = dtype in HALF and compute_capability >= (8, 0)
    same = head_size == value_head_size
    largest = max(head_size, value_head_size)
    if (
        half
        and largest <= _cudnn_limit(compute_capability, (head_size, value_head_size))
        and head_size % 8 == value_head_size % 8 == 0
    ):
        return "cudnn"
    small_card = compute_capability in ((8, 6), (8, 9), (12, 0), (12, 1))
    flash_size = head_size <= 256 and not (small_card and 192 < head_size <= 224)
    if half and same and not has_mask and flash_size:
        return "flash"
    if dtype in (torch.float16, torch.float32) or half:
        step = _efficient_alignment(compute_capability, dtype)
        if head_size % step == 0 and value_head_size % step == 0:
            return "efficient"
    return "math"


def _cudnn_limit(compute_capability: tuple[int, int], sizes: tuple[int, int]) -> int:
    """The largest head that cuDNN, 9.11 and later, is given; 0 where it is not preferred.

    Source: pytorch v2.13 sdp_utils.cpp, check_cudnn_tensor_shapes, check_prefer_cudnn_attention.
    """
    if compute_capability == (10, 0):
        return 192 if sizes == (192, 128) else 128
    return 256 if compute_capability == (9, 0) else 0


def _efficient_alignment(compute_capability: tuple[int, int], dtype: torch.dtype) -> int:
    """What the sizes of heads must be multiples of (minimum_gemm_alignment)."""
    on_tensor_cores = compute_capability >= (8, 0) or (
        compute_capability >= (7, 0) and dtype in HALF
    )
    if not on_tensor_cores:
        return 1
    return 8 if dtype in HALF else 4


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
) -> torch.Tensor:
    """Of (batch, heads, length, size); heads are padded to a multiple of eight."""
    size = query.shape[-1]
    padding = -size % 8
    if padding:
        query, key, value = (F.pad(t, (0, padding)) for t in (query, key, value))
        scale = scale if scale is not None else size**-0.5
    out: torch.Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return out[..., :size] if padding else out


MASK_ALIGNMENT = 8
"""Elements. Memory-efficient attention wants a mask's rows to begin at multiples of it, and copies a
mask whose rows do not (attention.cpp, preprocess_mask)."""


def _additive_mask(
    mask: torch.Tensor | None, query: torch.Tensor, *, aligned: bool
) -> torch.Tensor | None:
    """A boolean mask becomes one that is added, in the query's dtype, expanded to every head.

    Each layer makes its own, and keeps it for its backward pass.
    """
    if mask is None:
        return None
    mask = _as_added(mask, query)
    if aligned and any(stride % MASK_ALIGNMENT for stride in mask.stride()[:-1]):
        length = mask.shape[-1]
        mask = F.pad(mask, (0, MASK_ALIGNMENT - length % MASK_ALIGNMENT))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], mask.shape[-1])


def _as_added(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(mask, zero, float("-inf"))
