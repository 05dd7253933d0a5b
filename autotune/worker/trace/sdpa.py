"""Runs scaled_dot_product_attention by the kernel that a CUDA device would choose, or a CPU.

The choice is that of the installed PyTorch where it is built for CUDA, else of one built for CUDA 13: older
ones come with a cuDNN whose attention PyTorch does not prefer.

Sources: pytorch v2.13 and v2.14 aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, sdp_utils_cpp.h and
attention.cpp beside it; studies/attention-kernels, what PyTorch's CUDA build itself chose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.catalogue.installed import OTHER_ATTENTION_SINCE
from autotune.worker.build import context_parallel
from autotune.worker.trace.autocast import HALF

aten = torch.ops.aten

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
PREFERS_CUDNN = torch.version.cuda is None or int(torch.version.cuda.split(".")[0]) >= 13
"""Whether cuDNN's attention comes first on the cards that have it: with the cuDNN before 9.15.1 that wheels
for CUDA 12 ship with it comes last (check_prefer_cudnn_attention, pytorch/pytorch#169849)."""


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
    """Stand in for scaled_dot_product_attention, by the kernel that the card would run."""
    call = Call(
        query=query,
        key=key,
        value=value,
        mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
    )
    kernel = attention_kernel(compute_capability, call)
    context_parallel.check_kernel(kernel, query)
    if kernel == "flash":
        return flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    if kernel == "math":
        with MaskAddedInPlace():
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
            query, key, value, bias, call.trains, dropout_p, is_causal, False, scale=scale
        )[0]
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, call.trains, dropout_p, is_causal, scale=scale
    )[0]


class MaskAddedInPlace(TorchDispatchMode):
    """A mode that adds the mask to the scores where they are, as the unfused kernel does.

    That kernel does so unless a dispatch mode is on (attention.cpp, _scaled_dot_product_attention_math:
    areAnyTensorSubclassLike).
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is aten.add.Tensor:
            return aten.alias.default(aten.add_.Tensor(*args))
        return func(*args, **(kwargs or {}))


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
    """Stand in for attention on a CPU.

    Its one fused kernel has neither dropout nor a gradient of the mask; else attention is unfused.
    """
    learns_mask = attn_mask is not None and attn_mask.requires_grad
    broadcasts = key.shape[1] != query.shape[1] and not enable_gqa
    if TORCH_VERSION >= OTHER_ATTENTION_SINCE:
        broadcasts = broadcasts and key.shape[1] != 1
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The arguments by which PyTorch chooses a kernel: tensors of (batch, heads, length, size)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False

    @property
    def trains(self) -> bool:
        """Whether there will be a backward pass."""
        tensors = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

    @property
    def lengths(self) -> tuple[int, int]:
        """Lengths of the queries and of the keys."""
        return self.query.shape[2], self.key.shape[2]

    @property
    def sizes(self) -> tuple[int, int]:
        """Sizes of the heads of queries and keys, and of values."""
        return self.query.shape[3], self.value.shape[3]

    def is_half(self, capability: tuple[int, int]) -> bool:
        """Whether all is in 16 bits that the card's kernels take (check_dtypes_low_precision)."""
        dtype = self.query.dtype
        return dtype is torch.float16 or (dtype in HALF and capability >= (8, 0))

    def suits_all(self, torch_version: tuple[int, ...], *, groups: bool) -> bool:
        """Whether the call is as every fused kernel wants it.

        Rows of neighbours lie side by side in memory, and there is a head of keys for each of the queries
        unless the kernel knows groups and is asked for them. Falcon has one head of keys without asking:
        before 2.14 only a plain product takes it (check_last_dim_stride_equals_1_dense,
        check_batch_size_and_num_heads_dense).
        """
        tensors = [t for t in (self.query, self.key, self.value, self.mask) if t is not None]
        heads, key_heads, value_heads = (t.shape[1] for t in (self.query, self.key, self.value))
        serves = heads == key_heads or (key_heads == 1 and torch_version >= OTHER_ATTENTION_SINCE)
        if groups and self.enable_gqa:
            serves = heads % key_heads == 0
        return (
            all(tensor.dim() == 4 for tensor in (self.query, self.key, self.value))
            and all(tensor.stride(-1) == 1 for tensor in tensors)
            and key_heads == value_heads
            and serves
        )


