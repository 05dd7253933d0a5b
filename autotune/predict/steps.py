"""The events of the first optimizer steps: weights, batches, micro-steps, clipping, optimizer, zero_grad.

State exists from the second step on, and where the blocks then lie may let a third or a fourth reserve
more: they run until one does not.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune.catalogue.installed import takes_lowest_address
from autotune.memory.allocator import EMPTY_CACHE, Replay, Tape, together
from autotune.memory.optimizers.core import LOW_PRECISION, States
from autotune.memory.replayer import Replayer
from autotune.memory.traces import Trace
from autotune.memory.traces.copies import numbers_of
from autotune.predict.generation import generation_of
from autotune.predict.optimizer_update import MOST_STEPS, Update
from autotune.predict.sharding.shared_trace import SharedTrace
from autotune.records.charts import StepPhase
from autotune.space.config import TrainConfig
from autotune.space.optimizers import UPDATERS, Optimizer
from autotune.space.precisions import PRECISIONS

_FIRST = (StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.FORWARD_AND_BACKWARD)
_AGAIN = (
    StepPhase.FORWARD_AGAIN,
    StepPhase.BACKWARD_AGAIN,
    StepPhase.FORWARD_AND_BACKWARD_AGAIN,
)
"""The same of further micro-batches."""
_WITHOUT_FORWARD = (
    StepPhase.GENERATION,
    StepPhase.BACKWARD,
    StepPhase.BACKWARD_AGAIN,
    StepPhase.BACKWARD_AND_OPTIMIZER,
    StepPhase.OPTIMIZER,
)
_WITHOUT_BACKWARD = (
    StepPhase.GENERATION,
    StepPhase.FORWARD,
    StepPhase.FORWARD_AGAIN,
    StepPhase.OPTIMIZER,
)

_HAS_UPDATE = (StepPhase.SETUP, StepPhase.BACKWARD_AND_OPTIMIZER, StepPhase.OPTIMIZER)

_NUM_SCALARS, _NUM_SCALARS_OF_SCALER, _SCALAR_BYTES = 1, 2, 4
"""Number and size of the scalars that are kept for good: the sum of losses (Trainer._run_epoch); a scaler's
factor, and the steps since it changed (torch 2.13 amp/grad_scaler.py)."""
_NUM_ALONE = 64
"""Micro-batches of a step that have allocations of their own; those of all beyond stand together."""
_LAST_NUMBERS = 1 << 40
"""Numbers of the update's tensors from here on, until it is known how many others there are: those of the
others do not depend on the optimizer, and what a Replayer remembers of them serves for all."""

Order = npt.NDArray[np.int64]
"""Events in order."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """Events of one phase, in order."""

    step: int
    """Number of the optimizer step, from 0; -1 before the first."""
    phase: StepPhase
    events: Order

    @property
    def is_repeated(self) -> bool:
        """Whether the part stands for all micro-batches of its step but the first."""
        return self.phase in _AGAIN


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The first optimizer steps of one configuration."""

    sizes: list[int]
    """Bytes of each tensor."""
    categories: list[str]
    parts: list[StepPart]
    sure_step: int
    """Last step that runs in any case; those behind it run until one reserves no more."""
    aside: Sequence[Sequence[int]] = ()
    """Numbers of the tensors that each further CUDA stream allocates."""
    of_update: range = range(0)
    """Numbers of the tensors that clipping and the optimizer make."""

    def order(self) -> Order:
        """Return the events of all parts."""
        return _joined(*(part.events for part in self.parts))

    def events(self) -> list[int]:
        listed: list[int] = self.order().tolist()
        return listed

    def num_events_before_update(self) -> int:
        """Return how many events lead up to the first optimizer step."""
        before = takewhile(lambda part: part.phase != StepPhase.OPTIMIZER, self.parts)
        return sum(len(part.events) for part in before)

    def replay(self, most_bytes: int | None = None, replayer: Replayer | None = None) -> Replay:
        """Replay the steps through an allocator without a cap; it may not come to the last steps.

        It ends at the request with which more than `most_bytes` are reserved. `replayer`: may know parts.
        """
        sure, *further = self.by_step(self.sure_step)
        return (replayer or Replayer()).replay(
            self.sizes,
            sure,
            until_steady=further,
            most_bytes=most_bytes,
            by_address=takes_lowest_address(),
            aside=self.aside,
        )

    def by_step(self, last: int) -> list[list[Order]]:
        """Return the events of each part up to the step of that number, then those of each step behind it."""
        together = [part for part in self.parts if part.step <= last]
        further = groupby(self.parts[len(together) :], lambda part: part.step)
        found = [[part.events for part in together]]
        found += ([part.events for part in parts] for _, parts in further)
        return found


