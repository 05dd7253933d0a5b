"""The way from a Question about one configuration to its Estimate, and to what prices others like it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from autotune.common.units import format_bytes
from autotune.predict.estimator import Estimator
from autotune.predict.tracing import trace_all
from autotune.records.estimate import Estimate, TraceSpec, specs_for
from autotune.records.question import Question
from autotune.search.listener import Progress
from autotune.search.resolve import Configuration, resolve_configuration
from autotune.search.solved_checkpointing import PlanSolver, plan_specs
from autotune.space.checkpoint_plans import SOLVE
from autotune.space.config import TrainConfig
from autotune.store.trace_cache import TraceCache


class Pricing:
    """One configuration, priced: what was asked, its Estimate, and the Estimator that made it."""

    def __init__(self, asked: Configuration, estimator: Estimator) -> None:
        self.asked = asked
        self.estimator = estimator

    @functools.cached_property
    def estimate(self) -> Estimate:
        """Predicted memory and time of the configuration."""
        return self.estimator.estimate(self.asked.config)


def estimate(
    question: Question,
    *,
    note: Callable[[str], None] = lambda _: None,
    progress: Progress = lambda *_: None,
) -> Pricing:
    """Predict memory and speed of the one configuration that the question fixes.

    Raises ConfigError for what cannot work, HardwareError, WorkerError.
    """
    return priced(resolve_configuration(question, note=note), progress=progress)


def note_room(question: Question, pricing: Pricing, note: Callable[[str], None]) -> None:
    """Say where what fits leaves less room than was asked for."""
    if question.odds is None and question.headroom is None:
        return
    estimate, workload = pricing.estimate, pricing.asked.workload
    room = workload.headroom.room_bytes(estimate.peak_reserved_bytes, estimate.config)
    spare = workload.memory_budget_bytes - estimate.resident_bytes
    if 0 <= spare < room:
        asked = (
            f"--odds {question.odds:g}"
            if question.headroom is None
            else f"--headroom {question.headroom}"
        )
        note(f"{format_bytes(room - spare)} of the room that {asked} asks for are lacking.")


def note_unsolved(asked: Configuration, pricing: Pricing, note: Callable[[str], None]) -> None:
    """Say where checkpointing was to be solved, and no plan of it fits."""
    found = pricing.asked.config
    is_solved = found.activation_checkpointing == 0 or found.has_plan
    if asked.config.activation_checkpointing == SOLVE and not is_solved:
        note("--checkpointing solve finds no plan that fits: every layer is checkpointed.")


def note_rank(config: TrainConfig, width: int, note: Callable[[str], None]) -> None:
    """Say where a rank is more than its narrowest layer is wide; a width of 0: no layer has one."""
    if 0 < width < (config.lora_rank or 0):
        note(
            f"The narrowest layer that is adapted has {width:,} inputs or outputs: rank {config.lora_rank:,} "
            f"adds nothing to it that {width:,} would not."
        )


def priced(
    asked: Configuration, *, progress: Progress = lambda *_: None, with_operations: bool = False
) -> Pricing:
    """Trace the configuration and make its Estimator; `with_operations` traces anew, with all names.

    Checkpointing that is to be solved is: none where that fits, else the fastest plan that does, else all.
    """
    workload = asked.workload
    cache = None if with_operations else TraceCache()
    solves = asked.config.activation_checkpointing == SOLVE
    lean = dataclasses.replace(asked.config, activation_checkpointing=1)
    free = dataclasses.replace(asked.config, activation_checkpointing=0)
    varied = workload.lengths is not None
    wanted = (lean, free) if solves else (asked.config,)
    specs = set[TraceSpec]().union(*(specs_for(config, varied=varied) for config in wanted))
    traces = trace_all(
        asked.source,
        workload.task,
        workload.sequence_length,
        asked.card.gpu,
        specs | plan_specs(lean, workload.host_memory_bytes) if solves else specs,
        num_gpus=workload.num_gpus,
        pictures=workload.pictures,
        teacher=workload.teacher,
        on_trace=functools.partial(progress, "trace"),
        cache=cache,
        operations=with_operations,
    )
    estimator = Estimator(
        traces,
        asked.card.gpu,
        memory_budget_bytes=workload.memory_budget_bytes,
        headroom=workload.headroom,
        host_memory_bytes=workload.host_memory_bytes,
        filling=workload.filling if varied else None,
        replays=None if cache is None else cache.replays(),
    )
    if solves:
        solved = PlanSolver(estimator, traces).least_checkpointed(lean)
        asked = dataclasses.replace(asked, config=solved)
    return Pricing(asked, estimator)
