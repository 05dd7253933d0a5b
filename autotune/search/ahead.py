"""Starts what a search will most likely need, before it is known what is asked.

A process that traces imports for two seconds, and the command itself for half of one: side by side they take
no longer than the first. What was asked before is in the cache, and needs no such process.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

from autotune.catalogue.tasks import PICTURES
from autotune.predict.trace_servers import started_ahead
from autotune.records.question import Question
from autotune.space.trainers import BY_TASK, TRL_BY_TASK
from autotune.store.trace_cache import AnsweredQuestions


@contextlib.contextmanager
def what_traces(question: Question) -> Iterator[None]:
    """Start what traces within the block, unless the same was asked before; remember that it was."""
    known = AnsweredQuestions()
    name = repr(question)
    if known.find_texts([name]):
        yield
        return
    with started_ahead(_libraries(question)):
        yield
    known.add({name: {}})


def _libraries(question: Question) -> set[str]:
    """Return the libraries that may be asked for, of those that no other traces need."""
    libraries = set()
    has_liger = importlib.util.find_spec("liger_kernel") is not None
    is_of_trl = question.images is not None or question.task in (PICTURES, *TRL_BY_TASK)
    if has_liger or question.dataset or is_of_trl:
        libraries.add("triton")
    if is_of_trl:
        libraries.add("trl")
    elif question.task in BY_TASK:
        libraries.add(BY_TASK[question.task].module)
    if (question.num_gpus or 1) > 1:
        libraries.add("torch.distributed")
    return libraries
