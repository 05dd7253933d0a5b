"""Kernels of a calibration's plan as calls: operands with random values, and a function that launches one.

Random values, because numbers that do not toggle draw less power, and a card then clocks higher. Products
take second operands in turn, so that none is in the L2 cache, as in a step of training.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from autotune.speed.calibration_plan import PAGEABLE, num_elements_of
from autotune.speed.roofline import Kernel

aten = torch.ops.aten

Launch = Callable[[int], Any]
"""Launches a kernel; the number says which turn it is."""

_MOST_WEIGHTS = 64
_MOST_WEIGHT_BYTES = 2**30
_L2_TIMES = 2
"""Second operands in turn hold at least so many times the L2 cache, as far as the limits above go."""
_WIDTH = 4096
"""Columns of tensors whose rows are gathered or multiplied by one that all share."""
_BLOCK = 64
"""Weights of a block of 4-bit codes, bitsandbytes' own default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """A kernel ready to be launched."""

    launch: Launch
    num_weights: int = 1
    """Turns after which the operands are the first ones again."""
    in_graph: bool = True
    """Whether a CUDA graph may hold it."""


def operation_of(kernel: Kernel, device: torch.device) -> Operation:
    """The operands of a kernel and how to launch it.

    Raises torch.OutOfMemoryError, ImportError for a library that is not here, RuntimeError for what
    the device has no kernel for.
    """
    if kernel.kind == "matmul":
        return _product(kernel, device)
    if kernel.kind == "attention":
        return _attention(kernel, device)
    if len(kernel.shape) == 2:
        return _by_row(kernel, device)
    return _moving(kernel, device)


def _dtype(kernel: Kernel) -> torch.dtype:
    return torch.float32 if kernel.dtype == "tf32" else getattr(torch, kernel.dtype)


def _product(kernel: Kernel, device: torch.device) -> Operation:
    _, m, n, k = map(int, kernel.shape)
    dtype = _dtype(kernel)
    weight_bytes = n * k * dtype.itemsize
    wanted = math.ceil(_L2_TIMES * _l2_bytes(device) / weight_bytes)
    num_weights = max(1, min(wanted, _MOST_WEIGHTS, _MOST_WEIGHT_BYTES // weight_bytes))
    x = torch.randn(m, k, device=device, dtype=dtype)
    weights = [torch.randn(n, k, device=device, dtype=dtype) for _ in range(num_weights)]
    is_tf32 = kernel.dtype == "tf32"

    def launch(turn: int) -> Any:
        with _float32_as(is_tf32):
            return F.linear(x, weights[turn % num_weights])

    return Operation(launch=launch, num_weights=num_weights)


@contextlib.contextmanager
def _float32_as(is_tf32: bool) -> Any:
    """Let float32 products go through tensor cores, or not."""
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if is_tf32 else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _l2_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def _attention(kernel: Kernel, device: torch.device) -> Operation:
    samples, heads, key_heads, tokens, _, head_dim, _ = map(int, kernel.shape)
    dtype = _dtype(kernel)

    def made(num_heads: int) -> torch.Tensor:
        # As a model has them: tokens before heads in memory.
        shape = (samples, tokens, num_heads, head_dim)
        return torch.randn(shape, device=device, dtype=dtype).transpose(1, 2)

    q, k, v = made(heads), made(key_heads), made(key_heads)
    family = next(name for name in _ATTENTION if f"_{name}_attention" in kernel.name)
    if device.type != "cuda":
        family = "cpu"
    forward, backward = _ATTENTION[family]
    if not kernel.name.endswith("_backward"):
        return Operation(launch=lambda _: forward(q, k, v))
    results, gradient = forward(q, k, v), made(heads)
    return Operation(launch=lambda _: backward(gradient, q, k, v, results))


_Backward = Callable[..., Any]
_ATTENTION: dict[str, tuple[Callable[..., Any], _Backward]] = {
    "flash": (
        lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True),
        lambda g, q, k, v, r: aten._scaled_dot_product_flash_attention_backward(
            g, q, k, v, r[0], r[1], r[2], r[3], r[4], r[5], 0.0, True, r[6], r[7]
        ),
    ),
    "cudnn": (
        lambda q, k, v: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True),
        lambda g, q, k, v, r: aten._scaled_dot_product_cudnn_attention_backward(
            g, q, k, v, r[0], r[1], r[6], r[7], None, r[2], r[3], r[4], r[5], 0.0, True
        ),
    ),
    "efficient": (
        lambda q, k, v: aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, True
        ),
        lambda g, q, k, v, r: aten._scaled_dot_product_efficient_attention_backward(
            g, q, k, v, None, r[0], r[1], r[2], r[3], 0.0, [True, True, True, False], True
        ),
    ),
    "cpu": (
        lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True),
        lambda g, q, k, v, r: aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, r[0], r[1], 0.0, True
        ),
    ),
}
"""Calls by family: forward of queries, keys and values; backward of these, the gradient and forward's results
(torch 2.13 aten/src/ATen/native/native_functions.yaml)."""


