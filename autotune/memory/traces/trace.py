"""The events and kernels of one micro-step of the whole model, from the worker's answer."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune.memory.optimizers import TensorSpec
from autotune.memory.traces.blocks import TracedKernel, adding, cut, giving_up, keeping
from autotune.memory.traces.copies import Copies, Events, numbers_of
from autotune.memory.traces.launches import Chunks, Kernels, Launch, chunk_rows
from autotune.memory.traces.layers import TOWER, BrokenTrace, Stacks
from autotune.memory.traces.phases import (
    FETCH_PHASES,
    FORWARD_PHASES,
    GENERATION_PHASES,
    SCORING_PHASES,
    SETUP_PHASES,
    Phase,
    Place,
)
from autotune.memory.traces.running import in_blocks
from autotune.memory.traces.terms import (
    NUM_SMS_AT,
    RULES,
    Array,
    Term,
    Terms,
    evaluate,
    holding,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedParameter:
    """One weight of the whole model."""

    number: int
    """Number of the parameter's tensor."""
    place: Place
    shape: tuple[Term, ...]
    dtype: str
    trainable: bool
    group: int
    embedding: bool
    is_tied: bool = False
    """Whether it is the embedding's and the head's."""
    of_root: bool = False
    """Whether it is left to FSDP2's root."""
    position: int = 0
    """How many weights of its layer come before it in the model, adapters among them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Returned:
    """Outputs of the model's forward pass, and how long the Trainer holds them."""

    after: int
    """Event behind which it returned."""
    until: int
    """Event by which the Trainer has let go of it."""
    tensors: tuple[tuple[int, Term], ...]
    """Each tensor's number, and the bytes that it has of it."""


