"""A question on its way to another machine: checked here, answered there, its files written here.

It carries what the other machine may not have: the model's configuration and the search space, where that
is a file. A dataset stays where it is, and so does a base, whose file is edited in place: `find` with
those runs on the machine itself.
"""

from __future__ import annotations

import getpass
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune import export, gpus, inputs, space_file
from autotune.errors import (
    AutotuneError,
    ConfigError,
    HardwareError,
    NothingFitsError,
    StorageError,
    WorkerError,
)
from autotune.jobs import Wanted
from autotune.models import ModelSource, resolve
from autotune.options import SEQUENCE_LENGTH, FindOptions
from autotune.recommendations import question_of
from autotune.results import SCHEMA_VERSION
from autotune.summary import Summary, summary_from_dict
from autotune.units import parse_bytes

_STAYS = {
    # option: why a job has none
    "dataset": "The dataset stays where it is",
    "tokenizer": "It says something of a dataset alone, which stays where it is",
    "base": "The file stays where it is",
}
_OF_A_MODEL = ("name", "config", "origin", "num_parameters_known", "requires_remote_code", "notes")
_ERRORS = (ConfigError, HardwareError, NothingFitsError, WorkerError, StorageError)
SPACE_FILE = "space.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A question as a worker reads it."""

    options: FindOptions
    source: ModelSource


def prepare(options: FindOptions) -> tuple[dict[str, Any], Wanted]:
    """The question as JSON, and what it wants of a machine.

    Raises ConfigError for what no machine can answer, or none but this one; HardwareError.
    """
    for name, why in _STAYS.items():
        if getattr(options, name) is not None:
            raise ConfigError(
                f"--{name} does not go with --enqueue",
                why=why,
                remedy="Leave it out, or run `autotune find` on the machine that has it",
            )
    if (options.num_gpus or 1) > 1:
        raise ConfigError(
            f"--num-gpus {options.num_gpus} does not go with --enqueue", why="Probes run on one GPU"
        )
    wanted = _wanted(options)
    if options.model is None:
        raise ConfigError("There is no model", remedy="Give --model (autotune models)")
    source = resolve(options.model)
    inputs.possible_length(
        source, options.seq_len or SEQUENCE_LENGTH, is_given=options.seq_len is not None
    )
    space_file.load(options.space)
    question = {
        "schema_version": SCHEMA_VERSION,
        "options": question_of(options),
        "model": {name: getattr(source, name) for name in _OF_A_MODEL},
        "space": space_file.text_of(options.space),
    }
    return question, wanted


def _wanted(options: FindOptions) -> Wanted:
    if options.backend == "predict":
        raise ConfigError(
            "--backend predict does not go with --enqueue",
            why="A prediction needs no other machine",
            remedy="Leave --enqueue out",
        )
    budget_bytes = None if options.gpu_mem is None else parse_bytes(options.gpu_mem)
    if options.backend == "cpu":
        if options.gpu is not None or budget_bytes is None:
            inputs.cpu_as_card(options.gpu, options.gpu_mem)  # says why not
        return Wanted(card=gpus.cpu_stand_in().name, budget_bytes=budget_bytes)
    if options.gpu is None:
        raise ConfigError(
            "--enqueue needs to know the card",
            why="A job goes to a machine that has it",
            remedy="Give --gpu with its name (autotune gpus), or --backend cpu with --gpu-mem",
        )
    card, _, _ = inputs.choose_card(options.gpu, options.gpu_mem)
    return Wanted(card=card.name, budget_bytes=budget_bytes)


def read(question: Mapping[str, Any], folder: Path, *, backend: str) -> Asked:
    """As `prepare` has made it, to be measured on that backend; files that it needs go into the folder.

    Raises ConfigError for what another version has asked.
    """
    try:
        if question["schema_version"] > SCHEMA_VERSION:
            raise ConfigError("A newer autotune has asked it", remedy="Update autotune here")
        given = dict(question["options"])
        given["methods"] = tuple(given.get("methods", ()))
        if question["space"] is not None:
            place = folder / SPACE_FILE
            place.write_text(question["space"], encoding="utf-8")
            given["space"] = str(place)
        options = FindOptions(**{**given, "backend": backend})
        source = ModelSource(**question["model"], path=folder / "config.json")
    except (KeyError, TypeError) as error:
        raise ConfigError("The question cannot be read", why=str(error)) from error
    return Asked(options=options, source=source)


def write_files(result: Mapping[str, Any], folder: Path) -> tuple[Summary, list[Path], Any]:
    """The answer of a job, and its files in the folder, as `find` would have written them there.

    Third: settings that some of the files do not carry. Raises StorageError.
    """
    summary = summary_from_dict(result)
    workload, config = summary.workload, summary.exported
    exporters = export.exporters_for(config, workload)
    places = [str(path) for path in export.export_paths(folder, exporters)]
    files = export.export_files(
        folder,
        workload=workload,
        config=config,
        result={**result, "files": places},
        exporters=exporters,
    )
    return summary, files, export.unsaid_names(exporters, workload, config)


def error_of(problem: str, exit_code: int | None) -> AutotuneError:
    """Why a job has no answer, as the exception that `find` would have ended with."""
    kinds = {kind.exit_code: kind for kind in _ERRORS}
    return kinds.get(exit_code or 0, WorkerError)(problem)


def who() -> str:
    """`name@machine`, as far as they are known."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have none
        name = "somebody"
    return f"{name}@{socket.gethostname()}"
