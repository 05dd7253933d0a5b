"""The shape of attention's time, worked out by hand, and published times that no fit has seen."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from autotune.catalogue.gpus import catalogue, find_gpu
from autotune.speed.attention import (
    BESIDE,
    KERNELS,
    REGIMES,
    AttentionRates,
    attention_seconds,
    columns,
    instruction_peak,
    rates_of,
    regime_of,
    share_at_half_rate,
    table,
)
from autotune.speed.moving import KERNEL_TAIL_SECONDS
from autotune.speed.origin import RatesFrom

# 1 TFLOP/s on 10 SMs: a column of keys for 64 rows of 128 takes 4 x 64 x 128 / 1e12 s.
RATES = AttentionRates(
    flop_per_second=((64.0, 5e11), (128.0, 1e12)),
    start_columns=0,
    alone=0.5,
    blend=1,
    chain_seconds=0,
    num_sms=10,
    rates_from=RatesFrom.THIS_CARD,
    spread={},
)
COLUMN_SECONDS = 4 * 64 * 128 / 1e12


@pytest.mark.parametrize(
    ("queries", "keys", "window", "is_causal", "expected"),
    [
        # Four blocks of 64 rows, all columns each.
        (256, 256, 0, False, (4, 4 * 256, 256)),
        # 64 + 128 + 192 + 256.
        (256, 256, 0, True, (4, 640, 256)),
        # A window of 64: the first block sees 64, the others 128.
        (256, 256, 64, True, (4, 64 + 3 * 128, 128)),
        # A window that is longer than the sequence is none.
        (256, 256, 512, True, (4, 640, 256)),
        # A row more is a block more.
        (257, 257, 0, False, (5, 5 * 257, 257)),
        # The last query sees the last key: 192 + 64 and 192 + 128.
        (128, 320, 0, True, (2, 256 + 320, 320)),
    ],
)
def test_columns(
    queries: int, keys: int, window: int, is_causal: bool, expected: tuple[float, ...]
) -> None:
    assert tuple(map(float, columns(queries, keys, window, is_causal))) == expected


def test_busy_and_the_longest_block() -> None:
    shape = {"query_length": 256, "key_length": 256, "head_dim": 128, "is_causal": False}
    one = attention_seconds(RATES, batch=1, heads=1, **shape)
    # 4 x 256 columns over all SMs, and 256 of one block at half of an SM's time.
    assert one == pytest.approx((1024 + 256 * 10 * 0.5) * COLUMN_SECONDS)
    many = attention_seconds(RATES, batch=100, heads=10, **shape)
    assert many == pytest.approx((1000 * 1024 + 256 * 10 * 0.5) * COLUMN_SECONDS)
    # The backward pass has two and a half times the products.
    backward = attention_seconds(RATES, batch=1, heads=1, **shape, is_backward=True)
    assert backward == pytest.approx(2.5 * one)


@pytest.mark.parametrize(
    ("kernel", "key_heads", "moved_bytes", "num_kernels"),
    [
        # 2 x 8 x 256 x 64 values of the queries: two reads of 16 bits, 32 cleared, 32 read, 16 written.
        ("flash", 8, 262144 * 14, 2),
        # Gradients of keys and values: 8 heads are read, 2 written.
        ("flash", 2, 262144 * (14 + 2 * 2) + 2 * 65536 * 2, 4),
        ("cudnn", 2, 262144 * (14 + 2 * 2) + 2 * 65536 * 2, 4),
        # Added up in float32: cleared, read and written in 16 bits.
        ("flash3", 2, 262144 * 14 + 2 * 65536 * 10, 6),
    ],
)
def test_kernels_beside_the_backward_pass(
    kernel: str, key_heads: int, moved_bytes: int, num_kernels: int
) -> None:
    shape = {"batch": 2, "heads": 8, "query_length": 256, "key_length": 256, "head_dim": 64}
    rates = dataclasses.replace(
        RATES,
        beside=BESIDE[kernel],
        beside_bytes_per_second=1e12,
        sums_bytes_per_second=1e12,
    )
    alone, both = (
        float(attention_seconds(each, **shape, is_backward=True, key_heads=key_heads))
        for each in (RATES, rates)
    )
    expected = moved_bytes / 1e12 + num_kernels * KERNEL_TAIL_SECONDS
    assert both - alone == pytest.approx(expected)


def test_only_backward_passes_in_several_kernels_have_kernels_beside() -> None:
    a100 = find_gpu("NVIDIA A100-SXM4-80GB")
    of = {
        (kernel, is_backward): rates_of(a100, kernel, is_backward=is_backward)
        for kernel in KERNELS
        for is_backward in (False, True)
    }
    with_some = {key for key, rates in of.items() if rates is not None and rates.beside is not None}
    # cudnn and flash3 run as flash there.
    assert with_some == {(kernel, True) for kernel in ("flash", "flash3", "cudnn", "flex")}
    flash = of["flash", True]
    assert flash is not None
    # torch sums heads' gradients by at::sum, which reaches less of the bandwidth.
    assert flash.sums_bytes_per_second < flash.beside_bytes_per_second


def test_a_block_s_start_weighs_more_in_short_sequences() -> None:
    starting = dataclasses.replace(RATES, start_columns=256, alone=0)
    ratio = [
        attention_seconds(
            starting,
            batch=8,
            heads=8,
            query_length=length,
            key_length=length,
            head_dim=128,
            is_causal=False,
        )
        / (64 * length**2 * 4 * 128 / 1e12)
        for length in (256, 4096)
    ]
    assert ratio == pytest.approx([2, 1 + 256 / 4096])


def test_rates_by_size_of_a_head() -> None:
    # Linear between, flat above, by the root below.
    assert RATES.rate(np.array([32.0, 64.0, 96.0, 128.0, 256.0])) == pytest.approx(
        [5e11 / 2**0.5, 5e11, 7.5e11, 1e12, 1e12]
    )


def test_shapes_come_as_arrays() -> None:
    lengths = np.array([512, 1024, 2048])
    together = attention_seconds(
        RATES, batch=2, heads=8, query_length=lengths, key_length=lengths, head_dim=128
    )
    alone = [
        float(
            attention_seconds(
                RATES, batch=2, heads=8, query_length=length, key_length=length, head_dim=128
            )
        )
        for length in lengths
    ]
    assert together == pytest.approx(alone)


def test_regimes() -> None:
    kinds = regime_of(
        RATES, batch=np.array([100, 1, 100]), heads=4, query_length=np.array([256, 512, 512])
    )
    assert [REGIMES[kind] for kind in kinds] == ["short", "few blocks", "many blocks"]


# --- cards


@pytest.mark.parametrize("gpu", catalogue(), ids=lambda gpu: gpu.slug)
def test_every_card_with_a_peak_has_every_kernel(gpu: object) -> None:
    card = find_gpu(gpu.slug)  # type: ignore[attr-defined]
    for kernel in KERNELS:
        for is_backward in (False, True):
            rates = rates_of(card, kernel, dtype="float16", is_backward=is_backward)
            if "float16" not in card.peak_flop_per_second:
                assert rates is None
                continue
            assert rates is not None
            peak = instruction_peak(card, kernel, "float16")
            assert peak is not None
            assert all(0.1 * peak < rate < 1.05 * peak for _, rate in rates.flop_per_second)
            assert set(rates.spread) == set(REGIMES)


@pytest.mark.parametrize(
    "row", table()["kernel"], ids=lambda row: " ".join(map(str, row.values()))[:60]
)
def test_every_row_of_the_table_is_a_card_and_kernel_that_uses_it(row: dict[str, object]) -> None:
    card = find_gpu(str(row["card"]))
    rates = rates_of(card, str(row["kernel"]), is_backward=row["direction"] == "backward")
    assert rates is not None
    assert rates.rates_from is RatesFrom.THIS_CARD
    assert rates.start_columns == pytest.approx(row["start_columns"])


def test_where_rates_come_from() -> None:
    for name, kernel, expected in (
        ("A100-SXM4-80GB", "flash", RatesFrom.THIS_CARD),
        ("A100-PCIE-40GB", "flash", RatesFrom.CARDS_LIKE_IT),
        ("A100-SXM4-80GB", "flex", RatesFrom.CARDS_LIKE_IT),
        ("T4", "efficient", RatesFrom.DATASHEET),
    ):
        rates = rates_of(find_gpu(name), kernel, dtype="float16")
        assert rates is not None
        assert rates.rates_from is expected, (name, kernel)


def test_ampere_s_instructions_on_later_cards() -> None:
    # Half of Hopper's 989 TFLOP/s, a quarter of the B200's 2,250; GeForce Blackwell has nothing else.
    h100, b200, rtx_5090 = (find_gpu(name) for name in ("H100 80GB HBM3", "B200", "rtx-5090"))
    assert instruction_peak(h100, "efficient", "bfloat16") == pytest.approx(989e12 / 2)
    assert instruction_peak(b200, "flash", "bfloat16") == pytest.approx(2250e12 / 4)
    assert instruction_peak(h100, "flash3", "bfloat16") == pytest.approx(989e12)
    assert instruction_peak(rtx_5090, "flash", "bfloat16") == pytest.approx(209.5e12)


def test_the_memory_efficient_kernel_gains_only_by_sms_and_clock() -> None:
    def rate(name: str, is_backward: bool) -> float:
        rates = rates_of(find_gpu(name), "efficient", is_backward=is_backward)
        assert rates is not None
        return float(rates.rate(128.0))

    for is_backward in (False, True):
        a100 = rate("A100-SXM4-80GB", is_backward)
        # 132 SMs at 1.83 GHz, 148 at 1.86, against 108 at 1.41.
        assert rate("H100 80GB HBM3", is_backward) / a100 == pytest.approx(1.59, rel=0.02)
        assert rate("B200", is_backward) / a100 == pytest.approx(1.80, rel=0.02)


def test_cards_with_half_the_tensor_rate() -> None:
    assert find_gpu("rtx-4090").has_half_tensor_rate
    assert find_gpu("rtx-3060").has_half_tensor_rate
    assert not find_gpu("L40S").has_half_tensor_rate
    assert not find_gpu("A100-SXM4-80GB").has_half_tensor_rate
    # Nothing but products: all of the peak, at half the rate too.
    assert share_at_half_rate(1.0, "flash") == pytest.approx(1)
    # Products of 1 and as much besides, one after the other: 2 of 3.
    assert share_at_half_rate(0.5, "efficient") == pytest.approx(2 / 3)
    # What overlaps hides more of it.
    assert 2 / 3 < share_at_half_rate(0.5, "flash") < 1


def test_flex_attention_against_flash_attention() -> None:
    # pytorch.org/blog/flexattention: 90 % of it forward, 85 % backward, on the A100.
    for is_backward, share in ((False, 0.90), (True, 0.85)):
        flex, flash = (
            rates_of(find_gpu("A100-SXM4-80GB"), kernel, is_backward=is_backward)
            for kernel in ("flex", "flash")
        )
        assert flex is not None
        assert flash is not None
        dim = 128.0
        assert flex.rate(dim) == pytest.approx(share * flash.rate(dim))


@pytest.mark.parametrize(
    ("is_backward", "head_dim", "is_causal", "tflop_per_second"),
    [
        (False, 64, True, 142.23),
        (False, 128, True, 151.19),
        (False, 128, False, 169.28),
        (True, 64, True, 96.53),
        (True, 128, True, 99.23),
        (True, 128, False, 124.57),
    ],
)
def test_flash_attention_on_an_rtx_4090(
    is_backward: bool, head_dim: int, is_causal: bool, tflop_per_second: float
) -> None:
    """studies/kernels/tables/others.csv: 2,048 long, of 16,384 tokens and 2,048 wide. No fit has seen
    the card."""
    rates = rates_of(find_gpu("rtx-4090"), "flash", dtype="float16", is_backward=is_backward)
    assert rates is not None
    heads = 2048 // head_dim
    predicted = attention_seconds(
        rates,
        batch=8,
        heads=heads,
        query_length=2048,
        key_length=2048,
        head_dim=head_dim,
        is_causal=is_causal,
        is_backward=is_backward,
    )
    flops = 4 * 8 * heads * 2048**2 * head_dim * (2.5 if is_backward else 1) / (1 + is_causal)
    assert predicted == pytest.approx(flops / (tflop_per_second * 1e12), rel=0.3)
