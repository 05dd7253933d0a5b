"""Times of products worked out by hand on a card with round figures, and cards of the catalogue."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from autotune.catalogue.gpus import Gpu, catalogue, find_gpu
from autotune.speed.matmul import (
    REGIMES,
    Behaviour,
    Floats,
    MatmulCard,
    matmul_seconds,
    regime_of,
)
from autotune.speed.matmul_cards import has_tensor_cores, log_spread, matmul_card
from autotune.speed.origin import RatesFrom
from autotune.speed.roofline import peaks_of

PLAIN = Behaviour(
    l2_bytes_per_flop=1e9,
    memory_share=1,
    fill_steps=0,
    start_seconds=0,
    whole_waves=1,
    overlap=64,
    l2_share=1,
    l2_warm=1,
    split_seconds=0,
    tile_exponent=0,
)
# 100 SMs that compute 1e14 FLOP/s, and nothing else that counts: memory and L2 cache without end.
ROUND = MatmulCard(
    name="round",
    num_sms=100,
    l2_bytes=1,
    memory_bytes_per_second=1e30,
    tensor_flop_per_second=1e14,
    behaviour=PLAIN,
    float32=PLAIN,
    flop_per_second={"bfloat16": 1e14},
    rates_from={"bfloat16": RatesFrom.DATASHEET},
)


def changed(card: MatmulCard = ROUND, **figures: float) -> MatmulCard:
    own = {f.name for f in dataclasses.fields(Behaviour)}
    behaviour = dataclasses.replace(
        card.behaviour, **{name: value for name, value in figures.items() if name in own}
    )
    rest = {name: value for name, value in figures.items() if name not in own}
    return dataclasses.replace(card, behaviour=behaviour, **rest)


def one(card: MatmulCard, *shape: float, dtype: str = "bfloat16") -> float:
    batch, m, n, k = (np.array([size], float) for size in shape)
    return float(matmul_seconds(card, dtype, batch, m, n, k)[0])


def test_tiles_that_fill_every_sm() -> None:
    # 100 tiles of 256 x 128, 1,000 deep.
    flops = 2 * 25600 * 128 * 1000
    assert one(ROUND, 1, 25600, 128, 1000) == pytest.approx(flops / 1e14)
    # The same as 4 products of 25 tiles each.
    assert one(ROUND, 4, 6400, 128, 1000) == pytest.approx(flops / 1e14)


def test_one_row_more_needs_another_wave() -> None:
    # Tiles of 16 x 64 lose least: 1,601 x 2 of them in 33 waves rather than 32.
    full, one_more = one(ROUND, 1, 25600, 128, 1000), one(ROUND, 1, 25601, 128, 1000)
    assert one_more / full == pytest.approx(33 / 32)
    # Where no wave is lost, the row costs what it computes: a row of 16 x 64 tiles.
    even = changed(whole_waves=0)
    assert one(even, 1, 25601, 128, 1000) / full == pytest.approx(1601 / 1600)


def test_few_tiles_are_split_along_k() -> None:
    # Four tiles of 128 x 32, in 25 splits each: all of the 100 SMs.
    assert one(ROUND, 1, 128, 128, 25600) == pytest.approx(2 * 128 * 128 * 25600 / 1e14)
    # Below 256 of k nothing is split: 16 tiles of 16 x 64.
    assert one(ROUND, 1, 128, 128, 200) == pytest.approx(2 * 16 * 64 * 200 / 1e12)


def test_a_thin_product_takes_as_long_as_its_bytes() -> None:
    card = changed(memory_bytes_per_second=1e12, memory_share=0.5, start_seconds=1e-6)
    nbytes = 2 * (65536 * 4096 + 4096 * 8 + 65536 * 8)
    assert one(card, 1, 65536, 8, 4096) == pytest.approx(1e-6 + nbytes / 0.5e12, rel=1e-3)


def test_what_the_operation_before_left_in_the_cache_is_read_faster() -> None:
    cold = changed(memory_bytes_per_second=1e10, l2_bytes=1)
    warm = changed(memory_bytes_per_second=1e10, l2_bytes=1e9)
    # The first operand and the result stay in the cache; the second operand is read from memory.
    first, second, result = 2 * 4096 * 1024, 2 * 1024 * 64, 2 * 4096 * 64
    assert one(cold, 1, 4096, 64, 1024) == pytest.approx((first + second + result) / 1e10, rel=1e-2)
    assert one(warm, 1, 4096, 64, 1024) == pytest.approx(second / 1e10, rel=1e-2)


def test_tiles_read_their_operands_from_the_cache() -> None:
    # 256 + 128 numbers of two bytes per step of k, at 1e10 B/s of each SM.
    card = changed(l2_bytes_per_flop=0.01)
    assert one(card, 1, 25600, 128, 1000) == pytest.approx(384 * 2 * 1000 / 1e10)


def test_every_tile_has_a_start_and_an_end() -> None:
    card = changed(fill_steps=500)
    assert one(card, 1, 25600, 128, 1000) == pytest.approx(1.5 * one(ROUND, 1, 25600, 128, 1000))


def test_float32_has_smaller_tiles() -> None:
    card = changed(whole_waves=0)
    card = dataclasses.replace(card, flop_per_second={"float32": 1e13, "bfloat16": 1e13})
    narrow = (64, 100, 30, 1024)
    assert one(card, *narrow, dtype="float32") < one(card, *narrow)


@pytest.mark.parametrize(
    ("m", "n", "k", "regime"),
    [
        (1024, 1024, 1024, "large"),
        (4096, 16, 4096, "thin"),
        (4096, 4096, 16, "thin"),
        (16, 4096, 4096, "few_rows"),
        (512, 4096, 4096, "other"),
        (4096, 512, 4096, "other"),
    ],
)
def test_regimes(m: float, n: float, k: float, regime: str) -> None:
    sizes = (np.array([size], float) for size in (m, n, k))
    assert REGIMES[int(regime_of(*sizes)[0])] == regime


# --- cards of the catalogue


def known(name: str) -> MatmulCard:
    card = matmul_card(find_gpu(name), peaks_of(find_gpu(name)))
    assert card is not None
    return card


NVIDIA = [gpu for gpu in catalogue() if gpu.vendor == "nvidia"]
SIZES: Floats = np.array([1, 16, 128, 2048, 30000], float)


@pytest.mark.parametrize("gpu", NVIDIA, ids=lambda gpu: gpu.slug)
def test_times_of_every_card_make_sense(gpu: Gpu) -> None:
    card = matmul_card(gpu, peaks_of(gpu))
    assert card is not None
    m, n, k = (axis.ravel() for axis in np.meshgrid(SIZES, SIZES, SIZES))
    ones = np.ones(len(m))
    for dtype, rate in card.flop_per_second.items():
        seconds = matmul_seconds(card, dtype, ones, m, n, k)
        assert (seconds > 2 * m * n * k / rate).all()
        # What is larger in one way takes no less, but where a split of k is no longer needed.
        for larger in ((2 * m, n, k), (m, 2 * n, k), (m, n, 2 * k)):
            assert (matmul_seconds(card, dtype, ones, *larger) > 0.75 * seconds).all()
        assert (log_spread(card, dtype, m, n, k) > 0.03).all()


@pytest.mark.parametrize("gpu", NVIDIA, ids=lambda gpu: gpu.slug)
def test_16_bit_rates_of_every_card_are_near_its_datasheet(gpu: Gpu) -> None:
    card = matmul_card(gpu, peaks_of(gpu))
    assert card is not None
    peak = gpu.peak_flop_per_second["float16"]
    # The L4 has 72 W; GeForce cards clock higher than they say.
    assert 0.55 * peak < card.flop_per_second["float16"] < 1.2 * peak


@pytest.mark.parametrize(
    ("name", "dtype", "rates_from"),
    [
        ("H100 80GB HBM3", "bfloat16", RatesFrom.THIS_CARD),
        ("H100 80GB HBM3", "float32", RatesFrom.CARDS_LIKE_IT),
        ("rtx-3090", "bfloat16", RatesFrom.CARDS_LIKE_IT),
        ("GH200 480GB", "bfloat16", RatesFrom.CARDS_LIKE_IT),
        ("rtx-4080", "bfloat16", RatesFrom.DATASHEET),
        ("rtx-2060", "bfloat16", RatesFrom.DATASHEET),
    ],
)
def test_evidence(name: str, dtype: str, rates_from: RatesFrom) -> None:
    assert known(name).rates_from[dtype] is rates_from


def test_weaker_evidence_spreads_more() -> None:
    shape = [np.array([4096.0])] * 3
    spreads = [
        float(log_spread(known(name), "bfloat16", *shape)[0])
        for name in ("A100-SXM4-80GB", "rtx-3090", "rtx-4080")
    ]
    assert spreads == sorted(spreads)
    assert spreads[0] < spreads[-1]


def best_square(name: str, dtype: str) -> float:
    sizes = 1024.0 * np.arange(1, 11)
    seconds = matmul_seconds(known(name), dtype, np.ones(10), sizes, sizes, sizes, num_weights=1)
    return float((2 * sizes**3 / seconds).max()) / 1e12


@pytest.mark.parametrize(
    ("name", "dtype", "published"),
    [  # studies/kernels/tables/matmul_square.csv, medians
        ("rtx-3090", "bfloat16", 76.58),
        ("rtx-3090", "float32", 24.79),
        ("A40", "bfloat16", 122.29),
        ("L4", "bfloat16", 70.89),
        ("T4", "bfloat16", 2.27),
        ("H100 PCIe", "tf32", 240.43),
    ],
)
def test_the_best_square_product_is_the_published_one(
    name: str, dtype: str, published: float
) -> None:
    assert best_square(name, dtype) == pytest.approx(published, rel=0.01)


def test_a_card_lasts_no_faster_than_it_starts() -> None:
    # Its rested products, of all shapes, are slower than the best square product that was published.
    assert best_square("L40S", "bfloat16") < 269


def test_bfloat16_without_tensor_cores_is_slower_than_float32() -> None:
    for name in ("T4", "rtx-2060", "V100"):
        card = known(name)
        rates = [card.flop_per_second[d] for d in ("bfloat16", "float32", "float16")]
        assert rates == sorted(rates)


def test_without_tensor_cores_all_products_run_on_the_lanes() -> None:
    """A P100: its products of 16 bits take float32's way, and its L2 cache is no slower than its memory.

    Its rate is that of its own table of products, which is less than its best square one.
    """
    gpu, card = find_gpu("p100"), known("p100")
    rate = card.flop_per_second["float16"]
    assert rate == card.flop_per_second["float32"] < gpu.measured_flop_per_second["float32"]
    as_float32 = dataclasses.replace(card, flop_per_second={"float16": rate}, behaviour=PLAIN)
    assert one(as_float32, 1, 4096, 768, 768, dtype="float16") == one(
        card, 1, 4096, 768, 768, dtype="float16"
    )
    l2_bytes_per_second = card.float32.l2_bytes_per_flop * card.tensor_flop_per_second
    assert l2_bytes_per_second > card.memory_bytes_per_second


@pytest.mark.parametrize(
    ("capability", "float16", "float32", "has_some"),
    [
        ((6, 1), 12e12, 12e12, False),
        ((7, 0), 125e12, 15.7e12, True),
        ((7, 5), 10.9e12, 5.4e12, False),  # GTX 1660 Ti
        ((7, 5), 52e12, 6.5e12, True),  # RTX 2060
        ((8, 6), 71e12, 35.6e12, True),  # RTX 3090, by float32 accumulation
        (None, 10e12, 10e12, True),
    ],
)
def test_which_cards_have_tensor_cores(
    capability: tuple[int, int] | None, float16: float, float32: float, has_some: bool
) -> None:
    gpu = dataclasses.replace(
        find_gpu("rtx-3090"),
        compute_capability=capability,
        peak_flop_per_second={"float16": float16, "float32": float32},
    )
    assert has_tensor_cores(gpu) is has_some


@pytest.mark.parametrize(
    "missing",
    [
        {"num_sms": None},
        {"memory_bandwidth_bytes_per_second": None},
        {"peak_flop_per_second": {}},
    ],
)
def test_too_little_known_of_a_card(missing: dict[str, object]) -> None:
    gpu = dataclasses.replace(find_gpu("rtx-4070"), **missing)
    assert matmul_card(gpu, peaks_of(gpu)) is None


@pytest.mark.parametrize("gpu", NVIDIA, ids=lambda gpu: gpu.slug)
def test_without_the_size_of_its_l2_a_card_is_as_cards_like_it(gpu: Gpu) -> None:
    """Of large products it says nothing, of thin ones little: a roofline alone was 2 to 6 times too fast."""
    m, n, k = np.array([[8192, 4096, 4096], [2048, 16, 4096], [512, 896, 896]], float).T
    without = dataclasses.replace(gpu, l2_bytes=None)
    cards = [matmul_card(each, peaks_of(each)) for each in (gpu, without)]
    seconds = [
        matmul_seconds(card, "float16", np.ones(3), m, n, k) for card in cards if card is not None
    ]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.2)


def test_the_spread_is_of_the_logarithm() -> None:
    # Large products of the RTX PRO 6000, held out: 80 % within 7 %.
    shape = [np.array([4096.0])] * 3
    spread = float(log_spread(known("RTX PRO 6000 Blackwell"), "bfloat16", *shape)[0])
    assert math.exp(1.28 * spread) == pytest.approx(1.07, abs=0.02)
