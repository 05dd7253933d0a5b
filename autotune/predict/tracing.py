"""Asks a worker for traces, one per TraceSpec, which shares them among processes of its own.

What one trace does to its process, it does to that trace only: the one that ended the process is set
aside and the others are made all the same. A trace that does not repeat from layer to layer is asked for
again with every layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from autotune.catalogue.attention import without
from autotune.catalogue.gpu_rows import TRACED_AS, USUAL_L2_BYTES, USUAL_NUM_SMS
from autotune.catalogue.gpus import Gpu
from autotune.catalogue.models import ModelSource
from autotune.common import json_records
from autotune.errors import ConfigError, HardwareError
from autotune.memory.traces import BrokenTrace, Trace
from autotune.predict.sharding.dealt_layers import DealtTrace
from autotune.predict.sharding.layer_counts import can_deal
from autotune.predict.sharding.pipeline import PipelineTrace
from autotune.predict.sharding.rank_trace import RankTrace
from autotune.predict.sharding.shards import is_tied
from autotune.predict.sharding.shared_trace import SharedTrace
from autotune.predict.trace_jobs import TraceJobs
from autotune.records.estimate import TraceSpec
from autotune.space.media import Media
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.teacher import Teacher
from autotune.space.trainers import TRAINERS
from autotune.store.trace_cache import TraceCache
from autotune.worker.client.forkserver import ForkServer
from autotune.worker.client.isolate import WorkerEnd, run_many

DEADLINE_SECONDS = 600.0
"""Longest time between two answers. [judgement] A group of traces of a model whose layers all differ takes
25 s of a core: all of them take minutes, and far longer on a busy machine."""

# One round for all, one for traces that need every layer, one each for two crashes.
_MAX_ROUNDS = 4


def trace_all(
    model: ModelSource,
    task: str,
    sequence_length: int,
    gpu: Gpu,
    specs: Iterable[TraceSpec],
    *,
    num_gpus: int = 1,
    pictures: Media | None = None,
    teacher: Teacher | None = None,
    on_trace: Callable[[int, int], None] | None = None,
    server: ForkServer | None = None,
    cache: TraceCache | None = None,
    operations: bool = False,
    found: dict[TraceSpec, Trace | SharedTrace] | None = None,
    refused: dict[TraceSpec, str] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> dict[TraceSpec, Trace | SharedTrace]:
    """Trace a step per spec; `on_trace(done, all)` is called as they arrive.

    `server`: whose forks trace, for who asks again and again: the imports are then paid once.
    `cache`: what was traced before is taken from it, and what is new is kept there.
    `operations`: with what made each tensor, which is kept in no cache.
    `found`: the result, for who looks at it before all of it is there; a trace is in it before `on_trace`
    tells of it. `refused`: takes the reasons why others have none. `meanwhile`: called while a server that is
    needed starts.
    One GPU's step is traced; what several make of it follows from that. A spec that the model does
    not support is left out of the result. Raises ConfigError when it supports none, WorkerError when
    a worker failed, HardwareError for a card without CUDA.
    """
    if gpu.compute_capability is None or gpu.cublas_workspace_bytes is None:
        raise HardwareError(
            f"{gpu.name} is no CUDA card",
            why="What its kernels and its allocator do is not modelled",
            remedy="Name an NVIDIA card (autotune gpus)",
        )
    assert cache is None or not operations
    shared = asked_of_all(model, task, sequence_length, gpu, pictures, teacher)
    wanted = _WantedSteps(model, gpu, specs, num_gpus, {} if found is None else found)
    jobs = TraceJobs(wanted.by_origin, wanted.keep, on_trace, operations=operations, shared=shared)
    if cache is not None:
        jobs.take_known(cache)
    if server is not None and meanwhile is not None and jobs.left():
        server.start("trace")
        meanwhile()
    try:
        _run_rounds(jobs, shared, server)
    finally:
        # What came before a failure, too: the next attempt goes on from there.
        if cache is not None:
            jobs.keep_new(cache)
    jobs.log_refused()
    if refused is not None:
        refused |= wanted.why_refused(jobs)
    if jobs.crash is not None and (jobs.left() or not jobs.traces):
        raise jobs.crash
    if not jobs.traces:
        raise _refusal(model, wanted.specs, next(iter(jobs.refused.values())), pictures)
    if not wanted.found:
        raise wanted.why_none_follows()
    return wanted.found


def _run_rounds(jobs: TraceJobs, shared: Mapping[str, Any], server: ForkServer | None) -> None:
    """Ask for what is left until nothing is; what ended its process is not asked for again."""
    run = run_many if server is None else functools.partial(_run_forked, server)
    for _ in range(_MAX_ROUNDS):
        left = jobs.left()
        if not left:
            break
        (end,) = run(
            "trace",
            [{**shared, "traces": left}],
            deadline_seconds=DEADLINE_SECONDS,
            answers_renew=True,
            on_answer=jobs.take,
        )
        if end.how != "ok":
            jobs.blame(left, end)


class _WantedSteps:
    """The steps that are wanted, and what follows of them from the steps of one GPU that are traced."""

    def __init__(
        self,
        model: ModelSource,
        gpu: Gpu,
        specs: Iterable[TraceSpec],
        num_gpus: int,
        found: dict[TraceSpec, Trace | SharedTrace],
    ) -> None:
        """`found`: takes what follows."""
        self.specs = set(specs)
        self.found = found
        self.by_origin: dict[TraceSpec, list[TraceSpec]] = {}
        """Each step that is to be traced, with the wanted ones that follow from it."""
        for spec in self.specs:
            for one in of_unlike_gpus(spec):
                self.by_origin.setdefault(one, []).append(spec)
        self._model, self._num_gpus = model, num_gpus
        self._hidden_size, self._on_card = _hidden_size(model), gpu.backend == "cuda"
        self._traced: dict[TraceSpec, Trace] = {}
        self._not_run: dict[TraceSpec, str] = {}
        """The reasons why FSDP2 cannot share the model out."""

    def keep(self, origin: TraceSpec, trace: Trace) -> None:
        """Keep a trace, and what follows from it and those before."""
        self._traced[origin] = trace
        for spec in self.by_origin[origin]:
            of_each = [self._traced.get(one) for one in of_unlike_gpus(spec)]
            if None in of_each:
                continue
            first, *of_last = filter(None, of_each)
            if PARALLELISMS[spec.parallelism].is_fsdp and first.why_not_fsdp2:
                self._not_run[spec] = first.why_not_fsdp2
            elif (made := self._of_spec(spec, first, of_last)) is not None:
                self.found[spec] = made

    def _of_spec(
        self, spec: TraceSpec, trace: Trace, of_last: list[Trace]
    ) -> Trace | SharedTrace | None:
        """Return what follows for a spec from one GPU's step, or from the first and the last one's.

        None where nothing does: the layers cannot be dealt out so, or a plan not be told.
        """
        row = PARALLELISMS[spec.parallelism]
        if row.deals_layers and not can_deal(trace, self._num_gpus):
            return None
        if row.schedules and is_tied(trace.parameters()):
            return None
        if spec.checkpoint_layers:
            try:
                trace, *of_last = (
                    each.with_lean_layers(spec.checkpoint_layers) for each in (trace, *of_last)
                )
            except BrokenTrace:
                return None
        if spec.parallelism == "none":
            return trace
        return shared_trace(
            trace,
            spec,
            num_gpus=self._num_gpus,
            hidden_size=self._hidden_size,
            on_card=self._on_card,
            of_last=of_last[0] if of_last else None,
        )

    def why_refused(self, jobs: TraceJobs) -> dict[TraceSpec, str]:
        """Return the reasons why wanted steps cannot be traced, or not be shared out."""
        of_jobs = jobs.why_refused().items()
        return {spec: why for one, why in of_jobs for spec in self.by_origin[one]} | self._not_run

    def why_none_follows(self) -> ConfigError:
        """Return the error where steps were traced, and nothing that was asked for follows from them."""
        model = self._model
        if self._not_run:
            why = next(iter(self._not_run.values()))
            return ConfigError(
                f"FSDP2 cannot share out {model.name}",
                why=why[:1].upper() + why[1:],
                remedy="Take another way to share: --parallelism ddp or zero3",
            )
        if any(spec.checkpoint_layers for spec in self.specs):
            return ConfigError(
                f"This plan of checkpointing cannot be predicted for {model.name}",
                why="Each stretch of layers needs three, or a multiple of the model's pattern from three on; "
                "of layers that are unlike only some numbers are told",
                remedy="Give --checkpointing solve, or another --checkpoint-layers",
            )
        return ConfigError(
            f"The layers of {model.name} cannot be dealt out over {self._num_gpus} GPUs",
            why="They are fewer, or in several stacks, or not alike enough to be told apart; or the last "
            "stage of a pipeline has the first one's embedding as its head",
            remedy="Take another way to share: --parallelism fsdp2",
        )


def asked_of_all(
    model: ModelSource,
    task: str,
    sequence_length: int,
    gpu: Gpu,
    pictures: Media | None,
    teacher: Teacher | None = None,
) -> dict[str, Any]:
    """Return what a request says of all its traces."""
    return {
        "config": model.config,
        "task": task,
        "sequence_length": sequence_length,
        **of_card(gpu),
        **({} if pictures is None else {"pictures": json_records.plain(pictures)}),
        **({} if teacher is None else {"teacher": teacher.config}),
    }


def _hidden_size(model: ModelSource) -> int:
    said = model.text_config.get("hidden_size")
    return said if isinstance(said, int) else 0


def share_known(
    model: ModelSource,
    spec: TraceSpec,
    gpu: Gpu,
    traces: dict[TraceSpec, Trace | SharedTrace],
    *,
    num_gpus: int,
) -> None:
    """Add the trace of a shared run to the traces, where it follows from one of them.

    That is one GPU's own, or one from which another way to share was worked out.
    """
    wanted = of_one_gpu(spec)
    alone = traces.get(wanted) or next(
        (
            each.of_one
            for other, each in traces.items()
            if isinstance(each, SharedTrace) and of_one_gpu(other) == wanted
        ),
        None,
    )
    is_fsdp = PARALLELISMS[spec.parallelism].is_fsdp
    if isinstance(alone, Trace) and not (is_fsdp and alone.why_not_fsdp2):
        traces[spec] = shared_trace(
            alone,
            spec,
            num_gpus=num_gpus,
            hidden_size=_hidden_size(model),
            on_card=gpu.backend == "cuda",
        )


def shared_trace(
    trace: Trace,
    spec: TraceSpec,
    *,
    num_gpus: int,
    hidden_size: int = 0,
    on_card: bool = True,
    of_last: Trace | None = None,
) -> SharedTrace:
    """Return what several GPUs make of one GPU's step; `on_card`: of CUDA cards, not processes on CPUs.

    `of_last`: the last GPU's own step, where it is another.
    """
    row = PARALLELISMS[spec.parallelism]
    if row.schedules:
        return PipelineTrace(trace, spec, num_gpus=num_gpus)
    if row.deals_layers:
        return DealtTrace(trace, spec, num_gpus=num_gpus)
    return RankTrace(
        trace,
        spec,
        num_gpus=num_gpus,
        hidden_size=hidden_size,
        on_card=on_card,
        of_last=of_last,
    )


def _refusal(
    model: ModelSource, specs: Collection[TraceSpec], reason: str, pictures: Media | None
) -> ConfigError:
    """The error for the user where none of the specs could be traced; `reason` is a worker's."""
    family = model.config["model_type"]
    attentions = sorted({spec.attention for spec in specs})
    remedy = "Name another model, method or precision"
    if all(family in without().get(name, ()) for name in attentions):
        reason = f"Transformers has no {' and no '.join(attentions)} attention for {family}"
        remedy = "Give --attention eager"
    elif all(PARALLELISMS[spec.parallelism].splits_sequences for spec in specs):
        remedy = "Take another way to share (--parallelism fsdp2), or another precision"
    elif all(PARALLELISMS[spec.parallelism].splits for spec in specs):
        remedy = "Take another way to share (--parallelism fsdp2), or another --num-gpus"
    elif any(spec.lora_targets not in (None, "all-linear", "attention") for spec in specs):
        remedy = "Name modules that it has with --targets, or another model or method"
    elif pictures is not None and pictures.seconds:
        remedy = "Give another --audio-seconds, model, method or precision"
    why = reason[:1].upper() + reason[1:]
    return ConfigError(f"{model.name} cannot be traced", why=why, remedy=remedy)


