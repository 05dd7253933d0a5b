"""Memory over the optimizer step in which a replay peaks, thinned out to what a chart has room for."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from autotune.memory.allocator import CATEGORIES, EMPTY_CACHE
from autotune.memory.traces.copies import numbers_of
from autotune.memory.traces.running import changes, in_blocks
from autotune.predict.steps import Steps
from autotune.records.charts import MAX_POINTS, MIN_POINTS_OF_PHASE, StepPhase, Timeline


def timeline_of(steps: Steps, peak_event: int) -> Timeline:
    """Memory during the step in which a replay of the steps says that allocated memory peaks."""
    parts, order = steps.parts, steps.order()
    is_of_tensor = order != EMPTY_CACHE
    order = np.where(is_of_tensor, order, 0)
    deltas = np.where(is_of_tensor, changes(order, in_blocks(steps.sizes)), 0)
    category_of = np.asarray(steps.categories)[numbers_of(order)]
    running = np.stack([np.cumsum(np.where(category_of == n, deltas, 0)) for n in CATEGORIES])
    starts = [0, *accumulate(len(part.events) for part in parts)]
    owner = next(i for i, end in enumerate(starts[1:]) if peak_event < end)
    # What peaks while the weights are loaded peaks before any step.
    step = max(parts[owner].step, 0)
    drawn = [
        (part.phase, start, end)
        for part, start, end in zip(parts, starts, starts[1:], strict=False)
        if part.step == step and start < end
    ]
    num_events = sum(end - start for _, start, end in drawn)
    totals, kept, phases = running.sum(axis=0), list[int](), dict[StepPhase, int]()
    for phase, start, end in drawn:
        phases[phase] = len(kept)
        shared = MAX_POINTS - MIN_POINTS_OF_PHASE * len(drawn)
        num_points = MIN_POINTS_OF_PHASE + shared * (end - start) // num_events
        for stretch in np.array_split(np.arange(start, end), min(num_points, end - start)):
            has_peak = stretch[0] <= peak_event <= stretch[-1]
            kept.append(peak_event if has_peak else int(stretch[totals[stretch].argmax()]))
    return Timeline(
        phases=phases,
        bytes_by_category={
            name: tuple(figures[kept].tolist())
            for name, figures in zip(CATEGORIES, running, strict=True)
        },
        peak_point=kept.index(peak_event) if peak_event in kept else 0,
    )
