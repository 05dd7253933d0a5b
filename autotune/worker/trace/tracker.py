"""Watches every storage that PyTorch allocates and frees on one device, and every kernel it launches.

A TorchDispatchMode sees each ATen call once it has been decomposed by autograd. A storage that appears
in an output for the first time is an allocation; a weak reference to it tells when it is freed. Both go
to one ordered event list: `i >= 0` allocates tensor i, `~i` frees it (the form that
`autotune.memory.replayer.replay` reads).

On `meta` the calls cost no memory and no arithmetic, so the sizes may be those of any model. On `cpu` the
same class watches a real step: the contract tests compare the two.

Not seen: memory that a CUDA kernel allocates for itself. `hidden_buffers` names it per operation.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.worker.trace.kernel_costs import (
    FILLS_A_COPY,
    count_flops,
    dtype_of,
    is_alias,
    launches,
    moved_bytes,
    overlaps,
    shape_of,
    tensor_bytes,
)
from autotune.worker.trace.kernels import (
    ORDERS,
    Buffer,
    HiddenBuffers,
    KernelCost,
    TrackedKernel,
    parted,
)
from autotune.worker.trace.meta_values import (
    FAULTS,
    QUESTIONS,
    note_fault,
    note_question,
    result_instead,
    scalar_of,
    tensors_in,
)
from autotune.worker.trace.repeated_calls import RepeatedCall, call_of, result_of

aten = torch.ops.aten


@dataclass(slots=True)
class TrackedTensor:
    """One storage: its bytes, and the shape and dtype of the tensor it was made for."""

    size_bytes: int
    shape: tuple[int, ...]
    dtype: str
    rule: tuple[Any, ...] | None = None


_SETTINGS: dict[Any, int] = {}
"""Numbers of the settings of trackers that costs depend on."""


@dataclass(slots=True)
class Recording:
    """All tensors, events and kernels seen, in order. `marks` are (events so far, kernels so far, label)."""

    tensors: list[TrackedTensor] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    kernels: list[TrackedKernel] = field(default_factory=list)
    marks: list[tuple[int, int, Any]] = field(default_factory=list)

    def mark(self, label: Any) -> None:
        self.marks.append((len(self.events), len(self.kernels), label))

    def copy(self) -> Recording:
        """Another one that goes on from here."""
        return Recording(
            list(self.tensors), list(self.events), list(self.kernels), list(self.marks)
        )


_left_out: list[None] = []
"""One entry for each `unrecorded` that is around."""


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Leave out operations: what they make is on no device."""
    _left_out.append(None)
    try:
        yield
    finally:
        _left_out.pop()


