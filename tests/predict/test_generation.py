"""Time of completions by a trace written by hand: what is done once for a generation, and what each time."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
from test_dealt_layers import step
from written_trace import Answer

from autotune.catalogue.gpus import Gpu, find_gpu
from autotune.memory.traces import Launch, Phase, Trace, TracedKernel
from autotune.memory.vllm import KEPT_ASLEEP_BYTES
from autotune.predict import generation, vllm_generation
from autotune.predict.estimator import Estimator
from autotune.predict.sharding.pipeline import PipelineTrace
from autotune.predict.sharding.shared_trace import SharedTrace
from autotune.predict.tracing import shared_trace
from autotune.records.charts import StepPhase
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.speed import roofline
from autotune.speed.host import USUAL, Work

CARD, HOST = find_gpu("rtx-4090"), USUAL.times(0)
RLOO = TrainConfig(
    method="full",
    micro_batch_size=3,
    gradient_accumulation_steps=4,
    sequence_length=64,
    precision="bf16-true",
    optimizer="sgd",
    batching="padded",
    trainer="trl-rloo",
    num_generations=2,
    max_completion_length=11,
    kl_beta=0.05,
)
MIB = 2**20
MOVED = {
    "prefill": 50, "decode": 20, "last": 30, "policy": 100, "generated_reference": 60, "embed": 80,
    "head_backward": 160,
}  # fmt: skip
"""MiB that each phase moves for a completion."""


def trace(*left_out: str) -> Trace:
    """A model of one weight, of which each phase launches one kernel."""
    weight = {"category": "parameter", "dtype": "bfloat16", "trainable": True, "group": 0}
    weight |= {"size": [2 * MIB, 0, 0], "shape": [[MIB, 0, 0]], "embedding": False, "linear": True}
    blocks: dict[str, dict[str, Any]] = {
        phase: {"phase": phase, "stack": 0, "layer": -1, "events": [], "accumulate": []}
        for phase in ("weights", *MOVED)
    }
    for phase, block in blocks.items():
        moved = MOVED.get(phase, 0) * MIB * (phase not in left_out)
        launched = [["add", "bfloat16", [5, 1, 0], [[moved, 1, 0]], False, 1, []]]
        block["kernels"] = launched if moved else []
    blocks["weights"]["events"] = [0]
    blocks["head_backward"] |= {"events": [1], "accumulate": [[1, 1]]}
    return Trace(
        {
            "layers": {"traced": 0, "full": 0, "period": 1},
            "tensors": [weight, {"category": "gradient", "size": [2 * MIB, 0, 0], "of": 0}],
            "blocks": [*blocks.values()],
            "parameters": [],
        }
    )


def of_phase(phase: str, num_completions: int) -> float:
    """Seconds that a phase's kernel takes by itself."""
    return of_bytes(MOVED[phase] * MIB * num_completions)


def of_bytes(moved: int) -> float:
    """Seconds of a kernel that moves so many bytes."""
    kernel = roofline.Kernel(
        name="add", kind="elementwise", dtype="bfloat16", flops=0, bytes_moved=moved
    )
    found = roofline.seconds([kernel], roofline.ceilings(CARD))
    assert found is not None
    return found.gpu_seconds


def of_step(
    config: TrainConfig, *left_out: str, memory_budget_bytes: int = 24 * 10**9
) -> Estimator:
    traces = {TraceSpec.of(config): trace(*left_out)}
    return Estimator(traces, CARD, memory_budget_bytes=memory_budget_bytes, host=HOST)


def seconds(config: TrainConfig, *left_out: str) -> float:
    found = of_step(config, *left_out).seconds(config)
    assert found is not None
    return found.total_seconds


@pytest.mark.parametrize("num_together", [None, 2, 1])
def test_scores_and_completions_are_of_a_generation_however_often_it_is_trained_on(
    num_together: int | None,
) -> None:
    config = dataclasses.replace(RLOO, steps_per_generation=num_together)
    together = 3 * (num_together or 4)
    # Ten tokens after the first, half of them as long as the second, half as the last.
    written = of_phase("prefill", together)
    written += 5 * (of_phase("decode", together) + of_phase("last", together))
    per_step = 12 / together * written
    per_step += 4 * (of_phase("policy", 3) + of_phase("generated_reference", 3))
    update = seconds(config) - per_step
    trained = 4 * (of_phase("embed", 3) + of_phase("head_backward", 3))
    assert trained < update < 1.2 * trained
    for num_iterations in (2, 3):
        again = dataclasses.replace(config, num_iterations=num_iterations)
        assert seconds(again) == pytest.approx(update + per_step / num_iterations)
        unscored = seconds(again, "policy", "generated_reference", "prefill", "decode", "last")
        assert unscored == pytest.approx(update)