def _by_row(kernel: Kernel, device: torch.device) -> Operation:
    rows, length = map(int, kernel.shape)
    x = torch.randn(rows, length, device=device)
    if kernel.name == "mean":
        return Operation(launch=lambda _: x.mean(-1))
    if kernel.name == "liger_cross_entropy":
        return _liger_cross_entropy(x)
    if kernel.name in _SOFTMAX:
        return Operation(launch=lambda _: _SOFTMAX[kernel.name](x, -1, False))
    if kernel.name.endswith("_backward_data"):
        result = _SOFTMAX[kernel.name.removesuffix("_backward_data")](x, -1, False)
        backward = getattr(aten, kernel.name)
        return Operation(launch=lambda _: backward(x, result, -1, torch.float32))
    weight = torch.randn(length, device=device)
    _, mean, rstd = aten.native_layer_norm(x, [length], weight, weight, 1e-5)
    if kernel.name == "native_layer_norm":
        return Operation(launch=lambda _: aten.native_layer_norm(x, [length], weight, weight, 1e-5))
    gradient = torch.randn_like(x)
    # Without the weight's gradient: norms of models sum over rows in another kernel.
    mask = [True, False, False]
    return Operation(
        launch=lambda _: aten.native_layer_norm_backward(
            gradient, x, [length], mean, rstd, weight, weight, mask
        )
    )


_SOFTMAX = {"_softmax": aten._softmax, "_log_softmax": aten._log_softmax}


def _liger_cross_entropy(x: torch.Tensor) -> Operation:
    """Loss and gradient, which is written over the logits."""
    from liger_kernel.transformers.functional import liger_cross_entropy

    target = torch.randint(x.shape[1], (len(x),), device=x.device)
    # Without a gradient to come, Liger computes none.
    x.requires_grad_()

    def launch(_: int) -> Any:
        with torch.enable_grad():
            return liger_cross_entropy(x, target)

    return Operation(launch=launch, in_graph=False)


def _moving(kernel: Kernel, device: torch.device) -> Operation:
    return _MOVING[kernel.name](num_elements_of(kernel), _dtype(kernel), device)


