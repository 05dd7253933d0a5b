"""Prices of a small model's configurations: bounds, sums, monotonicity, what is not known."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import pytest
import tiny_model

from autotune.catalogue import gpus
from autotune.catalogue.gpus import find_gpu
from autotune.errors import ConfigError
from autotune.memory.replayer import replay
from autotune.memory.traces import Trace
from autotune.predict import priced_updates
from autotune.predict.estimator import Estimator
from autotune.predict.floors import least_bytes
from autotune.predict.least_budget import smallest
from autotune.predict.optimizer_update import MOST_STEPS, Update, priced_update
from autotune.predict.steps import Steps, first_steps
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.space.lengths import Filling
from autotune.space.optimizers import OPTIMIZERS, Optimizer
from autotune.speed.host import NO_WORK, USUAL, Host, num_modules
from autotune.speed.origin import RatesFrom
from autotune.speed.sureness import STEP_SPREAD, spread_of

pytestmark = pytest.mark.worker

GB, MIB = 10**9, 2**20
LAYERS = tiny_model.MODEL.config["num_hidden_layers"]
ROOMY = 100 * GB

FULL = TrainConfig(
    method="full",
    micro_batch_size=2,
    gradient_accumulation_steps=4,
    sequence_length=tiny_model.SEQUENCE_LENGTH,
    precision="bf16-true",
    optimizer="adamw_torch_fused",
)
MIXED = dataclasses.replace(FULL, precision="bf16-mixed")
LORA = dataclasses.replace(
    FULL, method="lora", precision="bf16-autocast", lora_rank=16, lora_targets="all-linear"
)
QLORA = dataclasses.replace(LORA, method="qlora", quantization="nf4")
PAGED = dataclasses.replace(MIXED, optimizer="paged_adamw_32bit")


@pytest.fixture(scope="module")
def traces() -> Mapping[TraceSpec, Trace]:
    return tiny_model.traces()


@pytest.fixture(scope="module")
def roomy(traces: Mapping[TraceSpec, Trace]) -> Estimator:
    return Estimator(traces, tiny_model.gpu(), memory_budget_bytes=ROOMY)


def split(config: TrainConfig, micro_batch_size: int, accumulation: int) -> TrainConfig:
    return dataclasses.replace(
        config,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=accumulation,
    )


@pytest.mark.parametrize("spare_bytes", [-64 * MIB, 0, 24 * MIB, 48 * MIB])
@pytest.mark.parametrize("config", [FULL, MIXED, LORA], ids=lambda config: config.precision)
def test_what_needs_least_fits_the_budget_that_it_is_said_to_need(
    roomy: Estimator, config: TrainConfig, spare_bytes: int
) -> None:
    """Where segments grow, more may be reserved under a smaller budget, which is then not enough."""
    growing = dataclasses.replace(config, expandable_segments=True)
    estimator = roomy.with_budget(roomy.floor_bytes(growing) + spare_bytes)
    found = smallest(estimator, [growing])
    assert found is not None
    least, needed_bytes = found
    again = roomy.with_budget(needed_bytes).estimate(growing)
    assert again.peak_reserved_bytes == least.peak_reserved_bytes
    assert roomy.with_budget(needed_bytes).fits(again)


@pytest.mark.parametrize("budget_bytes", [1 * GB, 2 * GB, ROOMY])
def test_no_configuration_peaks_below_its_floor(roomy: Estimator, budget_bytes: int) -> None:
    estimator = roomy.with_budget(budget_bytes)
    for config in tiny_model.configs():
        floor = estimator.floor_bytes(config)
        peak = estimator.estimate(config).peak_device_bytes
        # Near enough to be of use, too: allocator's rounding of a small model and no more.
        assert floor <= peak <= 1.25 * floor + 1.2 * GB, config


def test_what_may_fit_is_what_has_a_floor_within_the_budget(roomy: Estimator) -> None:
    floors = {config: roomy.floor_bytes(config) for config in tiny_model.configs()}
    for budget_bytes in (min(floors.values()), sorted(floors.values())[len(floors) // 2]):
        estimator = roomy.with_budget(budget_bytes)
        for config, floor_bytes in floors.items():
            assert estimator.may_fit(config) == (floor_bytes <= estimator.room_for(config)), config


def test_no_update_is_priced_where_the_passes_alone_are_too_large(
    traces: Mapping[TraceSpec, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    priced: list[Optimizer] = []

    def noted(row: Optimizer, *given: Any, **more: Any) -> Update:
        priced.append(row)
        return priced_update(row, *given, **more)

    monkeypatch.setattr(priced_updates, "priced_update", noted)
    for budget_bytes, num_priced in ((GB // 100, 0), (ROOMY, 1)):
        estimator = Estimator(traces, tiny_model.gpu(), memory_budget_bytes=budget_bytes)
        assert estimator.may_fit(FULL) == bool(num_priced)
        assert len(priced) == num_priced


def test_a_step_that_no_memory_holds_is_refused(roomy: Estimator) -> None:
    for size, is_priced in ((10**5, True), (10**8, False)):
        config = split(FULL, size, 1)
        if is_priced:
            assert roomy.estimate(config).peak_device_bytes > 10**9
            continue
        with pytest.raises(ConfigError, match=r"At most 1,048,576.0 GiB are predicted"):
            roomy.estimate(config)


@pytest.mark.parametrize("optimizer", ["apollo_adamw", "apollo_adamw_layerwise"])
def test_an_optimizers_products_have_the_cards_workspace_where_each_makes_one(
    traces: Mapping[TraceSpec, Trace], monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    apollo, card = dataclasses.replace(FULL, optimizer=optimizer), tiny_model.gpu()

    def num_workspaces(is_made: bool) -> int:
        monkeypatch.setattr(gpus, "makes_workspace_per_call", lambda: is_made)
        estimator = Estimator(traces, card, memory_budget_bytes=ROOMY)
        steps, _ = estimator.replayed(apollo)
        return steps.sizes[steps.of_update.start :].count(card.cublas_workspace_bytes)

    num_linear = sum(spec.linear for spec in traces[TraceSpec.of(apollo)].trainable(0))
    assert num_workspaces(False) == 0
    assert num_workspaces(True) == MOST_STEPS * num_linear


def test_what_is_known_without_a_trace_is_no_more_than_the_floor(roomy: Estimator) -> None:
    for config in tiny_model.configs():
        num_parameters = roomy.estimate(config).parameters.total
        least = least_bytes(config, num_parameters)
        weights = roomy.estimate(config).state.parameters_bytes
        assert least <= roomy.floor_bytes(config)
        # Of use: full fine-tuning keeps its gradients, whatever the optimizer.
        if config.method == "full":
            assert least == pytest.approx(2 * weights, rel=0.01)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_peaks_below_its_floor(roomy: Estimator, name: str) -> None:
    config = dataclasses.replace(split(FULL, 8, 1), optimizer=name)
    floor, estimate = roomy.floor_bytes(config), roomy.estimate(config)
    assert floor <= estimate.peak_device_bytes <= 1.25 * floor + 1.2 * GB
    assert estimate.tokens_per_second == pytest.approx(roomy.tokens_per_second(config))
    state = roomy.estimate(dataclasses.replace(config, optimizer="sgd")).state
    assert estimate.state.gradients_bytes == state.gradients_bytes


def test_host_and_gpu_take_turns_where_every_tensor_is_waited_for(
    traces: Mapping[TraceSpec, Trace],
) -> None:
    """bitsandbytes 0.50 optim/optimizer.py: step() calls sync_gpu after each."""
    bare = dataclasses.replace(USUAL, after_micro_step=NO_WORK, before_update=NO_WORK)

    def update_seconds(optimizer: str, host: Host) -> float:
        card = tiny_model.gpu()
        estimator = Estimator(traces, card, memory_budget_bytes=ROOMY, host=host)
        found = estimator.seconds(dataclasses.replace(FULL, optimizer=optimizer))
        assert found is not None
        return found.optimizer_step_seconds

    for optimizer, is_in_turn in (("adamw_bnb_8bit", True), ("adamw_torch_fused", False)):
        on_gpu = update_seconds(optimizer, USUAL.times(0))
        on_host = update_seconds(optimizer, bare.times(1000)) / 1000
        both = on_gpu + on_host if is_in_turn else max(on_gpu, on_host)
        assert update_seconds(optimizer, bare) == pytest.approx(both, rel=0.02), optimizer
        # Before the optimizer's kernels there is nothing to do on the GPU.
        before = update_seconds(optimizer, USUAL) - update_seconds(optimizer, bare)
        num_weights = LAYERS * 9 + 3
        modules = num_modules(num_weights, 0)
        walked = USUAL.after_micro_step.of(modules) + USUAL.before_update.of(modules, num_weights)
        assert before == pytest.approx(walked, rel=0.02), optimizer


def test_what_is_updated_in_the_backward_pass_keeps_no_gradients(roomy: Estimator) -> None:
    def peak(name: str) -> int:
        config = dataclasses.replace(split(FULL, 1, 1), optimizer=name)
        return roomy.estimate(config).peak_allocated_bytes

    gradients_bytes = roomy.estimate(FULL).state.gradients_bytes
    largest_bytes = 32_000 * 1024 * 2
    saved = peak("sgd") - peak("lomo")
    # Of the gradients one is left, and its update makes two float32 copies of the largest weight.
    assert gradients_bytes - 6 * largest_bytes <= saved < gradients_bytes
    assert peak("galore_adamw_layerwise") < peak("galore_adamw")
    assert peak("apollo_adamw_layerwise") < peak("apollo_adamw")


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adamw_bnb_8bit", "adafactor"])
def test_an_update_in_the_backward_pass_saves_the_gradients_alone(
    roomy: Estimator, optimizer: str
) -> None:
    """Its state is the same to the byte, code books included; one gradient or two are left at the peak."""
    after = roomy.estimate(dataclasses.replace(split(FULL, 1, 1), optimizer=optimizer))
    config = dataclasses.replace(after.config, update_in_backward=True)
    within = roomy.estimate(config)
    assert within.state == after.state
    saved = after.peak_allocated_bytes - within.peak_allocated_bytes
    largest_bytes = 32_000 * 1024 * 2
    assert after.state.gradients_bytes - 4 * largest_bytes <= saved
    outside_bytes = within.peak_device_bytes - within.peak_reserved_bytes
    assert roomy.floor_bytes(config) - outside_bytes <= within.peak_allocated_bytes


def test_an_update_in_the_backward_pass_is_launched_while_the_gpu_is_at_work(
    traces: Mapping[TraceSpec, Trace],
) -> None:
    def update_seconds(optimizer: str, factor: float, *, in_backward: bool) -> float:
        card, host = tiny_model.gpu(), USUAL.times(factor)
        estimator = Estimator(traces, card, memory_budget_bytes=ROOMY, host=host)
        config = dataclasses.replace(
            split(FULL, 8, 1), optimizer=optimizer, update_in_backward=in_backward
        )
        found = estimator.seconds(config)
        assert found is not None
        return found.optimizer_step_seconds

    for optimizer, is_hidden in (("adamw_torch_fused", True), ("adamw_bnb_8bit", False)):
        at_once = update_seconds(optimizer, 0, in_backward=True)
        launched = update_seconds(optimizer, 1, in_backward=True)
        assert (launched == pytest.approx(at_once)) == is_hidden, optimizer
    # A host that takes longer than the GPU hides nothing of a call for each weight.
    slow = [update_seconds("sgd", 1000, in_backward=each) for each in (False, True)]
    assert slow[1] > slow[0]


def test_lomo_gives_a_gradient_up_once_its_copy_in_32_bits_is_there(
    traces: Mapping[TraceSpec, Trace],
) -> None:
    config = dataclasses.replace(split(FULL, 1, 1), optimizer="lomo")
    trace = traces[TraceSpec.of(config)]
    update = priced_update(OPTIMIZERS["lomo"], trace.trainable(0), scaled=False)
    steps = first_steps(trace, config, update)
    events = next(
        part.events.tolist() for part in steps.parts if part.phase == "backward and optimizer"
    )
    for gradient in trace.gradients:
        copy = events[events.index(~gradient) - 1]
        assert copy >= 0
        assert steps.sizes[copy] == 2 * steps.sizes[gradient]


@pytest.mark.parametrize("grows", [False, True])
def test_what_fits_is_known_from_as_little_of_a_replay_as_will_do(
    traces: Mapping[TraceSpec, Trace],
    roomy: Estimator,
    monkeypatch: pytest.MonkeyPatch,
    grows: bool,
) -> None:
    replayed = list[TrainConfig]()

    def counted(trace: Trace, config: TrainConfig, update: Update) -> Steps:
        replayed.append(config)
        return first_steps(trace, config, update)

    monkeypatch.setattr("autotune.predict.estimator.first_steps", counted)
    first = dataclasses.replace(split(FULL, 1, 2), optimizer="adamw_torch")
    first = dataclasses.replace(first, expandable_segments=grows)
    others = [dataclasses.replace(first, optimizer=name) for name in OPTIMIZERS]
    others = [dataclasses.replace(c, gradient_accumulation_steps=1) for c in others] + others
    peak = roomy.estimate(first).peak_device_bytes
    num_known = list[int]()
    for share in (0.3, 0.6, 0.8, 0.95, 1.1):
        estimator = Estimator(traces, tiny_model.gpu(), memory_budget_bytes=int(share * peak))
        estimator.fitting(first)
        replayed.clear()
        found = {config: estimator.fitting(config) for config in others}
        known = {config for config in others if config not in replayed} - {first}
        # Adagrad makes its state first, LOMO updates in the backward pass: they begin in their own way.
        assert not {"adagrad", "lomo"} & {config.optimizer for config in known}
        for config, estimate in found.items():
            in_full = estimator.estimate(config)
            assert estimate == (in_full if estimator.fits(in_full) else None)
        num_known.append(len(known))
    # Of use where little fits; where the update alone is too large, nothing is known of other optimizers.
    assert num_known[0] > 10 > num_known[-2]
    assert num_known[-1] == 0


@pytest.mark.parametrize("grows", [False, True])
def test_what_reserves_no_more_is_estimated(
    traces: Mapping[TraceSpec, Trace], roomy: Estimator, grows: bool
) -> None:
    config = dataclasses.replace(split(FULL, 1, 2), expandable_segments=grows)
    whole = roomy.estimate(config)
    for more in (-whole.peak_reserved_bytes // 2, -1, 0):
        anew = Estimator(traces, tiny_model.gpu(), memory_budget_bytes=roomy.memory_budget_bytes)
        found = anew.reserving(config, whole.peak_reserved_bytes + more)
        assert found == (None if more else whole)


@pytest.mark.parametrize("budget_bytes", [1 * GB, 2 * GB, ROOMY])
def test_no_configuration_is_faster_than_it_was_ranked(roomy: Estimator, budget_bytes: int) -> None:
    estimator = roomy.with_budget(budget_bytes)
    for config in tiny_model.configs():
        ranked, exact = estimator.tokens_per_second(config), estimator.estimate(config)
        assert ranked is not None
        assert exact.tokens_per_second is not None
        assert exact.tokens_per_second <= ranked * (1 + 1e-9), config
        if "paged" not in config.optimizer:
            assert exact.tokens_per_second == pytest.approx(ranked), config


def test_the_breakdown_adds_up(roomy: Estimator) -> None:
    for config in tiny_model.configs():
        priced = roomy.estimate(config)
        parts = dataclasses.asdict(priced.breakdown)
        assert sum(parts.values()) == priced.peak_allocated_bytes, config
        assert min(parts.values()) >= 0, config
        assert priced.peak_allocated_bytes <= priced.peak_reserved_bytes
        assert priced.peak_device_bytes == priced.peak_reserved_bytes + priced.nontorch_bytes


def num_llama_parameters() -> int:
    hidden, inner, vocabulary = 1024, 2816, 32_000
    attention = 2 * hidden * hidden + 2 * hidden * (hidden // 2)
    layer = attention + 3 * hidden * inner + 2 * hidden
    return 2 * vocabulary * hidden + tiny_model.NUM_LAYERS * layer + hidden


def num_lora_parameters(rank: int) -> int:
    hidden, inner = 1024, 2816
    attention = 2 * (hidden + hidden) + 2 * (hidden + hidden // 2)
    return tiny_model.NUM_LAYERS * rank * (attention + 3 * (hidden + inner))


def test_the_state_is_what_a_textbook_says(roomy: Estimator) -> None:
    num_parameters = num_llama_parameters()
    # RoPE's float32 frequencies: two buffers of half a head.
    buffers_bytes = 2 * 4 * 32

    full = roomy.estimate(FULL)
    assert full.parameters.total == full.parameters.trainable == num_parameters
    assert full.state.parameters_bytes == 2 * num_parameters + buffers_bytes
    assert full.state.gradients_bytes == 2 * num_parameters
    counts_bytes = 4 * (3 + 9 * tiny_model.NUM_LAYERS)  # a float32 step per tensor
    assert full.state.optimizer_state_bytes == 4 * num_parameters + counts_bytes

    mixed = roomy.estimate(MIXED)
    assert mixed.state.gradients_bytes == 4 * num_parameters
    assert mixed.state.optimizer_state_bytes == 8 * num_parameters + counts_bytes

    lora = roomy.estimate(LORA)
    num_trainable = num_lora_parameters(16)
    assert lora.parameters.trainable == num_trainable
    assert lora.parameters.total == num_parameters + num_trainable
    assert lora.state.gradients_bytes == 4 * num_trainable  # PEFT keeps adapters in float32

    qlora = roomy.estimate(QLORA)
    assert qlora.parameters == lora.parameters
    assert qlora.state.parameters_bytes < 0.7 * lora.state.parameters_bytes
    double = roomy.estimate(dataclasses.replace(QLORA, quantization="nf4-double"))
    assert double.state.parameters_bytes < qlora.state.parameters_bytes


def test_dropout_is_another_step_whatever_its_share() -> None:
    none, little, more = (
        TraceSpec.of(dataclasses.replace(LORA, lora_dropout=share)) for share in (0.0, 0.05, 0.1)
    )
    assert none != little == more


def test_alpha_is_the_same_step_whatever_its_ratio() -> None:
    specs = {
        TraceSpec.of(dataclasses.replace(LORA, lora_alpha_ratio=ratio)) for ratio in (0.5, 1.0, 2.0)
    }
    assert specs == {TraceSpec.of(LORA)}


def test_a_replay_sees_what_the_estimate_says(
    roomy: Estimator, traces: Mapping[TraceSpec, Trace]
) -> None:
    """Without an optimizer's memory, the estimate is the replay of two written-out steps."""
    config = dataclasses.replace(LORA, micro_batch_size=4, gradient_accumulation_steps=2)
    trace = traces[TraceSpec.of(config)]
    sizes = trace.sizes(4, 16)
    second_batch = range(len(sizes), len(sizes) + len(trace.batch))
    sizes += [sizes[number] for number in trace.batch]
    assert trace.loss is not None
    first, again, adding = (
        [*events, ~trace.loss] for events in (trace.first, trace.again, trace.next)
    )
    zero_grad = [~gradient for gradient in trace.gradients]
    events = [*trace.setup, *trace.batch, *second_batch, *first, *adding, *zero_grad]
    events += [*again, *adding, *zero_grad]
    bare = replay(sizes, events)
    priced = roomy.estimate(config)

    floor = roomy.floor_bytes(config) - roomy.estimate(config).nontorch_bytes
    state = priced.state.optimizer_state_bytes
    in_blocks = [-(-size // 512) * 512 for size in sizes]
    live = max(accumulate(in_blocks[e] if e >= 0 else -in_blocks[~e] for e in events))
    assert live <= floor <= live + 1.1 * state
    # The peak lies in a micro-step, where the optimizer's state is all that it adds.
    added = priced.peak_allocated_bytes - bare.peak_allocated_bytes
    assert added == pytest.approx(state, rel=0.1)
    assert bare.peak_reserved_bytes < priced.peak_reserved_bytes


def test_accumulation_keeps_gradients_through_the_next_micro_step(roomy: Estimator) -> None:
    once, twice, often = (roomy.estimate(split(FULL, 4, n)) for n in (1, 2, 8))
    added = twice.peak_allocated_bytes - once.peak_allocated_bytes
    assert 0 < added <= 1.05 * once.state.gradients_bytes
    # Token ids and labels of all micro-batches are there before the first.
    waiting = often.peak_allocated_bytes - twice.peak_allocated_bytes
    assert waiting == 6 * 2 * 8 * 4 * FULL.sequence_length
    assert often.optimizer_step_seconds == once.optimizer_step_seconds

    assert once.step_seconds is not None
    assert twice.step_seconds is not None
    assert once.micro_step_seconds is not None
    assert once.optimizer_step_seconds is not None
    two_apart = 2 * once.micro_step_seconds + once.optimizer_step_seconds
    # Adding gradients to gradients costs one pass over them, and no more.
    bandwidth = tiny_model.gpu().memory_bandwidth_bytes_per_second
    assert bandwidth is not None
    addition_seconds = 3 * once.state.gradients_bytes / bandwidth
    assert two_apart < twice.step_seconds < two_apart + 3 * addition_seconds


def test_a_short_micro_step_takes_what_the_host_takes(
    traces: Mapping[TraceSpec, Trace],
) -> None:
    """Beside the launches: once, and for each module of layers of 9 and 14 weights (13 and 70)."""

    def micro_step_seconds(host: Host) -> float:
        estimator = Estimator(traces, tiny_model.gpu(), memory_budget_bytes=ROOMY, host=host)
        seconds = estimator.seconds(split(LORA, 1, 1))
        assert seconds is not None
        return seconds.micro_step_seconds

    bare = dataclasses.replace(USUAL, before_micro_step=NO_WORK)
    more = micro_step_seconds(USUAL) - micro_step_seconds(bare)
    fixed, walked = USUAL.before_micro_step.seconds, USUAL.before_micro_step.module_seconds
    assert more == pytest.approx(fixed + LAYERS * 83 * walked, rel=0.05)
    # On a host that takes three times as long this small model is bound by it.
    slow, slower = (micro_step_seconds(USUAL.times(factor)) for factor in (3, 6))
    assert slower == pytest.approx(2 * slow, rel=0.02)


@pytest.mark.parametrize(
    ("cause", "config", "count"),
    [
        ("region_seconds", dataclasses.replace(FULL, activation_checkpointing=1), LAYERS),
        ("region_seconds", FULL, 0),
        # The first query, key and value need no gradient of their input.
        ("unpack_seconds", QLORA, 2 * 7 * LAYERS - 3),
        ("unpack_seconds", dataclasses.replace(QLORA, activation_checkpointing=1), 3 * 7 * LAYERS),
        ("unpack_seconds", LORA, 0),
        ("triton_seconds", FULL, 0),
    ],
)
def test_the_host_takes_longer_for_some_kernels(
    traces: Mapping[TraceSpec, Trace], cause: str, config: TrainConfig, count: int
) -> None:
    host = dataclasses.replace(USUAL.times(0), **{cause: 1.0})
    estimator = Estimator(traces, tiny_model.gpu(), memory_budget_bytes=ROOMY, host=host)
    seconds = estimator.seconds(split(config, 1, 1))
    assert seconds is not None
    assert seconds.micro_step_seconds == pytest.approx(count, abs=0.5)


@pytest.mark.parametrize("config", [split(LORA, 1, 4), split(FULL, 4, 2), PAGED], ids=str)
def test_the_parts_of_a_time_add_up_to_it(roomy: Estimator, config: TrainConfig) -> None:
    seconds, parts = roomy.seconds(config), roomy.parts(config)
    assert seconds is not None
    assert parts is not None
    total = sum(part.seconds for part in parts.values())
    assert total == pytest.approx(seconds.total_seconds)
    assert all(part.seconds >= 0 and part.spread > 0 for part in parts.values())
    assert parts["matmul"].seconds > 0
    spread = roomy.estimate(config).step_spread
    assert spread == pytest.approx(math.hypot(spread_of(parts), STEP_SPREAD))


def test_each_second_rests_on_some_evidence(traces: Mapping[TraceSpec, Trace]) -> None:
    config = split(QLORA, 4, 2)
    estimator = Estimator(traces, find_gpu("rtx-4090"), memory_budget_bytes=ROOMY)
    parts, shares = estimator.parts(config), estimator.estimate(config).time_shares
    assert parts is not None
    for part in parts.values():
        assert sum(part.seconds_from.values()) == pytest.approx(part.seconds)
    assert sum(each.share for each in shares) == pytest.approx(1)
    assert list(shares) == sorted(shares, key=lambda each: -each.share)
    evidence = {each.cause: set[RatesFrom]() for each in shares}
    for each in shares:
        evidence[each.cause].add(each.rates_from)
    # Somebody measured 16-bit products of this card; nobody 4-bit weights, or this host.
    assert evidence["dequantize"] == {RatesFrom.DATASHEET}
    assert evidence["host"] == {RatesFrom.CARDS_LIKE_IT}
    assert RatesFrom.CARDS_LIKE_IT in evidence["matmul"]


def test_a_paged_optimizer_lives_outside_the_allocator(roomy: Estimator) -> None:
    on_device = dataclasses.replace(PAGED, optimizer="adamw_torch_fused")
    paged, plain = roomy.estimate(PAGED), roomy.estimate(on_device)
    managed = paged.state.optimizer_state_managed_bytes
    assert managed == pytest.approx(8 * num_llama_parameters(), rel=0.01)
    assert paged.state.optimizer_state_bytes >= managed
    assert plain.state.optimizer_state_managed_bytes == 0
    assert paged.nontorch_bytes == plain.nontorch_bytes + managed
    assert paged.peak_reserved_bytes < plain.peak_reserved_bytes - 0.9 * managed


def test_what_does_not_fit_is_paged_out_and_paid_for(roomy: Estimator) -> None:
    free = roomy.estimate(PAGED)
    budget = free.peak_device_bytes - 500_000_000
    tight = roomy.with_budget(budget).estimate(PAGED)
    assert tight.peak_device_bytes == budget
    assert free.optimizer_step_seconds is not None
    assert tight.optimizer_step_seconds is not None
    pcie = tiny_model.gpu().pcie_bandwidth_bytes_per_second
    assert pcie is not None
    extra = tight.optimizer_step_seconds - free.optimizer_step_seconds
    assert 2 * 500_000_000 / pcie <= extra <= 2 * 2 * 500_000_000 / pcie
    assert tight.micro_step_seconds == free.micro_step_seconds
    # What torch itself holds does not page.
    hopeless = roomy.with_budget(1000).estimate(PAGED)
    assert hopeless.peak_device_bytes > free.peak_reserved_bytes


def test_what_cannot_leave_the_card_is_part_of_every_peak(
    traces: Mapping[TraceSpec, Trace], roomy: Estimator
) -> None:
    card = dataclasses.replace(tiny_model.gpu(), in_wsl=True)
    staying = Estimator(traces, card, memory_budget_bytes=ROOMY)
    free, kept = roomy.estimate(PAGED), staying.estimate(PAGED)
    assert kept.peak_device_bytes == kept.resident_bytes == free.peak_device_bytes
    assert kept.staying_bytes == free.paged_in_bytes > 0 == kept.paged_in_bytes
    assert kept.tokens_per_second == free.tokens_per_second
    assert staying.floor_bytes(PAGED) == (
        roomy.floor_bytes(PAGED) + free.state.optimizer_state_managed_bytes
    )
    assert staying.floor_bytes(FULL) == roomy.floor_bytes(FULL)
    just, tight = (kept.peak_device_bytes - less for less in (0, 1))
    assert staying.with_budget(just).fitting(PAGED) == kept
    assert roomy.with_budget(tight).fitting(PAGED) is not None
    assert staying.with_budget(tight).fitting(PAGED) is None
    assert staying.with_budget(tight).estimate(PAGED).host_bytes == 0


def test_more_memory_is_never_slower(roomy: Estimator) -> None:
    paged = [config for config in tiny_model.configs() if "paged" in config.optimizer]
    assert paged
    for config in paged:
        speeds = [
            roomy.with_budget(budget).estimate(config).tokens_per_second or 0.0
            for budget in (1 * GB, 2 * GB, 3 * GB, 6 * GB, ROOMY)
        ]
        assert speeds == sorted(speeds), config


@pytest.mark.parametrize("config", [FULL, MIXED, LORA, QLORA], ids=lambda c: c.precision)
@pytest.mark.parametrize("interval", [0, 1])
def test_a_larger_micro_batch_takes_more_memory_and_less_time_per_token(
    roomy: Estimator, config: TrainConfig, interval: int
) -> None:
    base = dataclasses.replace(config, activation_checkpointing=interval)
    priced = [roomy.estimate(split(base, size, 8 // size)) for size in (1, 2, 4, 8)]
    peaks = [e.peak_allocated_bytes for e in priced]
    assert peaks == sorted(set(peaks))
    # At one accumulation: what comes between micro-steps comes once less often than they do.
    alike = [roomy.estimate(split(base, size, 2)) for size in (1, 2, 4, 8)]
    micro_steps = [e.micro_step_seconds or 0.0 for e in alike]
    assert micro_steps == pytest.approx(sorted(micro_steps))
    speeds = [e.tokens_per_second or 0.0 for e in priced]
    assert speeds[0] < speeds[1] < speeds[-1]
    # The tensors of this small model outgrow the card's L2 cache meanwhile.
    assert all(later > 0.98 * earlier for earlier, later in itertools.pairwise(speeds))
    assert all(e.flops_per_step >= e.model_flops_per_step > 0 for e in priced)


def test_checkpointing_trades_time_for_memory(roomy: Estimator) -> None:
    kept = roomy.estimate(split(FULL, 8, 1))
    recomputed = roomy.estimate(dataclasses.replace(split(FULL, 8, 1), activation_checkpointing=1))
    assert recomputed.peak_allocated_bytes < kept.peak_allocated_bytes
    assert recomputed.step_seconds is not None
    assert kept.step_seconds is not None
    assert recomputed.step_seconds > 1.1 * kept.step_seconds
    # The model's arithmetic is the same; a second forward pass is a third more of the layers'.
    assert recomputed.model_flops_per_step == kept.model_flops_per_step
    assert 1.1 < recomputed.flops_per_step / kept.flops_per_step < 4 / 3
    assert recomputed.mfu is not None
    assert kept.mfu is not None
    assert recomputed.mfu < kept.mfu < 1


def test_flops_are_six_per_parameter_and_token(roomy: Estimator) -> None:
    priced = roomy.estimate(FULL)
    num_matmul_parameters = num_llama_parameters() - 32_000 * 1024  # the embedding is a lookup
    weights = 6 * num_matmul_parameters * FULL.tokens_per_step
    attention = 6 * tiny_model.NUM_LAYERS * 1024 * FULL.sequence_length * FULL.tokens_per_step
    assert weights < priced.model_flops_per_step < weights + 1.3 * attention


def test_an_unknown_card_has_memory_but_no_speed(traces: Mapping[TraceSpec, Trace]) -> None:
    unknown = dataclasses.replace(
        tiny_model.gpu(), peak_flop_per_second={}, memory_bandwidth_bytes_per_second=None
    )
    estimator = Estimator(traces, unknown, memory_budget_bytes=ROOMY)
    assert estimator.seconds(FULL) is None
    assert estimator.tokens_per_second(FULL) is None
    priced = estimator.estimate(FULL)
    assert priced.peak_device_bytes > 0
    assert priced.step_seconds is priced.tokens_per_second is priced.mfu is priced.bound is None


def test_the_json_compares_with_the_budget(roomy: Estimator) -> None:
    priced = roomy.estimate(FULL)
    exactly: dict[str, Any] = priced.to_dict(priced.peak_device_bytes)
    assert exactly["fits"] is True
    assert exactly["headroom_bytes"] == 0
    assert exactly["breakdown"]["parameters_bytes"] > 0
    assert priced.to_dict(priced.peak_device_bytes - 1)["fits"] is False


def test_supports_only_what_was_traced(roomy: Estimator) -> None:
    assert roomy.supports(FULL)
    assert not roomy.supports(dataclasses.replace(FULL, attention="eager"))


def test_an_emptied_cache_is_given_back_before_the_backward_pass(roomy: Estimator) -> None:
    """What the forward pass leaves cached is gone: never more reserved, and about a tenth slower."""
    config = split(FULL, 4, 2)
    kept = roomy.estimate(config)
    emptied = roomy.estimate(dataclasses.replace(config, torch_empty_cache_steps=1))
    # But for remainders too small to split, which other segments leave.
    assert emptied.peak_allocated_bytes == pytest.approx(kept.peak_allocated_bytes, rel=1e-3)
    assert emptied.peak_reserved_bytes < kept.peak_reserved_bytes
    assert emptied.micro_step_seconds == pytest.approx(1.1 * (kept.micro_step_seconds or 0))
    seldom = roomy.estimate(dataclasses.replace(config, torch_empty_cache_steps=10))
    assert seldom.micro_step_seconds == pytest.approx(1.01 * (kept.micro_step_seconds or 0))
    assert seldom.optimizer_step_seconds == kept.optimizer_step_seconds


def test_shorter_micro_batches_take_less_time_but_not_as_much_less(
    traces: Mapping[TraceSpec, Trace], roomy: Estimator
) -> None:
    padded = dataclasses.replace(FULL, batching="padded", micro_batch_size=4)
    of_padded = {TraceSpec.of(padded): traces[TraceSpec.of(FULL)]}

    def seconds_for_useful(filled: Filling) -> float:
        """Beside a step of full length without padding, which takes 1."""
        estimator = Estimator(
            of_padded, tiny_model.gpu(), memory_budget_bytes=ROOMY, filling=lambda _: filled
        )
        return 1 / estimator.useful_share(padded)

    assert seconds_for_useful(Filling(useful_share=0.8, num_micro_batches=4)) == pytest.approx(1.25)
    # Half as many full micro-batches: the update alone does not become less.
    halved = seconds_for_useful(Filling(useful_share=0.8, num_micro_batches=2))
    # As many of half the tokens: neither it nor the launches do.
    shorter = seconds_for_useful(Filling(useful_share=0.8, full_share=0.5, num_micro_batches=4))
    assert 1.25 < halved < shorter
    # And those are the seconds of micro-batches of half as many samples.
    whole, half = (roomy.seconds(split(FULL, size, 4)) for size in (4, 2))
    assert whole is not None
    assert half is not None
    assert shorter == pytest.approx(2.5 * half.total_seconds / whole.total_seconds)
    assert roomy.useful_share(padded) == 1.0
