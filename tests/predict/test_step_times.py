"""Times of a step, put together by hand of what its parts were priced at."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.catalogue.gpus import find_gpu
from autotune.memory.optimizers import StepCost, TensorSpec
from autotune.predict.estimator import narrowest_layer
from autotune.predict.kept_prices import KeptPrices
from autotune.predict.sharding.exchange import Exchange
from autotune.predict.sharding.pipeline import PipelineTrace
from autotune.predict.step_times import StepSeconds, StepTimes
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.speed import links, roofline
from autotune.speed.host import NO_WORK, USUAL, Host, Work
from autotune.speed.links import Message
from autotune.speed.roofline import StepTime

CARD = find_gpu("NVIDIA GeForce RTX 4090")
CONFIG = TrainConfig(
    method="full",
    micro_batch_size=2,
    gradient_accumulation_steps=4,
    sequence_length=8,
    precision="bf16-true",
    optimizer="adamw_torch",
)
IN_BACKWARD = dataclasses.replace(CONFIG, optimizer="lomo", gradient_accumulation_steps=1)
MICRO = StepTime(gpu_seconds=3.5, launch_seconds=1.0, total_seconds=4.0, bound="compute")
ADDED = StepTime(gpu_seconds=0.5, launch_seconds=0.1, total_seconds=0.5, bound="memory")
UPDATE = StepTime(gpu_seconds=1.5, launch_seconds=0.2, total_seconds=2.0, bound="memory")
HOST = dataclasses.replace(
    USUAL.times(0),
    before_micro_step=Work(seconds=0.25, module_seconds=0.0),
    after_micro_step=Work(seconds=0.125, module_seconds=0.0),
)


def times(
    config: TrainConfig = CONFIG,
    *,
    host: Host = HOST,
    cost: StepCost | None = None,
    trace: Any = None,
) -> Any:
    """Times of steps whose micro-step, addition and update are priced at what stands above."""
    of_no_tensor = SimpleNamespace(num=4, identity="", read=tuple)
    update = SimpleNamespace(cost=cost or StepCost(bytes_moved=0, num_kernels=0))
    updates: Any = SimpleNamespace(trainable=lambda *_: of_no_tensor, of=lambda *_: update)
    whole = trace or SimpleNamespace(identity="", num_weights=9)
    made: Any = StepTimes(
        {TraceSpec.of(config): whole}, CARD, host, KeptPrices(None, "", lambda: ()), updates
    )
    made._forward_backward = lambda *_, **__: MICRO
    made._accumulation = lambda *_: ADDED
    made._update = lambda *_: UPDATE
    return made


def test_a_step_is_its_micro_steps_what_comes_between_them_and_the_update() -> None:
    """Four of 4 + 0.25 s, three times 0.5 + 0.125 s, and an update of 2 s."""
    steps = 4 * 4.25 + 3 * 0.625
    assert times().seconds(CONFIG, 0, 4) == StepSeconds(
        micro_step_seconds=steps / 4,
        optimizer_step_seconds=2.0,
        total_seconds=steps + 2.0,
        bound="compute",
    )
    assert times().seconds(CONFIG, 0, 1).total_seconds == 4.25 + 2.0
    # Emptying the cache in every second step adds a tenth to that.
    emptied = dataclasses.replace(CONFIG, torch_empty_cache_steps=2)
    assert times(emptied).seconds(emptied, 0, 4).total_seconds == pytest.approx(1.05 * steps + 2.0)


@pytest.mark.parametrize(
    ("update_seconds", "bound"), [(4.24, "compute"), (4.25, "memory"), (9.0, "memory")]
)
def test_what_bounds_the_longer_of_passes_and_update_bounds_the_step(
    update_seconds: float, bound: str
) -> None:
    made = times()
    made._update = lambda *_: dataclasses.replace(UPDATE, total_seconds=update_seconds)
    assert made.seconds(CONFIG, 0, 1).bound == bound


@pytest.mark.parametrize("part", ["_forward_backward", "_accumulation", "_update"])
def test_a_step_without_one_of_its_parts_has_no_time(part: str) -> None:
    made = times()
    setattr(made, part, lambda *_, **__: None)
    assert made.seconds(CONFIG, 0, 1) is None


@pytest.mark.parametrize(
    ("update", "micro_launch_seconds", "waits", "seconds"),
    [
        # 3 s to spare hide all that the host does; the GPU's 1.5 s are left.
        (UPDATE, 1.0, 0, 1.5),
        (UPDATE, 3.75, 0, 1.75),
        (UPDATE, 4.5, 0, 2.0),
        # Where the host waits for each weight, none is hidden.
        (UPDATE, 1.0, 1, 2.0),
    ],
)
def test_an_update_in_the_backward_pass_is_hidden_as_far_as_the_host_has_time(
    update: StepTime, micro_launch_seconds: float, waits: int, seconds: float
) -> None:
    cost = StepCost(bytes_moved=0, num_kernels=0, num_synchronizations=waits)
    made = times(IN_BACKWARD, cost=cost)
    made._forward_backward = lambda *_: dataclasses.replace(
        MICRO, launch_seconds=micro_launch_seconds
    )
    assert made.seconds(IN_BACKWARD, 0, 1).optimizer_step_seconds == seconds
    made = times(cost=cost)
    made._forward_backward = lambda *_: MICRO
    assert made.seconds(CONFIG, 0, 1).optimizer_step_seconds == 2.0


def test_a_part_of_a_sample_takes_its_share_but_no_less_than_the_host() -> None:
    """A single sample's step is traced at one size alone, unless several are, too."""
    spec = dataclasses.replace(TraceSpec.of(CONFIG), single=True)
    made = times()
    made._traces = {spec: None}
    sizes = (1, 0, "bf16-true")
    for full_share, seconds in ((0.75, 3.0), (0.25, 1.0), (0.1, 1.0)):
        found = made._price_forward_backward(spec, *sizes, full_share)
        assert found == dataclasses.replace(MICRO, total_seconds=seconds)
    made._forward_backward = lambda *_, **__: None
    assert made._price_forward_backward(spec, *sizes, 0.5) is None