def attention_kernel(
    compute_capability: tuple[int, int],
    call: Call,
    torch_version: tuple[int, ...] = TORCH_VERSION,
) -> str:
    """Choose the kernel: the first of cudnn, flash, efficient and math that can run the call.

    The order is PyTorch's.
    """
    if PREFERS_CUDNN and _cudnn_can(compute_capability, call, torch_version):
        return "cudnn"
    if _flash_can(compute_capability, call, torch_version):
        return "flash"
    return "efficient" if _efficient_can(compute_capability, call, torch_version) else "math"


_CUDNN_SIZES: dict[int, Callable[[int, int], bool]] = {
    9: lambda size, value_size: max(size, value_size) <= 256,
    10: lambda size, value_size: max(size, value_size) <= 128 or (size, value_size) == (192, 128),
}
"""Sizes of heads that cuDNN's attention takes before 2.14, by the major number of those cards that prefer it
(check_prefer_cudnn_attention, check_cudnn_tensor_shapes)."""


def _cudnn_takes(capability: tuple[int, int], call: Call, torch_version: tuple[int, ...]) -> bool:
    """Whether cuDNN takes heads of these sizes (since 2.14 check_cudnn_d256_bprop_head_dim, too)."""
    if capability[0] not in _CUDNN_SIZES:
        return False
    if torch_version < OTHER_ATTENTION_SINCE:
        return _CUDNN_SIZES[capability[0]](*call.sizes)
    if not call.trains:
        return max(call.sizes) <= 256
    return max(call.sizes) <= 128 or call.sizes in ((192, 128), (256, 256))


def _cudnn_can(capability: tuple[int, int], call: Call, torch_version: tuple[int, ...]) -> bool:
    """Whether cuDNN can run the call, as can_use_cudnn_attention says.

    Since 2.13 cuDNN drops sixteenths only: of 0.1 it is not asked. On 10.0 torch 2.14 alone, which brings
    cuDNN 9.24, keeps a single query from it.
    """
    length, key_length = call.lengths
    drops = call.dropout_p > 0
    sixteenths = 16 * call.dropout_p
    return (
        _cudnn_takes(capability, call, torch_version)
        and all(size % 8 == 0 for size in call.sizes)
        and call.is_half(capability)
        and call.suits_all(torch_version, groups=True)
        and not (call.mask is not None and call.mask.requires_grad)
        and key_length > 1
        and not (
            length == 1
            and (drops or (capability[0] == 10 and torch_version == OTHER_ATTENTION_SINCE))
        )
        and (torch_version < (2, 13) or sixteenths == int(sixteenths))
    )


def _flash_can(capability: tuple[int, int], call: Call, torch_version: tuple[int, ...]) -> bool:
    """Whether flash attention can run the call, as can_use_flash_attention says.

    Training with the largest heads lacks shared memory on some cards
    (check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120).
    """
    size, value_size = call.sizes
    length, key_length = call.lengths
    small_card = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    trains_none = size > 192 and (size <= 224 or call.dropout_p > 0)
    return (
        capability >= (8, 0)
        and call.is_half(capability)
        and call.mask is None
        and size == value_size <= 256
        and not (small_card and call.trains and trains_none)
        and not (call.is_causal and length != key_length)
        and call.suits_all(torch_version, groups=True)
    )


def _efficient_can(capability: tuple[int, int], call: Call, torch_version: tuple[int, ...]) -> bool:
    """Whether memory-efficient attention can run the call, as can_use_mem_efficient_attention says."""
    step = _efficient_alignment(capability, call.query.dtype)
    return (
        (call.query.dtype is torch.float32 or call.is_half(capability))
        and all(size % step == 0 for size in call.sizes)
        and call.suits_all(torch_version, groups=torch_version >= OTHER_ATTENTION_SINCE)
    )


def _efficient_alignment(compute_capability: tuple[int, int], dtype: torch.dtype) -> int:
    """The number that sizes of heads must be multiples of (minimum_gemm_alignment)."""
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
    """Run flash attention on (batch, heads, length, size); heads are padded to a multiple of eight."""
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
"""Number of elements of which a mask's rows must begin at multiples: memory-efficient attention copies a mask
whose rows do not (attention.cpp, preprocess_mask)."""


def _additive_mask(
    mask: torch.Tensor | None, query: torch.Tensor, *, aligned: bool
) -> torch.Tensor | None:
    """Make a boolean mask one that is added, in the query's dtype, expanded to every head.

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
