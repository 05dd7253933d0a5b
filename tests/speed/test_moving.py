"""Times of what memory bounds, worked out by hand, and published times that no fit has seen."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from autotune.catalogue.gpus import catalogue, find_gpu
from autotune.speed.moving import (
    BYTES_OF_4_BIT_WEIGHT,
    FAMILIES,
    MovingRates,
    evidence,
    family_of,
    lists_seconds,
    moving_seconds,
    rates_of,
    sum_seconds,
)
from autotune.speed.origin import RatesFrom

RATES = MovingRates(
    bytes_per_second=dict.fromkeys(FAMILIES, 1e9),
    row_seconds={
        "softmax": (2e-6, 1e-9),
        "short_softmax": (1e-6, 0.0),
        "layer_norm": (3e-6, 0.0),
        "short_layer_norm": (2e-6, 0.0),
    },
    weights_per_second=1e8,
    elements_per_second={"strided": 1e8, "strided_16_bits": 2e8},
    l2_bytes=0,
    held_l2_bytes=0,
    rates_from=RatesFrom.THIS_CARD,
    spread={},
)


def test_bytes_and_rows() -> None:
    def of(family: str, length: int = 0) -> float:
        return float(moving_seconds(RATES, family, bytes_moved=1e6, rows=1000, row_length=length))

    assert of("elementwise") == pytest.approx(1e-3)
    assert of("copy_host") == pytest.approx(1e-3)
    # 1,000 rows: 1 us each up to 1,024 long, 2 us and 1 ns for each element beyond.
    assert of("softmax", 1024) == pytest.approx(2e-3)
    assert of("softmax", 2000) == pytest.approx(1e-3 + 1000 * 4e-6)
    assert of("layer_norm", 512) == pytest.approx(3e-3)
    assert of("layer_norm", 4096) == pytest.approx(4e-3)


def test_4_bit_weights_take_instructions_or_bytes() -> None:
    moved = 1e6 * BYTES_OF_4_BIT_WEIGHT
    assert moving_seconds(RATES, "dequantize", bytes_moved=moved) == pytest.approx(1e-2)
    quick = dataclasses.replace(RATES, weights_per_second=1e12)
    assert moving_seconds(quick, "dequantize", bytes_moved=moved) == pytest.approx(moved / 1e9)
    unknown = dataclasses.replace(RATES, weights_per_second=None)
    assert moving_seconds(unknown, "dequantize", bytes_moved=moved) == pytest.approx(moved / 1e9)


def test_unpacked_weights_that_the_cache_holds_never_reach_memory() -> None:
    quick = dataclasses.replace(RATES, weights_per_second=1e12, held_l2_bytes=3e6)

    def share_of_bandwidth(num_weights: float) -> float:
        moved = num_weights * BYTES_OF_4_BIT_WEIGHT
        return float(moving_seconds(quick, "dequantize", bytes_moved=moved)) * 1e9 / moved

    # Codes and scales are always read: 0.5625 of 2.5625 bytes.
    assert share_of_bandwidth(1e3) == pytest.approx(0.5625 / BYTES_OF_4_BIT_WEIGHT, rel=1e-3)
    # At the size of what is held, half of the results stay.
    assert share_of_bandwidth(3e6 / BYTES_OF_4_BIT_WEIGHT) == pytest.approx(
        1.5625 / BYTES_OF_4_BIT_WEIGHT
    )
    assert share_of_bandwidth(1e9) == pytest.approx(1, rel=1e-3)
    # Instructions take as long wherever results go.
    slow = dataclasses.replace(quick, weights_per_second=1e8)
    moved = 1e3 * BYTES_OF_4_BIT_WEIGHT
    assert moving_seconds(slow, "dequantize", bytes_moved=moved) == pytest.approx(1e-5)


def test_large_caches_hold_a_layer_s_unpacked_weights() -> None:
    moved = 4096 * 4096 * BYTES_OF_4_BIT_WEIGHT

    def seconds_over_memory_s(name: str) -> float:
        rates = rates_of(find_gpu(name))
        at_bandwidth = moved / rates.bytes_per_second["dequantize"]
        return float(moving_seconds(rates, "dequantize", bytes_moved=moved)) / at_bandwidth

    assert seconds_over_memory_s("rtx-4090") < 0.6
    assert seconds_over_memory_s("rtx-3090") == pytest.approx(1, abs=0.03)


def test_finding_each_element_takes_instructions_or_bytes() -> None:
    def of(megabytes: float, millions: float, work: str = "strided") -> float:
        moved, elements = megabytes * 1e6, millions * 1e6
        return float(
            moving_seconds(RATES, "elementwise", bytes_moved=moved, elements=elements, work=work)
        )

    assert of(4, 1) == pytest.approx(1e-2)
    assert of(4, 1, "strided_16_bits") == pytest.approx(5e-3)
    assert of(4, 1, "unknown") == pytest.approx(4e-3)
    assert of(12, 1) == pytest.approx(1.2e-2)
    assert of(4, 0) == pytest.approx(4e-3)


def test_a_row_takes_as_many_clocks_on_a_card_without_a_table() -> None:
    like = dataclasses.replace(find_gpu("H100 80GB HBM3"), boost_clock_hertz=1e9)
    twice = dataclasses.replace(like, boost_clock_hertz=2e9)
    for kernel, times in rates_of(like).row_seconds.items():
        assert times == pytest.approx(tuple(2 * t for t in rates_of(twice).row_seconds[kernel]))
    own = find_gpu("A100-PCIE-40GB")
    overclocked = dataclasses.replace(own, boost_clock_hertz=2e9)
    assert rates_of(own).row_seconds == rates_of(overclocked).row_seconds


def test_small_tensors_stay_in_the_cache() -> None:
    cached = dataclasses.replace(RATES, l2_bytes=1e6)
    times = moving_seconds(cached, "elementwise", bytes_moved=np.array([1.0, 5e5, 1e6, 2e6]))
    # Twice as quick when nothing but the cache is needed, no quicker when all of it is full.
    assert times == pytest.approx([0.5e-9, 5e-4 / 1.5, 1e-3, 2e-3])


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("_softmax_backward_data", "softmax_backward"),
        ("_log_softmax", "softmax"),
        ("native_layer_norm", "layer_norm"),
        ("_fused_rms_norm_backward", "layer_norm_backward"),
        ("dequantize_4bit", "dequantize"),
        ("add_", "elementwise"),
        ("native_dropout", "native_dropout"),
        ("clone_", "clone"),
        ("embedding", "elementwise"),
        ("gather", "gather"),
        ("_log_softmax_backward_data", "log_softmax_backward"),
        ("gelu_backward", "elementwise"),
    ],
)
def test_family_of(name: str, family: str) -> None:
    assert family_of(name) == family
    assert family in rates_of(find_gpu("A100-SXM4-80GB")).bytes_per_second


# --- cards


@pytest.mark.parametrize("name", [gpu.slug for gpu in catalogue()])
def test_every_card(name: str) -> None:
    card = find_gpu(name)
    rates = rates_of(card)
    bandwidth = card.memory_bandwidth_bytes_per_second
    assert bandwidth is not None
    assert all(
        0.2 * bandwidth < rate < bandwidth
        for family, rate in rates.bytes_per_second.items()
        if family != "copy_host"
    )
    assert set(rates.spread) == {*FAMILIES, "named"}
    assert ("copy_host" in rates.bytes_per_second) == bool(card.pcie_bandwidth_bytes_per_second)


def test_where_rates_come_from() -> None:
    expected = {
        "T4": RatesFrom.THIS_CARD,
        "A100-PCIE-40GB": RatesFrom.THIS_CARD,
        "A100-SXM4-80GB": RatesFrom.CARDS_LIKE_IT,
        "V100": RatesFrom.CARDS_LIKE_IT,
        "rtx-4090": RatesFrom.DATASHEET,
    }
    assert {name: rates_of(find_gpu(name)).rates_from for name in expected} == expected


def test_nothing_is_written_quicker_than_it_is_read() -> None:
    """On the L40S no product of few rows reads weights of 300 MB and more at more than 750 GB/s
    (gemm_bf16.csv.gz); the mean of A100 and V100, 0.91 of bandwidth, is 787 there."""
    copied = moving_seconds(rates_of(find_gpu("L40S")), "elementwise", bytes_moved=1.5e9)
    assert copied > 1.5e9 / 750e9


def test_elementwise_on_an_h100_that_no_constant_was_chosen_with() -> None:
    """steps_ops.csv.gz: a product of float32 numbers (8, 2048, 12288) with a number, 0.535 ms."""
    moved = 2 * 4 * 8 * 2048 * 12288
    predicted = moving_seconds(rates_of(find_gpu("H100")), "elementwise", bytes_moved=moved)
    assert predicted == pytest.approx(0.535e-3, rel=0.03)


def test_4_bit_weights_on_an_h100() -> None:
    """4096 x 14336 in 0.152 ms with bitsandbytes 0.45.2 (others.csv), 1.36 to 2.07 times quicker since
    its PR 1747."""
    predicted = moving_seconds(
        rates_of(find_gpu("H100 80GB HBM3")),
        "dequantize",
        bytes_moved=4096 * 14336 * BYTES_OF_4_BIT_WEIGHT,
    )
    assert 0.152e-3 / 2.07 < predicted < 0.152e-3 / 1.36


def test_4_bit_weights_on_an_rtx_4090() -> None:
    """At 0.27 of bandwidth, as on the A100, QLoRA came out at half its real speed."""
    card = find_gpu("rtx-4090")
    bandwidth = card.memory_bandwidth_bytes_per_second
    assert bandwidth is not None
    predicted = moving_seconds(rates_of(card), "dequantize", bytes_moved=1e9)
    assert predicted < 0.5 * 1e9 / (0.27 * bandwidth)


@pytest.mark.parametrize(
    ("card", "megabytes", "gigabytes_per_second"),
    [("rtx-4090", 33.6, 3868), ("RTX 3090 Ti", 33.6, 860)],
)
def test_a_product_with_a_number(card: str, megabytes: float, gigabytes_per_second: float) -> None:
    """others.csv, 4,194,304 elements: what fits the RTX 4090's cache of 72 MB never reaches memory there."""
    predicted = moving_seconds(rates_of(find_gpu(card)), "elementwise", bytes_moved=megabytes * 1e6)
    measured = megabytes / gigabytes_per_second * 1e-3
    bound = {"rtx-4090": (1, 4), "RTX 3090 Ti": (0.8, 1.25)}[card]
    assert bound[0] * measured < predicted < bound[1] * measured


