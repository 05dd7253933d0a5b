"""The teacher of a question: its configuration, found as the model's is, and checked against it."""

from __future__ import annotations

import json

from autotune.catalogue.models import ModelSource
from autotune.catalogue.models import resolve as find_model
from autotune.errors import ConfigError
from autotune.records.question import Question
from autotune.space.teacher import Teacher
from autotune.space.trainers import BY_TASK, DISTILLATION


def read_teacher(
    question: Question, source: ModelSource, task: str, of_base: str | None
) -> Teacher | None:
    """Return the task's teacher, the base's where the question names none; None for a task without.

    Raises ConfigError where there is none, for one that cannot be found, that has another vocabulary, or
    whose checkpoint is quantised.
    """
    if task not in BY_TASK or not BY_TASK[task].has_teacher:
        if question.teacher is not None:
            raise ConfigError(
                f"--teacher does not go with --task {task}", remedy=f"Give --task {DISTILLATION}"
            )
        return None
    name = question.teacher or of_base
    if name is None:
        raise ConfigError(
            f"The task {task} needs a teacher",
            why="Nothing names the model whose next words are learnt",
            remedy="Give --teacher with a Hub id, a folder or a config.json (autotune models)",
        )
    found = find_model(name)
    sizes = [each.text_config.get("vocab_size") for each in (found, source)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise ConfigError(
            f"{found.name} cannot teach {source.name}",
            why=f"Its vocabulary has {sizes[0]:,} entries and the student's {sizes[1]:,}: the odds of every "
            "next word are compared",
            remedy="Give a --teacher with the same vocab_size, mostly a larger model of the family",
        )
    if found.checkpoint is not None:
        raise ConfigError(
            f"{found.name} cannot be a teacher here",
            why="Its checkpoint is quantised, which is not predicted of a teacher",
            remedy="Name the checkpoint that it was made from",
        )
    return Teacher(name=found.name, config_json=json.dumps(found.config))
