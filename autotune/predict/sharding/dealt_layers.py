"""A model's layers dealt out over GPUs that one process has work in turn: Transformers' device_map.

Each GPU has the weights of its layers, their gradients and optimizer state, and what its layers keep for
the backward pass; the embedding is on the first, final norm and head on the last, or on the first where
the head's weights are the embedding's. The events of one GPU's step are parted by where a tensor is made.
What accelerate's hooks add: a copy of the hidden states, and of their gradients, where they pass from one
GPU to another; copies of what every layer is given (rotary embedding, positions) for each layer that is not
on the first GPU; the logits once more on the first GPU, where the forward pass began.

Sources: accelerate 1.15 big_modeling.py dispatch_model, hooks.py AlignDevicesHook; transformers 5.23 Trainer
(is_model_parallel). Held against PyTorch's own allocators with two to four cards that are not there:
studies/device-map, tests/contracts/test_device_map.py.

Known limitations
- The GPUs take turns: while one works, the others wait; so they do in the update here, though the
  host may launch one GPU's kernels while another's run.
- Labels that are shifted for the loss are counted on the head's GPU; they are on the first.
- Layers that are given different masks, as with sliding windows, count a copy of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import numpy as np

from autotune.memory.traces import EMBED_PHASES, FORWARD_PHASES, Phase, Place, Trace
from autotune.memory.traces.running import left_by
from autotune.memory.traces.terms import Array, summable
from autotune.predict.sharding.exchange import Exchange
from autotune.predict.sharding.layer_counts import USUAL_RANK, layers_per_gpu
from autotune.predict.sharding.shards import is_tied
from autotune.predict.sharding.shared_trace import SharedTrace
from autotune.records.estimate import TraceSpec
from autotune.speed.links import Message

Block = tuple[Phase, Place, list[int]]

_OF_LAYERS = ("gradient", "workspace")
"""Categories of tensors that no layer hands on to the next."""


class DealtTrace(SharedTrace):
    """A Trace whose layers are dealt out: it answers for all GPUs together, `stages` for each."""

    def __init__(
        self,
        trace: Trace,
        spec: TraceSpec,
        *,
        num_gpus: int,
        counts: tuple[int, ...] = (),
    ) -> None:
        """`counts`: numbers of layers; empty: as is best."""
        super().__init__(trace, spec.parallelism)
        self.counts = counts or layers_per_gpu(trace, num_gpus, micro_batch=1 if spec.single else 2)
        """Number of layers that each GPU has."""
        self._events = events = _Events(trace, self.counts, spec.activation_checkpointing)
        self.stages = tuple(StageTrace(self, trace, events, gpu) for gpu in range(num_gpus))

    def exchange(self, micro_batch: int, rank: int) -> Exchange:
        """Bytes that the GPUs copy to each other."""
        sizes = self._trace.sizes(micro_batch, rank)
        copied = Counter(sizes[number] for number in self._events.crossing)
        return Exchange(
            num_gpus=len(self.counts),
            # A copy takes as long as gathering twice its bytes among two, each of which sends half.
            messages_per_micro_step=tuple(
                Message(operation="all_gather", num_bytes=2 * size, count=count, num_gpus=2)
                for size, count in copied.items()
            ),
            messages_per_step=(),
            layers=self.counts,
        )


class StageTrace(SharedTrace):
    """The part of a step that one of the GPUs runs: its layers."""

    def __init__(self, dealt: DealtTrace, trace: Trace, events: _Events, gpu: int) -> None:
        super().__init__(trace, dealt.name)
        self._dealt = dealt
        self._copied = events.copied
        self._loaded = events.loaded[gpu]
        # Transformers asks for what it will load in one piece, and gives it back (5.23 modeling_utils.py,
        # caching_allocator_warmup), so that the weights lie in one segment.
        whole = len(trace.template) + len(self._copied)
        self.setup = [whole, ~whole, *events.setup[gpu]]
        self.num_prepared_events = 2 + events.num_prepared[gpu]
        self.num_own_events = len(self.setup)
        self.first, self.next = events.first[gpu], events.next[gpu]
        self._weights = {event for event in self.setup if event >= 0}
        made = {event for event in self.first if event >= 0}
        self.gradients = [number for number in trace.gradients if number in made]
        self.workspaces = [
            number for number in self.first if number >= 0 and events.is_workspace(number)
        ]
        of_first = set(self.workspaces)
        self.again = [event for event in self.first if event not in of_first]
        self.step_buffers = []
        self.batch, self.count = (trace.batch, trace.count) if gpu == 0 else ([], [])
        self.loss = trace.loss if trace.loss in made else None

    @property
    def added_categories(self) -> list[str]:
        return [*(self._trace.categories[number] for number in self._copied), "temporary"]

    def exchange(self, micro_batch: int, rank: int) -> Exchange:
        return self._dealt.exchange(micro_batch, rank)

    def _put_together(self, micro_batch: int, rank: int) -> Array:
        whole = summable(self._trace.sizes_of_part(micro_batch, rank))
        return np.concatenate((whole, whole[self._copied], [whole[self._loaded].sum()]))


class _Events:
    """The events of a trace, parted among the GPUs, with the copies that go between them."""

    def __init__(self, trace: Trace, counts: Sequence[int], checkpoint_every: int) -> None:
        self.num_gpus = len(counts)
        self.copied: list[int] = []
        """The tensors that the added ones, numbered on from the trace's, are copies of."""
        self.owner: dict[int, int] = {}
        """The GPU that has each tensor."""
        self.workspaces = set(trace.workspaces)
        self.logits = {n for n, name in enumerate(trace.categories) if name == "logits"}
        self.loss = trace.loss
        self._trace = trace
        self._gpu_of_layer = [gpu for gpu, count in enumerate(counts) for _ in range(count)]
        self.head = 0 if is_tied(trace.parameters()) else len(counts) - 1
        """The GPU that has final norm and head."""
        self._checkpoint_every = checkpoint_every
        self._sizes = [trace.sizes(micro_batch, USUAL_RANK) for micro_batch in (2, 4)]
        self._number_of: dict[object, int] = {}
        self.setup: list[list[int]] = [[] for _ in counts]
        self.num_prepared = [0] * len(counts)
        loading = (block for phase, _, block in trace.setup_blocks() if phase == Phase.WEIGHTS)
        self._of_files = set(chain.from_iterable(loading))
        self._part_setup()
        stored = [p.number for p in trace.parameters() if p.number in self._of_files]
        self.loaded = [[n for n in stored if self.owner[n] == gpu] for gpu in range(self.num_gpus)]
        """Weights of the checkpoint that each GPU has."""
        first = _Parting(self, trace.blocks())
        self.first = first.parts
        self.crossing = first.crossing
        """Tensors that a micro-step copies from one GPU to another."""
        self.next = _Parting(self, trace.next_blocks()).parts

    def is_workspace(self, number: int) -> bool:
        """Whether the tensor is a workspace of a library, or another GPU's like it."""
        num_traced = len(self._trace.template)
        return (
            self.copied[number - num_traced] if number >= num_traced else number
        ) in self.workspaces

    def copy(self, number: int, *of: object) -> int:
        """Return the number of a copy, the same whenever it is asked for."""
        key = (number, *of)
        if key not in self._number_of:
            self._number_of[key] = len(self._trace.template) + len(self.copied)
            self.copied.append(number)
        return self._number_of[key]

    def gpu_of(self, phase: Phase, place: Place) -> int:
        """Return the GPU that runs a block."""
        if place[1] >= 0:
            return self._gpu_of_layer[place[1]]
        return 0 if phase in EMBED_PHASES else self.head

    def is_checkpointed(self, place: Place) -> bool:
        """Whether a layer runs again in the backward pass: every n-th from the first."""
        every = self._checkpoint_every
        return every > 0 and place[1] % every == 0

    def sizes_of(self, number: int) -> list[int]:
        """Return the tensor's bytes for two and for four samples."""
        return [sizes[number] for sizes in self._sizes]

    def is_handed_on(self, number: int) -> bool:
        """Whether the tensor, if it is left, is what a layer hands on to the next."""
        small, large = self.sizes_of(number)
        return self._trace.categories[number] not in _OF_LAYERS and small < large

    def _part_setup(self) -> None:
        """Part the events before the first step: weights outside the layers come first, as in files.

        What one GPU asks for as it begins to load, and gives back, is of all weights: it is left out.
        """
        outside = {
            p.number: 0 if p.embedding else self.head
            for p in self._trace.parameters()
            if p.place[1] < 0
        }
        for number, gpu in outside.items():
            if number in self._of_files:
                self.owner[number] = gpu
                self.setup[gpu].append(number)
        position = 0
        for phase, place, block in self._trace.setup_blocks():
            gpu = self._gpu_of_layer[place[1]] if place[1] >= 0 else 0
            stays = set(left_by(block))
            for event in block:
                position += 1
                is_kept = place[1] >= 0 or phase != Phase.WEIGHTS or event in stays
                if event >= 0 and event not in self.owner and is_kept:
                    self.owner[event] = outside.get(event, gpu)
                    self.setup[self.owner[event]].append(event)
                elif event < 0 and is_kept:
                    self.setup[self.owner[~event]].append(event)
                if position == self._trace.num_prepared_events:
                    self.num_prepared = [len(part) for part in self.setup]


