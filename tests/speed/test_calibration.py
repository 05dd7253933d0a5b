"""Rates fitted to made-up times: of a card that differs from its kind in known ways."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from autotune.catalogue.gpus import Gpu, find_gpu
from autotune.speed import roofline
from autotune.speed.attention import rates_of as attention_rates
from autotune.speed.calibration import TimedKernel, fitted, residuals
from autotune.speed.calibration_plan import (
    BYTES_PER_ELEMENT,
    PAGEABLE,
    attention_kernel,
    moving_kernel,
    num_elements_of,
    product,
    tiny_plan,
    usual_plan,
)
from autotune.speed.matmul import regime_of
from autotune.speed.matmul_cards import log_spread, matmul_card
from autotune.speed.moving import evidence
from autotune.speed.moving import rates_of as moving_rates
from autotune.speed.origin import RatesFrom
from autotune.speed.roofline import KINDS, CardRates, Kernel

TIMED_KINDS = set(KINDS) - {"lists", "copy_aside"}
"""Launches over lists of tensors come several to an operation, and have no rate of their own; copies have
one."""
CARD = find_gpu("rtx-4070")
"""A card of which nobody published a table."""
OTHER = find_gpu("l40s")


def timed(plan: list[Kernel], machine: CardRates, factor: float = 1.0) -> list[TimedKernel]:
    """The plan on such a machine, each kernel that many times as long."""
    priced = roofline.kernel_seconds(plan, machine)
    assert priced is not None
    return [
        TimedKernel(kernel=kernel, seconds=factor * seconds, spread=0.01, num_weights=10**6)
        for kernel, (seconds, _) in zip(plan, priced, strict=True)
    ]


@pytest.fixture(scope="module")
def as_other() -> list[TimedKernel]:
    """A card sold under one name, and as fast as another: three and a half times as fast."""
    return timed(usual_plan(CARD), roofline.ceilings(OTHER))


@pytest.fixture(scope="module")
def own(as_other: list[TimedKernel]) -> Gpu:
    return dataclasses.replace(CARD, rates=fitted(CARD, as_other, 1.5))


def test_predictions_come_near_what_was_timed(own: Gpu, as_other: list[TimedKernel]) -> None:
    assert own.rates is not None
    found = {each.kind: each for each in residuals(CARD, own.rates, as_other)}
    assert set(found) == TIMED_KINDS
    assert found["matmul"].ratio_before > 3
    for each in found.values():
        assert each.median_after <= min(0.06, each.median_before + 1e-9), each
        assert each.ratio_after == pytest.approx(1, abs=0.05)
    assert sum(each.num_kernels for each in found.values()) == len(
        [each for each in as_other if each.kernel.name != PAGEABLE]
    )


def test_so_do_those_of_kernels_that_were_not(own: Gpu) -> None:
    """Shapes between those of the plan, and a dtype that it has no kernel of."""
    others = [
        *(product("bfloat16", *shape) for shape in ((3000, 3584, 3584), (6000, 48, 3072))),
        attention_kernel("flash", "bfloat16", 3, 1500, 24, 96, is_backward=False),
        attention_kernel("flash", "bfloat16", 3, 3000, 24, 128, is_backward=True),
    ]
    before, after, truth = (
        np.array([seconds for seconds, _ in roofline.kernel_seconds(others, machine) or ()])
        for machine in map(roofline.ceilings, (CARD, own, OTHER))
    )
    assert (before / truth > 1.5).all()
    assert after / truth == pytest.approx(1, abs=0.15)
    int8 = product("int8", 4096, 4096, 4096)
    ((seconds, _),) = roofline.kernel_seconds([int8], roofline.ceilings(own)) or ()
    ((former, _),) = roofline.kernel_seconds([int8], roofline.ceilings(CARD)) or ()
    assert seconds < former / 2


def test_what_was_timed_is_said_to_be_of_this_card(own: Gpu) -> None:
    card = matmul_card(own, roofline.peaks_of(own))
    assert card is not None
    this = RatesFrom.THIS_CARD
    assert {card.rates_from[d] for d in ("bfloat16", "float16", "tf32", "float32")} == {this}
    assert card.rates_from["int8"] is not this
    flash = attention_rates(own, "flash", dtype="float16", is_backward=True)
    assert flash is not None
    assert flash.rates_from is this
    moving = moving_rates(own)
    for family in ("elementwise", "softmax", "layer_norm_backward", "dequantize", "copy_host"):
        assert evidence(moving, family) is this, family
    assert moving.elements_per_second["cat"] > 1.2 * moving_rates(CARD).elements_per_second["cat"]
    # The same kernels in float32, and gathers of another kind, were not timed.
    single = attention_rates(own, "efficient", dtype="float32")
    assert single is not None
    assert single.rates_from is not this
    assert evidence(moving, "gather") is not this


def test_the_spread_is_never_less_than_that_of_cards_with_tables(own: Gpu) -> None:
    card = matmul_card(own, roofline.peaks_of(own))
    assert card is not None
    assert card.spread is not None
    shapes = np.array([[8192.0, 8192, 1], [4096, 32, 4096], [8, 4096, 4096]])
    m, n, k = shapes.T
    found = log_spread(card, "bfloat16", m, n, k)
    assert found.tolist() == [card.spread[i] for i in regime_of(m, n, k)]
    h100 = matmul_card(find_gpu("h100-sxm"), roofline.peaks_of(find_gpu("h100-sxm")))
    assert h100 is not None
    assert card.spread[0] > log_spread(h100, "bfloat16", m[:1], k[1:2], k[1:2])[0]


def test_a_wild_time_does_not_carry_the_fit_away() -> None:
    """Each tenth kernel met something else on the card and took thrice as long."""
    plan = usual_plan(CARD)
    rows = timed(plan, roofline.ceilings(CARD))
    rows = [
        dataclasses.replace(each, seconds=3 * each.seconds) if not number % 10 else each
        for number, each in enumerate(rows)
    ]
    rates = fitted(CARD, rows, None)
    for each in residuals(CARD, rates, rows):
        if each.num_kernels > 20:
            assert each.ratio_after == pytest.approx(1, abs=0.06), each


def test_copies_take_as_long_as_the_machines_link_lets_them() -> None:
    """One lane in place of sixteen; no kernel of the card is that far from its kind."""
    copy, add = (moving_kernel(name, "bfloat16", 2**26) for name in ("copy_host", "add"))
    rows = timed([copy, add], roofline.ceilings(CARD), factor=16)
    own = dataclasses.replace(CARD, rates=fitted(CARD, rows, None))
    before, after = moving_rates(CARD).bytes_per_second, moving_rates(own).bytes_per_second
    assert after["copy_host"] == pytest.approx(before["copy_host"] / 16, rel=0.02)
    assert after["elementwise"] == pytest.approx(before["elementwise"] / 5)


def test_few_kernels_move_little_but_the_rate() -> None:
    """Of one product a factor on the rate is learnt, and nothing of how shapes behave."""
    rows = timed([product("bfloat16", 8192, 8192, 8192)], roofline.ceilings(CARD), factor=1.2)
    rates = fitted(CARD, rows, None)
    assert rates.attention == ()
    assert rates.moving is None
    assert rates.products is not None
    before = matmul_card(CARD, roofline.peaks_of(CARD))
    assert before is not None
    rate = rates.products.flop_per_second["bfloat16"] / before.flop_per_second["bfloat16"]
    assert rate == pytest.approx(1 / 1.2, rel=0.07)
    for name in ("l2_bytes_per_flop", "memory_share", "start_seconds", "overlap"):
        value = getattr(rates.products.behaviour, name)
        assert value == pytest.approx(getattr(before.behaviour, name), rel=0.05)


def test_a_plan_for_a_card_without_bfloat16_has_float16() -> None:
    names = {each.dtype for each in usual_plan(find_gpu("t4"))}
    assert names == {"float16", "float32"}
    families = {each.name for each in usual_plan(find_gpu("t4")) if each.kind == "attention"}
    assert not any("flash" in name for name in families)
    assert any("cudnn" in each.name for each in usual_plan(find_gpu("h100-sxm")))


def test_the_tiny_plan_has_every_kind_and_most_names() -> None:
    tiny, usual = tiny_plan("bfloat16"), usual_plan(CARD)
    assert {each.kind for each in tiny} == TIMED_KINDS
    missing = {each.name for each in usual} - {each.name for each in tiny}
    assert all("efficient" in name for name in missing)


def test_elements_are_found_again_from_bytes() -> None:
    found = [each for each in usual_plan(CARD) if each.name in BYTES_PER_ELEMENT]
    assert {num_elements_of(each) for each in found} == {2**26, 2**24}
