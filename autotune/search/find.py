"""A whole search, from the question to the answer: the one path of the command line and of code.

The question is resolved, predicted, and measured where that is asked for. Nothing is printed: a Listener
hears how far the work is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.errors import ConfigError, HardwareError, StorageError, WorkerError
from autotune.export.base.read import BaseRun
from autotune.predict.trace_servers import end_what_runs_ahead
from autotune.records.answer import Answer
from autotune.records.charts import Details
from autotune.records.estimate import Estimate
from autotune.records.question import Question
from autotune.search import lengths_room, predict_best
from autotune.search.estimate import note_rank
from autotune.search.fleet import HERE, Cards, Where, fleet_on_ray
from autotune.search.listener import SILENT, Listener
from autotune.search.prediction import Prediction
from autotune.search.resolve import Problem, resolve
from autotune.search.timed_host import with_timed_host
from autotune.store import optuna_study, stored_answers, study_names
from autotune.store.database import check_place, parse_url
from autotune.store.locks import StudyBusyError
from autotune.store.recommendations import question_of
from autotune.store.trace_cache import TraceCache
from autotune.worker.client.forkserver import ForkServer


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """All that a search leaves: the answer, and what is kept and written beside it."""

    answer: Answer
    considered: tuple[Estimate, ...]
    """Estimates that a study should keep, best first."""
    details: Details
    """Charts that a report draws beside the answer."""
    study: str
    folder_name: str
    """The study's name, as a folder may have it."""
    run: BaseRun | None = None
    """The run that the user trains with so far."""
    question: Mapping[str, Any] = field(default_factory=dict)
    """The question, as recommendations.question_of says it."""


class NotMeasuredError(StorageError):
    """The database failed what was to be measured; the answer by the prediction is not lost by it."""

    def __init__(self, error: StorageError, predicted: Finding) -> None:
        self.predicted = predicted
        super().__init__(error.what, error.why, error.remedy)


def find(
    question: Question,
    *,
    storage: str,
    command: str = "",
    listener: Listener = SILENT,
    server: ForkServer | None = None,
    waits: bool = False,
    where: Where = HERE,
    cards: Cards | None = None,
) -> Finding:
    """Answer what was asked; whatever it cannot answer is an AutotuneError.

    Probes are kept in the database `storage`, where later searches find them; traces in the user's cache
    folder. `command` is what the study keeps of how it was made. `server` runs the probes; None: one of
    their own. `waits`: for another search in the same study to end. `where`: the cards that probes run on;
    `cards`: a cluster's, where they were taken already. Raises StudyBusyError where another search is in the
    study and it does not wait, NotMeasuredError where the database fails what is to be measured.
    """
    check_place(parse_url(storage))  # what cannot be used is said before a search, not after it
    with contextlib.ExitStack() as taken:
        if where.on is not None and cards is None:
            question, cards = taken.enter_context(fleet_on_ray(where, question, listener.note))
        if server is None:
            server = taken.enter_context(ForkServer())
        problem = _resolved(question, cards, listener)
        _check_study(problem, storage)
        problem = with_timed_host(problem, server, listener)
        prediction = predict(problem, listener=listener)
        predicted = functools.partial(_finding, problem, prediction)
        if problem.backend is None:
            _note_unused(question, where, listener)
            return predicted(prediction.answer)
        end_what_runs_ahead()
        # Optuna's samplers come with it, which a prediction does without.
        from autotune.search import measure_best

        study = optuna_study.open_study(
            storage,
            problem.question.study or measured_name(problem),
            workload=prediction.answer.workload,
            gpu=prediction.answer.gpu,
            command=command,
            versions=stored_answers.library_versions(),
            searches=True,
            waits=waits,
            note=listener.note,
        )
        try:
            answer = measure_best.measured(
                prediction,
                problem,
                backend=problem.backend,
                study=study,
                storage=storage,
                listener=listener,
                server=server,
                where=where,
                fleet=None if cards is None else cards.fleet,
            )
        except StudyBusyError:
            raise
        except StorageError as error:
            raise NotMeasuredError(error, predicted(prediction.answer)) from error
        except (HardwareError, WorkerError) as error:
            if question.backend != "auto":
                raise
            listener.note(f"nothing could be measured, so the answer is predicted. {error}")
            return _predicted(problem, listener)
        return predicted(answer)


