"""A compiled step as a trace: what its kernels allocate, free and move, in blocks by layer.

The graphs come from autotune.worker.trace.joint_graph, the kernels from autotune.worker.trace.fusion. A
kernel belongs to the layer of its last result. Inductor's code frees a tensor after its last use, or writes a
result over it (torch 2.13 torch/_inductor/codegen/wrapper.py). The backward pass is one call: gradients are
handed over when it has ended, and each result of the model but the loss gets a gradient of zeros. What the
caller has or gave is not written over, nor is what was scattered.

Not modelled: that Inductor holds what goes for a later result of its size (AllocateLine): the allocator finds
the same memory, mostly.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autotune.memory.traces.phases import OUTSIDE, Phase, Place
from autotune.worker.build import model as models
from autotune.worker.trace.cuda import Device, Workspaces, device_choices
from autotune.worker.trace.fusion import FusedKernel, kernels_of
from autotune.worker.trace.joint_graph import (
    LossOfMeta,
    StepGraphs,
    graphs_of,
    require_one_graph,
)
from autotune.worker.trace.kernel_costs import count_flops, dtype_of, shape_of
from autotune.worker.trace.kernels import parted
from autotune.worker.trace.lowering import base_of, bytes_of, outputs_of, value_of
from autotune.worker.trace.meta_step import MetaStep, num_items
from autotune.worker.trace.meta_values import tensors_in
from autotune.worker.trace.tracker import (
    Buffer,
    HiddenBuffers,
    TrackedKernel,
    TrackedTensor,
    Tracker,
)

POINTWISE, ROWS, SCATTER = "fused_pointwise", "fused_reduction", "fused_scatter"
"""Names of Inductor's kernels: without a reduction, with one, and one that writes to scattered places."""
LONG_ROW = 32_768
"""Elements of a row that a reduction reads twice: they do not stay in an SM until it is read again.
[judgement] Half of an L1 cache of 128 KiB and more, in 16 bits."""

_PASSES = {
    False: (Phase.EMBED, Phase.FORWARD, Phase.HEAD),
    True: (Phase.HEAD_BACKWARD, Phase.BACKWARD, Phase.EMBED_BACKWARD),
}
"""Phases before the layers, in them and after them, by whether the pass is the backward one."""


def trace_compiled(
    step: MetaStep,
    tracker: Tracker,
    workspaces: Workspaces,
    device: Device,
    hidden_buffers: HiddenBuffers | None,
    *,
    micro_batch: int,
    sequence_length: int,
) -> None:
    """Record the forward and backward pass of a compiled step."""
    model: Any = step.model
    step.mark(Phase.BATCH)
    with tracker:
        batch = step.batch(micro_batch, sequence_length)
        if models.accepts_loss_kwargs(model):
            step.mark(Phase.COUNT)
            batch["num_items_in_batch"] = num_items(model, batch["labels"])
    step.keep(*batch.values())
    if model.config.is_encoder_decoder:
        raise models.UnsupportedModel("an encoder with a decoder is not predicted compiled")
    require_one_graph(model, batch)

    def run(**batch: Any) -> tuple[torch.Tensor, ...]:
        outputs = model(**batch)
        values = (outputs.loss, *(value for name, value in outputs.items() if name != "loss"))
        return tuple(value for value in values if isinstance(value, torch.Tensor))

    with LossOfMeta(), device_choices(device):
        every = step.spec.activation_checkpointing
        graphs = graphs_of(model, run, batch, checkpoint_every=every)
    # The trace of many samples stands for two and more.
    share = 1.0 if step.spec.single else 2 / micro_batch
    _Emitter(step, tracker, workspaces, hidden_buffers, graphs, device, share).emit()


_Tensor = int | fx.Node
"""A tensor that was there before a pass, by its number; or a result of the pass, by its base."""


@dataclass(slots=True)
class _Launch:
    """A kernel's results, whose memory they take, and what goes behind it."""

    made: list[fx.Node]
    taken: dict[fx.Node, _Tensor]
    """Tensors whose memory results take; what is missing has memory of its own."""
    freed: set[_Tensor]


