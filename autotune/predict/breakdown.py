"""Parts of a predicted peak, by what the memory is for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autotune.records.estimate import Breakdown

_BREAKDOWN_OF_CATEGORY = {
    "parameter": "parameters_bytes",
    "gradient": "gradients_bytes",
    "optimizer_state": "optimizer_state_bytes",
    "activation": "activations_bytes",
    "logits": "logits_bytes",
    "temporary": "temporaries_bytes",
    "workspace": "workspace_bytes",
}


def sum_of(
    sizes: Sequence[int], categories: Sequence[str], events: Iterable[int], category: str
) -> int:
    """Return the bytes of the tensors of one category that these events allocate."""
    return sum(sizes[e] for e in events if e >= 0 and categories[e] == category)


def breakdown(
    sizes: Sequence[int], categories: Sequence[str], events: Iterable[int], peak_bytes: int
) -> Breakdown:
    """Return what is alive after these events, by category; the rest of the peak is rounding."""
    live: set[int] = set()
    for event in events:
        if event >= 0:
            live.add(event)
        else:
            live.discard(~event)
    totals = dict.fromkeys(_BREAKDOWN_OF_CATEGORY.values(), 0)
    for number in live:
        totals[_BREAKDOWN_OF_CATEGORY[categories[number]]] += sizes[number]
    return Breakdown(**totals, rounding_bytes=peak_bytes - sum(totals.values()))
