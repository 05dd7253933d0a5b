"""A traced step, extrapolated: in layers, in the micro-batch and in the LoRA rank.

The worker traces a few layers with prime dimensions (autotune.worker.trace). From its answer this
module makes the event lists of the whole model: the blocks of the middle period of layers are copied,
and each reference to a neighbour's tensor is shifted with the copy. Sizes are
`coefficient x micro_batch^i x rank^j`.

Raises BrokenTrace when the blocks do not repeat the way this assumes; the worker then
traces every layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune.optimizer_steps import TensorSpec

Term = tuple[int, int, int]
"""(coefficient, power of the micro-batch, power of the rank)."""

SETUP_PHASES = ("weights", "adapter")
FORWARD_PHASES = ("batch", "embed", "forward", "head")


Array = npt.NDArray[np.int64]


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


def evaluate(term: Sequence[int], micro_batch: int, rank: int) -> int:
    coefficient, batch_power, rank_power = term
    return coefficient * micro_batch**batch_power * rank**rank_power


def _embedding_partials(numbers: Sequence[int]) -> int:
    """Partial sums of an embedding's backward: (indices, rows, bytes per row).

    EmbeddingBackwardKernel.cu: `numel / 10 + min(numel, num_weights)` rows; none up to 3,072 indices
    (Embedding.cu).
    """
    indices, rows, row_bytes = numbers
    return 0 if indices <= 3072 else row_bytes * (indices // 10 + min(indices, rows))


_RULES = {"embedding": _embedding_partials}


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
        values = self._terms.at(micro_batch, rank)
        return np.bincount(self._owners, weights=values, minlength=self._length)


class _Deltas:
    """Events as signed references to traced tensors."""

    def __init__(self, events: Sequence[int], template: Sequence[int]) -> None:
        numbers = np.asarray(events, dtype=np.int64)
        frees = numbers < 0
        self._tensors = np.asarray(template, dtype=np.int64)[np.where(frees, ~numbers, numbers)]
        self._signs = np.where(frees, -1, 1)

    def running(self, sizes: Array) -> Array:
        return np.cumsum(sizes[self._tensors] * self._signs)


class Trace:
    """The events and kernels of one micro-step of the whole model, sizes still symbolic.

    Tensors are numbered; `setup` allocates weights, `first` is a micro-step that makes the gradients
    (and the library workspaces, which stay), `again` the same once workspaces exist, `next` one that
    adds to gradients already there.
    """

    def __init__(self, answer: dict[str, Any]) -> None:
        self._layers = _Layers(**answer["layers"])
        self._tensors: list[dict[str, Any]] = answer["tensors"]
        self._key_of = _home_keys(self._tensors, answer["blocks"])
        self._number_of: dict[tuple[str, int, int], int] = {}
        self.template: list[int] = []
        """Traced tensor that each tensor is a copy of."""
        self.categories: list[str] = []
        self._freed_in: list[str | None] = []
        self.setup: list[int] = []
        self.first: list[int] = []
        self.next: list[int] = []
        self.gradients: list[int] = []
        self._gradient_shadows: dict[int, int] = {}
        for phase, block, layer in self._instances(answer["blocks"]):
            self._write(phase, block, layer)
        self._check()
        self.workspaces = [i for i, c in enumerate(self.categories) if c == "workspace"]
        self.again = [e for e in self.first if e < 0 or self.categories[e] != "workspace"]
        self.kernels = self._kernels(answer["blocks"])
        self._terms = Terms([tensor["size"] for tensor in self._tensors])
        self._deltas = {
            name: _Deltas(getattr(self, name), self.template) for name in ("setup", "again", "next")
        }
        self.flops = Terms([kernel.flops for kernel in self.kernels])
        self.moved = Sums([kernel.moved for kernel in self.kernels])
        self._counts = answer["parameters"]

    def sizes(self, micro_batch: int, rank: int) -> list[int]:
        """Bytes of each tensor."""
        traced = self._traced_sizes(micro_batch, rank).tolist()
        return [traced[index] for index in self.template]

    def running_bytes(self, events: str, micro_batch: int, rank: int) -> Array:
        """Bytes alive after each event of `setup`, `again` or `next`, from zero, rounded to 512 B."""
        rounded = (self._traced_sizes(micro_batch, rank) + 511) // 512 * 512
        return self._deltas[events].running(rounded)

    def bytes_of(self, numbers: Sequence[int], micro_batch: int, rank: int) -> int:
        """Sum of tensors' sizes, each rounded to 512 B."""
        rounded = (self._traced_sizes(micro_batch, rank) + 511) // 512 * 512
        return int(rounded[[self.template[number] for number in numbers]].sum())

    def _traced_sizes(self, micro_batch: int, rank: int) -> Array:
        traced = self._terms.at(micro_batch, rank)
        for index, tensor in enumerate(self._tensors):
            if "rule" in tensor:
                name, *terms = tensor["rule"]
                traced[index] = _RULES[name]([evaluate(t, micro_batch, rank) for t in terms])
        return traced

    def trainable(self, rank: int) -> list[TensorSpec]:
        """Trainable parameters in the model's order."""
        specs = []
        for number in self.setup:
            if number >= 0 and (entry := self._tensors[self.template[number]]).get("trainable"):
                specs.append(
                    TensorSpec(
                        shape=tuple(evaluate(term, 1, rank) for term in entry["shape"]),
                        dtype=entry["dtype"],
                        group=entry["group"],
                        embedding=entry["embedding"],
                    )
                )
        return specs

    def num_parameters(self, rank: int) -> tuple[int, int]:
        """(all, trainable) elements, 4-bit weights counted unpacked."""
        total = trainable = 0
        for layer, entry in self._counts.items():
            copies = self._layers.copies(int(layer))
            total += copies * sum(evaluate(t, 1, rank) for t in entry["total"])
            trainable += copies * sum(evaluate(t, 1, rank) for t in entry["trainable"])
        return total, trainable

    def _instances(self, blocks: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], int]]:
        """(phase, traced block, layer of the whole model) in order of execution."""
        position = 0
        while position < len(blocks):
            block = blocks[position]
            if block["layer"] < 0:
                yield block["phase"], block, -1
                position += 1
                continue
            run = [block]
            while (
                position + len(run) < len(blocks)
                and blocks[position + len(run)]["phase"] == block["phase"]
                and blocks[position + len(run)]["layer"] >= 0
            ):
                run.append(blocks[position + len(run)])
            position += len(run)
            by_layer = {b["layer"]: b for b in run}
            if sorted(by_layer) != list(range(self._layers.traced)) or len(run) != len(by_layer):
                raise BrokenTrace(f"{block['phase']}: layers {[b['layer'] for b in run]}")
            order = range(self._layers.full)
            for layer in order if run[0]["layer"] == 0 else reversed(order):
                yield block["phase"], by_layer[self._layers.source(layer)], layer

    def _write(self, phase: str, block: dict[str, Any], layer: int) -> None:
        accumulate = {position: [] for position, _ in block["accumulate"]}
        for position, gradient in block["accumulate"]:
            accumulate[position].append(gradient)
        for position, event in enumerate(block["events"]):
            self._hand_over(accumulate.get(position, ()), layer)
            tensor = event if event >= 0 else ~event
            for number in self._numbers(tensor, layer, new=event >= 0):
                self._emit(phase, number, is_free=event < 0)
        self._hand_over(accumulate.get(len(block["events"]), ()), layer)

    def _emit(self, phase: str, number: int, *, is_free: bool) -> None:
        if phase in SETUP_PHASES:
            self.setup.append(~number if is_free else number)
            if is_free:
                self.categories[number] = "temporary"
            return
        if is_free:
            self._freed_in[number] = phase
        self.first.append(~number if is_free else number)
        if self.categories[number] == "workspace":
            return
        shadow = self._gradient_shadows.get(number, number)
        self.next.append(~shadow if is_free else shadow)

    def _hand_over(self, gradients: Sequence[int], layer: int) -> None:
        """Where gradients exist already, the new one is added to them and freed."""
        for gradient in gradients:
            for number in self._numbers(gradient, layer, new=False):
                self.next.append(~self._gradient_shadows[number])

    def _numbers(self, tensor: int, layer: int, *, new: bool) -> list[int]:
        """Numbers of a traced tensor as seen from a block of `layer`."""
        phase, home, ordinal = self._key_of[tensor]
        if home < 0:
            layers = [-1]
        elif layer < 0:
            layers = self._layers.instances(home)
        else:
            layers = [layer + home - self._layers.source(layer)]
        if new:
            return [self._create(tensor, phase, layers[0], ordinal)]
        try:
            return [self._number_of[phase, instance, ordinal] for instance in layers]
        except KeyError:
            raise BrokenTrace(f"{phase} layer {layer}: a tensor that no layer made") from None

    def _create(self, tensor: int, phase: str, layer: int, ordinal: int) -> int:
        number = self._append(tensor)
        self._number_of[phase, layer, ordinal] = number
        category = self._tensors[tensor].get("category")
        if category == "gradient":
            self.gradients.append(number)
            self._gradient_shadows[number] = self._append(tensor)
        elif category is None:
            self.categories[number] = "parameter" if phase in SETUP_PHASES else "activation"
        return number

    def _append(self, tensor: int) -> int:
        self.template.append(tensor)
        self.categories.append(self._tensors[tensor].get("category") or "temporary")
        self._freed_in.append(None)
        return len(self.template) - 1

    def _check(self) -> None:
        """Every free has its allocation; only gradients and workspaces outlive the step."""
        for events in (self.first, self.next):
            alive: set[int] = set()
            for event in events:
                if event >= 0:
                    alive.add(event)
                elif ~event in alive:
                    alive.remove(~event)
                else:
                    raise BrokenTrace(f"tensor {~event} is freed before it is allocated, or twice")
            left = {self.categories[number] for number in alive} - {"gradient", "workspace"}
            if left:
                raise BrokenTrace(f"{', '.join(sorted(left))} tensors outlive the step")
        made_in_forward = {
            number for key, number in self._number_of.items() if key[0] in FORWARD_PHASES
        }
        for number, category in enumerate(self.categories):
            if category == "activation":
                saved = number in made_in_forward and self._freed_in[number] not in FORWARD_PHASES
                self.categories[number] = "activation" if saved else "temporary"

    def _kernels(self, blocks: list[dict[str, Any]]) -> list[TracedKernel]:
        counts: dict[tuple[Any, ...], int] = {}
        for block in blocks:
            if block["phase"] in SETUP_PHASES:
                continue
            copies = self._layers.copies(block["layer"])
            for name, dtype, flops, moved, recomputed, count in block["kernels"]:
                key = (name, dtype, tuple(flops), tuple(tuple(t) for t in moved), recomputed)
                counts[key] = counts.get(key, 0) + count * copies
        return [
            TracedKernel(
                name=name, dtype=dtype, flops=flops, moved=moved, recomputed=recomputed, count=count
            )
            for (name, dtype, flops, moved, recomputed), count in counts.items()
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


def _home_keys(
    tensors: list[dict[str, Any]], blocks: list[dict[str, Any]]
) -> list[tuple[str, int, int]]:
    """(phase, layer, ordinal within the block) where each traced tensor is allocated."""
    keys: list[tuple[str, int, int]] = [("", -1, -1)] * len(tensors)
    for block in blocks:
        ordinal = 0
        for event in block["events"]:
            if event < 0:
                continue
            is_once = tensors[event].get("category") == "workspace"
            if block["layer"] < 0 or is_once:
                keys[event] = (block["phase"], -1, event)
            else:
                keys[event] = (block["phase"], block["layer"], ordinal)
                ordinal += 1
    return keys
