"""What is known of this machine without torch."""

from __future__ import annotations

from importlib import metadata

import pytest
from lacking import needs

from autotune.catalogue.installed import cpu_name, versions
from autotune.probe import fingerprint
from autotune.probe.fingerprint import assumed_fingerprint


@needs("torch")
def test_without_a_card_it_is_the_processor() -> None:
    found = assumed_fingerprint("cpu")
    assert found is not None
    assert (found.device, found.driver, found.cuda) == (cpu_name(), "", "")
    assert found.versions == versions()


@needs("torch")
def test_a_card_has_its_driver_and_torchs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_card", lambda: ("NVIDIA GeForce RTX 4090", "580.10"))
    monkeypatch.setattr(fingerprint, "_cuda", lambda: "13.0")
    found = assumed_fingerprint("cuda")
    assert found is not None
    assert (found.device, found.driver, found.cuda) == ("NVIDIA GeForce RTX 4090", "580.10", "13.0")
    assert found.versions == versions()
    cpu = assumed_fingerprint("cpu")
    assert cpu is not None
    assert cpu != found


@pytest.mark.parametrize("lacking", ["_card", "_cuda"])
def test_what_needs_torch_to_tell_is_not_assumed(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "_card", lambda: ("a card", "580.10"))
    monkeypatch.setattr(fingerprint, "_cuda", lambda: "13.0")
    monkeypatch.setattr(fingerprint, lacking, lambda: None)
    assert assumed_fingerprint("cuda") is None


def test_without_torch_nothing_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise metadata.PackageNotFoundError("torch")

    monkeypatch.setattr(fingerprint, "versions", missing)
    assert assumed_fingerprint("cpu") is None
