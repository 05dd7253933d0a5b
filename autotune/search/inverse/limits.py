"""The way from a Question to a Limit: the most that still fits, or the least card that would do."""

from __future__ import annotations

import dataclasses

from autotune.catalogue import models
from autotune.catalogue.tasks import PICTURES
from autotune.errors import ConfigError
from autotune.records.question import SEQUENCE_LENGTH, Question
from autotune.search import budget
from autotune.search.dataset import read_dataset
from autotune.search.inverse import questions
from autotune.search.inverse.pricing import LimitProblem
from autotune.search.inverse.questions import Limit, positions
from autotune.search.listener import Progress
from autotune.space import space_file
from autotune.space.checkpoint_plans import SOLVE
from autotune.space.config import METHODS
from autotune.space.requirements import predictable
from autotune.space.search_space import (
    for_gpus,
    may_pack,
    with_fixed_segments,
    with_peft,
    without_solve,
)
from autotune.space.trainers import DISTILLATION, row_of, task_of_format
from autotune.worker.client.forkserver import ForkServer

MAX_ACCUMULATION = 1024
"""Most micro-batches per step. [judgement] With 3,000 an answer took a minute of a CPU."""


def limits(
    question: Question,
    what: str,
    *,
    multiple_of: int = 64,
    progress: Progress = lambda *_: None,
) -> Limit:
    """Find the most of `what`, a key of questions.QUESTIONS, that fits with the question's settings fixed.

    Raises ConfigError, HardwareError, NothingFitsError where not even the first value fits, WorkerError.
    """
    problem = resolve_limit(question, what, multiple_of=multiple_of)
    with ForkServer() as server:
        return questions.answer(what, problem, server, progress=progress)


def _check_task(task: str | None) -> None:
    """Raise ConfigError for a task that needs pictures or a teacher, which are not asked for here."""
    if task == DISTILLATION:
        raise ConfigError(
            f"--task {task} does not go with `max`",
            why="Its teacher is not asked for here",
            remedy="`autotune estimate --teacher NAME` prices one configuration",
        )
    if task is None or (task != PICTURES and row_of(task).reads in ("tokens", "sound")):
        return
    size = "--images 1 --image-size 1024x768" if task == PICTURES else "--image-size 224x224"
    what = "How many pictures a sample has, and of which size,"
    if row_of(task).reads == "waves":
        size, what = "--audio-seconds 5", "How long a sample's sound is"
    raise ConfigError(
        f"--task {task} does not go with `max`",
        why=f"{what} is not asked for here",
        remedy=f"`autotune estimate {size}` prices one configuration",
    )


def resolve_limit(question: Question, what: str, *, multiple_of: int) -> LimitProblem:
    """Look up what the question names. Raises ConfigError, HardwareError."""
    if (question.accumulation or 1) > MAX_ACCUMULATION:
        raise ConfigError(
            f"--accumulation {question.accumulation:,} is more than `max` tries",
            why="Every micro-batch of a step is replayed, for every value",
            remedy=f"Give {MAX_ACCUMULATION:,} or less; `autotune estimate` prices one such configuration",
        )
    _check_task(question.task)
    if question.settings.get("activation_checkpointing") == SOLVE:
        raise ConfigError(
            "--checkpointing solve does not go with `max`",
            why="A plan leaves no memory unused, and a limit is reached with every layer checkpointed",
            remedy="Give --checkpointing full, or leave it out",
        )
    card = None if what == "gpu" else budget.choose_card(question.gpu, question.gpu_mem)
    source = None if question.model is None else models.resolve(question.model)
    length = question.seq_len or SEQUENCE_LENGTH
    if source is not None and what != "sequence-length":
        length = budget.possible_length(source, length, is_given=question.seq_len is not None)
        budget.check_length(question.task or source.task, length)
    task = question.task or (None if source is None else source.task)
    if source is not None and task is not None:
        task = source.own_task(task)
    _check_task(task)
    if source is not None and task is not None:
        source = budget.for_task(source, task)
    space, _ = without_solve(space_file.load(question.space))
    space, _ = predictable(space)
    if card is not None and card.gpu.in_wsl and question.space in space_file.names():
        space = with_fixed_segments(space)
    num_gpus = question.num_gpus or 1
    if num_gpus > 1:
        space = for_gpus(space, num_gpus)
    methods = question.methods
    if question.peft is not None:
        space = with_peft(space, question.peft)
        methods = ("peft",)
    methods = tuple(method for method in METHODS if method in methods) or METHODS
    if source is not None:
        methods = budget.methods_for(source, methods)
    space_file.require_method(space, methods)
    dataset, lengths = None, None
    if question.dataset is not None:
        if source is None or task is None:
            raise ConfigError(
                "--dataset does not go with --what model",
                why="Each model cuts its samples into tokens of its own",
                remedy="Leave --dataset out, or name the --model with another --what",
            )
        longest = positions(source)[0] if what == "sequence-length" else length
        dataset, lengths = read_dataset(question, source, task, longest)
        if (refined := task_of_format(task, dataset.format)) != task:
            question = dataclasses.replace(question, task=refined)
        if not may_pack(space, task):
            length = min(length, lengths.longest)
    return LimitProblem(
        question=question,
        source=source,
        card=card,
        headroom=budget.headroom_of(question, None if card is None else card.budget_bytes),
        host_memory_bytes=budget.host_memory_of(question),
        sequence_length=length,
        methods=methods,
        space=space,
        multiple_of=multiple_of,
        num_gpus=num_gpus,
        dataset=dataset,
        lengths=lengths,
    )