def _joined(*events: Sequence[int] | Order) -> Order:
    return np.concatenate([np.asarray(each, dtype=np.int64) for each in events])


def first_steps(trace: Trace | SharedTrace, config: TrainConfig, update: Update) -> Steps:
    rank = config.lora_rank or 0
    sizes = trace.sizes(config.samples_per_pass, rank)
    row = UPDATERS[config.updater]
    if row.updates:
        assert isinstance(trace, Trace)  # A rule: on one GPU only.
        card = update.tape.multiprocessors, update.tape.product_bytes
        every = config.torch_empty_cache_steps
        tape, parts = _written_in_backward(trace, config.updater, rank, every, card)
    else:
        tape, parts = update.tape, _updating_after(trace, update, config)
    behind = len(sizes)
    written = Tape()
    is_here = config.max_completion_length is not None and not config.writes_with_vllm
    if is_here:
        written = generation_of(trace.of_one, config)
        parts = _generating(parts, _shifted(written.events, behind), config)
    behind += len(written.sizes)
    kept = _KeptByTrainer(trace, sizes, config, num_before=behind)
    prepared, own = trace.num_prepared_events, trace.num_own_events
    of_trace = trace.order_of("setup")
    setup = _joined(
        of_trace[:prepared],
        # prepare_model_for_kbit_training empties the cache (peft 0.20 and later, utils/other.py).
        [EMPTY_CACHE] if config.kbit_preparation else [],
        of_trace[prepared:own],
        # Accelerator.free_memory empties the cache before the Trainer makes the optimizer.
        [EMPTY_CACHE],
        _shifted(update.made, _LAST_NUMBERS),
        # Accelerator.prepare shares the model out with its optimizer.
        of_trace[own:],
        kept.scalars(),
    )
    parts = [StepPart(-1, StepPhase.SETUP, setup), *map(kept.added_to, parts)]
    behind += len(kept.tape.sizes)
    return Steps(
        sizes=[*sizes, *written.sizes, *kept.tape.sizes, *tape.sizes],
        categories=[
            *trace.categories,
            *written.categories,
            *kept.tape.categories,
            *tape.categories,
        ],
        aside=trace.aside if isinstance(trace, SharedTrace) else (),
        of_update=range(behind, behind + len(tape.sizes)),
        parts=[
            StepPart(part.step, part.phase, _numbered_behind(behind, part.events))
            if part.phase in _HAS_UPDATE
            else part
            for part in parts
        ],
        sure_step=_sure_step(config.torch_empty_cache_steps),
    )


def _generating(parts: Sequence[StepPart], events: Order, config: TrainConfig) -> list[StepPart]:
    """Let completions be written before each step; where several times in one, beside gradients too.

    Also before each of several steps that train on the same ones.
    """
    found: list[StepPart] = []
    step = -1
    again = config.micro_batches_per_generation < config.gradient_accumulation_steps
    for part in parts:
        is_again = again and part.phase in _AGAIN and part.phase not in _WITHOUT_FORWARD
        if part.step != step or is_again:
            step = part.step
            found.append(StepPart(step, StepPhase.GENERATION, events))
        found.append(part)
    return found


