"""Forward and backward passes with eager and with SDPA attention: predicted against published times.

Run: python -m validation.published_passes

The figures are those of Transformers' pages of models (studies/published-passes/runs.csv); nothing in them
was measured by this project, and no constant of it is fitted to them. The program that was timed is
gist.github.com/fxmarty/7e75cc3942d6974e4849093ebea0a331: float16 weights, no autocast, no optimizer; in each
of 100 steps zero_grad, the model on a batch that stays on the card, `logits.sum().backward()`. It waits for
the GPU at the end alone, so that the host runs ahead from step to step: a step takes the longer of both.

The answers are written to studies/published-passes/ (rows.json, and the tables of README.md).
"""

from __future__ import annotations

import contextlib
import csv
import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch
import transformers
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.opt import modeling_opt

from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.models import ModelSource, resolve
from autotune.memory.traces import Trace
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.speed import roofline, step_parts
from autotune.speed.sureness import slow_share_of, spread_of
from autotune.worker.build.model import load_config
from autotune.worker.trace import meta_step
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.meta_step import MetaStep
from autotune.worker.trace.step import trace_step
from validation.kernels import steps
from validation.published.own_loop import PRECISION, precision_of_loop
from validation.published.plan import STUDIES, Plan, Timed
from validation.published.tables import write_sections
from validation.published_pairs import (
    Side,
    by,
    markdown_ratios,
    markdown_settings,
    markdown_wrong,
    pairs,
)
from validation.step_spread import within_step

STUDY = STUDIES / "published-passes"
HALF_DIGIT_SECONDS = 0.0005


def published() -> dict[str, dict[str, str]]:
    with (STUDY / "runs.csv").open(newline="", encoding="utf-8") as file:
        return {row["id"]: row for row in csv.DictReader(file)}


def config_of(row: Mapping[str, str]) -> TrainConfig:
    return TrainConfig(
        method="full",
        precision=PRECISION,
        optimizer="adamw_torch",
        micro_batch_size=int(row["micro_batch"]),
        gradient_accumulation_steps=1,
        sequence_length=int(row["sequence_length"]),
        attention=row["attention"],
        activation_checkpointing=0,
    )


@functools.cache
def model_of(name: str) -> ModelSource:
    """A model of models.json, or else of the catalogue."""
    known = json.loads((STUDY / "models.json").read_text(encoding="utf-8"))
    if name not in known:
        return resolve(name)
    return ModelSource(
        name=name,
        config=known[name],
        origin="file",
        path=STUDY / "models.json",
    )


@functools.cache
def traced(model: str, task: str, spec: TraceSpec, length: int, card: str) -> Trace:
    gpu = find_gpu(card)
    assert gpu.compute_capability is not None
    assert gpu.cublas_workspace_bytes is not None
    device = Device(
        compute_capability=gpu.compute_capability,
        cublas_workspace_bytes=gpu.cublas_workspace_bytes,
    )
    with program():
        config = load_config(model_of(model).config)
        return Trace(trace_step(config, task, spec, sequence_length=length, device=device))


@contextlib.contextmanager
def program() -> Iterator[None]:
    """The program that was timed, and eager attention as Transformers wrote it then."""
    with (
        steps.attention_of_its_day(),
        mock.patch.object(modeling_opt, "eager_attention_forward", _opt_attention),
        mock.patch.object(modeling_gpt_neox, "eager_attention_forward", _neox_attention),
        mock.patch.object(MetaStep, "_loss", _sum_of_logits),
        mock.patch.object(meta_step, "batch_of", _batch),
    ):
        yield


def _sum_of_logits(step: MetaStep, inputs: dict[str, Any], *, accepts: bool) -> torch.Tensor:
    assert not accepts
    model: Any = step.model
    total: torch.Tensor = model(**inputs)["logits"].sum()
    return total


def _batch(_: str, __: TraceSpec, micro_batch: int, length: int, ___: None = None) -> Any:
    return {"input_ids": torch.empty((micro_batch, length), dtype=torch.int64, device="meta")}


