"""What a CUDA device would do where a trace on `meta` does something else.

* which attention kernel `scaled_dot_product_attention` picks, and what it allocates inside;
* the fused kernels that CUDA has and `meta` has not (dropout, half-precision softmax);
* torch.autocast's lists for CUDA, and its cache of cast weights;
* buffers that kernels allocate and free inside one call.

Sources: pytorch v2.13 aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, .../flash_attn/flash_api.cpp,
aten/src/ATen/native/transformers/attention.cpp,
aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu, Indexing.cu and SoftMax.cu,
aten/src/ATen/autocast_mode.{h,cpp}.

Not modelled: cuDNN attention's own workspace (no closed form: taken to be flash attention's),
cub's temporary storage (in an embedding's backward it is free again before the partial sums are made).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from autotune.worker.tracker import Buffer, Tracker, in_backward

aten = torch.ops.aten

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What a trace must know of the card."""

    compute_capability: tuple[int, int]
    cublas_workspace_bytes: int
    num_sms: int = 108
    """Liger's norms make a row of fp32 for each: 1.7 MB at a width of 4,096. Of an A100 unless known."""


def attention_kernel(
    device: Device, dtype: torch.dtype, head_size: int, value_head_size: int, has_mask: bool
) -> str:
    """cudnn, flash, efficient or math: the first of PyTorch's order that can train with these inputs."""
    capability = device.compute_capability
    half = dtype in HALF and capability >= (8, 0)
    same = head_size == value_head_size
    if (
        half
        and same
        and capability in ((9, 0), (10, 0))
        and head_size % 8 == 0
        and head_size <= 128
    ):
        return "cudnn"
    small_card = capability in ((8, 6), (8, 9), (12, 0), (12, 1))
    flash_size = head_size <= 256 and not (small_card and 192 < head_size <= 224)
    if half and same and not has_mask and flash_size:
        return "flash"
    if dtype in (torch.float16, torch.float32) or half:
        step = _efficient_alignment(capability, dtype)
        if head_size % step == 0 and value_head_size % step == 0:
            return "efficient"
    return "math"


def _efficient_alignment(capability: tuple[int, int], dtype: torch.dtype) -> int:
    """What the sizes of heads must be multiples of (minimum_gemm_alignment)."""
    on_tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and dtype in HALF)
    if not on_tensor_cores:
        return 1
    return 8 if dtype in HALF else 4


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
        return tuple(Buffer(size) for size in _flash_backward_buffers(args[1], args[2]))
    if func is aten._scaled_dot_product_cudnn_attention_backward.default:
        return tuple(Buffer(size) for size in _flash_backward_buffers(args[1], args[1]))
    if func is aten._scaled_dot_product_efficient_attention_backward.default:
        return tuple(Buffer(size) for size in _efficient_backward_buffers(args[1]))
    return ()


class CudaChoices(TorchFunctionMode):
    """Send functions where CUDA would send them; apply autocast's casts while autocast is on.

    The state of autocast is that of the CPU (`torch.is_autocast_enabled("cpu")`), which `meta` tensors
    ignore and which activation checkpointing saves and restores.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._cast_weights: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        policy = _AUTOCAST.get(func)
        # Autocast leaves a function alone that is told where to put its result.
        if policy is not None and "out" not in kwargs and torch.is_autocast_enabled("cpu"):
            args, kwargs = policy(self, args, kwargs)
        replacement = _REPLACED.get(func)
        if replacement is not None:
            return replacement(self, *args, **kwargs)
        return func(*args, **kwargs)

    def lower_precision(self, tensor: torch.Tensor) -> torch.Tensor:
        """Cast as autocast casts; fp32 leaf weights that train are cast once per region."""
        dtype = torch.get_autocast_dtype("cpu")
        if tensor.dtype == dtype or tensor.dtype not in (torch.float32, *HALF):
            return tensor
        cacheable = tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf
        if not cacheable or tensor._is_view():
            return tensor.to(dtype)
        cast = self._cast_weights.get(id(tensor))
        if cast is None:
            cast = self._cast_weights[id(tensor)] = tensor.to(dtype)
        return cast

    def clear_cast_weights(self) -> None:
        self._cast_weights.clear()

    def attention(
        self,
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
            self._device, query.dtype, size, value.shape[-1], attn_mask is not None
        )
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
        if enable_gqa and key.shape[1] != query.shape[1]:
            repeats = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )[0]


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
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, float("-inf"))
    if aligned and any(stride % MASK_ALIGNMENT for stride in mask.stride()[:-1]):
        length = mask.shape[-1]
        mask = F.pad(mask, (0, MASK_ALIGNMENT - length % MASK_ALIGNMENT))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], mask.shape[-1])


def _dropout(
    _: CudaChoices,
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    if not training or p == 0.0:
        return input
    return torch.native_dropout(input, p, True)[0]


def _softmax(
    _: CudaChoices,
    input: torch.Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """CUDA softmaxes fp16 into fp32 without a copy; bf16 is converted first (SoftMax.cpp)."""
    assert dim is not None
    if dtype == torch.float32 and input.dtype == torch.float16:
        return _HalfToFloatSoftmax.apply(input, dim)
    return F.softmax(input, dim, _stacklevel, dtype)


class _HalfToFloatSoftmax(torch.autograd.Function):
    """`_softmax` with half_to_float, which `meta` refuses: fp16 in, fp32 out, fp16 gradient."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, dim: int) -> torch.Tensor:
        out = torch.empty_like(input, dtype=torch.float32)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (out,) = ctx.saved_tensors
        gradient = torch.empty_like(out, dtype=torch.float16)
        torch.empty_like(out)  # `tmp = grad * output`, as in hidden_buffers
        return gradient, None


