"""Collectives between GPUs: published figures, and what any machine keeps to."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from autotune.catalogue.gpus import find_gpu
from autotune.common.units import MIB
from autotune.speed import links, step_parts
from autotune.speed.links import Link, Message
from autotune.speed.sureness import spread_of


def link(card: str) -> Link:
    found = links.link_of(find_gpu(card))
    assert found is not None
    return found


def bus_gb_per_second(card: str, operation: str, num_bytes: int, num_gpus: int) -> float:
    message = [Message(operation=operation, num_bytes=num_bytes)]
    sent = links.sent_bytes(message, num_gpus)
    return sent / links.seconds(message, link(card), num_gpus) / 1e9


@pytest.mark.parametrize(
    ("card", "num_gpus", "published"),
    [
        # nccl-tests, all-reduce of 64 MiB (studies/kernels/tables/collectives.csv.gz).
        ("l40s", 2, 20.0),
        ("a100", 2, 171),
        ("a100", 4, 185),
        ("a100", 8, 197),
        ("h100", 2, 264),
        ("h100", 4, 305),
        ("h100", 8, 362),
    ],
)
def test_a_large_all_reduce_is_as_fast_as_published(
    card: str, num_gpus: int, published: float
) -> None:
    found = bus_gb_per_second(card, "all_reduce", 64 * MIB, num_gpus)
    assert found == pytest.approx(published, rel=0.2)


@pytest.mark.parametrize(
    ("num_bytes", "microseconds"),
    [(4_980_736, 28.0), (13_107_200, 55.0), (34_603_008, 161.0), (67_108_864, 294.0)],
)
def test_what_goes_to_the_next_gpu_takes_as_long_as_published(
    num_bytes: int, microseconds: float
) -> None:
    """A100 SXM, one GPU to another (vidur; collectives.csv.gz): no row of it chose a constant."""
    message = [Message(operation=links.PERMUTE, num_bytes=num_bytes)]
    assert links.sent_bytes(message, 2) == num_bytes
    found = links.seconds(message, link("a100"), 2)
    assert found * 1e6 == pytest.approx(microseconds, rel=0.2)


@pytest.mark.parametrize(
    ("card", "num_gpus", "least", "most"),
    [
        # What half of LambdaLabs' machines reach in training (studies/kernels/LINKS.md).
        ("a40", 4, 7.6, 24),
        ("a4000", 8, 7.4, 16.4),
        ("3070", 2, 3.2, 4.7),
        ("3090", 4, 1.4, 3.7),
        ("3090", 8, 0.7, 1.8),
    ],
)
def test_cards_over_pcie_share_what_there_is(
    card: str, num_gpus: int, least: float, most: float
) -> None:
    assert least <= bus_gb_per_second(card, "all_reduce", 64 * MIB, num_gpus) <= most


@pytest.mark.parametrize(
    ("card", "kind"),
    [
        ("a100", "NVLink"),
        ("a100-pcie-40gb", "PCIe"),
        ("6000-ada", "PCIe"),
        ("RTX 2000 Ada Generation", "PCIe"),
        ("RTX PRO 5000 Blackwell", "PCIe"),
        ("l4", "PCIe"),
        ("4090", "PCIe, GeForce"),
        ("RTX 3090 Ti", "PCIe, GeForce"),
        ("RTX 4070 Ti SUPER", "PCIe, GeForce"),
        ("RTX 5090 Laptop GPU", "PCIe, GeForce"),
        ("TITAN RTX", "PCIe, GeForce"),
    ],
)
def test_geforce_cards_send_through_the_host(card: str, kind: str) -> None:
    assert links.kind_of(find_gpu(card)) == kind


@pytest.mark.parametrize("card", ["3090", "a40", "a100", "h100"])
def test_links_that_somebody_measured_are_as_fast_as_that(card: str) -> None:
    """Whatever their kind, of however many GPUs, all-gathers as all-reduces."""
    of_card = dataclasses.replace(find_gpu(card), reached_bytes_per_second=11e9)
    found = links.link_of(of_card)
    assert found is not None
    assert found.spread < link(card).spread
    for num_gpus, operation in itertools.product((2, 4, 8), links.RINGS):
        message = [Message(operation=operation, num_bytes=2**30)]
        rate = links.sent_bytes(message, num_gpus) / links.seconds(message, found, num_gpus)
        assert rate == pytest.approx(11e9, rel=0.05)


def test_machines_with_pcie_differ_by_more_than_those_with_nvlink() -> None:
    """A rented machine reaches a fifth of what others do."""
    assert link("a100").spread < link("3090").spread < link("a40").spread
    sure, unsure = (step_parts.of_links(2.0, link(card).spread) for card in ("a100", "a40"))
    assert sure.seconds == unsure.seconds == 2.0
    assert spread_of({"links": sure}) == pytest.approx(link("a100").spread)
    assert spread_of({"links": unsure}) == pytest.approx(link("a40").spread)


def test_some_of_the_gradients_is_hidden_behind_the_backward_pass() -> None:
    share = links.hidden_seconds(1.0, 2.0)
    assert 0.5 <= share < 1
    assert links.hidden_seconds(1.0, 0.5) == share / 2
    assert links.hidden_seconds(0.0, 0.5) == 0 == links.hidden_seconds(1.0, 0.0)


def test_more_gpus_wait_longer_for_the_slowest() -> None:
    shares = [links.waiting_share(num) for num in (2, 3, 4, 6, 8, 16)]
    assert 0.02 < shares[0] < shares[-1] < 0.06
    assert shares == sorted(shares)
    assert shares[4] == shares[5]


def test_two_bridged_cards_are_an_nvlink() -> None:
    """Two A100 PCIe with a bridge of 300 GB/s: 667 us for 117 MiB (vidur; no row of it chose a constant)."""
    bridged = dataclasses.replace(
        find_gpu("a100-pcie-80gb"), nvlink_bandwidth_bytes_per_second=300e9
    )
    found = links.link_of(bridged)
    assert found is not None
    message = [Message(operation="all_reduce", num_bytes=round(1.171e5 * 1024))]
    assert links.seconds(message, found, 2) == pytest.approx(663e-6, rel=0.2)


@pytest.mark.parametrize("card", ["l40s", "a100", "h100", "b200", "rtx-4090"])
@pytest.mark.parametrize("operation", sorted(links.RINGS))
def test_no_collective_is_faster_than_its_link(card: str, operation: str) -> None:
    rate = find_gpu(card).interconnect_bandwidth_bytes_per_second
    assert rate is not None
    for num_gpus, exponent in itertools.product((2, 3, 4, 6, 8), range(9, 31)):
        # NVSwitch adds up: each GPU sends half of what a ring has it send.
        most = 2 * rate if num_gpus >= 8 else rate
        assert bus_gb_per_second(card, operation, 2**exponent, num_gpus) < most / 1e9


def test_more_bytes_never_take_less_time_and_splitting_them_takes_more() -> None:
    for card, least in (("l40s", 1.1), ("h100", 2)):
        times = [
            links.seconds([Message(operation="all_gather", num_bytes=2**n)], link(card), 4)
            for n in range(9, 31)
        ]
        assert times == sorted(times)
        whole = [Message(operation="all_reduce", num_bytes=100 * MIB)]
        parts = [Message(operation="all_reduce", num_bytes=MIB, count=100)]
        assert links.seconds(parts, link(card), 4) > least * links.seconds(whole, link(card), 4)


def test_a_number_of_gpus_in_between() -> None:
    shares = [links.share_of(link("l40s"), num) for num in (2, 3, 4, 6, 8, 16)]
    assert shares[:5] == sorted(shares[:5], reverse=True)
    assert shares[4] == shares[5]


def test_an_unknown_link_stays_unknown() -> None:
    assert links.link_of(find_gpu("mi300x")) is None