def _neox_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GPTNeoXAttention._attn of 4.42: scores are added to zeros, and softmax is in their dtype."""
    *batch, length, size = query.shape
    zeros = torch.zeros((math.prod(batch), length, length), dtype=query.dtype, device=query.device)
    left, right = query.reshape(-1, length, size), key.reshape(-1, length, size).transpose(1, 2)
    weights = torch.baddbmm(zeros, left, right, alpha=scaling).view(*batch, length, length)
    weights = torch.nn.functional.softmax(weights if mask is None else weights + mask, dim=-1)
    weights = torch.nn.functional.dropout(weights, dropout, module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def _opt_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """OPTAttention.forward of 4.45: no score is below the least number, and float16 has a float32 softmax."""
    weights = torch.matmul(query, key.transpose(-1, -2))
    assert mask is not None
    weights = torch.max(weights + mask, torch.empty((), device=query.device))
    weights = torch.nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = torch.nn.functional.dropout(weights, dropout, module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def side_of(name: str, row: Mapping[str, str]) -> Side:
    """A published pass and its prediction."""
    config, gpu = config_of(row), find_gpu(row["card"])
    trace = traced(
        row["model"], row["task"], TraceSpec.of(config), config.sequence_length, row["card"]
    )
    kernels = steps.launched(trace, config.micro_batch_size)
    machine = roofline.ceilings(gpu)
    whole, parts = roofline.seconds(kernels, machine), step_parts.parts(kernels, machine)
    assert whole is not None
    assert parts is not None
    seconds = float(row["seconds"])
    low, high = within_step(whole.total_seconds, spread_of(parts), slow_share_of(parts))
    return Side(
        id=name,
        group=row["group"],
        timed=Timed(
            plan=Plan(
                model=model_of(row["model"]),
                gpu=row["card"],
                config=config,
                metric="time",
                task=row["task"],
            ),
            group=row["group"],
            published_seconds=seconds,
            evidence="B",
            assumed=(),
            resolution=HALF_DIGIT_SECONDS / seconds,
        ),
        predicted_seconds=whole.total_seconds,
        parts=parts,
        is_within=low <= seconds <= high,
        stated_length=config.sequence_length,
        knows_length=True,
    )


def predict() -> list[Side]:
    """Every row that is not left out."""
    with precision_of_loop():
        return [side_of(name, row) for name, row in published().items() if not row["left_out"]]


def markdown_rows(sides: list[Side]) -> str:
    lines = [
        "| row | group | attention | samples x tokens | published, ms | predicted, ms"
        " | predicted / published |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for side in sides:
        config = side.timed.plan.config
        lines.append(
            f"| {side.id} | {side.group} | {config.attention} | {config.micro_batch_size} x"
            f" {config.sequence_length} | {side.timed.published_seconds * 1e3:.0f} |"
            f" {side.predicted_seconds * 1e3:.1f} | {side.ratio:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    sides = predict()
    found = pairs(sides)
    record = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "rows": [side.recorded() for side in sides],
        "pairs": [{**asdict(pair), "is_ordered": pair.is_ordered} for pair in found],
    }
    (STUDY / "rows.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    off = sum(abs(math.log(pair.predicted / pair.published)) <= math.log(1.25) for pair in found)
    left_out = [
        f"- {name}: {row['left_out']}" for name, row in published().items() if row["left_out"]
    ]
    sections = {
        "settings": markdown_settings({"passes": found}),
        "groups": markdown_ratios(by(sides, lambda side: side.group), "group"),
        "attention": markdown_ratios(
            by(sides, lambda s: f"{s.group}, {s.timed.plan.config.attention}"), "group, attention"
        ),
        "gains": f"Gains within a quarter of the published ones: {off} of {len(found)} pairs.",
        "wrong": markdown_wrong(found),
        "rows": markdown_rows(sides),
        "left out": "\n".join(left_out),
    }
    write_sections(STUDY / "README.md", sections)
    print(sections["settings"], sections["attention"], sections["gains"], sep="\n\n")


if __name__ == "__main__":
    main()
