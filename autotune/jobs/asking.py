"""A question on its way to another machine: checked here, answered there, its files written here.

It carries what the other machine may not have: the model's configuration; the search space, where that is
a file; a dataset's name, its format and how long its samples are, and nothing else of it; the texts of the
base's files, without what looks like a secret. The dataset stays where it is, so a loader is not timed.
"""

from __future__ import annotations

import dataclasses
import getpass
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.catalogue import gpus
from autotune.catalogue.gpus import Gpu
from autotune.catalogue.models import ModelSource
from autotune.common import files, json_records
from autotune.common.files import Carried, Disk
from autotune.common.secrets import HIDDEN, file_without_secrets
from autotune.common.units import parse_bytes
from autotune.errors import (
    AutotuneError,
    ConfigError,
    HardwareError,
    NothingFitsError,
    StorageError,
    WorkerError,
)
from autotune.export.train_config import MAX_FILE_BYTES
from autotune.records.answer import answer_from_dict
from autotune.records.question import Question
from autotune.report.answer_files import AnswerFiles
from autotune.search import budget, resolve
from autotune.search.budget import CardSource, ChosenCard
from autotune.search.resolve import Brought
from autotune.space import space_file
from autotune.space.dataset import Dataset
from autotune.space.lengths import Lengths
from autotune.store.jobs import Job, WantedMachine
from autotune.store.recommendations import question_of

VERSION = 2
"""Version of a question. One that has neither `lengths` nor a `base` is still of version 1, which older
workers can answer."""
_OF_A_MODEL = ("name", "config", "origin", "num_parameters_known", "requires_remote_code", "notes")
_ERRORS = (ConfigError, HardwareError, NothingFitsError, WorkerError, StorageError)
SPACE_FILE = "space.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedQuestion:
    """A question as a worker reads it."""

    options: Question
    brought: Brought


class _WithoutSecrets(Disk):
    """Files of this machine as they may be passed on."""

    def read(self, path: Path, max_bytes: int, *, usual: str = "") -> str:
        text = file_without_secrets(path.name, super().read(path, max_bytes, usual=usual))
        self.has_read[path] = text
        return text


def prepare(
    options: Question, *, note: Callable[[str], None]
) -> tuple[dict[str, Any], WantedMachine]:
    """Return the question as JSON, and what it wants of a machine. `note` hears what is made of the options.

    Raises ConfigError for what no machine can answer, or none but this one; HardwareError, WorkerError.
    """
    card, wanted = _wanted(options)
    disk = _WithoutSecrets()
    budget_bytes = wanted.budget_bytes or card.capacity_bytes
    taken = resolve.resolve(
        options,
        card=ChosenCard(gpu=card, source=CardSource.NAMED, budget_bytes=budget_bytes),
        note=note,
        brought=Brought(files=disk),
    )
    if taken.workload.num_gpus > 1:
        raise ConfigError(
            f"{taken.workload.num_gpus} GPUs do not go with --enqueue", why="Probes run on one GPU"
        )
    question: dict[str, Any] = {
        "schema_version": 1,
        "options": question_of(options),
        "model": {name: getattr(taken.source, name) for name in _OF_A_MODEL},
        "space": space_file.text_of(options.space),
    }
    if taken.workload.lengths is not None:
        question["schema_version"] = VERSION
        question["lengths"] = dataclasses.asdict(taken.workload.lengths)
        assert taken.workload.dataset is not None
        question["dataset"] = dataclasses.asdict(taken.workload.dataset)
        if not taken.workload.sets_loader:
            note("the dataset stays on this machine, so no loader is timed: its settings stay.")
    if options.base is not None:
        question["schema_version"] = VERSION
        texts = {str(path.absolute()): text for path, text in disk.has_read.items()}
        question["base"] = {"path": str(options.base.absolute()), "texts": texts}
    return question, wanted


