"""Text of another trainer's file: what it does not carry, the settings, and what is the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from autotune.catalogue.tasks import CAUSAL
from autotune.export.carried import comments
from autotune.export.exporter import Exporter
from autotune.export.mapping import TrainerFile
from autotune.export.mapping_write import keys_of, says_method, unsaid
from autotune.export.references import model_reference
from autotune.space.config import TrainConfig, Workload
from autotune.space.dataset import Dataset
from autotune.space.learning_rates import default_rate
from autotune.space.trainers import TRAINERS


def exporter_of(
    target: TrainerFile,
    *,
    filename: str,
    yours: Mapping[str, Any],
    data: Callable[[Dataset, str], Mapping[str, Any]],
    data_lines: Callable[[Dataset, str], list[str]] = lambda *_: [],
    of_tasks: Mapping[str, tuple[TrainerFile, Mapping[str, Any]]] = MappingProxyType({}),
) -> Exporter:
    """Return the exporter of a trainer's file.

    `yours` are values for the user to fill in, `data` those that a dataset has filled in; `data_lines` are
    comments on it; both are given the task. `of_tasks`: the file and those values, by the task of a trainer
    that has its own.
    """

    def of(config: TrainConfig) -> tuple[TrainerFile, Mapping[str, Any]]:
        return of_tasks.get(TRAINERS[config.trainer].task, (target, yours))

    def write(*, workload: Workload, config: TrainConfig, result: Mapping[str, object]) -> str:
        file, open_values = of(config)
        keys = {file.model_key: model_reference(workload.model), **keys_of(file, config)}
        dataset = workload.dataset
        known = {} if dataset is None else data(dataset, workload.task)
        users = {**open_values, **known}
        text = as_yaml(file, config, keys, users, extra=workload.extra, evidence=result["evidence"])
        lines = [] if dataset is None else data_lines(dataset, workload.task)
        return comments(lines) + text

    return Exporter(
        name=target.name.casefold(),
        filename=filename,
        write=write,
        applies=lambda config: says_method(of(config)[0], config.method),
        lacks=lambda workload: "" if workload.task in of_tasks else _lacks(target, workload),
        cannot_express=lambda config: unsaid(of(config)[0], config),
    )


def _lacks(target: TrainerFile, workload: Workload) -> str:
    if workload.task == CAUSAL:
        return ""
    return f"A file of {target.name} as it is written here trains a causal language model"


def as_yaml(
    target: TrainerFile,
    config: TrainConfig,
    keys: Mapping[str, Any],
    yours: Mapping[str, Any],
    *,
    extra: Mapping[str, Any],
    evidence: object,
) -> str:
    """Return comments, then the keys that are not off anyway, then the user's own.

    `extra` are TrainingArguments that no setting decides: in the target's words, or named in a comment.
    """
    import yaml

    extra = {"learning_rate": default_rate(config), **extra, **config.loader_arguments}
    if target.has_own_names and 0 < extra.get("warmup_steps", 0) < 1:
        extra["warmup_ratio"] = extra.pop("warmup_steps")
    names = {argument: key for key, argument in target.arguments.items()}
    carried = {
        names.get(name, name): value
        for name, value in extra.items()
        if name in names or not target.has_own_names
    }
    lost = [name for name in extra if names.get(name, name) not in carried]
    lines = [f"For {target.name} ({target.source}), written by autotune: {evidence}."]
    lines += [f"Not carried: {words}" for words in (*unsaid(target, config), *lost)]
    lines += caveats_of(target, config)
    said = "".join(f"# {' '.join(line.split())}\n" for line in lines)
    settings = {
        key: value
        for key, value in keys.items()
        if value is not None and (value or target.defaults.get(key))
    }
    users = {key: value for key, value in {**yours, **carried}.items() if key not in settings}
    parts = (yaml.safe_dump(nested(part), sort_keys=False) for part in (settings, users))
    return f"{said}\n" + "\n# Yours: what is trained on, and how.\n".join(parts)


def caveats_of(target: TrainerFile, config: TrainConfig) -> list[str]:
    """Return cases in which the trainer does otherwise than predicted."""
    return [words for holds, words in target.caveats if holds(config)]


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys with dots as mappings."""
    content: dict[str, Any] = {}
    for key, value in keys.items():
        *folders, last = key.split(".")
        place = content
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    return content
