"""result.json: the answer with its evidence, the object that `find --json` prints."""

from __future__ import annotations

import json
from collections.abc import Mapping

from autotune.export.exporter import Exporter
from autotune.space.config import TrainConfig, Workload

filename = "result.json"


def write(*, workload: Workload, config: TrainConfig, result: Mapping[str, object]) -> str:  # noqa: ARG001
    """Return the result alone; it repeats the workload and the config."""
    return json.dumps(result, indent=2, allow_nan=False) + "\n"


EXPORTER = Exporter(name="result", filename=filename, write=write)
