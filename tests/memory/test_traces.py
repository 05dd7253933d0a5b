"""Hand-written answers of a worker: three layers, and what must become of five."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from written_trace import EMBEDDING, Answer

from autotune.memory.optimizers import TensorSpec
from autotune.memory.traces import BrokenTrace, LaterTrace, Sums, Terms, Trace, evaluate
from autotune.memory.traces.running import changes, in_blocks, running

WEIGHT = [1000, 0, 0]
HIDDEN, SCRATCH, LOGITS, TOKENS = [16, 1, 0], [24, 1, 0], [700, 1, 0], [8, 1, 0]
WORKSPACE, NUMBER = [50_000, 0, 0], [4, 0, 0]


def step(*, full: int, traced: int = 3, odd_first_layer: bool = False) -> Answer:
    """A step of a model whose layers each keep their output for the backward pass."""
    a = Answer(full=full, traced=traced)
    a.block("weights").weight("embedding", EMBEDDING)
    for n in range(traced):
        a.block("weights", n).weight(f"w{n}", WEIGHT)
    a.block("batch").alloc("tokens", TOKENS).kernel("copy", [5, 1, 0])
    a.block("count").alloc("is-token", TOKENS).alloc("number", NUMBER).free("is-token")
    a.block("embed").alloc("out-1", HIDDEN)
    for n in range(traced):
        a.block("forward", n)
        if n == 0:
            a.alloc("workspace", WORKSPACE, category="workspace")
        if n == 0 and odd_first_layer:
            a.alloc("odd", SCRATCH).free("odd")
        a.alloc(f"scratch{n}", SCRATCH).alloc(f"out{n}", HIDDEN).free(f"scratch{n}")
        a.kernel("mm", [10, 1, 0]).kernel("add", [0, 0, 0], 2)
    a.block("head").alloc("logits", LOGITS, category="logits").kernel("mm", [70, 1, 0])
    a.block("head_backward").free("logits").alloc(f"d{traced}", HIDDEN)
    for n in reversed(range(traced)):
        a.block("backward", n).gradient(f"g{n}", WEIGHT).alloc(f"d{n}", HIDDEN)
        a.free(f"d{n + 1}", f"out{n - 1}")
        a.kernel("mm", [20, 1, 0])
    a.block("embed_backward").gradient("g-embedding", EMBEDDING).free("d0")
    # The last output has no next layer to free it.
    a.block("end").free(f"out{traced - 1}")
    return a


def seen(trace: Trace, events: list[int], micro_batch: int = 2) -> list[int]:
    """Events as signed sizes."""
    sizes = trace.sizes(micro_batch, 1)
    return [sizes[e] if e >= 0 else -sizes[~e] for e in events]


# At micro-batch 2: hidden 32, scratch 48, logits 1400, tokens 16.
FORWARD = [32, 50_000, 48, 32, -48] + 4 * [48, 32, -48] + [1400]
BACKWARD = [-1400, 32, *5 * [1000, 32, -32, -32], 9000, -32, -32]
ADDING = [-1400, 32, *5 * [1000, -1000, 32, -32, -32], 9000, -9000, -32, -32]


@pytest.mark.parametrize("odd_first_layer", [False, True])
def test_the_middle_layer_repeats(odd_first_layer: bool) -> None:
    """An odd first layer numbers its tensors in another way; its neighbour's copies must not."""
    trace = step(full=5, odd_first_layer=odd_first_layer).trace()
    forward = list(FORWARD)
    if odd_first_layer:
        forward[2:2] = [48, -48]
    assert seen(trace, trace.batch) == [16]
    assert seen(trace, trace.count) == [16, 4, -16]
    assert seen(trace, trace.setup) == [9000, *5 * [1000]]
    assert seen(trace, trace.first) == forward + BACKWARD
    assert seen(trace, trace.again) == [size for size in forward if size != 50_000] + BACKWARD
    assert seen(trace, trace.next) == [size for size in forward if size != 50_000] + ADDING
    # The gradient that is there and the one that is added to it are of one size; here it is one.
    assert seen(trace, trace.released_first) == forward + ADDING
    assert seen(trace, trace.released) == [size for size in forward if size != 50_000] + ADDING
    made = {event for event in trace.released if event >= 0}
    assert set(trace.gradients) <= made & {~event for event in trace.released if event < 0}


