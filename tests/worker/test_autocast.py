"""The functions that are taken for autocast's, against those that the installed torch has autocast for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.worker.trace.autocast import POLICIES
from autotune.worker.trace.cuda import Device, device_choices

COMPOSED = {
    "cuda": {
        "rmatmul": "matmul",
        "square": "pow",
        "rpow": "pow",
        "rdiv": "reciprocal",
        "interpolate": "upsample_nearest2d",
        "linalg_norm": "linalg_vector_norm",
    },
    "cpu": {"rmatmul": "matmul", "cross_entropy": "cross_entropy_loss", "einsum": "bmm"},
}
"""Functions under another name than their operation's, or made of one that is cast."""


@pytest.mark.parametrize(("device", "key"), [("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU")])
def test_torch_casts_for_each_of_the_functions(device: str, key: str) -> None:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    cast = {name.removeprefix("aten::").partition(".")[0] for name in names}
    ours = {function.__name__.strip("_") for function in POLICIES[device]}
    assert {COMPOSED[device].get(name, name) for name in ours} <= cast


Call = Callable[..., torch.Tensor]
CALLS: dict[str, Call] = {
    "square": lambda x, y: x.square(),
    "square of the namespace": lambda x, y: torch.square(x),
    "power of a number": lambda x, y: 2**x,
    "a number over": lambda x, y: 1.0 / x,
    "over a number": lambda x, y: x / 2.0,
    "root": lambda x, y: x.sqrt(),
    "norm": lambda x, y: torch.norm(x),
    "norm along": lambda x, y: x.norm(2, -1, keepdim=True),
    "vector norm": lambda x, y: torch.linalg.vector_norm(x, dim=-1),
    "matrix norm": lambda x, y: torch.linalg.matrix_norm(x),
    "linalg norm": lambda x, y: torch.linalg.norm(x, dim=-1),
    "normalize": lambda x, y: F.normalize(x, dim=-1),
    "softmin": lambda x, y: F.softmin(x, dim=-1),
    "gumbel": lambda x, y: F.gumbel_softmax(x, dim=-1),
    "log2": lambda x, y: x.log2(),
    "tan": lambda x, y: torch.tan(x),
    "exp": lambda x, y: x.exp(),
    "silu": lambda x, y: F.silu(x),
    "sum": lambda x, y: x.sum(-1),
    "mean": lambda x, y: x.mean(-1),
    "sum into its dtype": lambda x, y: x.sum(-1, dtype=torch.bfloat16),
    "nearest": lambda x, y: F.interpolate(x.view(1, 1, 4, 4), scale_factor=2),
    "bilinear": lambda x, y: F.interpolate(x.view(1, 1, 4, 4), scale_factor=2, mode="bilinear"),
    "vector": lambda x, y: torch.mv(y, y.select(0, 0)),
    "outer": lambda x, y: torch.addr(y, y.select(0, 0), y.select(0, 1)),
    "mixed product": lambda x, y: x @ y,
    "mixed sum": lambda x, y: x + y,
    "into": lambda x, y: torch.exp(y, out=torch.empty_like(y)),
    "triplets": lambda x, y: F.triplet_margin_loss(x, x, x),
    "rms norm": lambda x, y: F.rms_norm(x, (4,)),
    "layer norm": lambda x, y: F.layer_norm(x, (4,)),
}
"""Functions of a matrix in bfloat16, and of one in float32."""


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_results_have_the_dtype_that_cudas_own_autocast_gives_them(call: Call) -> None:
    with FakeTensorMode():
        expected = _under_autocast("cuda", call, torch.device("cuda"))
    with device_choices(Device(compute_capability=(9, 0), cublas_workspace_bytes=0)):
        found = _under_autocast("cpu", call, torch.device("meta"))
    assert found == expected


def _under_autocast(state: str, call: Call, device: torch.device) -> tuple[torch.dtype, torch.Size]:
    """Switch autocast on without asking whether there is a card."""
    x, y = (
        torch.empty(4, 4, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.float32)
    )
    was = torch.get_autocast_dtype(state)
    torch.set_autocast_enabled(state, True)
    torch.set_autocast_dtype(state, torch.bfloat16)
    try:
        result = call(x, y)
    finally:
        torch.set_autocast_enabled(state, False)
        torch.set_autocast_dtype(state, was)
        torch.clear_autocast_cache()
    return result.dtype, result.shape