class _KeptByTrainer:
    """Tensors that outlive a micro-step: its loss, until the next one; scalars; the step's micro-batches.

    All micro-batches of a step are fetched before it, while those of the last one are there still. Their
    labels are counted one micro-batch after the other, which is alike: once here.
    Source: transformers 5.23 Trainer._run_epoch and get_batch_samples.
    """

    def __init__(
        self,
        trace: Trace | SharedTrace,
        sizes: Sequence[int],
        config: TrainConfig,
        *,
        num_before: int,
    ) -> None:
        self.tape = Tape()
        self._trace = trace
        self._sizes = sizes
        self._config = config
        self._num_before = num_before
        self._step = -1
        self._fetched: list[int] = []
        self._losses: list[int] = []
        self._with_losses: list[int] = []

    def scalars(self) -> Order:
        """Events that make the scalars, before the first step."""
        is_scaled = PRECISIONS[self._config.precision].grad_scaler
        for _ in range(_NUM_SCALARS + is_scaled * _NUM_SCALARS_OF_SCALER):
            self.tape.alloc(_SCALAR_BYTES, "temporary")
        return self._written()

    def added_to(self, part: StepPart) -> StepPart:
        """The part of a step with the events of the kept tensors in it."""
        pieces = [part.events]
        is_first = part.step != self._step
        if is_first:
            self._step = part.step
            self._let_go()
            self._fetch()
        if part.phase not in _WITHOUT_FORWARD:
            self._keep_with_loss(1 if is_first else self._config.gradient_accumulation_steps - 1)
        pieces.insert(0, self._written())
        if part.phase not in _WITHOUT_FORWARD and self._trace.loss is not None:
            made = int((part.events == self._trace.loss).argmax())
            self._losses.append(self.tape.alloc(_SCALAR_BYTES, "temporary"))
            pieces[-1:] = [part.events[:made], self._written(), part.events[made + 1 :]]
        if part.phase not in _WITHOUT_BACKWARD and len(self._losses) > 1:
            self.tape.free(self._losses.pop(0))
            pieces.append(self._written())
        return StepPart(part.step, part.phase, _joined(*pieces))

    def _let_go(self) -> None:
        """Free what the last step's losses have kept."""
        for tensor in self._with_losses:
            self.tape.free(tensor)
        self._with_losses.clear()

    def _keep_with_loss(self, num: int) -> None:
        """Make what stays with the losses of so many micro-batches: one stands for all that are alike."""
        if isinstance(self._trace, SharedTrace):
            for tensor in self._trace.of_losses:
                size = self._sizes[tensor]
                self._with_losses += self.tape.alloc_all(num * [size], "activation")

    def _fetch(self) -> None:
        tape, sizes = self.tape, self._sizes
        num_alone = min(self._config.gradient_accumulation_steps, _NUM_ALONE)
        num_further = self._config.gradient_accumulation_steps - num_alone
        batch = [sizes[tensor] for tensor in self._trace.batch]
        further = chain.from_iterable(together(size, num_further) for size in batch)
        if not self._step and isinstance(self._trace, SharedTrace):
            for tensor in self._trace.of_micro_batches:
                each = num_alone * [sizes[tensor]] + together(sizes[tensor], num_further)
                tape.alloc_all(each, "activation")
        fetched = tape.alloc_all([*num_alone * batch, *further], "activation")
        counted = {}
        for event in self._trace.count:
            if event >= 0:
                counted[event] = tape.alloc(sizes[event], "temporary")
            else:
                tape.free(counted.pop(~event))
        tape.events += [~tensor for tensor in self._fetched]
        self._fetched = [*fetched, *counted.values()]

    def _written(self) -> Order:
        events = _shifted(self.tape.events, self._num_before)
        self.tape.events.clear()
        return events


def _emptied(every: int, step: int) -> list[int]:
    """Events of the Trainer's emptying the cache between forward and backward (training_step)."""
    return [EMPTY_CACHE] if every and not step % every else []


def _sure_step(every: int) -> int:
    """Number of the last step that is sure to run.

    It is the first; where the cache is emptied now and then, one that does so with state there.
    """
    return every if every > 1 else 0


def _later_steps(every: int) -> tuple[int, ...]:
    """Numbers of the steps after the first.

    Those between the second and the one that empties the cache are like the second, and left out.
    """
    sure = _sure_step(every)
    numbers = (1, *range(max(sure, 2), sure + MOST_STEPS))
    return numbers[: MOST_STEPS - 1]