@pytest.mark.parametrize("kind", ["copied", "shared"])
def test_a_gradient_that_is_a_copy_is_made_once_and_one_that_is_shared_goes_with_the_others(
    kind: str,
) -> None:
    """As the gradients of a vision transformer's positions and class token are at micro-batch 1."""
    a = step(full=5)
    embedding = a.number["g-embedding"]
    a.tensors[embedding][kind] = True
    if kind == "shared":
        a.free("g-embedding")
    trace = a.trace()
    workspaces = [size for size in FORWARD if size != 50_000]
    assert seen(trace, trace.first) == FORWARD + BACKWARD
    if kind == "copied":
        adding = [size for size in ADDING if abs(size) != 9000]
        released = FORWARD + ADDING
    else:
        adding = [*(size for size in ADDING if size != -9000), -9000]
        released = FORWARD + adding
    assert seen(trace, trace.next) == workspaces + adding
    assert seen(trace, trace.released_first) == released


def test_a_gradient_tells_its_parameter() -> None:
    trace = step(full=5).trace()
    specs = [trace.parameter_of(gradient, 1) for gradient in trace.gradients]
    assert [spec.num_elements for spec in specs] == [*5 * [1000], 9000]
    assert [spec.embedding for spec in specs] == [*5 * [False], True]
    assert [spec.linear for spec in specs] == [*5 * [True], False]


def test_each_copy_frees_its_own_neighbours_tensor() -> None:
    """The outputs die in the order opposite to their birth: 4, 3, 2, 1 ..., not all the same."""
    trace = step(full=6, odd_first_layer=True).trace()
    outputs = [n for n, c in enumerate(trace.categories) if c == "activation"]
    outputs = [n for n in outputs if trace.sizes(2, 1)[n] == 32]
    assert len(outputs) == 7
    deaths = [~event for event in trace.first if event < 0 and ~event in outputs]
    # The last layer's goes at the end, after all the others.
    assert deaths == [*reversed(outputs[:-1]), outputs[-1]]


def test_every_number_of_layers_equals_the_whole_trace() -> None:
    for full in range(3, 9):
        few, whole = step(full=full).trace(), step(full=full, traced=full).trace()
        for events in ("setup", "first", "again", "next"):
            mine, theirs = getattr(few, events), getattr(whole, events)
            assert seen(few, mine) == seen(whole, theirs), (full, events)
            assert [few.categories[max(e, ~e)] for e in mine] == [
                whole.categories[max(e, ~e)] for e in theirs
            ]


def test_categories() -> None:
    trace = step(full=5).trace()
    sizes = trace.sizes(2, 1)
    of_size = {
        size: {trace.categories[n] for n, s in enumerate(sizes) if s == size} for size in sizes
    }
    assert of_size == {
        9000: {"parameter", "gradient"},
        1000: {"parameter", "gradient"},
        16: {"activation", "temporary"},  # tokens, and which of them are counted
        4: {"activation"},
        32: {"activation", "temporary"},  # outputs are kept for the backward pass, d's are not
        48: {"temporary"},
        1400: {"logits"},
        50_000: {"workspace"},
    }
    assert len(trace.gradients) == 6
    assert [sizes[n] for n in trace.gradients] == [*5 * [1000], 9000]
    assert len(trace.workspaces) == 1


def test_what_set_up_leaves_is_a_parameter_down_to_the_last_tensor() -> None:
    a = Answer(full=3).block("weights")
    a.alloc("first", WEIGHT).alloc("between", WEIGHT).free("between").alloc("last", WEIGHT)
    assert a.trace().categories == ["parameter", "temporary", "parameter"]


