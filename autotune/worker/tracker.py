"""Watch every storage that PyTorch allocates and frees on one device, and every kernel it launches.

A TorchDispatchMode sees each ATen call once it has been decomposed by autograd. A storage that appears
in an output for the first time is an allocation; a weak reference to it tells when it is freed. Both go
to one ordered event list: `i >= 0` allocates tensor i, `~i` frees it (the form that
`autotune.allocator.replay` reads).

On `meta` the calls cost no memory and no arithmetic, so the sizes may be those of any model. On `cpu` the
same class watches a real step: the contract tests compare the two.

Not seen: memory that a CUDA kernel allocates for itself. `hidden_buffers` names it per operation.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer inside a kernel. `rule` names a size that is not a product of the traced dimensions."""

    size_bytes: int
    rule: tuple[Any, ...] | None = None


HiddenBuffers = Callable[[Any, tuple[Any, ...], Any], tuple[Buffer, ...]]
"""(operation, arguments, output) -> the buffers that the CUDA kernel allocates and frees inside."""


@dataclass(slots=True)
class TrackedTensor:
    """One storage: bytes, and the shape and dtype of the tensor it was made for."""

    size_bytes: int
    shape: tuple[int, ...]
    dtype: str
    rule: tuple[Any, ...] | None = None


@dataclass(slots=True)
class TrackedKernel:
    """One launch: arithmetic and the bytes it reads and writes, tensor by tensor."""

    name: str
    dtype: str
    num_flops: int
    tensor_bytes: tuple[int, ...]
    recomputed: bool
    """Launched by activation checkpointing's second forward pass."""
    repeated: bool = False
    """Launched for each chunk of tokens but the first (autotune.worker.chunks)."""


@dataclass(slots=True)
class Recording:
    """Everything seen, in order. `marks` are (events so far, kernels so far, label)."""

    tensors: list[TrackedTensor] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    kernels: list[TrackedKernel] = field(default_factory=list)
    marks: list[tuple[int, int, Any]] = field(default_factory=list)

    def mark(self, label: Any) -> None:
        self.marks.append((len(self.events), len(self.kernels), label))


