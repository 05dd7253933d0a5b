"""Tells a model's layers that were traced, and which of these each layer of the whole model copies."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from autotune.memory.traces import unlike_layers


class BrokenTrace(Exception):
    """The blocks of a trace do not repeat from layer to layer."""


class Stack(Hashable, Protocol):
    """Layers in a row, of which some are traced."""

    @property
    def traced(self) -> int:
        """Return how many are traced."""

    @property
    def full(self) -> int:
        """Return how many there are."""

    @property
    def period(self) -> int:
        """Return after how many traced layers the pattern repeats."""

    @property
    def as_traced(self) -> bool:
        """Whether every layer was traced, and none is treated otherwise."""

    def source(self, layer: int) -> int:
        """Return the traced layer that a layer of the whole model copies."""

    def place_of(self, traced_layers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the layers of the whole model that traced ones are, where these stand for themselves."""

    def is_seen_first(self, homes: npt.NDArray[Any], layer: int) -> npt.NDArray[Any]:
        """Whether each layer is of the first period of a layer's stretch, and that layer of a later one."""

    def period_of(self, layer: Any) -> Any:
        """Number of a traced layer's period, from 0; negative before the pattern."""


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

    def __post_init__(self) -> None:
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
        return range(self.cut, self.full - (self.traced - self.cut) + 1, self.period)

    def source(self, layer: int) -> int:
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
        for stretch in self._stretches():
            is_in = traced_layers >= stretch.starts
            is_late = traced_layers >= stretch.repeats + self.period
            found[is_in] = (traced_layers + stretch.shift)[is_in]
            found[is_in & is_late] += stretch.num_more
        return found

    def is_seen_first(self, homes: npt.NDArray[Any], layer: int) -> npt.NDArray[Any]:
        """Whether each layer is of the first period of a layer's stretch, and that layer of a later one."""
        stretch = self._stretches()[-1 if self.cut is not None and layer >= self.cut else 0]
        begins = stretch.repeats - self.period
        return (homes >= begins) & (homes < stretch.repeats) & (layer >= stretch.repeats)

    def _stretches(self) -> tuple[_Stretch, ...]:
        return _stretches_of(self)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Alike:
    """The traced layers in whatever order they come: layers that are alike are copies of one."""

    own: tuple[int, ...]
    """The whole model's layer that each traced one is."""
    sources: tuple[int, ...]
    """The traced layer that each of the whole model copies, where it is treated as in the trace."""
    cut: int | None = None
    """The whole model's layer from which on a trace for a plan treats them in the second way."""
    begins: int | None = None
    """The layer from which on they are; None: as in the trace."""
    kinds: str = ""
    """A letter for each layer of the whole model, for a plan: those of the same letter are alike."""

    def __post_init__(self) -> None:
        if self._moved() is None:
            raise BrokenTrace(f"{self.begins} layers end at none like those that were traced")

    @classmethod
    def of_answer(cls, said: Mapping[str, Any]) -> Alike:
        """Read them from a worker's answer."""
        return cls(**{**said, "own": tuple(said["own"]), "sources": tuple(said["sources"])})

    @property
    def traced(self) -> int:
        return len(self.own)

    @property
    def full(self) -> int:
        return len(self.sources)

    @property
    def period(self) -> int:
        return 1

    @property
    def as_traced(self) -> bool:
        return self.traced == self.full and self.begins in (None, self.cut)

    @property
    def lean_counts(self) -> Sequence[int]:
        """Return the numbers of layers that may be treated in the first way: where the second begins."""
        return () if self.cut is None else unlike_layers.lean_counts(self.kinds, self.cut)

    def source(self, layer: int) -> int:
        moved = self._moved()
        assert moved is not None
        return self.sources[moved[layer]]

    def _moved(self) -> Sequence[int] | None:
        """Return the layer that each one is treated like in the trace; None where there is none for some."""
        if self.cut is None or self.begins is None:
            return range(self.full)
        return unlike_layers.sources(self.kinds, self.cut, self.begins)

    def place_of(self, traced_layers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = np.array(self.own, dtype=traced_layers.dtype)[traced_layers]
        return found

    def is_seen_first(self, homes: npt.NDArray[Any], layer: int) -> npt.NDArray[Any]:
        """None is: what is copied has no neighbour that is unlike those of its copies."""
        del layer
        return np.zeros(homes.shape, dtype=bool)

    def period_of(self, layer: Any) -> Any:
        return layer


TOWER = 1 << 16
"""Number of the stack of layers that see; the text's are before: two of an encoder and a decoder, or one for
each pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stacks:
    """The layers of a whole model: those of its text, and of the tower that sees where it has one."""

    text: Layers | Alike
    tower: Alike | None = None

    @classmethod
    def of_answer(cls, answer: Mapping[str, Any]) -> Stacks:
        """Read them from a worker's answer."""
        text, tower = answer["layers"], answer.get("tower")
        return cls(
            text=Alike.of_answer(text) if "own" in text else Layers(**text),
            tower=tower and Alike.of_answer(tower),
        )

    def of(self, stack: int) -> Stack:
        """Return the layers of a stack."""
        if stack < TOWER:
            return self.text
        assert self.tower is not None
        return self.tower

    def instances(self, stack: int, traced_layer: int) -> list[int]:
        """Return the layers of the whole model that copy a traced one."""
        return _instances(self.of(stack)).get(traced_layer, [])

    def copies(self, stack: int, traced_layer: int) -> int:
        """Return how many copies a traced layer has; one where it is outside of all (-1)."""
        return 1 if traced_layer < 0 else len(self.instances(stack, traced_layer))

    @property
    def are_whole(self) -> bool:
        """Whether every layer was traced."""
        stacks: list[Stack] = [self.text, *([] if self.tower is None else [self.tower])]
        return all(stack.traced == stack.full for stack in stacks)

    @property
    def most(self) -> int:
        """Return how many layers the longest stack has."""
        return max(self.text.full, 0 if self.tower is None else self.tower.full)


@functools.cache
def _instances(layers: Stack) -> dict[int, list[int]]:
    """Layers of the whole model by the traced layer that they copy."""
    found: dict[int, list[int]] = {}
    for layer in range(layers.full):
        found.setdefault(layers.source(layer), []).append(layer)
    return found