def _wanted(options: Question) -> tuple[Gpu, WantedMachine]:
    if options.backend == "predict":
        raise ConfigError(
            "--backend predict does not go with --enqueue",
            why="A prediction needs no other machine",
            remedy="Leave --enqueue out",
        )
    budget_bytes = None if options.gpu_mem is None else parse_bytes(options.gpu_mem)
    if options.backend == "cpu":
        if options.gpu is not None or budget_bytes is None:
            budget.cpu_as_card(options.gpu, options.gpu_mem)  # says why not
        card = gpus.cpu_stand_in()
    elif options.gpu is None:
        raise ConfigError(
            "--enqueue needs to know the card",
            why="A job goes to a machine that has it",
            remedy="Give --gpu with its name (autotune gpus), or --backend cpu with --gpu-mem",
        )
    else:
        card = budget.choose_card(options.gpu, options.gpu_mem).gpu
    return card, WantedMachine(card=card.name, budget_bytes=budget_bytes)


def read(question: Mapping[str, Any], folder: Path, *, backend: str) -> ReceivedQuestion:
    """Read a question that `prepare` has made, to be measured on that backend.

    Files that it needs go into the folder. Raises ConfigError for what another version has asked.
    """
    try:
        options = dataclasses.replace(_options(question), backend=backend)
        if question["space"] is not None:
            place = folder / SPACE_FILE
            place.write_text(question["space"], encoding="utf-8")
            options = dataclasses.replace(options, space=str(place))
        brought = Brought(
            source=ModelSource(**question["model"], path=folder / "config.json"),
            dataset=_dataset(question),
            files=Carried(_texts(question)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError("The question cannot be read", why=str(error)) from error
    return ReceivedQuestion(options=options, brought=brought)


def _options(question: Mapping[str, Any]) -> Question:
    if question["schema_version"] > VERSION:
        host = socket.gethostname()
        raise ConfigError("A newer autotune has asked it", remedy=f"Update autotune on {host}")
    given = dict(question["options"])
    given["methods"] = tuple(given.get("methods", ()))
    if "base" in given:
        given["base"] = Path(question["base"]["path"])
    return Question(**given)


def _dataset(question: Mapping[str, Any]) -> tuple[Dataset | None, Lengths] | None:
    if "dataset" not in question["options"]:
        return None
    told = question.get("dataset")
    named = None if told is None else json_records.read(Dataset, told, "dataset")
    given = dict(question["lengths"])
    given["percentiles"] = tuple(given["percentiles"])
    return named, json_records.read(Lengths, given, "lengths")


def _texts(question: Mapping[str, Any]) -> dict[Path, str]:
    """Texts of the base's files, by where they are on the machine that has asked."""
    if "base" not in question["options"]:
        return {}
    return {Path(path): str(text) for path, text in question["base"]["texts"].items()}


def answered(job: Job, folder: Path) -> tuple[AnswerFiles, list[str]]:
    """Return the files of a job's answer, as `find` would write them into the folder; and notes.

    The user's own file is the one that was asked about: as it is on this disk, secrets and all, unless it is
    another by now. Raises ConfigError.
    """
    assert job.result is not None
    notes: list[str] = []
    options = _options(job.question)
    texts = {
        path: _as_it_is(path, text, notes.append) for path, text in _texts(job.question).items()
    }
    card = gpus.cpu_stand_in() if options.backend == "cpu" else gpus.find_gpu(job.card)
    run = resolve.read_run(options, card, note=lambda _: None, files=Carried(texts))
    return AnswerFiles.of(answer_from_dict(job.result), folder=folder, run=run), notes


def _as_it_is(path: Path, text: str, note: Callable[[str], None]) -> str:
    """Return the file's text with its secrets, where it is still the one that the question has."""
    try:
        now = files.read_text(path, MAX_FILE_BYTES)
    except ConfigError:
        now = ""
    if file_without_secrets(path.name, now) == text:
        return now
    hidden = f", with {HIDDEN} for its secrets" if HIDDEN in text else ""
    note(
        f"{path} is gone or has changed since the question was asked: the text that was sent is used{hidden}."
    )
    return text


def error_of(problem: str, exit_code: int | None) -> AutotuneError:
    """Return the exception that `find` would have ended with, for a job that has no answer."""
    kinds = {kind.exit_code: kind for kind in _ERRORS}
    return kinds.get(exit_code or 0, WorkerError)(problem)


def who() -> str:
    """Return `name@machine`, as far as they are known."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have none
        name = "somebody"
    return f"{name}@{socket.gethostname()}"
