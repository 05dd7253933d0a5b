"""Results of operations on `meta`, made anew where the same call came before.

PyTorch's shape functions are written in Python for many operations and take most of a trace's time, and a
trace makes the same few calls over and over. What an operation returns for tensors of the same shapes,
strides, offsets and dtypes is kept as layouts, and further calls get empty tensors of these.

Not for what changes its arguments or returns a part of them, for what depends on values, and for tensors that
are not on `meta`.
"""

from __future__ import annotations

from typing import Any

import torch

_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]

_known: dict[Any, Any] = {}
"""Layouts of results, by the operation and its described arguments."""
_never: set[Any] = set()
"""Operations whose results are not made anew."""

_OF_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class _NotDescribed(Exception):
    """An argument does not say all that a result may depend on."""


def result_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what the operation returns."""
    if func in _never:
        return func(*args, **kwargs)
    try:
        named = ((name, _described(kwargs[name])) for name in kwargs)
        call = func, torch.get_default_dtype(), _described(args), *named
        layouts = _known.get(call)
    except (_NotDescribed, TypeError):  # TypeError: a generator, say, has no hash.
        return func(*args, **kwargs)
    if layouts is not None:
        return _made(layouts)
    out = func(*args, **kwargs)
    layouts = None if _changes_or_looks(func) else _layouts(out, [*args, *kwargs.values()])
    if layouts is None:
        _never.add(func)
    else:
        _known[call] = layouts
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
    storages = [each.untyped_storage() for each in (*_tensors(args), *outs)]
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


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in _tensors(value)]
    return []
