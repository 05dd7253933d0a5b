"""Parameters, state and costs: the input and output of every optimizer's step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from autotune.common.dtypes import DTYPE_BYTES
from autotune.memory.allocator import Tape

States = list[list[int]]
"""Indices on the tape of each parameter's state on the device."""

LOW_PRECISION = frozenset({"float16", "bfloat16"})


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
    linear: bool = False
    """Weight of an nn.Linear: what GaLore and APOLLO project under `all-linear`."""
    # Asked for in every step of every optimizer.
    num_elements: int = field(init=False, repr=False, compare=False)
    size_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        num_elements = math.prod(self.shape)
        object.__setattr__(self, "num_elements", num_elements)
        object.__setattr__(self, "size_bytes", num_elements * DTYPE_BYTES[self.dtype])


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTensor:
    """One tensor that an optimizer keeps for one parameter."""

    size_bytes: int
    place: str = "device"
    """`device`; `managed`: CUDA managed memory, which torch's allocator does not see; `host`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListLaunches:
    """Sums over launches of multi_tensor_apply that are alike: each block works on one chunk of a tensor."""

    is_fused: bool
    """Whether it is a whole optimizer's kernel, of which fewer blocks fit on an SM."""
    num_moved: int
    """Number of values that are read or written for each of a list."""
    is_full: bool
    """Whether each launch has as many blocks as it may have."""
    count: int
    bytes_moved: int
    num_blocks: int
    num_rounds: int
    """Rounds of loads of the block of each launch that has most, one after the other."""

    @property
    def alike(self) -> tuple[bool, int, bool]:
        """A key of launches that are added up."""
        return self.is_fused, self.num_moved, self.is_full

    def __add__(self, other: ListLaunches) -> ListLaunches:
        return replace(
            self,
            count=self.count + other.count,
            bytes_moved=self.bytes_moved + other.bytes_moved,
            num_blocks=self.num_blocks + other.num_blocks,
            num_rounds=self.num_rounds + other.num_rounds,
        )

    def times(self, count: int) -> ListLaunches:
        """Return the sums of so many times these launches."""
        return replace(
            self,
            count=count * self.count,
            bytes_moved=count * self.bytes_moved,
            num_blocks=count * self.num_blocks,
            num_rounds=count * self.num_rounds,
        )