def test_running_bytes_rise_as_a_tensor_comes_and_fall_as_it_goes() -> None:
    rounded = in_blocks([0, 1, 512, 513, 2**62])
    assert rounded.tolist() == [0, 512, 512, 1024, 2**62]
    events = np.array([1, 3, ~1, 4, ~3, ~4])
    assert changes(events, rounded).tolist() == [512, 1024, -512, 2**62, -1024, -(2**62)]
    assert running(events, rounded).tolist() == [512, 1536, 1024, 2**62 + 1024, 2**62, 0]


def test_running_and_summed_bytes_are_rounded_to_blocks() -> None:
    trace = step(full=5).trace()
    assert trace.running_bytes("setup", 2, 1).tolist() == [9216 + 1024 * n for n in range(6)]
    assert trace.bytes_of(trace.gradients, 2, 1) == 5 * 1024 + 9216
    again = trace.running_bytes("again", 2, 1)
    assert again[-1] == 5 * 1024 + 9216
    # Embedded input and five outputs, one scratch or the logits (1400 -> 1536).
    assert again[: len(FORWARD) - 1].max() == 512 + 5 * 512 + 1536
    assert trace.running_bytes("next", 2, 1)[-1] == 0
    for events in ("setup", "again", "next"):
        assert trace.left_bytes(events, 2, 1) == trace.running_bytes(events, 2, 1)[-1]


def test_set_up_leaves_parameters_and_temporaries_go() -> None:
    """Quantising makes 16-bit copies that die again."""
    a = step(full=5)
    for block in a.blocks[1:4]:
        copy = len(a.tensors)
        a.tensors.append({"size": [2000, 0, 0]})
        table = len(a.tensors)
        a.tensors.append({"size": [300, 0, 0]})
        block["events"] += [copy, table, ~copy]
    trace = a.trace()
    assert seen(trace, trace.setup) == [9000, *5 * [1000, 2000, 300, -2000]]
    sizes = trace.sizes(1, 1)
    assert {trace.categories[n] for n, s in enumerate(sizes) if s == 2000} == {"temporary"}
    assert {trace.categories[n] for n, s in enumerate(sizes) if s == 300} == {"parameter"}


def test_a_block_outside_the_layers_means_every_copy() -> None:
    """Something that each layer keeps and one block frees: a cache of cast weights, say."""
    a = step(full=5)
    for n, block in enumerate(b for b in a.blocks if b["phase"] == "forward"):
        a.tensors.append({"size": [4, 0, 0]})
        a.number[f"cast{n}"] = len(a.tensors) - 1
        block["events"].insert(0, len(a.tensors) - 1)
    head = next(b for b in a.blocks if b["phase"] == "head")
    head["events"] += [~a.number[f"cast{n}"] for n in range(3)]
    trace = a.trace()
    forward = seen(trace, trace.first)[: len(FORWARD) + 10]
    assert forward.count(4) == 5
    assert forward[-6:] == [1400, *5 * [-4]]
    freed = [~e for e in trace.first if e < 0 and trace.sizes(1, 1)[~e] == 4]
    assert len(set(freed)) == 5


def test_a_period_of_two_alternates() -> None:
    """Traced: A B A B A B, and C for the remainder of an odd number of layers."""
    a = Answer(full=11, traced=7, period=2)
    for n in range(7):
        a.block("forward", n).alloc(f"t{n}", [100 + n, 0, 0]).kernel(f"k{n}", [1, 0, 0])
    a.block("head")
    for n in reversed(range(7)):
        a.block("backward", n).free(f"t{n}")
    trace = a.trace()
    order = [100, 101, 102, 103, 102, 103, 102, 103, 104, 105, 106]
    assert seen(trace, trace.first) == order + [-size for size in reversed(order)]
    assert {k.name: k.count for k in trace.kernels} == {
        "k0": 1,
        "k1": 1,
        "k2": 3,
        "k3": 3,
        "k4": 1,
        "k5": 1,
        "k6": 1,
    }


