"""A prediction beside the recorded history of a real run, and where they part.

The allocations of both are laid side by side: the record may begin before the weights are loaded or at any
optimizer step, and what comes before the first of our allocations is skipped. Small tensors (scalars,
counted labels, logging) are left out by size, since they come and go for many reasons and hardly count.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from autotune.common.units import MIB
from autotune.debug.snapshot import Recorded, RecordedEvent
from autotune.debug.tape import TapeFile, rounded

LEAST_BYTES = MIB
"""Bytes of the largest tensor that lives in PyTorch's pool of small blocks."""

_NUM_ALIKE = 3
"""Number of allocations, alike in a row, from which a place to begin is recognised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """An allocation of the prediction."""

    event: int
    """Index into the tape's events."""
    size_bytes: int
    """Size, rounded to 512 B."""
    operation: str
    phase: str
    layer: int | None
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedAllocation:
    """An allocation of the run."""

    event: int
    """Index into device_traces."""
    size_bytes: int
    """Size, rounded to 512 B."""
    frames: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parting:
    """The first place at which the two differ; None on the side that has nothing more."""

    predicted: Predicted | None
    seen: RecordedAllocation | None
    more_bytes: int = 0
    """Bytes by which more is live in the run, where that is the difference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedGroup:
    """Tensors of one size and origin that live at the peak of the prediction, and not of the run."""

    size_bytes: int
    """Size of one tensor, rounded to 512 B."""
    count: int
    operation: str
    phase: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenGroup:
    """Tensors of one size and origin that live at the peak of the run, and not of the prediction."""

    size_bytes: int
    """Size of one tensor, rounded to 512 B."""
    count: int
    frames: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotComparison:
    """Places where a prediction and a run part, with their figures."""

    least_bytes: int
    """Size below which tensors are left out of sequences and groups."""
    predicted_live_bytes: int
    """Bytes live at the peak: sizes rounded to 512 B, as all live bytes here."""
    seen_live_bytes: int
    predicted_reserved_bytes: int
    seen_reserved_bytes: int
    seen_before_bytes: int
    """Bytes live when the record begins."""
    num_out_of_memory: int
    """Number of the run's requests that failed."""
    num_skipped: int
    """Number of the run's allocations before the first that is laid beside one of ours."""
    begins_step: int
    """Optimizer step at which the record is taken to begin; -1: before the first."""
    num_equal: int
    """Number of allocations from there on that are equal."""
    num_predicted: int
    num_seen: int
    """Number of the run's allocations from there on."""
    sizes: Parting | None
    """First allocation with another size; None where all are equal up to the end of either."""
    live: Parting | None
    """Place before that at which something was freed earlier or later; None where there is none."""
    only_predicted: tuple[PredictedGroup, ...]
    """Groups that only the prediction has, the largest first."""
    only_seen: tuple[SeenGroup, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": 1, **dataclasses.asdict(self)}


@dataclass(frozen=True, slots=True)
class _Allocation:
    position: int
    size_bytes: int
    live_bytes: int
    """Bytes live with this allocation included."""


def compare(tape: TapeFile, run: Recorded, *, least_bytes: int = LEAST_BYTES) -> SnapshotComparison:
    """Lay a prediction and a recorded run side by side.

    `least_bytes`: size below which tensors do not count.
    """
    seen = list(_seen(run, least_bytes))
    laid = [(*_beside(ours, seen), -start, ours) for start, ours in _starts(tape, least_bytes)]
    num_equal, offset, _, ours = max(laid, key=lambda each: (each[0], each[2]))
    theirs = seen[offset:]
    sizes = None
    if num_equal < min(len(ours), len(theirs)):
        sizes = _parting(tape, run, ours[num_equal], theirs[num_equal])
    only_predicted, only_seen = _groups(tape, run, least_bytes)
    return SnapshotComparison(
        least_bytes=least_bytes,
        predicted_live_bytes=sum(rounded(tape.tensors[n].size_bytes) for n in tape.live_at_peak()),
        seen_live_bytes=run.peak_live_bytes,
        predicted_reserved_bytes=tape.peak.reserved_bytes,
        seen_reserved_bytes=run.peak_reserved_bytes,
        seen_before_bytes=run.before_bytes,
        num_out_of_memory=run.num_out_of_memory,
        num_skipped=offset,
        begins_step=tape.phase_at(ours[0].position).step if ours else -1,
        num_equal=num_equal,
        num_predicted=len(ours),
        num_seen=len(theirs),
        sizes=sizes,
        live=_live_parting(tape, run, ours[:num_equal], theirs, least_bytes),
        only_predicted=only_predicted,
        only_seen=only_seen,
    )


def _unrolled(tape: TapeFile) -> Iterator[int]:
    """Indices of events in the order of a run."""
    ends = [*(phase.first_event for phase in tape.phases[1:]), len(tape.events)]
    stretches = zip(tape.phases, ends, strict=True)
    # A micro-batch's forward and backward are repeated together.
    for (_, repeats), group in groupby(stretches, lambda pair: (pair[0].step, pair[0].repeats)):
        parts = list(group)
        for _ in range(repeats):
            yield from range(parts[0][0].first_event, parts[-1][1])


def _predicted(tape: TapeFile, least_bytes: int) -> Iterator[_Allocation]:
    live: dict[int, int] = {}
    live_bytes = 0
    for position in _unrolled(tape):
        event = tape.events[position]
        if event == "empty_cache":
            continue
        size = rounded(tape.tensors[event if event >= 0 else ~event].size_bytes)
        if size <= 0:
            continue
        if event < 0:
            live_bytes -= live.pop(~event, 0)
            continue
        live_bytes += size - live.get(event, 0)
        live[event] = size
        if size >= least_bytes:
            yield _Allocation(position, size, live_bytes)


def _seen(run: Recorded, least_bytes: int) -> Iterator[_Allocation]:
    live_bytes = run.before_bytes
    for index, event in enumerate(run.events):
        size = event.tensor.size_bytes
        live_bytes += -size if event.is_free else size
        if not event.is_free and size >= least_bytes:
            yield _Allocation(index, size, live_bytes)


def _starts(tape: TapeFile, least_bytes: int) -> Iterator[tuple[int, list[_Allocation]]]:
    """Yield each place where a record may begin, and our allocations from there on.

    The places are before all, and at each step.
    """
    ours = list(_predicted(tape, least_bytes))
    yield 0, ours
    for step in sorted({phase.step for phase in tape.phases if phase.step >= 0}):
        first_event = next(phase.first_event for phase in tape.phases if phase.step == step)
        rest = [each for each in ours if each.position >= first_event]
        if rest:
            yield first_event, rest


def _beside(ours: Sequence[_Allocation], theirs: Sequence[_Allocation]) -> tuple[int, int]:
    """Return (number equal in a row, number of theirs before that), where most are equal."""
    our_sizes = [each.size_bytes for each in ours]
    their_sizes = [each.size_bytes for each in theirs]
    num_alike = min(_NUM_ALIKE, len(ours))
    wanted = our_sizes[:num_alike]
    offsets = [
        offset
        for offset in range(len(theirs) - num_alike + 1)
        if offset == 0 or their_sizes[offset : offset + num_alike] == wanted
    ]
    found = [(_num_equal(our_sizes, their_sizes, offset), -offset) for offset in offsets or [0]]
    num_equal, negative = max(found)
    return num_equal, -negative


def _num_equal(ours: Sequence[int], theirs: Sequence[int], offset: int) -> int:
    length = min(len(ours), len(theirs) - offset)
    return next((i for i in range(length) if ours[i] != theirs[offset + i]), max(length, 0))


def _parting(
    tape: TapeFile, run: Recorded, ours: _Allocation, theirs: _Allocation, more_bytes: int = 0
) -> Parting:
    number = tape.events[ours.position]
    assert number != "empty_cache"
    tensor = tape.tensors[number]
    phase = tape.phase_at(ours.position)
    event: RecordedEvent = run.events[theirs.position]
    return Parting(
        predicted=Predicted(
            event=ours.position,
            size_bytes=ours.size_bytes,
            operation=tensor.operation,
            phase=phase.phase,
            layer=tensor.layer,
            step=phase.step,
        ),
        seen=RecordedAllocation(
            event=event.position, size_bytes=theirs.size_bytes, frames=event.tensor.frames
        ),
        more_bytes=more_bytes,
    )


def _live_parting(
    tape: TapeFile,
    run: Recorded,
    ours: Sequence[_Allocation],
    theirs: Sequence[_Allocation],
    least_bytes: int,
) -> Parting | None:
    """First of equal allocations at which the live bytes differ by a tensor that counts."""
    if not ours:
        return None
    # What is there before the record is not ours to judge.
    before = theirs[0].live_bytes - ours[0].live_bytes
    for mine, other in zip(ours, theirs, strict=False):
        more = other.live_bytes - mine.live_bytes - before
        if abs(more) >= least_bytes:
            return _parting(tape, run, mine, other, more)
    return None


def _groups(
    tape: TapeFile, run: Recorded, least_bytes: int
) -> tuple[tuple[PredictedGroup, ...], tuple[SeenGroup, ...]]:
    """Tensors that live at one peak and not at the other, of each size so many as it has more."""
    ours = [tape.tensors[number] for number in tape.live_at_peak()]
    our_sizes = Counter(rounded(tensor.size_bytes) for tensor in ours)
    their_sizes = Counter(tensor.size_bytes for tensor in run.live_at_peak)
    origins = ((rounded(t.size_bytes), (t.operation, t.phase)) for t in ours)
    predicted = _surplus(origins, our_sizes - their_sizes, least_bytes)
    frames = ((t.size_bytes, t.frames) for t in run.live_at_peak)
    seen = _surplus(frames, their_sizes - our_sizes, least_bytes)
    return (
        tuple(
            PredictedGroup(size_bytes=size, count=count, operation=where[0], phase=where[1])
            for size, where, count in predicted
        ),
        tuple(SeenGroup(size_bytes=size, count=count, frames=where) for size, where, count in seen),
    )


def _surplus(
    tensors: Iterable[tuple[int, tuple[str, ...]]], more: Counter[int], least_bytes: int
) -> list[tuple[int, tuple[str, ...], int]]:
    """Triples (size, origin, count) of the sizes that one side has more of, the most bytes first.

    Which of several origins of a size is the one too many, nobody can tell: the last made are taken.
    """
    origins: dict[int, list[tuple[str, ...]]] = defaultdict(list)
    for size, where in tensors:
        origins[size].append(where)
    counts: Counter[tuple[int, tuple[str, ...]]] = Counter()
    for size, count in more.items():
        if size >= least_bytes:
            counts.update((size, where) for where in origins[size][-count:])
    return sorted(
        ((size, where, count) for (size, where), count in counts.items()),
        key=lambda group: (-group[0] * group[2], group[0], group[1]),
    )
