"""Results of a graph of ATen operations that Inductor computes into memory, and their loops.

A pointwise result is computed where it is used, in each kernel that uses it, unless a library's kernel reads
it, the graph returns it, or it takes too many reads (torch 2.13 torch/_inductor/ir.py,
StorageBox.should_realize_on_reuse; config.py). Reductions are computed into memory.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

REALIZE_READS = 4
"""Reads from which a result that several use is written (config.realize_reads_threshold)."""
MOST_READS = 8
"""Reads beyond which any result is written (realize_acc_reads_threshold)."""
REALIZE_OPERATIONS = 30
"""Operations from which a result that several use is written (realize_opcount_threshold)."""

_VIEWS = {
    aten.view.default, aten.permute.default, aten.expand.default, aten.slice.Tensor,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.select.int, aten.alias.default, aten.detach.default, aten._unsafe_view.default,
    aten.t.default, aten.transpose.int, aten.as_strided.default, aten.reshape.default,
    aten.split_with_sizes.default, aten.split.Tensor, aten.unbind.int, aten.diagonal.default,
    aten.lift_fresh_copy.default, aten.unfold.default,
}  # fmt: skip
_CONSTANTS = {
    aten.full.default, aten.scalar_tensor.default, aten.full_like.default, aten.zeros.default,
    aten.ones.default, aten.empty.memory_format, torch.ops.prims.iota.default,
    aten.zeros_like.default, aten.ones_like.default, aten.new_zeros.default,
    aten.arange.default, aten.arange.start_step, aten.arange.start,
}  # fmt: skip
"""Operations whose results are written into the kernels that use them."""
_REDUCTIONS = {
    aten.sum, aten.mean, aten.amax, aten.amin, aten.var_mean, aten.var, aten.any, aten.all, aten.prod,
    aten.argmax, aten.argmin, aten.cumsum, aten.linalg_vector_norm,
}  # fmt: skip
_OF_LIBRARIES = (
    "mm", "bmm", "addmm", "baddbmm", "addbmm", "_int_mm", "_scaled_mm", "_grouped_mm", "convolution",
    "convolution_backward", "sort", "topk", "nonzero", "embedding_bag",
)  # fmt: skip
_SCATTERS = {
    aten.index_put, aten.scatter_add, aten.scatter, aten._unsafe_index_put, aten.index_put_,
    aten.embedding_dense_backward, aten._unsafe_masked_index_put_accumulate,
}  # fmt: skip
"""Operations that write into a copy of their first argument, in a kernel apart."""


@dataclass(frozen=True, slots=True)
class Domain:
    """The loops of a kernel: so many rows, and so many columns that are reduced; 1: none are."""

    rows: int
    columns: int = 1
    is_inner: bool = True
    """Whether the reduced dimensions are the last."""
    ranges: tuple[int, ...] = ()


@dataclass(eq=False, slots=True)
class Written:
    """A result that is computed into memory, with what is computed on the way to it."""

    node: fx.Node
    position: int
    domain: Domain | None
    """None: a library's kernel."""
    reads: dict[fx.Node, int]
    """Tensors in memory that it reads, and how many bytes of each."""
    extra_bytes: int = 0
    """Bytes that it writes besides its result."""
    is_alone: bool = False
    """Whether it is fused with nothing."""

    @property
    def is_pointwise(self) -> bool:
        """Whether each of its elements is computed by itself."""
        return self.domain is not None and self.domain.columns == 1 and not self.extra_bytes

    @property
    def is_flat(self) -> bool:
        """Whether it reads its inputs from end to end, and so has no rows."""
        return self.domain is not None and all(
            numel_of(read) == self.domain.rows for read in self.reads
        )


def value_of(node: Any) -> Any:
    return node.meta.get("val")


