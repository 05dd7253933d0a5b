"""What an optimizer step, clipping and unscaling allocate and free on the GPU, and what they cost.

An Algorithm writes onto a Tape what the real code does, in its order. All of it is predicted from
the sources named below; tests/contracts/test_optimizers_real.py runs the real code and compares.

As transformers.Trainer calls them (5.23, trainer_optimizer.py): weight_decay 0, so that foreach SGD
makes no temporaries; SGD without momentum; Adafactor without relative_step and scale_parameter.

Known limitations
- Scratch that a CUDA reduction takes for itself (Adafactor's norms and means: some KiB) is missing.
- With parameters of several dtypes, foreach visits the dtypes in the order of a hash table. Written
  is what CPU and meta do: the dtype seen last comes first.
- State in managed memory (paged optimizers) is priced as if it were resident on the device.
- The scalar that a fused optimizer holds under GradScaler is missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from autotune.allocator import Tape
from autotune.config import DTYPE_BYTES

States = list[list[int]]
"""Per parameter, the tape's indices of its state on the device."""

_LOW_PRECISION = frozenset({"float16", "bfloat16"})

# bitsandbytes 0.50 optim/optimizer.py: min_8bit_size, blocksize, and get_state_buffer's `< 1e5`.
_MIN_8BIT_ELEMENTS = 4096
_BLOCK_ELEMENTS = 256
_MIN_PAGED_ELEMENTS = 100_000
# functional.create_dynamic_map: 256 float32 code points; signed for state1, unsigned for state2.
_QMAP_BYTES = 256 * 4

# torch 2.13 ATen/native/cuda/MultiTensorApply.cuh: kChunkSize, depth_to_max_blocks and
# depth_to_max_tensors of builds below CUDA 13 (above it 7 times as many fit, so fewer launches).
_CHUNK_ELEMENTS = 65_536
_MAX_BLOCKS = 320
_MAX_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A trainable parameter; its gradient has the same shape and dtype."""

    shape: tuple[int, ...]
    dtype: str
    """A key of DTYPE_BYTES."""
    group: int = 0
    """The optimizer's parameter group. The Trainer makes two: 0 weights, 1 biases and norms."""
    embedding: bool = False
    """Weight of an nn.Embedding: the Trainer keeps its state in 32 bits under 8-bit optimizers."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTensor:
    """One tensor that an optimizer keeps on the device for one parameter."""

    size_bytes: int
    managed: bool = False
    """In CUDA managed memory: torch's allocator does not see it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """What one call costs the GPU, for a roofline."""

    bytes_moved: int
    """Read and written, each pass over a tensor counted."""
    num_kernels: int
    """Launches."""
    num_synchronizations: int = 0
    """Times the host waits until the GPU is idle."""


