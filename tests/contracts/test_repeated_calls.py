"""Results on `meta` that are made from remembered layouts, beside those of the installed PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autotune.worker.trace.meta_values import result_instead
from autotune.worker.trace.repeated_calls import call_of
from autotune.worker.trace.repeated_calls import result_of as result_of_call
from autotune.worker.trace.tracker import Tracker

aten = torch.ops.aten


def result_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return result_of_call(func, args, kwargs, call_of(func, args, kwargs))


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def whole(value: Any) -> list[tuple[Any, ...]]:
    """All that tells two new tensors apart on `meta`."""
    values = value if isinstance(value, tuple) else (value,)
    return [
        (type(t), t.shape, t.stride(), t.dtype, t.storage_offset(), t.untyped_storage().nbytes())
        for t in values
    ]


CALLS: dict[str, Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "whole number": lambda: (aten.mul.Tensor, (tensor(3, 5, dtype=torch.int64), 2), {}),
    "floating number": lambda: (aten.mul.Tensor, (tensor(3, 5, dtype=torch.int64), 2.0), {}),
    "truth": lambda: (aten.mul.Tensor, (tensor(3, 5, dtype=torch.bool), True), {}),
    "one": lambda: (aten.mul.Tensor, (tensor(3, 5, dtype=torch.bool), 1), {}),
    "broadcast": lambda: (aten.add.Tensor, (tensor(5), tensor(3, 5).t().t()), {"alpha": 2}),
    "turned": lambda: (aten.add.Tensor, (tensor(5, 3).t(), tensor(3, 5)), {}),
    "behind an offset": lambda: (aten.clone.default, (tensor(8, 5)[2:, ::2],), {}),
    "product": lambda: (aten.mm.default, (tensor(7, 3).t(), tensor(7, 2)), {}),
    "several": lambda: (aten.native_layer_norm.default, (tensor(4, 6), [6], None, None, 1e-5), {}),
    "as a list": lambda: (aten.cat.default, ([tensor(2, 3), tensor(4, 3)],), {}),
    "cast": lambda: (aten._to_copy.default, (tensor(2, 3),), {"dtype": torch.bfloat16}),
    "dropout": lambda: (aten.native_dropout.default, (tensor(2, 3), 0.5, True), {}),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_remembered_result_is_pytorchs(call: Callable[[], Any]) -> None:
    func, args, kwargs = call()
    expected = whole(func(*args, **kwargs))
    first = result_of(func, args, kwargs)
    func, args, kwargs = call()
    second = result_of(func, args, kwargs)
    assert whole(first) == whole(second) == expected
    assert first is not second


@pytest.mark.parametrize("stride", [1, 3])
def test_what_columns_add_up_to_has_a_kernels_bytes(stride: int) -> None:
    """A CPU's kernel makes it as CUDA's does, and `meta` otherwise."""
    num_columns = 30 // stride
    settings = [30, 1], [3, 1], [1, 1], [1, 0], [stride, 1]
    there, here = (torch.empty(2, 3 * 4, num_columns, device=place) for place in ("meta", "cpu"))
    made = result_instead(aten.col2im.default, (there, *settings), {})
    assert whole(made) == whole(aten.col2im.default(here, *settings))


def test_it_follows_the_default_dtype() -> None:
    before = torch.get_default_dtype()
    numbers = tensor(3, dtype=torch.int64)
    found = []
    try:
        for dtype in (torch.float32, torch.bfloat16):
            torch.set_default_dtype(dtype)
            found.append(result_of(aten.mul.Tensor, (numbers, 0.5), {}).dtype)
    finally:
        torch.set_default_dtype(before)
    assert found == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("func", "args"), [(aten.view.default, ([6],)), (aten._unsafe_view.default, ([6],))]
)
def test_a_part_of_an_argument_stays_one(func: Any, args: tuple[Any, ...]) -> None:
    for _ in range(2):
        given = tensor(2, 3)
        assert torch._C._is_alias_of(result_of(func, (given, *args), {}), given)


def test_what_changes_its_argument_returns_it() -> None:
    for _ in range(2):
        given = tensor(2, 3)
        assert result_of(aten.add_.Tensor, (given, 1), {}) is given


def test_values_are_asked_for_each_time() -> None:
    """Numbers that lie elsewhere than on `meta` are no layout."""
    for value in (2, 3):
        given = torch.tensor(value, device="cpu")
        assert result_of(aten.mul.Tensor, (given, 2), {}).item() == 2 * value


def kernels_of(*tensors: torch.Tensor) -> list[tuple[str, tuple[int, ...], bool]]:
    """Launches of doubling each, as a tracker records them."""
    with Tracker("meta") as tracker:
        for each in tensors:
            tracker.index_of(each)
            each * 2
    return [(k.name, k.tensor_bytes, k.recomputed) for k in tracker.recording.kernels]


def test_a_repeated_call_is_recorded_like_the_first() -> None:
    one, other = kernels_of(tensor(3, 5), tensor(3, 5))
    assert one == other == ("mul", (60, 60), False)


def test_bytes_that_depend_on_the_storage_are_counted_each_time() -> None:
    """Windows of four, one apart, read no more than what lies there."""
    in_little, in_much = tensor(10), tensor(1000)
    windows = [each.as_strided((7, 4), (1, 1)) for each in (in_little, in_much)]
    moved = [tensor_bytes for _, tensor_bytes, _ in kernels_of(*windows)]
    assert moved == [(112, 40), (112, 112)]
