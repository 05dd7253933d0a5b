"""How a written file names the model."""

from __future__ import annotations

import os


def model_reference(model: str) -> str:
    """What `from_pretrained` takes: a Hub id, or a folder from wherever the file is used."""
    if not os.path.exists(model):
        return model
    folder = os.path.dirname(model) if os.path.isfile(model) else model
    return os.path.abspath(folder)
