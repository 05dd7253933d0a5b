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
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy
from transformers import PretrainedConfig

from autotune.memory.traces import Stacks
from autotune.records.estimate import TraceSpec
from autotune.space.adapters import ADAPTERS
from autotune.space.media import Media
from autotune.space.precisions import PRECISIONS
from autotune.space.trainers import TRAINERS, row_of
from autotune.worker.build import (
    checkpoint_plan,
    context_parallel,
    fp8,
    quantize,
    tensor_parallel,
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
    generation,
    liger,
    masked_spans,
    pictures,
    sft,
    teachers,
    trl_steps,
)
from autotune.worker.trace.chunks import Chunks
from autotune.worker.trace.cuda import META, Device, Workspaces, device_choices
from autotune.worker.trace.encode import Symbols, encode, weights_of
from autotune.worker.trace.few_layers import base_of
from autotune.worker.trace.kernel_buffers import Multiprocessors, hidden_buffers
from autotune.worker.trace.kernels import HiddenBuffers, TrackedKernel
from autotune.worker.trace.meta_step import MetaStep
from autotune.worker.trace.meta_values import labelled_rows
from autotune.worker.trace.naming import NamingTracker, with_weights
from autotune.worker.trace.shared_models import SharedModel, SharedModels
from autotune.worker.trace.stand_ins import replaced, without_values
from autotune.worker.trace.tracker import Tracker

_OF_LABELS = {torch.ops.aten.nonzero.default: labelled_rows}

MICRO_BATCH = 1_000_003
"""Micro-batch of a trace that stands for 2 and more: a prime that divides no model dimension."""


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
    tensor_parallel.begin(num_processes, num_processes - 1 if spec.has_last_part else 0)
    base = base_of({} if shared is None else shared, config, task, spec, whole=whole)
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
    traced = _TracedStep(
        base,
        task,
        spec,
        sequence_length=sequence_length,
        device=device,
        operations=operations,
        sees=sees,
        taught_by=taught_by,
    )
    traced.run()
    traced.check(whole=whole)
    return traced.answer(of_teacher)


