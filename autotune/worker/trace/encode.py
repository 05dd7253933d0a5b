"""A trace as the worker answers it: sizes as terms, allocations and kernels in blocks by layer.

Sizes are written as `coefficient x micro_batch^i x rank^j`, which is known because both are traced
with primes that no model dimension contains (one more or less than that is told apart).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from autotune.memory.traces import Place
from autotune.records.estimate import TraceSpec
from autotune.space.trainers import TRAINERS
from autotune.worker.build import model as models
from autotune.worker.build.layers import text_part
from autotune.worker.build.tensor_parallel import local
from autotune.worker.trace.chunks import CHUNK_ROWS, Chunks
from autotune.worker.trace.cuda import Workspaces
from autotune.worker.trace.kernels import TrackedKernel
from autotune.worker.trace.meta_step import MetaStep, PassEnd, place_finder
from autotune.worker.trace.tracker import Recording

Term = tuple[int, int, int]


class Symbols:
    """Translates a trace's numbers into terms: (coefficient, power of the micro-batch, power of the rank)."""

    def __init__(
        self, spec: TraceSpec, *, micro_batch: int, rank: int, sequence_length: int
    ) -> None:
        self._micro_batch = micro_batch
        self._rank = rank
        self._terms: dict[int, Term] = {}
        """Terms that were found: layers are alike, so there are few."""
        row = micro_batch * sequence_length
        trainer = TRAINERS[spec.trainer]
        rows = micro_batch * (1 if trainer.passes_apart else trainer.rows_per_sample)
        good = ((micro_batch, -1),) if trainer.compares_samples and trainer.is_trl else ()
        near = {
            "padded": ((rows, 1), *good),
            "padding-free": ((micro_batch, 1), (row, 1), (row, -1)),
        }
        self._near = () if spec.single else near.get(spec.batching, ())
        """Numbers that are near a term, as (the term, the difference): where each sample begins, and the last
        ends; the tokens of a row with one before or behind, or without it; good answers beside a bad one."""

    def term(self, number: int) -> Term:
        """The term of a number; of a number that is near a term, that one."""
        found = self._terms.get(number)
        if found is None:
            base, factor, _ = self._near_term(number)
            found = self._terms[number] = self._monomial(base * factor)
        return found

    def beyond(self, number: int) -> int:
        """The difference between a number and its term; it has no factors beside."""
        return self._near_term(number)[2]

    def rule(self, number: int) -> list[Any] | None:
        """A rule to work out exactly a number that is no term; None for one that is."""
        base, factor, beyond = self._near_term(number)
        if not beyond:
            return None
        return ["near", *map(self._monomial, (base, factor, beyond))]

    def launches_of(self, pieces: int) -> tuple[int, bool]:
        """How many launches a kernel in so many pieces stands for, and whether in each sample."""
        if self._micro_batch == 1 or pieces == 1:
            return pieces, False
        return pieces // self._micro_batch, True

    def of_weight(self, number: int) -> Term:
        """The term of a dimension or a number of elements of a weight, in which there is no micro-batch."""
        rank_power = 0
        while number and number % self._rank == 0:
            number //= self._rank
            rank_power += 1
        return number, 0, rank_power

    def _monomial(self, number: int) -> Term:
        batch_power = 0
        while number and self._micro_batch > 1 and number % self._micro_batch == 0:
            number //= self._micro_batch
            batch_power += 1
        coefficient, _, rank_power = self.of_weight(number)
        return coefficient, batch_power, rank_power

    def _near_term(self, number: int) -> tuple[int, int, int]:
        for base, beyond in self._near:
            if number and number % (base + beyond) == 0:
                return base, number // (base + beyond), beyond
        return number, 1, 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Facts about the weights of a model, by the parameter's id: alike in every trace with that model."""

    decayed: set[int]
    embeddings: set[int]
    tied: nn.Parameter | None
    linears: set[int]
    of_root: set[int]
    positions: dict[int, int]
    counted: list[dict[str, Any]]
    """Numbers of elements, by layer."""
    why_not_fsdp2: str


def weights_of(step: MetaStep, symbols: Symbols) -> Weights:
    """Look through the weights of a step's model, as it is set up."""
    model = step.model
    names = dict(model.named_parameters())
    place_of = place_finder(model, step.task)
    outside = {id(parameter) for name, parameter in names.items() if place_of(name)[1] < 0}
    modules = list(model.modules())
    return Weights(
        decayed=models.decayed_parameters(model),
        embeddings={id(m.weight) for m in modules if isinstance(m, nn.Embedding)},
        tied=models.tied_weight(model),
        linears=models.linear_weights(model),
        of_root=models.left_to_root(model) & outside,
        positions=_positions(names, place_of),
        counted=_count_parameters(names, modules, place_of, symbols),
        why_not_fsdp2=models.why_not_fsdp2(model, is_quantized=step.spec.quantization != "none"),
    )


