"""The budget of a probe: CudaMemory against a card that is made up, CappedTracker for real."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from made_up_card import CONTEXT, OTHERS, Card, made_up_card

from autotune.common.units import GIB, MIB
from autotune.worker.probe import memory
from autotune.worker.probe.memory import CappedTracker, CpuMemory, CudaMemory

BUDGET = 12 * GIB
NO_OPTIMIZER = SimpleNamespace(state={})


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return made_up_card(monkeypatch)


def on_card() -> CudaMemory:
    return CudaMemory(BUDGET, torch.bfloat16)


@pytest.mark.parametrize("to_whole", [math.floor, round], ids=["torch 2.11", "torch 2.13"])
@pytest.mark.parametrize("difference_bytes", [0, 300 * MIB])
def test_the_allocator_gets_what_the_context_leaves(
    card: Card, difference_bytes: int, to_whole: Callable[[float], int]
) -> None:
    """Whatever the fraction is a fraction of, and whatever becomes of part of a byte."""
    card.total_bytes -= difference_bytes
    card.to_whole = to_whole
    with on_card():
        assert card.allowed_bytes is not None
        assert 0 <= BUDGET - CONTEXT - card.allowed_bytes <= 1


def test_a_budget_over_the_card_is_no_cap(card: Card) -> None:
    with CudaMemory(100 * GIB, torch.bfloat16):
        assert card.allowed_bytes is None


def test_warm_up_ends_when_reserved_memory_is_steady(card: Card) -> None:
    with on_card() as device:
        device.model_is_built()
        answers = []
        for step, reserved in enumerate((4, 6, 7, 7), start=1):
            card.reserve(reserved * GIB)
            answers.append(device.settle(NO_OPTIMIZER, step))
        assert answers == [False, False, False, True]
        peaks = device.peaks(NO_OPTIMIZER)
    assert (peaks.peak_reserved_bytes, peaks.nontorch_bytes) == (7 * GIB, CONTEXT)
    assert peaks.peak_allocated_bytes == 7 * GIB - MIB
    assert card.calls == []


def test_kernels_loaded_later_take_from_the_allocator(card: Card) -> None:
    with on_card() as device:
        device.model_is_built()
        card.reserve(BUDGET - CONTEXT)
        card.context_bytes += 100 * MIB
        card.retries = 1
        assert not device.settle(NO_OPTIMIZER, 1)
        assert card.calls == ["empty_cache"]
        assert card.allowed_bytes is not None
        assert 0 <= BUDGET - CONTEXT - 100 * MIB - card.allowed_bytes <= 1
        # The steps under the new cap are what counts.
        card.peak_bytes = 0
        card.reserve(10 * GIB)
        card.retries = 3
        assert [device.settle(NO_OPTIMIZER, step) for step in (2, 3)] == [False, True]
        peaks = device.peaks(NO_OPTIMIZER)
    assert peaks.num_alloc_retries == 2
    assert peaks.nontorch_bytes == CONTEXT + 100 * MIB
    assert peaks.peak_reserved_bytes == 10 * GIB


def test_where_segments_grow_retries_count_from_the_steps_that_are_timed(card: Card) -> None:
    """And the cap leaves room for what torch maps beyond it."""
    with CudaMemory(BUDGET, torch.bfloat16, expandable_segments=True) as device:
        assert card.allowed_bytes is not None
        assert 0 <= BUDGET - CONTEXT - 18 * MIB - card.allowed_bytes <= 1
        device.model_is_built()
        card.reserve(8 * GIB)
        for step, card.retries in enumerate((2, 3), start=1):
            is_steady = device.settle(NO_OPTIMIZER, step)
        assert is_steady
        assert device.peaks(NO_OPTIMIZER).num_alloc_retries == 0
        card.retries += 1
        assert device.peaks(NO_OPTIMIZER).num_alloc_retries == 1


@pytest.mark.parametrize(("managed", "counted"), [(1 * GIB, 1 * GIB), (8 * GIB, 5 * GIB // 2)])
def test_managed_memory_counts_as_far_as_there_is_room(
    card: Card, managed: int, counted: int
) -> None:
    state = SimpleNamespace(nbytes=managed, is_paged=True)
    optimizer = SimpleNamespace(state={0: {"state1": state, "step": 3}})
    with on_card() as device:
        device.model_is_built()
        card.reserve(9 * GIB)
        card.managed_bytes = managed
        device.settle(optimizer, 1)
        assert card.allowed_bytes is not None
        assert 0 <= BUDGET - CONTEXT - card.allowed_bytes <= 1
        peaks = device.peaks(optimizer)
    assert peaks.nontorch_bytes == CONTEXT + counted


def test_a_context_of_our_own_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda _: True, raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: pytest.fail("asked NVML"))
    assert memory._used_before_context_bytes(0) is None


@pytest.mark.parametrize(("mig_mode", "used"), [(None, OTHERS), (0, OTHERS), (1, None)])
def test_what_others_hold_of_a_whole_card(
    mig_mode: int | None, used: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: the card knows no slices."""

    def mode(_: Any) -> list[int]:
        if mig_mode is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [mig_mode, 0]

    functions: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMigMode": mode,
        "nvmlDeviceGetMemoryInfo": lambda _, version: SimpleNamespace(used=OTHERS),
    }
    for name, function in functions.items():
        monkeypatch.setattr(pynvml, name, function)
    assert memory._used_before_context_bytes(0) == used


def test_a_cpu_refuses_what_passes_the_budget() -> None:
    with CappedTracker(10_000) as tracker:
        kept = torch.ones(1000)  # 4000 bytes: 4096
        for _ in range(3):
            torch.ones(1000)  # gone at once
        # The last 512 bytes would still be free, were sizes not rounded.
        with pytest.raises(torch.OutOfMemoryError, match=r"6000 bytes\. 10000 bytes allowed"):
            torch.ones(1500)
    assert kept.numel() == 1000
    assert len(tracker.recording.tensors) == 5


def test_segments_that_do_not_fit_the_budget_are_out_of_memory() -> None:
    # 1.9 MiB of a large pool's 20 MiB segment.
    device = CpuMemory(10 * MIB)
    with device:
        kept = torch.ones(1_900_000 // 4)
        assert not device.settle(NO_OPTIMIZER, 1)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 20971520 bytes"):
            device.settle(NO_OPTIMIZER, 2)
    assert kept.numel()


def test_small_tensors_share_a_segment() -> None:
    device = CpuMemory(10 * MIB)
    with device:
        kept = [torch.ones(1000) for _ in range(10)]
        device.settle(NO_OPTIMIZER, 2)
    peaks = device.peaks(NO_OPTIMIZER)
    assert (peaks.peak_allocated_bytes, peaks.peak_reserved_bytes) == (40_960, 2 * MIB)
    assert len(kept) == 10
