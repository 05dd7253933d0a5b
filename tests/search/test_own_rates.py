"""Rates that were measured on a card: how old they are, and which card can be calibrated."""

from __future__ import annotations

import dataclasses

import pytest
from fake_nvml import fake_nvml

from autotune.catalogue import gpus, nvml
from autotune.catalogue.gpus import Gpu, find_gpu
from autotune.catalogue.nvml import CardIdentity
from autotune.catalogue.own_rates import OwnRates
from autotune.errors import ConfigError, HardwareError
from autotune.records.calibration import Calibration
from autotune.records.fingerprint import Fingerprint
from autotune.search import own_rates
from autotune.speed.calibration import TimedKernel
from autotune.speed.calibration_plan import product

CARD = find_gpu("rtx-4070")
NAME = "NVIDIA GeForce RTX 4070"
KERNEL = TimedKernel(kernel=product("bfloat16", 8, 8, 8), seconds=1.0, spread=0.1, num_weights=1)
FOUND = Calibration(
    made_on="2026-11-23",
    card=CardIdentity(name=NAME, driver="580"),
    fingerprint=Fingerprint(
        device=NAME, driver="580", cuda="13", versions=(("torch", "2.13"),), allocator=""
    ),
    rates=OwnRates(host_factor=2.5),
    residuals=(),
    timed=(KERNEL,),
)


@pytest.mark.parametrize(
    ("timed", "torch", "words"),
    [
        (True, "2.13", "calibrated 2026-11-23"),
        (
            True,
            "2.14",
            "calibrated 2026-11-23 with torch 2.13: run autotune calibrate again",
        ),
        (
            False,
            "2.13",
            "this machine's host takes 2.5 times as long per operation as usual, timed 2026-11-23",
        ),
        (
            False,
            "2.14",
            "this machine's host takes 2.5 times as long per operation as usual, timed 2026-11-23 with "
            "torch 2.13",
        ),
    ],
)
def test_the_age_of_rates_is_said(
    monkeypatch: pytest.MonkeyPatch, timed: bool, torch: str, words: str
) -> None:
    monkeypatch.setattr(own_rates, "version", lambda _: torch)
    found = FOUND if timed else dataclasses.replace(FOUND, timed=())
    assert own_rates.with_rates(CARD, found) == (
        dataclasses.replace(CARD, rates=found.rates),
        words,
    )
    # A calibration that does not say its torch is compared with none.
    silent = dataclasses.replace(found.fingerprint, versions=())
    _, said = own_rates.with_rates(CARD, dataclasses.replace(found, fingerprint=silent))
    assert "torch" not in said


def test_the_card_that_is_here_is_calibrated_by_its_facts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_nvml(monkeypatch, [NAME])
    here = gpus.detect()[0]
    assert own_rates.card_to_calibrate(None) == (
        dataclasses.replace(here, rates=None),
        nvml.identity(),
    )
    # Its rates of before are not what new ones are fitted from.
    rated = dataclasses.replace(here, rates=OwnRates(host_factor=2.0))
    monkeypatch.setattr(gpus, "detect", lambda: [rated])
    assert own_rates.card_to_calibrate(None)[0].rates is None


def test_a_file_gives_the_facts_and_the_driver_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_nvml(monkeypatch, [NAME])
    here = gpus.detect()[0]
    named = {
        "mine": dataclasses.replace(CARD, name="mine", capacity_bytes=1),
        "other": find_gpu("a100-sxm4-80gb"),
    }
    monkeypatch.setattr(gpus, "find_gpu", named.__getitem__)
    card, _ = own_rates.card_to_calibrate("mine")
    assert (card.name, card.capacity_bytes) == ("mine", here.capacity_bytes)
    with pytest.raises(ConfigError, match="other is of another card than the one here"):
        own_rates.card_to_calibrate("other")


@pytest.mark.parametrize("lacking", [{"peak_flop_per_second": {}}, {"num_sms": None}])
def test_a_card_of_which_too_little_is_known(
    monkeypatch: pytest.MonkeyPatch, lacking: dict[str, object]
) -> None:
    unknown: Gpu = dataclasses.replace(CARD, **lacking)  # type: ignore[arg-type]
    monkeypatch.setattr(gpus, "detect", lambda: [unknown])
    with pytest.raises(ConfigError, match="is not in the catalogue"):
        own_rates.card_to_calibrate(None)


def test_without_a_card_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, [], error="NVML Shared Library Not Found")
    with pytest.raises(HardwareError, match="There is no card to calibrate") as raised:
        own_rates.card_to_calibrate(None)
    assert raised.value.why == nvml.why_no_card()
    fake_nvml(monkeypatch, [])
    with pytest.raises(HardwareError) as raised:
        own_rates.card_to_calibrate(None)
    assert raised.value.why
    assert own_rates.with_own_rates(CARD) == (CARD, "")
