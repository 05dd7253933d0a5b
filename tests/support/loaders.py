"""Marks for tests that need another trainer, and what those tests ask it.

`make test` installs these trainers from tests/loaders.txt; a plain `[dev]` install has none of them.

What needs one is skipped where it is not installed. `make pytest` sets AUTOTUNE_TEST_LOADERS=required:
there a trainer that is missing is a failure, so that nothing passes because it was skipped.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import here
import pytest
import yaml

from autotune.export import Exporter
from autotune.export.base.read import BaseRun, edited_base
from autotune.space.config import TrainConfig, Workload
from autotune.space.dataset import Dataset
from autotune.space.trainers import TRAINERS

VARIABLE = "AUTOTUNE_TEST_LOADERS"


def declared(package: str, *files: str) -> dict[str, Any]:
    """Read the defaults of a package's dataclasses and schemas in its source, as what it says last.

    Nothing of it is imported. What is no literal is left out.
    """
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    found: dict[str, Any] = {}
    for name in files:
        source = (Path(spec.origin).parent / name).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            value = node.value
            if isinstance(value, ast.Call):
                given = (each.value for each in value.keywords if each.arg == "default")
                value = next(given, None)
            with contextlib.suppress(ValueError, TypeError):
                found[node.target.id] = ast.literal_eval(value)  # type: ignore[arg-type]
    return found


def needs(package: str) -> pytest.MarkDecorator:
    """Mark a test, or a module by its pytestmark, as in need of this package."""
    is_missing = importlib.util.find_spec(package) is None
    is_required = os.environ.get(VARIABLE) == "required"
    return pytest.mark.skipif(
        is_missing and not is_required,
        reason=f"{package} is not installed: pip install --no-deps -r tests/loaders.txt",
    )


WORKLOAD = Workload(model="Qwen/Qwen2.5-1.5B", memory_budget_bytes=12 * 10**9)
_RESULT: dict[str, object] = {"evidence": "predicted"}


def varied(lora: TrainConfig, full: TrainConfig) -> dict[str, TrainConfig]:
    """Settings that a trainer's file has a key for, one after the other, in one of these two."""
    return {
        "lora": lora,
        "full": full,
        "dora": dataclasses.replace(lora, lora_variant="dora", lora_targets="q_proj,v_proj"),
        "rslora": dataclasses.replace(lora, lora_variant="rslora", lora_targets="attention"),
        "dropout": dataclasses.replace(lora, lora_dropout=0.1),
        "alpha": dataclasses.replace(lora, lora_alpha_ratio=0.75),
        **{
            name: dataclasses.replace(lora, method="qlora", quantization=name)
            for name in ("nf4", "nf4-double", "fp4", "fp4-double", "int8")
        },
        "checkpointing": dataclasses.replace(lora, activation_checkpointing=1),
        "offloading": dataclasses.replace(
            lora, activation_checkpointing=1, activation_offloading=True
        ),
        "liger": dataclasses.replace(lora, liger=True),
        "padded": dataclasses.replace(lora, batching="padded"),
        "grouped": dataclasses.replace(lora, batching="grouped"),
        "compiled by another": dataclasses.replace(
            lora, torch_compile="default", torch_compile_backend="aot_eager"
        ),
        "noise": dataclasses.replace(lora, neftune_noise_alpha=5.0, torch_empty_cache_steps=4),
        "galore": dataclasses.replace(full, optimizer="galore_adamw"),
        "schedule-free": dataclasses.replace(full, optimizer="schedule_free_adamw"),
    }


def varied_base(base: TrainConfig, full: TrainConfig) -> dict[str, TrainConfig]:
    """The configuration of a user's own file, and others that are written into it."""
    return {
        "edited: the same": base,
        "edited: full": dataclasses.replace(
            base,
            method="full",
            quantization="none",
            lora_rank=None,
            lora_targets=None,
            lora_alpha_ratio=full.lora_alpha_ratio,
            lora_dropout=full.lora_dropout,
            precision=full.precision,
            attention="sdpa",
        ),
        "edited: everything else": dataclasses.replace(
            base,
            method="qlora",
            quantization="fp4",
            lora_rank=48,
            lora_targets="attention",
            lora_variant="dora",
            lora_alpha_ratio=1.5,
            micro_batch_size=16,
            gradient_accumulation_steps=1,
            optimizer="schedule_free_adamw",
            activation_checkpointing=0,
            attention="eager",
            batching="grouped",
            liger=True,
            torch_empty_cache_steps=3,
            neftune_noise_alpha=10.0,
            torch_compile="reduce-overhead",
        ),
    }


def content_of(
    exporter: Exporter, config: TrainConfig, dataset: Dataset | None = None
) -> dict[str, Any]:
    """What an exporter writes, read as YAML."""
    task = TRAINERS[config.trainer].task or "causal-lm"
    workload = dataclasses.replace(WORKLOAD, dataset=dataset, task=task)
    text = exporter.write(workload=workload, config=config, result=_RESULT)
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def edited(base: BaseRun, config: TrainConfig) -> dict[str, Any]:
    """The user's own file, with this answer in it."""
    return content_of(edited_base(base, base.config, base.parts[0], "mine.yaml"), config)


def asked(program: str, contents: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
    """What a program makes of the files, in a process of its own."""
    ran = here.workers.program(program, json.dumps(contents), cwd=folder)
    assert ran.returncode == 0, ran.stderr[-3000:]
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer
