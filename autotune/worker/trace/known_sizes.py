"""Stand-ins for torch's arithmetic of sizes that are not known, which takes sympy to import.

A trace's sizes are all known: they are numbers, of which the functions below give what torch's own do. The
first symbol among them, or the first other function that is asked for, has torch's module loaded after all.

Read from torch 2.13 fx/experimental/symbolic_shapes.py; tests/contracts/test_trace_imports.py compares them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._ordered_set import OrderedSet

MODULE = "torch.fx.experimental.symbolic_shapes"

_NUMBERS = (bool, int, float)


def functions(load: Callable[[], Any]) -> Mapping[str, Callable[..., Any]]:
    """Return the stand-ins by name; `load` loads torch's module and returns it."""
    return {
        name: functools.partial(_of_known, name, is_known, quick, load)
        for name, (is_known, quick) in _FUNCTIONS.items()
    }


def _of_known(
    name: str,
    is_known: Callable[..., bool],
    quick: Callable[..., Any],
    load: Callable[[], Any],
    *args: Any,
    **rest: Any,
) -> Any:
    if not rest and is_known(*args):
        return quick(*args)
    return getattr(load(), name)(*args, **rest)


def _is_flag(value: Any, *_: Any) -> bool:
    return type(value) is bool


def _are_flags(*values: Any) -> bool:
    return all(type(value) is bool for value in values)


def _is_number(value: Any) -> bool:
    return type(value) in _NUMBERS


def _are_sizes(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return all(type(size) is int for size in (*one, *other))
    return type(one) is int and type(other) is int


def _is_of_known_shape(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and all(type(size) is int for size in tensor.shape)


def _as_it_is(value: Any, *_: Any) -> Any:
    return value


def _are_equal(one: Any, other: Any) -> bool:
    return bool(tuple(one) == tuple(other) if isinstance(one, tuple | list) else one == other)


_FUNCTIONS: dict[str, tuple[Callable[..., bool], Callable[..., Any]]] = {
    "expect_true": (_is_flag, _as_it_is),
    "guard_or_false": (_is_flag, _as_it_is),
    "guard_or_true": (_is_flag, _as_it_is),
    "guard_size_oblivious": (_is_flag, _as_it_is),
    "statically_known_true": (_is_flag, _as_it_is),
    "sym_and": (_are_flags, lambda *values: all(values)),
    "sym_or": (_are_flags, lambda *values: any(values)),
    "sym_eq": (_are_sizes, _are_equal),
    "guarding_hint_or_throw": (lambda value: type(value) in (bool, int), _as_it_is),
    "has_guarding_hint": (_is_number, lambda _: True),
    "free_unbacked_symbols": (_is_of_known_shape, lambda _: OrderedSet()),
    "is_nested_int": (_is_number, lambda _: False),
}
