"""The events of two optimizer steps: weights, micro-steps, clipping, optimizer, zero_grad.

Two, so that state exists when the second step peaks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autotune.allocator import EMPTY_CACHE_BYTES, Tape
from autotune.config import TrainConfig
from autotune.optimizer_steps.core import States
from autotune.optimizers import OPTIMIZERS, Optimizer
from autotune.parallel import RankTrace
from autotune.traces import Trace
from autotune.update import Update

_SETUP, _FORWARD, _BACKWARD, _OPTIMIZER = "set-up", "forward", "backward", "optimizer"
_AGAIN = ", further micro-batches"
"""They are alike: one is replayed, however many the configuration accumulates."""


@dataclass(frozen=True, slots=True)
class Part:
    """Events of one phase, in order."""

    step: int
    """Optimizer step, from 0; -1 before the first."""
    phase: str
    events: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Two optimizer steps of one configuration."""

    sizes: list[int]
    """Bytes of each tensor."""
    categories: list[str]
    parts: list[Part]

    def events(self) -> list[int]:
        return [event for part in self.parts for event in part.events]


def two_steps(trace: Trace | RankTrace, config: TrainConfig, update: Update) -> Steps:
    rank = config.lora_rank or 0
    sizes = trace.sizes(config.micro_batch_size, rank)
    row = OPTIMIZERS[config.optimizer]
    if row.updates:
        assert isinstance(trace, Trace)  # A rule: on one GPU only.
        tape, parts = _updating_in_backward(trace, row, len(sizes), rank)
    else:
        tape, parts = update.tape, _updating_after(trace, update, len(sizes), config)
    return Steps(
        sizes=[*sizes, *tape.sizes, EMPTY_CACHE_BYTES],
        categories=[*trace.categories, *tape.categories, "temporary"],
        parts=parts,
    )


def _updating_after(
    trace: Trace | RankTrace, update: Update, num_tensors: int, config: TrainConfig
) -> list[Part]:
    every, marker = config.torch_empty_cache_steps, num_tensors + len(update.tape.sizes)

    def micro_step(
        events: list[int], step: int, *, is_first: bool = False, suffix: str = ""
    ) -> list[Part]:
        """The Trainer empties the cache between forward and backward (training_step)."""
        if not isinstance(trace, Trace):
            return [Part(step, f"{_FORWARD} and {_BACKWARD}{suffix}", events)]
        middle = trace.num_forward_events
        if is_first:
            middle += trace.num_forward_workspaces
        emptied = [marker, ~marker] if every and not step % every else []
        return [
            Part(step, f"{_FORWARD}{suffix}", events[:middle]),
            Part(step, f"{_BACKWARD}{suffix}", [*emptied, *events[middle:]]),
        ]

    def optimizer_step(events: list[int], step: int) -> Part:
        zero_grad = [~gradient for gradient in trace.gradients]
        done = [~number for number in trace.step_buffers]
        written = _shifted(events, num_tensors)
        return Part(step, _OPTIMIZER, [*trace.step_buffers, *written, *done, *zero_grad])

    is_more = config.gradient_accumulation_steps > 1
    first_more, later_more = (
        micro_step(trace.next, step, suffix=_AGAIN) if is_more else [] for step in (0, 1)
    )
    return [
        Part(-1, _SETUP, trace.setup),
        *micro_step(trace.first, 0, is_first=True),
        *first_more,
        optimizer_step(update.first, 0),
        *micro_step(trace.again, 1),
        *later_more,
        optimizer_step(update.later, 1),
    ]


def _updating_in_backward(
    trace: Trace, row: Optimizer, num_tensors: int, rank: int
) -> tuple[Tape, list[Part]]:
    """Each weight is updated where it gets its gradient: nothing is left to clip."""
    tape = Tape()
    states: dict[int, States] = {}
    gradients = frozenset(trace.gradients)

    def update(gradient: int) -> list[int]:
        start = len(tape.events)
        spec = trace.parameter_of(gradient, rank)
        states[gradient] = row.algorithm.write_step(tape, [spec], states.get(gradient))
        written = _shifted(tape.events[start:], num_tensors)
        return [~gradient, *written] if row.updates == "one-behind" else [*written, ~gradient]

    parts = [Part(-1, _SETUP, trace.setup)]
    for step, micro_step in enumerate((trace.released_first, trace.released)):
        middle = trace.num_forward_events + (0 if step else trace.num_forward_workspaces)
        events: list[int] = []
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
        parts.append(Part(step, _FORWARD, micro_step[:middle]))
        parts.append(Part(step, f"{_BACKWARD} and {_OPTIMIZER}", events))
    return tape, parts


def _shifted(events: Iterable[int], num_tensors: int) -> list[int]:
    """The tape's tensors are numbered behind the trace's."""
    return [event + num_tensors if event >= 0 else event - num_tensors for event in events]
