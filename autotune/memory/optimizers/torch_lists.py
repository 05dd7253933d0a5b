"""torch.optim's kernels over lists of tensors, and what the Trainer runs before a step."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autotune.common.dtypes import DTYPE_BYTES
from autotune.memory.allocator import Tape
from autotune.memory.optimizers.core import (
    Algorithm,
    ListLaunches,
    States,
    StateTensor,
    StepCost,
    TensorSpec,
    added_lists,
    alloc_state,
    by_group,
    ceil_div,
    empty_states,
    free_list,
    in_group_order,
    total_bytes,
)

# torch 2.13 ATen/native/cuda/MultiTensorApply.cuh: kChunkSize, depth_to_max_blocks and
# depth_to_max_tensors of builds below CUDA 13 (above it 7 times as many fit, so fewer launches).
_CHUNK_ELEMENTS = 65_536
_ROUND_ELEMENTS = 512 * 4  # kBlockSize threads, of which each loads kILP values
_MAX_BLOCKS = 320
_MAX_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLists(Algorithm):
    """torch.optim's foreach and fused kernels; state in the parameter's dtype."""

    num_moments: int
    passes: tuple[tuple[int, int], ...]
    """The step's kernels as (tensor lists in a launch, tensors read or written)."""
    num_temporaries: int = 0
    """Lists as large as the parameters that a step makes, such as the moments' square roots."""
    step_on_device: bool = False
    """A float32 step count per parameter; else it is on the CPU."""
    state_at_once: bool = False
    """Whether the optimizer makes all state when it is made itself."""

    def state(self, spec: TensorSpec) -> tuple[StateTensor, ...]:
        moments = (StateTensor(size_bytes=spec.size_bytes),) * self.num_moments
        return (StateTensor(size_bytes=4), *moments) if self.step_on_device else moments

    def write_step(self, tape: Tape, specs: Sequence[TensorSpec], states: States | None) -> States:
        kept = empty_states(specs) if states is None else states
        if states is None and self.state_at_once:
            for i in in_group_order(specs):
                kept[i] = alloc_state(tape, self.state(specs[i]))
        for group in by_group(specs):
            if states is None and not self.state_at_once:
                for i in group:
                    kept[i] = alloc_state(tape, self.state(specs[i]))
            self._write_temporaries(tape, _by_dtype([specs[i] for i in group]))
        return kept

    def _write_temporaries(self, tape: Tape, lists: Iterable[Sequence[TensorSpec]]) -> None:
        """Append lists per dtype: a variable holds each of them until the next dtype's replaces it."""
        previous: list[list[int]] = [[] for _ in range(self.num_temporaries)]
        for specs in lists:
            for variable, old in enumerate(previous):
                previous[variable] = _alloc_list(tape, specs)
                free_list(tape, old)
        for last in previous:
            free_list(tape, last)

    def cost(self, specs: Sequence[TensorSpec]) -> StepCost:
        # One kernel does it all where the count is on the device.
        update = _foreach_cost(specs, self.passes, is_fused=self.step_on_device)
        if not self.step_on_device:
            return update
        counts = [TensorSpec(shape=(), dtype="float32", group=spec.group) for spec in specs]
        return update + _foreach_cost(counts, ((1, 2),))


