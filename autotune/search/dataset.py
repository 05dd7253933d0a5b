"""Questions about a dataset that workers answer: how long its samples are, how fast its batches load.

Tokenizers, collators and loaders are Transformers'.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from autotune.catalogue.models import ModelSource
from autotune.common import json_records
from autotune.errors import ConfigError, WorkerError
from autotune.export import train_py
from autotune.export.samples.formats import FORMATS
from autotune.records.loader_times import LoaderTime, LoaderTimes, settings_to_time
from autotune.records.measurement import Measurement
from autotune.records.question import Question
from autotune.space.config import TrainConfig, Workload
from autotune.space.dataset import Dataset
from autotune.space.lengths import BY_TOKENS, Lengths
from autotune.worker.client.forkserver import ForkServer
from autotune.worker.client.isolate import run

DEADLINE_SECONDS = 900.0


def note_unread(question: Question, note: Callable[[str], None]) -> None:
    """Say which options of a dataset are given, where there is none."""
    names = [each for each in (*_READ_AS, "tokenizer") if getattr(question, each) is not None]
    if question.dataset is None and names:
        given = " and ".join(f"--{name.replace('_', '-')}" for name in names)
        note(f"without --dataset nothing is read, which is all that {given} would change.")


_READ_BY_OTHERS = (
    ("text", FORMATS["spans"][1], "--task token-classification reads spans"),
    ("text", FORMATS["labels"][1], "--task sequence-classification reads labels"),
    ("prompt-completion", ("label",), "--task kto reads labels that are true or false"),
    ("chat", FORMATS["preferences"][1], "--task dpo reads preferences"),
    (
        "preferences",
        (*FORMATS["chat"][0], "question", "query", "instruction"),
        "TRL reads what is asked in prompt: rename it",
    ),
)
"""The format that leaves fields out, some of them, and what reads them."""


def read_dataset(
    question: Question,
    source: ModelSource,
    task: str,
    sequence_length: int,
    *,
    beside: int = 0,
    note: Callable[[str], None] = lambda _: None,
) -> tuple[Dataset, Lengths]:
    """Recognise the dataset of a question, and count tokens per sample, cut off at `sequence_length`.

    `beside`: tokens of a completion, which come behind each sample where these are prompts. A prompt that is
    too long is cut off here, and left out of the run: `note` is told how many.
    The tokenizer is a folder, or an id whose files are in the Hub's cache: none is downloaded, and nothing
    of it or of the dataset is run. Raises ConfigError, WorkerError.
    """
    assert question.dataset is not None
    asked = {name: getattr(question, name) for name in _READ_AS}
    tokenizer = question.tokenizer or source.folder_or_id
    # The child may have begun in another folder.
    is_here = os.path.exists(question.dataset)  # Path's raises where no file can have that name.
    dataset = str(Path(question.dataset).absolute()) if is_here else question.dataset
    request = {**asked, "dataset": dataset, "task": task, "tokenizer": tokenizer}
    end = run("lengths", request, deadline_seconds=DEADLINE_SECONDS)
    if end.how != "ok" or not end.answers:
        raise end.to_error("lengths")
    answer = end.answers[-1]
    if "problem" in answer:
        raise ConfigError(
            f"The dataset {question.dataset} cannot be used",
            why=answer["problem"],
            remedy=answer["remedy"],
        )
    if answer["unread"]:
        names, way = " and ".join(answer["unread"]), "--format names another"
        unread = {name.lower() for name in answer["unread"]}
        for form, fields, others in _READ_BY_OTHERS:
            if answer["format"] == form and unread & {*fields}:
                way = others
                break
        note(
            f"{names} of the samples: no part of the format {answer['format']}, so not trained on ({way})."
        )
    num_known, num_given = source.text_config.get("vocab_size"), answer.get("vocabulary_size", 0)
    if question.tokenizer and num_known is not None and num_given > num_known:
        note(
            f"the tokenizer of {question.tokenizer} has {num_given:,} tokens, and the model a vocabulary of "
            f"{num_known:,}: train with one that has no more."
        )
    lengths = Lengths.of(
        {length + beside: count for length, count in answer["counts"]},
        sequence_length,
        num_samples=answer["num_samples"],
        longest=answer["longest"] + beside,
    )
    if beside:
        _check_prompts(question, answer["counts"], sequence_length, beside, note)
    more = ("input_field", "system_field", "history_field", "has_weights", "is_sharegpt")
    recognised = {name: answer[name] for name in (*_READ_AS, *more)}
    return Dataset(
        name=question.dataset, tokenizer=tokenizer, unusual=tuple(answer["unusual"]), **recognised
    ), lengths


def _check_prompts(
    question: Question,
    counts: list[list[int]],
    sequence_length: int,
    beside: int,
    note: Callable[[str], None],
) -> None:
    """Say which share of the prompts is too long; ConfigError where that is all of them.

    `counts`: pairs of tokens of a prompt, and of how many have them. `beside`: tokens of a completion.
    """
    room = sequence_length - beside
    num_all = sum(count for _, count in counts)
    num_long = sum(count for length, count in counts if length > room)
    if not num_long:
        return
    longest = max(length for length, _ in counts)
    remedy = f"The longest has {longest:,}, so give a longer --seq-len"
    if num_long == num_all:
        raise ConfigError(
            f"No prompt of {question.dataset} is short enough",
            why=f"Of {sequence_length:,} tokens {beside:,} are a completion's, and every prompt has more "
            f"than the other {room:,}",
            remedy=remedy,
        )
    note(
        f"{num_long / num_all:.0%} of the prompts have more than {room:,} tokens, and the run leaves them "
        f"out. {remedy}."
    )


_READ_AS = ("format", "text_field", "answer_field", "loss_on")
"""Fields of Question, and of Dataset, that say how the dataset is read."""


def time_loaders(
    server: ForkServer, dataset: Dataset, workload: Workload, best: Measurement
) -> LoaderTimes:
    """The loader of the train.py of what was measured, timed in a process of its own.

    Raises WorkerError where that fails: nothing then says which settings are good.
    """
    assert best.micro_step_seconds is not None
    needed_seconds = best.micro_step_seconds * _mean_share(workload, best.config)
    backend = best.spec.backend
    request = {
        "program": train_py.write(
            workload=workload, config=best.config, result={"evidence": "measured"}
        ),
        "dataset": dataset.name,
        "tokenizer": dataset.tokenizer,
        "backend": backend,
        "micro_step_seconds": needed_seconds,
        "settings": list(
            settings_to_time(
                len(os.sched_getaffinity(0)),
                has_cuda=backend == "cuda",
                # Torch refuses to keep workers where there are none.
                least_workers=int(bool(workload.extra.get("dataloader_persistent_workers"))),
            )
        ),
    }
    end = server.run("loader", request, deadline_seconds=DEADLINE_SECONDS)
    if end.how != "ok" or not end.answers:
        raise end.to_error("loader")
    if "problem" in end.answers[-1]:
        raise WorkerError("The loader cannot be timed", why=str(end.answers[-1]["problem"]))
    try:
        times = tuple(json_records.read(LoaderTime, answer, "loader") for answer in end.answers)
    except ValueError as error:
        raise WorkerError("The loader process talked nonsense", why=str(error)) from error
    return LoaderTimes(micro_step_seconds=needed_seconds, times=times)


def _mean_share(workload: Workload, config: TrainConfig) -> float:
    """Tokens of the loader's average batch, padding included, in those of the micro-batch measured."""
    if workload.lengths is None or config.batching == "packed":
        return 1.0
    filled = workload.filling(config)
    # By tokens, all of a step is one batch to the loader.
    num_at_once = filled.num_micro_batches if config.batching == BY_TOKENS else 1.0
    return num_at_once * min(filled.full_share, 1.0)
