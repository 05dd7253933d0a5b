"""Plans of checkpointing for unlike layers: a trace with some lean layers tells of other numbers of them.

A layer whose treatment is another than in the trace copies one of its kind, between the same kinds, that was
treated so. The last lean layer copies the last one of the trace, since it knows how the next one is treated
(Gemma 4); so it has to be of that kind, and between such kinds. The first of the others does not know.
"""

from __future__ import annotations

import functools

NUM_OWN = 2
"""Layers at either end that only stand for themselves: the first one's input may need no gradient, and its
neighbour knows; the last ones are the first that the backward pass comes to."""


@functools.cache
def _own_layers(kinds: str) -> frozenset[int]:
    """Layers that only stand for themselves: at the ends, and the first and last of each kind.

    What all of a kind share (a window's mask) is given back by the one that is the last to need it.
    """
    ends = (*range(NUM_OWN), *range(len(kinds) - NUM_OWN, len(kinds)))
    of_kinds = (at(kind) for kind in set(kinds) for at in (kinds.index, kinds.rindex))
    return frozenset((*ends, *of_kinds))


def place_to_cut(kinds: str) -> int | None:
    """Return the layer from which on a trace of every layer should treat them otherwise; None without one.

    It is the one that tells of the most numbers of lean layers, of two at least.
    """
    found = {cut: len(lean_counts(kinds, cut)) for cut in range(1, len(kinds))}
    most = max(found.values(), default=0)
    return next((cut for cut, number in found.items() if number == most > 1), None)


@functools.cache
def lean_counts(kinds: str, cut: int) -> tuple[int, ...]:
    """Return the numbers of lean layers that a trace with `cut` of them tells of.

    `kinds`: a letter for each layer; those of the same letter are alike.
    """
    return tuple(count for count in range(1, len(kinds)) if sources(kinds, cut, count) is not None)


@functools.cache
def sources(kinds: str, cut: int, count: int) -> tuple[int, ...] | None:
    """Return the traced layer that each layer copies where `count` are lean; None where one has none."""
    found = list(range(len(kinds)))
    if count == cut:
        return tuple(found)
    if count > cut:
        changed, models = range(cut - 1, count), range(cut - 1)
    else:
        changed, models = range(count, cut + 1), range(cut + 1, len(kinds))[::-1]
    own = _own_layers(kinds)
    among = [kinds[layer - 1 : layer + 2] for layer in range(len(kinds))]
    if among[count - 1] != among[cut - 1] or not own.isdisjoint((*changed, count - 1)):
        return None
    # The model is the one that is nearest to the border of the trace.
    model_of = {among[layer]: layer for layer in models if layer not in own}
    for layer in changed:
        if among[layer] not in model_of:
            return None
        found[layer] = model_of[among[layer]]
    found[count - 1] = cut - 1
    if among[count] == among[cut] and count not in own:
        found[count] = cut
    return tuple(found)
