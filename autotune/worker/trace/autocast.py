"""Applies torch.autocast as CUDA or a CPU does: its lists of functions, and its cache of cast weights.

On `meta` autocast does nothing. Its state here is that of the CPU (`torch.is_autocast_enabled("cpu")`), which
`meta` tensors ignore and which activation checkpointing saves and restores.

Source: pytorch v2.13 aten/src/ATen/autocast_mode.{h,cpp}.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from autotune.worker.trace.stand_ins import replaced

HALF = (torch.float16, torch.bfloat16)

_Call = tuple[tuple[Any, ...], dict[str, Any]]
Policy = Callable[["Autocast", Any, Any], _Call]
"""A function that casts another function's arguments."""


class Autocast:
    """Casts functions' arguments as a device's autocast would."""

    def __init__(self, policies: Mapping[Any, Policy]) -> None:
        self._policies = policies
        self._cast_weights: dict[int, torch.Tensor] = {}

    def cast(self, func: Any, args: Any, kwargs: Any) -> _Call:
        """Cast the arguments as the function gets them while autocast is on."""
        policy = self._policies.get(func)
        # Autocast leaves a function alone that is told where to put its result.
        is_told_where = kwargs.get("out") is not None
        if policy is None or is_told_where or not torch.is_autocast_enabled("cpu"):
            return args, kwargs
        return policy(self, args, kwargs)

    def lower(self, tensor: torch.Tensor) -> torch.Tensor:
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

    def stands_for_cudas(self) -> contextlib.AbstractContextManager[None]:
        """Let the CPU's state answer torch's questions about CUDA's autocast, within a `with` block.

        The cast weights are forgotten whenever autocast forgets its own.
        """
        clear, is_enabled, get_dtype = (
            torch.clear_autocast_cache,
            torch.is_autocast_enabled,
            torch.get_autocast_dtype,
        )

        def clear_both() -> None:
            self._cast_weights.clear()
            clear()

        return replaced(
            [
                (torch, "clear_autocast_cache", clear_both),
                (torch, "autocast", _AutocastOfMeta),
                (torch, "is_autocast_enabled", lambda *_: is_enabled("cpu")),
                (torch, "get_autocast_dtype", lambda *_: get_dtype("cpu")),
                (torch, "get_autocast_gpu_dtype", lambda: get_dtype("cpu")),
            ]
        )


class _AutocastOfMeta(torch.autocast):
    """A torch.autocast that takes `meta` and `cuda` for the CPU, whose state stands for CUDA's."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type in ("meta", "cuda") else device_type, *args, **kwargs)


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


def _cast_lower(autocast: Autocast, args: Any, kwargs: Any) -> _Call:
    return _map_tensors(autocast.lower, args, kwargs)


def _cast_list_lower(autocast: Autocast, args: Any, kwargs: Any) -> _Call:
    """Cast operands that C++ gets as a list, in its order (autocast_mode.h, cached_cast)."""
    (operands,), kwargs = _cast_lower(autocast, (args,), kwargs)
    return operands, kwargs


def _cast_float32(_: Autocast, args: Any, kwargs: Any) -> _Call:
    return _map_tensors(lambda t: t.float() if t.dtype in HALF else t, args, kwargs)


def _default_float32(_: Autocast, args: Any, kwargs: Any) -> _Call:
    """Name the result's dtype and leave the input as it is, as autocast does (fp32_set_opt_dtype)."""
    if args[0].dtype not in HALF or any(isinstance(a, torch.dtype) for a in args):
        return args, kwargs
    return args, {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}


def _cast_widest(_: Autocast, args: Any, kwargs: Any) -> _Call:
    dtypes: list[torch.dtype] = []

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        dtypes.append(tensor.dtype)
        return tensor

    _map_tensors(seen, args, kwargs)
    return _cast_float32(_, args, kwargs) if torch.float32 in dtypes else (args, kwargs)


