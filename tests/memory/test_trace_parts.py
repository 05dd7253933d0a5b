"""Parts of a trace that others ask for one by one, of a model of two layers that were both traced."""

from __future__ import annotations

import pytest
from written_trace import EMBEDDING, Answer

from autotune.memory import alloc_conf
from autotune.memory.allocator import Tape
from autotune.memory.optimizers import TensorSpec
from autotune.memory.traces import BrokenTrace, Trace
from autotune.memory.traces.launches import Launch
from autotune.memory.traces.layers import TOWER
from autotune.memory.traces.phases import Phase, Place
from autotune.memory.traces.running import left_by
from autotune.memory.traces.terms import evaluate
from autotune.memory.traces.trace import Returned, TracedParameter, on_card_with

WEIGHT, HIDDEN = [1000, 0, 0], [16, 1, 0]


def written() -> Answer:
    """Tensors 0 to 2 are weights, 3 and 4 an adapter's, 5 the batch, 6 and 7 hidden states, 8 logits.

    9 and 11 are the gradients of a first micro-step, 10 and 12 those that a later one adds to them.
    """
    a = Answer(full=2, traced=2)
    a.block("weights").weight("embedding", EMBEDDING)
    a.block("weights", 0).weight("w0", WEIGHT).block("weights", 1).weight("w1", WEIGHT)
    for n in range(2):
        a.block("adapter", n).weight(f"wa{n}", [100, 0, 1])
    a.block("batch").alloc("tokens", [8, 1, 0])
    a.block("forward", 0).alloc("h0", HIDDEN, operation="mm").kernel("mm", [10, 1, 0])
    a.block("forward", 1).alloc("h1", HIDDEN, operation="add").kernel("mm", [30, 1, 0])
    a.block("head").alloc("logits", [701, 1, 0], category="logits").kernel("mm", [70, 1, 0])
    a.block("head_backward").free("logits")
    for n in (1, 0):
        a.block("backward", n).gradient(f"ga{n}", [100, 0, 1]).free(f"h{n}")
    return a


@pytest.fixture(scope="module")
def trace() -> Trace:
    a = written()
    for n in range(2):
        a.tensors[a.number[f"ga{n}"]]["of"] = a.number[f"wa{n}"]
    a.tensors[a.number["wa1"]] |= {"of_root": True, "is_tied": True, "position": 3}
    returned = {"after": 8, "until": ~8, "tensors": [[8, [700, 1, 0]], [7, [16, 1, 0]]]}
    return a.trace(returned=returned)


def test_a_trace_has_all_events_in_the_order_of_its_blocks(trace: Trace) -> None:
    assert trace.template == [*range(9), 9, 9, 10, 10]
    assert trace.setup == [0, 1, 2, 3, 4]
    assert (trace.batch, trace.count) == ([5], [])
    step = [6, 7, 8, ~8, 9, ~7, 11, ~6]
    # A later micro-step adds its own gradients to those that are there.
    added = [6, 7, 8, ~8, 10, ~10, ~7, 12, ~12, ~6]
    assert (trace.first, trace.again, trace.next) == (step, step, added)
    released = [6, 7, 8, ~8, 9, ~9, ~7, 11, ~11, ~6]
    assert trace.released_first == trace.released == released
    assert (trace.gradients, trace.workspaces) == ([9, 11], [])
    assert (trace.num_forward_events, trace.num_forward_workspaces) == (3, 0)
    for name in ("setup", "first", "again", "next"):
        order = trace.order_of(name)
        assert (order.dtype.name, order.tolist()) == ("int64", getattr(trace, name))


def test_each_block_has_its_events(trace: Trace) -> None:
    assert trace.setup_blocks() == [
        (Phase.WEIGHTS, (0, -1), [0]),
        (Phase.WEIGHTS, (0, 0), [1]),
        (Phase.WEIGHTS, (0, 1), [2]),
        (Phase.ADAPTER, (0, 0), [3]),
        (Phase.ADAPTER, (0, 1), [4]),
    ]
    forward = [
        (Phase.FORWARD, (0, 0), [6]),
        (Phase.FORWARD, (0, 1), [7]),
        (Phase.HEAD, (0, -1), [8]),
        (Phase.HEAD_BACKWARD, (0, -1), [~8]),
    ]

    def backward(of_second: list[int], of_first: list[int]) -> list[tuple[Phase, Place, list[int]]]:
        return [(Phase.BACKWARD, (0, 1), of_second), (Phase.BACKWARD, (0, 0), of_first)]

    assert trace.blocks() == forward + backward([9, ~7], [11, ~6])
    assert trace.next_blocks() == forward + backward([10, ~10, ~7], [12, ~12, ~6])
    assert trace.released_blocks() == forward + backward([9, ~9, ~7], [11, ~11, ~6])


