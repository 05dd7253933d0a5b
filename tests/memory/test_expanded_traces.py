"""A trace of some layers is the trace of all of them, whatever the layers are like and however treated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from written_trace import EMBEDDING, Answer

from autotune.memory.traces import TOWER, BrokenTrace, Trace, with_lean_layers_later
from autotune.memory.traces.unlike_layers import lean_counts, place_to_cut

HIDDEN, LOGITS, TOKENS = [16, 1, 0], [700, 1, 0], [8, 1, 0]
WORKSPACE, NUMBER = [50_000, 0, 0], [4, 0, 0]


def step(
    kinds: Sequence[str],
    lean: int = 0,
    tower: Sequence[str] = "",
    *,
    first: int = 0,
    period: int = 0,
) -> Answer:
    """A step of layers of these kinds, the first `lean` checkpointed, behind a tower that sees.

    Kinds make unlike numbers of tensors of unlike sizes, so that no number means the same in two of them.
    The first layer makes what the last one frees, and in the backward pass the other way round. Each leaves
    its output to the next one, and to the end what it has counted. Where the kinds are a pattern that begins
    at `first`, each leaves something to the one that is a period behind it, too; and the first periods and
    the last of those that are treated alike are unlike the others.
    """

    ends = {"first": first, "last": len(kinds), **({"lean": lean} if lean else {})}
    a, last = Answer(full=len(kinds), traced=len(kinds)), len(kinds) - 1
    a.block("weights").weight("embedding", EMBEDDING)
    for n, kind in enumerate(tower):
        a.block("weights", n, stack=TOWER).alloc(f"v{n}", [ord(kind), 0, 0], category="parameter")
        a.parameters.append(counted(TOWER, n, kind))
    for n, kind in enumerate(kinds):
        a.block("weights", n).weight(f"w{n}", [1000 + ord(kind), 0, 0])
        a.parameters.append(counted(0, n, kind))
    a.block("batch").alloc("tokens", TOKENS)
    a.block("count").alloc("is-token", TOKENS).alloc("number", NUMBER).free("is-token")
    a.block("embed").alloc("out-1", HIDDEN)
    for n, kind in enumerate(tower):
        a.block("forward", n, stack=TOWER).alloc(f"seen{n}", [ord(kind), 1, 0])
        a.alloc(f"view{n}", HIDDEN).kernel(f"view {kind}", [3, 1, 0])
        if n:
            a.free(f"view{n - 1}")
    for n, kind in enumerate(kinds):
        a.block("forward", n)
        if n == 0:
            a.alloc("workspace", WORKSPACE, category="workspace").alloc("mask", [31, 1, 0])
            a.alloc("odd", HIDDEN).free("odd")
            if tower:
                a.free(f"view{len(tower) - 1}")
        if period:
            a.alloc(f"far{n}", [51, 1, 0])
        for part in range(1 + ord(kind) % 3):
            a.alloc(f"kept{n}.{part}", [ord(kind), 1, part % 2])
        a.alloc(f"scratch{n}", [2 * ord(kind), 1, 0]).alloc(f"stat{n}", [4, 0, 0])
        if n < lean:
            a.alloc(f"box{n}", [77, 1, 0]).kernel("lean", [1, 1, 0])
        a.alloc(f"mid{n}", [40, 1, 0]).alloc(f"out{n}", HIDDEN).free(f"scratch{n}")
        if n < lean:
            a.free(f"box{n}", *(f"kept{n}.{part}" for part in range(1 + ord(kind) % 3)))
        if n:
            a.free(f"mid{n - 1}")
        if period and n >= first + period:
            a.free(f"far{n - period}")
        for name in (name for name, end in ends.items() if abs(n + 0.5 - end) < period):
            a.kernel(f"{name} {n - ends[name]}", HIDDEN)
        a.kernel(f"mm {kind}", [ord(kind), 1, 0], 2).kernel("add", [0, 0, 0])
    a.free("mask")
    a.block("head").free(f"mid{last}")
    for n in range(len(kinds)) if period else ():
        if n < first or n >= len(kinds) - period:
            a.free(f"far{n}")
    a.alloc("logits", LOGITS, category="logits")
    a.kernel("mm head", [70, 1, 0])
    a.block("head_backward").free("logits").alloc(f"d{len(kinds)}", HIDDEN)
    for n, kind in reversed([*enumerate(kinds)]):
        a.block("backward", n)
        if n < lean:
            for part in range(1 + ord(kind) % 3):
                a.alloc(f"kept{n}.{part}", [ord(kind), 1, part % 2])
            a.kernel("again", [1, 1, 0])
        a.gradient(f"g{n}", [1000 + ord(kind), 0, 0])
        a.free(*(f"kept{n}.{part}" for part in range(1 + ord(kind) % 3)))
        a.alloc(f"d{n}", HIDDEN).free(f"d{n + 1}", f"out{n - 1}").kernel(f"back {kind}", [9, 1, 0])
        if n == last:
            a.alloc("cast", [55, 1, 0])
    a.free("cast")
    for n, kind in reversed([*enumerate(tower)]):
        a.block("backward", n, stack=TOWER).free(f"seen{n}").kernel(f"unview {kind}", [3, 1, 0])
    a.block("embed_backward").gradient("g-embedding", EMBEDDING).free("d0")
    a.block("end").free(f"out{last}", *(f"stat{n}" for n in range(len(kinds))))
    return a


def counted(stack: int, layer: int, kind: str) -> dict[str, Any]:
    total = [[ord(kind), 0, 0], [1, 0, 1]]
    return {"stack": stack, "layer": layer, "total": total, "trainable": total[1:]}


def same(few: Trace, whole: Trace) -> None:
    """Compare all that two traces say, tensor by tensor; kernels and copies of one block in any order."""
    assert few.sizes(2, 3) == whole.sizes(2, 3)
    assert few.categories == whole.categories
    for name in ("setup", "batch", "count", "gradients", "workspaces", "num_weights", "layers"):
        assert getattr(few, name) == getattr(whole, name), name
    for name in ("first", "again", "next", "released_first", "released"):
        mine, theirs = getattr(few, name), getattr(whole, name)
        num_ended = 1 + max(whole.layers.values())
        assert mine[:-num_ended] == theirs[:-num_ended], name
        assert sorted(mine) == sorted(theirs), name
    for events in ("setup", "again", "next", "released"):
        for trace in (few, whole):
            sizes = [-(-size // 512) * 512 for size in trace.sizes(2, 3)]
            alive, total = [], 0
            for event in getattr(trace, events):
                total += sizes[event] if event >= 0 else -sizes[~event]
                alive.append(total)
            assert trace.running_bytes(events, 2, 3).tolist() == alive
            assert trace.left_bytes(events, 2, 3) == alive[-1]
    for name in ("blocks", "next_blocks", "setup_blocks"):
        places = [
            [(phase, place, len(events)) for phase, place, events in getattr(trace, name)()]
            for trace in (few, whole)
        ]
        assert places[0] == places[1], name
    assert few.parameters() == whole.parameters()
    assert few.trainable(3) == whole.trainable(3)
    assert few.num_parameters(3) == whole.num_parameters(3)
    assert (few.num_forward_events, few.num_forward_workspaces) == (
        whole.num_forward_events,
        whole.num_forward_workspaces,
    )
    launched = [{each.kernel: each for each in trace.launches(2, 3)} for trace in (few, whole)]
    assert launched[0] == launched[1]
    timelines = []
    for trace in (few, whole):
        shares, order = trace.stretches
        names = [f"{kernel.phase} {kernel.name}" for kernel in trace.kernels]
        counts = [kernel.count for kernel in trace.kernels]
        by_name = sorted(range(len(names)), key=names.__getitem__)
        launches = (shares[order] * counts)[:, by_name].round(6)
        timelines.append((sorted(names), launches.tolist()))
    assert timelines[0] == timelines[1]


@pytest.mark.parametrize(
    ("before", "kinds", "rest"),
    [
        ("", "a", 0),
        ("xy", "a", 0),
        ("", "ab", 0),
        ("x", "ab", 1),
        ("xy", "aab", 1),
        ("", "abcb", 2),
    ],
)
def test_layers_that_repeat_are_copied(before: str, kinds: str, rest: int) -> None:
    period = len(kinds)
    # The first layer and the last are unlike the others in more than one way, and are no neighbours.
    periods = 3 if before or period > 1 else 4
    traced = before + periods * kinds + kinds[:rest]
    for more in (0, 3):
        few = step(traced, first=len(before), period=period)
        whole = before + (periods + more) * kinds + kinds[:rest]
        few.layers |= {"full": len(whole), "period": period, "first": len(before)}
        same(few.trace(), step(whole, first=len(before), period=period).trace())


@pytest.mark.parametrize(("before", "kinds"), [("", "a"), ("x", "a"), ("xy", "ab")])
def test_lean_layers_and_others_are_copied_each_by_themselves(kinds: str, before: str) -> None:
    period, cut = len(kinds), len(before + 3 * kinds)
    where = {"first": len(before), "period": period}
    few = step(before + 6 * kinds, cut, **where)
    full = len(before + 9 * kinds)
    few.layers |= {"full": full, **where, "cut": cut}
    trace = few.trace()
    counts = [cut, cut + period, cut + 2 * period, cut + 3 * period]
    assert [*trace.lean_layers] == counts
    for count in counts:
        whole = step(before + 9 * kinds, count, **where)
        same(with_lean_layers_later(trace, count), whole.trace())
    trace.identity = "its own"
    later = with_lean_layers_later(trace, cut)
    assert later.identity not in ("", "its own")
    assert later.first == trace.first
    wrong = {cut - 1, full - cut + 1 + len(before)} | ({cut + 1} if period > 1 else set())
    for count in wrong:
        with pytest.raises(BrokenTrace):
            trace.with_lean_layers(count)
    with pytest.raises(BrokenTrace, match="every layer was traced"):
        step("aaa").trace().with_lean_layers(2)
    assert [*step("aaa").trace().lean_layers] == []


@pytest.mark.parametrize("kinds", ["aaaaabaaaaabaa", "abababababab", "aaaaaaaa"])
def test_a_plan_for_unlike_layers_tells_of_other_numbers_of_lean_ones(kinds: str) -> None:
    cut = place_to_cut(kinds)
    assert cut is not None
    every = step(kinds, cut)
    numbers = [*range(len(kinds))]
    every.layers = {"own": numbers, "sources": numbers, "cut": cut, "kinds": kinds}
    trace = every.trace()
    assert tuple(trace.lean_layers) == lean_counts(kinds, cut)
    same(trace, step(kinds, cut).trace())
    for count in trace.lean_layers:
        same(trace.with_lean_layers(count), step(kinds, count).trace())


@pytest.mark.parametrize(
    ("kinds", "own"),
    [
        ("aaaaaa", [0, 1, 2, 5]),
        ("abaabaab", [0, 1, 2, 3, 6, 7]),
        ("aabbaabbaa", [0, 1, 2, 3, 8, 9]),
    ],
)
@pytest.mark.parametrize("tower", ["", "ttttt"])
def test_layers_in_any_order_are_copies_of_one_of_their_kind(
    kinds: str, own: list[int], tower: str
) -> None:
    few = step([kinds[layer] for layer in own], tower=tower and "ttt")
    inner = {kinds[layer]: position for position, layer in enumerate(own[1:-1], 1)}
    sources = [
        own.index(layer) if layer in own else inner[kind] for layer, kind in enumerate(kinds)
    ]
    few.layers = {"own": own, "sources": sources}
    more: dict[str, Any] = {}
    if tower:
        more = {"tower": {"own": [0, 1, 4], "sources": [0, 1, 1, 1, 2]}}
    every = [*range(5)]
    of_all = {"tower": {"own": every, "sources": every}} if tower else {}
    same(few.trace(**more), step(kinds, tower=tower).trace(**of_all))
