"""Families that Liger has kernels for (data/liger.toml)."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path

_TABLE = Path(__file__).with_name("data") / "liger.toml"


@functools.cache
def families() -> frozenset[str]:
    """Return the families, by `model_type`."""
    return frozenset(tomllib.loads(_TABLE.read_text(encoding="utf-8"))["families"])
