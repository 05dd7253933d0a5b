"""Traces one optimizer step's forward and backward on `meta`, as `transformers.Trainer` runs them.

A padded micro-batch is one of the longest samples: as many tokens as places, with a mask all the same. A
sample by itself has no padding, and so no mask.

The result is small whatever the size of the model: three periods of layers are traced, the events are
cut into blocks at the layers' borders, and the middle period is the one that repeats. A micro-batch of
one takes other code paths (squeezed dimensions), so it is traced by itself.

The batch and the loss outlive the micro-step: how long, autotune.predict.steps says. Not modelled:
evaluation, logging, checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy
from transformers import PretrainedConfig

from autotune.catalogue.tasks import PICTURES
from autotune.common import json_records
from autotune.memory.traces import Stacks, unlike_layers
from autotune.records.estimate import TraceSpec
from autotune.space.adapters import ADAPTERS
from autotune.space.checkpoint_plans import plan_offloads
from autotune.space.media import Media
from autotune.space.precisions import PRECISIONS
from autotune.space.trainers import TRAINERS, row_of
from autotune.worker.build import (
    alike_layers,
    checkpoint_plan,
    context_parallel,
    fp8,
    layers,
    quantize,
    tensor_parallel,
    towers,
)
from autotune.worker.build import model as models
from autotune.worker.build.adapters import RANK, true_masks
from autotune.worker.build.alike_layers import NoStandIn
from autotune.worker.build.layers import text_part
from autotune.worker.build.model import CrashedStep, UnsupportedModel
from autotune.worker.trace import (
    attention,
    embedding_step,
    flex,
    forks,
    generation,
    liger,
    masked_spans,
    pictures,
    sft,
    shared_models,
    teachers,
    trl_steps,
)
from autotune.worker.trace.chunks import Chunks
from autotune.worker.trace.cuda import META, Device, Workspaces, device_choices
from autotune.worker.trace.encode import Symbols, encode, weights_of
from autotune.worker.trace.kernel_buffers import Multiprocessors, hidden_buffers
from autotune.worker.trace.kernels import HiddenBuffers, TrackedKernel
from autotune.worker.trace.meta_step import MetaStep
from autotune.worker.trace.meta_values import labelled_rows
from autotune.worker.trace.naming import NamingTracker, with_weights
from autotune.worker.trace.shared_models import Group, SharedModel, SharedModels
from autotune.worker.trace.stand_ins import replaced, without_values
from autotune.worker.trace.tracker import Tracker

_OF_LABELS = {torch.ops.aten.nonzero.default: labelled_rows}

MICRO_BATCH = 1_000_003
"""Micro-batch of a trace that stands for 2 and more: a prime that divides no model dimension."""


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
        _kinds_of_whole(config, request["task"], spec)


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


def trace_step(
    config: PretrainedConfig,
    task: str,
    spec: TraceSpec,
    *,
    sequence_length: int,
    device: Device,
    whole: bool = False,
    operations: bool = False,
    shared: SharedModels | None = None,
    sees: Media | None = None,
    teacher: PretrainedConfig | None = None,
) -> dict[str, Any]:
    """Trace one micro-step.

    `whole`: every layer, nothing extrapolated. `operations`: with what made each tensor. `shared`: between
    traces of one group of autotune.worker.trace.shared_models, the first of which sets the model up;
    not for models of which a step changes more than gradients (autotune.worker.trace.shared_models).

    Raises UnsupportedModel where the model cannot be built or run on `meta`: CrashedStep where that
    may be a mistake.
    """
    whole = whole or (spec.method in ADAPTERS and not ADAPTERS[spec.method].repeats)
    num_processes = max(spec.num_splits, spec.sequence_parts)
    is_split = num_processes > 1
    tensor_parallel.begin(num_processes, num_processes - 1 if spec.has_last_part else 0)
    base = _base({} if shared is None else shared, config, task, spec, whole=whole)
    taught_by, of_teacher = (
        (None, {})
        if teacher is None
        else teachers.build(teacher, task, spec, teachers.vocabulary_of(config), whole=whole)
    )
    if spec.has_plan:
        count = base.layers["layers"].get("cut", spec.checkpoint_layers)
        if not count:
            raise UnsupportedModel(
                "its layers are too few, or too unlike, for a plan of any number of them"
            )
        spec = dataclasses.replace(spec, checkpoint_layers=count)
    micro_batch = 1 if spec.single else MICRO_BATCH
    workspaces = Workspaces(device.cublas_workspace_bytes)
    hidden_buffers_here = (
        _buffers_of(spec.attention, device.multiprocessors, hidden_buffers)
        if device.backend == "cuda"
        else None  # A CPU's kernels make theirs out of sight.
    )
    make_tracker = functools.partial(
        NamingTracker if operations else Tracker,
        "meta",
        hidden_buffers=hidden_buffers_here,
        at_launch=workspaces.at_launch,
        decompositions={
            **({} if spec.quantization == "none" else quantize.decompositions()),
            **(_OF_LABELS if row_of(task).reads_to_end else {}),
            **attention.decompositions(spec, sequence_length),
            **(tensor_parallel.stand_ins() if is_split else {}),
            **(
                context_parallel.stand_ins(is_last=spec.has_last_part)
                if spec.sequence_parts > 1
                else {}
            ),
        },
        kernel_names={
            **(attention.KERNEL_NAMES.get(spec.attention) or {}),
            **(tensor_parallel.KERNEL_NAMES | context_parallel.KERNEL_NAMES if is_split else {}),
        },
        wrappers=(
            *(fp8.wrappers() if PRECISIONS[spec.precision].fp8 else ()),
            *(tensor_parallel.wrappers() if is_split else ()),
        ),
    )
    tracker = make_tracker()
    tracker.decompositions |= trl_steps.decompositions(spec, micro_batch, tracker.decompositions)
    # Trainers with a task of their own have several rows of a sample, or pad its prompt.
    is_alone = spec.single and not TRAINERS[spec.trainer].task
    reads_tokens = row_of(task).reads == "tokens"
    tracker.has_padding = spec.batching == "padded" and not is_alone and reads_tokens
    chunks = Chunks(tracker, not spec.single, workspaces)
    takes_block = spec.quantization != "none" and device.backend == "cuda"
    copies = Stacks.of_answer(base.layers).copies if takes_block else None
    step = MetaStep(
        base.model, task, spec, tracker, rank=RANK, copies=copies, sees=sees, teacher=taught_by
    )
    with contextlib.ExitStack() as stack:
        stack.callback(step.restore_parts)
        stack.enter_context(_trace_settings(tracker))
        stack.enter_context(
            _techniques(spec, base.model, tracker, workspaces, device, chunks, sequence_length)
        )
        if sees is not None and sees.is_in_text:
            stack.enter_context(pictures.on_meta(step.model, tracker, micro_batch, sees))
        if row_of(task).reads in ("sound", "waves"):
            stack.enter_context(masked_spans.on_meta(step.model, tracker))
        try:
            if base.ready is None:
                with without_values():
                    step.set_up()
                base.ready = step.ready()
            else:
                step.go_on_from(base.ready)
                step.replace_parts()
            base.has_checkpointed |= spec.activation_checkpointing > 0
            with device_choices(device):
                step.settle(micro_batch, sequence_length)
            if spec.is_compiled:
                # The compiler takes 2 s to import, which other traces do without.
                from autotune.worker.trace import compiled_step

                compiled_step.trace_compiled(
                    step,
                    tracker,
                    workspaces,
                    device,
                    hidden_buffers_here,
                    micro_batch=micro_batch,
                    sequence_length=sequence_length,
                )
            else:
                if is_split:
                    # DTensors work out the layout of each operation's result once, by running it on
                    # tensors of their own, which are none of the step's.
                    unseen = make_tracker(at_launch=None)
                    learning = MetaStep(step.model, task, spec, unseen, rank=RANK)
                    learning.go_on_from(step.ready())
                    with device_choices(device), unseen:
                        learning.forward_backward(micro_batch, sequence_length)
                    for parameter in step.parameters.values():
                        parameter.grad = None
                with device_choices(device), tracker:
                    step.forward_backward(micro_batch, sequence_length)
                    if spec.max_completion_length is not None:
                        generation.generate(step, MICRO_BATCH, sequence_length)
        except (
            AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError
        ) as error:  # fmt: skip
            kind = UnsupportedModel if models.is_refused(error) else CrashedStep
            raise kind(models.refusal_of(error)) from error
    if not step.gradients:
        raise UnsupportedModel("nothing that trains gets a gradient")
    has_all = whole or spec.is_compiled or Stacks.of_answer(base.layers).are_whole
    if not has_all and not step.calls_every_layer:
        raise NoStandIn("its layers are run out of sight")
    # What is generated at a time is of many rows, even where it is trained on one by one.
    rows = micro_batch if spec.max_completion_length is None else MICRO_BATCH
    symbols = Symbols(spec, micro_batch=rows, rank=RANK, sequence_length=sequence_length)
    made_by = {}
    if isinstance(tracker, NamingTracker):
        made_by = with_weights(tracker.operations, step.model, step.parameters)
    said = {**base.layers, **of_teacher}
    if base.weights is None:
        base.weights = weights_of(step, symbols)
    answer = encode(step, base.weights, workspaces, chunks, symbols, said, made_by)
    return {**answer, "compiled": True} if spec.is_compiled else answer


def _base(
    shared: SharedModels, config: PretrainedConfig, task: str, spec: TraceSpec, *, whole: bool
) -> SharedModel:
    """The model that others have left, or a new one."""

    def left(step: int) -> SharedModel | None:
        found = shared.get(step)
        is_fit = found is not None and (spec.activation_checkpointing or not found.has_checkpointed)
        return found if is_fit else None

    step = 0 if whole else max(spec.activation_checkpointing, 1)
    found = left(step)
    if found is None:
        with attention.without_library(spec.attention), without_values():
            model, said = (_whole if whole else _few)(config, task, spec)
        has_all = Stacks.of_answer(said).are_whole
        found = (left(0) if has_all else None) or SharedModel(model=model, layers=said)
        shared[step] = found
        if has_all:
            shared[0] = found
    return found


@functools.cache
def _buffers_of(
    name: str, multiprocessors: Multiprocessors, of_torch: Callable[..., Any]
) -> HiddenBuffers:
    """One function for all traces with this attention: they share what it finds."""
    return attention.buffers_of(name, functools.partial(of_torch, multiprocessors))


def _whole(
    config: PretrainedConfig, task: str, spec: TraceSpec
) -> tuple[nn.Module, dict[str, dict[str, Any]]]:
    num = layers.num_layers(config)
    every = [*range(num)]
    plan = _plan_of(config, task, spec)
    of_text = (
        {"own": every, "sources": every, **plan}
        if plan
        else {"traced": num, "full": num, "first": 0, "period": 1}
    )
    said: dict[str, Any] = {"layers": of_text}
    model = models.build_base(config, task, spec)
    tower = layers.tower_layers(model) if task == PICTURES else None
    if tower is not None:
        every = [*range(len(tower))]
        said["tower"] = {"own": every, "sources": every}
    return model, said


def _plan_of(config: PretrainedConfig, task: str, spec: TraceSpec) -> dict[str, Any]:
    """Return where a trace for plans of any number of lean layers treats unlike layers otherwise."""
    if not spec.has_plan or spec.checkpoint_layers or _num_periods(config, spec) > 3:
        return {}
    kinds = layers.letters_of(_kinds_of_whole(config, task, spec)[0])
    cut = unlike_layers.place_to_cut(kinds)
    return {} if cut is None else {"cut": cut, "kinds": kinds}


def _few(
    config: PretrainedConfig, task: str, spec: TraceSpec
) -> tuple[nn.Module, dict[str, dict[str, Any]]]:
    """Build a model with just the layers that stand for all; the whole one where there are none such."""
    kinds, of_tower = _kinds_of_whole(config, task, spec)
    num_periods = _num_periods(config, spec)
    pattern = layers.find_pattern(
        kinds, step=max(spec.activation_checkpointing, 1), num_periods=num_periods
    )
    num = len(kinds) if pattern is None else pattern.num_traced(len(kinds), num_periods)
    if pattern is not None and num == layers.num_decoder_layers(config) != len(kinds):
        # Of as many layers it would be taken for the encoder's other half.
        num = min(num + pattern.period, len(kinds))
    cut: dict[str, int] = {}
    if spec.has_plan and pattern is not None:
        cut["cut"] = pattern.first + num_periods * pattern.period
        num = min(num + num_periods * pattern.period, len(kinds))
    # A pattern tells of more numbers of lean layers, so it is taken however many that are.
    is_free = not spec.has_plan or num == len(kinds)
    if is_free and (found := _fewest(config, task, spec, fewer_than=num)) is not None:
        return found
    if pattern is None or num == len(kinds):
        return _whole(config, task, spec)
    small, kept = _with_few_that_see(layers.with_layers(config, num), of_tower)
    try:
        model = models.build_base(small, task, spec)
    except UnsupportedModel:  # Something in the configuration counts the layers.
        return _fewest(config, task, spec) or _whole(config, task, spec)
    if _kinds_of(model, small, task) != (kinds[:num], [of_tower[number] for number in kept]):
        # What is special about the last layers comes too early.
        return _fewest(config, task, spec) or _whole(config, task, spec)
    of_text = {"traced": num, "full": len(kinds), **dataclasses.asdict(pattern), **cut}
    return model, _said(of_text, of_tower, kept)


def _fewest(
    config: PretrainedConfig, task: str, spec: TraceSpec, *, fewer_than: int | None = None
) -> tuple[nn.Module, dict[str, dict[str, Any]]] | None:
    """Leave out of the whole model the layers that are as others are, in whatever order these come.

    None where that is not so few. Nor where every second is checkpointed beside a tower, whose layers count,
    too; nor where a kernel or a gradient is of two layers (_num_periods), or a weight of many.
    """
    kinds, of_tower = _kinds_of_whole(config, task, spec)
    plan = _plan_of(config, task, spec)
    every = max(spec.activation_checkpointing, 1)
    if (spec.has_plan and not plan) or (every > 1 and of_tower) or _num_periods(config, spec) > 3:
        return None
    copies = alike_layers.copies_of(kinds, every, plan.get("cut"))
    if len(copies["own"]) >= (len(kinds) if fewer_than is None else fewer_than):
        return None
    small, kept = _with_few_that_see(config, of_tower)
    model = models.build_base(small, task, spec)
    (stack,) = layers.layer_stacks(model)
    if alike_layers.share_weights(stack):
        return None
    alike_layers.leave_out(stack, copies["own"])
    return model, _said({**copies, **plan}, of_tower, kept)


def _with_few_that_see(
    config: PretrainedConfig, of_tower: list[layers.Kind]
) -> tuple[PretrainedConfig, list[int]]:
    """Return the configuration with the tower's layers that stand for all, and their numbers."""
    kept = towers.fewest(of_tower)
    return towers.with_tower_layers(config, kept) if kept else config, kept


