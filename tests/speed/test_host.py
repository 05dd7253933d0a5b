"""Two queues: the GPU waits for the host where the host has lost its lead, and only there."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.speed.host import (
    USUAL,
    Host,
    Stretches,
    late_seconds,
    num_modules,
)


def one_by_one(gpu: list[float], host: list[float]) -> float:
    """When the GPU is through: each kernel starts once it is launched and the one before is over."""
    launched = free = 0.0
    for on_gpu, on_host in zip(gpu, host, strict=True):
        launched += on_host
        free = max(free, launched) + on_gpu
    return free


def late(gpu: list[float], host: list[float]) -> float:
    kinds = Stretches(shares=np.eye(len(gpu)), order=np.arange(len(gpu)))
    return late_seconds(np.array(gpu), np.array(host), kinds)


durations = st.lists(
    st.tuples(st.floats(0.001, 10, allow_nan=False), st.floats(0.001, 10, allow_nan=False)),
    min_size=1,
    max_size=40,
)


@given(durations)
def test_it_is_what_walking_through_the_kernels_gives(pairs: list[tuple[float, float]]) -> None:
    """Up to one kernel: a stretch is launched while it runs, a kernel before it."""
    gpu, host = (list(column) for column in zip(*pairs, strict=True))
    exact, found = one_by_one(gpu, host), sum(gpu) + late(gpu, host)
    assert found <= exact + 1e-9
    assert exact <= found + max(gpu) + 1e-9


def test_a_lead_is_used_up_before_the_gpu_waits() -> None:
    # Large first: the host gets 9 ahead, and loses 6 of it. Small first: the GPU waits all 6.
    assert late([10, 1], [1, 7]) == 0
    assert late([1, 10], [7, 1]) == 6


def test_stretches_are_laid_out_by_their_order() -> None:
    """A layer three times between two others; what it has of each kernel is a third."""
    shares = np.array([[1, 0, 0], [0, 1 / 3, 0], [0, 0, 1]])
    kinds = Stretches(shares=shares, order=np.array([0, 1, 1, 1, 2]))
    gpu, host = np.array([5.0, 3.0, 1.0]), np.array([1.0, 12.0, 1.0])
    # 4 ahead after the first; each layer loses 3.
    assert late_seconds(gpu, host, kinds) == pytest.approx(5)
    back_to_front = Stretches(shares=shares, order=np.array([2, 1, 1, 1, 0]))
    assert late_seconds(gpu, host, back_to_front) == pytest.approx(9)


def test_nothing_launched_is_never_late() -> None:
    nothing = Stretches(shares=np.zeros((0, 0)), order=np.zeros(0, dtype=np.int64))
    assert late_seconds(np.zeros(0), np.zeros(0), nothing) == 0


def seconds_of(host: Host) -> list[float]:
    """Every figure of a host."""
    flat: list[float] = []
    for value in dataclasses.asdict(host).values():
        flat += value.values() if isinstance(value, dict) else [value]
    return flat


def test_a_host_of_another_speed_takes_longer_for_everything() -> None:
    usual, slow = seconds_of(USUAL), seconds_of(USUAL.times(2))
    assert slow == pytest.approx([2 * seconds for seconds in usual])
    assert len(usual) > len(dataclasses.fields(Host))


def test_of_what_was_timed_only_operations_have_a_launch() -> None:
    """Of 14 us 10.7 are Python and dispatch, and the rest a driver's launch."""
    timed, slow = USUAL.timed(2), USUAL.times(2)
    assert timed.launch_seconds == slow.launch_seconds
    assert timed.launch_seconds["forward"] - timed.python_seconds == pytest.approx(2 * 3.3e-6)
    bare = (
        dataclasses.replace(timed, launch_seconds={}),
        dataclasses.replace(slow, launch_seconds={}),
    )
    without, with_launch = map(seconds_of, bare)
    assert without == pytest.approx([10.7 / 14 * seconds for seconds in with_launch])


def test_modules_of_an_adapter_are_more_than_its_weights() -> None:
    """A layer of Llama has 13 modules and 9 weights; LoRA of all linear layers adds 70 and 14 to it."""
    assert num_modules(9, 0) == pytest.approx(13)
    assert num_modules(23, 14) == pytest.approx(83)