def test_each_gpu_writes_and_scores_what_it_trains_on() -> None:
    alone = dataclasses.replace(RLOO, steps_per_generation=2)
    shared = dataclasses.replace(alone, parallelism="ddp", num_gpus=2)
    spec = TraceSpec.of(shared)
    found = Estimator(
        {spec: shared_trace(trace(), spec, num_gpus=2)},
        CARD,
        memory_budget_bytes=24 * 10**9,
        host=HOST,
    )
    time = found.seconds(shared)
    assert time is not None
    for_others = time.communication_seconds + time.waiting_seconds
    assert time.total_seconds - for_others == pytest.approx(seconds(alone))
    speed, speed_alone = found.tokens_per_second(shared), of_step(alone).tokens_per_second(alone)
    assert speed == pytest.approx(2 * speed_alone * seconds(alone) / time.total_seconds)
    (steps, _), (steps_alone, _) = found.replayed(shared), of_step(alone).replayed(alone)
    written, written_alone = (
        [part.events.tolist() for part in each.parts if part.phase is StepPhase.GENERATION]
        for each in (steps, steps_alone)
    )
    assert len(written) == len(written_alone) > 1
    ids = written[0][0]
    assert steps.sizes[ids] == steps_alone.sizes[written_alone[0][0]] == 48 * 6 * 64
    # One GPU alone writes as many at a time as both did.
    whole = dataclasses.replace(alone, gradient_accumulation_steps=8, steps_per_generation=4)
    assert found.on_fewer_gpus(shared, 1) == of_step(whole).estimate(whole)


def test_work_and_causes_of_a_step_have_its_share_of_scoring() -> None:
    twice = dataclasses.replace(RLOO, num_iterations=2)
    estimator = of_step(twice)
    # Five operations for each completion in each of four passes, of which two are shared by two steps.
    assert estimator.estimate(twice).flops_per_step == 4 * 3 * 5 * (2 + 2 / 2)
    assert estimator.estimate(RLOO).flops_per_step == 4 * 3 * 5 * 4
    parts = estimator.parts(twice)
    assert parts is not None
    assert sum(part.seconds for part in parts.values()) == pytest.approx(seconds(twice))
    scoring = of_phase("policy", 3) + of_phase("generated_reference", 3)
    once = estimator.parts(RLOO)
    assert once is not None
    spared = once["memory"].seconds - parts["memory"].seconds
    assert spared == pytest.approx(4 * scoring / 2)


NO_COMPLETIONS: dict[str, Any] = {
    "trainer": "transformers",
    "num_generations": None,
    "max_completion_length": None,
    "kl_beta": None,
}


@pytest.mark.parametrize(
    ("counts", "outside", "accumulation", "rounds"),
    [
        # Of 8 s each layer takes 2; the first micro-batch takes all, each further one as the slowest GPU.
        ((2, 1, 1), (0, 0), 1, 1.0),
        ((2, 1, 1), (0, 0), 5, 1 + 4 * 4 / 8),
        # With 3 s outside, a second before and two behind, a layer takes 1.25.
        ((2, 1, 1), (1, 2), 5, 1 + 4 * 3.5 / 8),
        ((1, 1, 2), (1, 2), 5, 1 + 4 * 4.5 / 8),
        # What is outside may be all that there is.
        ((1, 1), (20, 0), 3, 1 + 2 * 1.0),
    ],
)
def test_a_pipeline_is_as_slow_as_its_slowest_gpu(
    counts: tuple[int, ...], outside: tuple[int, int], accumulation: int, rounds: float
) -> None:
    config = dataclasses.replace(RLOO, parallelism="pp", num_gpus=len(counts), **NO_COMPLETIONS)

    class Dealt(PipelineTrace):
        def __init__(self) -> None:
            self.counts = counts

        def launches_outside_layers(self, micro_batch: int, rank: int) -> Any:
            assert (micro_batch, rank) == (config.micro_batch_size, 0)
            kernel = TracedKernel(
                name="add", dtype="bfloat16", flops=(0, 0, 0), moved=(), phase="forward", count=1
            )
            return [[Launch(kernel, 0.0, seconds * per_second, 1, ())] for seconds in outside]

    per_second = 10**9 / of_bytes(10**9)
    spec = TraceSpec.of(config)
    estimator = Estimator({spec: Dealt()}, CARD, memory_budget_bytes=10**9, host=HOST)
    found = estimator._times._rounds(config, 8.0, accumulation)
    assert found == pytest.approx(rounds, rel=1e-3)
    plain = dataclasses.replace(config, parallelism="none", num_gpus=1)
    alone = Estimator({TraceSpec.of(plain): trace()}, CARD, memory_budget_bytes=10**9, host=HOST)
    assert alone._times._rounds(plain, 8.0, accumulation) == accumulation


