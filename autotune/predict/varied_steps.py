"""Replays optimizer steps whose micro-batches differ in length: the memory that they leave in pieces.

PyTorch's allocator keeps blocks of the sizes that were asked for. Where each micro-batch asks for others,
what is free is in pieces that none fits into: more is reserved than at any one length, and under a budget
memory may run out though the longest micro-batch fits. How much more depends on the model and the settings:
nothing in most, up to a fifth (studies/no-card). So the steps are replayed, each micro-batch with the tensors
of a part of one of full length that has as many tokens.

Known limitations
- What grows with the square of the length, as eager attention's scores, is taken to grow with the tokens.
- Runs on several GPUs, compiled steps, batches filled by tokens, and trainers that write completions are not
  replayed so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from autotune.catalogue.installed import takes_lowest_address
from autotune.memory.allocator import EMPTY_CACHE, Replay
from autotune.memory.replayer import Replayer
from autotune.memory.traces import Trace
from autotune.predict.steps import Order, StepPart, Steps
from autotune.records.charts import StepPhase
from autotune.space.config import TrainConfig
from autotune.space.lengths import draw

NUM_MICRO_BATCHES = 50
"""Micro-batches that are replayed in each order. [judgement] Of more the first ones tell as much: runs with
half or twice as many held no less or more (studies/no-card)."""
LEAST_MICRO_BATCHES = 20
"""Micro-batches of models with many layers, at least. [judgement]"""
_MOST_EVENTS = 1_000_000
"""Allocations and frees that are replayed in each order, about. [judgement] A second or two of a core."""
NUM_ORDERS = 2
"""Orders of the samples. [judgement] As many as a confirmation trains with."""
_LEAST_STEPS = 2
"""Optimizer steps at least: the state exists from the second on."""
_MEGA_BATCHES = 50
"""Batches that are sorted by length together (transformers 5.23 get_length_grouped_indices)."""
_STARTS = (
    StepPhase.FORWARD,
    StepPhase.FORWARD_AGAIN,
    StepPhase.FORWARD_AND_BACKWARD,
    StepPhase.FORWARD_AND_BACKWARD_AGAIN,
)
"""Phases that a micro-batch begins with."""


def is_replayed(config: TrainConfig) -> bool:
    """Whether steps of varied lengths can be replayed of such a configuration."""
    return (
        config.batching in ("padded", "grouped")
        and config.sequence_length > 1
        and config.num_gpus == 1
        and config.parallelism == "none"
        and config.max_completion_length is None
        and not config.is_compiled
    )


def fits(
    steps: Steps,
    trace: Trace,
    config: TrainConfig,
    percentiles: Sequence[int],
    most_bytes: int,
) -> bool:
    """Whether steps of varied lengths go on within so many reserved bytes, in each of NUM_ORDERS orders.

    `steps`: the configuration's first steps. `percentiles`: the samples' lengths
    (autotune.space.lengths.Lengths); none where any length is as likely.
    """
    of_first = sum(
        len(part.events)
        for part in steps.parts
        if part.step == 0 and not part.is_repeated and part.phase is not StepPhase.OPTIMIZER
    )
    num_micro_batches = max(_MOST_EVENTS // of_first, LEAST_MICRO_BATCHES)
    orders = (longest(config, percentiles, seed, num_micro_batches) for seed in range(NUM_ORDERS))
    return all(
        replay(steps, trace, config, lengths, most_bytes).failed_event is None for lengths in orders
    )


def longest(
    config: TrainConfig,
    percentiles: Sequence[int],
    seed: int,
    most_micro_batches: int = NUM_MICRO_BATCHES,
) -> list[int]:
    """Draw the tokens of the longest sample of each micro-batch, as long as the others are padded to."""
    per_step, num_steps = _micro_batches(config, min(most_micro_batches, NUM_MICRO_BATCHES))
    samples = config.samples_per_pass * config.rows_per_sample
    drawn = np.array(
        draw(percentiles, config.sequence_length, per_step * num_steps * samples, seed=seed)
    )
    np.random.default_rng(seed).shuffle(drawn)
    if config.batching == "grouped":
        size = _MEGA_BATCHES * samples
        pieces = (drawn[at : at + size] for at in range(0, len(drawn), size))
        drawn = np.concatenate([-np.sort(-piece) for piece in pieces])
    found: list[int] = drawn.reshape(-1, samples).max(axis=1).tolist()
    return found


def _micro_batches(config: TrainConfig, most: int) -> tuple[int, int]:
    """Return how many micro-batches a replayed step has, and how many steps are replayed."""
    per_step = min(config.gradient_accumulation_steps, most // _LEAST_STEPS)
    return per_step, most // per_step


def replay(
    steps: Steps,
    trace: Trace,
    config: TrainConfig,
    lengths: Sequence[int],
    cap_bytes: int | None = None,
) -> Replay:
    """Replay steps with micro-batches of these lengths, under a cap on reserved bytes if one is given."""
    tensors = _Tensors(steps, trace, config)
    per_step, _ = _micro_batches(config, len(lengths))
    parts = list(_parts(steps, tensors, lengths, per_step))
    return Replayer().replay(
        tensors.sizes(),
        parts,
        cap_bytes=cap_bytes,
        expandable_segments=config.expandable_segments,
        by_address=takes_lowest_address(),
    )


def _parts(
    steps: Steps, tensors: _Tensors, lengths: Sequence[int], per_step: int
) -> Iterator[Order]:
    """Yield the events of setup, and of as many steps as there are micro-batches for."""
    by_step = [list(parts) for _, parts in itertools.groupby(steps.parts, lambda part: part.step)]
    setup, *of_steps = by_step
    for part in setup:
        yield tensors.numbered(part.events, None)
    left = iter(lengths)
    length = None
    for number in range(len(lengths) // per_step):
        if number >= len(of_steps):
            tensors.repeat(of_steps[-1])
        for alike, parts in _micro_batches_of(of_steps[min(number, len(of_steps) - 1)], per_step):
            if alike:
                tensors.repeat(parts)
            for part in parts:
                if part.phase in _STARTS:
                    length = next(left)
                yield tensors.numbered(part.events, length)


def _micro_batches_of(
    parts: Sequence[StepPart], number: int
) -> Iterator[tuple[bool, Sequence[StepPart]]]:
    """Yield the parts of a step with so many micro-batches: whether they were there before, and they."""
    for is_repeated, group in itertools.groupby(parts, lambda part: part.is_repeated):
        alike = list(group)
        for again in range(number - 1 if is_repeated else 1):
            yield again > 0, alike


class _Tensors:
    """Tensors that are numbered anew wherever they are made, each with the bytes that it has there."""

    def __init__(self, steps: Steps, trace: Trace, config: TrainConfig) -> None:
        self._trace = trace
        self._config = config
        self._full = np.array(steps.sizes, dtype=np.int64)
        self._current = np.full(len(self._full), -1, dtype=np.int64)
        """The newest number of each tensor of the steps."""
        self._of_length: dict[int, npt.NDArray[np.int64]] = {}
        self._sizes: list[npt.NDArray[np.int64]] = []
        self._num = 0

    def sizes(self) -> npt.NDArray[np.int64]:
        """Return the bytes of each number."""
        return np.concatenate(self._sizes)

    def numbered(self, events: Order, length: int | None) -> Order:
        """Return events with new numbers for what they make, at a length; None: full length."""
        is_tensor = events != EMPTY_CACHE
        tensors = np.where(events < 0, ~events, events)[is_tensor]
        makes = (events >= 0)[is_tensor]
        places = np.arange(len(tensors))
        made, first = np.unique(tensors[makes], return_index=True)
        new = np.full(len(self._full), -1, dtype=np.int64)
        new[made] = self._num + np.arange(len(made))
        made_at = np.full(len(self._full), len(places), dtype=np.int64)
        made_at[made] = places[makes][first]
        numbers = np.where(places >= made_at[tensors], new[tensors], self._current[tensors])
        self._current[made] = new[made]
        self._num += len(made)
        self._sizes.append(self._bytes_at(length)[made])
        found = np.array(events, dtype=np.int64)
        found[is_tensor] = np.where(makes, numbers, ~numbers)
        return found

    def repeat(self, parts: Sequence[StepPart]) -> None:
        """Let parts that have been run free what that run has left, where they freed what was left before."""
        events = np.concatenate([part.events for part in parts])
        events = events[events != EMPTY_CACHE]
        tensors = np.where(events < 0, ~events, events)
        change = np.zeros(len(self._full), dtype=np.int64)
        np.add.at(change, tensors, np.where(events < 0, -1, 1))
        self._current[change < 0] = self._current[change > 0]

    def _bytes_at(self, length: int | None) -> npt.NDArray[np.int64]:
        if length is None:
            return self._full
        found = self._of_length.get(length)
        if found is None:
            share = length / self._config.sequence_length
            sizes = self._trace.sizes_of_part(
                share * self._config.samples_per_pass, self._config.lora_rank or 0
            )
            found = self._of_length[length] = self._full.copy()
            found[: len(sizes)] = sizes
        return found
