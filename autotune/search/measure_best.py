"""A prediction's candidates measured on this machine, and the data loader timed with the winner."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from autotune.errors import NothingFitsError, WorkerError
from autotune.probe import compiled, fingerprint, loop
from autotune.probe.fleet.fleet import Fleet
from autotune.probe.run_one import NotAsAssumed, Prober
from autotune.records.answer import Answer, Measured
from autotune.records.loader_times import LoaderTimes
from autotune.records.measurement import CONFIRM_STEPS, PROBE_SECONDS, ProbeSpec
from autotune.search.dataset import time_loaders
from autotune.search.fleet import HERE, Where, fleet_here
from autotune.search.listener import Listener
from autotune.search.prediction import EFFORTS, Prediction
from autotune.search.resolve import Problem
from autotune.space import requirements
from autotune.space.config import Workload
from autotune.space.dataset import Dataset
from autotune.space.requirements import LeftOut, Reason
from autotune.space.tradeoffs import form, tradeoff_class
from autotune.space.trainers import BY_TASK
from autotune.store.probe_table import open_probes
from autotune.worker.client.forkserver import ForkServer

if TYPE_CHECKING:
    import optuna


def measured(
    prediction: Prediction,
    problem: Problem,
    *,
    backend: str,
    study: AbstractContextManager[optuna.Study],
    storage: str,
    listener: Listener,
    server: ForkServer,
    where: Where = HERE,
    fleet: Fleet | None = None,
) -> Answer:
    """Probe the candidates and confirm the winner: the answer, measured. Nothing measured is ever lost.

    `fleet` None: of the cards here.
    """
    question, source = problem.question, problem.source
    data = problem.workload.dataset if problem.reads_dataset else None
    if problem.workload.task in BY_TASK:
        data = None  # The loader that is timed is that of train.py.
    answer = prediction.answer
    workload = answer.workload
    confirm_steps, train_steps = question.confirm_steps, question.train_steps
    if train_steps is None and (train_steps := steps_per_epoch(answer)) is not None:
        listener.note(
            f"the run is taken to be an epoch of the dataset: --train-steps {train_steps}."
        )
    spec = ProbeSpec(
        task=workload.task,
        backend=backend,
        memory_budget_bytes=workload.memory_budget_bytes,
        max_seconds=PROBE_SECONDS[backend],
        pictures=workload.pictures,
        teacher=workload.teacher,
    )
    # What was measured here before is not of cards elsewhere.
    assumed = fingerprint.assumed_fingerprint(backend) if fleet is None else None
    pool = [e for e in prediction.pool() if loop.can_run(e.config, backend)]
    if not pool and (reasons := requirements.of_probe(answer.best.config, backend)):
        raise NothingFitsError(
            "Nothing that is predicted to fit can be measured here",
            why="; ".join(reasons),
            remedy="Take the prediction: --backend predict",
        )
    max_probes = EFFORTS[question.effort].max_probes
    if confirm_steps is None:
        confirm_steps = CONFIRM_STEPS[backend]
    with (
        listener.measuring(answer.counts, max_probes, confirm_steps) as heard,
        fleet_here(where, backend, server, num_gpus=workload.num_gpus)
        if fleet is None
        else contextlib.nullcontext(fleet) as fleet,
    ):
        plan = loop.Plan(
            pool=pool,
            base=answer.base,
            baseline=answer.baseline,
            budget_bytes=workload.memory_budget_bytes,
            max_probes=max_probes,
            confirm_steps=confirm_steps,
            train_steps=train_steps,
            space=answer.space,
            variants=lambda e: [
                v for v in prediction.variants(e) if loop.can_run(v.config, backend)
            ],
        )
        with study as opened, open_probes(storage) as table:
            new_prober = functools.partial(
                Prober,
                fleet,
                table,
                source,
                spec,
                useful_share=prediction.useful_share,
                lengths=() if workload.lengths is None else workload.lengths.percentiles,
                on_run=heard.on_run,
                on_end=heard.on_end,
            )
            # Where everything was measured before, no process is needed that could tell the fingerprint.
            try:
                prober = new_prober(assumed=assumed)
                found = loop.search(opened, plan, prober, on_probe=heard.on_probe)
            except NotAsAssumed:
                found = loop.search(opened, plan, new_prober(), on_probe=heard.on_probe)
        loader = _time_loaders(server, data, workload, found, listener)
    not_compiled = (
        reason
        for estimate in plan.pool
        for variant in prediction.variants(estimate)
        if (reason := compiled.why_not(variant.config, backend))
    )
    told = with_measured(answer, found, not_compiled=next(not_compiled, ""))
    return dataclasses.replace(told, loader=loader)


def _time_loaders(
    server: ForkServer,
    data: Dataset | None,
    workload: Workload,
    measured: Measured,
    listener: Listener,
) -> LoaderTimes | None:
    """None without a dataset here, and where the user has decided; where it fails that costs no answer."""
    if data is None or workload.sets_loader:
        return None
    try:
        return time_loaders(server, data, workload, measured.best)
    except WorkerError as error:
        listener.note(f"the loader was not timed, and its settings stay. {error}")
        return None


def steps_per_epoch(answer: Answer) -> int | None:
    """Optimizer steps in which the answer sees all of the dataset once.

    None without a dataset, and with one that is shorter than a packed block.
    """
    lengths, config = answer.workload.lengths, answer.best.config
    if lengths is None or not lengths.fill_a_block(config.batching, config.sequence_length):
        return None
    useful_tokens = answer.best.useful_share * config.tokens_per_step
    return math.ceil(lengths.tokens_per_epoch(config.batching) / useful_tokens)


def with_measured(answer: Answer, measured: Measured, *, not_compiled: str = "") -> Answer:
    """The answer that probes gave: the prediction of the measured winner, and what was measured.

    `not_compiled`: why nothing could be compiled here, where it was to be.
    """
    best = measured.predicted
    best_class = tradeoff_class(best.config, answer.base)
    forms = {name: form(each.config, answer.base) for name, each in answer.best_by_class.items()}
    of_classes = {
        name: seen
        for name, seen in measured.of_classes.items()
        if name != best_class and name in forms and form(seen.config, answer.base) <= forms[name]
    }
    measured = dataclasses.replace(measured, of_classes=of_classes)
    return dataclasses.replace(
        answer,
        best=best,
        best_class=best_class,
        best_by_class={**answer.best_by_class, best_class: best},
        tied=(),
        sureness=None,
        changes=(),
        more_memory=None,
        fewer_gpus=None,
        reaches_experts=answer.reaches_experts
        if best.config.lora_targets == answer.best.config.lora_targets
        else None,
        tip=answer.tip if best.config == answer.best.config else None,
        # What is not predicted was measured.
        left_out=tuple(
            LeftOut(each.words, Reason.NOT_COMPILED, not_compiled)
            if not_compiled and each.reason is Reason.NOT_PREDICTED
            else each
            for each in answer.left_out
            if not (measured.num_compiled and each.reason is Reason.NOT_PREDICTED)
        ),
        measured=measured,
    )