def test_evidence_is_by_family() -> None:
    card = rates_of(find_gpu("a100-pcie-40gb"))
    families = (
        "elementwise",
        "softmax",
        "gather",
        "layer_norm_backward",
        "dequantize",
        "copy_host",
    )
    this, like, sheet = RatesFrom
    assert [evidence(card, family) for family in families] == [this, this, like, like, sheet, sheet]
    unknown = rates_of(find_gpu("rtx-4090"))
    assert {evidence(unknown, family) for family in families} == {sheet}


def test_a_launch_over_lists_runs_in_waves() -> None:
    # 40 blocks at once, 1 us a round, 1 GB/s.
    rates = dataclasses.replace(
        rates_of(find_gpu("H100 SXM")),
        bytes_per_second={"elementwise": 1e9},
        l2_bytes=0,
        lists={True: (40, 1e-6)},
    )

    def seconds(num_blocks: float, bytes_each: float, *, is_fused: bool = True) -> float:
        return lists_seconds(
            rates,
            bytes_moved=num_blocks * bytes_each,
            num_blocks=num_blocks,
            num_rounds=32,
            is_fused=is_fused,
        )

    # One wave: its bytes, or the rounds of a block, whichever is longer.
    assert seconds(40, 1000) == pytest.approx(40e-6)
    assert seconds(40, 100) == pytest.approx(32e-6)
    # Two waves and four blocks that begin late.
    assert seconds(84, 1000) == pytest.approx(80e-6 + 32e-6)
    # Of a kernel whose blocks are not known, the bytes.
    assert seconds(84, 1000, is_fused=False) == pytest.approx(84e-6)