_REPLACED: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: CudaChoices.attention,
    F.dropout: _dropout,
    F.softmax: _softmax,
}

_Call = tuple[tuple[Any, ...], dict[str, Any]]


def _map_tensors(change: Callable[[torch.Tensor], torch.Tensor], args: Any, kwargs: Any) -> _Call:
    def mapped(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        if isinstance(value, (list, tuple)):
            return type(value)(mapped(item) for item in value)
        return value

    # C++ leaves the order of a call's casts to the compiler: GCC goes from the last to the first.
    cast_kwargs = {name: mapped(kwargs[name]) for name in reversed(kwargs)}
    cast_args = [mapped(argument) for argument in reversed(args)]
    return tuple(reversed(cast_args)), cast_kwargs


def _cast_lower(mode: CudaChoices, args: Any, kwargs: Any) -> _Call:
    return _map_tensors(mode.lower_precision, args, kwargs)


def _cast_float32(_: CudaChoices, args: Any, kwargs: Any) -> _Call:
    return _map_tensors(lambda t: t.float() if t.dtype in HALF else t, args, kwargs)


def _default_float32(_: CudaChoices, args: Any, kwargs: Any) -> _Call:
    """Autocast names the result's dtype and leaves the input as it is (fp32_set_opt_dtype)."""
    if args[0].dtype not in HALF or any(isinstance(a, torch.dtype) for a in args):
        return args, kwargs
    return args, {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}


def _cast_widest(_: CudaChoices, args: Any, kwargs: Any) -> _Call:
    dtypes: list[torch.dtype] = []

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        dtypes.append(tensor.dtype)
        return tensor

    _map_tensors(seen, args, kwargs)
    return _cast_float32(_, args, kwargs) if torch.float32 in dtypes else (args, kwargs)


# The functions of autocast_mode.h that Transformers' and PEFT's modelling code reaches.
_LOWER = (
    F.linear, F.conv1d, F.conv2d, F.scaled_dot_product_attention,
    torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.addbmm, torch.baddbmm, torch.einsum,
    torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.Tensor.mm,
    torch.Tensor.bmm, torch.Tensor.addmm, torch.Tensor.baddbmm,
)  # fmt: skip
_FLOAT32 = (
    F.layer_norm, F.rms_norm, F.group_norm, F.cross_entropy, F.nll_loss, F.mse_loss,
    F.softplus, F.binary_cross_entropy_with_logits, F.cosine_similarity,
    torch.pow, torch.rsqrt, torch.exp, torch.log, torch.norm, torch.reciprocal, torch.erfinv,
    torch.Tensor.pow, torch.Tensor.__pow__, torch.Tensor.rsqrt, torch.Tensor.exp, torch.Tensor.log,
    torch.Tensor.norm, torch.Tensor.reciprocal,
)  # fmt: skip
_FLOAT32_RESULT = (
    F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, torch.cumsum, torch.cumprod,
    torch.prod, torch.sum, torch.Tensor.softmax, torch.Tensor.log_softmax, torch.Tensor.cumsum,
    torch.Tensor.cumprod, torch.Tensor.prod, torch.Tensor.sum,
)  # fmt: skip
_WIDEST = (torch.cat, torch.stack, torch.addcmul, torch.addcdiv, torch.cross, torch.dot)

_AUTOCAST: dict[Any, Callable[[CudaChoices, Any, Any], _Call]] = {
    **dict.fromkeys(_LOWER, _cast_lower),
    **dict.fromkeys(_FLOAT32, _cast_float32),
    **dict.fromkeys(_FLOAT32_RESULT, _default_float32),
    **dict.fromkeys(_WIDEST, _cast_widest),
}

_MATRIX_PRODUCTS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
    aten.mm.out, aten.addmm.out, aten.addmm.dtype_out,
    aten.convolution.default, aten.convolution_backward.default,
}  # fmt: skip


class Workspaces:
    """One cuBLAS workspace for the thread of the forward pass, one for autograd's, made at first use."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._made: set[bool] = set()
        self.indices: list[int] = []

    def before(self, tracker: Tracker, func: Any) -> None:
        if func in _MATRIX_PRODUCTS:
            thread = in_backward()
            if thread not in self._made:
                self._made.add(thread)
                self.indices.append(tracker.record_forever(self._size_bytes))


class _AutocastOfMeta(torch.autocast):
    """torch.autocast that takes `meta` and `cuda` for the CPU, whose state stands for CUDA's."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type in ("meta", "cuda") else device_type, *args, **kwargs)


@contextlib.contextmanager
def cuda_choices(device: Device) -> Iterator[CudaChoices]:
    """CudaChoices for a block; torch's questions about CUDA's autocast are answered by the CPU's state.

    The cast weights are forgotten whenever autocast forgets its own.
    """
    mode = CudaChoices(device)
    clear, is_enabled, get_dtype, get_gpu_dtype, autocast = (
        torch.clear_autocast_cache,
        torch.is_autocast_enabled,
        torch.get_autocast_dtype,
        torch.get_autocast_gpu_dtype,
        torch.autocast,
    )

    def clear_both() -> None:
        mode.clear_cast_weights()
        clear()

    torch.clear_autocast_cache = clear_both
    torch.autocast = _AutocastOfMeta  # type: ignore[misc]
    torch.is_autocast_enabled = lambda *_: is_enabled("cpu")
    torch.get_autocast_dtype = lambda *_: get_dtype("cpu")
    torch.get_autocast_gpu_dtype = lambda: get_dtype("cpu")
    try:
        with mode:
            yield mode
    finally:
        torch.autocast = autocast  # type: ignore[misc]
        torch.clear_autocast_cache = clear
        torch.is_autocast_enabled = is_enabled
        torch.get_autocast_dtype = get_dtype
        torch.get_autocast_gpu_dtype = get_gpu_dtype
