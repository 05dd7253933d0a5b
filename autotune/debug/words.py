"""A tape and a comparison as lines for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.common.units import counted, format_bytes
from autotune.debug.comparison import Parting, PredictedGroup, SeenGroup, SnapshotComparison
from autotune.debug.tape import TapeFile, live_groups

NUM_GROUPS = 10


def lines_of_tape(tape: TapeFile, words: str) -> Iterator[str]:
    """Yield the peak, and the largest that live there, as lines. `words` describes the configuration."""
    peak = tape.peak
    phase = tape.phase_at(peak.event)
    when = "before the first step" if phase.step < 0 else f"in {phase.phase} of step {phase.step}"
    yield f"{tape.model} on {tape.gpu}. PREDICTED, not measured."
    yield f"config   {words}"
    yield (
        f"peak     {format_bytes(peak.allocated_bytes)} allocated, {when}; "
        f"{format_bytes(peak.reserved_bytes)} reserved, {format_bytes(peak.device_bytes)} of the device"
    )
    groups = live_groups(tape)
    yield "live     at the peak, by operation and phase"
    for group in groups[:NUM_GROUPS]:
        name = group.operation or "unknown"
        yield (
            f"  {format_bytes(group.size_bytes):>10}  {group.count:>5} x {name}, {group.phase} "
            f"({group.category})"
        )
    left = groups[NUM_GROUPS:]
    if left:
        rest_bytes = sum(group.size_bytes for group in left)
        num_tensors = sum(group.count for group in left)
        yield f"  {format_bytes(rest_bytes):>10}  {num_tensors:>5} others"


def lines_of_comparison(found: SnapshotComparison) -> Iterator[str]:
    """Yield lines for what is equal, where they part, and what only one of them has."""
    yield "                predicted        the run"
    yield _row("live at peak", found.predicted_live_bytes, found.seen_live_bytes)
    yield _row("reserved", found.predicted_reserved_bytes, found.seen_reserved_bytes)
    if found.num_out_of_memory:
        yield f"the run was refused memory {counted(found.num_out_of_memory, 'time')}"
    yield from _alignment(found)
    if found.live is not None:
        yield from _live_parting(found.live)
    if found.sizes is None:
        length = min(found.num_predicted, found.num_seen)
        whose = "prediction" if found.num_predicted <= found.num_seen else "record"
        yield f"sizes    all {length:,} are equal, up to the end of the {whose}"
    else:
        yield f"sizes    {found.num_equal:,} are equal, then they part"
        yield from _both(found.sizes)
    for title, groups in (
        ("predicted at the peak, not seen in the run", found.only_predicted),
        ("in the run at the peak, not predicted", found.only_seen),
    ):
        if groups:
            yield title
            yield from map(_group, groups[:NUM_GROUPS])
            if len(groups) > NUM_GROUPS:
                yield f"  and {counted(len(groups) - NUM_GROUPS, 'group')} more (--json has all)"


def _row(name: str, predicted_bytes: int, seen_bytes: int) -> str:
    more = seen_bytes - predicted_bytes
    share = f" ({100 * more / predicted_bytes:+.1f} %)" if predicted_bytes and more else ""
    difference = f"{'+' if more > 0 else ''}{format_bytes(more)}{share}" if more else "equal"
    return (
        f"{name:<12}{format_bytes(predicted_bytes):>13}{format_bytes(seen_bytes):>15}  {difference}"
    )


def _alignment(found: SnapshotComparison) -> Iterator[str]:
    step = found.begins_step
    begin = "before the first step" if step < 0 else f"with step {step}"
    skipped = f", {found.num_skipped:,} allocations before that" if found.num_skipped else ""
    before = f", {format_bytes(found.seen_before_bytes)} live" if found.seen_before_bytes else ""
    yield f"record   begins {begin}{skipped}{before}; tensors from {format_bytes(found.least_bytes)} on"


def _live_parting(parting: Parting) -> Iterator[str]:
    more = parting.more_bytes
    kept = "more are still live in the run" if more > 0 else "are freed in the run already"
    yield f"frees    {format_bytes(abs(more))} {kept} when this is allocated"
    yield from _both(parting)


def _both(parting: Parting) -> Iterator[str]:
    ours, theirs = parting.predicted, parting.seen
    if ours is not None:
        layer = "" if ours.layer is None else f", layer {ours.layer}"
        step = "" if ours.step < 0 else f", step {ours.step}"
        yield (
            f"  predicted {format_bytes(ours.size_bytes)} ({ours.size_bytes:,} B) by "
            f"{ours.operation or 'unknown'}, {ours.phase}{layer}{step} (event {ours.event})"
        )
    if theirs is not None:
        yield (
            f"  the run   {format_bytes(theirs.size_bytes)} ({theirs.size_bytes:,} B) in "
            f"{_stack(theirs.frames)} (entry {theirs.event})"
        )


def _group(group: PredictedGroup | SeenGroup) -> str:
    if isinstance(group, SeenGroup):
        origin = _stack(group.frames)
    else:
        origin = f"{group.operation or 'unknown'}, {group.phase}"
    return f"  {group.count:>5} x {format_bytes(group.size_bytes):>10}  {origin}"


def _stack(frames: tuple[str, ...]) -> str:
    return " < ".join(frames) or "no stack recorded"
