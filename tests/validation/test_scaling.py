"""What machines are said to reach by the same runs on one GPU and on several."""

from __future__ import annotations

import dataclasses

import pytest

from autotune.catalogue.gpus import find_gpu
from autotune.speed import links
from validation.kernels import scaling
from validation.kernels.scaling import Reached, Scaled

WAITING = {2: 0.02, 4: 0.05, 8: 0.05}
RUN = Scaled(
    machine="one",
    card="RTX A4000",
    num_gpus=4,
    gradient_bytes=2 * 10**9,
    alone_seconds=1.0,
    seconds=1.0,
)


def test_a_step_waits_for_the_slowest_and_for_what_the_backward_pass_does_not_hide() -> None:
    # Three quarters of the gradients, twice: 3 GB. 0.62 s of backward pass hide up to half of that.
    assert RUN.predicted(3e9, 0.0, WAITING) == pytest.approx(1.05 + 1.0)
    assert RUN.predicted(3e9, 0.5, WAITING) == pytest.approx(1.05 + 1.0 - 0.5 * 0.62)
    assert RUN.predicted(30e9, 0.5, WAITING) == pytest.approx(1.05 + 0.1 - 0.5 * 0.1)
    assert dataclasses.replace(RUN, seconds=1.25).efficiency == 0.8


def test_rates_and_what_is_hidden_are_found_again() -> None:
    """Two machines whose runs follow the rule, and a third with too few of them."""
    rates = {("slow", 2): 1.5e9, ("quick", 4): 12e9}
    runs = [
        dataclasses.replace(run, seconds=run.predicted(rate, 0.6, WAITING))
        for (machine, num_gpus), rate in rates.items()
        for gradient_bytes in (2 * 10**8, 5 * 10**8, 10**9, 2 * 10**9)
        if (
            run := dataclasses.replace(
                RUN, machine=machine, num_gpus=num_gpus, gradient_bytes=gradient_bytes
            )
        )
    ]
    alone = [dataclasses.replace(RUN, machine="third", num_gpus=8)] * 2
    hidden, reached = scaling.fitted([*runs, *alone], WAITING)
    assert hidden == pytest.approx(0.6)
    assert {(each.machine, each.num_gpus) for each in reached} == set(rates)
    for each in reached:
        rate = rates[each.machine, each.num_gpus]
        assert each.bytes_per_second == pytest.approx(rate, rel=0.05)


def reached(card: str, num_gpus: int, share: float) -> Reached:
    rate = find_gpu(card).interconnect_bandwidth_bytes_per_second
    assert rate is not None
    return Reached(
        machine=f"{card} {share}",
        card=card,
        num_gpus=num_gpus,
        bytes_per_second=share * rate,
        runs=(),
    )


def test_a_kind_of_link_has_the_median_of_its_machines() -> None:
    some = [reached("a4000", num, share) for num in (2, 4, 8) for share in (0.1, 0.2, 5.0)]
    some += [reached("3090", num, 0.01) for num in (2, 4, 8)]
    assert scaling.shares(some, "PCIe", {}) == pytest.approx({2: 0.2, 4: 0.2, 8: 0.2})
    # Half of the two in the middle, where the server of the collectives' table is one of four.
    assert scaling.shares(some, "PCIe", {4: 0.4})[4] == pytest.approx(0.3)
    assert scaling.shares(some, "PCIe, GeForce", {})[8] == pytest.approx(0.01)
    # No machine has more than its link: a factor of 2 below, none, and one of 5 above.
    assert scaling.spread(some, "PCIe", {2: 0.2, 4: 0.2, 8: 0.2}) == pytest.approx(
        1.4826 * 0.6931, rel=1e-3
    )


def test_what_is_chosen_is_what_the_study_says() -> None:
    """Steps of GPUs with NVLink that take longer than what they send, whose median is in links.toml."""
    runs = scaling.scaled()
    assert len({run.machine for run in runs}) == 31
    link = links.link_of(find_gpu("a100"))
    assert link is not None
    for num, share in scaling.waiting_shares(runs, link).items():
        assert links.waiting_share(num) == pytest.approx(share, abs=0.001)
    assert all(run.efficiency <= scaling.FASTER for run in runs)