def test_what_takes_all_of_its_room_fits() -> None:
    config = dataclasses.replace(RLOO, **NO_COMPLETIONS)
    roomy = of_step(config)
    estimate = roomy.estimate(config)
    for spare, fits in ((0, True), (-1, False)):
        tight = roomy.with_budget(estimate.peak_device_bytes + spare)
        assert tight.fits(estimate) is fits
        assert (tight.fitting(config) is not None) is fits
        needed = roomy.with_budget(roomy.least_needed(config) + spare)
        assert needed.may_fit(config) is fits
    reserved = estimate.peak_reserved_bytes
    assert roomy.reserving(config, reserved) == estimate
    assert roomy.reserving(config, reserved - 1) is None


@pytest.mark.parametrize(("optimizer", "num_states"), [("adamw_torch", 2), ("sgd", 0)])
def test_the_last_tensors_of_steps_are_the_updates(optimizer: str, num_states: int) -> None:
    config = dataclasses.replace(RLOO, optimizer=optimizer, **NO_COMPLETIONS)
    steps, _ = of_step(config).replayed(config)
    assert steps.of_update.stop == len(steps.sizes)
    of_update = [(steps.categories[n], steps.sizes[n]) for n in steps.of_update]
    states = [size for category, size in of_update if category == "optimizer_state"]
    assert states == num_states * [2 * MIB]
    assert "optimizer_state" not in steps.categories[: steps.of_update.start]
    assert "gradient" in steps.categories[: steps.of_update.start]


LAUNCHES = {"forward": 1.0, "backward": 10.0, "recompute": 100.0, "update": 1000.0}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    ("changes", "optimizer", "of_a_micro_step", "of_a_step"),
    [
        # Each moment is paid as often as it comes: before and after each micro-step, once before the update
        # and once while it runs. There are 13 / 9 modules to the one weight.
        ({"before_micro_step": Work(seconds=1, module_seconds=9)}, "sgd", 14, 0),
        ({"after_micro_step": Work(seconds=1, module_seconds=9)}, "sgd", 14, 0),
        ({"before_update": Work(seconds=1, module_seconds=9, tensor_seconds=100)}, "sgd", 0, 114),
        ({"update": Work(seconds=1, module_seconds=9, tensor_seconds=100)}, "sgd", 0, 114),
        # A hook for each weight, where there is no time before the update.
        ({"call_seconds": 5.0}, "sgd", 0, 0),
        ({"call_seconds": 5.0}, "sgd in backward", 0, 5),
        ({"before_update": Work(seconds=1, module_seconds=9)}, "sgd in backward", 0, 0),
        ({"update": Work(seconds=1, module_seconds=0)}, "sgd in backward", 0, 1),
        # bitsandbytes' Python for each weight, as often as it says.
        ({"python_seconds": 1.0}, "sgd", 0, 0),
        ({"python_seconds": 1.0}, "adamw_bnb_8bit", 0, 3),
        # One kernel forward, one backward; no layer is recomputed.
        ({"launch_seconds": {**LAUNCHES, "update": 0.0}}, "sgd", 11, 0),
        ({"region_seconds": 1.0, "triton_seconds": 1.0, "copy_seconds": 1.0}, "sgd", 0, 0),
    ],
)
def test_what_the_host_does_is_paid_as_often_as_it_comes(
    changes: dict[str, Any],
    optimizer: str,
    of_a_micro_step: float,
    of_a_step: float,
    accumulation: int,
) -> None:
    name, _, in_backward = optimizer.partition(" in ")
    config = dataclasses.replace(
        RLOO,
        optimizer=name,
        update_in_backward=bool(in_backward),
        gradient_accumulation_steps=accumulation,
        **NO_COMPLETIONS,
    )
    traces = {TraceSpec.of(config): trace()}
    host = dataclasses.replace(HOST, **changes)
    seconds, without = (
        Estimator(traces, CARD, memory_budget_bytes=24 * 10**9, host=each).seconds(config)
        for each in (host, HOST)
    )
    assert seconds is not None
    assert without is not None
    more = seconds.total_seconds - without.total_seconds
    # The GPU's own time, a millisecond or so, lies beneath what the host takes.
    assert more == pytest.approx(accumulation * of_a_micro_step + of_a_step, abs=0.05)
    if of_a_micro_step:
        assert seconds.micro_step_seconds + seconds.optimizer_step_seconds / accumulation == (
            pytest.approx(seconds.total_seconds / accumulation)
        )


