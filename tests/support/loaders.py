"""Marks for tests that need another trainer.

`make test` installs these trainers from tests/loaders.txt; a plain `[dev]` install has none of them.

What needs one is skipped where it is not installed. `make pytest` sets AUTOTUNE_TEST_LOADERS=required:
there a trainer that is missing is a failure, so that nothing passes because it was skipped.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

VARIABLE = "AUTOTUNE_TEST_LOADERS"


def needs(package: str) -> pytest.MarkDecorator:
    """Mark a test, or a module by its pytestmark, as in need of this package."""
    is_missing = importlib.util.find_spec(package) is None
    is_required = os.environ.get(VARIABLE) == "required"
    return pytest.mark.skipif(
        is_missing and not is_required,
        reason=f"{package} is not installed: pip install --no-deps -r tests/loaders.txt",
    )
