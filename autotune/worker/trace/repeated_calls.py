"""Results and costs of repeated calls of operations on `meta`, worked out once.

PyTorch's shape functions are written in Python for many operations and take most of a trace's time, and a
trace makes the same few calls over and over. What an operation returns for tensors of the same shapes,
strides, offsets and dtypes is kept as layouts, and further calls get empty tensors of these. What a call
costs depends on the same, and is kept beside.

Results are made by PyTorch each time where an operation changes its arguments or returns a part of them, and
where they depend on values. Nothing is kept of views, and of tensors that are not on `meta`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from autotune.worker.trace.kernel_costs import is_alias
from autotune.worker.trace.meta_values import tensors_in

_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


@dataclass(slots=True)
class RepeatedCall:
    """One operation with arguments of certain shapes, strides, offsets and dtypes, and certain numbers."""

    layouts: tuple[_Layout, ...] | list[_Layout] | None = None
    """Layouts of the new tensors that it returns, a list where it returns one; None: not known."""
    costs: dict[Any, Any] = field(default_factory=dict)
    """Its costs, by the number of the tracker's settings."""


_calls: dict[Any, RepeatedCall] = {}
"""Calls by the operation and its described arguments."""
_never: set[Any] = set()
"""Operations whose results are not made anew."""

_OF_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class _NotDescribed(Exception):
    """An argument does not say all that a result may depend on."""


def call_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RepeatedCall | None:
    """The call, one object for all that are alike; None for a view, and where arguments do not say all."""
    if is_alias(func):
        return None
    try:
        named = ((name, _described(kwargs[name])) for name in kwargs)
        described = func, torch.get_default_dtype(), _described(args), *named
        call = _calls.get(described)
        if call is None:
            call = _calls[described] = RepeatedCall()
    except (_NotDescribed, TypeError):  # TypeError: a generator, say, has no hash.
        return None
    return call


def result_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: RepeatedCall | None
) -> Any:
    """Return what the operation returns. `call` is that of call_of."""
    if call is None or func in _never:
        return func(*args, **kwargs)
    if call.layouts is not None:
        return _made(call.layouts)
    out = func(*args, **kwargs)
    if not _changes_or_looks(func):
        call.layouts = _layouts(out, [*args, *kwargs.values()])
    if call.layouts is None:
        _never.add(func)
    return out


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if not value.is_meta or value.is_complex() or value.layout is not torch.strided:
            raise _NotDescribed
        return value.shape, value.stride(), value.dtype, value.storage_offset()
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    return type(value), value  # 1, 1.0 and True are equal and give different dtypes.


def _changes_or_looks(func: Any) -> bool:
    """Whether an operation changes or passes on its arguments, or looks at their values."""
    schema = func._schema
    aliases = [each.alias_info for each in (*schema.arguments, *schema.returns)]
    return any(alias is not None for alias in aliases) or not _OF_VALUES.isdisjoint(func.tags)


def _layouts(out: Any, args: list[Any]) -> Any:
    """The layouts of new tensors, in a tuple where the operation returns one; None for any others."""
    outs = out if isinstance(out, tuple) else (out,)
    if not all(type(each) is torch.Tensor and each.is_meta for each in outs):
        return None
    storages = [each.untyped_storage() for each in (*tensors_in(args), *outs)]
    addresses = [storage._cdata for storage in storages]
    if not set(addresses[-len(outs) :]).isdisjoint(addresses[: -len(outs)]):
        return None
    if len(set(addresses[-len(outs) :])) < len(outs):
        return None
    layouts = tuple((each.shape, each.stride(), each.dtype) for each in outs)
    for layout, storage in zip(layouts, storages[-len(outs) :], strict=True):
        if _empty(layout).untyped_storage().nbytes() != storage.nbytes():
            return None
    return layouts if isinstance(out, tuple) else list(layouts)


def _made(layouts: tuple[_Layout, ...] | list[_Layout]) -> Any:
    if isinstance(layouts, list):
        return _empty(layouts[0])
    return tuple(map(_empty, layouts))


def _empty(layout: _Layout) -> torch.Tensor:
    shape, stride, dtype = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
