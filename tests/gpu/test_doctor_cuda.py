"""The doctor on a CUDA device: `pytest -m gpu tests/gpu`. Not yet run."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune import doctor
from autotune.catalogue.gpus import detect
from autotune.doctor import versions
from autotune.doctor.machine import CheckedMachine
from autotune.doctor.verdict import Status

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not detect(), reason="NVML finds no card here"),
]


def test_a_card_that_works_is_said_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = {each.check.name: each for each in doctor.examine(CheckedMachine("sqlite:///x.db"))}
    for name in ("driver", "cuda", "torch", "kernels", "bitsandbytes", "allocator"):
        assert found[name].verdict.status is not Status.FAIL, found[name].verdict
    card = detect()[0]
    # The catalogue's name may differ from the driver's, which is what is shown.
    assert "compute capability" in found["driver"].verdict.said
    assert ", ran on the " in found["torch"].verdict.said
    assert "libbitsandbytes_cuda" in found["bitsandbytes"].verdict.said
    assert sum(each.seconds for each in found.values()) < 10
    assert any(line.startswith(f"card: {card.name}, ") for line in versions.lines())