@pytest.mark.parametrize("is_at_once", [False, True])
def test_a_cache_grows_evenly_from_the_second_token_to_the_last(is_at_once: bool) -> None:
    """Prompts make two tensors of it and one that passes; each token makes both anew.

    An old one goes as its successor is there, or both do at once.
    """
    sizes = [100, 1000, 7, 160, 1060, 400, 1300, 9]
    events = {
        Phase.PREFILL: [2, 0, ~2, 1],
        Phase.DECODE: [3, ~0, 4, ~1],
        Phase.GROWN: [5, 6, ~3, ~4] if is_at_once else [5, ~3, 6, ~4],
        Phase.LAST: [7, ~7],
    }
    asked: list[tuple[int, int]] = []

    def sizes_of(num: int, rank: int) -> list[int]:
        asked.append((num, rank))
        return sizes

    made_up: Any = SimpleNamespace(sizes=sizes_of, generation=events.__getitem__)
    for most, steps in ((2, []), (5, [(240, 1140), (320, 1220), (400, 1300)])):
        config = dataclasses.replace(RLOO, max_completion_length=most, lora_rank=8)
        found = generation.generation_of(made_up, config)
        ids = 48 * 12 * 64
        grown = [size for pair in steps for size in pair]
        assert found.sizes == [ids, 7, 100, 1000, 160, 1060, *grown, 9]
        first, old = [0, 1, 2, ~1, 3], [4, ~2, 5, ~3]
        for number in range(6, 6 + len(grown), 2):
            tokens = [number, ~(number - 2), number + 1, ~(number - 1)]
            old += [tokens[at] for at in ((0, 2, 1, 3) if is_at_once else range(4))]
        last = 6 + len(grown)
        assert found.events[:-3] == [*first, *old, last, ~last]
        # Nothing is left behind.
        assert sorted(found.events[-3:]) == sorted([~(last - 1), ~(last - 2), ~0])
    assert asked == [(12, 8)] * 2
    # As often as 32 times, however many tokens.
    many = dataclasses.replace(RLOO, max_completion_length=63)
    assert len(generation.generation_of(made_up, many).sizes) == 6 + 2 * 32 + 1


UNKNOWN_RATES = dataclasses.replace(
    CARD, peak_flop_per_second={}, memory_bandwidth_bytes_per_second=None
)
NO_LINK = dataclasses.replace(CARD, pcie_bandwidth_bytes_per_second=None)


