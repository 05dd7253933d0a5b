"""What CUDA's kernels allocate inside, and in which order, as PyTorch's CUDA build was seen to.

The figures are of torch 2.13.0+cu130 and bitsandbytes 0.50 under tools/no_card: each is the list of
blocks that torch.cuda.memory._snapshot() shows of one call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autotune.worker.build import quantize
from autotune.worker.trace.cuda import Device, Workspaces, device_choices
from autotune.worker.trace.kernel_buffers import hidden_buffers
from autotune.worker.trace.tracker import Tracker

A100 = Device(compute_capability=(8, 0), cublas_workspace_bytes=8_519_680, num_sms=108)
RTX_3090 = Device(compute_capability=(8, 6), cublas_workspace_bytes=8_519_680, num_sms=82)


def allocations(
    run: Callable[[], Any], device: Device = A100, *, are_kept: bool = True, **settings: Any
) -> list[int]:
    """Bytes of each storage that a call allocates, in that order."""
    workspaces = Workspaces(device.cublas_workspace_bytes, are_kept=are_kept)
    buffers = functools.partial(hidden_buffers, device.multiprocessors)
    tracker = Tracker("meta", hidden_buffers=buffers, at_launch=workspaces.at_launch, **settings)
    with device_choices(device), tracker:
        result = run()
    del result
    sizes = [tensor.size_bytes for tensor in tracker.recording.tensors]
    made = (event for event in tracker.recording.events if event >= 0)
    return [sizes[event] for event in made if sizes[event]]


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16, **more: Any) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", **more)


def test_dropout_makes_its_mask_first() -> None:
    tensor = on_meta(512, 768, dtype=torch.float32)
    made = allocations(lambda: F.dropout(tensor, 0.1))
    assert made[-2:] == [512 * 768, 512 * 768 * 4]


def _eight_bit(rows: int) -> torch.Tensor:
    return on_meta(rows, 64, dtype=torch.float8_e4m3fn)


PRODUCTS = {
    "rows": (lambda h: h @ h, [8192, 8_519_680]),
    "rows once more": (lambda h: (h @ h) @ h, 2 * [8192, 8_519_680]),
    "a vector": (lambda h: h @ h[0], [128, 8_519_680]),
    "two vectors": (lambda h: h[0] @ h[0], [2, 8_519_680]),
    "batches": (lambda h: h.view(4, 16, 64) @ h.view(4, 64, 16), [2048, 8_519_680]),
    "a bias": (lambda h: F.linear(h, h, h[0]), [8192, 2**20]),
    "a bias of one row": (lambda h: F.linear(h[:1], h, h[0]), [128, 2**20]),
    "a bias of two columns": (lambda h: F.linear(h, h[:2], h[0, :2]), [256, 2**20]),
    "a bias of one column": (lambda h: F.linear(h, h[:1], h[0, :1]), [128, 8_519_680]),
    "a bias of a row": (lambda h: torch.addmm(h[:1], h, h), [8192, 2**20]),
    "a bias multiplied": (lambda h: torch.addmm(h[0], h, h, beta=2), [8192, 8_519_680]),
    "a bias left out": (lambda h: torch.addmm(h[0], h, h, beta=0), [8192, 8_519_680]),
    "a bias with gaps": (lambda h: torch.addmm(h[:, 0], h, h), [8192, 8_519_680]),
    "a bias over one value": (
        lambda h: torch.addmm(h[0], h[:, :1], h[:1]), [8192, 8_519_680],
    ),
    "one value added": (lambda h: torch.addmm(h[0, :1], h, h), [8192, 8_519_680]),
    "a matrix added": (lambda h: torch.addmm(h, h, h), [8192, 2**20]),
    "a matrix multiplied": (lambda h: torch.addmm(h, h, h, beta=2), [8192, 2**20]),
    "a matrix left out": (lambda h: torch.addmm(h, h, h, beta=0), [8192, 8_519_680]),
    "a matrix of columns": (lambda h: torch.addmm(h.t(), h, h), [8192, 8_519_680]),
    "a matrix into itself": (lambda h: torch.addmm(h, h, h, out=h), [8_519_680]),
    "a matrix in float32": (
        lambda h: torch.addmm(h.float(), h.float(), h.float()), 4 * [16384] + [8_519_680],
    ),
    "no rows": (lambda h: h[:0] @ h, []),
    "8 bits": (
        lambda h: torch._scaled_mm(
            _eight_bit(64), _eight_bit(64).t(), h.new_empty((), dtype=torch.float32),
            h.new_empty((), dtype=torch.float32), out_dtype=h.dtype,
        ),
        [4096, 4096, 4, 4, 8192, 2**20],
    ),
    "a convolution": (lambda h: F.conv1d(h.view(2, 32, 64), h.view(32, 32, 4)), [7808]),
}  # fmt: skip
"""Products, and what each allocates: torch 2.15.0 for CUDA, asked under tools.no_card; with the size of an
RTX 3090's workspace."""


@pytest.mark.parametrize("name", PRODUCTS)
def test_since_torch_2_15_each_product_makes_its_workspace(name: str) -> None:
    product, made = PRODUCTS[name]
    assert allocations(lambda: product(on_meta(64, 64)), are_kept=False)[1:] == made
    # One that is kept is made once, by what is known to make one.
    kept = allocations(lambda: [product(on_meta(64, 64)), product(on_meta(64, 64))])
    assert kept.count(8_519_680) == (0 if name in ("8 bits", "a convolution") else 1)