def _said(
    of_text: dict[str, Any], of_tower: list[layers.Kind], kept: list[int]
) -> dict[str, dict[str, Any]]:
    """Return what autotune.memory.traces.Stacks reads."""
    return {
        "layers": of_text,
        **({"tower": towers.copies_of(of_tower, kept)} if kept else {}),
    }


_Kinds = tuple[list[layers.Kind], list[layers.Kind]]
"""Kinds of layers: of the text, and of a tower that sees."""
_KINDS: dict[tuple[str, str, str], _Kinds] = {}
"""Kinds of each configuration's layers: a process traces one model in many ways."""


def _kinds_of_whole(config: PretrainedConfig, task: str, spec: TraceSpec) -> _Kinds:
    key = config.to_json_string(use_diff=False), task, spec.attention
    if key not in _KINDS:
        _KINDS[key] = _kinds_of(models.build_base(config, task, spec), config, task)
    return _KINDS[key]


def _kinds_of(model: nn.Module, config: PretrainedConfig, task: str) -> _Kinds:
    sees = task == PICTURES
    of_tower = towers.kinds_of_tower(model, config) if sees else []
    return layers.kinds_of(model, config, sees=sees), of_tower


def _num_periods(config: PretrainedConfig, spec: TraceSpec) -> int:
    """Number of periods of layers that are traced: a first, a repeating and a last one.

    One more where the copies of the second take what they refer to from the third, which must not
    be the last: where the first layers make what the others share (T5's position bias), and where a
    layer's gradient arrives when the one below has begun (that of Liger's first norm), or a kernel
    is of two layers (compiled), or a layer fetches from the host what the one below has made.
    """
    fetches = plan_offloads(spec.checkpoint_plan)
    return 4 if config.is_encoder_decoder or spec.liger or spec.is_compiled or fetches else 3


