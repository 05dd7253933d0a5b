"""A model's layers dealt out over GPUs that work at the same time, on micro-batches one behind the other.

As torch.distributed.pipelining runs Schedule1F1B: the first GPU starts as many micro-batches as there are
GPUs, the last one; from then on each takes one forward, one backward. So GPU r of n holds what n - r
micro-batches keep for the backward pass, and the first fills up first. No trainer that is installed runs it:
this prices what a program of one's own would do, whose stages are a module of consecutive layers each.

Each GPU receives hidden states into a buffer, and gradients into another; makes rotary embeddings of its
own; keeps its logits, if it is the last one, until that micro-batch's backward pass has ended, and the
gradient that it has sent until the next has. Before torch 2.15 there are buffers for every micro-batch,
which stay, and what was handed on is kept like the logits. Since then buffers are made for a message and go
with its micro-batch, but for those that the last GPU's losses lead back to, which stay as long as these;
and what was handed on goes once it has arrived (autotune.catalogue.installed.releases_messages).

Source: torch 2.13 and 2.15 distributed/pipelining/schedules.py Schedule1F1B, stage.py. Held against real
processes: tests/contracts/test_pipeline_real.py, and without a card: studies/no-card, pipelines.jsonl.

Known limitations
- Layers are dealt out as evenly as can be; each is taken to be as slow as the others.
- What is sent is not taken to overlap with kernels; what processes cost the host beside is left out.
- The first step's inference of shapes. What waiting micro-batches keep is there before the step's first one:
  reserved bytes are up to 5.5 % too low.
- As many micro-batches as GPUs: the first GPU then holds one less once its gradients exist, which is not
  modelled (10 % too high in a tiny Llama on four); of less than twice as many it holds a message less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from autotune.catalogue.installed import releases_messages
from autotune.memory.optimizers import TensorSpec
from autotune.memory.traces import EMBED_PHASES, FORWARD_PHASES, Launch, Phase, Place, Trace
from autotune.memory.traces.running import left_by
from autotune.memory.traces.terms import Array, summable
from autotune.predict.sharding.exchange import Exchange
from autotune.predict.sharding.layer_counts import USUAL_RANK
from autotune.predict.sharding.shared_trace import SharedTrace
from autotune.records.estimate import TraceSpec
from autotune.speed.links import PERMUTE, Message

Block = tuple[Phase, Place, list[int]]
GpuOf = Callable[[Phase, Place], int]


def even_counts(num_layers: int, num_gpus: int) -> tuple[int, ...]:
    """Numbers of layers that are as even as can be: the first GPUs have one more."""
    each, left = divmod(num_layers, num_gpus)
    return tuple(each + (gpu < left) for gpu in range(num_gpus))


class _Shared(NamedTuple):
    """Tensors of a trace that several GPUs have to do with."""

    hidden: int
    """A tensor of hidden states."""
    given: list[int]
    """Tensors beside hidden states that layers are given and keep: each GPU makes its own."""
    lent: list[int]
    """Tensors that go with the forward pass, of which each GPU makes its own, too."""
    embedded: list[int]
    """Tensors that the first GPU makes beside, and that go with its forward pass."""
    late: set[int]
    """Tensors that are freed when a micro-batch's backward pass has ended: what one GPU makes and another
    would free, and the logits."""


class PipelineTrace(SharedTrace):
    """A Trace whose layers are dealt out: it answers for all GPUs together, `stages` for each."""

    def __init__(self, trace: Trace, spec: TraceSpec, *, num_gpus: int) -> None:
        super().__init__(trace, spec.parallelism)
        blocks = trace.blocks()
        num_layers = 1 + max(place[1] for _, place, _ in blocks)
        self.counts = even_counts(num_layers, num_gpus)
        """Number of layers that each GPU has."""
        of_layer = [gpu for gpu, count in enumerate(self.counts) for _ in range(count)]

        def gpu_of(phase: Phase, place: Place) -> int:
            if place[1] >= 0:
                return of_layer[place[1]]
            return 0 if phase in EMBED_PHASES else num_gpus - 1

        self._shared = shared = _shared_by(trace, blocks, gpu_of)
        self.stages = tuple(
            PipelineStage(self, trace, shared, gpu_of, gpu, num_gpus) for gpu in range(num_gpus)
        )

    def trainable(self, rank: int) -> list[TensorSpec]:
        """The tensors of the GPU with most to update: all update at the same time."""
        each = [stage.trainable(rank) for stage in self.stages]
        return max(each, key=lambda specs: sum(spec.num_elements for spec in specs))

    def launches_outside_layers(
        self, micro_batch: float, rank: int
    ) -> tuple[list[Launch], list[Launch]]:
        """The kernels of a micro-step that are the first GPU's alone, and those that are the last's."""
        embedding = self._trace.launches_of(EMBED_PHASES, micro_batch, rank)
        head = self._trace.launches_of((Phase.HEAD, Phase.HEAD_BACKWARD), micro_batch, rank)
        return embedding, head

    def exchange(self, micro_batch: int, rank: int) -> Exchange:
        """Bytes that the GPUs send: there and back for each micro-batch, the first through all of them."""
        size = self._trace.sizes(micro_batch, rank)[self._shared.hidden]
        num_gpus = len(self.counts)

        def sent(count: int) -> tuple[Message, ...]:
            return (Message(operation=PERMUTE, num_bytes=size, count=count),) if count else ()

        return Exchange(
            num_gpus=num_gpus,
            messages_per_micro_step=sent(2),
            messages_per_step=sent(2 * (num_gpus - 2)),
            layers=self.counts,
        )


class PipelineStage(SharedTrace):
    """The part of a step that one of the GPUs runs, beside what its other micro-batches hold meanwhile."""

    def __init__(
        self,
        whole: PipelineTrace,
        trace: Trace,
        shared: _Shared,
        gpu_of: GpuOf,
        gpu: int,
        num_gpus: int,
    ) -> None:
        super().__init__(trace, whole.name)
        self._whole, self._shared, self._gpu_of = whole, shared, gpu_of
        self._gpu, last = gpu, num_gpus - 1
        self._is_first, self._is_last = gpu == 0, gpu == last
        self._goes = {*shared.lent, *shared.embedded}
        """Tensors that go with the forward pass."""
        self._copied: list[int] = []
        """The tensors that the added ones, numbered on from the trace's, are copies of."""
        self._of_libraries = set(trace.workspaces)
        self.setup = self._set_up(last)
        self.num_prepared_events = self.num_own_events = len(self.setup)
        self._weights = {event for event in self.setup if event >= 0}
        # What arrives stays where it is: the first sum of gradients is made beside it.
        self._summed = [] if self._is_last else [self._copy(shared.hidden)]
        forward, *_ = first = self._parted(trace.blocks())
        given = [] if self._is_first else [self._copy(number) for number in shared.given]
        lent = [*self._goes] if self._is_first else [self._copy(n) for n in shared.lent]
        kept = [n for n in left_by(forward) if n not in self._goes and n != trace.loss]
        kept += [] if self._is_first else shared.given
        num_before, num_behind = int(not self._is_first), int(not self._is_last)
        releases = releases_messages()
        # Messages, of hidden states and of gradients, that go with their micro-batch.
        num_received = num_before * num_behind * releases
        num_answered = num_behind * releases
        if releases:
            kept = [n for n in kept if n not in self._sent(forward)]
            kept += num_received * [shared.hidden]
        others = [self._copy(number) for _ in range(last - gpu) for number in kept]
        # The gradient that was sent last; what was sent last before the first of them.
        others += self._messages(num_before + num_behind - num_answered)
        received, answered = self._messages(num_received), self._messages(num_answered)
        self.workspaces = [self._copy(number) for number in trace.workspaces]

        def written(forward: list[int], backward: list[int], ends: list[int]) -> list[int]:
            begun = [*others, *received, *given, *([] if self._is_first else lent)]
            begun += [*forward, *(~number for number in lent), *answered]
            sent = [~number for number in self._sent(forward) if releases]
            ended = (~number for number in (*self._summed, *given, *received, *answered, *others))
            return [*begun, *sent, *backward, *(e for e in ends if e not in sent), *ended]

        self.again = written(*first)
        self.first = [*self.workspaces, *self.again]
        self.next = written(*self._parted(trace.next_blocks()))
        made = {event for event in self.first if event >= 0}
        self.gradients = [number for number in trace.gradients if number in made]
        self.step_buffers = []
        self.batch = self._fetched()
        self.count = []
        self.loss = trace.loss if trace.loss in made else None
        num_left = num_before + num_behind - num_received - num_answered
        left = self._messages(num_left)
        self.of_micro_batches, self.of_losses = ((), left) if releases else (left, ())

    @property
    def added_categories(self) -> list[str]:
        return [self._trace.categories[number] for number in self._copied]

    def exchange(self, micro_batch: int, rank: int) -> Exchange:
        return self._whole.exchange(micro_batch, rank)

    def _put_together(self, micro_batch: int, rank: int) -> Array:
        whole = summable(self._trace.sizes_of_part(micro_batch, rank))
        return np.concatenate((whole, whole[self._copied]))

    def _fetched(self) -> list[int]:
        """Return what of a micro-batch the GPU is given: token ids the first, labels the last."""
        *ids, labels = self._trace.batch
        return [*(ids if self._is_first else ()), *([labels] if self._is_last else ())]

    def _copy(self, number: int) -> int:
        self._copied.append(number)
        return len(self._trace.template) + len(self._copied) - 1

    def _messages(self, num: int) -> list[int]:
        """Return so many copies of hidden states."""
        return [self._copy(self._shared.hidden) for _ in range(num)]

    def _sent(self, forward: Sequence[int]) -> list[int]:
        """Return what a forward pass hands on."""
        return [] if self._is_last else left_by(forward)[-1:]

    def _set_up(self, last: int) -> list[int]:
        """Events before the first step: weights of the GPU's own layers, buffers that every GPU has."""
        outside = {
            p.number: 0 if p.embedding else last for p in self._trace.parameters() if p.place[1] < 0
        }
        events: list[int] = []
        copies: dict[int, int] = {}
        for phase, place, block in self._trace.setup_blocks():
            for event in block:
                number = event if event >= 0 else ~event
                if place[1] >= 0 or number in outside:
                    gpu = outside.get(number, self._gpu_of(phase, place))
                    events += [event] if gpu == self._gpu else []
                    continue
                if event >= 0:
                    copies[number] = number if self._is_first else self._copy(number)
                events.append(copies[number] if event >= 0 else ~copies[number])
        return events

    def _parted(self, blocks: Sequence[Block]) -> tuple[list[int], list[int], list[int]]:
        """Part what the GPU runs of a micro-step: forward, backward, and what goes at the end.

        Half a layer's way back the first sum of gradients is made.
        """
        forward: list[int] = []
        backward: list[int] = []
        alive: dict[int, None] = {}
        for phase, place, events in blocks:
            if phase == Phase.END or self._gpu_of(phase, place) != self._gpu:
                continue
            part = forward if phase in FORWARD_PHASES else backward
            half = -1 if part is forward or backward else len(events) // 2
            for position, event in enumerate(events):
                part += self._summed if position == half else []
                number = event if event >= 0 else ~event
                if event >= 0 and number not in self._of_libraries:
                    alive[number] = None
                elif number not in alive or number in self._shared.late:
                    continue
                else:
                    del alive[number]
                part.append(event)
        stays = {*self._trace.gradients, self._trace.loss, *self._goes}
        return forward, backward, [~number for number in alive if number not in stays]


