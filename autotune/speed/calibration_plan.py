"""The kernels that a calibration times: what training launches, in sizes between which it mostly is.

Each is a roofline.Kernel, which says all that is needed to run it: ATen's name, dtype and shape. `usual_plan`
takes some two minutes on a card; `tiny_plan` runs each kind once, to try the program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

from autotune.catalogue.gpus import Gpu
from autotune.speed.attention import BACKWARD_PRODUCTS, KERNELS
from autotune.speed.moving import BYTES_OF_4_BIT_WEIGHT
from autotune.speed.roofline import Kernel, kind_of

HALF_BYTES, SINGLE_BYTES = 2, 4
PAGEABLE = "copy_host_pageable"
"""Name of copies from memory that is not pinned: they are timed to be shown, and no prediction has them."""

_TOKENS = (1024, 2048, 4096, 8192)
LARGE = (
    *((1024, 1024), (2048, 2048), (4096, 4096), (8192, 2048)),
    *((4096, 12288), (12288, 4096), (1536, 8192), (65536, 2048)),
)
"""(n, k) of products with many columns: projections, feed-forward, logits."""
THIN = tuple(
    pair
    for wide, narrow in ((1024, 32), (4096, 32), (2048, 64), (8192, 64), (4096, 128))
    for pair in ((narrow, wide), (wide, narrow))
)
"""(n, k) of the products of adapters, down and up."""
_FEW = ((1024, 1024), (4096, 4096), (12288, 4096), (2048, 8192))
_SHORT = ((1024, 1024), (4096, 4096), (8192, 2048), (2048, 8192), (64, 4096), (4096, 64))
PRODUCTS = (
    *((m, *nk) for m, nk in itertools.product(_TOKENS, (*LARGE, *THIN))),
    *((m, *nk) for m, nk in itertools.product((128, 256, 512), _SHORT)),
    *((m, *nk) for m, nk in itertools.product((1, 8, 32, 64), _FEW)),
)
"""(m, n, k) in the 16-bit type that the card trains in."""
FEW_PRODUCTS = (
    *((2048, 2048, 2048), (4096, 4096, 4096), (8192, 4096, 4096)),
    *((4096, 12288, 4096), (4096, 64, 4096), (512, 4096, 4096)),
)
"""The same in other types."""
ATTENTION = (
    *((1, 256, 8), (8, 256, 16), (32, 256, 32), (1, 512, 16), (4, 512, 16), (16, 512, 32)),
    *((1, 1024, 8), (2, 1024, 32), (8, 1024, 16), (16, 1024, 32), (1, 2048, 16), (2, 2048, 32)),
    *((8, 2048, 16), (8, 2048, 32), (1, 4096, 8), (1, 4096, 32), (4, 4096, 32)),
    *((1, 8192, 16), (1, 8192, 32), (2, 8192, 32)),
)
"""(samples, tokens, heads), causal, with as many heads of keys."""
HEADS = (64, 128)
_FEW_TOKENS = (512, 2048, 8192)
"""Tokens of samples of the kernels that are timed beside the card's usual one."""
_NUM_ELEMENTS = 2**26
"""Elements of a large tensor: with two such tensors even the largest L2 cache holds little."""
BYTES_PER_ELEMENT = {
    "add": 3 * HALF_BYTES,
    "mul": 2 * HALF_BYTES,
    "_to_copy": HALF_BYTES + SINGLE_BYTES,
    "clone": 2 * HALF_BYTES,
    "cat": 2 * HALF_BYTES,
    "native_dropout": 2 * HALF_BYTES + 1,
    "native_dropout_backward": 2 * HALF_BYTES + 1,
    "embedding": 2 * HALF_BYTES,
    "index_select": 2 * HALF_BYTES,
    "dequantize_4bit": BYTES_OF_4_BIT_WEIGHT,
    "copy_host": HALF_BYTES,
    PAGEABLE: HALF_BYTES,
}
"""Bytes that a kernel reads and writes for each element: of a product by a row that all rows share, those of
the rows; of a gather, the rows that it takes and writes."""
FURTHER_BYTES_PER_ELEMENT = {
    "_fused_adamw_": 7 * SINGLE_BYTES,
    "embedding_dense_backward": 2 * HALF_BYTES,
    "adamw_bnb_8bit": 2 * HALF_BYTES + HALF_BYTES + 4,
    "paged_adamw_8bit": 2 * HALF_BYTES + HALF_BYTES + 4,
    "liger_rms_norm": 2 * HALF_BYTES,
    "liger_swiglu": 3 * HALF_BYTES,
}
"""The same of kernels that no rate is fitted to: they are timed to be held against their predictions. Of a
fused AdamW: weight, moments and gradient, in several launches. Of an AdamW in 8 bits: a weight read and
written, its gradient read, two moments of a byte read and written."""
_COUNTED = {"mul": 1, "clone": 1, "cat": 1, "adamw_bnb_8bit": 2, "paged_adamw_8bit": 2}
"""Kernels that instructions may bound, and what they count for each element: see roofline.Kernel.shape."""
_FUSED = ("_fused_adamw_",)
_CHUNK, _MOST_CHUNKS, _ROUND = 65536, 320, 2048
"""Elements of a chunk of a launch over lists of tensors, its most chunks, elements that a block loads at once
(torch 2.13 native/cuda/MultiTensorApply.cuh)."""
ROWWISE = {
    "_softmax": 2,
    "_softmax_backward_data": 3,
    "native_layer_norm": 2,
    "native_layer_norm_backward": 3,
}
"""Kernels that go row by row, and how many tensors they read and write."""
_ROWS = ((262144, 256), (65536, 1024), (16384, 4096), (8192, 8192))
FURTHER_ROWWISE = {"_log_softmax": 2, "_log_softmax_backward_data": 3, "liger_cross_entropy": 3}
_VOCABULARY = (2048, 32000)
_LARGE_VOCABULARY = (2048, 128256)


