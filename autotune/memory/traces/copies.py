"""The events of the whole model from those of a few layers: which tensors a copied block means."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune.memory.traces.layers import TOWER, Alike, BrokenTrace, Stacks

MISSING = 1 << 29
"""A place in no row."""
Events = npt.NDArray[np.int32]
"""Events in order: i when tensor i is allocated, ~i when it is freed."""


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
        stacks: Stacks,
    ) -> None:
        self._stacks = stacks
        self._place_of_block = [(block["stack"], block["layer"]) for block in blocks]
        self._phases = [block["phase"] for block in blocks]
        self._order = order_of(blocks, stacks)
        index_of = {
            (b["phase"], b["stack"], b["layer"]): i for i, b in enumerate(blocks) if b["layer"] >= 0
        }
        self._next_period = {
            index: index_of[phase, stack, layer + stacks.of(stack).period]
            for (phase, stack, layer), index in index_of.items()
            if (phase, stack, layer + stacks.of(stack).period) in index_of
        }
        num_traced = len(tensors)
        self._row, self._home, self._place = np.full((3, 2 * num_traced), -1, dtype=np.int32)
        """Of each traced tensor and shadow: row, layer (-1: outside all), place in the row."""
        self._is_in_tower = np.zeros(2 * num_traced, dtype=bool)
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
            self._is_in_tower[members] = block["stack"] == TOWER
        self._number(made, len(rows))
        alike: dict[tuple[Any, ...], int] = {}
        self._alike = np.array(
            [alike.setdefault((*t["size"], t.get("category")), len(alike)) for t in tensors] * 2
        )

    def _number(self, made: Sequence[Sequence[tuple[int, int, list[int]]]], num_rows: int) -> None:
        # The last column, -1, is for what lies outside the layers.
        self._start = np.full((num_rows, self._stacks.most + 1), -1, dtype=np.int32)
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
        own_columns = {index: self._columns(*seen, index) for index, seen in located.items()}
        columns_of = {index: self._columns(*seen, index) for index, seen in copied.items()}
        parts, columns = [], []
        starts, position = [], 0
        for index, layer in self._order:
            if index in located:
                shift = layer - self._place_of_block[index][1]
                events, _ = (copied if shift else located)[index]
                fixed, moves = (columns_of if shift else own_columns)[index]
                starts.append((index, layer, position))
                position += len(events)
                parts.append(events)
                columns.append(fixed + shift * moves)
        if not parts:
            return np.zeros(0, dtype=np.int32), starts
        left = self._left(located) if isinstance(self._stacks.text, Alike) else None
        return self._resolve(np.concatenate(parts), np.concatenate(columns), left), starts

    def _columns(self, events: Events, homes: Events, index: int) -> tuple[Events, Events]:
        """Layers that a block refers to, and which of them (1) move with a copy of it: neighbours.

        What is two periods away and more is no neighbour, but at the other end: what the first
        layer made for all, or the last was the first to need in the backward pass.
        """
        stack, layer = self._place_of_block[index]
        if layer < 0:
            return homes, np.zeros_like(homes)
        layers, is_inside = self._stacks.of(stack), homes >= 0
        is_near = is_inside & (abs(layers.period_of(homes) - layers.period_of(layer)) < 2)
        is_in_tower = self._is_in_tower[numbers_of(events)]
        is_near &= is_in_tower == (stack == TOWER)
        fixed = homes.copy()
        for part, number in ((~is_in_tower, 0), (is_in_tower, TOWER)):
            is_far = part & is_inside & ~is_near
            if is_far.any():
                fixed[is_far] = self._stacks.of(number).place_of(homes[is_far])
        return fixed, is_near.astype(homes.dtype)

    def _locate(self, index: int, events: list[int]) -> tuple[Events, Events]:
        """A block's events, and the layer of each; outside the layers a block means all copies."""
        order = np.array(events, dtype=np.int32)
        numbers = numbers_of(order)
        homes = self._home[numbers]
        if self._place_of_block[index][1] >= 0 or (homes < 0).all():
            return order, homes
        stacks = np.where(self._is_in_tower[numbers], TOWER, 0)
        layers = [
            [-1] if home < 0 else self._stacks.instances(stack, home)
            for stack, home in zip(stacks.tolist(), homes.tolist(), strict=True)
        ]
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
        stack, layer = self._place_of_block[index]
        layers = self._stacks.of(stack)
        is_first = layers.is_seen_first(homes, layer)
        homes = np.where(is_first, later[1] - layers.period, homes)
        return np.where(is_first, later[0], events), homes

    def _left(self, located: Mapping[int, tuple[Events, Events]]) -> _Left:
        """Find what layers of the text leave to others, which free it."""
        names: dict[Any, set[int]] = {}
        for index, (events, _) in located.items():
            stack, layer = self._place_of_block[index]
            layer = -1 if stack == TOWER else layer
            freed = ~events[events < 0]
            homes = self._home[freed]
            is_left = (homes >= 0) & (homes != layer) & ~self._is_in_tower[freed]
            for number, home in zip(freed[is_left].tolist(), homes[is_left].tolist(), strict=True):
                row = int(self._row[number])
                names.setdefault((home, row, int(self._alike[number])), set()).add(number)
                if layer >= 0:
                    to = self._phases[index], layer - home
                    names.setdefault((home, row, to), set()).add(number)
        return _Left(names, self._home, self._place)

    def _sources_of(self, traced: Events, columns: Events) -> Events:
        """Return the traced layers that layers of the text copy; -1 for others and for none."""
        text = self._stacks.text
        sources = np.array([*map(text.source, range(text.full)), -1], dtype=np.int32)
        is_of_text = ~self._is_in_tower[traced] & (columns >= 0)
        return sources[np.where(is_of_text, columns, -1)]

    def _resolve(self, events: Events, columns: Events, left: _Left | None) -> Events:
        traced = numbers_of(events)
        rows = self._row[traced]
        starts = self._start[rows, columns]
        places = self._place[traced]
        if left is not None:
            left.move(places, traced, self._sources_of(traced, columns))
        numbers = starts + places
        missing = (starts < 0) | (numbers >= self._stop[rows, columns])
        numbers[missing] = 0
        missing |= self._alike[self.template[numbers]] != self._alike[traced]
        if missing.any():
            layer, tensor = columns[missing][0], traced[missing][0]
            raise BrokenTrace(f"layer {layer} makes nothing like the trace's tensor {tensor}")
        found: Events = np.where(events < 0, ~numbers, numbers)
        return found


