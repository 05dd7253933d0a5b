"""What the timed commands run with."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """This one's, but of the checkout, with no network, and with compiled modules, as an installation has."""
    own = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    own.pop("PYTHONDONTWRITEBYTECODE", None)
    return own