class Algorithm(Protocol):
    """How an optimizer's step treats memory."""

    def state(self, spec: TensorSpec) -> tuple[StateTensor, ...]:
        """Return what it keeps on the device for one parameter, in order of allocation."""
        ...

    def write_step(self, tape: Tape, specs: Sequence[TensorSpec], states: States | None) -> States:
        """Append one step and return the indices of the state.

        Pass None the first time, so that the state is allocated too; then what was returned.
        """
        ...

    def cost(self, specs: Sequence[TensorSpec]) -> StepCost:
        """Return what a step costs once the state exists."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLists(Algorithm):
    """torch.optim's foreach and fused kernels; state in the parameter's dtype."""

    num_moments: int
    passes: tuple[tuple[int, int], ...]
    """The step's kernels as (tensor lists in a launch, tensors read or written)."""
    full_size_temporary: bool = False
    """The square roots of the second moments, all at once."""
    step_on_device: bool = False
    """A float32 step count per parameter; else it is on the CPU."""

    def state(self, spec: TensorSpec) -> tuple[StateTensor, ...]:
        moments = (StateTensor(size_bytes=spec.size_bytes),) * self.num_moments
        return (StateTensor(size_bytes=4), *moments) if self.step_on_device else moments

    def write_step(self, tape: Tape, specs: Sequence[TensorSpec], states: States | None) -> States:
        kept = _empty(specs) if states is None else states
        for group in _by_group(specs):
            if states is None:
                for i in group:
                    kept[i] = _alloc_state(tape, self.state(specs[i]))
            if self.full_size_temporary:
                _write_square_roots(tape, _by_dtype([specs[i] for i in group]))
        return kept

    def cost(self, specs: Sequence[TensorSpec]) -> StepCost:
        update = _foreach_cost(specs, self.passes)
        if not self.step_on_device:
            return update
        counts = [TensorSpec(shape=(), dtype="float32", group=spec.group) for spec in specs]
        add_one = _foreach_cost(counts, ((1, 2),))
        return StepCost(
            bytes_moved=update.bytes_moved + add_one.bytes_moved,
            num_kernels=update.num_kernels + add_one.num_kernels,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BitsAndBytes(Algorithm):
    """bitsandbytes' Optimizer1State and Optimizer2State: one kernel per parameter, in place."""

    num_states: int
    bits: int
    paged: bool = False

    def state(self, spec: TensorSpec) -> tuple[StateTensor, ...]:
        num_elements = spec.num_elements
        quantised = self._quantises(spec)
        moment = StateTensor(
            size_bytes=num_elements * (1 if quantised else 4),
            managed=self.paged and num_elements >= _MIN_PAGED_ELEMENTS,
        )
        if not quantised:
            return (moment,) * self.num_states
        absmax = StateTensor(size_bytes=_ceil_div(num_elements, _BLOCK_ELEMENTS) * 4)
        return (moment,) * self.num_states + (absmax,) * self.num_states

    def write_step(self, tape: Tape, specs: Sequence[TensorSpec], states: States | None) -> States:
        if states is not None:
            return states
        kept = _empty(specs)
        qmaps = [_QMAP_BYTES] * self.num_states
        for i in _in_group_order(specs):
            if self._quantises(specs[i]):
                while qmaps:  # Shared by all, and moved to the device for the first.
                    tape.alloc(qmaps.pop(), "optimizer_state")
            kept[i] = _alloc_state(tape, self.state(specs[i]))
        return kept

    def cost(self, specs: Sequence[TensorSpec]) -> StepCost:
        # In place: parameter and states are read and written, the gradient read. step() calls
        # torch.cuda.synchronize after every parameter, once more at the end when paged.
        state_bytes = sum(tensor.size_bytes for spec in specs for tensor in self.state(spec))
        return StepCost(
            bytes_moved=3 * _total_bytes(specs) + 2 * state_bytes,
            num_kernels=len(specs),
            num_synchronizations=len(specs) + self.paged,
        )

    def _quantises(self, spec: TensorSpec) -> bool:
        return self.bits == 8 and spec.num_elements >= _MIN_8BIT_ELEMENTS and not spec.embedding


class Adafactor(Algorithm):
    """transformers.optimization.Adafactor: row and column statistics, parameter by parameter.

    Its temporaries are float32 whatever the parameter's dtype, and a loop variable outlives the
    parameter it was made for: the next one's tensors are made before it is replaced.
    """

    def state(self, spec: TensorSpec) -> tuple[StateTensor, ...]:
        statistics = _row_and_column_bytes(spec) if _factored(spec) else (4 * spec.num_elements,)
        # The last is RMS, a scalar that every step replaces.
        return tuple(StateTensor(size_bytes=nbytes) for nbytes in (*statistics, 4))

    def write_step(self, tape: Tape, specs: Sequence[TensorSpec], states: States | None) -> States:
        kept = _empty(specs) if states is None else [list(state) for state in states]
        gradient: int | None = None
        weight: int | None = None
        update: int | None = None
        for i in _in_group_order(specs):
            spec = specs[i]
            full_bytes = 4 * spec.num_elements
            copied = spec.dtype in _LOW_PRECISION
            _free(tape, gradient)
            gradient = tape.alloc(full_bytes, "temporary") if copied else None
            if states is None:
                kept[i] = _alloc_state(tape, self.state(spec)[:-1])
            _free(tape, weight)
            weight = tape.alloc(full_bytes, "temporary") if copied else None
            rms = _write_rms(tape, "optimizer_state")
            if states is not None:
                tape.free(kept[i].pop())
            kept[i].append(rms)
            square = tape.alloc(full_bytes, "temporary")
            shifted = tape.alloc(full_bytes, "temporary")
            tape.free(square)
            _free(tape, update)
            if _factored(spec):
                update = self._write_factored_update(tape, spec)
            else:
                update = tape.alloc(full_bytes, "temporary")
            tape.free(shifted)
            self._write_clipping(tape)
            _write_passing(tape, full_bytes)  # -update
        for last in (gradient, weight, update):
            _free(tape, last)
        return kept

    def cost(self, specs: Sequence[TensorSpec]) -> StepCost:
        """Full-size passes in float32; row and column vectors are left out of the bytes."""
        bytes_moved = num_kernels = 0
        for spec in specs:
            # Factored: norm 1, pow 2, add 2, two means 2, outer product 1, mul_ 3, norm 1, div_ 2,
            # mul_ 2, neg 2, add_ 3. Else: the means and the product give way to mul_ 2, add_ 3,
            # rsqrt 2. Launches counted likewise.
            num_passes, launches = (21, 24) if _factored(spec) else (25, 16)
            if spec.dtype in _LOW_PRECISION:
                # Two casts to float32 and the copy back.
                num_passes, launches = num_passes + 3, launches + 3
                bytes_moved += 3 * spec.size_bytes
            bytes_moved += num_passes * 4 * spec.num_elements
            num_kernels += launches
        return StepCost(bytes_moved=bytes_moved, num_kernels=num_kernels)

    @staticmethod
    def _write_factored_update(tape: Tape, spec: TensorSpec) -> int:
        row_bytes, column_bytes = _row_and_column_bytes(spec)
        _write_passing(tape, row_bytes)  # update.mean(dim=-1)
        _write_passing(tape, column_bytes)  # update.mean(dim=-2)
        mean = tape.alloc(row_bytes // spec.shape[-2], "temporary")
        row = tape.alloc(row_bytes, "temporary")
        tape.free(mean)
        column = tape.alloc(column_bytes, "temporary")
        update = tape.alloc(4 * spec.num_elements, "temporary")
        tape.free(row)
        tape.free(column)
        return update

    @staticmethod
    def _write_clipping(tape: Tape) -> None:
        rms = _write_rms(tape, "temporary")
        divisor = tape.alloc(4, "temporary")
        tape.free(rms)
        tape.free(divisor)


def write_clip(tape: Tape, specs: Sequence[TensorSpec]) -> int:
    """Append torch.nn.utils.clip_grad_norm_ (foreach) over parameters in the model's order.

    Returns the index of the total norm, a scalar that the Trainer keeps until the next one.
    Source: torch 2.13 nn/utils/clip_grad.py, ATen/native/cuda/ForeachReduceOp.cu.
    """
    norms: list[int] = []
    norm_dtypes = {spec.dtype for spec in specs}
    for group in _by_dtype(specs):
        # Partial sums in float32: as many per tensor as the largest has chunks.
        num_chunks = max(_ceil_div(spec.num_elements, _CHUNK_ELEMENTS) for spec in group)
        partial_sums = tape.alloc(len(group) * num_chunks * 4, "temporary")
        norms += [tape.alloc(DTYPE_BYTES[spec.dtype], "temporary") for spec in group]
        tape.free(partial_sums)
    scalar_bytes = DTYPE_BYTES[norm_dtypes.pop()] if len(norm_dtypes) == 1 else 4
    stacked = tape.alloc(len(specs) * scalar_bytes, "temporary")
    total_norm = tape.alloc(scalar_bytes, "temporary")
    tape.free(stacked)
    _free_list(tape, norms)
    # max_norm / (total_norm + 1e-6), then clamp.
    shifted, reciprocal, coefficient = (tape.alloc(scalar_bytes, "temporary") for _ in range(3))
    tape.free(reciprocal)
    tape.free(shifted)
    clamped = tape.alloc(scalar_bytes, "temporary")
    tape.free(coefficient)
    tape.free(clamped)
    return total_norm


def clip_cost(specs: Sequence[TensorSpec]) -> StepCost:
    """Return what write_clip's kernels cost: every gradient read twice and written once."""
    passes = _foreach_cost(_ungrouped(specs), ((1, 1), (1, 2)))
    # Zeroed partial sums and their reduction per dtype; stack, norm, add, reciprocal, mul, clamp.
    num_dtypes = len({spec.dtype for spec in specs})
    return StepCost(
        bytes_moved=passes.bytes_moved, num_kernels=passes.num_kernels + 2 * num_dtypes + 6
    )


def write_unscale(tape: Tape) -> int:
    """Append GradScaler.unscale_ (in place: scalars only).

    Returns the index of found_inf, which lives until GradScaler.update, after the optimizer's step.
    Source: torch 2.13 amp/grad_scaler.py unscale_ and _unscale_grads_.
    """
    scale64 = tape.alloc(8, "temporary")
    reciprocal64 = tape.alloc(8, "temporary")
    tape.free(scale64)
    inverse = tape.alloc(4, "temporary")
    tape.free(reciprocal64)
    found_inf = tape.alloc(4, "temporary")
    # _MultiDeviceReplicator copies both, even to the device they are on.
    found_inf_copy = tape.alloc(4, "temporary")
    inverse_copy = tape.alloc(4, "temporary")
    tape.free(inverse_copy)
    tape.free(inverse)
    tape.free(found_inf)
    return found_inf_copy


def unscale_cost(specs: Sequence[TensorSpec]) -> StepCost:
    """Return what GradScaler.unscale_ and step cost: gradients read and written, one `.item()`."""
    passes = _foreach_cost(_ungrouped(specs), ((1, 2),))
    # double, reciprocal, float, full, two copies.
    return StepCost(
        bytes_moved=passes.bytes_moved,
        num_kernels=passes.num_kernels + 6,
        num_synchronizations=1,
    )


def _foreach_cost(specs: Sequence[TensorSpec], passes: Iterable[tuple[int, int]]) -> StepCost:
    """Cost of foreach kernels, each given as (tensor lists, tensors read or written)."""
    lists = [
        same_dtype
        for group in _by_group(specs)
        for same_dtype in _by_dtype(specs[i] for i in group)
    ]
    bytes_moved = num_kernels = 0
    for depth, num_moved in passes:
        bytes_moved += num_moved * _total_bytes(specs)
        num_kernels += sum(_num_launches(tensors, depth) for tensors in lists)
    return StepCost(bytes_moved=bytes_moved, num_kernels=num_kernels)


def _num_launches(specs: Iterable[TensorSpec], depth: int) -> int:
    """Launches of multi_tensor_apply over `depth` lists of such tensors.

    A launch is full with _MAX_BLOCKS chunks, or when its last tensor slot's tensor is complete.
    """
    num_launches = num_blocks = num_tensors = 0
    for spec in specs:
        num_chunks = _ceil_div(spec.num_elements, _CHUNK_ELEMENTS)
        num_tensors += num_chunks > 0
        while num_chunks:
            num_taken = min(num_chunks, _MAX_BLOCKS - num_blocks)
            num_blocks += num_taken
            num_chunks -= num_taken
            slots_full = num_tensors == _MAX_TENSORS[depth] and not num_chunks
            if num_blocks == _MAX_BLOCKS or slots_full:
                num_launches += 1
                num_blocks = 0
                num_tensors = 1 if num_chunks else 0
    return num_launches + (num_blocks > 0)


def _alloc_state(tape: Tape, tensors: Iterable[StateTensor]) -> list[int]:
    return [tape.alloc(t.size_bytes, "optimizer_state") for t in tensors if not t.managed]


def _write_square_roots(tape: Tape, lists: Iterable[Sequence[TensorSpec]]) -> None:
    """One list of temporaries per dtype: a variable holds the last until the next replaces it."""
    previous: list[int] = []
    for specs in lists:
        roots = [tape.alloc(spec.size_bytes, "temporary") for spec in specs]
        _free_list(tape, previous)
        previous = roots
    _free_list(tape, previous)


def _write_rms(tape: Tape, category: str) -> int:
    """tensor.norm(2) / sqrt(numel): the quotient stays."""
    norm = tape.alloc(4, "temporary")
    quotient = tape.alloc(4, category)
    tape.free(norm)
    return quotient


def _write_passing(tape: Tape, size_bytes: int) -> None:
    tape.free(tape.alloc(size_bytes, "temporary"))


def _free(tape: Tape, index: int | None) -> None:
    if index is not None:
        tape.free(index)


def _free_list(tape: Tape, indices: Sequence[int]) -> None:
    """CPython drops a list's items from the end."""
    for index in reversed(indices):
        tape.free(index)


def _empty(specs: Sequence[TensorSpec]) -> States:
    return [[] for _ in specs]


def _by_group(specs: Sequence[TensorSpec]) -> list[list[int]]:
    """Positions of each parameter group, in the order of the groups."""
    groups: dict[int, list[int]] = {}
    for i, spec in enumerate(specs):
        groups.setdefault(spec.group, []).append(i)
    return [groups[number] for number in sorted(groups)]


def _in_group_order(specs: Sequence[TensorSpec]) -> list[int]:
    return [i for group in _by_group(specs) for i in group]


def _by_dtype(specs: Iterable[TensorSpec]) -> list[list[TensorSpec]]:
    """The foreach lists, one per dtype; the dtype seen last comes first."""
    lists: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        lists.setdefault(spec.dtype, []).append(spec)
    return list(reversed(lists.values()))


def _ungrouped(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Gradients as clipping and unscaling see them: in one list."""
    return [TensorSpec(shape=spec.shape, dtype=spec.dtype) for spec in specs]


def _factored(spec: TensorSpec) -> bool:
    return len(spec.shape) >= 2


def _row_and_column_bytes(spec: TensorSpec) -> tuple[int, int]:
    """float32 sums over the last and over the last but one dimension."""
    *rest, num_rows, num_columns = spec.shape
    return 4 * math.prod((*rest, num_rows)), 4 * math.prod((*rest, num_columns))


def _total_bytes(specs: Iterable[TensorSpec]) -> int:
    return sum(spec.size_bytes for spec in specs)


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