class _Left:
    """Traced tensors that layers leave to others: layers of unlike kinds leave the same ones.

    One is known by when which neighbour frees it; or, since neighbours of unlike kinds do so at unlike times,
    by its size.
    """

    def __init__(self, names: Mapping[Any, set[int]], homes: Events, places: Events) -> None:
        self._homes = homes
        self._places: dict[Any, int] = {}
        self._names: dict[int, list[Any]] = {}
        for (home, row, name), numbers in names.items():
            for which, number in enumerate(sorted(numbers, key=lambda n: int(places[n]))):
                self._places[home, row, name, which] = int(places[number])
                names_of_one = self._names.setdefault(number, [])
                names_of_one.insert(
                    0 if isinstance(name, tuple) else len(names_of_one), (row, name, which)
                )

    def move(self, places: Events, traced: Events, sources: Events) -> None:
        """Change the places of tensors to those that they have in the layers that these are copies of."""
        for at in np.flatnonzero((sources >= 0) & (sources != self._homes[traced])).tolist():
            home = int(sources[at])
            known = (
                self._places[home, *name]
                for name in self._names.get(int(traced[at]), ())
                if (home, *name) in self._places
            )
            places[at] = next(known, MISSING)


def order_of(blocks: Sequence[Mapping[str, Any]], stacks: Stacks) -> list[tuple[int, int]]:
    """Return (traced block, layer of the whole model) in order of execution."""
    order: list[tuple[int, int]] = []
    indices = range(len(blocks))
    for (phase, stack, repeats), group in itertools.groupby(
        indices, lambda i: (blocks[i]["phase"], blocks[i]["stack"], blocks[i]["layer"] >= 0)
    ):
        run = list(group)
        if not repeats:
            order += [(index, -1) for index in run]
            continue
        layers = stacks.of(stack)
        by_layer = {blocks[index]["layer"]: index for index in run}
        if layers.as_traced and len(run) == len(by_layer):
            order += [(index, blocks[index]["layer"]) for index in run]  # some layers may have none
            continue
        # One that stands for itself may have nothing to do: LLaVA's last one, in the backward pass.
        lacks_some = any(
            stacks.copies(stack, layer) != 1 for layer in {*range(layers.traced)} - {*by_layer}
        )
        if len(run) != len(by_layer):
            raise BrokenTrace(
                "some of its layers run more than once in a pass, which is not modelled"
            )
        if lacks_some:
            raise BrokenTrace(f"{phase}: layers {[blocks[index]['layer'] for index in run]}")
        whole = range(layers.full)
        if blocks[run[0]]["layer"] > blocks[run[-1]]["layer"]:
            whole = whole[::-1]
        order += [
            (by_layer[source], layer)
            for layer in whole
            if (source := layers.source(layer)) in by_layer
        ]
    return order