def test_the_number_of_weights_is_that_of_the_whole_model() -> None:
    for full in (3, 5, 40):
        trace = step(full=full).trace()
        assert trace.num_weights == len(trace.parameters()) == full + 1


def test_kernels_in_the_order_of_the_blocks() -> None:
    """Five layers of three traced ones: each has a fifth of what a layer launches."""
    trace = step(full=5).trace()
    shares, order = trace.stretches
    in_order = shares[order]
    names = [(k.name, tuple(k.flops)) for k in trace.kernels]
    forward, head, backward = (names.index(("mm", (n, 1, 0))) for n in (10, 70, 20))
    assert in_order.sum(axis=0).tolist() == pytest.approx([1] * len(names))
    assert in_order[:, forward].tolist() == pytest.approx([0.2] * 5 + [0] * 6)
    assert in_order[:, names.index(("add", (0, 0, 0)))].tolist() == in_order[:, forward].tolist()
    assert in_order[:, head].tolist() == [0] * 5 + [1] + [0] * 5
    assert in_order[:, backward].tolist() == pytest.approx([0] * 6 + [0.2] * 5)


def test_equal_kernels_are_counted_together() -> None:
    trace = step(full=5).trace()
    counts = {(k.name, tuple(k.flops)): k.count for k in trace.kernels}
    assert counts == {
        ("mm", (10, 1, 0)): 5,
        ("add", (0, 0, 0)): 10,
        ("mm", (70, 1, 0)): 1,
        ("mm", (20, 1, 0)): 5,
    }
    assert not any(kernel.repeated or kernel.of_each for kernel in trace.kernels)
    launches = trace.launches(3, 1)
    assert sorted(each.flops for each in launches) == [0, 30, 60, 210]
    assert [each.bytes_moved for each in launches] == [14.0] * 4


@pytest.mark.parametrize(("repeated", "count"), [(False, 1), (True, 2)])
def test_a_kernel_of_a_chunk_is_launched_for_the_mean_chunk(repeated: bool, count: int) -> None:
    """Micro-batches of 2 x 500 tokens in chunks of 400: 400, 400, 200, in the mean 333.3."""
    a = step(full=5)
    head = next(block for block in a.blocks if block["phase"] == "head")
    per_row = [[6, 0, 0], [1, 0, 1]]
    shape = [[1, 0, 0, 1], [7, 1, 0, 0]]
    head["kernels"].append(
        ["loss", "bfloat16", [9, 0, 0], [[70, 1, 0]], False, 1, shape, per_row, repeated]
    )
    chunks = ["trl", [500, 1, 0], 0, 400]
    launches = a.trace(chunks=chunks).launches(2, 8)
    (loss,) = (each for each in launches if each.kernel.name == "loss")
    assert loss.flops == pytest.approx(9 * 1000 / 3)
    # 6 bytes and the rank's 8 for each token of the chunk.
    assert loss.bytes_moved == pytest.approx(2 * 70 + 14 * 1000 / 3)
    assert loss.shape == pytest.approx((1000 / 3, 7 * 2))
    assert loss.count == count
    assert {each.count for each in launches if each.kernel.name == "mm"} == {1, 5}


def test_a_tensor_of_a_chunk_grows_with_its_tokens() -> None:
    a = step(full=5)
    a.tensors[a.number["logits"]] |= {"size": [3, 0, 0], "chunked": True}
    trace = a.trace(chunks=["trl", [500, 1, 0], -1, 400])
    logits = trace.categories.index("logits")
    assert trace.sizes(2, 1)[logits] == 3 * 400
    assert a.trace(chunks=["trl", [50, 1, 0], -1, 400]).sizes(2, 1)[logits] == 3 * 99


def test_set_up_kernels_are_no_part_of_a_step() -> None:
    a = step(full=5)
    a.blocks[1]["kernels"].append(["quantize", "bfloat16", [5, 0, 0], [], False, 1, []])
    assert "quantize" not in {kernel.name for kernel in a.trace().kernels}