def bytes_of(node: fx.Node) -> int:
    """Bytes of a tensor, an expanded one counted once."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return 0
    numbers = (n for n, stride in zip(value.shape, value.stride(), strict=True) if stride or n == 0)
    return math.prod(numbers) * value.element_size()


def is_view(node: fx.Node) -> bool:
    return node.target is operator.getitem or node.target in _VIEWS


def base_of(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows; a part of a result of several is one of its own."""
    while node.op == "call_function" and is_view(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if node.target is operator.getitem and not is_view(source):
            return node
        node = source
    return node


def outputs_of(graph: fx.Graph) -> list[fx.Node]:
    (output,) = (node for node in graph.nodes if node.op == "output")
    return [node for node in _flat(output.args) if isinstance(node, fx.Node)]


def _flat(value: Any) -> Iterable[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "_overloadpacket", node.target)


def is_of_library(node: fx.Node) -> bool:
    """Whether a library's kernel computes it."""
    name = getattr(_packet(node), "__name__", "")
    return name in _OF_LIBRARIES or "attention" in name or "flash" in name


def fuse_products(graph: fx.Graph) -> None:
    """Replace the sum of a product and a matrix by one operation where Inductor does.

    It does where something else than a pointwise operation reads the sum, as the caller does (torch 2.13
    torch/_inductor/fx_passes/post_grad.py, is_valid_addmm_fusion): gradients of a tied embedding and head.
    """
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or all(map(_is_pointwise, node.users)):
            continue
        for product, other in (
            map(_without_pairs, node.args),
            map(_without_pairs, node.args[::-1]),
        ):
            is_sum = isinstance(product, fx.Node) and isinstance(other, fx.Node)
            if not is_sum or product.target is not aten.mm.default or _num_users(product) > 1:
                continue
            if value_of(other).dtype != value_of(node).dtype:
                continue
            with graph.inserting_before(node):
                name = node.name
                fused = graph.call_function(aten.addmm.default, (other, *product.args))
            fused.meta.update(node.meta)
            node.replace_all_uses_with(fused)
            graph.erase_node(node)
            fused.name = name
            break
    graph.eliminate_dead_code()


def _without_pairs(node: Any) -> Any:
    """The node that two permutations in turn leave as it is (joint_graph.py, pointless_permute_pair)."""
    is_pair = _is_permutation(node) and _is_permutation(node.args[0])
    if not is_pair:
        return node
    outer, inner = node.args[1], node.args[0].args[1]
    is_identity = all(inner[place] == number for number, place in enumerate(outer))
    return node.args[0].args[0] if is_identity else node


def _is_permutation(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.permute.default


def _is_pointwise(user: fx.Node) -> bool:
    if user.op != "call_function":
        return False
    if is_view(user):
        return all(map(_is_pointwise, user.users))
    return torch.Tag.pointwise in getattr(user.target, "tags", ())


class Realizer:
    """Goes through a graph and says what is written into memory, as Inductor's lowering does."""

    def __init__(self, graph: fx.Graph, backend: str) -> None:
        self._writes_cat = backend == "cpu"
        self._virtual: dict[fx.Node, tuple[dict[fx.Node, int], int]] = {}
        """Reads and number of operations of each node that is not written."""
        self.written: list[Written] = []
        self._returned = {base_of(node) for node in outputs_of(graph)}
        self._made: set[fx.Node] = set()
        for position, node in enumerate(graph.nodes):
            if node.op == "call_function" and not is_view(node):
                self._lower(node, position)

    def _lower(self, node: fx.Node, position: int) -> None:
        if node.target in _CONSTANTS:
            if node in self._returned:
                self._write(node, position, Domain(numel_of(node), ranges=_shape(node)), {})
            else:
                self._virtual[node] = ({}, 0)
            return
        if not isinstance(value_of(node), (torch.Tensor, tuple, list)):
            return
        if is_of_library(node):
            for source in node.all_input_nodes:
                self._realize(source, position)
            self._write(node, position, None, self._reads(node))
            return
        packet = _packet(node)
        reads, operations = self._reads(node), self._operations(node)
        if packet in _SCATTERS and not _writes_over_a_constant(node):
            self._write(node, position, Domain(_numel_of_values(node)), reads)
            self.written[-1].extra_bytes = bytes_of(node)
        elif packet in _REDUCTIONS:
            self._write(node, position, _reduction(node), reads)
        elif node in self._returned or self._must_write(node, reads, operations):
            domain = Domain(numel_of(node), ranges=_shape(node))
            self._write(node, position, domain, reads)
            self.written[-1].is_alone = self._writes_cat and packet is aten.cat
        else:
            self._virtual[node] = (reads, operations)

    def _must_write(self, node: fx.Node, reads: Mapping[fx.Node, int], operations: int) -> bool:
        if len(reads) > MOST_READS:
            return True
        if self._writes_cat and _packet(node) is aten.cat:
            return True
        if _num_users(node) < 2:
            return False
        return len(reads) > REALIZE_READS or operations > REALIZE_OPERATIONS

    def _write(
        self,
        node: fx.Node,
        position: int,
        domain: Domain | None,
        reads: dict[fx.Node, int],
    ) -> None:
        self.written.append(Written(node, position, domain, dict(reads)))
        self._made.add(node)

    def _realize(self, source: fx.Node, position: int) -> None:
        """Write what a library's kernel reads, where it is not in memory yet."""
        base = base_of(source)
        if base.op != "call_function" or base in self._made or base not in self._virtual:
            return
        reads, _ = self._virtual.pop(base)
        domain = Domain(numel_of(base), ranges=_shape(base))
        if base.target in _CONSTANTS and not bytes_of(base):
            return
        # It comes before what needs it.
        self.written.append(Written(base, position, domain, dict(reads)))
        self._made.add(base)

    def _reads(self, node: fx.Node) -> dict[fx.Node, int]:
        found: dict[fx.Node, int] = {}
        for source in node.all_input_nodes:
            base = base_of(source)
            if base in self._virtual:
                for read, num_bytes in self._virtual[base][0].items():
                    found[read] = max(found.get(read, 0), num_bytes)
            elif isinstance(value_of(base), torch.Tensor):
                seen = found.get(base, 0) + min(bytes_of(source), bytes_of(base))
                found[base] = min(seen, bytes_of(base))
        if _packet(node) in (aten.embedding, aten.gather, aten.index):
            table = base_of(node.all_input_nodes[0])
            if table in found:
                found[table] = min(found[table], bytes_of(node))
        return found

    def _operations(self, node: fx.Node) -> int:
        return 1 + sum(
            self._virtual[base][1]
            for source in node.all_input_nodes
            if (base := base_of(source)) in self._virtual
        )


def _writes_over_a_constant(node: fx.Node) -> bool:
    """Whether one number goes into a constant, at a place of each row: Inductor compares places instead.

    Source: torch 2.13 torch/_inductor/fx_passes/post_grad.py, scatter_upon_const_tensor.
    """
    if node.target is not aten.scatter.value:
        return False
    constant, dim, places = node.args[:3]
    assert isinstance(constant, fx.Node)
    return constant.target in _CONSTANTS and value_of(places).shape[dim] == 1


def _num_users(node: fx.Node) -> int:
    """Number of operations that use it, through views too."""
    return sum(_num_users(user) if is_view(user) else 1 for user in node.users)


def numel_of(node: fx.Node) -> int:
    return int(value_of(node).numel())


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(int(n) for n in value_of(node).shape)


def _numel_of_values(node: fx.Node) -> int:
    """Number of elements that a scatter writes."""
    return max(
        int(value_of(source).numel())
        for source in node.all_input_nodes[1:]
        if isinstance(value_of(source), torch.Tensor)
    )


def _reduction(node: fx.Node) -> Domain:
    source = node.all_input_nodes[0]
    shape = _shape(source)
    numel = math.prod(shape)
    if _packet(node) is aten.cumsum:
        columns = shape[int(node.args[1])] if shape else 1  # type: ignore[arg-type]
        return Domain(numel // max(columns, 1), columns, ranges=shape)
    result = value_of(node)
    result = result[0] if isinstance(result, (tuple, list)) else result
    rows = int(result.numel())
    dims = node.args[1] if len(node.args) > 1 else None
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, (list, tuple)) or not dims:
        return Domain(rows, numel // max(rows, 1), ranges=shape)
    places = sorted(int(d) % len(shape) for d in dims if isinstance(d, int))
    kept = [i for i in range(len(shape)) if i not in places and shape[i] != 1]
    reduced = [i for i in places if shape[i] != 1]
    is_inner = not kept or not reduced or max(kept) < min(reduced)
    return Domain(rows, numel // max(rows, 1), is_inner, shape)
