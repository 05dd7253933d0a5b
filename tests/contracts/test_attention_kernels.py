"""The kernels that a trace takes for attention, against what PyTorch's CUDA build chose (studies/)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.catalogue.gpus import catalogue
from autotune.worker.trace.sdpa import Call, attention_kernel
from validation import attention_kernels

ROOT = Path(__file__).parents[2]


def choices() -> dict[str, list[str]]:
    path = ROOT / "studies" / "attention-kernels" / "choices.json"
    asked: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8"))
    return asked


@pytest.fixture(scope="module")
def calls() -> list[dict[str, Any]]:
    return list(attention_kernels.calls("meta"))


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


@pytest.mark.parametrize(("letters", "asked"), choices().items(), ids=lambda value: value[0][:20])
def test_the_kernel_is_the_one_that_pytorch_chose(
    letters: str, asked: list[str], calls: list[dict[str, Any]]
) -> None:
    assert len(letters) == len(calls)
    for name in asked:
        version, capability = map(_numbers, name.split())
        others = [
            (kernel, letter, call)
            for call, letter in zip(calls, letters, strict=True)
            if (kernel := attention_kernel(capability, Call(**call), version))[0] != letter
        ]
        assert not others, (name, len(others), others[0])


def test_every_card_of_the_catalogue_was_asked_about() -> None:
    """But Volta, which the builds for CUDA 13 no longer know, and B300 and GB300."""
    capabilities = {card.compute_capability for card in catalogue() if card.compute_capability}
    asked = {_numbers(name.split()[1]) for names in choices().values() for name in names}
    assert capabilities - asked == {(7, 0), (10, 3)}