@pytest.mark.parametrize(
    ("card", "changes", "is_known"),
    [
        (CARD, {}, True),
        (UNKNOWN_RATES, {}, False),
        (UNKNOWN_RATES, {"vllm_gpu_memory_utilization": 0.25}, False),
        (UNKNOWN_RATES, NO_COMPLETIONS, False),
        # A step alone asks nothing of the link to others.
        (NO_LINK, NO_COMPLETIONS, True),
        (CARD, NO_COMPLETIONS | {"parallelism": "ddp", "num_gpus": 2}, True),
        (NO_LINK, NO_COMPLETIONS | {"parallelism": "ddp", "num_gpus": 2}, False),
        (UNKNOWN_RATES, NO_COMPLETIONS | {"parallelism": "pp", "num_gpus": 2}, False),
    ],
)
def test_what_a_card_does_not_tell_leaves_time_unknown_and_memory_known(
    card: Gpu, changes: dict[str, Any], is_known: bool
) -> None:
    config = dataclasses.replace(RLOO, **changes)
    spec = TraceSpec.of(config)
    found: Trace | SharedTrace = trace()
    if config.num_gpus > 1:
        alone = step(2) if config.parallelism == "pp" else trace()
        found = shared_trace(alone, spec, num_gpus=2)
    estimator = Estimator({spec: found}, card, memory_budget_bytes=24 * 10**9, host=HOST)
    assert (estimator.seconds(config) is not None) == is_known
    assert (estimator.parts(config) is not None) == is_known
    assert (estimator.tokens_per_second(config) is not None) == is_known
    estimate = estimator.estimate(config)
    assert (estimate.step_seconds is not None) == is_known
    assert (estimate.bound is not None) == is_known
    assert bool(estimate.time_shares) == is_known
    assert estimate.peak_allocated_bytes > 0
    assert estimate.flops_per_step >= estimate.model_flops_per_step >= 0


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_what_is_paged_out_waits_on_the_host_of_all_gpus(num_gpus: int) -> None:
    """A budget as small as the floor pages all of both moments out, which are in 32 bits."""
    sharing = {"parallelism": "ddp" if num_gpus > 1 else "none", "num_gpus": num_gpus}
    config = dataclasses.replace(RLOO, optimizer="paged_adamw_32bit", **NO_COMPLETIONS, **sharing)
    plain = dataclasses.replace(config, optimizer="sgd")
    spec = TraceSpec.of(config)
    found = shared_trace(trace(), spec, num_gpus=2) if num_gpus > 1 else trace()
    roomy = Estimator({spec: found}, CARD, memory_budget_bytes=10**9, host=HOST)
    tight = roomy.with_budget(roomy.floor_bytes(config))
    moments = 2 * 4 * MIB
    for estimator, paged in ((roomy, 0), (tight, moments), (tight.with_budget(1), moments)):
        assert estimator.least_on_host(config) == num_gpus * paged
        assert estimator.least_on_host(plain) == 0
        assert estimator.least_of_host([config, plain]) == [config, plain]
    half = roomy.with_budget(roomy.floor_bytes(config) + moments // 2)
    assert half.least_on_host(config) == num_gpus * moments // 2
    for limit, holding in (
        (num_gpus * moments, [config, plain]),
        (num_gpus * moments - 1, [plain]),
        (0, [plain]),
    ):
        limited = Estimator(
            {spec: found},
            CARD,
            memory_budget_bytes=tight.memory_budget_bytes,
            host_memory_bytes=limit,
            host=HOST,
        )
        assert list(limited.least_of_host([config, plain])) == holding
        # Of those that no host holds, the one that takes least is asked.
        assert list(limited.least_of_host([config])) == [config]
        assert not limited.least_of_host([])
        assert limited.may_fit(config) == (config in holding)
        assert limited.estimate(config).all_host_bytes == num_gpus * moments
        assert limited.may_fit(plain)


def test_a_shorter_sample_of_a_size_of_its_own_takes_its_share_but_for_the_launches() -> None:
    """Of a single sample another trace is made than of several; a plan has none of these."""
    config = dataclasses.replace(RLOO, micro_batch_size=1, **NO_COMPLETIONS)
    spec = TraceSpec.of(config)
    assert spec.single
    several = dataclasses.replace(spec, single=False)
    for host, is_launching in ((HOST, False), (USUAL.times(1000), True)):
        for traces in ({spec: trace()}, {spec: trace(), several: trace("embed")}):
            times = Estimator(traces, CARD, memory_budget_bytes=24 * 10**9, host=host)._times
            whole, half = (times._forward_backward(spec, 1, 0, "bf16-true", x) for x in (1.0, 0.5))
            assert whole is not None
            assert half is not None
            if several in traces:
                assert half == times._forward_backward(several, 0.5, 0, "bf16-true", 1.0)
            elif is_launching:
                assert half.total_seconds == whole.launch_seconds
            else:
                assert half.total_seconds == pytest.approx(whole.total_seconds / 2)


VLLM = dataclasses.replace(RLOO, vllm_gpu_memory_utilization=0.25)


def test_vllm_takes_its_share_of_the_whole_card_from_training() -> None:
    plain, served = of_step(RLOO).estimate(RLOO), of_step(VLLM).estimate(VLLM)
    share_bytes = math.ceil(CARD.capacity_bytes / 4)
    assert served.vllm_bytes == share_bytes
    assert served.peak_reserved_bytes == plain.peak_reserved_bytes
    assert served.peak_device_bytes == plain.peak_device_bytes + share_bytes
    # Half of the card fits once, not beside another half.
    half = dataclasses.replace(VLLM, vllm_gpu_memory_utilization=0.5)
    assert of_step(half).fits(of_step(half).estimate(half))
    tight = of_step(half, memory_budget_bytes=CARD.capacity_bytes // 2)
    assert not tight.may_fit(half)


def test_asleep_it_takes_what_training_leaves_while_it_writes() -> None:
    asleep = dataclasses.replace(VLLM, vllm_enable_sleep_mode=True)
    estimate, plain = of_step(asleep).estimate(asleep), of_step(RLOO).estimate(RLOO)
    # The weight is there while vLLM writes, and no gradient yet; its activations are gone.
    assert CARD.context_bytes is not None
    writing_bytes = CARD.context_bytes + 2 * MIB + math.ceil(CARD.capacity_bytes / 4)
    assert estimate.peak_device_bytes == writing_bytes
    assert estimate.vllm_bytes == writing_bytes - plain.peak_device_bytes
    assert of_step(asleep).floor_bytes(asleep) == writing_bytes
    # With little for vLLM it is training that peaks, beside what vLLM does not give up.
    small = dataclasses.replace(asleep, vllm_gpu_memory_utilization=0.001)
    assert of_step(small).estimate(small).vllm_bytes == KEPT_ASLEEP_BYTES
    # In the midst of a step the gradients of the micro-batches before are there, too.
    parted = dataclasses.replace(asleep, steps_per_generation=2)
    assert of_step(parted).estimate(parted).peak_device_bytes == writing_bytes + 2 * MIB


def test_weights_are_taken_over_once_a_step_and_asleep_with_each_generation() -> None:
    parted = dataclasses.replace(VLLM, steps_per_generation=1, num_generations=3)
    asleep = dataclasses.replace(parted, vllm_enable_sleep_mode=True)
    # Three more times, and four times awake and asleep.
    taken_over = seconds(asleep) - seconds(parted) - 4 * vllm_generation.WAKE_SECONDS
    whole = [dataclasses.replace(each, steps_per_generation=None) for each in (parted, asleep)]
    assert seconds(whole[1]) == pytest.approx(seconds(whole[0]) + vllm_generation.WAKE_SECONDS)
    assert taken_over > 3 * vllm_generation.LOAD_SECONDS
    # A batch of twelve at a time takes a quarter of the engine's steps.
    steps = 11 * vllm_generation.STEP_SECONDS
    assert seconds(parted) - seconds(whole[0]) == pytest.approx(3 * steps, rel=0.05)


@pytest.mark.parametrize(
    ("flops", "num_weights", "optimizer", "bound"),
    [
        # An update of 16 bits reads two values and writes one, at a terabyte a second; products are done at
        # 165 TFLOP/s.
        (10**14, 10**6, "sgd", "compute"),
        (10**9, 10**9, "sgd", "memory bandwidth"),
        (3 * 10**12, 10**9, "sgd", "compute"),
        (3 * 10**12, 10**9, "adamw_torch", "memory bandwidth"),
    ],
)
def test_the_longer_of_passes_and_update_bounds_a_step(
    flops: int, num_weights: int, optimizer: str, bound: str
) -> None:
    a = Answer(full=0, traced=0)
    facts = {"dtype": "bfloat16", "trainable": True, "group": 0, "embedding": False, "linear": True}
    a.block("weights").alloc(
        "w", [2 * num_weights, 0, 0], category="parameter", shape=[[num_weights, 0, 0]], **facts
    )
    a.block("embed")
    a.block("head_backward").gradient("g", [2 * num_weights, 0, 0])
    a.blocks[-1]["kernels"].append(["mm", "bfloat16", [flops, 0, 0], [[10**6, 0, 0]], False, 1, []])
    config = dataclasses.replace(
        RLOO, trainer="transformers", optimizer=optimizer, gradient_accumulation_steps=1
    )
    config = dataclasses.replace(
        config, num_generations=None, max_completion_length=None, kl_beta=None
    )
    estimator = Estimator(
        {TraceSpec.of(config): a.trace()}, CARD, memory_budget_bytes=24 * 10**9, host=HOST
    )
    found = estimator.seconds(config)
    assert found is not None
    passes, update = found.micro_step_seconds, found.optimizer_step_seconds
    assert found.bound == bound
    assert (passes > update) == (bound == "compute")
    assert found.total_seconds == pytest.approx(passes + update)
    estimate = estimator.estimate(config)
    peak = CARD.peak_flop_per_second["bfloat16"]
    assert peak is not None
    assert estimate.flops_per_step == estimate.model_flops_per_step == flops
    assert estimate.mfu == pytest.approx(flops / peak / found.total_seconds)