def encode(
    step: MetaStep,
    weights: Weights,
    workspaces: Workspaces,
    chunks: Chunks,
    symbols: Symbols,
    layers: dict[str, Any],
    made_by: Mapping[int, str],
) -> dict[str, Any]:
    """Encode a trace as autotune.memory.traces.Trace reads it.

    `weights`: those of its model. `layers`: which were traced, as autotune.memory.traces.Stacks reads it.
    `made_by`: what made each tensor, where that was asked for.
    """
    recording = step.tracker.recording
    blocks = _blocks(recording, step, chunks, symbols)
    model: Any = step.model
    vocabulary = getattr(text_part(model.config), "vocab_size", -1)
    tensors: list[Any] = []
    for index, tensor in enumerate(recording.tensors):
        size_bytes, per_row = _per_row(tensor.size_bytes, chunks)
        entry: dict[str, Any] = {"size": symbols.term(size_bytes)}
        rule = symbols.rule(size_bytes)
        if index == step.block:  # A sum over the whole model: no product.
            entry["size"], rule = (size_bytes, 0, 0), None
        if rule is not None:
            entry["rule"] = rule
        if per_row:
            entry["chunked"] = "others" if index in chunks.others else "first"
        for number, those in (("one", chunks.instead), ("several", chunks.replaced)):
            if index in those:
                entry["of_chunks"] = number
        if index in made_by:
            entry["operation"] = made_by[index]
        if index in step.parameters:
            entry["category"] = "parameter"
            parameter = step.parameters[index]
            entry["dtype"] = tensor.dtype
            entry["trainable"] = parameter.requires_grad and index not in step.frozen
            entry["shape"] = [symbols.of_weight(n) for n in local(parameter).shape]
            entry["group"] = int(id(parameter) not in weights.decayed)
            entry["embedding"] = id(parameter) in weights.embeddings
            if parameter is weights.tied:
                entry["is_tied"] = True
            entry["linear"] = id(parameter) in weights.linears
            entry["position"] = weights.positions.get(id(parameter), 0)
            if id(parameter) in weights.of_root:
                entry["of_root"] = True
        elif index in step.gradients:
            entry["category"] = "gradient"
            entry["of"] = step.gradients[index]
            for name, those in (("copied", step.copied), ("shared", step.shared)):
                if index in those:
                    entry[name] = True
        elif index in workspaces.indices:
            entry["category"] = "workspace"
        elif tensor.shape and tensor.shape[-1] == vocabulary:
            entry["category"] = "logits"
        if tensor.rule is not None:
            name, *numbers = tensor.rule
            if any(_per_row(number, chunks)[1] for number in numbers):
                entry["size"] = symbols.term(0)  # Of a chunk's few rows: not modelled.
            else:
                entry["rule"] = [name, *map(symbols.term, numbers)]
        tensors.append(entry)
    answer = {
        **layers,
        "tensors": tensors,
        "blocks": blocks,
        "parameters": weights.counted,
        "loss": step.loss,
    }
    if step.returned is not None:
        answer["returned"] = _returned(step, step.returned, workspaces, symbols)
    if weights.why_not_fsdp2:
        answer["why_not_fsdp2"] = weights.why_not_fsdp2
    if chunks.is_symbolic and chunks.rule is not None:
        name, num_tokens, constant = chunks.rule
        answer["chunks"] = [name, symbols.term(num_tokens), symbols.beyond(num_tokens), constant]
    return answer


def _returned(
    step: MetaStep, returned: PassEnd, workspaces: Workspaces, symbols: Symbols
) -> dict[str, Any]:
    """Encode what the forward pass returned: the events before and behind, and each tensor with its size."""
    events = step.tracker.recording.events

    def last_before(end: int) -> int:
        own = (event for event in reversed(events[:end]) if event not in workspaces.indices)
        return next(own)

    return {
        "after": last_before(returned.after),
        "until": last_before(returned.until),
        "tensors": [[number, symbols.term(size)] for number, size in returned.tensors],
    }


def _positions(
    names: Mapping[str, nn.Parameter], place_of: Callable[[str], Place]
) -> dict[int, int]:
    """Count the weights of its layer that come before each in the model's order."""
    found: dict[int, int] = {}
    counts: Counter[Place] = Counter()
    for name, parameter in names.items():
        found[id(parameter)] = counts[place_of(name)]
        counts[place_of(name)] += 1
    return found


def _per_row(number: int, chunks: Chunks) -> tuple[int, bool]:
    """The part of one token in a size that is as large as a chunk of tokens, and whether it is one."""
    if number and chunks.rule is not None and chunks.is_symbolic and number % CHUNK_ROWS == 0:
        return number // CHUNK_ROWS, True
    return number, False


