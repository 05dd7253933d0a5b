"""Changes what other libraries' modules hold, for as long as a trace takes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any


@contextlib.contextmanager
def replaced(attributes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes, each given as (module or class, name, value), and set them back afterwards."""
    with contextlib.ExitStack() as undo:
        for owner, name, value in attributes:
            is_there, before = name in vars(owner), vars(owner).get(name)
            setattr(owner, name, value)
            if is_there:
                undo.callback(setattr, owner, name, before)
            else:
                undo.callback(delattr, owner, name)
        yield


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Let weights be made without their first values, which nothing on `meta` has.

    PyTorch goes through all the shapes of a random number's arithmetic for each.
    """
    import torch.nn.init as init

    names = [name for name in vars(init) if name.endswith("_") and not name.startswith("_")]
    with replaced([(init, name, _as_it_is) for name in names]):
        yield


def _as_it_is(tensor: Any, *_: Any, **__: Any) -> Any:
    return tensor


@contextlib.contextmanager
def taken_for_cuda(device_type: str, package: str) -> Iterator[None]:
    """Replace the name `cuda`, that a package's functions compare a device's with, by another."""
    codes = {
        function: function.__code__
        for name, module in list(sys.modules.items())
        if name.startswith(f"{package}.")
        for function in vars(module).values()
        if isinstance(function, FunctionType)
        and function.__module__ == name
        and "cuda" in function.__code__.co_consts
    }
    for function, code in codes.items():
        names = tuple(device_type if value == "cuda" else value for value in code.co_consts)
        function.__code__ = code.replace(co_consts=names)
    try:
        yield
    finally:
        for function, code in codes.items():
            function.__code__ = code
