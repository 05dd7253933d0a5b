"""model_card.md: a section for the README of the model that was trained."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from autotune.common.units import format_bytes
from autotune.export.carried import one_line, settings
from autotune.export.exporter import Exporter
from autotune.space.config import TrainConfig, Workload
from autotune.space.knobs import KNOBS
from autotune.space.learning_rates import learning_rate
from autotune.space.words import describe

_KEPT = ("activation_checkpointing", "attention", "batching", "lora_alpha_ratio")
"""Settings that a reader looks for however plain they are."""


def write(*, workload: Workload, config: TrainConfig, result: Mapping[str, object]) -> str:
    """Return Markdown; whatever the model is called, it stays the text of a cell."""
    evidence = result["evidence"]
    model = {"base model": workload.model, "task": workload.task}
    rate = {"learning_rate": f"{learning_rate(config, workload.extra):g}"}
    kept = [name for name in _KEPT if config.method in KNOBS[name].methods]
    said = settings(config, kept)
    rows = {**model, **_figures(result), **said, **workload.extra, **rate}
    table = "".join(f"| {_cell(key)} | {_cell(value)} |\n" for key, value in rows.items())
    return f"""## Training configuration

Chosen by autotune as the fastest that fits a memory budget ({_cell(evidence)}):
{_cell(describe(config))}.

| setting | value |
|---|---|
{table}"""


def _figures(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the answer's figures, with how they are known."""
    evidence, of = result["evidence"], result.get("best")
    measured = result.get("measured")
    if measured is not None:
        of = measured["confirmation" if measured["confirmed"] else "best"]
    if of is None:
        return {}
    return {
        "card": str(result.get("gpu")),
        f"tokens per second, {evidence}": f"{of['tokens_per_second']:,.0f}",
        f"peak memory, {evidence}": format_bytes(of["peak_device_bytes"]),
    }


def _cell(value: object) -> str:
    """Return text that is neither Markdown nor HTML, on one line."""
    return re.sub(r"([\\`*_{}\[\]()#+!|<>&~$])", r"\\\1", one_line(str(value)))


EXPORTER = Exporter(name="model-card", filename="model_card.md", write=write)