# The functions of autocast_mode.h that Transformers' and PEFT's modelling code reaches.
_LOWER = (
    F.linear, F.prelu, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, F.conv1d, F.conv2d,
    F.conv3d,
    F.scaled_dot_product_attention,
    torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.addbmm, torch.baddbmm,
    torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.Tensor.mm,
    torch.Tensor.bmm, torch.Tensor.addmm, torch.Tensor.baddbmm,
    torch.linalg.vecdot,
)  # fmt: skip
_FLOAT32 = (
    F.layer_norm, F.rms_norm, F.group_norm, F.nll_loss, F.mse_loss,
    F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.softplus, F.binary_cross_entropy_with_logits,
    F.cosine_similarity, torch.cdist, torch.logsumexp, torch.log1p, torch.expm1, torch.Tensor.logsumexp,
    torch.Tensor.log1p, torch.Tensor.expm1,
    torch.pow, torch.rsqrt, torch.exp, torch.log, torch.norm, torch.reciprocal, torch.erfinv,
    torch.Tensor.pow, torch.Tensor.__pow__, torch.Tensor.rsqrt, torch.Tensor.exp, torch.Tensor.log,
    torch.Tensor.norm, torch.Tensor.reciprocal,
    torch.acos, torch.asin, torch.cosh, torch.sinh, torch.tan, torch.log2, torch.log10, torch.dist,
    torch.Tensor.acos, torch.Tensor.asin, torch.Tensor.cosh, torch.Tensor.sinh, torch.Tensor.tan,
    torch.Tensor.log2, torch.Tensor.log10, torch.Tensor.dist,
    torch.linalg.vector_norm, torch.linalg.matrix_norm, torch.linalg.norm,
    F.pdist, F.margin_ranking_loss, F.soft_margin_loss, F.multi_margin_loss, F.multilabel_margin_loss,
    F.hinge_embedding_loss, F.cosine_embedding_loss, F.triplet_margin_loss, F.poisson_nll_loss,
    # Made of pow, of reciprocal and of what enlarges pictures.
    torch.square, torch.Tensor.square, torch.Tensor.__rpow__, torch.Tensor.__rdiv__, F.interpolate,
)  # fmt: skip
_FLOAT32_RESULT = (
    F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, torch.cumsum, torch.cumprod,
    torch.prod, torch.sum, torch.Tensor.softmax, torch.Tensor.log_softmax, torch.Tensor.cumsum,
    torch.Tensor.cumprod, torch.Tensor.prod, torch.Tensor.sum,
)  # fmt: skip
# Not cat and stack, whose kernels take dtypes that differ.
_WIDEST = (
    torch.addcmul, torch.addcdiv, torch.atan2, torch.cross, torch.dot, torch.tensordot, torch.scatter_add,
    torch.Tensor.scatter_add,
)  # fmt: skip

_LOWER_ON_CUDA = (
    torch.mv, torch.addmv, torch.addr, torch.linalg.multi_dot, torch.Tensor.mv, torch.Tensor.addmv,
    torch.Tensor.addr,
)  # fmt: skip
_OF_CUDA: dict[Any, Policy] = {
    **dict.fromkeys((*_LOWER, *_LOWER_ON_CUDA), _cast_lower),
    torch.einsum: _cast_list_lower,
    **dict.fromkeys(_FLOAT32, _cast_float32),
    **dict.fromkeys(_FLOAT32_RESULT, _default_float32),
    **dict.fromkeys(_WIDEST, _cast_widest),
}

# A CPU leaves softmax, layer_norm and pow in 16 bits.
_FLOAT32_ON_CPU = (
    F.cross_entropy, F.nll_loss, F.mse_loss, F.binary_cross_entropy_with_logits,
)  # fmt: skip
_WIDEST_ON_CPU = (torch.cat, torch.stack)
_OF_CPU: dict[Any, Policy] = {
    **dict.fromkeys(_LOWER, _cast_lower),
    torch.einsum: _cast_lower,  # There only the product within is cast.
    **dict.fromkeys(_FLOAT32_ON_CPU, _cast_float32),
    **dict.fromkeys(_WIDEST_ON_CPU, _cast_widest),
}

POLICIES: dict[str, Mapping[Any, Policy]] = {"cuda": _OF_CUDA, "cpu": _OF_CPU}
"""Policies of functions, by backend."""