# 40 blocks of 512 threads at once, 1 us a round, 1 GB/s.
SUMS = dataclasses.replace(RATES, lists={False: (40, 1e-6)})


@pytest.mark.parametrize(
    ("num_results", "num_summed", "is_over_columns", "megabytes", "microseconds"),
    [
        # A block of 16 warps has a row for each, of 1,024 numbers: 8 rounds of 128. 20 blocks in one wave.
        (320, 1024, False, 0.001, 8),
        # The same, bound by its bytes; three waves and a half.
        (320, 1024, False, 0.1, 100),
        (2240, 1024, False, 0.001, 4 * 8),
        # Rows from 8,192 numbers on have a block each: 4 rounds of 2,048.
        (40, 8192, False, 0.001, 4),
        # One row: 512 threads have 2,048 values each. 40 blocks share them, 13 rounds of 4 each. The last one
        # reads what they found in one load; memory is cleared before, by a kernel.
        (1, 2**20, False, 0.001, 13 + 0.5 + 3),
        # Columns, 4 to a thread: a block of 32 x 4 threads has 2,048 rows each. 128 of them share these, 4
        # rounds each; the last one reads what 128 found by 4 threads, 32 loads after one another.
        (128, 8192, True, 0.001, 4 + 32 / 2 + 3),
        # Seven such blocks: 23 share each, 161 where 160 run at once, so that one begins late.
        (896, 8192, True, 0.001, 2 * 23 + 6 / 2 + 3),
    ],
)
def test_a_sum_by_its_blocks(
    num_results: int,
    num_summed: int,
    is_over_columns: bool,
    megabytes: float,
    microseconds: float,
) -> None:
    def of(rates: MovingRates) -> float:
        return 1e6 * sum_seconds(
            rates,
            bytes_moved=1e6 * megabytes,
            num_results=num_results,
            num_summed=num_summed,
            is_over_columns=is_over_columns,
        )

    assert of(SUMS) == pytest.approx(microseconds)
    # Where the SMs are not known, a share of the bandwidth.
    assert of(RATES) == pytest.approx(1000 * megabytes)


def test_rounds_of_a_sum_take_half_in_the_cache() -> None:
    def of(l2_bytes: float) -> float:
        rates = dataclasses.replace(SUMS, l2_bytes=l2_bytes)
        return 1e6 * sum_seconds(
            rates, bytes_moved=1000, num_results=320, num_summed=1024, is_over_columns=False
        )

    assert of(1999) == pytest.approx(8)
    assert of(2000) == pytest.approx(4)


@pytest.mark.parametrize(("card", "most"), [("L40S", 1.02), ("RTX 4090", 1.02), ("A100", 1.3)])
def test_slow_memory_hides_the_end_of_a_launch(card: str, most: float) -> None:
    gpu = find_gpu(card)
    rates = rates_of(gpu)
    moved = 320 * 65_536 * 14
    alone = moved / rates.bytes_per_second["elementwise"]
    found = lists_seconds(rates, bytes_moved=moved, num_blocks=320, num_rounds=32, is_fused=True)
    assert 0.999 * alone < found < most * alone
