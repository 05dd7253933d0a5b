"""Finds the fastest fine-tuning configuration of a model that fits a GPU.

`find` answers, `Result` is its answer (autotune.api). Importing the package loads neither: they are
fetched when they are first named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.common.version import __version__

if TYPE_CHECKING:
    from autotune.api import Result, find

__all__ = ["Result", "__version__", "find"]


def __getattr__(name: str) -> Any:
    if name in ("Result", "find"):
        from autotune import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
