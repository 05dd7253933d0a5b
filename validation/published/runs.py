"""The published runs that are predicted, and why the others are not, read from the studies' runs.toml.

The figures of both studies are in studies/published-memory/published_memory.csv.
"""

from __future__ import annotations

import csv
import functools
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from autotune.catalogue.models import ModelSource, resolve
from autotune.common.units import GIB
from autotune.space.adapters import read_peft
from autotune.space.config import TrainConfig
from validation.published.plan import MEMORY, SPEED, Plan, Program, Timed, published

FORWARD_SHARE = 1 / 3
"""Share of a micro-step: a forward pass against forward and backward of all weights."""
VALIDATION_EVERY, VALIDATION_SAMPLES = 100, 100
"""Steps between two validations of litgpt's runs, and samples of each."""

Fields = dict[str, Any]


def _rotary(config: Mapping[str, Any]) -> int:
    return int(config["hidden_size"] // config["num_attention_heads"] * config["rotary_pct"])


KEPT: dict[str, Callable[[Mapping[str, Any], int], int]] = {
    # A byte per pair of positions, and cosines and sines in float32, in every layer.
    "masks and rotary tables": lambda c, _: (
        c["num_hidden_layers"]
        * c["max_position_embeddings"]
        * (c["max_position_embeddings"] + 2 * _rotary(c) * 4)
    ),
    "logits in 16 bits": lambda c, tokens: tokens * c["vocab_size"] * 2,
    "logits in float32": lambda c, tokens: tokens * c["vocab_size"] * 4,
    # With the cache: each layer's key, in float32 as it is multiplied by float32 cosines, and value, a view
    # that keeps the fused projection of query, key and value.
    "outputs": lambda c, tokens: (
        tokens * (c["vocab_size"] * 2 + c["num_hidden_layers"] * c["hidden_size"] * (4 + 3 * 2))
    ),
    # Beside those in 16 bits: embedding and head.
    "16-bit weights in float32": lambda c, _: 2 * 2 * c["vocab_size"] * c["hidden_size"],
    "embedding's output": lambda c, tokens: 2 * tokens * c["hidden_size"] * 4,
}
"""Bytes of what GPT-NeoX of transformers 4.40 and a loop of its own hold: (model's configuration, tokens).

Source: transformers 4.40.1 models/gpt_neox/modeling_gpt_neox.py; onlybooks/llm chapter_5.ipynb.
"""


def _of_epochs(minutes: float, run: Mapping[str, Any], _: TrainConfig) -> float:
    steps = run["steps"] + FORWARD_SHARE * run["validation_steps"]
    return float(minutes * 60 / (run["epochs"] * steps))


def _of_a_run(minutes: float, run: Mapping[str, Any], config: TrainConfig) -> float:
    num_steps = run["epochs"] * run["samples"] / config.effective_batch_size
    num_validations = num_steps // VALIDATION_EVERY + 1
    validated = FORWARD_SHARE * num_validations * VALIDATION_SAMPLES / config.effective_batch_size
    return float(minutes * 60 / (num_steps + validated))


SECONDS: dict[str, Callable[[float, Mapping[str, Any], TrainConfig], float]] = {
    "seconds of a step": lambda figure, *_: figure,
    "seconds of a step, in the notes": lambda figure, *_: figure,
    "samples per second": lambda figure, _, config: config.effective_batch_size / figure,
    "minutes of 1,000 micro-steps": lambda figure, _, config: (
        figure * 60 / 1000 * config.gradient_accumulation_steps
    ),
    "minutes of epochs of steps": _of_epochs,
    "minutes of a run with validation": _of_a_run,
}
"""Seconds of an optimizer step by what the published figure is: (figure, fields of the run, settings)."""


@functools.cache
def plans() -> dict[str, Plan]:
    """Every row whose memory is predicted."""
    return {name: _plan(run, MEMORY) for name, run in _runs(MEMORY)}


@functools.cache
def timed_runs() -> dict[str, Timed]:
    """Every row whose time is predicted."""
    return {name: _timed(name, run) for name, run in _runs(SPEED)}


@functools.cache
def held_out() -> dict[str, Timed]:
    """Every row of held_out.csv, of which none chose a constant."""
    return {name: _timed_of(row) for name, row in held_out_table().items()}


@functools.cache
def held_out_table() -> dict[str, dict[str, str]]:
    """The rows of held_out.csv as they stand."""
    with (SPEED / "held_out.csv").open(newline="", encoding="utf-8") as file:
        return {row["id"]: row for row in csv.DictReader(file)}


def chosen_with() -> tuple[str, ...]:
    """The rows with which a constant of autotune/speed/roofline.py was chosen."""
    return tuple(_read(SPEED)["chosen_with"])


def why_left_out(study: Path, name: str) -> str:
    """Why a row of the table is not predicted; raises KeyError for a row that should be."""
    reasons = {each: entry["reason"] for entry in _read(study)["left_out"] for each in entry["ids"]}
    return str(reasons[name if name in reasons else _series_of(name)])


def step_end_figure(row: Mapping[str, str]) -> int:
    """Published memory_allocated() after a step, mean of 5,000 steps, in bytes."""
    return round(_noted(row, r"step-end allocated mean ([\d.]+) GiB") * GIB)


@functools.cache
def _read(study: Path) -> Fields:
    return tomllib.loads((study / "runs.toml").read_text(encoding="utf-8"))


def _series_of(name: str) -> str:
    return name.rpartition("-")[0]


def _runs(study: Path) -> Iterator[tuple[str, Fields]]:
    """(row, fields) of each run: those of its series, and its own beside or instead."""
    data = _read(study)
    for given in data["series"].values():
        common = {key: value for key, value in given.items() if key not in ("runs", "adapters")}
        runs: dict[str, Fields] = dict(given.get("runs", {}))
        if "runs_of" in common:
            like = [name for name in plans() if _series_of(name) == common["runs_of"]]
            runs = {name: runs.get(name, {}) for name in like}
        if "adapters" in given:
            for name, adapter in json.loads((study / given["adapters"]).read_text("utf-8")).items():
                if not any(name in entry["ids"] for entry in data["left_out"]):
                    peft = {"method": "peft", "peft": read_peft(adapter)}
                    runs[name] = peft | runs.get(name, {})
        for name in sorted(runs):
            yield name, _merged(common, runs[name])


def _merged(common: Fields, own: Fields) -> Fields:
    added = {
        key: [*common[key], *value]
        for key, value in own.items()
        if isinstance(value, list) and key in common
    }
    return common | own | added


def _texts(study: Path, names: list[str]) -> tuple[str, ...]:
    notes = _read(study)["notes"]
    return tuple(notes.get(name, name) for name in names)


def _taken(run: Fields, record: type) -> Fields:
    """Take the fields of such a record out of those of a run."""
    return {each.name: run.pop(each.name) for each in fields(record) if each.name in run}


def _plan(run: Fields, study: Path) -> Plan:
    config = TrainConfig(**_taken(run, TrainConfig))
    model = model_of(run.pop("model"), study)
    tokens = config.micro_batch_size * config.sequence_length
    program = _taken(run, Program)
    program["kept"] = sum(
        kept if isinstance(kept, int) else KEPT[kept](model.config, tokens)
        for kept in program.get("kept", [])
    )
    return Plan(
        model=model,
        config=config,
        program=Program(**program),
        quirks=_texts(study, run.pop("quirks", [])),
        **run,
    )


def model_of(name: str, study: Path) -> ModelSource:
    """A model that a study's runs.toml describes, or else one by its name."""
    config = _read(study).get("models", {}).get(name)
    if config is None:
        return resolve(name)
    return ModelSource(
        name=name,
        config=config,
        origin="file",
        path=Path("config.json"),
    )


def _timed(name: str, run: Fields) -> Timed:
    row = published()[name]
    told: Fields = {
        key: run.pop(key)
        for key in ("figure", "half_digit", "epochs", "steps", "validation_steps", "samples")
        if key in run
    }
    facts = _taken(run, Timed)
    if run.pop("runs_of", None):
        plan = plans()[name]
        plan = replace(
            plan,
            config=replace(plan.config, **_taken(run, TrainConfig)),
            program=replace(plan.program, **_taken(run, Program)),
        )
        assert not run, run
    else:
        plan = _plan({**run, "metric": "time"}, SPEED)
    if told["figure"].endswith("in the notes"):
        figure = _noted(row, r"([\d.]+) s/step")
    else:
        figure = float(row["throughput"])
    return Timed(
        plan=plan,
        group=facts["group"],
        evidence=facts["evidence"],
        assumed=_texts(SPEED, facts["assumed"]),
        published_seconds=SECONDS[told["figure"]](figure, told, plan.config),
        resolution=facts["resolution"] if "resolution" in facts else told["half_digit"] / figure,
    )


def _timed_of(row: Mapping[str, str]) -> Timed:
    """A row of held_out.csv."""
    config = TrainConfig(
        method=row["method"],
        micro_batch_size=int(row["micro_batch"]),
        gradient_accumulation_steps=int(row["accumulation"]),
        sequence_length=int(row["sequence_length"]),
        batching=row["packing"],
        precision=row["precision"],
        optimizer=row["optimizer"],
        activation_checkpointing=int(row["checkpointing"]),
        attention=row["attention"],
        lora_rank=int(row["lora_rank"]) if row["lora_rank"] else None,
        lora_targets=row["lora_targets"] or None,
        lora_dropout=float(row["lora_dropout"] or 0),
        adapter_in_base_dtype=row["adapter_dtype"] == "base",
        quantization=row["quantization"],
    )
    figure = float(row["figure"])
    if row["unit"] == "seconds":
        seconds = figure / float(row["steps"])
    else:
        seconds = SECONDS[row["unit"]](figure, row, config)
    return Timed(
        plan=Plan(
            model=model_of(row["model"], SPEED),
            gpu=row["card"],
            config=config,
            metric="time",
            program=Program(old_attention=row["old_attention"] or None),
            task=row["task"],
        ),
        group=row["group"],
        published_seconds=seconds,
        evidence=row["evidence"],
        assumed=tuple(row["assumed"].split("; ")),
        resolution=float(row["half_digit"]) / figure,
    )


def _noted(row: Mapping[str, str], pattern: str) -> float:
    found = re.search(pattern, row["notes"])
    assert found, row["id"]
    return float(found[1])