class Tracker(TorchDispatchMode):
    """Record allocations, frees and kernels on `device_type` while active."""

    def __init__(
        self,
        device_type: str,
        *,
        hidden_buffers: HiddenBuffers | None = None,
        before: Callable[[Tracker, Any], None] | None = None,
        decompositions: dict[Any, Callable[..., Any]] | None = None,
        kernel_names: Mapping[Any, str] | None = None,
        wrappers: tuple[type[torch.Tensor], ...] = (),
    ) -> None:
        super().__init__()
        self.decompositions = decompositions or {}
        """What takes the place of an operation; NotImplemented lets it run."""
        self._kernel_names = kernel_names or {}
        self._wrappers = wrappers
        self.recording = Recording()
        self.is_repeated = False
        """Kernels belong to the chunk of tokens that stands for others."""
        self.has_padding = False
        """Some places of the batch hold no token: what the mask (batch, length) says, if asked."""
        self._device_type = device_type
        self._hidden_buffers = hidden_buffers
        self._before = before
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
        """Number of the tensor's storage; a storage never seen before is recorded as allocated now."""
        storage = tensor.untyped_storage()
        index = self._index_of.get(storage._cdata)
        if index is None:
            index = self._allocate(storage, tensor)
        return index

    def _allocate(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> int:
        recording = self.recording
        index = self._record_allocation(storage.nbytes(), tuple(tensor.shape), tensor.dtype)
        address = storage._cdata
        self._index_of[address] = index

        def freed(_: object) -> None:
            recording.events.append(~index)
            if self._index_of.get(address) == index:
                del self._index_of[address]
                del self._references[address]

        self._references[address] = weakref.ref(storage, freed)
        return index

    def _record_allocation(
        self, size_bytes: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> int:
        index = len(self.recording.tensors)
        self.recording.tensors.append(TrackedTensor(size_bytes, shape, str(dtype)[6:]))
        self.recording.events.append(index)
        return index

    def record_buffers(self, buffers: tuple[Buffer, ...]) -> None:
        """Buffers that live and die inside one kernel."""
        indices = []
        for buffer in buffers:
            index = self._record_allocation(buffer.size_bytes, (), torch.uint8)
            self.recording.tensors[index].rule = buffer.rule
            indices.append(index)
        self.recording.events.extend(~index for index in indices)

    def record_forever(self, size_bytes: int) -> int:
        """A buffer that the process keeps (a library workspace)."""
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
        if self._wrappers and any(issubclass(t, self._wrappers) for t in types):
            return NotImplemented  # It does the same to what it is made of, which comes here again.
        kwargs = kwargs or {}
        device_type = self._device_type
        if self._pending_mark is not None:
            self.recording.mark(self._pending_mark)
            self._pending_mark = None
        decomposition = self.decompositions.get(func)
        if decomposition is not None:
            with self:
                answer = decomposition(*args, **kwargs)
            if answer is not NotImplemented:
                return answer
        if func is aten._local_scalar_dense.default and args[0].device.type == "meta":
            return _answer(args[0], has_padding=self.has_padding)
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func is aten.add.Tensor and self._engine_adds_in_place(args):
            func = aten.add_.Tensor
        if self._before is not None:
            self._before(self, func)
        out = None
        if func in _ELEMENTWISE and device_type == "meta":
            out = _like_first(args, kwargs)
        elif func is aten.addmm.dtype_out and device_type == "meta":
            # Before 2.13 PyTorch has none for `meta`; nothing is computed there.
            out = kwargs["out"]
        if out is None:
            out = func(*args, **kwargs)
        if self.has_padding and func in _QUESTIONS:
            _note_question(args[0], out)
        outputs = [t for t in _tensors(out) if t.device.type == device_type]
        fresh = False
        for tensor in outputs:
            if tensor.untyped_storage()._cdata not in self._index_of:
                fresh = True
                self._allocate(tensor.untyped_storage(), tensor)
        if not _launches(func, fresh):
            return out
        inputs = [
            t for t in _tensors((args, tuple(kwargs.values()))) if t.device.type == device_type
        ]
        if not outputs and not inputs:
            return out
        if self._hidden_buffers is not None:
            self.record_buffers(self._hidden_buffers(func, args, out))
        flops = _count_flops(func, args, kwargs, out)
        moved = tuple(_moved_bytes(t) for t in outputs)
        if func in _GATHERS:
            moved *= 2
        elif func is not aten.nll_loss_backward.default:
            moved += tuple(_moved_bytes(t) for t in inputs)
        # What a product adds to may be wider than what it multiplies.
        operands = _PRODUCT_OPERANDS.get(func, 0)
        dtype = str((args[operands] if operands else (inputs or outputs)[0]).dtype)[6:]
        recomputed = torch.is_grad_enabled() and in_backward()
        self.recording.kernels.append(
            TrackedKernel(
                self._kernel_names.get(func) or _name(func),
                dtype,
                flops,
                moved,
                recomputed,
                self.is_repeated,
            )
        )
        return out

    def record_kernel(
        self, name: str, arguments: Any, *, passes: int = 1, num_flops: int = 0
    ) -> None:
        """A kernel that is no operation of PyTorch's, and touches its tensors so many times."""
        tensors = [t for t in _tensors(arguments) if t.device.type == self._device_type]
        moved = tuple(passes * _moved_bytes(t) for t in tensors)
        recomputed = torch.is_grad_enabled() and in_backward()
        dtype = str(tensors[0].dtype)[6:]
        self.recording.kernels.append(
            TrackedKernel(name, dtype, num_flops, moved, recomputed, self.is_repeated)
        )


_ELEMENTWISE = {
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar,
    aten.pow.Tensor_Scalar, aten.neg.default, aten.rsqrt.default, aten.abs.default,
    aten.silu.default, aten.gelu.default, aten.tanh.default, aten.sigmoid.default,
}  # fmt: skip


def _like_first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The result of an elementwise operation that looks like its first operand; None: ask PyTorch.

    PyTorch's own shape functions for these are written in Python and take most of a trace's time.
    TensorIterator lays a result out like its first operand when that has the full shape and is dense.
    """
    first = args[0]
    if not isinstance(first, torch.Tensor) or not first.is_floating_point() or kwargs:
        return None
    shape = first.shape
    for other in args[1:]:
        if isinstance(other, torch.Tensor):
            if other.dim() and (other.dtype != first.dtype or not _broadcasts(other.shape, shape)):
                return None
            if not other.dim() and other.is_floating_point() and other.device.type != "cpu":
                return None
        elif isinstance(other, complex):
            return None
    if not first.dim() or not aten.is_non_overlapping_and_dense.default(first):
        return None
    if first.is_contiguous():
        return torch.empty(shape, dtype=first.dtype, device=first.device)
    return torch.empty_strided(shape, first.stride(), dtype=first.dtype, device=first.device)


def _broadcasts(small: torch.Size, shape: torch.Size) -> bool:
    """Whether `small` expands to `shape`."""
    if small == shape:
        return True
    offset = len(shape) - len(small)
    return offset >= 0 and all(n in (1, shape[offset + i]) for i, n in enumerate(small))


def _count_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Floating-point operations, a causal attention's by half."""
    operands = _PRODUCT_OPERANDS.get(func)
    if operands is not None:
        left, right = args[operands].shape, args[operands + 1].shape
        return 2 * math.prod(left) * right[-1]
    if func in _GROUPED_PRODUCTS:  # each row meets one expert, or each expert some rows
        return 2 * math.prod(args[0].shape[-2:]) * args[1].shape[-1]
    if func in _ATTENTION:
        first, of_scores, of_values = _ATTENTION[func]
        query, key, value = args[first : first + 3]
        pairs = math.prod(query.shape[:-1]) * key.shape[-2]
        flops = 2 * pairs * (of_scores * query.shape[-1] + of_values * value.shape[-1])
        return flops // 2 if _is_causal(func, args, kwargs) else flops
    if func in _VARLEN_ATTENTION:
        total, heads, size = args[_VARLEN_ATTENTION[func][0]].shape
        num_samples = next(t for t in args if t is not None and t.dtype is torch.int32).shape[0] - 1
        flops = _VARLEN_ATTENTION[func][1] * total * (total // num_samples) * heads * size
        return flops // 2 if _is_causal(func, args, kwargs) else flops
    counter = flop_registry.get(func._overloadpacket)
    if counter is None:
        return 0
    flops = int(counter(*args, **kwargs, out_val=out))
    return flops // 2 if _is_causal(func, args, kwargs) else flops


_PRODUCT_OPERANDS = {
    aten.mm.default: 0,
    aten.mm.out: 0,
    aten.bmm.default: 0,
    aten.addmm.default: 1,
    aten.addmm.out: 1,
    aten.addmm.dtype_out: 1,
    aten.baddbmm.default: 1,
    aten._int_mm.default: 0,
}
"""Where the left matrix of a product stands among the arguments."""
_ATTENTION = {
    aten._scaled_dot_product_cudnn_attention.default: (0, 1, 1),
    aten._scaled_dot_product_efficient_attention.default: (0, 1, 1),
    aten._scaled_dot_product_flash_attention.default: (0, 1, 1),
    aten._scaled_dot_product_cudnn_attention_backward.default: (1, 3, 2),
    aten._scaled_dot_product_efficient_attention_backward.default: (1, 3, 2),
    aten._scaled_dot_product_flash_attention_backward.default: (1, 3, 2),
}
"""Where the queries (batch, heads, tokens, size) stand, keys and values after them; products over the size
of queries, and over that of values. PyTorch's own counter refuses fewer heads of keys than of queries
before 2.13."""
_VARLEN_ATTENTION = {
    aten._flash_attention_forward.default: (0, 4),
    aten._flash_attention_backward.default: (1, 10),
}
"""Samples in one row: where the queries (tokens, heads, size) stand, and operations per element: two
products, or five. PyTorch's own counter makes a list of the samples, a million in a trace."""
_GROUPED_PRODUCTS = {aten._grouped_mm.default}


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
    """References to the tensor and to its storage, those of the Python objects included."""
    storage = tensor.untyped_storage()
    return tensor._use_count(), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]


@functools.cache
def _sole_owner_counts() -> tuple[int, int]:
    """`_use_counts` that a dispatch mode sees of a gradient which only the engine holds."""

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


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an attention kernel skips the half of the square that the mask hides."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            return bool(args[position] if position < len(args) else kwargs.get("is_causal"))
    return False


_QUESTIONS = {aten.all.default, aten.sum.default, aten.eq.Scalar}


def _note_question(tensor: torch.Tensor, out: Any) -> None:
    """Remember that `all` is asked of a mask (batch, length), be it by comparing its sum with its size
    (transformers 5.23 masking_utils.py, fast_all)."""
    if (tensor.dtype is torch.bool and tensor.dim() == 2) or hasattr(tensor, "is_of_mask"):
        out.is_of_mask = True


def _answer(tensor: torch.Tensor, *, has_padding: bool) -> bool:
    """What `.item()` says of a tensor without values.

    Transformers asks whether a whole mask is ones: yes, unless there is padding; and whether each row of
    a batch is one sample: yes. A number cannot be answered.
    """
    if tensor.dtype is not torch.bool:
        raise NotImplementedError(
            "the model reads a number from a tensor, which a trace does not have"
        )
    return not (has_padding and hasattr(tensor, "is_of_mask"))


def in_backward() -> bool:
    """Whether autograd's engine is at work on this thread."""
    return torch._C._current_graph_task_id() != -1


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


_EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
_ALIAS = {
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.detach.default,
    aten.alias.default,
    aten.set_.source_Storage,
}


_GATHERS = {
    aten.embedding.default,
    aten.gather.default,
    aten.index_select.default,
    aten.nll_loss_forward.default,
}
"""Read no more of their input than they write."""


def _launches(func: Any, fresh: bool) -> bool:
    """Views, aliases and uninitialised memory cost no kernel; a view that had to copy does."""
    if func in _EMPTY:
        return False
    return fresh or not (func in _ALIAS or func.is_view)


def _moved_bytes(tensor: torch.Tensor) -> int:
    """Bytes a kernel touches of it: an expanded tensor is read once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