class _TracedStep:
    """A step that is traced: the model on its way through it, its sizes, and what records it."""

    def __init__(
        self,
        base: SharedModel,
        task: str,
        spec: TraceSpec,
        *,
        sequence_length: int,
        device: Device,
        operations: bool,
        sees: Media | None,
        taught_by: nn.Module | None,
    ) -> None:
        self._base, self._task, self._spec, self._sees = base, task, spec, sees
        self._sequence_length, self._device = sequence_length, device
        self._micro_batch = 1 if spec.single else MICRO_BATCH
        self._workspaces = Workspaces(device.cublas_workspace_bytes)
        self._hidden_buffers = (
            _buffers_of(spec.attention, device.multiprocessors, hidden_buffers)
            if device.backend == "cuda"
            else None  # A CPU's kernels make theirs out of sight.
        )
        self._make_tracker = functools.partial(
            NamingTracker if operations else Tracker,
            "meta",
            hidden_buffers=self._hidden_buffers,
            at_launch=self._workspaces.at_launch,
            **_told_to_trackers(task, spec, sequence_length),
        )
        self._tracker = tracker = self._make_tracker()
        tracker.decompositions |= trl_steps.decompositions(
            spec, self._micro_batch, tracker.decompositions
        )
        # Trainers with a task of their own have several rows of a sample, or pad its prompt.
        is_alone = spec.single and not TRAINERS[spec.trainer].task
        reads_tokens = row_of(task).reads == "tokens"
        tracker.has_padding = spec.batching == "padded" and not is_alone and reads_tokens
        self._chunks = Chunks(tracker, not spec.single, self._workspaces)
        takes_block = spec.quantization != "none" and device.backend == "cuda"
        copies = Stacks.of_answer(base.layers).copies if takes_block else None
        self._step = MetaStep(
            base.model, task, spec, tracker, rank=RANK, copies=copies, sees=sees, teacher=taught_by
        )

    def run(self) -> None:
        """Run the step, and record it. Raises UnsupportedModel, as trace_step says."""
        with self._stand_ins():
            try:
                self._set_up()
                if self._spec.is_compiled:
                    self._run_compiled()
                else:
                    self._run_eager()
            except (
                AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError
            ) as error:  # fmt: skip
                kind = UnsupportedModel if models.is_refused(error) else CrashedStep
                raise kind(models.refusal_of(error)) from error

    @contextlib.contextmanager
    def _stand_ins(self) -> Iterator[None]:
        """Install what a step needs in order to be traced, and take it out again."""
        spec, step, tracker = self._spec, self._step, self._tracker
        with contextlib.ExitStack() as stack:
            stack.callback(step.restore_parts)
            stack.enter_context(_trace_settings(tracker))
            stack.enter_context(attention.without_library(spec.attention))
            stack.enter_context(true_masks(spec))
            if spec.attention == flex.FLEX:
                keeps_input = spec.activation_checkpointing and spec.method != "full"
                per_input = _bytes_per_input(self._base.model) if keeps_input else 0
                stack.enter_context(flex.on_meta(tracker, self._workspaces, per_input))
            if spec.liger:
                stack.enter_context(liger.on_meta(tracker, self._device, self._chunks))
            if TRAINERS[spec.trainer].is_trl:
                length = self._sequence_length
                counted = length - 1, trl_steps.num_scored(spec, length)
                backend = self._device.backend
                stack.enter_context(sft.on_meta(tracker, self._chunks, counted, backend))
            if spec.loss_mini_batches > 1:
                embedding_step.know_last_places(tracker)
                stack.enter_context(replaced([(torch.Tensor, "backward", embedding_step.backward)]))
            if spec.has_plan:
                stack.enter_context(replaced(_stand_ins_of_plans(tracker)))
            if self._sees is not None and self._sees.is_in_text:
                seen = pictures.on_meta(step.model, tracker, self._micro_batch, self._sees)
                stack.enter_context(seen)
            if row_of(self._task).reads in ("sound", "waves"):
                stack.enter_context(masked_spans.on_meta(step.model, tracker))
            yield

    def _set_up(self) -> None:
        """Set the model up, or go on from where another trace has."""
        base, step = self._base, self._step
        if base.ready is None:
            with without_values():
                step.set_up()
            base.ready = step.ready()
        else:
            step.go_on_from(base.ready)
            step.replace_parts()
        base.has_checkpointed |= self._spec.activation_checkpointing > 0
        with device_choices(self._device):
            step.settle(self._micro_batch, self._sequence_length)

    def _run_compiled(self) -> None:
        # The compiler takes 2 s to import, which other traces do without.
        from autotune.worker.trace import compiled_step

        compiled_step.trace_compiled(
            self._step,
            self._tracker,
            self._workspaces,
            self._device,
            self._hidden_buffers,
            micro_batch=self._micro_batch,
            sequence_length=self._sequence_length,
        )

    def _run_eager(self) -> None:
        spec, step, sizes = self._spec, self._step, (self._micro_batch, self._sequence_length)
        if _is_split(spec):
            # DTensors work out the layout of each operation's result once, by running it on
            # tensors of their own, which are none of the step's.
            unseen = self._make_tracker(at_launch=None)
            learning = MetaStep(step.model, self._task, spec, unseen, rank=RANK)
            learning.go_on_from(step.ready())
            with device_choices(self._device), unseen:
                learning.forward_backward(*sizes)
            for parameter in step.parameters.values():
                parameter.grad = None
        with device_choices(self._device), self._tracker:
            step.forward_backward(*sizes)
            if spec.max_completion_length is not None:
                generation.generate(step, MICRO_BATCH, self._sequence_length)

    def check(self, *, whole: bool) -> None:
        """Raise UnsupportedModel where nothing trains, NoStandIn where layers are run out of sight."""
        if not self._step.gradients:
            raise UnsupportedModel("nothing that trains gets a gradient")
        has_all = whole or self._spec.is_compiled or Stacks.of_answer(self._base.layers).are_whole
        if not has_all and not self._step.calls_every_layer:
            raise NoStandIn("its layers are run out of sight")

    def answer(self, of_teacher: dict[str, Any]) -> dict[str, Any]:
        """Return the trace as autotune.memory.traces.Trace reads it, with the teacher's layers."""
        base, spec, step, tracker = self._base, self._spec, self._step, self._tracker
        # What is generated at a time is of many rows, even where it is trained on one by one.
        rows = self._micro_batch if spec.max_completion_length is None else MICRO_BATCH
        length = self._sequence_length
        symbols = Symbols(spec, micro_batch=rows, rank=RANK, sequence_length=length)
        made_by = {}
        if isinstance(tracker, NamingTracker):
            made_by = with_weights(tracker.operations, step.model, step.parameters)
        if base.weights is None:
            base.weights = weights_of(step, symbols)
        said = {**base.layers, **of_teacher}
        answer = encode(step, base.weights, self._workspaces, self._chunks, symbols, said, made_by)
        return {**answer, "compiled": True} if spec.is_compiled else answer


def _is_split(spec: TraceSpec) -> bool:
    return max(spec.num_splits, spec.sequence_parts) > 1


def _told_to_trackers(task: str, spec: TraceSpec, sequence_length: int) -> dict[str, Any]:
    """Return what trackers are told of the operations that the spec's libraries bring along."""
    is_split = _is_split(spec)
    return {
        "decompositions": {
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
        "kernel_names": {
            **(attention.KERNEL_NAMES.get(spec.attention) or {}),
            **(tensor_parallel.KERNEL_NAMES | context_parallel.KERNEL_NAMES if is_split else {}),
        },
        "wrappers": (
            *(fp8.wrappers() if PRECISIONS[spec.precision].fp8 else ()),
            *(tensor_parallel.wrappers() if is_split else ()),
        ),
    }


@functools.cache
def _buffers_of(
    name: str, multiprocessors: Multiprocessors, of_torch: Callable[..., Any]
) -> HiddenBuffers:
    """One function for all traces with this attention: they share what it finds."""
    return attention.buffers_of(name, functools.partial(of_torch, multiprocessors))


def _bytes_per_input(model: Any) -> int:
    """Return the bytes of a token as a layer gets it."""
    size: int = text_part(model.config).hidden_size
    return size * next(model.parameters()).element_size()


def _stand_ins_of_plans(tracker: Tracker) -> list[tuple[Any, str, Any]]:
    """Return what takes the place of a checkpoint plan's parts that look at values."""
    keep, host = checkpoint_plan.keep_products, checkpoint_plan.HostMemory
    return [
        (checkpoint_plan, "keep_products", functools.partial(_keep_of_any_rank, keep)),
        (host, "copy_out", functools.partialmethod(_copied_out, tracker)),
        (host, "copy_back", functools.partialmethod(_copied_back, tracker)),
    ]


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
