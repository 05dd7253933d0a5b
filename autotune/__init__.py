"""Finds the fastest fine-tuning configuration of a model that fits a GPU.

`find` answers, `Result` is its answer; `estimate` prices one configuration; `limits` says what is the most
that fits (autotune.api). Importing the package loads none of them: they are fetched when first named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.common.version import __version__

if TYPE_CHECKING:
    from autotune.api import Result, estimate, find, limits

__all__ = ["Result", "__version__", "estimate", "find", "limits"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from autotune import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