def test_adding_gradients_reads_two_and_writes_one() -> None:
    """Two of 2^29 numbers in 16 bits at 1,008 GB/s: that much is no launch's and no cache's."""
    made = times(host=USUAL.times(0))
    specs = [TensorSpec(shape=(2**29,), dtype="bfloat16")] * 2
    made._traces = {"spec": None}
    trainable = SimpleNamespace(identity="", read=lambda: specs)
    made._updates = SimpleNamespace(trainable=lambda *_: trainable)
    found = made._price_accumulation("spec", 0)
    of_one = roofline.Kernel(
        name="add_", kind="elementwise", dtype="bfloat16", flops=0, bytes_moved=3 * 2**30
    )
    alone = roofline.seconds([of_one], roofline.ceilings(CARD))
    assert alone is not None
    assert found.gpu_seconds == pytest.approx(2 * alone.gpu_seconds)
    assert 3 * 2**30 / 1008e9 < alone.gpu_seconds < 1.25 * 3 * 2**30 / 1008e9


SHARED = Exchange(
    num_gpus=2,
    messages_per_micro_step=(Message(operation="all_gather", num_bytes=2**30, count=3),),
    messages_per_step=(Message(operation="all_reduce", num_bytes=2**31, count=1),),
    host_copy_bytes_per_micro_step=10**9,
    host_copy_bytes_per_step=3 * 10**9,
    host_update_elements=10**8,
)
ALONE = StepSeconds(
    micro_step_seconds=1.0, optimizer_step_seconds=2.0, total_seconds=6.0, bound="compute"
)


HOST_LINK = roofline.ceilings(CARD).moving.bytes_per_second["copy_host"]


def rest(exchange: Exchange, accumulation: int) -> float:
    """Seconds of copies to the host and of its updates."""
    copied = accumulation * exchange.host_copy_bytes_per_micro_step
    copied += exchange.host_copy_bytes_per_step
    updates = exchange.host_update_elements * roofline.HOST_UPDATE_SECONDS_PER_ELEMENT
    return copied / HOST_LINK + updates


def test_gpus_add_what_they_send_and_copy_to_micro_steps_and_to_the_update() -> None:
    link = links.link_of(CARD)
    assert link is not None
    sent_each = links.seconds(SHARED.messages_per_micro_step, link, 2)
    sent_once = links.seconds(SHARED.messages_per_step, link, 2)
    each = sent_each + 1e9 / HOST_LINK
    once = sent_once + rest(SHARED, 0)
    waiting = links.waiting_share(2)
    found = times()._shared(ALONE, SHARED, 4)
    assert found == StepSeconds(
        micro_step_seconds=pytest.approx((1 + waiting) * 1.0 + each),
        optimizer_step_seconds=pytest.approx((1 + waiting) * 2.0 + once),
        total_seconds=pytest.approx((1 + waiting) * 6.0 + 4 * each + once),
        bound=found.bound,
        link_bytes_per_second=pytest.approx(links.share_of(link, 2) * link.bytes_per_second),
        communication_seconds=pytest.approx(4 * sent_each + sent_once),
        waiting_seconds=pytest.approx(waiting * 6.0),
    )


def test_gradients_that_are_hidden_take_no_time_of_the_step() -> None:
    plain = times()._shared(ALONE, SHARED, 4)
    found = times()._shared(ALONE, SHARED, 4, backward_seconds=0.01)
    hidden = links.hidden_seconds(1.0, 0.01)
    assert 0 < hidden < 0.01
    assert found.hidden_seconds == hidden
    assert found.total_seconds == pytest.approx(plain.total_seconds - hidden)
    assert found.communication_seconds == pytest.approx(plain.communication_seconds - hidden)
    assert found.optimizer_step_seconds == pytest.approx(plain.optimizer_step_seconds - hidden)


