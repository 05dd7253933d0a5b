"""The classes of TRL's trainers, as far as the installed version has them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

from autotune.space.trainers import Trainer
from autotune.worker.build.model import UnsupportedModel

_OF_A_TEACHER = "trl.kernels.chunked_divergence"
"""The module with which the distillation that is predicted compares a student with its teacher."""


def class_of(row: Trainer) -> Any:
    """Return a trainer's class. Raises UnsupportedModel where TRL is not installed, or lacks it."""
    try:
        import trl

        if row.has_teacher:
            importlib.import_module(_OF_A_TEACHER)
        return getattr(trl, row.class_name)
    except (AttributeError, ImportError) as error:
        if importlib.util.find_spec("trl") is None:
            raise UnsupportedModel(
                f"TRL is not installed here ({error}). It needs: pip install trl"
            ) from error
        raise UnsupportedModel(
            f"TRL {importlib.metadata.version('trl')} has no {row.class_name} as it is predicted here. It "
            "needs: pip install --upgrade trl"
        ) from error
