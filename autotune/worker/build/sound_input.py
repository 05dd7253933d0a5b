"""The tensor of sound in a batch, and its dtype.

What follows the imports is put into train.py as it stands (autotune.export.train_py), before
autotune.worker.build.sound_rows.
"""

from __future__ import annotations

from typing import Any

import torch

FEATURES = "input_features"


def dtype_read_by(model: Any) -> torch.dtype:
    """The dtype of the weights that read sound: a convolution takes no other."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    kinds = torch.nn.Conv1d, torch.nn.Conv2d
    return next(part.weight.dtype for part in inner.modules() if isinstance(part, kinds))