def test_parameters_are_counted_over_all_layers() -> None:
    a = step(full=5)
    counts = {"total": [[1000, 0, 0], [7, 0, 1]], "trainable": [[7, 0, 1]]}
    a.parameters = [
        {"stack": 0, "layer": -1, "total": [[9000, 0, 0]], "trainable": []},
        *({"stack": 0, "layer": layer, **counts} for layer in range(3)),
    ]
    assert a.trace().num_parameters(8) == (9000 + 5 * (1000 + 7 * 8), 5 * 7 * 8)


def test_an_optimizer_sees_what_gets_a_gradient_in_the_models_order() -> None:
    a = Answer(full=4)
    a.block("weights").alloc("frozen", [64, 0, 0], category="parameter", trainable=False)
    a.alloc("of images", [64, 0, 0], category="parameter", trainable=True)
    for n in range(3):
        a.block("adapter", n).alloc(
            f"a{n}",
            [4 * (n + 1), 0, 1],
            category="parameter",
            trainable=True,
            dtype="float32",
            shape=[[0, 0, 0], [n + 1, 0, 1]],
            group=0,
            embedding=False,
            linear=True,
        )
    for n in (2, 1, 0):
        size = [4 * (n + 1), 0, 1]
        a.block("backward", n).alloc(f"g{n}", size, category="gradient", of=a.number[f"a{n}"])
    shapes = [(0, 8), (0, 16), (0, 16), (0, 24)]
    assert a.trace().trainable(8) == [
        TensorSpec(shape=shape, dtype="float32", group=0, linear=True) for shape in shapes
    ]


def test_terms_and_sums() -> None:
    assert evaluate((3, 2, 1), 5, 7) == 3 * 25 * 7
    terms = Terms([(3, 0, 0), (2, 1, 0), (1, 1, 1), (5, 0, 2)])
    assert terms.at(4, 10).tolist() == [3, 8, 40, 500]
    assert Terms([]).at(4, 10).tolist() == []
    sums = Sums([[(3, 0, 0), (2, 1, 0)], [], [(1, 1, 1)]])
    assert sums.at(4, 10).tolist() == [11.0, 0.0, 40.0]
    # Bytes of a large model: beyond 32 bits.
    assert Terms([(2**40, 1, 0)]).at(64, 1).tolist() == [2**46]


@pytest.mark.parametrize("micro_batch", [1, 10**6])
@pytest.mark.parametrize("rank", [1, 10**6])
@pytest.mark.parametrize("coefficient", [0, 7, 2**50, 2**63 - 1])
def test_terms_beyond_64_bits_are_exact(coefficient: int, micro_batch: int, rank: int) -> None:
    terms = [(coefficient, power, other) for power in range(3) for other in range(3)]
    expected = [evaluate(term, micro_batch, rank) for term in terms]
    assert Terms(terms).at(micro_batch, rank).tolist() == expected
    assert Sums([terms]).at(micro_batch, rank).tolist() == [pytest.approx(sum(expected))]