def test_gpus_that_have_layers_in_turn_wait_for_no_slowest() -> None:
    dealt = dataclasses.replace(SHARED, layers=(3, 1))
    found = times()._shared(ALONE, dealt, 4)
    assert found.waiting_seconds == 0
    assert found.total_seconds == pytest.approx(6.0 + found.communication_seconds + rest(SHARED, 4))


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({}, "compute"),
        ({"host_copy_bytes_per_micro_step": 10**11}, "transfer"),
        ({"host_copy_bytes_per_step": 10**12}, "transfer"),
        ({"host_update_elements": 10**12}, "transfer"),
        (
            {"messages_per_step": (Message(operation="all_reduce", num_bytes=2**40, count=1),)},
            "communication",
        ),
        (
            {
                "messages_per_micro_step": (
                    Message(operation="all_gather", num_bytes=2**38, count=1),
                )
            },
            "communication",
        ),
    ],
)
def test_what_takes_longest_of_sending_copying_and_computing_bounds_a_shared_step(
    changes: dict[str, Any], bound: str
) -> None:
    little = Exchange(num_gpus=2, messages_per_micro_step=(), messages_per_step=())
    exchange = dataclasses.replace(little, **changes)
    assert times()._shared(ALONE, exchange, 4).bound == bound


def test_gpus_whose_link_is_unknown_have_no_time() -> None:
    made = times()
    made._link = None
    assert made._shared(ALONE, SHARED, 4) is None


class StandInPipeline(PipelineTrace):
    """A pipeline of GPUs with so many layers each, and nothing outside of them."""

    def __init__(self, *counts: int) -> None:
        self.counts = counts

    def launches_outside_layers(self, *_: Any) -> Any:
        return [], []


@pytest.mark.parametrize(
    ("counts", "accumulation", "rounds"),
    [
        ((3, 1), 1, 1.0),
        # Each further micro-step takes as long as the GPU with three of the four layers.
        ((3, 1), 5, 1 + 4 * 3 / 4),
        ((1, 1, 2), 3, 1 + 2 * 2 / 4),
        ((4,), 5, 5.0),
    ],
)
def test_a_pipeline_goes_on_as_its_slowest_gpu_does(
    counts: tuple[int, ...], accumulation: int, rounds: float
) -> None:
    made = times(trace=StandInPipeline(*counts))
    assert made._rounds(CONFIG, 8.0, accumulation) == pytest.approx(rounds)
    assert times()._rounds(CONFIG, 8.0, accumulation) == accumulation


def test_the_narrowest_layer_is_the_least_side_that_the_rank_leaves_alone() -> None:
    def trace(*shapes: Any) -> Any:
        return SimpleNamespace(
            trainable=lambda rank: [
                TensorSpec(shape=tuple(side or rank for side in shape), dtype="float32")
                for shape in shapes
            ]
        )

    assert narrowest_layer(trace((None, 7), (5, None), (3,), (2, 2))) == 5
    assert narrowest_layer(trace((None, 4), (5, None))) == 4
    assert narrowest_layer(trace((3,), (2, 2))) == 0


def update_times(cost: StepCost, host: Host, optimizer: str = "adamw_torch") -> Any:
    """The update alone, of four weights in a model of nine (13 modules), by what a host spends."""
    config = dataclasses.replace(CONFIG, optimizer=optimizer)
    made = times(config, host=host, cost=cost)
    return made._price_update(TraceSpec.of(config), 0, config.updater, 0)


NO_HOST = dataclasses.replace(USUAL.times(0), before_micro_step=NO_WORK)


def test_an_update_takes_what_the_host_does_before_and_beside_it() -> None:
    """Modules: 13; trained weights: 4. The GPU has next to nothing to do."""
    host = dataclasses.replace(
        NO_HOST,
        after_micro_step=Work(seconds=1.0, module_seconds=0.1),
        before_update=Work(seconds=2.0, module_seconds=0.2, tensor_seconds=0.5),
        update=Work(seconds=4.0, module_seconds=0.0, tensor_seconds=0.25),
        python_seconds=3.0,
        call_seconds=10.0,
    )
    cost = StepCost(bytes_moved=0, num_kernels=0, host_operations=2)
    after, before, beside = 1.0 + 1.3, 2.0 + 2.6 + 2.0, 4.0 + 1.0 + 2 * 3.0
    found = update_times(cost, host)
    assert found.total_seconds == pytest.approx(after + before + beside)
    assert found.launch_seconds == pytest.approx(after + before + beside)
    assert (found.gpu_seconds, found.bound) == (0.0, "launch")
    # In the backward pass there is nothing before it, and a call for each weight.
    found = update_times(cost, host, "lomo")
    assert found.total_seconds == pytest.approx(after + beside + 4 * 10.0)


@pytest.mark.parametrize(("num_waits", "share"), [(0, 0.0), (1, 0.25), (4, 1.0), (8, 1.0)])
def test_host_and_gpu_take_turns_for_as_many_weights_as_are_waited_for(
    num_waits: int, share: float
) -> None:
    cost = StepCost(bytes_moved=10**12, num_kernels=1, num_synchronizations=num_waits)
    host = dataclasses.replace(NO_HOST, update=Work(seconds=0.25, module_seconds=0.0))
    found = update_times(cost, host)
    assert found.gpu_seconds > 0.9
    assert found.total_seconds == pytest.approx(found.gpu_seconds + share * 0.25)
    assert found.bound != "launch"