def _count_parameters(
    names: Mapping[str, nn.Parameter],
    modules: Iterable[nn.Module],
    place_of: Callable[[str], Place],
    symbols: Symbols,
) -> list[dict[str, Any]]:
    """Count elements of the traced layers by layer as in `blocks`, 4-bit weights unpacked."""
    linears: list[Any] = [m for m in modules if type(m).__name__ == "Linear4bit"]
    quantised: dict[int, int] = {id(m.weight): m.in_features * m.out_features for m in linears}
    counted: dict[Place, dict[str, Any]] = {}
    for name, parameter in names.items():
        elements = quantised.get(id(parameter), parameter.numel())
        stack, layer = place = place_of(name)
        counts = {"stack": stack, "layer": layer, "total": [], "trainable": []}
        entry = counted.setdefault(place, counts)
        monomial = symbols.of_weight(elements)
        entry["total"].append(monomial)
        if parameter.requires_grad:
            entry["trainable"].append(monomial)
    return [*counted.values()]


def _blocks(
    recording: Recording, step: MetaStep, chunks: Chunks, symbols: Symbols
) -> list[dict[str, Any]]:
    marks = recording.marks
    ends = [*((m[0], m[1]) for m in marks[1:]), (len(recording.events), len(recording.kernels))]
    handed_over = step.handed_over
    known: dict[_KernelKey, list[Any]] = {}
    blocks = []
    for (first, first_kernel, (phase, place)), (last, last_kernel) in zip(marks, ends, strict=True):
        last_position = last + (last == len(recording.events))
        accumulate = [
            (position - first, gradient)
            for position in range(first, last_position)
            for gradient in handed_over.get(position, ())
        ]
        events = recording.events[first:last]
        launched = recording.kernels[first_kernel:last_kernel]
        kernels = _count_kernels(launched, chunks, symbols, known)
        if events or kernels or accumulate:
            blocks.append(
                {
                    "phase": phase,
                    "stack": place[0],
                    "layer": place[1],
                    "events": events,
                    "accumulate": accumulate,
                    "kernels": kernels,
                }
            )
    return blocks


_KernelKey = tuple[Any, ...]
"""All that tells kernels of a trace apart."""


def _count_kernels(
    kernels: list[TrackedKernel],
    chunks: Chunks,
    symbols: Symbols,
    known: dict[_KernelKey, list[Any]],
) -> list[Any]:
    """Count equal kernels of a block: [name, dtype, flops, [bytes ...], recomputed, count, [shape ...]].

    One that handles a chunk of tokens has two parts more: the bytes per token of it, apart from the
    others (its operations are per token too), and whether it stands for all chunks but the first. A
    size of a shape is a term and whether it is per token of a chunk. One that is launched so many times for
    each sample has `each` more. `known`: one launch of each kernel that other blocks have.
    """
    counts: dict[_KernelKey, int] = {}
    for k in kernels:
        sizes = tuple(sorted(k.tensor_bytes))
        key = (k.name, k.dtype, k.num_flops, sizes, k.recomputed, k.repeated, k.shape, k.pieces)
        counts[key] = counts.get(key, 0) + 1
    encoded = []
    for key, count in counts.items():
        if key not in known:
            known[key] = _encode_kernel(key, chunks, symbols)
        entry = known[key].copy()
        entry[_COUNT] *= count
        encoded.append(entry)
    return encoded


_COUNT = 5
"""Place of the number of launches in a kernel's entry."""


def _encode_kernel(key: _KernelKey, chunks: Chunks, symbols: Symbols) -> list[Any]:
    """Return the entry of one launch of a kernel, as _count_kernels has it."""
    name, dtype, flops, sizes, recomputed, repeated, shape, pieces = key
    parts = [_per_row(size, chunks) for size in sizes]
    moved = _sum_of([size for size, per_row in parts if not per_row], symbols)
    flops_term = symbols.term(_per_row(flops, chunks)[0])
    of_shape = [_size_of_shape(size, chunks, symbols) for size in shape]
    of_sample, is_of_each = symbols.launches_of(pieces)
    entry = [name, dtype, flops_term, moved, recomputed, of_sample, of_shape]
    if is_of_each:
        entry.append("each")
    of_chunk = [size for size, per_row in parts if per_row]
    if of_chunk or repeated:
        entry += [_sum_of(of_chunk, symbols), repeated]
    return entry


def _size_of_shape(size: int, chunks: Chunks, symbols: Symbols) -> tuple[int, int, int, int]:
    of_token, is_per_token = _per_row(size, chunks)
    return *symbols.term(of_token), int(is_per_token)


def _sum_of(sizes: list[int], symbols: Symbols) -> list[Term]:
    terms: dict[tuple[int, int], int] = {}
    for size in sizes:
        coefficient, batch_power, rank_power = symbols.term(size)
        powers = batch_power, rank_power
        terms[powers] = terms.get(powers, 0) + coefficient
    return [(coefficient, i, j) for (i, j), coefficient in terms.items()]