def usual_plan(gpu: Gpu) -> list[Kernel]:
    """Kernels to time on a card."""
    half = "bfloat16" if gpu.has_bfloat16 else "float16"
    others = ("float16", "tf32", "float32") if gpu.has_bfloat16 else ("float32",)
    return [
        *(product(half, *shape) for shape in PRODUCTS),
        *(product(dtype, *shape) for dtype in others for shape in FEW_PRODUCTS),
        *_attention_kernels(gpu, half, [(*shape, dim) for dim in HEADS for shape in ATTENTION]),
        *moving_kernels(half, _NUM_ELEMENTS, (*_ROWS, _VOCABULARY)),
    ]


def tiny_plan(dtype: str) -> list[Kernel]:
    """A kernel of each kind, of next to no size."""
    shape = (2, 64, 4, 32)
    return [
        product(dtype, 64, 32, 48),
        product("float32", 64, 64, 64),
        attention_kernel("flash", dtype, *shape, is_backward=False),
        attention_kernel("flash", dtype, *shape, is_backward=True),
        *moving_kernels(dtype, 2**14, ((64, 256), (8, 2048))),
    ]


def further_plan(gpu: Gpu) -> list[Kernel]:
    """Kernels to time on a card beside `usual_plan`, which the fits do not see."""
    half = "bfloat16" if gpu.has_bfloat16 else "float16"
    return list(_further_kernels(half, _NUM_ELEMENTS, (_VOCABULARY, _LARGE_VOCABULARY)))


def tiny_further_plan(dtype: str) -> list[Kernel]:
    """A kernel of each kind of `further_plan`, of next to no size."""
    return list(_further_kernels(dtype, 2**14, ((8, 2048),)))


def _further_kernels(
    half: str, num_elements: int, rows: Iterable[tuple[int, int]]
) -> Iterator[Kernel]:
    yield from (moving_kernel(name, half, num_elements) for name in FURTHER_BYTES_PER_ELEMENT)
    for count, length in rows:
        for name, num_tensors in FURTHER_ROWWISE.items():
            yield _of_rows(name, num_tensors * SINGLE_BYTES, count, length)


def product(dtype: str, m: int, n: int, k: int) -> Kernel:
    """A matrix product m x k by k x n."""
    size_bytes = SINGLE_BYTES if dtype in ("tf32", "float32") else HALF_BYTES
    return Kernel(
        name="mm",
        kind="matmul",
        dtype=dtype,
        flops=2 * m * n * k,
        bytes_moved=size_bytes * (m * k + k * n + m * n),
        shape=(1, m, n, k),
    )


