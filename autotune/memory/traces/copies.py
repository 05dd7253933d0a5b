"""The events of the whole model from those of a few layers: which tensors a copied block means."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune.memory.traces import unlike_layers

Events = npt.NDArray[np.int32]
"""Events in order: i when tensor i is allocated, ~i when it is freed."""


class BrokenTrace(Exception):
    """The blocks of a trace do not repeat from layer to layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """The traced layer that each layer of the whole model copies.

    What comes before the pattern, the first period and the last stand for themselves, and so does the
    remainder; the second period repeats in between. Where the layers are treated in two ways, those from
    `cut` on in the second, each of the two stretches is made so.
    """

    traced: int
    full: int
    period: int
    first: int = 0
    """The layer at which the pattern begins."""
    cut: int | None = None
    """The traced layer from which on layers are treated in the second way; None: all in one way."""
    begins: int | None = None
    """The whole model's layer from which on they are; None: as in what was traced."""
    kinds: str = ""
    """A letter for each layer, where all were traced for a plan: those of the same letter are alike."""

    def __post_init__(self) -> None:
        if self.kinds:
            if self._sources() is None:
                raise BrokenTrace(f"{self.begins} layers end at none like those that were traced")
            return
        for stretch in self._stretches():
            if not stretch.num_more >= 0 or stretch.num_more % self.period:
                raise BrokenTrace(f"{self.begins} layers are not made of whole patterns")

    @property
    def as_traced(self) -> bool:
        """Whether every layer was traced, and none is treated otherwise."""
        return self.traced == self.full and self.begins in (None, self.cut)

    @property
    def lean_counts(self) -> Sequence[int]:
        """Return the numbers of layers that may be treated in the first way: where the second begins."""
        if self.cut is None:
            return ()
        if self.kinds:
            return unlike_layers.lean_counts(self.kinds, self.cut)
        return range(self.cut, self.full - (self.traced - self.cut) + 1, self.period)

    def source(self, layer: int) -> int:
        sources = self._sources()
        if sources is not None:
            return sources[layer]
        begins = self.cut if self.begins is None else self.begins
        stretch = self._stretches()[-1 if begins is not None and layer >= begins else 0]
        if layer < stretch.repeats + stretch.shift + self.period:
            return layer - stretch.shift
        if layer < stretch.repeats + stretch.shift + self.period + stretch.num_more:
            start = stretch.repeats
            return start + (layer - stretch.shift - start) % self.period
        return layer - stretch.shift - stretch.num_more

    def place_of(self, traced_layers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the layers of the whole model that traced ones are, where these stand for themselves."""
        found = traced_layers.copy()
        if self.kinds:
            return found
        for stretch in self._stretches():
            is_in = traced_layers >= stretch.starts
            is_late = traced_layers >= stretch.repeats + self.period
            found[is_in] = (traced_layers + stretch.shift)[is_in]
            found[is_in & is_late] += stretch.num_more
        return found

    def is_seen_first(self, homes: npt.NDArray[Any], layer: int) -> npt.NDArray[Any]:
        """Whether each layer is of the first period of a layer's stretch, and that layer of a later one."""
        if self.kinds:
            return np.zeros(homes.shape, dtype=bool)
        stretch = self._stretches()[-1 if self.cut is not None and layer >= self.cut else 0]
        begins = stretch.repeats - self.period
        return (homes >= begins) & (homes < stretch.repeats) & (layer >= stretch.repeats)

    def _sources(self) -> tuple[int, ...] | None:
        """Return the source of each layer where all were traced for a plan; None where there is none."""
        if not self.kinds or self.cut is None:
            return None
        count = self.cut if self.begins is None else self.begins
        return unlike_layers.sources(self.kinds, self.cut, count)

    def _stretches(self) -> tuple[_Stretch, ...]:
        return _stretches_of(self)

    def instances(self, traced_layer: int) -> list[int]:
        return _instances(self).get(traced_layer, [])

    def copies(self, traced_layer: int) -> int:
        return 1 if traced_layer < 0 else len(self.instances(traced_layer))

    def period_of(self, layer: Any) -> Any:
        """Number of a traced layer's period, from 0; negative before the pattern."""
        return (layer - self.first) // self.period


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stretch:
    """Layers in a row that are treated alike."""

    starts: int
    """Their first traced layer."""
    repeats: int
    """The traced layer at which the period begins that repeats."""
    shift: int
    """How many layers more lie before the first one in the whole model."""
    num_more: int
    """How many more they are in the whole model."""


@functools.cache
def _stretches_of(layers: Layers) -> tuple[_Stretch, ...]:
    repeats = layers.first + layers.period
    num_more = layers.full - layers.traced
    if layers.cut is None:
        return (_Stretch(starts=0, repeats=repeats, shift=0, num_more=num_more),)
    shift = 0 if layers.begins is None else layers.begins - layers.cut
    return (
        _Stretch(starts=0, repeats=repeats, shift=0, num_more=shift),
        _Stretch(
            starts=layers.cut,
            repeats=layers.cut + layers.period,
            shift=shift,
            num_more=num_more - shift,
        ),
    )


@functools.cache
def _instances(layers: Layers) -> dict[int, list[int]]:
    """Layers of the whole model by the traced layer that they copy."""
    found: dict[int, list[int]] = {}
    for layer in range(layers.full):
        found.setdefault(layers.source(layer), []).append(layer)
    return found


def numbers_of(events: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.where(events < 0, ~events, events)


class Copies:
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
        layers: Layers,
    ) -> None:
        self._layers = layers
        self._layer_of_block = [block["layer"] for block in blocks]
        self._order = order_of(blocks, layers)
        index_of = {
            (b["phase"], b["stack"], b["layer"]): i for i, b in enumerate(blocks) if b["layer"] >= 0
        }
        self._next_period = {
            index: index_of[phase, stack, layer + layers.period]
            for (phase, stack, layer), index in index_of.items()
            if (phase, stack, layer + layers.period) in index_of
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
            key = index if block["layer"] < 0 else (block["phase"], block["stack"])
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
        """Return the whole model's events in order, from those of traced blocks, and where each block starts.

        A start is (traced block, layer, position).
        """
        located = {index: self._locate(index, events) for index, events in traced.items()}
        copied = {index: self._seen_from_within(index, located) for index in traced}
        own_columns = {index: self._columns(homes, index) for index, (_, homes) in located.items()}
        columns_of = {index: self._columns(homes, index) for index, (_, homes) in copied.items()}
        parts, columns = [], []
        starts, position = [], 0
        for index, layer in self._order:
            if index in located:
                shift = layer - self._layer_of_block[index]
                events, _ = (copied if shift else located)[index]
                fixed, moves = (columns_of if shift else own_columns)[index]
                starts.append((index, layer, position))
                position += len(events)
                parts.append(events)
                columns.append(fixed + shift * moves)
        if not parts:
            return np.zeros(0, dtype=np.int32), starts
        return self._resolve(np.concatenate(parts), np.concatenate(columns)), starts

    def _columns(self, homes: Events, index: int) -> tuple[Events, Events]:
        """Layers that a block refers to, and which of them (1) move with a copy of it: neighbours.

        What is two periods away and more is no neighbour, but at the other end: what the first
        layer made for all, or the last was the first to need in the backward pass.
        """
        layer = self._layer_of_block[index]
        if layer < 0:
            return homes, np.zeros_like(homes)
        distance = self._layers.period_of(homes) - self._layers.period_of(layer)
        is_inside = homes >= 0
        is_near = abs(distance) < 2
        fixed: Events = np.where(is_inside & ~is_near, self._layers.place_of(homes), homes)
        return fixed, (is_inside & is_near).astype(homes.dtype)

    def _locate(self, index: int, events: list[int]) -> tuple[Events, Events]:
        """A block's events, and the layer of each; outside the layers a block means all copies."""
        order = np.array(events, dtype=np.int32)
        homes = self._home[numbers_of(order)]
        if self._layer_of_block[index] >= 0 or (homes < 0).all():
            return order, homes
        layers = [[-1] if home < 0 else self._layers.instances(home) for home in homes.tolist()]
        order = np.repeat(order, [len(copies) for copies in layers])
        return order, np.array([n for copies in layers for n in copies], dtype=np.int32)

    def _seen_from_within(
        self, index: int, located: Mapping[int, tuple[Events, Events]]
    ) -> tuple[Events, Events]:
        """A block of the second period, from which its copies are made: before them is no first.

        The first period is unlike the others (its input may need no gradient, or come from layers that are
        treated otherwise). Where the block refers to it, the block of the third period refers to the second:
        the copies do likewise.
        """
        events, homes = located[index]
        later = located.get(self._next_period.get(index, -1))
        if later is None or len(later[0]) != len(events):
            return events, homes
        is_first = self._layers.is_seen_first(homes, self._layer_of_block[index])
        homes = np.where(is_first, later[1] - self._layers.period, homes)
        return np.where(is_first, later[0], events), homes

    def _resolve(self, events: Events, columns: Events) -> Events:
        traced = numbers_of(events)
        rows = self._row[traced]
        starts = self._start[rows, columns]
        numbers = starts + self._place[traced]
        missing = (starts < 0) | (numbers >= self._stop[rows, columns])
        numbers[missing] = 0
        missing |= self._alike[self.template[numbers]] != self._alike[traced]
        if missing.any():
            layer, tensor = columns[missing][0], traced[missing][0]
            raise BrokenTrace(f"layer {layer} makes nothing like the trace's tensor {tensor}")
        found: Events = np.where(events < 0, ~numbers, numbers)
        return found


def order_of(blocks: Sequence[Mapping[str, Any]], layers: Layers) -> list[tuple[int, int]]:
    """Return (traced block, layer of the whole model) in order of execution."""
    order: list[tuple[int, int]] = []
    indices = range(len(blocks))
    for (phase, _, repeats), group in itertools.groupby(
        indices, lambda i: (blocks[i]["phase"], blocks[i]["stack"], blocks[i]["layer"] >= 0)
    ):
        run = list(group)
        if not repeats:
            order += [(index, -1) for index in run]
            continue
        by_layer = {blocks[index]["layer"]: index for index in run}
        if layers.as_traced and len(run) == len(by_layer):
            order += [(index, blocks[index]["layer"]) for index in run]  # some layers may have none
            continue
        if sorted(by_layer) != list(range(layers.traced)) or len(run) != len(by_layer):
            raise BrokenTrace(f"{phase}: layers {[blocks[index]['layer'] for index in run]}")
        whole = range(layers.full)
        if blocks[run[0]]["layer"] != 0:
            whole = whole[::-1]
        order += [(by_layer[layers.source(layer)], layer) for layer in whole]
    return order