@contextlib.contextmanager
def _techniques(
    spec: TraceSpec,
    model: nn.Module,
    tracker: Tracker,
    workspaces: Workspaces,
    device: Device,
    chunks: Chunks,
    sequence_length: int,
) -> Iterator[None]:
    """Install what libraries beside Transformers need in order to be traced."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(attention.without_library(spec.attention))
        stack.enter_context(true_masks(spec))
        if spec.attention == flex.FLEX:
            keeps_input = spec.activation_checkpointing and spec.method != "full"
            per_input = _bytes_per_input(model) if keeps_input else 0
            stack.enter_context(flex.on_meta(tracker, workspaces, per_input))
        if spec.liger:
            stack.enter_context(liger.on_meta(tracker, device, chunks))
        if TRAINERS[spec.trainer].is_trl:
            counted = sequence_length - 1, trl_steps.num_scored(spec, sequence_length)
            stack.enter_context(sft.on_meta(tracker, chunks, counted, device.backend))
        if spec.loss_mini_batches > 1:
            embedding_step.know_last_places(tracker)
            stack.enter_context(replaced([(torch.Tensor, "backward", embedding_step.backward)]))
        if spec.has_plan:
            keep, host = checkpoint_plan.keep_products, checkpoint_plan.HostMemory
            here = [
                (checkpoint_plan, "keep_products", functools.partial(_keep_of_any_rank, keep)),
                (host, "copy_out", functools.partialmethod(_copied_out, tracker)),
                (host, "copy_back", functools.partialmethod(_copied_back, tracker)),
            ]
            stack.enter_context(replaced(here))
        yield


def _bytes_per_input(model: Any) -> int:
    """Return the bytes of a token as a layer gets it."""
    size: int = text_part(model.config).hidden_size
    return size * next(model.parameters()).element_size()


def _keep_of_any_rank(keep: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Ask the rule of what checkpointed layers keep, but of an adapter's products as for any usual rank.

    RANK, which stands for all of them, is larger than the model's own dimensions.
    """
    tensors = (each for each in args if isinstance(each, torch.Tensor))
    if any(RANK in tensor.shape[-2:] for tensor in tensors):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return keep(*args, **kwargs)