def _updating_after(
    trace: Trace | SharedTrace, update: Update, config: TrainConfig
) -> list[StepPart]:
    def micro_step(
        events: Order,
        step: int,
        phases: tuple[StepPhase, StepPhase, StepPhase] = _FIRST,
        *,
        is_first: bool = False,
    ) -> list[StepPart]:
        forward, backward, both = phases
        if not isinstance(trace, Trace):
            return [StepPart(step, both, events)]
        middle = trace.num_forward_events
        if is_first:
            middle += trace.num_forward_workspaces
        emptied = _emptied(config.torch_empty_cache_steps, step)
        return [
            StepPart(step, forward, events[:middle]),
            StepPart(step, backward, _joined(emptied, events[middle:])),
        ]

    def optimizer_step(events: list[int], step: int) -> StepPart:
        before, after = list[int](), [~gradient for gradient in trace.gradients]
        if not isinstance(trace, Trace):
            before, after = trace.around_update()
        written = _shifted(events, _LAST_NUMBERS)
        return StepPart(step, StepPhase.OPTIMIZER, _joined(before, written, after))

    first, again, further_ones = map(trace.order_of, ("first", "again", "next"))
    if isinstance(trace, SharedTrace) and config.gradient_accumulation_steps > 1:
        first, again = map(trace.order_of_earlier, ("first", "again"))

    def further(step: int) -> list[StepPart]:
        is_more = config.gradient_accumulation_steps > 1
        return micro_step(further_ones, step, _AGAIN) if is_more else []

    parts = [
        *micro_step(first, 0, is_first=True),
        *further(0),
        optimizer_step(update.first, 0),
    ]
    behind_first = trace.behind_first if isinstance(trace, SharedTrace) else ()
    for step, events in zip(
        _later_steps(config.torch_empty_cache_steps), update.later, strict=True
    ):
        parts += [
            *micro_step(_joined(behind_first, again) if step == 1 else again, step),
            *further(step),
            optimizer_step(events, step),
        ]
    return parts


@functools.lru_cache(maxsize=64)
def _written_in_backward(
    trace: Trace, updater: str, rank: int, every: int, card: tuple[Any, ...]
) -> tuple[Tape, list[StepPart]]:
    """Return the steps that update in the backward pass, and the tape that they are written on.

    They are the same at every micro-batch, and a search asks for them at many.
    """
    multiprocessors, product_bytes = card
    tape = Tape(multiprocessors=multiprocessors, product_bytes=product_bytes)
    row = UPDATERS[updater]
    return tape, _updating_in_backward(trace, row, tape, _LAST_NUMBERS, rank=rank, every=every)


def _updating_in_backward(
    trace: Trace, row: Optimizer, tape: Tape, num_tensors: int, *, rank: int, every: int = 0
) -> list[StepPart]:
    """The steps of an optimizer that updates each weight where it gets its gradient: nothing is clipped.

    `every`: the cache is emptied once in so many steps; 0: never.
    """
    write = row.writer_of_one(tape)
    states: dict[int, States] = {}
    gradients = frozenset(trace.gradients)

    def update(gradient: int) -> list[int]:
        start = len(tape.events)
        spec = trace.parameter_of(gradient, rank)
        states[gradient] = write(spec, states.get(gradient))
        written = tape.events[start:]
        end = len(written)
        if row.updates == "one-behind":
            # A gradient in 16 bits when its float32 copy is there; one in 32 is its own.
            end = _first_temporary(tape, written) + (spec.dtype in LOW_PRECISION)
        shifted = _shifted(written, num_tensors).tolist()
        return [*shifted[:end], ~gradient, *shifted[end:]]

    parts = list[StepPart]()
    for step in (0, *_later_steps(every)):
        micro_step = trace.released if step else trace.released_first
        middle = trace.num_forward_events + (0 if step else trace.num_forward_workspaces)
        events = _emptied(every, step)
        waiting: int | None = None
        for event in micro_step[middle:]:
            if ~event not in gradients:
                events.append(event)
            elif row.updates == "at-once":
                events += update(~event)
            else:
                if waiting is not None:
                    events += update(waiting)
                waiting = ~event
        if waiting is not None:
            events += update(waiting)
        parts.append(StepPart(step, StepPhase.FORWARD, _joined(micro_step[:middle])))
        parts.append(StepPart(step, StepPhase.BACKWARD_AND_OPTIMIZER, _joined(events)))
    return parts


def _first_temporary(tape: Tape, events: list[int]) -> int:
    return next(i for i, e in enumerate(events) if e >= 0 and tape.categories[e] == "temporary")


def _shifted(events: Sequence[int] | Order, num_tensors: int) -> Order:
    """Renumber a tape's events so that so many tensors come before its own."""
    order = np.asarray(events, dtype=np.int64)
    return np.where(order >= 0, order + num_tensors, order - num_tensors)


def _numbered_behind(num_others: int, events: Order) -> Order:
    """Give the update's tensors the numbers behind all others."""
    is_of_update = (numbers_of(events) >= _LAST_NUMBERS) & (events != EMPTY_CACHE)
    return np.where(is_of_update, _shifted(events, num_others - _LAST_NUMBERS), events)