def of_card(gpu: Gpu) -> dict[str, Any]:
    """All that a trace depends on of a card: cards that agree in it share their traces."""
    capability = gpu.compute_capability
    return {
        "compute_capability": capability and TRACED_AS.get(capability, capability),
        "cublas_workspace_bytes": gpu.cublas_workspace_bytes,
        "num_sms": gpu.num_sms or USUAL_NUM_SMS,
        "l2_bytes": gpu.l2_bytes or USUAL_L2_BYTES,
        "backend": gpu.backend,
    }


def of_one_gpu(spec: TraceSpec) -> TraceSpec:
    """The step alone that a shared run's step follows from.

    FSDP2 gathers weights and adapters in 16 bits, and accelerate puts no autocast around it (1.15
    accelerator.py, _prepare_fsdp2). DeepSpeed casts both (0.19.8 runtime/engine.py,
    _cast_module_mixed_precision), beside codes, which leave adapters in float32 here.
    """
    row = PARALLELISMS[spec.parallelism]
    # What DDP makes of several passes is in the trace.
    is_wrapped = row.name == "ddp" and TRAINERS[spec.trainer].passes_apart
    around = row.name if is_wrapped else "none"
    alone = dataclasses.replace(spec, parallelism=around, no_sync=False, checkpoint_layers=0)
    is_cast = row.is_fsdp or (row.is_deepspeed and spec.quantization == "none")
    if is_cast and spec.precision == "bf16-autocast":
        is_full = spec.method == "full"
        return dataclasses.replace(alone, precision="bf16-true", adapter_in_base_dtype=not is_full)
    return alone


def of_unlike_gpus(spec: TraceSpec) -> tuple[TraceSpec, ...]:
    """The steps that a run's step follows from: that of one GPU, or of two that share each sequence.

    Of more than two one in the middle has the most: it keeps what the first keeps, and loads as the last.
    """
    first = of_one_gpu(spec)
    is_unlike = spec.sequence_parts == 2
    return (first, dataclasses.replace(first, has_last_part=True)) if is_unlike else (first,)


def _run_forked(
    server: ForkServer, verb: str, requests: Sequence[Mapping[str, Any]], **rest: Any
) -> tuple[WorkerEnd, ...]:
    return tuple(server.run(verb, request, **rest) for request in requests)
