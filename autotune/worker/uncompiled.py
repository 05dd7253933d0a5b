"""Imports of libraries without what they compile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Let torch.compile do nothing for the length of a `with` block.

    bitsandbytes compiles its CPU kernels as it is imported, which loads the compiler: 0.9 s for what
    is never run here.
    """
    import torch

    compile_function = torch.compile
    torch.compile = lambda function=None, **_: function or (lambda f: f)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_function
