"""A traced step, extrapolated: in layers, in the micro-batch and in the LoRA rank.

The worker traces a few layers with prime dimensions (autotune.worker.trace). From its answer this
module makes the event lists of the whole model: the blocks of the middle period of layers are
copied, and each reference to a neighbour's tensor is shifted with the copy. Sizes are
`coefficient x micro_batch^i x rank^j`.

Raises BrokenTrace when the blocks do not repeat the way this assumes.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune.optimizer_steps import TensorSpec

Term = tuple[int, int, int]
"""(coefficient, power of the micro-batch, power of the rank)."""

Place = tuple[str, int]
"""(stack, layer): which of several stacks, empty for the first; layer -1 outside of all."""

SETUP_PHASES = ("weights", "adapter", "settled")
FORWARD_PHASES = ("batch", "embed", "forward", "head")
# A second stack of layers (a decoder's, beside an encoder's) has its number behind the phase.


Array = npt.NDArray[np.int64]
Events = npt.NDArray[np.int32]
"""In order: i when tensor i is allocated, ~i when it is freed."""


class BrokenTrace(Exception):
    """The blocks of a trace do not repeat from layer to layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedKernel:
    name: str
    dtype: str
    flops: Term
    moved: tuple[Term, ...]
    """Bytes read and written, a sum."""
    recomputed: bool
    """Part of activation checkpointing's second forward pass."""
    count: int
    chunk_moved: tuple[Term, ...] | None = None
    """Not None: handles a chunk of tokens, `flops` per token of it. Bytes per token of it."""
    repeated: bool = False
    """Launched for each chunk but the first."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel at one micro-batch and rank."""

    kernel: TracedKernel
    flops: float
    """Of one launch."""
    bytes_moved: float
    """Of one launch."""
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedParameter:
    """One weight of the whole model."""

    number: int
    """Of its tensor."""
    place: Place
    shape: tuple[Term, ...]
    dtype: str
    trainable: bool
    group: int
    embedding: bool


def evaluate(term: Sequence[int], micro_batch: int, rank: int) -> int:
    coefficient, batch_power, rank_power = term
    value: int = coefficient * micro_batch**batch_power * rank**rank_power
    return value


