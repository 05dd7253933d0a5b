"""What tensors on `meta` cannot say, or say slowly: values that a model asks for, shapes of results."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

_ELEMENTWISE = {
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar,
    aten.pow.Tensor_Scalar, aten.neg.default, aten.rsqrt.default, aten.abs.default,
    aten.silu.default, aten.gelu.default, aten.tanh.default, aten.sigmoid.default,
}  # fmt: skip


def quick_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation on `meta` returns, without PyTorch's shape functions; None: ask them."""
    if func in _ELEMENTWISE:
        return _like_first(args, kwargs)
    # Before 2.13 PyTorch has none for it; nothing is computed there.
    return kwargs["out"] if func is aten.addmm.dtype_out else None


def _like_first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The result of an elementwise operation that looks like its first operand; None: ask PyTorch.

    PyTorch's own shape functions for these are written in Python and take most of a trace's time.
    TensorIterator lays a result out like its first operand when that has the full shape and is dense.
    """
    first = args[0]
    if not isinstance(first, torch.Tensor) or not first.is_floating_point() or kwargs:
        return None
    shape = first.shape
    for other in args[1:]:
        if isinstance(other, torch.Tensor):
            if other.dim() and (other.dtype != first.dtype or not _broadcasts(other.shape, shape)):
                return None
            if not other.dim() and other.is_floating_point() and other.device.type != "cpu":
                return None
        elif isinstance(other, complex):
            return None
    if not first.dim() or not aten.is_non_overlapping_and_dense.default(first):
        return None
    if first.is_contiguous():
        return torch.empty(shape, dtype=first.dtype, device=first.device)
    return torch.empty_strided(shape, first.stride(), dtype=first.dtype, device=first.device)


def _broadcasts(small: torch.Size, shape: torch.Size) -> bool:
    """Whether `small` expands to `shape`."""
    if small == shape:
        return True
    offset = len(shape) - len(small)
    return offset >= 0 and all(n in (1, shape[offset + i]) for i, n in enumerate(small))


QUESTIONS = {aten.all.default, aten.sum.default, aten.eq.Scalar}
FAULTS = {aten.isinf.default, aten.isnan.default, aten.any.default}


def note_question(tensor: torch.Tensor, out: Any) -> None:
    """Remember that `all` is asked of a mask (batch, length), be it by comparing its sum with its size
    (transformers 5.23 masking_utils.py, fast_all)."""
    if (tensor.dtype is torch.bool and tensor.dim() == 2) or hasattr(tensor, "is_of_mask"):
        out.is_of_mask = True


def note_fault(func: Any, tensor: torch.Tensor, out: Any) -> None:
    """Remember that infinities or NaNs are looked for (peft 0.21 tuners/vblora/layer.py)."""
    if func is not aten.any.default or hasattr(tensor, "is_of_faults"):
        out.is_of_faults = True


def scalar_of(tensor: torch.Tensor, *, has_padding: bool) -> bool:
    """What `.item()` says of a tensor without values.

    Transformers asks whether a whole mask is ones: yes, unless there is padding; and whether each row of
    a batch is one sample: yes. PEFT asks whether weights are infinite: no. A number cannot be answered.
    """
    if tensor.dtype is not torch.bool:
        raise NotImplementedError(
            "the model reads a number from a tensor, which a trace does not have"
        )
    return not (hasattr(tensor, "is_of_faults") or (has_padding and hasattr(tensor, "is_of_mask")))
