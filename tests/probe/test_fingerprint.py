"""What is known of this machine without torch."""

from __future__ import annotations

from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from fake_nvml import fake_nvml
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


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["NVIDIA T4"], ("NVIDIA T4", "580.65.06")),
        (["NVIDIA T4", "NVIDIA T4"], ("NVIDIA T4", "580.65.06")),
        (["NVIDIA T4", "NVIDIA L4"], None),  # CUDA may count the other one first.
    ],
)
def test_the_visible_card(
    monkeypatch: pytest.MonkeyPatch, names: list[str], found: tuple[str, str] | None
) -> None:
    fake_nvml(monkeypatch, names)
    assert fingerprint._card() == found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert fingerprint._card() == ("NVIDIA T4", "580.65.06")
    fake_nvml(monkeypatch, [], error="NVML Shared Library Not Found")
    assert fingerprint._card() is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from typing import Optional\ndebug = False\ncuda: Optional[str] = '13.0'\n", "13.0"),
        ("debug = False\nother = cuda = '7'\ncuda = '12.8'\nhip = None\n", "12.8"),
        ("cuda: Optional[str] = None\n", None),
        ("cuda = None\n", None),
        ("cuda = ''\n", None),
        ("hip: str = '6.0'\nrocm = '6.0'\n", None),
        ("cuda =", None),
        (None, None),
    ],
)
def test_cuda_is_read_off_torchs_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, found: str | None
) -> None:
    if text is not None:
        (tmp_path / "version.py").write_text(text)
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(fingerprint.importlib.util, "find_spec", {"torch": spec}.get)
    assert fingerprint._cuda() == found
    for nowhere in (None, ModuleSpec("torch", None)):
        monkeypatch.setattr(fingerprint.importlib.util, "find_spec", lambda _, it=nowhere: it)
        assert fingerprint._cuda() is None