@pytest.mark.parametrize("hidden_bytes", [2**40, 2**59, 2**62])
def test_sums_beyond_64_bits_are_exact(hidden_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five outputs and the embedded input are alive at once, and the scratch of the last layer."""
    monkeypatch.setattr(sys.modules[__name__], "HIDDEN", [hidden_bytes, 1, 0])
    trace = step(full=5).trace()
    assert max(trace.sizes(8, 1)) == 8 * hidden_bytes
    again = trace.running_bytes("again", 8, 1)
    assert max(again[: len(FORWARD) - 1]) == 6 * 8 * hidden_bytes + 512 * 11


@pytest.mark.parametrize(
    ("tokens", "rows", "expected"),
    [
        (3072, 32_000, 0),  # a kernel without partial sums
        (3073, 32_000, 2048 * (307 + 3073)),
        (100_000, 32_000, 2048 * (10_000 + 32_000)),
    ],
)
def test_an_embedding_needs_partial_sums(tokens: int, rows: int, expected: int) -> None:
    a = Answer(full=3)
    rule = ["embedding", [tokens, 1, 0], [rows, 0, 0], [2048, 0, 0]]
    a.block("embed_backward").alloc("sums", [1, 0, 0], rule=rule).free("sums")
    assert a.trace().sizes(1, 1) == [expected]


def test_a_missing_layer_is_broken() -> None:
    a = step(full=5)
    del a.blocks[next(i for i, b in enumerate(a.blocks) if b["layer"] == 1)]
    with pytest.raises(BrokenTrace, match=r"weights: layers \[0, 2\]"):
        a.trace()


def test_a_layer_that_runs_twice_is_said_to() -> None:
    a = step(full=5)
    first = next(i for i, b in enumerate(a.blocks) if b["layer"] == 1)
    a.blocks.insert(first, {**a.blocks[first], "events": []})
    with pytest.raises(BrokenTrace, match="more than once in a pass"):
        a.trace()


def test_freeing_twice_is_broken() -> None:
    a = step(full=5)
    a.blocks[-1]["events"].append(a.blocks[-1]["events"][0])
    with pytest.raises(BrokenTrace, match="twice"):
        a.trace()


def test_freeing_first_is_broken() -> None:
    a = step(full=5)
    a.block("end").alloc("late", HIDDEN)
    embed = next(block for block in a.blocks if block["phase"] == "embed")
    embed["events"].append(~a.number["late"])
    with pytest.raises(BrokenTrace, match="freed before it is allocated"):
        a.trace()


def test_an_activation_that_stays_is_broken() -> None:
    a = step(full=5)
    a.blocks[-1]["events"].pop()
    with pytest.raises(BrokenTrace, match="activation tensors outlive the step"):
        a.trace()


def test_layers_that_differ_are_broken() -> None:
    """Layer 1 frees what the last layer made; for its copies a layer like itself made it."""
    a = step(full=5)
    a.tensors[a.number["d2"]]["size"] = [17, 1, 0]
    with pytest.raises(BrokenTrace, match="makes nothing like"):
        a.trace()


def test_a_neighbour_without_that_many_tensors_is_broken() -> None:
    a = Answer(full=5)
    for n in range(3):
        a.block("forward", n).alloc(f"t{n}", HIDDEN)
        if n == 2:
            a.alloc("only the last", HIDDEN)
    a.block("head")
    a.block("backward", 2).free("t2")
    a.block("backward", 1).free("t1", "only the last")
    a.block("backward", 0).free("t0")
    with pytest.raises(BrokenTrace):
        a.trace()


def test_two_stacks_of_layers_repeat_each_for_itself() -> None:
    """A decoder's layers behind an encoder's: both are copied, and a block says which it is of."""
    a = Answer(full=5)
    places = [(stack, layer) for stack in (0, 1) for layer in range(3)]
    for stack, layer in places:
        a.block("weights", layer, stack=stack).weight(f"w{stack}{layer}", WEIGHT)
    for stack, layer in places:
        a.block("forward", layer, stack=stack).alloc(f"a{stack}{layer}", HIDDEN)
    a.block("end").free(*(f"a{stack}{layer}" for stack, layer in places))
    trace = a.trace()
    whole = [(stack, layer) for stack in (0, 1) for layer in range(5)]
    assert [parameter.place for parameter in trace.parameters()] == whole
    blocks = [(phase, place) for phase, place, _ in trace.blocks()]
    assert blocks == [*(("forward", place) for place in whole), ("end", (0, -1))]


def test_a_later_trace_that_is_broken_says_so_each_time() -> None:
    """A search asks again of a trace whose first error it has caught."""

    def read() -> dict[str, Any]:
        raise BrokenTrace("activation tensors outlive the step")

    later = LaterTrace(read, "its identity")
    for _ in range(2):
        with pytest.raises(BrokenTrace, match="outlive the step"):
            _ = later.workspaces