class _Emitter:
    """Writes both passes into a tracker's recording."""

    def __init__(
        self,
        step: MetaStep,
        tracker: Tracker,
        workspaces: Workspaces,
        hidden_buffers: HiddenBuffers | None,
        graphs: StepGraphs,
        device: Device,
        rows_share: float,
    ) -> None:
        self._backend, self._l2_bytes = device.backend, device.l2_bytes
        self._place_now = OUTSIDE
        self._first_of_stack: dict[int, Place] = {}
        """First layer of each stack in the pass."""
        self._place_of: dict[int, Place] = {}
        """Layer in which each tensor was made."""
        self._timed: set[object] = set()
        """Kernels that were launched."""
        self._rows_share = rows_share
        self._step = step
        self._tracker = tracker
        self._recording = tracker.recording
        self._workspaces = workspaces
        self._hidden_buffers = hidden_buffers
        self._graphs = graphs
        self._number: dict[fx.Node, int] = {}
        """Number of the tensor of each base, of either graph."""
        self._never_overwritten: set[int] = set()
        """Tensors that were given to the backward pass, and are not saved for it alone (donated)."""
        self._of_forward = {node.name: node for node in graphs.forward.nodes}

    def emit(self) -> None:
        graphs, recording = self._graphs, self._recording
        inputs = [node for node in graphs.forward.nodes if node.op == "placeholder"]
        for node, tensor in zip(inputs, graphs.inputs, strict=True):
            self._number[node] = self._tracker.index_of(tensor)
        given = set(self._number.values())
        results = outputs_of(graphs.forward)
        self._step.mark(Phase.EMBED)
        self._run(graphs.forward, kept={base_of(node) for node in results}, backward=False)
        saved_nodes = [
            self._of_forward[node.name]
            for node in graphs.backward.nodes
            if node.op == "placeholder" and node.name in self._of_forward
        ]
        saved = {self._number[base_of(node)] for node in saved_nodes}
        loss = self._number[base_of(results[0])]
        self._step.loss = loss
        returned = {self._number[base_of(node)] for node in results}
        of_caller = results[: len(results) - len(saved_nodes)]
        self._never_overwritten = {self._number[base_of(node)] for node in of_caller}
        self._free(returned - saved - given - {loss})
        self._step.mark(Phase.HEAD_BACKWARD)
        one = self._allocate(value_of(results[0]))  # what Accelerator.backward begins with
        for node in graphs.backward.nodes:
            if node.op != "placeholder":
                continue
            if node.name in self._of_forward:
                self._number[node] = self._number[base_of(self._of_forward[node.name])]
            else:  # A gradient of a result: zeros, but for the loss's.
                self._number[node] = self._allocate(value_of(node))
                self._never_overwritten.add(self._number[node])
                self._launch("fill_", node, (bytes_of(node),))
        gradients = [node for node in _results(graphs.backward) if node is not None]
        self._keep = given | {loss}
        kept = {base_of(node) for node in gradients}
        self._run(graphs.backward, kept=kept, backward=True)
        self._step.mark(Phase.END)
        position = len(recording.events)
        for parameter, node in graphs.gradients(self._tracker.index_of):
            number = self._number[base_of(node)]
            self._step.gradients[number] = parameter
            self._step.handed_over.setdefault(position, []).append(number)
        self._free([one])

    def _run(self, graph: fx.Graph, *, kept: set[fx.Node], backward: bool) -> None:
        kernels = kernels_of(graph, self._backend, rows_share=self._rows_share)
        given = {number for node, number in self._number.items() if node.graph is graph}
        stages = self._stages(kernels, backward=backward)
        launches = self._planned(kernels, kept=kept, backward=backward)
        before: tuple[Phase, Place] | None = None
        self._first_of_stack = {}
        for kernel, launch, stage in zip(kernels, launches, stages, strict=True):
            if stage != before:
                self._step.mark(*stage)
                before, self._place_now = stage, stage[1]
            if kernel.is_of_library:
                self._call_library(kernel, launch, backward=backward)
            else:
                for node in launch.made:
                    self._make(node, launch)
                self._time(kernel)
                self._launch_fused(kernel, launch.made)
            self._free({self._number_of(tensor) for tensor in launch.freed})
        if backward:
            read = {self._number[read] for kernel in kernels for read in kernel.reads}
            unread = given - read - {self._number[node] for node in kept}
            self._free({number for number in unread if self._may_free(number, backward=True)})

    def _time(self, kernel: FusedKernel) -> None:
        """Record what Inductor takes to time a kernel's forms, as it is launched for the first time.

        It writes over the card's L2 cache (torch 2.15 torch/_inductor/runtime/benchmarking.py,
        InductorBenchmarker.benchmark_gpu). Of what a kernel writes in place it makes copies, as far as these
        do not raise the peak (triton_heuristics.py, copy_args_to_cpu_if_needed): they are not modelled.
        Nothing is timed where its cache on disk knows the fastest form.
        """
        values = [value_of(part.node) for part in kernel.parts]
        shapes = tuple(tuple(v.shape) for v in values if isinstance(v, torch.Tensor))
        like = tuple(part.node.target for part in kernel.parts), shapes
        if self._backend == "cuda" and like not in self._timed:
            self._timed.add(like)
            place = self._place_now
            if place != OUTSIDE and place != self._first_of_stack.setdefault(place[0], place):
                return  # The layer stands for others, too, which time nothing.
            number = self._tracker.record_and_free(self._l2_bytes)
            self._workspaces.indices.append(number)

    def _number_of(self, tensor: _Tensor) -> int:
        return tensor if isinstance(tensor, int) else self._number[tensor]

    def _make(self, node: fx.Node, launch: _Launch) -> None:
        """Give a result its memory: that of another tensor, or some of its own.

        A tensor of another layer goes first: each layer's stand by themselves, to be repeated.
        """
        if (taken := launch.taken.get(node)) is not None:
            number = self._number_of(taken)
            if self._place_of[number] == self._place_now:
                self._number[node] = number
                return
            self._free([number])
        self._number[node] = self._allocate(value_of(node))

    def _planned(
        self, kernels: list[FusedKernel], *, kept: set[fx.Node], backward: bool
    ) -> list[_Launch]:
        """Say whose memory each result takes, and what goes behind each kernel."""
        made_by = [_made_by(kernel) for kernel in kernels]
        last: dict[_Tensor, int] = {}
        for place, (kernel, made) in enumerate(zip(kernels, made_by, strict=True)):
            for node in (*kernel.reads, *made):
                last[self._number.get(node, node)] = place
        stays = {self._number.get(node, node) for node in kept}
        going: list[set[_Tensor]] = [set() for _ in kernels]
        for tensor, place in last.items():
            if tensor in stays:
                continue
            if isinstance(tensor, fx.Node) or self._may_free(tensor, backward=backward):
                going[place].add(tensor)
        scattered = {part.node for kernel in kernels for part in kernel.parts if part.extra_bytes}
        launches = []
        for kernel, made, dying in zip(kernels, made_by, going, strict=True):
            taken = self._overwritten(kernel, dying - self._never_overwritten - scattered)
            launches.append(_Launch(made, taken, dying - set(taken.values())))
        return launches

    def _may_free(self, number: int, *, backward: bool) -> bool:
        return number not in self._inputs and (not backward or number not in self._keep)

    @property
    def _inputs(self) -> set[int]:
        return {
            self._number[node] for node in self._graphs.forward.nodes if node.op == "placeholder"
        }

    def _overwritten(self, kernel: FusedKernel, dying: set[_Tensor]) -> dict[fx.Node, _Tensor]:
        """Results that a kernel writes over a tensor that goes, with that tensor.

        A pointwise result takes the first that it reads, alone of what is left of the kernel, of its size
        and type (torch 2.13 torch/_inductor/scheduler.py, SchedulerNode.decide_inplace_update).
        """
        found: dict[fx.Node, _Tensor] = {}
        for place, part in enumerate(kernel.parts):
            if part.node not in kernel.writes or not part.is_pointwise:
                continue
            later = {read for other in kernel.parts[place + 1 :] for read in other.reads}
            for read in part.reads:
                tensor = self._number.get(read, read)
                if tensor not in dying or read in later or tensor in found.values():
                    continue
                if self._storage_of(tensor) == _size_and_type(part.node):
                    found[part.node] = tensor
                    break
        return found

    def _storage_of(self, tensor: _Tensor) -> tuple[int, str]:
        if isinstance(tensor, int):
            tracked = self._recording.tensors[tensor]
            return tracked.size_bytes, tracked.dtype
        return _size_and_type(tensor)

    def _stages(self, kernels: list[FusedKernel], *, backward: bool) -> list[tuple[Phase, Place]]:
        """The block of each kernel: layers follow each other, none is begun twice."""
        first, within, after = _PASSES[backward]
        places = [self._place(kernel) for kernel in kernels]
        # What is computed again belongs to the layer whose gradients need it.
        for index in range(len(kernels) - 2, -1, -1):
            if self._is_recomputed(kernels[index]):
                places[index] = places[index + 1]
        layered = [index for index, place in enumerate(places) if place != OUTSIDE]
        if not layered:
            return [(first, OUTSIDE)] * len(kernels)
        found: list[tuple[Phase, Place]] = []
        now = places[layered[0]]
        for index, place in enumerate(places):
            if index < layered[0]:
                found.append((first, OUTSIDE))
            elif index > layered[-1]:
                found.append((after, OUTSIDE))
            else:
                if place != OUTSIDE and (place < now if backward else place > now):
                    now = place
                found.append((within, now))
        return found

    def _place(self, kernel: FusedKernel) -> Place:
        return self._graphs.place_of.get(kernel.node.name, OUTSIDE)

    def _allocate(self, value: torch.Tensor) -> int:
        recording = self._recording
        number = len(recording.tensors)
        self._place_of[number] = self._place_now
        size_bytes, dtype = _size_and_type_of(value)
        recording.tensors.append(TrackedTensor(size_bytes, tuple(value.shape), dtype))
        recording.events.append(number)
        return number

    def _free(self, numbers: Iterable[int]) -> None:
        self._recording.events.extend(~number for number in sorted(numbers))

    def _call_library(self, kernel: FusedKernel, launch: _Launch, *, backward: bool) -> None:
        node = kernel.node
        func = node.target
        args, kwargs = _values((node.args, dict(node.kwargs)))
        out = value_of(node)
        buffers: tuple[Buffer, ...] = ()
        if self._hidden_buffers is not None:
            buffers = self._hidden_buffers(func, args, out)
        first, brief, then = parted(buffers)
        self._tracker.record_buffers(first)
        for result in launch.made:
            self._make(result, launch)
        self._workspaces.at_launch(self._tracker, func, args, kwargs, in_backward=backward)
        self._tracker.record_buffers(brief)
        self._tracker.record_buffers(then)
        tensors = list(tensors_in((args, kwargs)))
        name = str(func._overloadpacket).partition(".")[2]  # type: ignore[union-attr]
        moved = (*kernel.reads.values(), *(bytes_of(result) for result in launch.made))
        self._recording.kernels.append(
            TrackedKernel(
                name=name,
                dtype=str(dtype_of(func, args, tensors)).removeprefix("torch."),
                num_flops=count_flops(func, args, kwargs, out),
                tensor_bytes=moved,
                shape=shape_of(func, args, kwargs, out),
                recomputed=self._is_recomputed(kernel),
            )
        )

    def _launch_fused(self, kernel: FusedKernel, made: list[fx.Node]) -> None:
        written = [bytes_of(node) for node in made]
        scattered = [part.extra_bytes for part in kernel.parts if part.extra_bytes]
        reduction = kernel.reduction
        if scattered:
            name = SCATTER
        else:
            name = ROWS if reduction is not None and reduction.columns > 8 else POINTWISE
        reads = list(kernel.reads.values())
        if reduction is not None and reduction.is_inner and reduction.columns > LONG_ROW:
            reads *= 2
        self._launch(
            name,
            kernel.node,
            (*reads, *written, *scattered),
            recomputed=self._is_recomputed(kernel),
        )

    def _launch(
        self, name: str, node: fx.Node, moved: tuple[int, ...], *, recomputed: bool = False
    ) -> None:
        value = value_of(node)
        value = value[0] if isinstance(value, (tuple, list)) else value
        self._recording.kernels.append(
            TrackedKernel(
                name=name,
                dtype=str(value.dtype).removeprefix("torch."),
                num_flops=0,
                tensor_bytes=moved,
                shape=(),
                recomputed=recomputed,
            )
        )

    def _is_recomputed(self, kernel: FusedKernel) -> bool:
        """Whether the backward pass does again what the forward pass has done."""
        return kernel.node.graph is self._graphs.backward and all(
            part.node.name in self._of_forward for part in kernel.parts
        )


def _size_and_type(node: fx.Node) -> tuple[int, str]:
    return _size_and_type_of(value_of(node))


def _size_and_type_of(value: torch.Tensor) -> tuple[int, str]:
    """Bytes and dtype of a tensor's storage."""
    return value.untyped_storage().nbytes(), str(value.dtype).removeprefix("torch.")


def _made_by(kernel: FusedKernel) -> list[fx.Node]:
    """The bases that a kernel leaves in memory: of an operation with several results, those that are used."""
    made = []
    for node in kernel.writes:
        if isinstance(value_of(node), torch.Tensor):
            made.append(node)
        else:
            made += [
                user
                for user in node.users
                if user.target is operator.getitem and isinstance(value_of(user), torch.Tensor)
            ]
    return made


def _results(graph: fx.Graph) -> list[fx.Node | None]:
    (output,) = (node for node in graph.nodes if node.op == "output")
    results: Any = output.args[0]
    return list(results)


def _values(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return value_of(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_values(item) for item in value)
    if isinstance(value, dict):
        return {name: _values(item) for name, item in value.items()}
    return value
