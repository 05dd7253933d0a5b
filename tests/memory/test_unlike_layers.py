"""Which layers of a model whose layers are unlike stand for which, where they are treated otherwise."""

from __future__ import annotations

import pytest

from autotune.memory.traces.layers import Alike, BrokenTrace
from autotune.memory.traces.unlike_layers import lean_counts, place_to_cut, sources

GEMMA_3 = "aaaaab" * 4 + "aa"
"""26 layers, of which each sixth attends to all tokens."""


@pytest.mark.parametrize("kinds", [GEMMA_3, "aaaaab" * 5 + "aaaa", "ab" * 8, "abc" * 5, "a" * 9])
def test_what_is_treated_otherwise_copies_its_kind_between_its_kinds(kinds: str) -> None:
    cut = place_to_cut(kinds)
    assert cut is not None
    counts = lean_counts(kinds, cut)
    assert cut in counts
    assert len(counts) > 1
    for count in counts:
        copied = sources(kinds, cut, count)
        assert copied is not None
        assert len(copied) == len(kinds)
        for layer, source in enumerate(copied):
            assert (source < cut) == (layer < count)
            assert kinds[source] == kinds[layer]
            if source != layer:
                assert kinds[source - 1 : source + 2] == kinds[layer - 1 : layer + 2]


def test_the_last_lean_layer_is_like_that_of_the_trace() -> None:
    cut = place_to_cut(GEMMA_3)
    assert cut is not None
    # The first and the last of a kind may share with all others, and are treated as they were traced.
    counts = (8, 9, 10, 14, 15, 16, 20, 21, 22)
    assert lean_counts(GEMMA_3, cut) == counts
    for count in counts:
        copied = sources(GEMMA_3, cut, count)
        assert copied is not None
        assert copied[count - 1] == cut - 1


@pytest.mark.parametrize("kinds", ["", "a", "aaaaa", "abcdefgh", "aaaabbbb"])
def test_too_few_alike_have_no_plan(kinds: str) -> None:
    assert place_to_cut(kinds) is None


def test_another_number_of_lean_layers_is_broken() -> None:
    cut = place_to_cut(GEMMA_3)
    every = [*range(26)]
    of_any = {"own": every, "sources": every, "cut": cut, "kinds": GEMMA_3}
    assert Alike.of_answer({**of_any, "begins": 9}).lean_counts == lean_counts(GEMMA_3, cut or 0)
    with pytest.raises(BrokenTrace, match="3 layers"):
        Alike.of_answer({**of_any, "begins": 3})