@contextlib.contextmanager
def _trace_settings(tracker: Tracker) -> Iterator[None]:
    """Let offloading park tensors without a host copy, and nothing be collected at a random moment."""
    import transformers.modeling_utils as modeling_utils

    parks = functools.partial(_ParkOnHost, tracker)
    collects = gc.isenabled()
    gc.disable()
    with warnings.catch_warnings(), replaced([(modeling_utils, "save_on_cpu", parks)]):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            if collects:
                gc.enable()


def _note_copy(tracker: Tracker, name: str, tensor: torch.Tensor) -> None:
    """Record a copy of a tensor to or from host memory."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    kernel = TrackedKernel(name, dtype, 0, (tensor.nbytes,), (), False)
    tracker.recording.kernels.append(kernel)


def _copied_out(_: Any, tracker: Tracker, tensor: torch.Tensor) -> object:
    """Stand in for HostMemory.copy_out."""
    _note_copy(tracker, "copy_aside", tensor)
    return object()


def _copied_back(
    _: Any, tracker: Tracker, __: Any, shape: Any, stride: Any, dtype: Any, device: Any
) -> torch.Tensor:
    """Stand in for HostMemory.copy_back."""
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    _note_copy(tracker, "copy_aside", tensor)
    return tensor


class _ParkOnHost(torch.autograd.graph.saved_tensors_hooks):
    """A stand-in for torch.autograd.graph.save_on_cpu, for tensors without values."""

    def __init__(
        self, tracker: Tracker, pin_memory: bool = False, device_type: str = "cuda"
    ) -> None:
        def pack(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
            _note_copy(tracker, "copy_host", tensor)
            return tensor.shape, tensor.dtype

        def unpack(parked: tuple[torch.Size, torch.dtype]) -> torch.Tensor:
            tensor = torch.empty(parked[0], dtype=parked[1], device=META)
            _note_copy(tracker, "copy_host", tensor)
            return tensor

        super().__init__(pack, unpack)