@pytest.mark.parametrize(
    ("groups", "gradients"),
    [
        # Each channel by itself: of the weight and then of the input, by PyTorch's own kernels.
        (64, [64 * 4 * 2, 16 * 64 * 128 * 2]),
        (1, [16 * 64 * 128 * 2, 64 * 64 * 4 * 2]),
    ],
)
def test_a_convolution_copies_what_does_not_lie_in_order_first(
    groups: int, gradients: list[int]
) -> None:
    """In one dimension; tokens by channels, as Mamba has them, are turned round by a view."""
    tokens = on_meta(16, 128, 64, requires_grad=True)
    weight = on_meta(64, 64 // groups, 4, requires_grad=True)
    results = []

    def forward() -> None:
        turned = tokens.transpose(1, 2)
        results.append(F.conv1d(turned, weight, padding=3, groups=groups))

    copy, result = 16 * 64 * 128 * 2, 16 * 64 * 131 * 2
    workspace = A100.cublas_workspace_bytes
    assert [n for n in allocations(forward) if n != workspace][-2:] == [copy, result]
    (out,) = results
    gradient = torch.empty_like(out)
    made = allocations(lambda: torch.autograd.grad(out, (tokens, weight), gradient))
    assert [n for n in made if n != workspace][-3:] == [copy, *gradients]


def test_a_product_is_there_before_its_workspace() -> None:
    left, right = on_meta(64, 32), on_meta(32, 16)
    made = allocations(lambda: left @ right)
    assert made[-2:] == [64 * 16 * 2, A100.cublas_workspace_bytes]


def test_scales_are_made_before_the_codes() -> None:
    import bitsandbytes as bnb

    weight = on_meta(256, 128)
    made = allocations(
        lambda: bnb.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4"),
        decompositions=quantize.decompositions(),
    )
    assert made[made.index(256 * 128 // 64 * 4) + 1] == 256 * 128 // 2


def test_a_loss_of_16_bits_has_logarithms_of_16_bits() -> None:
    """Autocast converts what goes into nll_loss, and not the logits."""
    logits, target = on_meta(512, 1000), on_meta(512, dtype=torch.int64)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(logits, target)

    assert [size for size in allocations(loss) if size > 512] == [512 * 1000 * 2, 512 * 1000 * 4]


def test_autocast_casts_einsums_operands_in_their_order() -> None:
    """And those of other products from the last to the first: OFT's and LoRA's."""
    tokens, rotations = (
        on_meta(512, 8, 32, dtype=torch.float32),
        on_meta(8, 32, 32, dtype=torch.float32),
    )

    def casts(product: Callable[[], torch.Tensor]) -> list[int]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [size for size in allocations(product) if size in (cast_tokens, cast_rotations)][
                :2
            ]

    cast_tokens, cast_rotations = 2 * 512 * 8 * 32, 2 * 8 * 32 * 32
    rotated = casts(lambda: torch.einsum("...rk,rkc->...rc", tokens, rotations))
    assert rotated == [cast_tokens, cast_rotations]
    multiplied = casts(lambda: tokens.transpose(0, 1) @ rotations)
    assert multiplied == [cast_rotations, cast_tokens]


@pytest.mark.parametrize(
    ("shape", "device", "sums"),
    [
        ((2, 8, 512, 256), A100, [24_576 * 4, 25_165_824]),
        ((2, 8, 512, 160), A100, [24_576 * 4, 18_874_368]),
        ((1, 2, 512, 160), A100, [32_768, 6_291_456]),
        ((1, 2, 512, 160), RTX_3090, [32_768, 6_291_456]),
        ((4, 4, 128, 160), RTX_3090, [16_384, 3_145_728]),
        ((8, 32, 512, 64), A100, []),
    ],
)
def test_flash_attention_splits_the_keys_where_the_card_is_not_full(
    shape: tuple[int, int, int, int], device: Device, sums: list[int]
) -> None:
    batch, heads, length, size = shape
    query = on_meta(batch, length, heads, size).transpose(1, 2)

    def attend() -> Any:
        return F.scaled_dot_product_attention(query, query, query, is_causal=True)

    made = allocations(attend, device)
    kept = [2 * batch * heads * length * size, 4 * batch * heads * length]
    assert [size for size in made if size > 512] == kept + sums


def test_flash_attention_copies_what_does_not_lie_token_by_token() -> None:
    """The result has the queries' layout; what torch.cat has made of them lies head by head."""
    shape = 2, 8, 512, 64
    copied = {}
    for layout in ("tokens", "heads"):
        query = on_meta(*shape, requires_grad=True)
        if layout == "tokens":
            query = on_meta(2, 512, 8, 64, requires_grad=True).transpose(1, 2)
        made = allocations(
            lambda query=query: torch.autograd.grad(
                F.scaled_dot_product_attention(query, query, query, is_causal=True).sum(), query
            )
        )
        copied[layout] = made.count(2 * 8 * 512 * 64 * 2)
    assert copied["heads"] - copied["tokens"] >= 1


def test_flash_attention_copies_before_it_makes_gradients() -> None:
    query = on_meta(2, 8, 512, 64, requires_grad=True)
    key = on_meta(2, 2, 512, 64, requires_grad=True)

    def attend() -> Any:
        out = F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(out, (query, key), torch.empty_like(out))

    whole, of_a_key = 2 * 8 * 512 * 64 * 2, 2 * 2 * 512 * 64 * 2
    copies, gradients, for_each_head = [whole] * 2, [whole, of_a_key, of_a_key], [whole] * 2
    sums = [2 * 8 * 512 * 4, 2 * 8 * 512 * 64 * 4]
    made = [size for size in allocations(attend) if size > 512]
    assert made[-9:] == copies + gradients + sums + for_each_head
