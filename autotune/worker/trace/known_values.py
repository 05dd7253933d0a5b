"""Values of small tensors of whole numbers in a trace, worked out beside it, for models that read them.

A tensor on `meta` has no values. Models that look at pictures one by one read where each begins: numbers that
follow from the pictures' sizes. What is made of such numbers alone is computed on the CPU as well, and kept
with the storage that it lies in, so that views of it are known too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from autotune.worker.trace.stand_ins import replaced
from autotune.worker.trace.tracker import Tracker

aten = torch.ops.aten

MOST_NUMBERS = 1 << 20
"""Most numbers of a tensor that are worked out."""
_KINDS = (torch.int64, torch.int32, torch.bool)
_WITHOUT = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_OF_VALUES = (aten.repeat_interleave.Tensor, aten.unique_consecutive.default, aten.nonzero.default)
"""Operations whose results are as large as values say."""


class _Unknown(Exception):
    """A tensor has no values."""


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a tensor on `meta`, None where they are not known."""
    known = getattr(tensor.untyped_storage(), "known", None)
    if known is None:
        return None
    with _disable_current_modes():
        value: torch.Tensor = known.as_strided(
            tensor.shape, tensor.stride(), tensor.storage_offset()
        )
        return value


def know(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Say which values a tensor on `meta` has."""
    storage: Any = tensor.untyped_storage()
    with _disable_current_modes():
        known = torch.empty(storage.nbytes() // tensor.itemsize, dtype=tensor.dtype)
        known.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(value)
    storage.known = known


@contextlib.contextmanager
def worked_out(tracker: Tracker) -> Iterator[None]:
    """Work out values of small tensors, and answer with them what models ask."""
    plain: Any = torch.Tensor
    tolist, make = plain.tolist, torch.tensor
    read = tracker.decompositions.get(aten._local_scalar_dense.default)
    pick = tracker.decompositions[aten.index.Tensor]

    def as_list(tensor: Any) -> Any:
        value = value_of(tensor) if tensor.is_meta else None
        return tolist(tensor if value is None else value)

    def number(tensor: torch.Tensor) -> Any:
        value = value_of(tensor) if tensor.is_meta else None
        if value is not None:
            with _disable_current_modes():
                return value.item()
        return NotImplemented if read is None else read(tensor)

    def picked(tensor: torch.Tensor, indices: Any) -> Any:
        out = pick(tensor, indices)
        value = value_of(tensor) if tensor.is_meta and out is not NotImplemented else None
        if value is not None and out.numel() == value.numel():  # By a mask that is true everywhere.
            know(out, value.reshape(out.shape))
        return out

    def tensor_of(data: Any, *args: Any, **kwargs: Any) -> Any:
        made = make(_numbers(data), *args, **kwargs)
        if not made.is_meta or made.dtype not in _KINDS:
            return made
        know(made, make(_numbers(data), dtype=made.dtype))
        # Before torch 2.15 PyTorch copies it to the device without a word to any mode.
        return made if tracker.knows(made) else aten.lift_fresh.default(made)

    tracker.decompositions |= {
        aten._local_scalar_dense.default: number,
        aten.index.Tensor: picked,
        **{func: _sized(func) for func in _OF_VALUES},
    }
    tracker.on_result = _note
    with replaced([(plain, "tolist", as_list), (torch, "tensor", tensor_of)]):
        yield
    tracker.on_result = None


def _note(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Work out the values of an operation's result, where all that it is made of is known."""
    if not isinstance(out, torch.Tensor) or not out.is_meta or out.dtype not in _KINDS:
        return
    storage: Any = out.untyped_storage()
    is_written = func._schema.is_mutable
    if (hasattr(storage, "known") and not is_written) or out.numel() > MOST_NUMBERS:
        return
    if func._schema.name.partition("::")[2] in _WITHOUT:
        return
    try:
        value = _on_cpu(func, args, kwargs)
    except _Unknown:
        if hasattr(storage, "known"):
            del storage.known
        return
    if not is_written:
        know(out, value)


def _sized(func: Any) -> Callable[..., Any]:
    """Return what runs an operation whose result is as large as values say."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            made = _on_cpu(func, args, kwargs)
        except _Unknown:
            return NotImplemented

        def on_meta(value: torch.Tensor) -> torch.Tensor:
            out = torch.empty(value.shape, dtype=value.dtype, device="meta")
            know(out, value)
            return out

        return tuple(map(on_meta, made)) if isinstance(made, tuple) else on_meta(made)

    return run


def _on_cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the values of its tensors. Raises _Unknown."""

    def of(part: Any) -> Any:
        if isinstance(part, torch.Tensor) and part.is_meta:
            value = value_of(part)
            if value is None:
                raise _Unknown
            return value
        return torch.device("cpu") if isinstance(part, torch.device) else part

    values, named = tree_map(of, args), tree_map(of, kwargs)
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return func(*values, **named)


def _numbers(data: Any) -> Any:
    """Return what a tensor is made of, its parts that are tensors as numbers."""
    if isinstance(data, list):
        return [_numbers(part) for part in data]
    return data.item() if isinstance(data, torch.Tensor) and data.dim() == 0 else data