class _Parting:
    """Parts the events of one micro-step among the GPUs."""

    def __init__(self, events: _Events, blocks: Sequence[Block]) -> None:
        self.parts: list[list[int]] = [[] for _ in range(events.num_gpus)]
        self.crossing: list[int] = []
        self._events = events
        self._handed: dict[int, tuple[int, int]] = {}
        """By a tensor that was handed on: the GPU that has the copy, and the copy's number."""
        self._freed: set[int] = set()
        """Tensors that are freed earlier than in the trace: what was handed on, and copied."""
        self._left: list[int] = []
        """Tensors that the blocks before have left, of which the last is handed on."""
        self._wanted: list[list[int]] = [[] for _ in self.parts]
        """Workspaces of libraries that each GPU has yet to make."""
        self._logits: int | None = None
        """The tensor of the logits: what the head makes first."""
        self._is_returned = False
        """Whether the forward pass has its loss, and what is made is made of what it returns."""
        self._kept, self._transient = self._given_to_layers(blocks)
        self._run(blocks)

    def _run(self, blocks: Sequence[Block]) -> None:
        gpu, was_forward = 0, True
        for phase, place, block in blocks:
            is_forward = phase in FORWARD_PHASES
            here = gpu if phase == Phase.END else self._events.gpu_of(phase, place)
            if was_forward and not is_forward:
                self._wanted, self._left = [[] for _ in self.parts], []
            behind: list[tuple[int, int]] = []
            if here != gpu and self._left:
                behind += self._hand_on(here, is_forward=is_forward)
            if place[1] >= 0 and here > 0:
                behind += self._give(place, here, is_forward=is_forward)
            self.parts[here] += [self._events.copy(n, here) for n in self._wanted[here]]
            self._wanted[here] = []
            for event in block:
                self._write(event, here)
            for owner, number in behind:
                self.parts[owner].append(~number)
            self._is_returned = False
            self._note_left(block, is_forward=is_forward)
            gpu, was_forward = here, is_forward

    def _given_to_layers(self, blocks: Sequence[Block]) -> tuple[list[int], list[int]]:
        """Find what every layer is given beside hidden states: what it keeps, and what goes with the call."""
        made, freed_forward, handed = list[int](), set[int](), list[int]()
        for phase, place, block in blocks:
            if phase == Phase.EMBED:
                made += left_by(block)
            if phase in FORWARD_PHASES:
                freed_forward |= {~event for event in block if event < 0}
            if phase == Phase.FORWARD and place[1] >= 0 and not handed:
                handed = [
                    size for number in left_by(block)[-1:] for size in self._events.sizes_of(number)
                ]
        given = [number for number in made if self._events.sizes_of(number) != handed]
        kept = [number for number in given if number not in freed_forward]
        return kept, [number for number in given if number in freed_forward]

    def _note_left(self, block: Sequence[int], *, is_forward: bool) -> None:
        """Note what a layer may hand on to the next.

        Going forward that is the last tensor that it leaves. Going backward it is the gradient of its input,
        which one layer after the other adds to in place: the last that any of them has left.
        """
        if is_forward:
            self._left = []
        freed = {~event for event in block if event < 0}
        self._left = [number for number in self._left if number not in freed]
        self._left += filter(self._events.is_handed_on, left_by(block))

    def _hand_on(self, here: int, *, is_forward: bool) -> list[tuple[int, int]]:
        """Copy what the GPU before hands on; return what goes behind the block: (GPU, tensor)."""
        number = self._left[-1]
        before = self._handed.get(number, (self._events.owner[number], number))
        copy = self._events.copy(number, here)
        self.parts[here].append(copy)
        self.crossing.append(number)
        self._handed[number] = here, copy
        self._freed.add(number)
        if is_forward:
            return [before]
        self.parts[before[0]].append(~before[1])
        return []

    def _give(self, place: Place, here: int, *, is_forward: bool) -> list[tuple[int, int]]:
        """Copy what a layer is given on the first GPU; return what goes behind the block: (GPU, tensor).

        Checkpointing keeps all of it: it lies within the call that copies.
        """
        given = [*self._kept, *self._transient]
        copies = [self._events.copy(number, place) for number in given]
        if is_forward:
            self.parts[here] += copies
            self.crossing += given
        is_kept = self._events.is_checkpointed(place)
        stays = copies if is_kept else copies[: len(self._kept)]
        goes = [copy for copy in copies if (copy in stays) != is_forward]
        return [(here, copy) for copy in goes]

    def _write(self, event: int, here: int) -> None:
        """Write an event to the GPU that has the tensor."""
        events, number = self._events, event if event >= 0 else ~event
        if event < 0:
            if number in self._handed:
                gpu, copy = self._handed.pop(number)
                self.parts[gpu].append(~copy)
            if number not in self._freed:
                self.parts[events.owner[number]].append(event)
            return
        if number == events.loss and here > 0:
            # What the forward pass returns goes to the GPU where it began.
            self._is_returned = True
            if self._logits is not None:
                copy = events.copy(self._logits, 0)
                self.parts[0].append(copy)
                self._handed[self._logits] = 0, copy
                self.crossing.append(self._logits)
        if self._logits is None and number in events.logits:
            self._logits = number
        events.owner[number] = gpu = 0 if self._is_returned else here
        self.parts[gpu].append(event)
        if number in events.workspaces:
            for other in range(events.num_gpus):
                self._wanted[other] += [number] if other != gpu else []
