"""Who holds a card's memory, and why there is none: by a stand-in for NVML, and by the real one."""

from __future__ import annotations

import sys

import pynvml as real_nvml
import pytest
from fake_nvml import fake_nvml

from autotune.catalogue import nvml
from autotune.common.units import GIB, MIB

L4 = ["NVIDIA L4"]


def test_an_idle_card_is_all_free(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_nvml(monkeypatch, L4, total_bytes=24 * GIB, reserved_bytes=GIB)
    taken = nvml.occupancy()
    assert taken is not None
    assert (taken.free_bytes, taken.used_bytes, taken.holders) == (23 * GIB, 0, ())
    assert calls == ["shutdown"]


def test_holders_are_named_the_largest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(
        monkeypatch,
        L4,
        used_bytes=5 * GIB,
        compute=[(40, 300 * MIB), (50, 4 * GIB), (60, None)],
        # A process with both kinds of context is one process.
        graphics=[(70, 600 * MIB), (40, 300 * MIB)],
        programs={50: "/usr/bin/python3\n", 70: "/usr/lib/xorg/Xorg", 40: "\x1b[2Jevil"},
    )
    taken = nvml.occupancy()
    assert [holder.pid for holder in taken.holders] == [50, 70, 40, 60]
    assert str(taken) == (
        "5.00 GiB are held by python3 (process 50, 4.00 GiB), Xorg (process 70, 0.59 GiB), "
        "[2Jevil (process 40, 0.29 GiB) and 1 more"
    )


def test_processes_that_cannot_be_seen_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container, where NVML lists none of another's."""
    fake_nvml(monkeypatch, L4, used_bytes=5 * GIB)
    assert str(nvml.occupancy()) == "5.00 GiB are held by processes that cannot be seen from here"
    fake_nvml(monkeypatch, L4, used_bytes=5 * GIB, compute=[(50, None)])
    assert str(nvml.occupancy()) == "5.00 GiB are held by a program (process 50)"


def test_why_a_card_is_slower_than_it_could_be(monkeypatch: pytest.MonkeyPatch) -> None:
    hot, capped = (
        real_nvml.nvmlClocksEventReasonHwThermalSlowdown,
        real_nvml.nvmlClocksEventReasonSwPowerCap,
    )
    for reasons, expected in (
        (0, ""),
        (real_nvml.nvmlClocksEventReasonGpuIdle, ""),
        (capped, "at its power limit"),
        (capped | hot, "too hot"),
    ):
        fake_nvml(monkeypatch, L4, clock_reasons=reasons)
        assert nvml.slowed_down() == expected
    fake_nvml(monkeypatch, L4, error="Driver Not Loaded")
    assert nvml.slowed_down() == ""


def test_the_first_visible_card_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, ["Tesla T4", "NVIDIA L4"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with nvml.opened() as module:
        assert nvml.visible(module) == [1]


@pytest.mark.parametrize(
    ("constant", "part"),
    [
        ("NVML_ERROR_LIBRARY_NOT_FOUND", "driver is not installed"),
        ("NVML_ERROR_DRIVER_NOT_LOADED", "installed, and not loaded"),
        ("NVML_ERROR_LIB_RM_VERSION_MISMATCH", "a restart is needed"),
        ("NVML_ERROR_NO_PERMISSION", "NVIDIA's driver says: Insufficient Permissions"),
    ],
)
def test_without_a_driver_it_says_why(
    monkeypatch: pytest.MonkeyPatch, constant: str, part: str
) -> None:
    """In the words that the real library has for its errors."""
    said = str(real_nvml.NVMLError(getattr(real_nvml, constant)))
    fake_nvml(monkeypatch, L4, error=said)
    assert part in nvml.why_no_card()
    assert nvml.occupancy() is None


def test_without_a_visible_card_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, [])
    assert nvml.why_no_card() == "NVIDIA's driver is there, and finds no card"
    fake_nvml(monkeypatch, L4)
    assert nvml.why_no_card() == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert nvml.why_no_card() == "CUDA_VISIBLE_DEVICES is '7', which hides every card"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.why_no_card() == "the package nvidia-ml-py is not installed"


def test_the_real_library_is_asked_without_harm() -> None:
    """Here there is a driver, or there is none: it is said either way."""
    taken = nvml.occupancy()
    assert (taken is None) == bool(nvml.why_no_card())
