"""Marks for tests of what other packages say, which an install may lack (torch, for a new Python)."""

from __future__ import annotations

import importlib.util

import pytest


def needs(package: str) -> pytest.MarkDecorator:
    """Mark a test, or its case, as in need of this package, which need not be imported."""
    is_missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(is_missing, reason=f"{package} is not installed")
