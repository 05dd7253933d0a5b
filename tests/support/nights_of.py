"""Nights and cells for the tests of autotune.nightly, made by hand."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path
from typing import Any

from autotune.nightly.history import NEW, Night
from autotune.nightly.matrix import Cell, Matrix
from autotune.records.fingerprint import Fingerprint
from autotune.records.question import Question
from autotune.space.config import TrainConfig

NOW = datetime.datetime(2026, 3, 1, 2, 17, tzinfo=datetime.UTC)
HERE = Fingerprint(
    device="NVIDIA GeForce RTX 4090",
    driver="580.10",
    cuda="13.0",
    versions=(("peft", "0.21"), ("torch", "2.13.0"), ("transformers", "5.23")),
    allocator="",
)
CONFIG = TrainConfig(
    method="lora",
    micro_batch_size=2,
    gradient_accumulation_steps=16,
    sequence_length=1024,
    precision="bf16-autocast",
    optimizer="adamw_torch_fused",
    lora_rank=16,
    lora_targets="all-linear",
)
SPACE = """
name: tiny
description: the base, so that one trace is all there is to predict
methods:
  full:
    micro_batch_size: [1]
    precision: [bf16-true]
    optimizer: [adamw_torch_fused]
"""
MATRIX = """
models: [tiny]
budgets: [30MB, 40MB]
lengths: [64]
methods: [full]
effective_batch: 8
effort: quick
space: space.yaml
confirm_steps: 0
measure_again_after: 0s
probes: 2
max_probes: 2
"""
"""A night of real probes, which takes a minute."""


def night(
    days_ago: float = 1.0, speeds: tuple[float, ...] = (1000.0, 1004.0), **changes: Any
) -> Night:
    values: dict[str, Any] = {
        "made_at": (NOW - datetime.timedelta(days=days_ago)).isoformat(),
        "kind": NEW,
        "reason": "first answer",
        "fingerprint": HERE,
        "config": CONFIG,
        "tokens_per_second": speeds,
        "peak_device_bytes": 8 * 2**30,
        "has_searched": True,
        "elapsed_seconds": 600.0,
        **changes,
    }
    return Night(**values)


def cell(name: str, priority: float = 1.0, **options: Any) -> Cell:
    return Cell(options=Question(model="gpt2", **options), priority=priority, name=name)


def matrix(*cells: Cell, **settings: Any) -> Matrix:
    return Matrix(cells=cells, **settings)


def written(folder: Path, text: str) -> Path:
    path = folder / "nightly.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def tiny_night(folder: Path, *, budgets: str = "[30MB, 40MB]", probes: int = 2) -> Path:
    """Make the folder of a night of real probes; each of `probes` takes a second or more."""
    (folder / "tiny").mkdir()
    (folder / "studies").mkdir()
    example = Path(__file__).parents[2] / "examples" / "tiny-llama.json"
    shutil.copy(example, folder / "tiny" / "config.json")
    (folder / "space.yaml").write_text(SPACE, encoding="utf-8")
    text = MATRIX.replace("[30MB, 40MB]", budgets).replace("probes: 2", f"probes: {probes}")
    (folder / "studies" / "nightly.yaml").write_text(text, encoding="utf-8")
    return folder