class Trace:
    """The events and kernels of one micro-step of the whole model, sizes still symbolic.

    Tensors are numbered; `setup` allocates weights, `batch` a micro-batch, which outlives its
    micro-step, and `count` counts its labels. `first` is a micro-step that makes the gradients (and
    the library workspaces, which stay), `again` the same once workspaces exist, `next` one that adds
    to gradients already there. Its `loss` outlives it, too.
    """

    identity: str = ""
    """A text that no other trace has; empty where nobody has given it one."""

    def __init__(self, answer: dict[str, Any], *, adds_up: bool = False) -> None:
        """Put a worker's answer together. `adds_up`: it is known to, and is not checked again."""
        stacks = Stacks.of_answer(answer)
        self._answer = answer if "cut" in answer["layers"] else None
        blocks = [{**block, "phase": Phase(block["phase"])} for block in answer["blocks"]]
        self.is_compiled: bool = answer.get("compiled", False)
        """Whether the step is one that torch.compile has made."""
        self.not_compiled: str = answer.get("not_compiled", "")
        """Reason why it is not, where it was to be."""
        self.why_not_fsdp2: str = answer.get("why_not_fsdp2", "")
        """Reason why FSDP2 does not run the model; empty where it does."""
        self._tensors: list[dict[str, Any]] = answer["tensors"]
        self._rules = _by_rule(self._tensors)
        self._terms = Terms([tensor["size"] for tensor in self._tensors])
        self._chunks: Chunks | None = answer.get("chunks")
        self._chunked = [i for i, tensor in enumerate(self._tensors) if tensor.get("chunked")]
        self._others = [i for i, t in enumerate(self._tensors) if t.get("chunked") == "others"]
        self._of_chunks = {
            number: [i for i, t in enumerate(self._tensors) if t.get("of_chunks") == number]
            for number in ("one", "several")
        }
        copies = Copies(self._tensors, blocks, stacks)
        self._template = copies.template
        # What prices a configuration asks for the same sizes several times in a row.
        self._traced_sizes = functools.lru_cache(maxsize=2)(self._work_out_sizes)
        self._rounded_sizes = functools.lru_cache(maxsize=2)(self._round_sizes)
        self._changes = functools.cache(self._find_changes)
        self._left = functools.cache(self._find_left)

        others = (*SETUP_PHASES, *FETCH_PHASES, *GENERATION_PHASES)
        step = [phase for phase in Phase if phase not in others]
        backward_phases = [phase for phase in step if phase not in FORWARD_PHASES]

        def whole(
            phases: Collection[Phase], events_of: Callable[..., list[int]], before: int = 0
        ) -> tuple[Events, list[tuple[Phase, Place, int]]]:
            """Events of these phases, and where their blocks start; so many come before."""
            events, starts = copies.events(
                {i: events_of(b) for i, b in enumerate(blocks) if b["phase"] in phases}
            )
            return events, [
                (blocks[i]["phase"], (blocks[i]["stack"], layer), before + at)
                for i, layer, at in starts
            ]

        traced = operator.itemgetter("events")
        self._setup, self._setup_starts = whole(SETUP_PHASES, traced)
        batch, _ = whole([Phase.BATCH], traced)
        count, _ = whole([Phase.COUNT], traced)
        self.batch, self.count = listed(batch), listed(count)
        forward, forward_starts = whole(FORWARD_PHASES, traced)
        kept = functools.partial(keeping, self._tensors)
        backward, backward_starts = whole(backward_phases, kept, len(forward))
        self._first = np.concatenate((forward, backward))
        self._first_starts = [*forward_starts, *backward_starts]
        self._next, self._next_starts = whole(step, functools.partial(adding, self._tensors))
        self._make_released = functools.partial(
            whole, step, functools.partial(giving_up, self._tensors)
        )
        self._categories = self._categorise(np.concatenate((batch, count, forward)))
        self.loss = listed(self._template).index(answer["loss"]) if "loss" in answer else None
        self._returned = answer.get("returned")
        is_workspace = self._categories[numbers_of(self._first)] == "workspace"
        self._again = self._first[~is_workspace]
        is_kept = self._categories[numbers_of(forward)] == "workspace"
        self.num_forward_workspaces = int(is_kept.sum())
        self.num_forward_events = len(forward) - self.num_forward_workspaces
        """How many events of `again` and of `next` come before the backward pass."""
        if not adds_up:
            self._check(self._first)
            self._check(self._next)
        made = self._first[self._first >= 0]
        self.gradients: list[int] = made[self._categories[made] == "gradient"].tolist()
        stays = ~np.isin(made, ~self._first[self._first < 0])
        is_kept = (self._categories[made] == "workspace") & stays
        self.workspaces: list[int] = made[is_kept].tolist()

        def kernels_of(phases: Collection[Phase]) -> Kernels:
            of_phases = [block for block in blocks if block["phase"] in phases]
            return Kernels(of_phases, stacks, self._chunks)

        self._own = kernels_of([phase for phase in step if phase not in SCORING_PHASES])
        self._of_phases = functools.cache(kernels_of)
        self._scoring = functools.cache(lambda: kernels_of(SCORING_PHASES))
        self._generates = functools.cache(
            lambda phase: (listed(whole([phase], traced)[0]), kernels_of([phase]))
        )
        self._counts = [
            (stacks.copies(entry["stack"], entry["layer"]), entry) for entry in answer["parameters"]
        ]

    def with_lean_layers(self, count: int) -> Trace:
        """Return the trace of the same plan of checkpointing with so many lean layers.

        Raises BrokenTrace where what was traced does not tell of so many.
        """
        return Trace(self.lean_answer(count))

    def lean_answer(self, count: int) -> dict[str, Any]:
        """Return the worker's answer as if it had been asked for so many lean layers."""
        if self._answer is None:
            raise BrokenTrace("every layer was traced")
        return {**self._answer, "layers": {**self._answer["layers"], "begins": count}}

    @property
    def lean_layers(self) -> Sequence[int]:
        """Return the numbers of lean layers that the trace of a plan tells of; none of another trace."""
        return () if self._answer is None else Stacks.of_answer(self._answer).text.lean_counts

    # Few of a search's traces are replayed: the others never become lists.

    @functools.cached_property
    def template(self) -> list[int]:
        """Return the traced tensor that each tensor is a copy of."""
        return listed(self._template)

    @functools.cached_property
    def returned(self) -> Returned | None:
        """Return what the forward pass returned; None where that was not traced."""
        if self._returned is None:
            return None

        def copied(event: int) -> int:
            return self.template.index(event) if event >= 0 else ~self.template.index(~event)

        return Returned(
            after=copied(self._returned["after"]),
            until=copied(self._returned["until"]),
            tensors=tuple(
                (copied(number), (c, i, j)) for number, (c, i, j) in self._returned["tensors"]
            ),
        )

    @functools.cached_property
    def categories(self) -> list[str]:
        """Return each tensor's category, one of allocator.CATEGORIES."""
        return list(self._categories)

    @property
    def operations(self) -> list[str]:
        """Return what made each tensor: an operation, or a weight's name; empty where that was not traced."""
        made_by = [tensor.get("operation", "") for tensor in self._tensors]
        return [made_by[number] for number in self.template]

    @property
    def layers(self) -> dict[int, int]:
        """Return the layer of each tensor that a layer of the text makes in its first micro-step."""
        blocks = (*self.setup_blocks(), *self.blocks())
        return {
            number: layer
            for _, (stack, layer), events in blocks
            for number in events
            if number >= 0 <= layer and stack != TOWER
        }

    def generation(self, phase: Phase) -> list[int]:
        """Return events of a phase of generation; their sizes are of all completions that are generated."""
        return self._generates(phase)[0]

    def generation_launches(self, phase: Phase, num_completions: int, rank: int) -> list[Launch]:
        """The kernels of a phase of generation."""
        return self._generates(phase)[1].launches(num_completions, rank)

    @functools.cached_property
    def setup(self) -> list[int]:
        return listed(self._setup)

    @property
    def of_one(self) -> Trace:
        """Return the step of a GPU that has all to itself: this one."""
        return self

    @property
    def num_own_events(self) -> int:
        """How many events of `setup` come before GPUs share the run: all."""
        return len(self._setup)

    @property
    def num_prepared_events(self) -> int:
        """How many events of `setup` come before the adapter's."""
        later = (Phase.ADAPTER, Phase.SETTLED)
        return next((at for phase, _, at in self._setup_starts if phase in later), len(self._setup))

    @functools.cached_property
    def first(self) -> list[int]:
        return listed(self._first)

    @functools.cached_property
    def again(self) -> list[int]:
        return listed(self._again)

    @functools.cached_property
    def next(self) -> list[int]:
        return listed(self._next)

    @functools.cached_property
    def _released_first(self) -> Events:
        events, self._released_starts = self._make_released()
        self._check(events)
        return events

    @functools.cached_property
    def _released(self) -> Events:
        events = self._released_first
        kept: Events = events[self._categories[numbers_of(events)] != "workspace"]
        return kept

    @functools.cached_property
    def released_first(self) -> list[int]:
        """Return the events of `first`, but each gradient is freed where its parameter gets it."""
        return listed(self._released_first)

    @functools.cached_property
    def released(self) -> list[int]:
        """Return the events of `released_first` once workspaces exist."""
        return listed(self._released)

    def order_of(self, events: str) -> npt.NDArray[np.int64]:
        """Return the list of events of that name: `setup`, `first`, `again` or `next`."""
        order: npt.NDArray[np.int64] = getattr(self, f"_{events}").astype(np.int64)
        return order

    @property
    def step_buffers(self) -> list[int]:
        """Return tensors that live for the optimizer step alone; one GPU needs none."""
        return []

    def blocks(self) -> list[tuple[Phase, Place, list[int]]]:
        """Return (phase, place, events) of `first`, in order."""
        return cut(self.first, self._first_starts)

    def released_blocks(self) -> list[tuple[Phase, Place, list[int]]]:
        """Return (phase, place, events) of `released_first`, in order."""
        return cut(self.released_first, self._released_starts)

    def next_blocks(self) -> list[tuple[Phase, Place, list[int]]]:
        """Return (phase, place, events) of `next`, in order."""
        return cut(self.next, self._next_starts)

    def setup_blocks(self) -> list[tuple[Phase, Place, list[int]]]:
        """Return (phase, place, events) of `setup`, in order."""
        return cut(self.setup, self._setup_starts)

    def parameters(self) -> list[TracedParameter]:
        """Every weight, in the model's order."""
        found = []
        for _, place, events in self.setup_blocks():
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
                        is_tied=entry.get("is_tied", False),
                        of_root=entry.get("of_root", False),
                        position=entry.get("position", 0),
                    )
                )
        return found

    def sizes(self, micro_batch: int, rank: int) -> list[int]:
        """Bytes of each tensor."""
        return listed(self._traced_sizes(micro_batch, rank)[self._template])

    def sizes_of_part(self, micro_batch: float, rank: int) -> Array:
        """Bytes of each tensor, with as many tokens as that part of a micro-batch of full length has."""
        sizes: Array = self._work_out_sizes(micro_batch, rank)[self._template]
        return sizes

    def running_bytes(self, events: str, micro_batch: int, rank: int) -> Array:
        """Bytes alive after each event, from zero, in blocks of 512 B.

        `events`: the list of `setup`, `again`, `next` or `released`.
        """
        traced, signs = self._changes(events)
        return np.cumsum(self._rounded_sizes(micro_batch, rank)[traced] * signs)

    def left_bytes(self, events: str, micro_batch: int, rank: int) -> int:
        """Bytes that are left after the events, of which running_bytes says the names."""
        return int((self._rounded_sizes(micro_batch, rank) * self._left(events)).sum())

    def _find_left(self, events: str) -> Events:
        """Return how many copies of each traced tensor the events leave."""
        traced, signs = self._changes(events)
        num_tensors = len(self._tensors)
        made, freed = (np.bincount(traced[signs == s], minlength=num_tensors) for s in (1, -1))
        return (made - freed).astype(np.int32)

    def _find_changes(self, events: str) -> tuple[Events, Events]:
        """Return the traced tensor of each event, and whether it comes (1) or goes (-1)."""
        order: Events = getattr(self, f"_{events}")
        return self._template[numbers_of(order)], np.where(order < 0, -1, 1)

    def bytes_of(self, numbers: Sequence[int], micro_batch: int, rank: int) -> int:
        """Sum of tensors' sizes, each rounded to 512 B."""
        return int(self._rounded_sizes(micro_batch, rank)[self._template[list(numbers)]].sum())

    def _round_sizes(self, micro_batch: int, rank: int) -> Array:
        return in_blocks(self._traced_sizes(micro_batch, rank))

    def _work_out_sizes(self, micro_batch: float, rank: int) -> Array:
        whole = max(round(micro_batch), 1)
        of_rules = [
            (RULES[name]([evaluate(t, whole, rank) for t in terms]), indices)
            for (name, *terms), indices in self._rules
        ]
        traced = self._terms.at(micro_batch, rank)
        if isinstance(micro_batch, float):
            traced = np.rint(traced).astype(np.int64)
        traced = holding(traced, max((num_bytes for num_bytes, _ in of_rules), default=0))
        for num_bytes, indices in of_rules:
            traced[indices] = num_bytes
        if self._chunked:
            assert self._chunks is not None
            rows, num_tokens = chunk_rows(self._chunks, micro_batch)
            traced = holding(traced, rows * int(traced[self._chunked].max()))
            traced[self._chunked] *= rows
            # Where there is one chunk, it is the second that was traced.
            traced[self._of_chunks["several" if num_tokens <= rows else "one"]] = 0
            if rows < num_tokens < 2 * rows:
                traced[self._others] = traced[self._others] // rows * (num_tokens - rows)
        return traced

    @functools.cached_property
    def num_weights(self) -> int:
        """Return how many weights the whole model has, adapters' among them: tensors, not elements."""
        is_weight = np.array(["shape" in tensor for tensor in self._tensors])
        made = self._setup[self._setup >= 0]
        return int(is_weight[self._template[made]].sum())

    @property
    def kernels(self) -> list[TracedKernel]:
        """Return the kernels of a micro-step but for those that score completions."""
        return self._own.all

    @property
    def stretches(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Return the order of `kernels`, as Kernels.stretches."""
        return self._own.stretches

    def launches(self, micro_batch: float, rank: int) -> list[Launch]:
        """The kernels of a micro-step but for those that score completions, as Kernels.launches."""
        return self._own.launches(micro_batch, rank)

    def launches_of(self, phases: tuple[Phase, ...], micro_batch: float, rank: int) -> list[Launch]:
        """The kernels of these phases of a micro-step."""
        return self._of_phases(phases).launches(micro_batch, rank)

    def scoring_launches(self, micro_batch: float, rank: int) -> list[Launch]:
        """The kernels that score a micro-batch of completions: once, however often it is trained on."""
        return self._scoring().launches(micro_batch, rank)

    def trainable(self, rank: int, among: Collection[int] | None = None) -> list[TensorSpec]:
        """Return the parameters that get a gradient, in the model's order, as an optimizer sees them.

        `among`: numbers of tensors; None for all. In a model that reads images too, the parameters of its
        image part get no gradient from text.
        """
        spec_of = {
            number: self._spec(self._tensors[number], rank) for number in self._with_gradient
        }
        made = self._setup[self._setup >= 0]
        if among is not None:
            made = made[np.isin(made, list(among))]
        traced = listed(self._template[made])
        return [spec_of[number] for number in traced if number in spec_of]

    @functools.cached_property
    def _with_gradient(self) -> set[int]:
        return {tensor["of"] for tensor in self._tensors if "of" in tensor}

    def parameter_of(self, gradient: int, rank: int) -> TensorSpec:
        """The parameter whose gradient has that number."""
        entry = self._tensors[self._template[gradient]]
        return self._spec(self._tensors[entry["of"]], rank)

    def is_of_root(self, gradient: int) -> bool:
        """Whether the gradient with that number is of a weight that is left to FSDP2's root."""
        entry = self._tensors[self._template[gradient]]
        return bool(self._tensors[entry["of"]].get("of_root", False))

    @staticmethod
    def _spec(entry: Mapping[str, Any], rank: int) -> TensorSpec:
        shape = tuple(evaluate(term, 1, rank) for term in entry["shape"])
        kind = operator.itemgetter("dtype", "group", "embedding", "linear")(entry)
        return _tensor_spec(shape, *kind)

    def num_parameters(self, rank: int) -> tuple[int, int]:
        """Return (all, trainable) elements, 4-bit weights counted unpacked."""
        total = trainable = 0
        for copies, entry in self._counts:
            total += copies * sum(evaluate(t, 1, rank) for t in entry["total"])
            trainable += copies * sum(evaluate(t, 1, rank) for t in entry["trainable"])
        return total, trainable

    def _categorise(self, forward: Events) -> npt.NDArray[np.object_]:
        """Categories of the tensors, by the worker's word where it has one.

        Else a parameter is what set-up leaves, an activation what the forward pass leaves, and the rest are
        temporaries.
        """
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
        """Check that every tensor is made once and freed once after.

        Only gradients, workspaces and the loss stay.
        """
        numbers, positions = numbers_of(events), np.arange(len(events))
        is_free = events < 0
        made_at = np.full(len(self._template), len(events))
        made_at[numbers[~is_free]] = positions[~is_free]
        uses = np.bincount(2 * numbers + is_free, minlength=2 * len(self._template))
        wrong = (positions < made_at[numbers]) | (uses[2 * numbers + is_free] > 1)
        if wrong.any():
            number = numbers[wrong][0]
            raise BrokenTrace(f"tensor {number} is freed before it is allocated, or twice")
        made, freed = uses[::2], uses[1::2]
        stays = made > freed
        if self.loss is not None:
            stays[self.loss] = False
        left = set(self._categories[stays]) - {"gradient", "workspace"}
        if left:
            raise BrokenTrace(f"{', '.join(sorted(left))} tensors outlive the step")


def on_card_with(num_sms: int, tensors: Iterable[dict[str, Any]]) -> None:
    """Make the tensors of an answer those of a card with so many multiprocessors, in place."""
    for tensor in tensors:
        name, *_ = tensor.get("rule", ("",))
        if name in NUM_SMS_AT:
            tensor["rule"][1 + NUM_SMS_AT[name]] = [num_sms, 0, 0]


@functools.cache
def _tensor_spec(
    shape: tuple[int, ...], dtype: str, group: int, embedding: bool, linear: bool
) -> TensorSpec:
    """One object for all parameters that are alike: they are compared often."""
    return TensorSpec(shape=shape, dtype=dtype, group=group, embedding=embedding, linear=linear)


def _by_rule(tensors: Sequence[dict[str, Any]]) -> list[tuple[list[Any], list[int]]]:
    """Rules with the tensors that each of them sizes: layers are alike, so there are few."""
    found: dict[str, tuple[list[Any], list[int]]] = {}
    for index, tensor in enumerate(tensors):
        if rule := tensor.get("rule"):
            found.setdefault(repr(rule), (rule, []))[1].append(index)
    return list(found.values())


def listed(values: npt.NDArray[Any]) -> list[int]:
    listed: list[int] = values.tolist()
    return listed
