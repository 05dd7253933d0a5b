"""train_config.yaml: TrainConfig and Workload in our own words, for people and for `--base`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.common import user_text
from autotune.common.files import read_text
from autotune.common.units import MIB
from autotune.errors import ConfigError, nearest
from autotune.export.exporter import Exporter
from autotune.export.extra_arguments import read_extra_arguments
from autotune.export.references import model_reference
from autotune.space.config import METHODS, TrainConfig, Workload
from autotune.space.knobs import KNOBS
from autotune.space.trainers import TASK_NAMES

filename = "train_config.yaml"

VERSION = 1
"""Version of this file's format; a newer one is refused."""
MAX_FILE_BYTES = MIB

_KEYS = ("version", "evidence", "workload", "config", "extra_arguments")
_SMALLEST = {
    "gradient_accumulation_steps": 1,
    "sequence_length": 1,
    "num_gpus": 1,
    "dataloader_prefetch_factor": 1,
    "loss_mini_batches": 1,
    **{knob.name: knob.smallest for knob in KNOBS.values() if knob.smallest is not None},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedRun:
    """The user's own run as the file has it."""

    config: TrainConfig
    extra_arguments: str = "{}"
    """TrainingArguments that no setting decides, as Workload has them."""
    model: str | None = None
    """Model that the file was written for."""
    task: str | None = None
    """Task that it was written for."""
    teacher: str | None = None
    """Teacher that it was written for."""


def write(*, workload: Workload, config: TrainConfig, result: Mapping[str, object]) -> str:
    """Return a YAML document that `from_yaml` reads back."""
    import yaml

    values = {**workload.to_dict(), "model": model_reference(workload.model)}
    if workload.teacher is not None:
        values["teacher"] = model_reference(workload.teacher.name)
    content = {
        "version": VERSION,
        "evidence": result["evidence"],
        "workload": {**values, "methods": list(workload.methods)},
        "config": config.to_dict(),
    }
    if workload.extra:
        content["extra_arguments"] = workload.extra
    return yaml.safe_dump(content, sort_keys=False)


def read_train_config(path: Path) -> SavedRun:
    """Read the run of a file as `write` makes it, perhaps edited. Raises ConfigError."""
    text = read_text(path, MAX_FILE_BYTES, usual="A train_config.yaml has 1 KiB")
    return from_yaml(text, source=str(path))


def from_yaml(text: str, *, source: str = filename) -> SavedRun:
    """Read what `write` has written. Its workload is for people: of that model, task and teacher are read.

    Raises ConfigError, which names every problem: broken YAML, Python tags, unknown or missing
    keys, wrong types, unknown values, a newer version. `source` names the file in messages.
    """
    import yaml

    try:
        content = user_text.load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = getattr(error, "problem", None) or str(error)
        mark = getattr(error, "problem_mark", None)
        place = f"Line {mark.line + 1}: " if mark else ""
        raise ConfigError(f"{source} is not a YAML document", why=f"{place}{why}") from error
    if isinstance(content, dict) and "nbformat" in content:
        raise ConfigError(
            f"{source} is a notebook",
            why="Its code is read as a Python program",
            remedy="Write it as one: jupyter nbconvert --to script",
        )
    if isinstance(content, dict) and "model_type" in content:
        raise ConfigError(
            f"{source} is a model's configuration",
            why="It does not say how the model is trained",
            remedy="Give its folder as --model",
        )
    if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
        raise ConfigError(
            f"{source} is of no kind that is read here",
            why='It has no section "config", as a train_config.yaml has, and no fields by which another '
            "program's file is known",
            remedy="`autotune find --help` names the kinds under --base",
        )
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        raise ConfigError(
            f"{source} has version {version}", why="A newer autotune wrote it", remedy="Update"
        )
    problems = [*_unknown(content, _KEYS, ""), *_problems(content["config"])]
    workload = content.get("workload") or {}
    named = workload if isinstance(workload, dict) else {}
    model, task, teacher = map(named.get, ("model", "task", "teacher"))
    for key, value in (("model", model), ("teacher", teacher)):
        if value is not None and not isinstance(value, str):
            problems.append(f"workload.{key} is of type {type(value).__name__} and should be str")
    if task is not None and task not in TASK_NAMES:
        problems.append(
            f"workload.task is {str(task)[:80]!r}. {nearest(str(task)[:80], TASK_NAMES)}"
        )
    extra_arguments = "{}"
    try:
        extra_arguments = read_extra_arguments(content.get("extra_arguments", {}))
    except ValueError as error:
        problems.append(str(error))
    if version != VERSION:
        problems.insert(0, f"version is {version!r} and should be {VERSION}")
    if problems:
        raise ConfigError(f"{source} cannot be used", why="; ".join(problems))
    config = TrainConfig(**content["config"])
    return SavedRun(
        config=config, extra_arguments=extra_arguments, model=model, task=task, teacher=teacher
    )


def _problems(values: dict[Any, Any]) -> list[str]:
    fields = {field.name: field for field in dataclasses.fields(TrainConfig)}
    problems = _unknown(values, fields, "config.")
    for key, field in fields.items():
        if key not in values:
            if field.default is dataclasses.MISSING:
                problems.append(f"config.{key} is missing")
            continue
        problem = _problem(key, values[key], str(field.type))
        if problem:
            problems.append(f"config.{key} {problem}")
    return problems


def _problem(key: str, value: object, annotation: str) -> str | None:
    """Return what is wrong with the value, if anything."""
    allowed = annotation.split(" | ")
    kind = "None" if value is None else type(value).__name__
    if kind == "int" and "float" in allowed:
        kind = "float"
    if kind not in allowed:
        return f"is of type {kind} and should be {' or '.join(allowed)}"
    choices = _choices(key)
    if choices and value not in choices:
        return f"is {str(value)[:80]!r}. {nearest(str(value)[:80], choices)}"
    knob = KNOBS.get(key)
    if value is not None and knob is not None and (knob.is_file or "float" in allowed):
        try:
            knob.read(value)
        except ValueError as error:
            return str(error)
    least = _SMALLEST.get(key, 0)
    if isinstance(value, int) and value < least:
        return f"is {str(value)[:40]} and should be at least {least}"
    return None


def _choices(key: str) -> Collection[str]:
    """Return the names that a setting may have; empty where anything of its type goes."""
    if key == "method":
        return METHODS
    knob = KNOBS.get(key)
    is_free = knob is None or knob.is_open or True in knob.choices
    return () if knob is None or is_free else knob.choices


def _unknown(values: dict[Any, Any], known: Collection[str], prefix: str) -> list[str]:
    return [
        f"{prefix}{str(key)[:80]} is unknown. {nearest(str(key)[:80], known)}"
        for key in values
        if key not in known
    ]


EXPORTER = Exporter(name="train-config", filename=filename, write=write)