def _resolved(question: Question, cards: Cards | None, listener: Listener) -> Problem:
    card = None if cards is None else cards.chosen(question.gpu, question.gpu_mem)
    with contextlib.ExitStack() as shown:
        if question.dataset is not None:
            shown.enter_context(listener.searching())("dataset", 0, 0)
        problem = resolve(question, card=card, note=listener.note)
    num_gpus = problem.workload.num_gpus
    if cards is not None and cards.num_gpus != num_gpus:
        raise ConfigError(
            f"This run is shared by {num_gpus} GPUs, and each probe was to have {cards.num_gpus}",
            remedy=f"Give --num-gpus {num_gpus}",
        )
    if problem.backend is not None:
        for option, value in (("--odds", question.odds), ("--headroom", question.headroom)):
            if value is not None:
                listener.note(
                    f"{option} is of predictions: what is measured may take all of the budget."
                )
    return problem


def _predicted(problem: Problem, listener: Listener) -> Finding:
    """Answer by prediction what could not be measured: with the room that a prediction needs."""
    problem = problem.predicted()
    prediction = predict(problem, listener=listener)
    return _finding(problem, prediction, prediction.answer)


def predict(problem: Problem, *, listener: Listener) -> Prediction:
    """Answer a problem by prediction. Raises ConfigError, HardwareError and NothingFitsError."""
    with listener.searching() as progress:
        search = functools.partial(
            predict_best.find,
            problem.source,
            problem.workload,
            problem.space,
            problem.card.gpu,
            gpu_reason=problem.card.why,
            allow=problem.question.allow,
            base=problem.base,
            has=problem.base if problem.trains_elsewhere else None,
            effort=problem.question.effort,
            progress=progress,
            so_far=listener.so_far,
            cache=TraceCache(),
            meanwhile=listener.meanwhile,
            changes=problem.changes,
            traces_all=problem.backend is not None,
        )
        if problem.backend is not None:  # A confirmation trains with varied lengths.
            found = search()
        else:
            found = lengths_room.with_room(lambda share: search(varied_share=share), listener.note)
    note_rank(found.answer.best.config, found.narrowest_layer(), listener.note)
    return found


def measured_name(problem: Problem) -> str:
    """The name of the study of what was measured."""
    return f"{problem.study}-measured"


def _check_study(problem: Problem, storage: str) -> None:
    """Say before a search, not after it, that its answer cannot be kept."""
    name = problem.study if problem.backend is None else measured_name(problem)
    optuna_study.check_study(
        storage,
        problem.question.study or name,
        workload=problem.workload,
        gpu=problem.card.gpu.name,
    )


def _finding(problem: Problem, prediction: Prediction, answer: Answer) -> Finding:
    named = problem.question.study
    name = problem.study if answer.measured is None else measured_name(problem)
    answer = dataclasses.replace(answer, fallbacks=prediction.fallbacks(answer))
    return Finding(
        answer=answer,
        considered=tuple(prediction.considered),
        details=prediction.details(answer),
        study=named or name,
        folder_name=name if named is None else study_names.folder_of(named),
        run=problem.run,
        question=question_of(problem.question),
    )


def _note_unused(question: Question, where: Where, listener: Listener) -> None:
    for option, value in (
        ("--confirm-steps", question.confirm_steps),
        ("--train-steps", question.train_steps),
        ("--cards", where.cards),
    ):
        if value is not None:
            listener.note(f"{option} says nothing to a prediction: --backend cuda or cpu measures.")
