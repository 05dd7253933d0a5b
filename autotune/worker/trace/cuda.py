"""Makes a trace on `meta` do what a device would, where it would do something else.

* which attention kernel `scaled_dot_product_attention` picks (autotune.worker.trace.sdpa);
* the fused kernels that CUDA picks and `meta` does not (dropout, RMS norm, softmax from float16 into
  float32); a CPU has none of them either;
* torch.autocast (autotune.worker.trace.autocast);
* the functions within nn.MultiheadAttention and others, which torch hands to a mode as a whole;
* cuBLAS' and cuBLASLt's workspaces.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from autotune.catalogue.gpu_rows import (
    MOST_THREADS_PER_SM,
    THREADS_PER_SM,
    USUAL_L2_BYTES,
    USUAL_NUM_SMS,
)
from autotune.catalogue.installed import makes_workspace_per_call
from autotune.worker.build import tensor_parallel
from autotune.worker.trace import meta_values, sdpa
from autotune.worker.trace.autocast import HALF, POLICIES, Autocast
from autotune.worker.trace.kernel_buffers import Multiprocessors
from autotune.worker.trace.tracker import Tracker, unrecorded
from autotune.worker.trace.tracker import in_backward as engine_is_at_work

aten = torch.ops.aten
META = torch.device("meta")
"""Device of a trace's tensors, each of which stands for one on the card."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The facts of a card that a trace must know."""

    compute_capability: tuple[int, int]
    cublas_workspace_bytes: int
    num_sms: int = USUAL_NUM_SMS
    """Number of multiprocessors. Liger's norms make a row of fp32 for each: 1.7 MB at
    a width of 4,096."""
    l2_bytes: int = USUAL_L2_BYTES
    """Bytes of its L2 cache."""
    backend: str = "cuda"
    """The backend whose kernels run: cuda or cpu."""

    @property
    def multiprocessors(self) -> Multiprocessors:
        num_threads = THREADS_PER_SM.get(self.compute_capability, MOST_THREADS_PER_SM)
        return Multiprocessors(self.num_sms, num_threads, self.compute_capability)


@contextlib.contextmanager
def device_choices(device: Device) -> Iterator[None]:
    """Send functions where the device would, and apply autocast's casts while it is on."""
    mode = _DeviceChoices(device)
    with mode.autocast.stands_for_cudas(), mode:
        yield


class _DeviceChoices(TorchFunctionMode):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.autocast = Autocast(POLICIES[device.backend])
        self._replaced = _FUNCTIONS[device.backend](device)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _MADE_OF_OTHERS:
            with self:
                return _function_by_function(func)(*args, **(kwargs or {}))
        args, kwargs = self.autocast.cast(func, args, kwargs or {})
        return self._replaced.get(func, func)(*args, **kwargs)


_MADE_OF_OTHERS = {
    F.multi_head_attention_forward, F.normalize, F.softmin, F.gumbel_softmax,
    F.local_response_norm, F.multilabel_soft_margin_loss, F.triplet_margin_with_distance_loss,
}  # fmt: skip
"""Functions in Python, some of whose parts are cast or sent elsewhere."""


@functools.cache
def _function_by_function(func: Any) -> Any:
    """A function of torch's that is written in Python, and does not hand itself to a mode as a whole.

    A mode is off within what it was handed: no function there would be cast, or sent anywhere.
    """
    asks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**func.__globals__, **dict.fromkeys(asks, lambda *_: False)}
    alike = FunctionType(func.__code__, names, func.__name__, func.__defaults__)
    alike.__kwdefaults__ = func.__kwdefaults__
    return alike


def _empty(*shape: Any, device: Any = None, **more: Any) -> torch.Tensor:
    """`torch.empty`, which takes no memory where what splits weights names meta: it asks for a stride.

    So does transformers 5.23, distributed/tensor_parallel.py _from_local_last_dim_shard. A trace's own
    tensors have the device META.
    """
    is_named = isinstance(device, str) and device == "meta"
    with unrecorded() if is_named and tensor_parallel.has_begun() else contextlib.nullcontext():
        return torch.empty(*shape, device=device, **more)


