"""Answers requests for traces: one for each that is wanted, in as many processes as help.

Those of one group of autotune.worker.trace.shared_models share a model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import traceback
from collections.abc import Iterator
from typing import Any

from autotune.common import json_records
from autotune.records.estimate import TraceSpec
from autotune.space.media import Media
from autotune.worker.build import model as models
from autotune.worker.build.alike_layers import NoStandIn
from autotune.worker.build.model import CrashedStep, UnsupportedModel
from autotune.worker.trace import few_layers, forks, shared_models
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.shared_models import Group, SharedModels
from autotune.worker.trace.stand_ins import without_values
from autotune.worker.trace.step import trace_step

_OF_THE_MACHINE = (MemoryError, OSError)
"""Exceptions of the machine, no fault of the model: what a model does not support is remembered."""


def traces(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the answers of the worker's verb `trace` (autotune.worker.__main__)."""
    device, wanted = begun(request), request["traces"]
    num_processes = forks.num_processes(len(wanted))
    groups = shared_models.parted(shared_models.groups_of(wanted), num_processes)
    if num_processes == 1:
        for group in groups:
            yield from _answers(request, group, device)
        return
    yield from _forked(request, groups, device, num_processes)


def begun(request: dict[str, Any]) -> Device:
    """Return the card of a request, with what all its traces need in place."""
    device = Device(
        compute_capability=tuple(request["compute_capability"]),
        cublas_workspace_bytes=request["cublas_workspace_bytes"],
        num_sms=request["num_sms"],
        l2_bytes=request["l2_bytes"],
        backend=request["backend"],
    )
    with contextlib.suppress(Exception):  # Tracing will say it.
        _prepare(request, TraceSpec(**request["traces"][0]["spec"]))
    # What is imported stays: without it, collecting a traced model takes a millisecond.
    gc.collect()
    gc.freeze()
    gc.disable()  # Each answer's garbage is collected when it is given.
    return device


def _forked(
    request: dict[str, Any], groups: list[Group], device: Device, num_processes: int
) -> Iterator[dict[str, Any]]:
    """Trace in forks; where one has died of a group, each of the group by itself."""
    alone: list[Group] = []
    answers = forks.forked(
        lambda number: {"answers": list(_answers(request, groups[number], device))},
        len(groups),
        num_processes,
    )
    for answer in answers:
        if not isinstance(answer, forks.Died):
            yield from answer["answers"]
        elif len(groups[answer.piece]) == 1:
            yield {"id": groups[answer.piece][0]["id"], "died": answer.exit_code}
        else:
            alone += ([each] for each in groups[answer.piece])
    if alone:
        yield from _forked(request, alone, device, num_processes)


def _prepare(request: dict[str, Any], spec: TraceSpec) -> None:
    """Import the model's code and look at its layers: once for all processes that trace it."""
    with without_values():
        config = models.with_every_layer(models.load_config(request["config"]))
        few_layers.kinds_of_whole(config, request["task"], spec)


def _answers(request: dict[str, Any], group: Group, device: Device) -> Iterator[dict[str, Any]]:
    """The answers for a group, whose model is built anew only after a step that failed."""
    shared: SharedModels = {}
    for number, each in enumerate(group, 1):
        answer = answer_with(request, each, device, shared)
        if number == len(group):
            shared.clear()
            gc.collect()
        else:  # The model and what it imported are looked through once, as it is given up.
            gc.collect(0)
        yield answer


def answer_with(
    request: dict[str, Any], wanted: dict[str, Any], device: Device, shared: SharedModels
) -> dict[str, Any]:
    """The answer for one trace of a group; after a step that failed no model is left of it."""
    answer = _answer(request, wanted, device, shared)
    if "trace" not in answer:
        shared.clear()
    return answer


def _answer(
    request: dict[str, Any], wanted: dict[str, Any], device: Device, shared: SharedModels
) -> dict[str, Any]:
    """The answer for one trace."""
    try:
        trace = _compiled_or_eager(request, wanted, device, shared)
    except CrashedStep as error:
        return _crashed(wanted["id"], str(error))
    except UnsupportedModel as error:
        if isinstance(error.__cause__, _OF_THE_MACHINE):
            return _crashed(wanted["id"], str(error))
        return {"id": wanted["id"], "unsupported": str(error)}
    except _OF_THE_MACHINE:
        raise
    except Exception as error:  # of a family that nobody has tried: the others go on
        return _crashed(wanted["id"], f"tracing it failed ({models.reason_of(error)})")
    return {"id": wanted["id"], "trace": trace}


def _compiled_or_eager(
    request: dict[str, Any], wanted: dict[str, Any], device: Device, shared: SharedModels
) -> dict[str, Any]:
    """Trace the step that is wanted; where it cannot be traced compiled, as it runs without, and say why."""
    said = request.get("pictures")
    sees = None if said is None else json_records.read(Media, said, "pictures")
    taught_by = request.get("teacher")

    def trace(spec: TraceSpec, shared: SharedModels) -> dict[str, Any]:
        trace_this = functools.partial(
            trace_step,
            models.with_every_layer(models.load_config(request["config"])),
            request["task"],
            spec,
            sequence_length=request["sequence_length"],
            device=device,
            operations=wanted.get("operations", False),
            shared=shared,
            sees=sees,
            teacher=None
            if taught_by is None
            else models.with_every_layer(models.load_config(taught_by)),
        )
        try:
            return trace_this(whole=wanted["whole"])
        except NoStandIn:
            return trace_this(whole=True)

    spec = TraceSpec(**wanted["spec"])
    try:
        return trace(spec, shared)
    except UnsupportedModel as error:
        if not spec.is_compiled or isinstance(error.__cause__, _OF_THE_MACHINE):
            raise
        reason = str(error)
    eager = trace(dataclasses.replace(spec, is_compiled=False), {})
    return {**eager, "not_compiled": reason}


def _crashed(number: int, reason: str) -> dict[str, Any]:
    """The answer for a spec whose tracing ended in the exception that is being handled."""
    return {"id": number, "crashed": reason, "traceback": traceback.format_exc()}