def _embedding_partials(numbers: Sequence[int]) -> int:
    """Partial sums of an embedding's backward: (indices, rows, bytes per row).

    EmbeddingBackwardKernel.cu: `numel / 10 + min(numel, num_weights)` rows; none up to 3,072
    indices (Embedding.cu).
    """
    indices, rows, row_bytes = numbers
    return 0 if indices <= 3072 else row_bytes * (indices // 10 + min(indices, rows))


def _near(numbers: Sequence[int]) -> int:
    """A tensor that is one longer or shorter than a size that is a term: (size, bytes each, +1 or -1)."""
    size, item_bytes, beyond = numbers
    return (size + beyond) * item_bytes


_RULES = {"embedding": _embedding_partials, "near": _near}


def _liger_rows(num_tokens: int, num_parts: int) -> int:
    """Tokens of a chunk of Liger's fused loss: as many as make its logits as large as its input.

    liger-kernel 0.8.5 ops/fused_linear_cross_entropy.py: chunk_size.
    """
    return min(1 << (-(-num_tokens // num_parts) - 1).bit_length(), num_tokens)


_CHUNK_ROWS: dict[str, Callable[[int, int], int]] = {"liger": _liger_rows, "trl": min}
"""Tokens of a chunk, by the name of the rule: (tokens of the micro-batch, constant)."""


def is_setup(phase: str) -> bool:
    return phase.partition(" ")[0] in SETUP_PHASES


def is_forward(phase: str) -> bool:
    return phase.partition(" ")[0] in FORWARD_PHASES


class Terms:
    """Many terms, evaluated together."""

    def __init__(self, terms: Sequence[Term]) -> None:
        table = np.asarray(terms, dtype=np.int64).reshape(-1, 3)
        self._coefficients, self._batch_powers, self._rank_powers = table.T

    def at(self, micro_batch: int, rank: int) -> Array:
        values: Array = (
            self._coefficients * micro_batch**self._batch_powers * rank**self._rank_powers
        )
        return values


class Sums:
    """Many sums of terms, evaluated together."""

    def __init__(self, sums: Sequence[Sequence[Term]]) -> None:
        self._terms = Terms([term for terms in sums for term in terms])
        self._owners = np.repeat(np.arange(len(sums)), [len(terms) for terms in sums])
        self._length = len(sums)

    def at(self, micro_batch: int, rank: int) -> npt.NDArray[np.float64]:
        values = self._terms.at(micro_batch, rank).astype(np.float64)
        sums = np.bincount(self._owners, weights=values, minlength=self._length)
        return np.asarray(sums, dtype=np.float64)


class Trace:
    """The events and kernels of one micro-step of the whole model, sizes still symbolic.

    Tensors are numbered; `setup` allocates weights, `first` is a micro-step that makes the
    gradients (and the library workspaces, which stay), `again` the same once workspaces exist,
    `next` one that adds to gradients already there.
    """

    def __init__(self, answer: dict[str, Any]) -> None:
        layers = _Layers(**answer["layers"])
        blocks: list[dict[str, Any]] = answer["blocks"]
        self._tensors: list[dict[str, Any]] = answer["tensors"]
        self._rules = [(i, t["rule"]) for i, t in enumerate(self._tensors) if "rule" in t]
        self._terms = Terms([tensor["size"] for tensor in self._tensors])
        self._chunks: tuple[str, Term, int, int] | None = answer.get("chunks")
        self._chunked = [i for i, tensor in enumerate(self._tensors) if tensor.get("chunked")]
        copies = _Copies(self._tensors, blocks, layers)
        self._template = copies.template

        starts: dict[Callable[[str], bool], list[tuple[int, int, int]]] = {}

        def is_backward(phase: str) -> bool:
            return not is_setup(phase) and not is_forward(phase)

        def whole(wanted: Callable[[str], bool], events_of: Callable[..., list[int]]) -> Events:
            events, starts[wanted] = copies.events(
                {i: events_of(b) for i, b in enumerate(blocks) if wanted(b["phase"])}
            )
            return events

        traced = operator.itemgetter("events")
        self._setup = whole(is_setup, traced)
        forward = whole(is_forward, traced)
        backward = whole(is_backward, traced)
        self._first = np.concatenate((forward, backward))
        phases = [block["phase"] for block in blocks]
        self._setup_starts = [(phases[i], layer, at) for i, layer, at in starts[is_setup]]
        self._first_starts = [
            *((phases[i], layer, at) for i, layer, at in starts[is_forward]),
            *((phases[i], layer, at + len(forward)) for i, layer, at in starts[is_backward]),
        ]
        self._next = whole(
            lambda phase: not is_setup(phase), functools.partial(_adding, self._tensors)
        )
        self._make_released = functools.partial(
            whole, lambda phase: not is_setup(phase), _giving_up
        )
        self._categories = self._categorise(forward)
        is_workspace = self._categories[_numbers_of(self._first)] == "workspace"
        self._again = self._first[~is_workspace]
        is_kept = self._categories[_numbers_of(forward)] == "workspace"
        self.num_forward_workspaces = int(is_kept.sum())
        self.num_forward_events = len(forward) - self.num_forward_workspaces
        """How many events of `again` and of `next` come before the backward pass."""
        self._check(self._first)
        self._check(self._next)
        made = self._first[self._first >= 0]
        self.gradients: list[int] = made[self._categories[made] == "gradient"].tolist()
        self.workspaces: list[int] = made[self._categories[made] == "workspace"].tolist()
        self.kernels = _count_kernels(blocks, layers)
        self.flops = Terms([kernel.flops for kernel in self.kernels])
        self.moved = Sums([kernel.moved for kernel in self.kernels])
        self._counts = [
            (layers.copies(int(layer)), entry) for layer, entry in answer["parameters"].items()
        ]

    # Few of a search's traces are replayed: the others never become lists.

    @functools.cached_property
    def template(self) -> list[int]:
        """Traced tensor that each tensor is a copy of."""
        return _listed(self._template)

    @functools.cached_property
    def categories(self) -> list[str]:
        """Of allocator.CATEGORIES, per tensor."""
        return list(self._categories)

    @functools.cached_property
    def setup(self) -> list[int]:
        return _listed(self._setup)

    @functools.cached_property
    def first(self) -> list[int]:
        return _listed(self._first)

    @functools.cached_property
    def again(self) -> list[int]:
        return _listed(self._again)

    @functools.cached_property
    def next(self) -> list[int]:
        return _listed(self._next)

    @functools.cached_property
    def _released_first(self) -> Events:
        events = self._make_released()
        self._check(events)
        return events

    @functools.cached_property
    def _released(self) -> Events:
        events = self._released_first
        kept: Events = events[self._categories[_numbers_of(events)] != "workspace"]
        return kept

    @functools.cached_property
    def released_first(self) -> list[int]:
        """As `first`, but each gradient is freed where its parameter gets it."""
        return _listed(self._released_first)

    @functools.cached_property
    def released(self) -> list[int]:
        """The same once workspaces exist."""
        return _listed(self._released)

    @property
    def step_buffers(self) -> list[int]:
        """Tensors that live for the optimizer step alone; one GPU needs none."""
        return []

    def blocks(self) -> list[tuple[str, Place, list[int]]]:
        """(phase, place, events) of `first`, in order."""
        return _cut(self.first, self._first_starts)

    def parameters(self) -> list[TracedParameter]:
        """Every weight, in the model's order."""
        found = []
        for _, place, events in _cut(self.setup, self._setup_starts):
            for number in events:
                if number < 0 or "shape" not in (entry := self._tensors[self.template[number]]):
                    continue
                found.append(
                    TracedParameter(
                        number=number,
                        place=place,
                        shape=tuple((c, i, j) for c, i, j in entry["shape"]),
                        dtype=entry["dtype"],
                        trainable=entry["trainable"],
                        group=entry["group"],
                        embedding=entry["embedding"],
                    )
                )
        return found

    def sizes(self, micro_batch: int, rank: int) -> list[int]:
        """Bytes of each tensor."""
        return _listed(self._traced_sizes(micro_batch, rank)[self._template])

    def running_bytes(self, events: str, micro_batch: int, rank: int) -> Array:
        """Bytes alive after each event of `setup`, `again`, `next` or `released`, from zero; 512 B
        blocks."""
        order: Events = getattr(self, f"_{events}")
        sizes = self._rounded_sizes(micro_batch, rank)[self._template[_numbers_of(order)]]
        return np.cumsum(np.where(order < 0, -sizes, sizes))

    def bytes_of(self, numbers: Sequence[int], micro_batch: int, rank: int) -> int:
        """Sum of tensors' sizes, each rounded to 512 B."""
        return int(self._rounded_sizes(micro_batch, rank)[self._template[list(numbers)]].sum())

    def _rounded_sizes(self, micro_batch: int, rank: int) -> Array:
        return (self._traced_sizes(micro_batch, rank) + 511) // 512 * 512

    def _traced_sizes(self, micro_batch: int, rank: int) -> Array:
        traced = self._terms.at(micro_batch, rank)
        for index, (name, *terms) in self._rules:
            traced[index] = _RULES[name]([evaluate(t, micro_batch, rank) for t in terms])
        if self._chunked:
            traced[self._chunked] *= self._chunk_rows(micro_batch)[0]
        return traced

    def _chunk_rows(self, micro_batch: int) -> tuple[int, int]:
        """(tokens of a chunk, tokens of the micro-batch)."""
        assert self._chunks is not None
        name, tokens, beyond, constant = self._chunks
        num_tokens = evaluate(tokens, micro_batch, 1) + beyond
        return _CHUNK_ROWS[name](num_tokens, constant), num_tokens

    def launches(self, micro_batch: int, rank: int) -> list[Launch]:
        """The kernels of a micro-step."""
        flops = self.flops.at(micro_batch, rank).tolist()
        moved = self.moved.at(micro_batch, rank).tolist()
        return [
            Launch(kernel, num_flops, bytes_moved, kernel.count)
            if kernel.chunk_moved is None
            else self._per_chunk(kernel, num_flops, bytes_moved, micro_batch, rank)
            for kernel, num_flops, bytes_moved in zip(self.kernels, flops, moved, strict=True)
        ]

    def _per_chunk(
        self, kernel: TracedKernel, flops: int, bytes_moved: float, micro_batch: int, rank: int
    ) -> Launch:
        """Its launches. The last chunk has fewer tokens than the others: their mean."""
        rows, num_tokens = self._chunk_rows(micro_batch)
        num_chunks = -(-num_tokens // rows)
        mean_rows = num_tokens / num_chunks
        assert kernel.chunk_moved is not None
        per_row = sum(evaluate(term, micro_batch, rank) for term in kernel.chunk_moved)
        return Launch(
            kernel,
            flops * mean_rows,
            bytes_moved + per_row * mean_rows,
            kernel.count * (num_chunks - 1 if kernel.repeated else 1),
        )

    def trainable(self, rank: int) -> list[TensorSpec]:
        """Trainable parameters in the model's order."""
        return [
            self._spec(entry, rank)
            for number in self.setup
            if number >= 0 and (entry := self._tensors[self._template[number]]).get("trainable")
        ]

    def parameter_of(self, gradient: int, rank: int) -> TensorSpec:
        """The parameter whose gradient has that number."""
        entry = self._tensors[self._template[gradient]]
        return self._spec(self._tensors[entry["of"]], rank)

    @staticmethod
    def _spec(entry: Mapping[str, Any], rank: int) -> TensorSpec:
        return TensorSpec(
            shape=tuple(evaluate(term, 1, rank) for term in entry["shape"]),
            dtype=entry["dtype"],
            group=entry["group"],
            embedding=entry["embedding"],
            linear=entry["linear"],
        )

    def num_parameters(self, rank: int) -> tuple[int, int]:
        """(all, trainable) elements, 4-bit weights counted unpacked."""
        total = trainable = 0
        for copies, entry in self._counts:
            total += copies * sum(evaluate(t, 1, rank) for t in entry["total"])
            trainable += copies * sum(evaluate(t, 1, rank) for t in entry["trainable"])
        return total, trainable

    def _categorise(self, forward: Events) -> npt.NDArray[np.object_]:
        """The worker's word; else a parameter is what set-up leaves, an activation what the forward
        pass leaves, and the rest are temporaries."""
        worker = np.array([tensor.get("category") for tensor in self._tensors], dtype=object)
        categories = worker[self._template]
        unnamed = np.array([category is None for category in categories])
        for events, name in ((self._setup, "parameter"), (forward, "activation")):
            left = np.zeros(len(categories), dtype=bool)
            left[events[events >= 0]] = True
            left[~events[events < 0]] = False
            categories[unnamed & left] = name
            unnamed &= ~left
        categories[unnamed] = "temporary"
        categories[~self._setup[self._setup < 0]] = "temporary"
        return categories

    def _check(self, events: Events) -> None:
        """Every tensor is made once and freed once after; only gradients and workspaces stay."""
        numbers, positions = _numbers_of(events), np.arange(len(events))
        is_free = events < 0
        made_at = np.full(len(self._template), len(events))
        made_at[numbers[~is_free]] = positions[~is_free]
        uses = np.bincount(2 * numbers + is_free, minlength=2 * len(self._template))
        wrong = (positions < made_at[numbers]) | (uses[2 * numbers + is_free] > 1)
        if wrong.any():
            number = numbers[wrong][0]
            raise BrokenTrace(f"tensor {number} is freed before it is allocated, or twice")
        made, freed = uses[::2], uses[1::2]
        left = set(self._categories[made > freed]) - {"gradient", "workspace"}
        if left:
            raise BrokenTrace(f"{', '.join(sorted(left))} tensors outlive the step")


def _cut(
    events: list[int], starts: Sequence[tuple[str, int, int]]
) -> list[tuple[str, Place, list[int]]]:
    """Events by block; the phase without the stack, which the place names."""
    ends = [*(start for *_, start in starts[1:]), len(events)]
    blocks = []
    for (phase, layer, start), end in zip(starts, ends, strict=True):
        name, _, stack = phase.partition(" ")
        blocks.append((name, (stack, layer), events[start:end]))
    return blocks


def _numbers_of(events: Events) -> Events:
    return np.where(events < 0, ~events, events)


def _listed(values: npt.NDArray[Any]) -> list[int]:
    listed: list[int] = values.tolist()
    return listed


def _adding(tensors: Sequence[Mapping[str, Any]], block: Mapping[str, Any]) -> list[int]:
    """A block's events where gradients exist already: the new one is added to the old and freed."""
    shadow = len(tensors)
    handed_over: dict[int, list[int]] = {}
    for position, gradient in block["accumulate"]:
        handed_over.setdefault(position, []).append(~(gradient + shadow))
    events: list[int] = []
    for position, event in enumerate([*block["events"], None]):
        events += handed_over.get(position, ())
        if event is None:
            break
        category = tensors[event if event >= 0 else ~event].get("category")
        if category == "gradient":
            events.append(event + shadow if event >= 0 else event - shadow)
        elif category != "workspace":
            events.append(event)
    return events


def _giving_up(block: Mapping[str, Any]) -> list[int]:
    """A block's events where a gradient is given up as soon as its parameter has it."""
    handed_over: dict[int, list[int]] = {}
    for position, gradient in block["accumulate"]:
        handed_over.setdefault(position, []).append(~gradient)
    events: list[int] = []
    for position, event in enumerate([*block["events"], None]):
        events += handed_over.get(position, ())
        if event is not None:
            events.append(event)
    return events


class _Copies:
    """Numbers for every copy of every traced tensor.

    The tensors that a copy of a block makes are numbered in a row, so that a tensor's number is
    the start of its row and its place in it. A gradient takes two places: the second is its
    shadow's, the tensor that is added to it where gradients exist already; the shadow of traced
    tensor t goes by `t + len(tensors)`. A workspace is made once, not once per layer: it has a row
    to itself.
    """

    def __init__(
        self,
        tensors: Sequence[Mapping[str, Any]],
        blocks: Sequence[Mapping[str, Any]],
        layers: _Layers,
    ) -> None:
        self._layers = layers
        self._layer_of_block = [block["layer"] for block in blocks]
        self._order = _order(blocks, layers)
        index_of = {(b["phase"], b["layer"]): i for i, b in enumerate(blocks) if b["layer"] >= 0}
        self._next_period = {
            index: index_of[phase, layer + layers.period]
            for (phase, layer), index in index_of.items()
            if (phase, layer + layers.period) in index_of
        }
        num_traced = len(tensors)
        self._row, self._home, self._place = np.full((3, 2 * num_traced), -1, dtype=np.int32)
        """Of each traced tensor and shadow: row, layer (-1: outside all), place in the row."""
        rows: dict[object, int] = {}
        made: list[list[tuple[int, int, list[int]]]] = []

        def add_row(key: object, layer: int, members: list[int]) -> tuple[int, int, list[int]]:
            row = rows.setdefault(key, len(rows))
            self._row[members], self._home[members] = row, layer
            self._place[members] = np.arange(len(members))
            return row, layer, [member % num_traced for member in members]

        for index, block in enumerate(blocks):
            members: list[int] = []
            made.append([])
            for tensor in block["events"]:
                category = tensors[tensor].get("category") if tensor >= 0 else None
                if category == "workspace":
                    made[index].append(add_row(("workspace", tensor), -1, [tensor]))
                elif tensor >= 0:
                    members.append(tensor)
                    if category == "gradient":
                        members.append(tensor + num_traced)
            key = index if block["layer"] < 0 else block["phase"]
            made[index].append(add_row(key, block["layer"], members))
        self._number(made, len(rows))
        alike: dict[tuple[Any, ...], int] = {}
        self._alike = np.array(
            [alike.setdefault((*t["size"], t.get("category")), len(alike)) for t in tensors] * 2
        )

    def _number(self, made: Sequence[Sequence[tuple[int, int, list[int]]]], num_rows: int) -> None:
        # The last column, -1, is for what lies outside the layers.
        self._start = np.full((num_rows, self._layers.full + 1), -1, dtype=np.int32)
        self._stop = self._start.copy()
        template: list[int] = []
        for index, layer in self._order:
            for row, home, members in made[index]:
                column = layer if home >= 0 else -1
                self._start[row, column] = len(template)
                template += members
                self._stop[row, column] = len(template)
        self.template = np.array(template, dtype=np.int32)
        """Traced tensor of each number."""

    def events(self, traced: Mapping[int, list[int]]) -> tuple[Events, list[tuple[int, int, int]]]:
        """The whole model's events in order, from those of traced blocks; where each block starts, as
        (traced block, layer, position)."""
        located = {index: self._locate(index, events) for index, events in traced.items()}
        copied = {index: self._seen_from_within(index, located) for index in traced}
        parts, columns = [], []
        starts, position = [], 0
        for index, layer in self._order:
            if index in located:
                shift = layer - self._layer_of_block[index]
                events, homes = (copied if shift else located)[index]
                starts.append((index, layer, position))
                position += len(events)
                parts.append(events)
                columns.append(self._columns(homes, index, shift))
        if not parts:
            return np.zeros(0, dtype=np.int32), starts
        return self._resolve(np.concatenate(parts), np.concatenate(columns)), starts

    def _columns(self, homes: Events, index: int, shift: int) -> Events:
        """Layers that a copy of a block refers to: neighbours move with it.

        What is two periods away and more is no neighbour, but at the other end: what the first
        layer made for all, or the last was the first to need in the backward pass.
        """
        layer = self._layer_of_block[index]
        if layer < 0:
            return homes
        distance = homes // self._layers.period - layer // self._layers.period
        extra = self._layers.full - self._layers.traced
        columns = np.where(distance >= 2, homes + extra, homes + shift)
        columns = np.where(distance <= -2, homes, columns)
        return np.where(homes < 0, homes, columns)

    def _locate(self, index: int, events: list[int]) -> tuple[Events, Events]:
        """A block's events, and the layer of each; outside the layers a block means all copies."""
        order = np.array(events, dtype=np.int32)
        homes = self._home[_numbers_of(order)]
        if self._layer_of_block[index] >= 0 or (homes < 0).all():
            return order, homes
        layers = [[-1] if home < 0 else self._layers.instances(home) for home in homes.tolist()]
        order = np.repeat(order, [len(copies) for copies in layers])
        return order, np.array([n for copies in layers for n in copies], dtype=np.int32)

    def _seen_from_within(
        self, index: int, located: Mapping[int, tuple[Events, Events]]
    ) -> tuple[Events, Events]:
        """A block of the second period, from which its copies are made: before them is no first.

        The first period is unlike the others (its input may need no gradient). Where the block
        refers to it, the block of the third period refers to the second: the copies do likewise.
        """
        events, homes = located[index]
        later = located.get(self._next_period.get(index, -1))
        if later is None or len(later[0]) != len(events):
            return events, homes
        is_first = (homes >= 0) & (homes < self._layers.period)
        homes = np.where(is_first, later[1] - self._layers.period, homes)
        return np.where(is_first, later[0], events), homes

    def _resolve(self, events: Events, columns: Events) -> Events:
        traced = _numbers_of(events)
        rows = self._row[traced]
        starts = self._start[rows, columns]
        numbers = starts + self._place[traced]
        missing = (starts < 0) | (numbers >= self._stop[rows, columns])
        numbers[missing] = 0
        missing |= self._alike[self.template[numbers]] != self._alike[traced]
        if missing.any():
            layer, tensor = columns[missing][0], traced[missing][0]
            raise BrokenTrace(f"layer {layer} makes nothing like the trace's tensor {tensor}")
        return np.where(events < 0, ~numbers, numbers)


def _order(blocks: Sequence[Mapping[str, Any]], layers: _Layers) -> list[tuple[int, int]]:
    """(traced block, layer of the whole model) in order of execution."""
    order: list[tuple[int, int]] = []
    indices = range(len(blocks))
    for (phase, repeats), group in itertools.groupby(
        indices, lambda i: (blocks[i]["phase"], blocks[i]["layer"] >= 0)
    ):
        run = list(group)
        if not repeats:
            order += [(index, -1) for index in run]
            continue
        by_layer = {blocks[index]["layer"]: index for index in run}
        if layers.traced == layers.full and len(run) == len(by_layer):
            order += [(index, blocks[index]["layer"]) for index in run]  # some layers may have none
            continue
        if sorted(by_layer) != list(range(layers.traced)) or len(run) != len(by_layer):
            raise BrokenTrace(f"{phase}: layers {[blocks[index]['layer'] for index in run]}")
        whole = range(layers.full)
        if blocks[run[0]]["layer"] != 0:
            whole = whole[::-1]
        order += [(by_layer[layers.source(layer)], layer) for layer in whole]
    return order


def _count_kernels(blocks: Iterable[Mapping[str, Any]], layers: _Layers) -> list[TracedKernel]:
    """Equal kernels of a micro-step once, with their number."""
    counts: dict[tuple[Any, ...], int] = {}
    for block in blocks:
        if is_setup(block["phase"]):
            continue
        copies = layers.copies(block["layer"])
        for name, dtype, flops, moved, recomputed, count, *chunked in block["kernels"]:
            chunk_moved, repeated = (
                (tuple(map(tuple, chunked[0])), chunked[1]) if chunked else (None, False)
            )
            terms = tuple(map(tuple, moved))
            key = (name, dtype, tuple(flops), terms, recomputed, chunk_moved, repeated)
            counts[key] = counts.get(key, 0) + count * copies
    return [
        TracedKernel(
            name=name,
            dtype=dtype,
            flops=flops,
            moved=moved,
            recomputed=recomputed,
            count=count,
            chunk_moved=chunk_moved,
            repeated=repeated,
        )
        for (name, dtype, flops, moved, recomputed, chunk_moved, repeated), count in counts.items()
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layers:
    """Which traced layer each layer of the whole model copies.

    The first period and the last stand for themselves, and so does the remainder; the second period
    repeats in between.
    """

    traced: int
    full: int
    period: int

    def source(self, layer: int) -> int:
        extra = self.full - self.traced
        start = self.period
        if layer < start + self.period:
            return layer
        if layer < start + self.period + extra:
            return start + (layer - start) % self.period
        return layer - extra

    def instances(self, traced_layer: int) -> list[int]:
        return [layer for layer in range(self.full) if self.source(layer) == traced_layer]

    def copies(self, traced_layer: int) -> int:
        return 1 if traced_layer < 0 else len(self.instances(traced_layer))