def _dropout(
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    if not training or p == 0.0:
        return input
    return torch.native_dropout(input, p, True)[0]


def _log_softmax(
    input: torch.Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Logarithms of a softmax as CUDA makes them, in the way of `_softmax`."""
    if dim is not None and dtype == torch.float32 and input.dtype == torch.float16:
        return torch._log_softmax(input, dim, True)
    return F.log_softmax(input, dim, _stacklevel, dtype)


def _softmax(
    input: torch.Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Softmax as CUDA does it: fp16 into fp32 without a copy; bf16 is converted first (SoftMax.cpp)."""
    assert dim is not None
    if dtype == torch.float32 and input.dtype == torch.float16:
        return torch._softmax(input, dim, True)
    return F.softmax(input, dim, _stacklevel, dtype)


def _cross_entropy(input: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Cross entropy under autocast, which knows only its second half.

    Logarithms are in 16 bits, and made float32 for the loss (LossNLL.cpp, cross_entropy_loss_prob_target
    aside; autocast_mode.h, nll_loss).
    """
    given = dict(zip(_CROSS_ENTROPY_ARGUMENTS, args, strict=False)) | kwargs
    of_classes = target.dtype is torch.int64 and not given.pop("label_smoothing", 0.0)
    if not (of_classes and input.dtype in HALF and torch.is_autocast_enabled("cpu")):
        return F.cross_entropy(input, target, *args, **kwargs)
    return F.nll_loss(F.log_softmax(input, min(input.dim() - 1, 1)).float(), target, **given)


_CROSS_ENTROPY_ARGUMENTS = tuple(inspect.signature(F.cross_entropy).parameters)[2:]


def _rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """Norm by CUDA's one kernel, where it has one (torch 2.13 layer_norm.cpp, rms_norm_symint)."""
    is_mixed = weight is not None and weight.dtype != input.dtype
    if is_mixed:
        return F.rms_norm(input, list(normalized_shape), weight, eps)
    normed: torch.Tensor = _RmsNorm.apply(input, normalized_shape, weight, eps)
    return normed


class _RmsNorm(torch.autograd.Function):
    """The norm with its gradients; `meta` has several operations in its place."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        shape: Sequence[int],
        weight: torch.Tensor | None,
        eps: float | None,
    ) -> torch.Tensor:
        normed, factors = meta_values.FUSED_RMS_NORM(x, shape, weight, eps)
        ctx.shape = shape
        ctx.save_for_backward(x, weight, factors)
        return cast(torch.Tensor, normed)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, factors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        of_x, of_weight = aten._fused_rms_norm_backward(
            gradient, x, ctx.shape, factors, weight, wanted
        )
        return of_x, None, of_weight, None


def _of_cuda(device: Device) -> dict[Any, Callable[..., Any]]:
    attention = functools.partial(sdpa.attention, device.compute_capability)
    return {
        F.scaled_dot_product_attention: attention,
        F.cross_entropy: _cross_entropy,
        F.dropout: _dropout,
        F.rms_norm: _rms_norm,
        F.softmax: _softmax,
        F.log_softmax: _log_softmax,
        torch.empty: _empty,
    }


def _of_cpu(_: Device) -> dict[Any, Callable[..., Any]]:
    return {F.scaled_dot_product_attention: sdpa.attention_on_cpu, torch.empty: _empty}


_FUNCTIONS = {"cuda": _of_cuda, "cpu": _of_cpu}
"""Makers of the functions that take others' places, by backend."""


_MATRIX_PRODUCTS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
    aten.mm.out, aten.addmm.out, aten.addmm.dtype_out,
    aten.mv.default, aten.addmv.default, aten.dot.default,
}  # fmt: skip
_WITH_BIAS = {aten.addmm.default, aten.addmm.out, aten.addmm.dtype_out}
"""Products that go to cuBLASLt where what they add to is a vector (ATen/native/cuda/Blas.cpp)."""
_OF_CUBLASLT = {aten._scaled_mm.default, aten._addmm_activation.default}
"""Products that cuBLASLt alone runs."""


WORKSPACES_ARE_KEPT = not makes_workspace_per_call()
_KEEPS_ONE_FOR_BOTH = hasattr(torch.backends.cuda, "cublaslt_workspace_size")
_CUBLASLT_BYTES = 2**20
"""Bytes of cuBLASLt's own workspace. It takes cuBLAS's (pytorch pull request 168175) in torch 2.12 to 2.14,
which have the function that is asked for here. On an H100 and an H200 torch 2.11 kept 1 MiB on each thread
that adds a bias to a product (studies/h200, studies/h100-80gb-hbm3)."""


def _goes_to_lt(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether cuBLASLt adds a product to something, as torch 2.15 for CUDA does under tools.no_card.

    It does to a bias as it is, in any dtype; to a matrix of 16 bits, multiplied or not, but not into itself.
    Products of one column, or over one value, go to cuBLAS.
    """
    added, left, right = args[:3]
    (rows, depth), columns = left.shape, right.shape[1]
    factor = kwargs.get("beta", 1)
    if depth == 1 or columns == 1:
        return False
    if added.shape[-1:] == (columns,) and added.numel() == columns:
        return bool(factor == 1) and added.is_contiguous()
    is_alike = added.shape == (rows, columns) and added.stride(1) == 1
    return is_alike and added.dtype in HALF and factor != 0 and kwargs.get("out") is not added


class Workspaces:
    """The workspaces of cuBLAS and cuBLASLt, which the process keeps or each call makes.

    Those that are kept: one for the forward pass's thread, one for autograd's, from their first use on.
    `are_kept`: None asks the installed torch.
    """

    def __init__(self, size_bytes: int, *, are_kept: bool | None = None) -> None:
        self._are_kept = WORKSPACES_ARE_KEPT if are_kept is None else are_kept
        has_its_own = size_bytes > 0 and not (self._are_kept and _KEEPS_ONE_FOR_BOTH)
        self._sizes_bytes = {"cublas": size_bytes, "cublaslt": has_its_own * _CUBLASLT_BYTES}
        self._made: set[tuple[str, bool]] = set()
        self.indices: list[int] = []

    def at_launch(
        self,
        tracker: Tracker,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        in_backward: bool | None = None,
    ) -> None:
        """Make the workspaces that the operation asks for.

        `in_backward`: by which thread, if not this one.
        """
        if not self._are_kept:
            self._make_for_call(tracker, func, args, kwargs)
            return
        if func not in _MATRIX_PRODUCTS:
            return
        thread = engine_is_at_work() if in_backward is None else in_backward
        self._make(tracker, "cublas", thread)
        if func in _WITH_BIAS and self._sizes_bytes["cublaslt"] and args[0].dim() == 1:
            self._make(tracker, "cublaslt", thread)

    def _make(self, tracker: Tracker, library: str, thread: bool) -> None:
        if (library, thread) not in self._made:
            self._made.add((library, thread))
            self.indices.append(tracker.record_forever(self._sizes_bytes[library]))

    def _make_for_call(
        self, tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        is_product = func in _MATRIX_PRODUCTS
        if not (is_product or func in _OF_CUBLASLT) or not self._sizes_bytes["cublas"]:
            return
        is_lt = _goes_to_lt(args, kwargs) if func in _WITH_BIAS else not is_product
        library = "cublaslt" if is_lt else "cublas"
        if all(each.numel() for each in args[:2]):
            tracker.record_and_free(self._sizes_bytes[library])