def _flat(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(n, device=device, dtype=dtype)


def _wide(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    width = min(_WIDTH, n // 4)
    return torch.randn(n // width, width, device=device, dtype=dtype)


def _add(n: int, dtype: torch.dtype, device: torch.device) -> Operation:
    a, b = _flat(n, dtype, device), _flat(n, dtype, device)
    return Operation(launch=lambda _: a + b)


def _mul(n: int, dtype: torch.dtype, device: torch.device) -> Operation:
    x = _wide(n, dtype, device)
    weight = _flat(x.shape[1], dtype, device)
    return Operation(launch=lambda _: x * weight)


def _to_copy(n: int, dtype: torch.dtype, device: torch.device) -> Operation:
    x = _flat(n, torch.float32, device)
    return Operation(launch=lambda _: x.to(dtype))


def _clone(n: int, dtype: torch.dtype, device: torch.device) -> Operation:
    """Heads moved behind tokens, as after attention."""
    x = _wide(n, dtype, device)
    heads = x.view(x.shape[0], -1, min(128, x.shape[1])).transpose(0, 1)
    return Operation(launch=lambda _: heads.clone(memory_format=torch.contiguous_format))


def _cat(n: int, dtype: torch.dtype, device: torch.device) -> Operation:
    """Halves of heads changed, as rope does."""
    x = _wide(n, dtype, device)
    left, right = x.view(1, len(x), -1, min(128, x.shape[1])).transpose(1, 2).chunk(2, dim=-1)
    negative = -right
    return Operation(launch=lambda _: torch.cat((negative, left), dim=-1))


def _dropout(n: int, dtype: torch.dtype, device: torch.device) -> Operation:
    x = _flat(n, dtype, device)
    return Operation(launch=lambda _: aten.native_dropout(x, 0.1, True))


def _dropout_backward(n: int, dtype: torch.dtype, device: torch.device) -> Operation:
    gradient = _flat(n, dtype, device)
    _, mask = aten.native_dropout(gradient, 0.1, True)
    return Operation(launch=lambda _: aten.native_dropout_backward(gradient, mask, 1 / 0.9))


def _embedding(n: int, dtype: torch.dtype, device: torch.device) -> Operation:
    table = _wide(n, dtype, device)
    ids = torch.randint(len(table), (len(table),), device=device)
    return Operation(launch=lambda _: F.embedding(ids, table))


def _embedding_backward(n: int, dtype: torch.dtype, device: torch.device) -> Operation:
    """The gradient of a table of as many rows as there are tokens."""
    gradient = _wide(n, dtype, device)
    rows = len(gradient)
    ids = torch.randint(rows, (rows,), device=device)
    # Its sort asks the host for memory.
    return Operation(
        launch=lambda _: aten.embedding_dense_backward(gradient, ids, rows, -1, False),
        in_graph=False,
    )


def _index_select(n: int, dtype: torch.dtype, device: torch.device) -> Operation:
    table = _wide(n, dtype, device)
    ids = torch.randint(len(table), (len(table),), device=device)
    return Operation(launch=lambda _: table.index_select(0, ids))


def _fused_adamw(n: int, dtype: torch.dtype, device: torch.device) -> Operation:
    weight, gradient = _flat(n, dtype, device), _flat(n, dtype, device)
    moments = [torch.zeros_like(weight)], [torch.zeros_like(weight)]
    steps = [torch.ones((), device=device)]
    settings = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
    return Operation(
        launch=lambda _: aten._fused_adamw_(
            [weight], [gradient], *moments, [], steps, **settings, amsgrad=False, maximize=False
        )
    )


def _adamw_8bit(n: int, dtype: torch.dtype, device: torch.device, *, is_paged: bool) -> Operation:
    """A whole step of one parameter."""
    from autotune.worker.uncompiled import uncompiled

    if device.type != "cuda":
        raise NotImplementedError("bitsandbytes' kernel of it needs CUDA")
    with uncompiled():
        from bitsandbytes import optim

    parameter = torch.nn.Parameter(_flat(n, dtype, device))
    parameter.grad = _flat(n, dtype, device)
    kind: Any = optim.PagedAdamW8bit if is_paged else optim.AdamW8bit
    step = kind([parameter], lr=1e-5).step
    return Operation(launch=lambda _: step(), in_graph=False)


def _liger_rms_norm(n: int, dtype: torch.dtype, device: torch.device) -> Operation:
    from liger_kernel.transformers.functional import liger_rms_norm

    x = _wide(n, dtype, device)
    weight = _flat(x.shape[1], dtype, device)
    return Operation(launch=lambda _: liger_rms_norm(x, weight, 1e-5), in_graph=False)


def _liger_swiglu(n: int, dtype: torch.dtype, device: torch.device) -> Operation:
    from liger_kernel.transformers.functional import liger_swiglu

    gate, up = _wide(n, dtype, device), _wide(n, dtype, device)
    return Operation(launch=lambda _: liger_swiglu(gate, up), in_graph=False)


def _dequantize(n: int, dtype: torch.dtype, device: torch.device) -> Operation:
    from autotune.worker.uncompiled import uncompiled

    with uncompiled():
        from bitsandbytes import functional

    weight = _wide(n, dtype, device)
    codes, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=_BLOCK)
    return Operation(launch=lambda _: functional.dequantize_4bit(codes, state), in_graph=False)


def _copy(n: int, dtype: torch.dtype, device: torch.device, *, is_pinned: bool) -> Operation:
    """A copy to the card and back in turns: its rate is the mean of both directions."""
    is_cuda = device.type == "cuda"
    here = torch.empty(n, dtype=dtype, pin_memory=is_pinned and is_cuda)
    there = torch.empty(n, dtype=dtype, device=device)

    def launch(turn: int) -> Any:
        return (
            there.copy_(here, non_blocking=True)
            if turn % 2
            else here.copy_(there, non_blocking=True)
        )

    return Operation(launch=launch, num_weights=2, in_graph=False)


_MOVING: dict[str, Callable[[int, torch.dtype, torch.device], Operation]] = {
    "add": _add,
    "mul": _mul,
    "_to_copy": _to_copy,
    "clone": _clone,
    "cat": _cat,
    "native_dropout": _dropout,
    "native_dropout_backward": _dropout_backward,
    "embedding": _embedding,
    "index_select": _index_select,
    "_fused_adamw_": _fused_adamw,
    "embedding_dense_backward": _embedding_backward,
    "adamw_bnb_8bit": lambda n, dtype, device: _adamw_8bit(n, dtype, device, is_paged=False),
    "paged_adamw_8bit": lambda n, dtype, device: _adamw_8bit(n, dtype, device, is_paged=True),
    "liger_rms_norm": _liger_rms_norm,
    "liger_swiglu": _liger_swiglu,
    "dequantize_4bit": _dequantize,
    "copy_host": lambda n, dtype, device: _copy(n, dtype, device, is_pinned=True),
    PAGEABLE: lambda n, dtype, device: _copy(n, dtype, device, is_pinned=False),
}
