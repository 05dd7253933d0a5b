"""Kernels that Inductor makes of a graph of ATen operations, and the tensors that it writes to memory.

The rules are Inductor's (torch 2.13 torch/_inductor): products, attention and convolutions run in kernels of
libraries; everything else is pointwise or a reduction. What is written (autotune.worker.trace.lowering) is
fused with what it reads, and with what reads the same, where both loop over the same numbers of rows and
columns (scheduler.py, codegen/simd.py can_fuse): what saves most bytes first.

A kernel's bytes are those of the tensors it reads from outside, once each, and of those it writes that others
read. `kernels_of` gives them in the order in which they run.

Known limitations
- Reductions over rows and over columns are one kernel where they read the same (mix_order_reduction).
- Patterns that Inductor replaces (unfused attention by a fused kernel), autotuning and padding are not
  modelled.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autotune.worker.trace.lowering import (
    Domain,
    Realizer,
    Written,
    base_of,
    bytes_of,
    outputs_of,
)

MOST_FUSED = 64
"""Most nodes of a kernel (max_fusion_size)."""
MOST_MIXED_READS = 10
"""Most tensors that a reduction over rows and columns reads (triton.mix_order_reduction_max_reads)."""
LEAST_MIXED_ROWS, LEAST_MIXED_ELEMENTS = 4096, 5 << 20
"""Least rows and elements that are reduced over rows and columns in one kernel; of rows at least twice as
many as columns, too (torch 2.13 _inductor/scheduler.py, MixOrderReduction.can_fuse)."""


@dataclass(eq=False, slots=True)
class FusedKernel:
    """A kernel: what it computes in order, the tensors it reads from outside and those it leaves."""

    parts: list[Written]
    reads: dict[fx.Node, int] = field(default_factory=dict)
    writes: list[fx.Node] = field(default_factory=list)
    passes: int = 1

    @property
    def node(self) -> fx.Node:
        """The result that it is named by: the last."""
        return self.parts[-1].node

    @property
    def is_of_library(self) -> bool:
        return self.parts[0].domain is None

    @property
    def reduction(self) -> Domain | None:
        """The loops of its reductions, if it has any."""
        domains = [p.domain for p in self.parts if p.domain is not None and p.domain.columns > 1]
        return max(domains, key=lambda d: d.rows * d.columns, default=None)


class _Group:
    __slots__ = ("after", "before", "number", "parts", "reads")

    def __init__(self, number: int, part: Written) -> None:
        self.number = number
        self.parts = [part]
        self.reads = dict(part.reads)
        self.before = 0
        self.after = 0


def kernels_of(
    graph: fx.Graph, backend: str = "cuda", *, rows_share: float = 1.0
) -> list[FusedKernel]:
    """The kernels that Inductor makes of a graph, in the order in which they run.

    `backend`: cuda, or cpu, where results that are put together are written, rows and columns are not
    reduced in one kernel, and what has no rows is not computed beside a reduction. `rows_share`: rows of
    the fewest samples that the graph stands for, by its own.
    """
    written = Realizer(graph, backend).written
    groups = _fused(written, is_cuda=backend == "cuda", rows_share=rows_share)
    returned = {base_of(node) for node in outputs_of(graph)}
    return _ordered(groups, returned)


def _producer(node: fx.Node) -> fx.Node:
    """The node whose kernel makes a base: of a part of several results, their operation."""
    if node.op == "call_function" and node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return source
    return node


def _fused(written: list[Written], *, is_cuda: bool, rows_share: float) -> list[_Group]:
    groups = {number: _Group(number, part) for number, part in enumerate(written)}
    of_node = {part.node: number for number, part in enumerate(written)}
    _relate(groups, of_node)
    while True:
        pairs = _pairs(groups)
        merged_any = False
        gone: dict[int, int] = {}

        def current(number: int, gone: dict[int, int] = gone) -> int:
            while number in gone:
                number = gone[number]
            return number

        for _, one, other in pairs:
            a, b = current(one), current(other)
            if a == b or not _may_fuse(
                groups[a], groups[b], is_cuda=is_cuda, rows_share=rows_share
            ):
                continue
            _merge(groups, a, b)
            gone[b] = a
            merged_any = True
        if not merged_any:
            return list(groups.values())
        of_node.update(
            {part.node: number for number, group in groups.items() for part in group.parts}
        )


def _relate(groups: dict[int, _Group], of_node: Mapping[fx.Node, int]) -> None:
    """Note which groups come before each, and which after, as bits."""
    for number in sorted(groups, key=lambda n: groups[n].parts[0].position):
        group = groups[number]
        for read in group.reads:
            source = of_node.get(_producer(read))
            if source is not None and source != number:
                group.before |= 1 << source | groups[source].before
    for number, group in groups.items():
        for source in _bits(group.before):
            groups[source].after |= 1 << number


def _bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _pairs(groups: dict[int, _Group]) -> list[tuple[Any, int, int]]:
    """Pairs of kernels that share tensors, those that share most bytes first."""
    of_buffer: dict[fx.Node, list[int]] = {}
    for number, group in groups.items():
        if group.parts[0].domain is None:
            continue
        for read in group.reads:
            of_buffer.setdefault(read, []).append(number)
        for part in group.parts:
            of_buffer.setdefault(part.node, []).append(number)
    shared: dict[tuple[int, int], int] = {}
    for buffer, numbers in of_buffer.items():
        for one, other in itertools.combinations(sorted(set(numbers)), 2):
            shared[one, other] = shared.get((one, other), 0) + bytes_of(buffer)
    found = []
    for (one, other), num_bytes in shared.items():
        a, b = groups[one], groups[other]
        distance = abs(a.parts[0].position - b.parts[0].position)
        found.append(((-num_bytes, distance), one, other))
    return sorted(found)


def _may_fuse(a: _Group, b: _Group, *, is_cuda: bool, rows_share: float) -> bool:
    if len(a.parts) + len(b.parts) > MOST_FUSED:
        return False
    if _reads_scattered(a, b) or _reads_scattered(b, a):
        return False
    if not _is_compatible(a, b, is_cuda=is_cuda, rows_share=rows_share):
        return False
    mask = ~(1 << a.number | 1 << b.number)
    return not (a.after & b.before & mask or b.after & a.before & mask)


def _reads_scattered(reader: _Group, other: _Group) -> bool:
    """Whether a kernel reads what another one writes to scattered places: all must be there before."""
    return any(part.extra_bytes and part.node in reader.reads for part in other.parts)


def _pays_to_mix(inner: Domain, rows_share: float) -> bool:
    """Whether rows and columns of so much are reduced in one kernel: what the L2 cache holds is not."""
    rows = inner.rows * rows_share
    return rows >= max(LEAST_MIXED_ROWS, 2 * inner.columns) and (
        rows * inner.columns >= LEAST_MIXED_ELEMENTS
    )


def _is_compatible(a: _Group, b: _Group, *, is_cuda: bool, rows_share: float) -> bool:
    """Whether all parts of both can run in one kernel's loops."""
    domains = [part.domain for group in (a, b) for part in group.parts]
    if any(domain is None for domain in domains):
        return False
    reductions = [d for d in domains if d is not None and d.columns > 1]
    points = [d for d in domains if d is not None and d.columns == 1]
    if any(part.is_alone for group in (a, b) for part in group.parts):
        return False
    if not reductions:
        return len({d.rows for d in points}) == 1
    if not is_cuda and _is_cut_up_anew(a, b):
        return False
    main = reductions[0]
    for other in reductions[1:]:
        if (other.rows, other.columns, other.is_inner) == (main.rows, main.columns, main.is_inner):
            continue
        is_mixed = (
            is_cuda
            and other.is_inner != main.is_inner
            and _pays_to_mix(main if main.is_inner else other, rows_share)
            and (other.rows, other.columns) == (main.columns, main.rows)
            and len({*a.reads, *b.reads}) <= MOST_MIXED_READS
        )
        if not is_mixed:
            return False
    inner = next((d for d in reductions if d.is_inner), None)
    return all(_suits(point, main, inner) for point in points)


