"""The kernels that a trace takes for attention, against what PyTorch's CUDA build chose (studies/)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.catalogue.gpu_rows import MOST_THREADS_PER_SM, THREADS_PER_SM, TRACED_AS
from autotune.catalogue.gpus import catalogue
from autotune.catalogue.installed import OTHER_ATTENTION_SINCE
from autotune.space import precisions
from autotune.space.precisions import fuses_grouped_heads
from autotune.worker.trace import sdpa
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
    letters: str,
    asked: list[str],
    calls: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sdpa, "PREFERS_CUDNN", True)  # builds for CUDA 13 were asked
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
    """But Pascal and Volta, which the builds for CUDA 13 no longer know, B300 and GB300, and GB10."""
    capabilities = {card.compute_capability for card in catalogue() if card.compute_capability}
    asked = {_numbers(name.split()[1]) for names in choices().values() for name in names}
    assert capabilities - asked == {(6, 0), (7, 0), (10, 3), (12, 1)}


@pytest.mark.parametrize(("capability", "other"), TRACED_AS.items(), ids=str)
def test_cards_are_traced_as_others_for_which_pytorch_chose_the_same(
    capability: tuple[int, int],
    other: tuple[int, int],
    calls: list[dict[str, Any]],
) -> None:
    chosen: dict[tuple[int, int], dict[tuple[int, int], str]] = {}
    for letters, names in choices().items():
        for name in names:
            version, asked = map(_numbers, name.split())
            chosen.setdefault(asked, {})[version] = letters
    if capability in chosen:
        assert chosen[capability] == chosen[other]
    for call in calls:
        made = Call(**call)
        assert attention_kernel(capability, made) == attention_kernel(other, made)
    threads = [THREADS_PER_SM.get(each, MOST_THREADS_PER_SM) for each in (capability, other)]
    assert threads[0] == threads[1]


@pytest.mark.parametrize(("letters", "asked"), choices().items(), ids=lambda value: value[0][:20])
def test_where_key_heads_are_expanded_pytorch_has_no_fused_kernel_for_groups(
    letters: str,
    asked: list[str],
    calls: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Training without mask and dropout, as packed samples are, with heads that fused kernels take."""
    chosen: dict[tuple[torch.dtype, int, bool], set[str]] = {}
    for call, letter in zip(calls, letters, strict=True):
        query, key, value = call["query"], call["key"], call["value"]
        size, is_grouped = query.shape[-1], key.shape[1] < query.shape[1]
        if (
            query.requires_grad
            and call["mask"] is None
            and not call["dropout_p"]
            and size == value.shape[-1] <= 256
            and size % 8 == 0
            and is_grouped == call["enable_gqa"]
        ):
            chosen.setdefault((query.dtype, size, is_grouped), set()).add(letter)
    assert len(chosen) > 60
    for name in asked:
        version, capability = map(_numbers, name.split())
        knows_groups = version >= OTHER_ATTENTION_SINCE
        monkeypatch.setattr(precisions, "fuses_any_grouped_heads", lambda knows=knows_groups: knows)
        for (dtype, size, is_grouped), kernels in chosen.items():
            if dtype is torch.bfloat16 and capability < (8, 0):
                continue  # Rules have float16 there.
            if (
                192 < size <= 224
                and is_grouped
                and not knows_groups
                and capability not in ((8, 0), (9, 0), (10, 0))
            ):
                continue  # Flash attention does not train these there; no model is known to have them.
            fuses = fuses_grouped_heads(OF_DTYPE[dtype], capability) or not is_grouped
            assert ("m" not in kernels) == fuses, (name, dtype, size, is_grouped)


OF_DTYPE = {torch.float32: "fp32", torch.float16: "fp16-mixed", torch.bfloat16: "bf16-mixed"}
"""A precision that computes in each."""