def test_what_a_tensor_is_of(trace: Trace) -> None:
    assert trace.operations == [*[""] * 6, "mm", "add", *[""] * 5]
    assert trace.layers == {1: 0, 2: 1, 3: 0, 4: 1, 6: 0, 7: 1, 9: 1, 11: 0}
    kinds = {"parameter": 5, "activation": 3, "logits": 1, "gradient": 4}
    assert trace.categories == [name for name, count in kinds.items() for _ in range(count)]
    assert [trace.is_of_root(number) for number in trace.gradients] == [True, False]


def test_layers_of_a_tower_are_none_of_the_text() -> None:
    a = Answer(full=1, traced=1)
    a.block("weights", 0).weight("w0", WEIGHT).block("weights", 0, stack=TOWER).weight("w1", WEIGHT)
    a.block("forward", 0).alloc("h", HIDDEN).free("h")
    alike = {"own": [0], "sources": [0]}
    assert a.trace(tower=alike).layers == {0: 0, 2: 0}


def test_a_parameter_has_what_the_worker_said_of_it(trace: Trace) -> None:
    def parameter(number: int, layer: int, shape: tuple[int, int, int]) -> TracedParameter:
        return TracedParameter(
            number=number,
            place=(0, layer),
            shape=(shape,),
            dtype="bfloat16",
            trainable=True,
            group=0,
            embedding=number == 0,
            is_tied=number == 4,
            of_root=number == 4,
            position=3 if number == 4 else 0,
        )

    assert trace.parameters() == [
        parameter(0, -1, (9000, 0, 0)),
        parameter(1, 0, (1000, 0, 0)),
        parameter(2, 1, (1000, 0, 0)),
        parameter(3, 0, (100, 0, 1)),
        parameter(4, 1, (100, 0, 1)),
    ]
    of_adapter = TensorSpec(shape=(800,), dtype="bfloat16", linear=True)
    assert trace.parameter_of(9, 8) == of_adapter
    assert trace.trainable(8) == [of_adapter] * 2
    assert trace.trainable(8, among=[0, 1, 4]) == [of_adapter]
    assert trace.trainable(8, among=[]) == []


def test_what_the_forward_pass_returned_is_held_for_a_while(trace: Trace) -> None:
    assert trace.returned == Returned(
        after=8, until=~8, tensors=((8, (700, 1, 0)), (7, (16, 1, 0)))
    )
    assert written().trace().returned is None


def test_a_gpu_that_has_all_to_itself_shares_nothing(trace: Trace) -> None:
    assert trace.of_one is trace
    assert (trace.step_buffers, trace.num_own_events, trace.num_prepared_events) == ([], 5, 3)
    without = Answer(full=1, traced=1).block("weights", 0).weight("w0", WEIGHT).trace()
    assert (without.num_own_events, without.num_prepared_events) == (1, 1)


def test_a_trace_of_every_layer_tells_of_no_lean_ones(trace: Trace) -> None:
    assert trace.lean_layers == ()
    with pytest.raises(BrokenTrace, match="every layer was traced"):
        trace.with_lean_layers(1)


def test_sizes_of_a_part_of_a_micro_batch_are_rounded(trace: Trace) -> None:
    """A weight stays as it is; the hidden states have 16 bytes for all, the logits 701."""
    assert trace.sizes(2, 3) == [9000, 1000, 1000, 300, 300, 16, 32, 32, 1402, *[300] * 4]
    quarter = trace.sizes_of_part(0.25, 3).tolist()
    assert quarter == [9000, 1000, 1000, 300, 300, 2, 4, 4, 175, *[300] * 4]
    # 300 are 512 rounded up, and 1,402 are 1,536.
    assert trace.bytes_of([3, 8], 2, 3) == 512 + 1536