@dataclass(frozen=True, kw_only=True, slots=True)
class OneByOne(Algorithm):
    """A loop over the weights: torch.optim runs it in place of foreach kernels where a weight is a DTensor.

    Source: torch 2.13 optim/optimizer.py _default_to_fused_or_foreach; optim/adam.py _single_tensor_adam,
    whose denominator stays until the next weight's takes its name.
    """

    lists: TensorLists

    def state(self, spec: TensorSpec) -> tuple[StateTensor, ...]:
        return self.lists.state(spec)

    def write_step(self, tape: Tape, specs: Sequence[TensorSpec], states: States | None) -> States:
        kept = empty_states(specs) if states is None else states
        for group in by_group(specs):
            if states is None:
                for i in group:
                    kept[i] = alloc_state(tape, self.state(specs[i]))
            denominator: list[int] = []
            for i in group if self.lists.num_temporaries else ():
                root = tape.alloc(specs[i].size_bytes, "temporary")
                quotient = tape.alloc(specs[i].size_bytes, "temporary")
                free_list(tape, [*denominator, root])
                denominator = [quotient]
            free_list(tape, denominator)
        return kept

    def cost(self, specs: Sequence[TensorSpec]) -> StepCost:
        num_moved = sum(moved for _, moved in self.lists.passes)
        return StepCost(
            bytes_moved=num_moved * total_bytes(specs),
            num_kernels=len(self.lists.passes) * len(specs),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleFree(Algorithm):
    """schedulefree's foreach code: a second copy of the weights (z) is their state.

    Its normalised gradient is written over the gradient. The list of denominators is one variable,
    which the next parameter group's replaces.
    """

    num_moments: int
    passes: tuple[tuple[int, int], ...]
    starts_bare: bool = False
    """Whether the first steps have no denominators (RAdam, silent_sgd_phase)."""

    def state(self, spec: TensorSpec) -> tuple[StateTensor, ...]:
        return (StateTensor(size_bytes=spec.size_bytes),) * (1 + self.num_moments)

    def write_step(self, tape: Tape, specs: Sequence[TensorSpec], states: States | None) -> States:
        kept = empty_states(specs) if states is None else states
        bare = not self.num_moments or (self.starts_bare and states is None)
        denominators: list[int] = []
        for group in by_group(specs):
            if states is None:
                for i in group:
                    kept[i] = alloc_state(tape, self.state(specs[i]))
            if not bare:
                previous, denominators = denominators, _alloc_list(tape, [specs[i] for i in group])
                free_list(tape, previous)
        free_list(tape, denominators)
        return kept

    def cost(self, specs: Sequence[TensorSpec]) -> StepCost:
        return _foreach_cost(specs, self.passes)


def write_clip(tape: Tape, specs: Sequence[TensorSpec]) -> int:
    """Append torch.nn.utils.clip_grad_norm_ (foreach) over parameters in the model's order.

    Returns the index of the total norm, a scalar that the Trainer keeps until the next one.
    Source: torch 2.13 nn/utils/clip_grad.py, ATen/native/cuda/ForeachReduceOp.cu.
    """
    norms: list[int] = []
    norm_dtypes = {spec.dtype for spec in specs}
    for group in _by_dtype(specs):
        # Partial sums in float32: as many per tensor as the largest has chunks.
        num_chunks = max(ceil_div(spec.num_elements, _CHUNK_ELEMENTS) for spec in group)
        partial_sums = tape.alloc(len(group) * num_chunks * 4, "temporary")
        norms += [tape.alloc(DTYPE_BYTES[spec.dtype], "temporary") for spec in group]
        tape.free(partial_sums)
    scalar_bytes = DTYPE_BYTES[norm_dtypes.pop()] if len(norm_dtypes) == 1 else 4
    stacked = tape.alloc(len(specs) * scalar_bytes, "temporary")
    total_norm = tape.alloc(scalar_bytes, "temporary")
    tape.free(stacked)
    free_list(tape, norms)
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
    passes = _lists_cost(_by_dtype(specs), ((1, 1), (1, 2)))
    # Zeroed partial sums and their reduction per dtype; stack, norm, add, reciprocal, mul, clamp.
    num_dtypes = len({spec.dtype for spec in specs})
    return StepCost(
        bytes_moved=passes.bytes_moved,
        num_kernels=passes.num_kernels + 2 * num_dtypes + 6,
        lists=passes.lists,
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
    passes = _lists_cost(_by_dtype(specs), ((1, 2),))
    # double, reciprocal, float, full, two copies.
    return StepCost(
        bytes_moved=passes.bytes_moved,
        num_kernels=passes.num_kernels + 6,
        num_synchronizations=1,
        lists=passes.lists,
    )


def _foreach_cost(
    specs: Sequence[TensorSpec], passes: Iterable[tuple[int, int]], *, is_fused: bool = False
) -> StepCost:
    """Cost of foreach kernels over parameters in their groups; for the passes see _lists_cost."""
    lists = [
        same_dtype for group in by_group(specs) for same_dtype in _by_dtype(specs[i] for i in group)
    ]
    return _lists_cost(lists, passes, is_fused=is_fused)


def _lists_cost(
    lists: Sequence[Sequence[TensorSpec]],
    passes: Iterable[tuple[int, int]],
    *,
    is_fused: bool = False,
) -> StepCost:
    """Cost of foreach kernels, each given as (tensor lists, tensors read or written)."""
    num_bytes = sum(map(total_bytes, lists))

    @functools.cache
    def launches_of(depth: int) -> Counter[tuple[int, int, int]]:
        return Counter(itertools.chain.from_iterable(launches_over(each, depth) for each in lists))

    alike: Counter[tuple[int, int, int, int]] = Counter()
    bytes_moved = 0
    for depth, num_moved in passes:
        bytes_moved += num_moved * num_bytes
        for each, count in launches_of(depth).items():
            alike[num_moved, *each] += count
    launches = [
        ListLaunches(
            is_fused=is_fused,
            num_moved=num_moved,
            is_full=num_blocks == _MAX_BLOCKS,
            count=1,
            bytes_moved=num_moved * moved,
            num_blocks=num_blocks,
            num_rounds=ceil_div(longest, _ROUND_ELEMENTS),
        ).times(count)
        for (num_moved, moved, num_blocks, longest), count in alike.items()
    ]
    return StepCost(bytes_moved=bytes_moved, num_kernels=alike.total(), lists=added_lists(launches))


def launches_over(specs: Iterable[TensorSpec], depth: int) -> Iterator[tuple[int, int, int]]:
    """Launches of multi_tensor_apply over `depth` lists of such tensors.

    Of each: bytes of its part of one list, blocks, and elements of the longest chunk. A launch is full with
    _MAX_BLOCKS chunks, or when its last tensor slot's tensor is complete.
    """
    size_bytes = num_blocks = num_tensors = longest = 0
    for spec in specs:
        left = spec.num_elements
        element_bytes = DTYPE_BYTES[spec.dtype]
        num_tensors += left > 0
        while left:
            num_taken = min(ceil_div(left, _CHUNK_ELEMENTS), _MAX_BLOCKS - num_blocks)
            taken = min(left, num_taken * _CHUNK_ELEMENTS)
            num_blocks += num_taken
            size_bytes += taken * element_bytes
            longest = max(longest, min(taken, _CHUNK_ELEMENTS))
            left -= taken
            slots_full = num_tensors == _MAX_TENSORS[depth] and not left
            if num_blocks == _MAX_BLOCKS or slots_full:
                yield size_bytes, num_blocks, longest
                size_bytes = num_blocks = longest = 0
                num_tensors = 1 if left else 0
    if num_blocks:
        yield size_bytes, num_blocks, longest


def _alloc_list(tape: Tape, specs: Sequence[TensorSpec]) -> list[int]:
    return [tape.alloc(spec.size_bytes, "temporary") for spec in specs]


def _by_dtype(specs: Iterable[TensorSpec]) -> list[list[TensorSpec]]:
    """The foreach lists, one per dtype; the dtype seen last comes first.

    Clipping and unscaling see all gradients so, an optimizer those of one group.
    """
    lists: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        lists.setdefault(spec.dtype, []).append(spec)
    return list(reversed(lists.values()))