def _shared_by(trace: Trace, blocks: Sequence[Block], gpu_of: GpuOf) -> _Shared:
    """Find the tensors of a micro-step that several GPUs have to do with."""
    sizes = [trace.sizes(micro_batch, USUAL_RANK) for micro_batch in (2, 4)]
    owner: dict[int, int] = {}
    late: set[int] = set()
    lent: set[int] = set()
    made: list[int] = []
    hidden: int | None = None
    for phase, place, events in blocks:
        here = gpu_of(phase, place)
        owner |= {event: here for event in events if event >= 0}
        freed = {~event for event in events if event < 0}
        if phase != Phase.END:
            late |= {number for number in freed if owner.get(number, here) != here}
        if phase in FORWARD_PHASES:
            lent |= freed
        if phase == Phase.EMBED:
            made += left_by(events)
        elif phase == Phase.FORWARD and place[1] >= 0 and hidden is None:
            hidden = left_by(events)[-1]
    assert hidden is not None
    given = {n for n in made if any(each[n] != each[hidden] for each in sizes)}
    lent &= late
    logits = [n for n in owner if trace.categories[n] == "logits"]
    return _Shared(
        hidden=hidden,
        given=sorted(given - lent),
        lent=sorted(given & lent),
        embedded=[number for number in made if number in lent - given],
        late=(late - lent) | set(logits[:1]),
    )