def test_the_kernels_of_a_phase_are_those_of_its_blocks(trace: Trace) -> None:
    def flops(launches: list[Launch]) -> list[float]:
        return sorted(each.flops for each in launches)

    assert flops(trace.launches(2, 1)) == [20, 60, 140]
    assert flops(trace.launches_of((Phase.FORWARD,), 2, 1)) == [20, 60]
    assert flops(trace.launches_of((Phase.HEAD, Phase.FORWARD), 3, 1)) == [30, 90, 210]
    assert trace.scoring_launches(2, 1) == []


def test_what_is_smaller_than_a_sample_has_the_sums_of_one() -> None:
    """Partial sums of an embedding: a row for ten of a sample's 4,000 tokens, and for 50 of the table."""
    a = Answer(full=1, traced=1).block("forward", 0)
    terms = [[4000, 1, 0], [50, 0, 0], [4, 0, 0]]
    a.alloc("sums", [0, 0, 0], rule=["embedding", *terms]).free("sums")
    trace = a.trace()
    sizes = [trace.sizes_of_part(part, 1).tolist() for part in (0.1, 1.0, 2.0)]
    assert sizes == [[4 * (400 + 50)], [4 * (400 + 50)], [4 * (800 + 50)]]


def test_what_depends_on_the_card_gets_its_number_of_multiprocessors() -> None:
    rule = [[n, 0, 0] for n in range(6)]
    tensors = [
        {"size": [1, 0, 0]},
        {"rule": ["flash splits", *rule]},
        {"rule": ["reduction", *rule]},
        {"rule": ["embedding", *rule]},
    ]
    on_card_with(84, tensors)
    assert tensors[0] == {"size": [1, 0, 0]}
    with_84 = [*rule[:5], [84, 0, 0]]
    assert [tensor["rule"] for tensor in tensors[1:]] == [
        ["flash splits", *with_84],
        ["reduction", *with_84],
        ["embedding", *rule],
    ]
    assert evaluate((84, 0, 0), 7, 9) == 84


def test_events_leave_what_they_do_not_free() -> None:
    assert left_by([]) == []
    assert left_by([3, 1, ~3, 0, 2, ~2]) == [1, 0]
    assert left_by([0, ~0]) == []
    assert left_by([0]) == [0]


def test_a_tape_numbers_tensors_in_the_order_in_which_they_come() -> None:
    tape = Tape()
    assert tape.alloc(7, "gradient") == 0
    assert tape.alloc_all([5, 6], "temporary") == range(1, 3)
    assert tape.alloc_all([], "temporary") == range(3, 3)
    tape.free(1)
    assert tape.alloc(8, "parameter") == 3
    assert tape.sizes == [7, 5, 6, 8]
    assert tape.categories == ["gradient", "temporary", "temporary", "parameter"]
    assert tape.events == [0, 1, 2, ~1, 3]
    for wrong in (-1, 4):
        with pytest.raises(AssertionError):
            tape.free(wrong)
    with pytest.raises(AssertionError):
        tape.alloc_all([1], "unknown")


@pytest.mark.parametrize(
    ("new", "old", "found", "is_expandable"),
    [
        (None, None, "", False),
        ("", "expandable_segments:True", "expandable_segments:True", True),
        (
            "expandable_segments:False",
            "expandable_segments:True",
            "expandable_segments:False",
            False,
        ),
        ("a:1, expandable_segments : True", None, "a:1, expandable_segments : True", True),
        ("expandable_segments:True2", None, "expandable_segments:True2", False),
    ],
)
def test_torch_reads_the_newer_variable_first(
    monkeypatch: pytest.MonkeyPatch,
    new: str | None,
    old: str | None,
    found: str,
    is_expandable: bool,
) -> None:
    for name, text in (("PYTORCH_ALLOC_CONF", new), ("PYTORCH_CUDA_ALLOC_CONF", old)):
        monkeypatch.delenv(name, raising=False)
        if text is not None:
            monkeypatch.setenv(name, text)
    assert alloc_conf.here() == found
    assert alloc_conf.is_expandable(found) == is_expandable
