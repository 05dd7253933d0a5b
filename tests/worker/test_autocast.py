"""The functions that are taken for autocast's, against those that the installed torch has autocast for."""

from __future__ import annotations

import pytest
import torch

from autotune.worker.trace.autocast import POLICIES

COMPOSED = {
    "cuda": {"rmatmul": "matmul"},
    "cpu": {"rmatmul": "matmul", "cross_entropy": "cross_entropy_loss", "einsum": "bmm"},
}
"""Functions under another name than their operation's, or made of one that is cast."""


@pytest.mark.parametrize(("device", "key"), [("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU")])
def test_torch_casts_for_each_of_the_functions(device: str, key: str) -> None:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    cast = {name.removeprefix("aten::").partition(".")[0] for name in names}
    ours = {function.__name__.strip("_") for function in POLICIES[device]}
    assert {COMPOSED[device].get(name, name) for name in ours} <= cast
