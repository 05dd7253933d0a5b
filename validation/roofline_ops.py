"""Predicted against published times of PyTorch's own operations, forward and backward, on an A100.

Run: python -m validation.roofline_ops

The published milliseconds are medians of triton.testing.do_bench from Liger-Kernel's table
(linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv, provider huggingface, mode full,
version 0.2.1, NVIDIA A100-SXM4-80GB). The kernels are written down by hand from the operations that
those measurements run (those of rms_norm and rope are traced): for each the bytes of its inputs and
outputs (a gather: the rows it takes).

Constants were chosen with the rows marked `chosen with` (roofline.py's; with rope the rate of elements of 16
bits that are found by their strides, with rms_norm that of sums of unknown shape:
validation/kernels/fit_moving.py). Others test them. Sums of known shape have no figure from here: with them
rms_norm comes out 9 to 23 % too fast.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from autotune.catalogue.gpus import find_gpu
from autotune.common.dtypes import DTYPE_BYTES
from autotune.speed.roofline import Kernel, ceilings, kind_of, seconds
from autotune.worker.trace.tracker import Tracker

CHOSEN_WITH = ("geglu", "rms_norm", "rope, by length")


def op(name: str, nbytes: float, shape: tuple[float, ...] = (), dtype: str = "float32") -> Kernel:
    kind = kind_of(name)
    return Kernel(name=name, kind=kind, dtype=dtype, flops=0, bytes_moved=nbytes, shape=shape)


def matmul(m: int, n: int, k: int) -> Kernel:
    nbytes = 2 * (m * k + k * n + m * n)
    return Kernel(
        name="mm",
        kind="matmul",
        dtype="bfloat16",
        flops=2 * m * n * k,
        bytes_moved=nbytes,
        shape=(1, m, n, k),
    )


def traced(run: Callable[[], object], given: Sequence[torch.Tensor] = ()) -> list[Kernel]:
    """The kernels of what runs on `meta`; `given`: tensors that are there, so that their views are none."""
    tracker = Tracker("meta")
    for tensor in given:
        tracker.index_of(tensor)
    with torch.device("meta"), tracker:
        run()
    return [
        Kernel(
            name=kernel.name,
            kind=kind_of(kernel.name),
            dtype=kernel.dtype,
            flops=kernel.num_flops,
            bytes_moved=sum(kernel.tensor_bytes),
            shape=kernel.shape,
        )
        for kernel in tracker.recording.kernels
    ]


def rms_norm(width: int) -> list[Kernel]:
    """Llama's, bf16 input of 2,048 rows, fp32 weight."""
    with torch.device("meta"):
        norm = LlamaRMSNorm(width)
        x = torch.empty(2048, width, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.empty(2048, width)

    return traced(lambda: norm(x).backward(gradient))


def layer_norm(width: int) -> list[Kernel]:
    """fp32, 4,096 rows; weight and bias gradients accumulate."""
    n = 4096 * width * 4
    return [
        op("native_layer_norm", 2 * n, (4096, width)),
        op("native_layer_norm_backward", 5 * n, (4096, width)),
        op("add_", 12 * width),
        op("add_", 12 * width),
    ]


def cross_entropy_kernels(tokens: int, vocabulary: int, dtype: str) -> list[Kernel]:
    shape, logits_bytes = (tokens, vocabulary), tokens * vocabulary * DTYPE_BYTES[dtype]
    return [
        op("_log_softmax", 2 * logits_bytes, shape, dtype),
        op("nll_loss_forward", 0),
        op("nll_loss_backward", logits_bytes),
        op("_log_softmax_backward_data", 3 * logits_bytes, shape, dtype),
    ]


def cross_entropy(vocabulary: int) -> list[Kernel]:
    """fp32, 16,384 tokens; the logits' gradient accumulates over calls."""
    logits_bytes = 16384 * vocabulary * 4
    return [*cross_entropy_kernels(16384, vocabulary, "float32"), op("add_", 3 * logits_bytes)]


def lm_head_cross_entropy(tokens: int) -> list[Kernel]:
    """bf16, hidden 4,096, vocabulary 128,256; gradients accumulate."""
    hidden, vocabulary = 4096, 128256
    return [
        matmul(tokens, vocabulary, hidden),
        *cross_entropy_kernels(tokens, vocabulary, "bfloat16"),
        matmul(tokens, hidden, vocabulary),
        matmul(vocabulary, hidden, tokens),
        op("add_", 6 * tokens * hidden),
        op("add_", 6 * vocabulary * hidden),
    ]


def geglu(length: int) -> list[Kernel]:
    """A gated MLP 4096 -> 11008, bf16, 8 sequences; weight gradients accumulate."""
    tokens, hidden, inner = 8 * length, 4096, 11008
    n, weight = tokens * inner * 2, hidden * inner * 2
    products = [(tokens, inner, hidden)] * 2 + [(tokens, hidden, inner)]
    backward = [(m, k, n) for m, n, k in products] + [(n, k, m) for m, n, k in products]
    return [
        *(matmul(*sizes) for sizes in products + backward),
        op("gelu", 2 * n),
        op("gelu_backward", 3 * n),
        *(op("mul", 3 * n) for _ in range(3)),
        op("add", 3 * tokens * hidden * 2),
        *(op("add_", 3 * weight) for _ in range(3)),
    ]


def rope(length: int, width: int) -> list[Kernel]:
    """Llama's apply_rotary_pos_emb, bf16, 32 query and 8 key heads."""
    with torch.device("meta"):
        query, key = (
            torch.empty(1, length, heads, width // 32, dtype=torch.bfloat16)
            .transpose(1, 2)
            .requires_grad_()
            for heads in (32, 8)
        )
        cos = torch.empty(1, length, width // 32, dtype=torch.bfloat16)

    def run() -> None:
        out = apply_rotary_pos_emb(query, key, cos, cos)
        torch.autograd.grad(out, (query, key), (torch.empty_like(query), torch.empty_like(key)))

    return traced(run, (query, key, cos))


def embedding(vocabulary: int, width: int) -> list[Kernel]:
    """fp32, 16,384 tokens; makes its random gradient; the weight's gradient accumulates.

    PyTorch of 2024 gathered rows element by element.
    """
    n, weight = 16384 * width * 4, vocabulary * width * 4
    return [
        op("gather", 2 * n),
        op("randn_like", n),
        op("embedding_dense_backward", 2 * n + weight),
        op("add_", 3 * weight),
    ]


def by_vocabulary(*milliseconds: float) -> dict[int, float]:
    """Eight rows, from 1,024 on, doubling."""
    return {1024 << index: value for index, value in enumerate(milliseconds)}


ROPE_MS = {1024: 0.6059, 2048: 1.1327, 4096: 2.1762, 8192: 4.2483, 16384: 8.366}
"""Milliseconds of rope by length."""

PUBLISHED: list[tuple[str, Callable[[int], list[Kernel]], dict[int, float]]] = [
    (
        "cross_entropy",
        cross_entropy,
        {4096: 2.226, 8192: 3.5976, 16384: 6.8023, 32768: 15.486, 65536: 30.7781, 131072: 60.4383},
    ),
    (
        "rms_norm",
        rms_norm,
        {1024: 0.3177, 2048: 0.4904, 4096: 1.0114, 8192: 1.8622, 16384: 3.544, 32768: 6.9104},
    ),
    ("geglu", geglu, {1024: 27.9386, 2048: 54.5128, 4096: 110.9772, 8192: 220.9395}),
    (
        "layer_norm",
        layer_norm,
        {1024: 0.1188, 2048: 0.1966, 4096: 0.4314, 8192: 0.8296, 16384: 1.6213},
    ),
    (
        "lm_head + cross_entropy",
        lm_head_cross_entropy,
        {4096: 55.9668, 8192: 111.4547, 16384: 220.7836, 32768: 452.4713},
    ),
    (
        "rope, by length",
        lambda length: rope(length, 8192),
        ROPE_MS,
    ),
    (
        "rope, by width",
        lambda width: rope(2048, width),
        {512: 0.5161, 2048: 0.5289, 8192: 1.133},
    ),
    (
        "embedding, 768 wide",
        lambda vocabulary: embedding(vocabulary, 768),
        by_vocabulary(0.4538, 0.4741, 0.531, 0.6529, 0.8057, 0.9545, 1.196, 1.6426),
    ),
    (
        "embedding, 4096 wide",
        lambda vocabulary: embedding(vocabulary, 4096),
        by_vocabulary(1.5775, 1.7074, 1.9505, 2.4049, 3.1199, 4.3286, 5.0652, 7.4894),
    ),
]
"""Operation, its kernels by size, and size -> published milliseconds."""


def main() -> None:
    machine = ceilings(find_gpu("A100-SXM4-80GB"))
    errors: dict[bool, list[float]] = {True: [], False: []}
    print(f"{'operation':24} {'size':>7} {'published':>11} {'predicted':>11} {'error':>7}  bound")
    for name, kernels, rows in PUBLISHED:
        for size, published_ms in rows.items():
            time = seconds(kernels(size), machine)
            assert time is not None, "the A100's rates are known"
            error = time.total_seconds * 1e3 / published_ms - 1
            errors[name in CHOSEN_WITH].append(error)
            print(
                f"{name:24} {size:7} {published_ms:8.3f} ms {time.total_seconds * 1e3:8.3f} ms"
                f" {error:+7.1%}  {time.bound}"
            )
    for chosen_with, label in ((True, "chosen with"), (False, "held out")):
        sizes = [abs(error) for error in errors[chosen_with]]
        print(
            f"{label:12} {len(sizes):3} rows: median error {statistics.median(sizes):.1%},"
            f" median signed {statistics.median(errors[chosen_with]):+.1%},"
            f" worst {max(sizes):.1%}"
        )


if __name__ == "__main__":
    main()