def attention_kernel(
    family: str,
    dtype: str,
    samples: int,
    tokens: int,
    heads: int,
    head_dim: int,
    *,
    is_backward: bool,
) -> Kernel:
    """Causal attention by one of attention.KERNELS."""
    products = BACKWARD_PRODUCTS if is_backward else 1.0
    passes = 2 if is_backward else 1
    return Kernel(
        name=f"_scaled_dot_product_{family}_attention{'_backward' if is_backward else ''}",
        kind="attention",
        dtype=dtype,
        flops=products * 2 * samples * heads * tokens**2 * head_dim,
        bytes_moved=passes * HALF_BYTES * 4 * samples * tokens * head_dim * heads,
        shape=(samples, heads, heads, tokens, tokens, head_dim, 1),
    )


def _attention_kernels(
    gpu: Gpu, dtype: str, shapes: Iterable[tuple[int, int, int, int]]
) -> Iterator[Kernel]:
    """Both directions of the kernels that PyTorch has for the card: FlashAttention 2 needs an Ampere."""
    capability = gpu.compute_capability or (0, 0)
    families = ["flash"] if capability >= (8, 0) else []
    families += ["cudnn"] if capability[0] in (9, 10) else []
    families += ["efficient"]
    assert set(families) <= set(KERNELS)
    for family, shape, is_backward in itertools.product(families, shapes, (False, True)):
        if family == families[0] or shape[1] in _FEW_TOKENS:
            yield attention_kernel(family, dtype, *shape, is_backward=is_backward)


def moving_kernels(
    half: str, num_elements: int, rows: Iterable[tuple[int, int]]
) -> Iterator[Kernel]:
    """Kernels that memory and instructions bound."""
    n = num_elements
    yield from (moving_kernel(name, half, n) for name in BYTES_PER_ELEMENT)
    yield moving_kernel("add", half, n // 4)
    yield _of_rows("mean", SINGLE_BYTES, n // 1024, 1024)
    for count, length in rows:
        for name, num_tensors in ROWWISE.items():
            yield _of_rows(name, num_tensors * SINGLE_BYTES, count, length)


def moving_kernel(name: str, dtype: str, num_elements: int) -> Kernel:
    """A kernel of BYTES_PER_ELEMENT, or of the further ones, on tensors of that many elements.

    A fused AdamW takes several launches, of which the kernel is one: all of as many chunks, where these
    are enough for a whole one.
    """
    count, kind = 1, "copy_host" if name.startswith("copy_host") else kind_of(name)
    shape: tuple[int, ...] = (num_elements * _COUNTED[name],) if name in _COUNTED else ()
    if name in _FUSED:
        kind, num_chunks = "lists", math.ceil(num_elements / _CHUNK)
        count = max(num_chunks // _MOST_CHUNKS, 1)
        num_chunks = min(num_chunks, _MOST_CHUNKS)
        num_elements = min(num_elements, num_chunks * _CHUNK)
        shape = (num_chunks, math.ceil(min(num_elements, _CHUNK) / _ROUND), 1)
    return Kernel(
        name=name,
        kind=kind,
        dtype="float32" if name in _FUSED else dtype,
        flops=0,
        bytes_moved=_bytes_per_element(name) * num_elements,
        shape=shape,
        count=count,
    )


def num_elements_of(kernel: Kernel) -> int:
    """Elements of the tensors of a kernel that moving_kernel made."""
    return round(kernel.count * kernel.bytes_moved / _bytes_per_element(kernel.name))


def _bytes_per_element(name: str) -> float:
    return {**BYTES_PER_ELEMENT, **FURTHER_BYTES_PER_ELEMENT}[name]


def _of_rows(name: str, bytes_per_element: int, rows: int, row_length: int) -> Kernel:
    return Kernel(
        name=name,
        kind=kind_of(name),
        dtype="float32",
        flops=0,
        bytes_moved=bytes_per_element * rows * row_length,
        shape=(rows, row_length),
    )
