"""The name of the model in a written file."""

from __future__ import annotations

import os


def model_reference(model: str) -> str:
    """Return what `from_pretrained` takes: a Hub id, or a folder from wherever the file is used.

    A configuration of another name than config.json is named itself: its folder is no model.
    """
    if not os.path.exists(model):
        return model
    is_in_its_folder = os.path.isfile(model) and os.path.basename(model) == "config.json"
    return os.path.abspath(os.path.dirname(model) if is_in_its_folder else model)