def _is_cut_up_anew(a: _Group, b: _Group) -> bool:
    """Whether a result without rows would be computed in a reduction's loops: on a CPU none is."""
    return any(
        part.is_flat and part.domain is not None and part.domain.columns == 1
        for group in (a, b)
        for part in group.parts
    )


def _suits(point: Domain, main: Domain, inner: Domain | None) -> bool:
    """Whether a pointwise result can be computed in the loops of a reduction."""
    if point.rows == (inner or main).rows:
        return True
    if inner is None or point.rows != inner.rows * inner.columns:
        return False
    suffix = 1
    for size in (1, *reversed(point.ranges)):
        suffix *= size
        if suffix == inner.columns:
            return True
    return False


def _merge(groups: dict[int, _Group], a: int, b: int) -> None:
    keep, drop = groups[a], groups.pop(b)
    keep.parts = sorted([*keep.parts, *drop.parts], key=lambda part: part.position)
    made = {part.node for part in keep.parts}
    for read, num_bytes in drop.reads.items():
        keep.reads[read] = max(keep.reads.get(read, 0), num_bytes)
    keep.reads = {read: n for read, n in keep.reads.items() if _producer(read) not in made}
    bit_a, bit_b = 1 << a, 1 << b
    before = (keep.before | drop.before) & ~(bit_a | bit_b)
    after = (keep.after | drop.after) & ~(bit_a | bit_b)
    keep.before, keep.after = before, after
    for number, group in groups.items():
        if number == a:
            continue
        is_after, is_before = after >> number & 1, before >> number & 1
        if group.before & bit_b:
            group.before = group.before & ~bit_b
            is_after = 1
        if group.after & bit_b:
            group.after = group.after & ~bit_b
            is_before = 1
        if is_after:
            group.before |= before | bit_a
        if is_before:
            group.after |= after | bit_a


def _ordered(groups: list[_Group], returned: set[fx.Node]) -> list[FusedKernel]:
    of_node = {part.node: group.number for group in groups for part in group.parts}
    by_number = {group.number: group for group in groups}
    users: dict[fx.Node, set[int]] = {}
    for group in groups:
        for read in group.reads:
            users.setdefault(_producer(read), set()).add(group.number)
    left = sorted(groups, key=lambda g: max(part.position for part in g.parts))
    done: set[int] = set()
    found: list[FusedKernel] = []

    def visit(group: _Group) -> None:
        if group.number in done:
            return
        done.add(group.number)
        for source in sorted({of_node[p] for r in group.reads if (p := _producer(r)) in of_node}):
            if source != group.number:
                visit(by_number[source])
        found.append(_kernel(group, users, returned))

    for group in left:
        visit(group)
    return [kernel for kernel in found if kernel.writes or kernel.is_of_library]


def _kernel(
    group: _Group, users: Mapping[fx.Node, set[int]], returned: set[fx.Node]
) -> FusedKernel:
    is_of_library = group.parts[0].domain is None
    writes = [
        part.node
        for part in group.parts
        if is_of_library or part.node in returned or users.get(part.node, set()) - {group.number}
    ]
    return FusedKernel(parts=group.parts, reads=group.reads, writes=writes)