class Tracker(TorchDispatchMode):
    """Record allocations, frees and kernels on `device_type` while active."""

    def __init__(
        self,
        device_type: str,
        *,
        hidden_buffers: HiddenBuffers | None = None,
        at_launch: Callable[[Tracker, Any, tuple[Any, ...], dict[str, Any]], None] | None = None,
        decompositions: dict[Any, Callable[..., Any]] | None = None,
        kernel_names: Mapping[Any, str] | None = None,
        wrappers: tuple[type[torch.Tensor], ...] = (),
    ) -> None:
        super().__init__()
        self.decompositions = decompositions or {}
        """Functions that take the place of operations; one that returns NotImplemented lets the operation
        run."""
        self._kernel_names = kernel_names or {}
        self._wrappers = wrappers
        self.recording = Recording()
        self.is_repeated = False
        """Whether kernels belong to the chunk of tokens that stands for others."""
        self.pieces = 1
        """How many launches of the trainer's each of the trace's stands for."""
        self.has_padding = False
        """Whether some places of the batch hold no token: what the mask (batch, length) says, if asked."""
        self.on_result: Callable[..., None] | None = None
        """Called with each operation that has run, its arguments and its result."""
        self._device_type = device_type
        self._hidden_buffers = hidden_buffers
        self._at_launch = at_launch
        settings = hidden_buffers, frozenset(self._kernel_names.items())
        self._settings = _SETTINGS.setdefault(settings, len(_SETTINGS))
        self._pending_mark: Any = None
        self._sole_owner_counts = _sole_owner_counts()
        self._index_of: dict[int, int] = {}
        self._references: dict[int, Any] = {}

    def mark_before_next(self, label: Any) -> None:
        """Mark when the next operation starts: frees until then belong to what went before."""
        self._pending_mark = label

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage has been seen."""
        return tensor.untyped_storage()._cdata in self._index_of

    def index_of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage; a storage never seen before is recorded as allocated now."""
        storage = tensor.untyped_storage()
        index = self._index_of.get(storage._cdata)
        if index is None:
            index = self._allocate(storage, tensor)
        return index

    def _allocate(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> int:
        index = self._record_allocation(storage.nbytes(), tuple(tensor.shape), tensor.dtype)
        self._watch(storage, index)
        return index

    def _watch(self, storage: torch.UntypedStorage, index: int) -> None:
        """Record when the storage is freed."""
        recording = self.recording
        address = storage._cdata
        self._index_of[address] = index

        def freed(_: object) -> None:
            recording.events.append(~index)
            if self._index_of.get(address) == index:
                del self._index_of[address]
                del self._references[address]

        self._references[address] = weakref.ref(storage, freed)

    def forget(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage's memory is given back, though it lives on."""
        address = storage._cdata
        index = self._index_of.pop(address, None)
        if index is not None:
            del self._references[address]
            self.recording.events.append(~index)

    def go_on_from(self, recording: Recording, alive: Mapping[int, torch.UntypedStorage]) -> None:
        """Take over what another one has recorded, and these storages with their numbers."""
        self.recording = recording.copy()
        for index, storage in alive.items():
            self._watch(storage, index)

    def alive(self) -> dict[int, torch.UntypedStorage]:
        """The storages that are allocated now, by their numbers."""
        return {
            index: storage
            for address, index in self._index_of.items()
            if (storage := self._references[address]()) is not None
        }

    def _record_allocation(
        self, size_bytes: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> int:
        index = len(self.recording.tensors)
        self.recording.tensors.append(TrackedTensor(size_bytes, shape, _dtype_name(dtype)))
        self.recording.events.append(index)
        return index

    def record_buffers(self, buffers: tuple[Buffer, ...]) -> None:
        """Record buffers that live and die inside one kernel."""
        self._free(self._allocated(buffers))

    def _allocated(self, buffers: Iterable[Buffer]) -> list[int]:
        indices = []
        for buffer in buffers:
            index = self._record_allocation(buffer.size_bytes, (), torch.uint8)
            self.recording.tensors[index].rule = buffer.rule
            indices.append(index)
        return indices

    def _free(self, indices: list[int]) -> None:
        """Free buffers, the last one first, as locals go."""
        self.recording.events.extend(~index for index in reversed(indices))

    def record_and_free(self, size_bytes: int) -> int:
        """Record a buffer that is given back at once; return its number."""
        index = self._record_allocation(size_bytes, (), torch.uint8)
        self._free([index])
        return index

    def record_forever(self, size_bytes: int) -> int:
        """Record a buffer that the process keeps (a library workspace); return its number."""
        return self._record_allocation(size_bytes, (), torch.uint8)

    def _engine_adds_in_place(self, args: tuple[Any, ...]) -> bool:
        """Whether autograd would add a tensor's second gradient into its first, were no mode on.

        An active dispatch mode counts as a tensor subclass, for which the engine makes a new sum.
        Source: pytorch v2.13 torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace.
        """
        old, new = args
        return (
            in_backward()
            and not torch.is_grad_enabled()
            and isinstance(new, torch.Tensor)
            and old.shape == new.shape
            and _use_counts(old) == self._sole_owner_counts
            and aten.is_non_overlapping_and_dense.default(old)
        )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if _left_out:
            return func(*args, **(kwargs or {}))
        if self._wrappers and any(issubclass(t, self._wrappers) for t in types):
            return NotImplemented  # It does the same to what it is made of, which comes here again.
        kwargs = kwargs or {}
        if self._pending_mark is not None:
            self.recording.mark(self._pending_mark)
            self._pending_mark = None
        answer = self._answer_instead(func, args, kwargs)
        if answer is not NotImplemented:
            return answer
        # The backward pass has function modes on, which every question to a tensor would go through.
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation as autograd would, and record it."""
        if func is aten.add.Tensor and self._engine_adds_in_place(args):
            func = aten.add_.Tensor
        is_added = func is aten.index_put.default and args[3:4] == (True,)
        if is_added and in_backward() and not torch.is_grad_enabled():
            # What was picked by places gets its gradient in place, were no mode on (torch 2.13
            # FunctionsManual.cpp, index_backward).
            func = aten._index_put_impl_.default
        call = None
        if self._device_type == "meta":
            out = result_instead(func, args, kwargs)
            if out is None:
                call = call_of(func, args, kwargs)
                out = result_of(func, args, kwargs, call)
        else:
            out = func(*args, **kwargs)
        if self.has_padding and func in QUESTIONS:
            note_question(args[0], out)
        if func in FAULTS:
            note_fault(func, args[0], out)
        if self.on_result is not None:
            self.on_result(func, args, kwargs, out)
        self._record(func, args, kwargs, out, call)
        return out

    def answer_too(self, func: Any, answer: Callable[..., Any]) -> None:
        """Let `answer` take an operation's place where what has been asked so far leaves it."""
        first = self.decompositions.get(func)

        def answered(*args: Any, **kwargs: Any) -> Any:
            found = NotImplemented if first is None else first(*args, **kwargs)
            return answer(*args, **kwargs) if found is NotImplemented else found

        self.decompositions[func] = answered

    def _answer_instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let what takes the place of the operation answer; NotImplemented where it runs itself."""
        decomposition = self.decompositions.get(func)
        if decomposition is not None:
            with self:
                answer = decomposition(*args, **kwargs)
            if answer is not NotImplemented:
                return answer
        if func is aten._local_scalar_dense.default and args[0].device.type == "meta":
            return scalar_of(args[0], has_padding=self.has_padding)
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        return NotImplemented

    def _record(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        call: RepeatedCall | None = None,
    ) -> None:
        """Record what the operation allocated, and the kernel that it launched."""
        order = ORDERS.get(func)
        outputs = self._tensors_here(out if order is None else order(args, out))
        if call is not None and self._settings in call.costs:
            cost = call.costs[self._settings]
        else:
            cost = self._cost(func, args, kwargs, out, outputs)
            if call is not None and not any(
                map(overlaps, tensors_in((args, *kwargs.values(), out)))
            ):
                call.costs[self._settings] = cost
        inside = self._allocated(cost.first) if cost is not None else []
        for tensor in outputs:
            self.index_of(tensor)
        # Only the kernel asks for a workspace: what it returns is there by then.
        if self._at_launch is not None:
            self._at_launch(self, func, args, kwargs)
        if cost is not None:
            self._free([n for n, b in zip(inside, cost.first, strict=True) if b.goes_first])
            inside = [n for n, b in zip(inside, cost.first, strict=True) if not b.goes_first]
            self.record_buffers(cost.brief)
            self._free([*inside, *self._allocated(cost.then)])
            self.recording.kernels += cost.launches(
                _in_recomputation(), self.is_repeated, self.pieces
            )

    def _cost(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        outputs: list[torch.Tensor],
    ) -> KernelCost | None:
        """The cost of the call's kernels; None where it launches none, or touches no tensor here."""
        is_fresh = is_alias(func) and not all(map(self.knows, outputs))
        if not launches(func, is_fresh):
            return None
        inputs = self._tensors_here((args, tuple(kwargs.values())))
        if not (outputs or inputs):
            return None
        buffers: tuple[Buffer, ...] = ()
        if self._hidden_buffers is not None:
            buffers = self._hidden_buffers(func, args, out)
        dtype = _dtype_name(dtype_of(func, args, inputs or outputs))
        kernel = functools.partial(
            TrackedKernel,
            name=self._kernel_names.get(func) or _name(func),
            dtype=dtype,
            num_flops=count_flops(func, args, kwargs, out),
            tensor_bytes=tensor_bytes(func, outputs, inputs),
            shape=shape_of(func, args, kwargs, out),
        )
        before: tuple[functools.partial[TrackedKernel], ...] = ()
        if func in FILLS_A_COPY:
            copied = (moved_bytes(outputs[0]), moved_bytes(inputs[0]))
            before = (
                functools.partial(
                    TrackedKernel,
                    name="clone",
                    dtype=dtype,
                    num_flops=0,
                    tensor_bytes=copied,
                    shape=(),
                ),
            )
        return KernelCost((*before, kernel), *parted(buffers))

    def record_kernel(
        self,
        name: str,
        arguments: Any,
        *,
        passes: int = 1,
        num_flops: int = 0,
        shape: tuple[int, ...] = (),
    ) -> None:
        """Record a kernel that is no operation of PyTorch's, and touches its tensors so many times."""
        tensors = self._tensors_here(arguments)
        moved = tuple(passes * moved_bytes(tensor) for tensor in tensors)
        self._launch(name, tensors[0].dtype, num_flops, moved, shape)

    def _launch(
        self,
        name: str,
        dtype: torch.dtype,
        num_flops: int,
        tensor_bytes: tuple[int, ...],
        shape: tuple[int, ...] = (),
    ) -> None:
        self.recording.kernels.append(
            TrackedKernel(
                name=name,
                dtype=_dtype_name(dtype),
                num_flops=num_flops,
                tensor_bytes=tensor_bytes,
                shape=shape,
                recomputed=_in_recomputation(),
                repeated=self.is_repeated,
            )
        )

    def _tensors_here(self, value: Any) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value] if value.device.type == self._device_type else []
        return [t for t in tensors_in(value) if t.device.type == self._device_type]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _name(func: Any) -> str:
    return str(func._overloadpacket).partition(".")[2]


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether the operation is made of others; outside autograd it arrives here whole.

    One with kernels of its own besides (silu_backward) runs those.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), "CompositeImplicitAutograd") and not has_kernel(
        func.name(), "CPU"
    )


def _use_counts(tensor: torch.Tensor) -> tuple[int, int]:
    """Count references to the tensor and to its storage, those of the Python objects included."""
    storage = tensor.untyped_storage()
    return tensor._use_count(), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]


@functools.cache
def _sole_owner_counts() -> tuple[int, int]:
    """The `_use_counts` that a dispatch mode sees of a gradient which only the engine holds."""

    class Probe(TorchDispatchMode):
        counts = (0, 0)

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func is aten.add.Tensor:
                self.counts = _use_counts(args[0])
            return func(*args, **(kwargs or {}))

    used_twice = torch.ones((), requires_grad=True) * 1
    total = used_twice * 2 + used_twice * 3
    with Probe() as probe:
        total.backward()
    return probe.counts


def in_backward() -> bool:
    """Whether autograd's engine is at work on this thread."""
    return torch._C._current_graph_task_id() != -1


def _in_recomputation() -> bool:
    """Whether a forward pass runs within the backward pass."""
    return torch.is_grad_enabled() and in_backward()