def added_lists(launches: Iterable[ListLaunches]) -> tuple[ListLaunches, ...]:
    """Return sums of launches that are alike."""
    found: dict[tuple[bool, int, bool], ListLaunches] = {}
    for each in launches:
        found[each.alike] = found[each.alike] + each if each.alike in found else each
    return tuple(found.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Cost of one call on the GPU, for a roofline."""

    bytes_moved: int
    """Bytes read and written, each pass over a tensor counted."""
    num_kernels: int
    """Number of kernel launches."""
    num_synchronizations: int = 0
    """Times the host waits until the GPU is idle."""
    host_bytes: int = 0
    """Bytes copied between device and host."""
    matmul_flops: tuple[tuple[str, float], ...] = ()
    """Operations of matrix products, as (dtype, operations)."""
    num_quantized_kernels: int = 0
    """Number of kernels that update 8-bit state, among `num_kernels`."""
    quantized_bytes: int = 0
    """Bytes that those move, among `bytes_moved`."""
    num_quantized_values: int = 0
    """Number of values of 8-bit state that they update."""
    host_operations: float = 0.0
    """Work of the host beside its launches, in operations of a forward pass."""
    lists: tuple[ListLaunches, ...] = ()
    """Launches over lists of tensors, among `num_kernels`; they move bytes of `bytes_moved`."""

    def __add__(self, other: StepCost) -> StepCost:
        flops = dict(self.matmul_flops)
        for dtype, added in other.matmul_flops:
            flops[dtype] = flops.get(dtype, 0) + added
        return StepCost(
            bytes_moved=self.bytes_moved + other.bytes_moved,
            num_kernels=self.num_kernels + other.num_kernels,
            num_synchronizations=self.num_synchronizations + other.num_synchronizations,
            host_bytes=self.host_bytes + other.host_bytes,
            matmul_flops=tuple(flops.items()),
            num_quantized_kernels=self.num_quantized_kernels + other.num_quantized_kernels,
            quantized_bytes=self.quantized_bytes + other.quantized_bytes,
            num_quantized_values=self.num_quantized_values + other.num_quantized_values,
            host_operations=self.host_operations + other.host_operations,
            lists=added_lists((*self.lists, *other.lists)),
        )

    def times(self, count: int) -> StepCost:
        """Return what so many calls cost."""
        return StepCost(
            bytes_moved=count * self.bytes_moved,
            num_kernels=count * self.num_kernels,
            num_synchronizations=count * self.num_synchronizations,
            host_bytes=count * self.host_bytes,
            matmul_flops=tuple((dtype, count * flops) for dtype, flops in self.matmul_flops),
            num_quantized_kernels=count * self.num_quantized_kernels,
            quantized_bytes=count * self.quantized_bytes,
            num_quantized_values=count * self.num_quantized_values,
            host_operations=count * self.host_operations,
            lists=tuple(each.times(count) for each in self.lists),
        )


NO_COST = StepCost(bytes_moved=0, num_kernels=0)


class Algorithm(Protocol):
    """How an optimizer's step treats memory."""

    def state(self, spec: TensorSpec) -> tuple[StateTensor, ...]:
        """Return the tensors that the optimizer keeps for one parameter, in order of allocation."""
        ...

    def write_step(self, tape: Tape, specs: Sequence[TensorSpec], states: States | None) -> States:
        """Append one step and return the indices of the state.

        Pass None the first time, so that the state is allocated too; then what was returned.
        """
        ...

    def cost(self, specs: Sequence[TensorSpec]) -> StepCost:
        """Return what a step costs once the state exists."""
        ...


class Scope:
    """The variables of a function that runs: a tensor is freed when its name means another.

    `x = f(x)` makes the new tensor before the old one goes; a loop's variables outlive its rounds.
    """

    def __init__(self, tape: Tape, *names: str) -> None:
        self.tape = tape
        self._index_of: dict[str, int | None] = dict.fromkeys(names)

    def new(self, name: str, size_bytes: int, *, is_product: bool = False) -> None:
        """Bind the name to a tensor that is made now (`name = ...`), a product of matrices or another."""
        index = self.tape.alloc(size_bytes, "temporary")
        if is_product and self.tape.product_bytes:
            write_passing(self.tape, self.tape.product_bytes)
        self.drop(name)
        self._index_of[name] = index

    def rename(self, name: str, new_name: str) -> None:
        """Run `new_name = name`, after which `name` means nothing."""
        index, self._index_of[name] = self._index_of[name], None
        self.drop(new_name)
        self._index_of[new_name] = index

    def drop(self, *names: str) -> None:
        """Unbind the names: they mean no tensor of ours from now on."""
        for name in names:
            index, self._index_of[name] = self._index_of[name], None
            if index is not None:
                self.tape.free(index)

    def close(self) -> None:
        """Return from the function: CPython drops its variables in the order of their names."""
        self.drop(*self._index_of)


def alloc_state(tape: Tape, tensors: Iterable[StateTensor]) -> list[int]:
    return [tape.alloc(t.size_bytes, "optimizer_state") for t in tensors if t.place == "device"]


def write_passing(tape: Tape, size_bytes: int) -> None:
    """Append a temporary that is gone at once."""
    tape.free(tape.alloc(size_bytes, "temporary"))


def free_list(tape: Tape, indices: Sequence[int]) -> None:
    """Free a list's items from the end, as CPython drops them."""
    for index in reversed(indices):
        tape.free(index)


def empty_states(specs: Sequence[TensorSpec]) -> States:
    return [[] for _ in specs]


def by_group(specs: Sequence[TensorSpec]) -> list[list[int]]:
    """Positions of each parameter group, in the order of the groups."""
    groups: dict[int, list[int]] = {}
    for i, spec in enumerate(specs):
        groups.setdefault(spec.group, []).append(i)
    return [groups[number] for number in sorted(groups)]


def in_group_order(specs: Sequence[TensorSpec]) -> list[int]:
    return [i for group in by_group(specs) for i in group]


def total_bytes(specs: Iterable[TensorSpec]) -> int:
    return sum(spec.size_bytes for spec in specs)


def total_state_bytes(algorithm: Algorithm, specs: Iterable[TensorSpec]) -> int:
    return sum(
        count * sum(tensor.size_bytes for tensor in algorithm.state(spec))
        for spec, count in Counter(specs).items()
    )


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
