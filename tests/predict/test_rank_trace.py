"""What each of several GPUs is predicted to hold and send: a small Llama, figures worked out by hand.

The model's weights: 11,798,528 in each of 5 layers (q 1024 x 1024, k and v 512 x 1024, o 1024 x 1024,
three of 1024 x 2816, two norms), an embedding and a head of 32000 x 1024, a norm of 1024.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping

import here
import pytest
import tiny_model

from autotune.catalogue.gpus import find_gpu
from autotune.memory.allocator import EMPTY_CACHE
from autotune.memory.traces import Trace, evaluate
from autotune.predict.estimator import Estimator
from autotune.predict.sharding.rank_trace import RankTrace
from autotune.predict.sharding.shards import is_tied
from autotune.predict.sharding.shared_trace import SharedTrace
from autotune.predict.tracing import shared_trace, trace_all
from autotune.records.estimate import Estimate, PerGpu, TraceSpec
from autotune.search import predict_best
from autotune.space.adapters import TARGETS_BY_COLUMN
from autotune.space.config import TrainConfig
from autotune.space.parallelisms import PARALLELISMS

pytestmark = pytest.mark.worker

LAYER = 11_798_528
EMBEDDING = 32_768_000
TAIL = EMBEDDING + 1024
P = 5 * LAYER + EMBEDDING + TAIL
NUM_WEIGHTS = 5 * 9 + 3
# Two tables of 32 frequencies in float32 that every GPU has.
BUFFERS_BYTES = 2 * 32 * 4
A100 = find_gpu("a100")

DDP = TrainConfig(
    method="full",
    micro_batch_size=2,
    gradient_accumulation_steps=1,
    sequence_length=512,
    precision="bf16-true",
    optimizer="adamw_torch_fused",
    parallelism="ddp",
    num_gpus=4,
)
CHECKPOINTED = dataclasses.replace(DDP, activation_checkpointing=1)
FSDP2 = dataclasses.replace(DDP, parallelism="fsdp2", precision="bf16-mixed")
LORA = dataclasses.replace(
    FSDP2, method="lora", precision="bf16-autocast", lora_rank=8, lora_targets="all-linear"
)
SHARING = [name for name in PARALLELISMS if name != "none"]


def zero(name: str, num_gpus: int = 4) -> TrainConfig:
    return dataclasses.replace(FSDP2, parallelism=name, num_gpus=num_gpus)


PRECISIONS_TRACED = ("bf16-true", "bf16-mixed", "bf16-autocast")


def lora_on(parallelism: str) -> TrainConfig:
    """LoRA on what can be adapted where the GPUs share the run in that way."""
    targets = TARGETS_BY_COLUMN if PARALLELISMS[parallelism].splits else "all-linear"
    return dataclasses.replace(LORA, lora_targets=targets)


@functools.cache
def one_gpu_traces() -> Mapping[TraceSpec, Trace | SharedTrace]:
    """Of one GPU, for all configurations here."""
    configs = [
        dataclasses.replace(config, parallelism="none", num_gpus=1, precision=precision)
        for config in (DDP, LORA)
        for precision in PRECISIONS_TRACED
    ]
    configs.append(dataclasses.replace(CHECKPOINTED, parallelism="none", num_gpus=1))
    specs = {TraceSpec.of(config) for config in configs}
    for name, config in ((n, c) for n in ("tp", "cp") for c in (DDP, lora_on(n))):
        for precision in PRECISIONS_TRACED:
            split = dataclasses.replace(config, parallelism=name, precision=precision)
            specs.add(dataclasses.replace(TraceSpec.of(split), parallelism="none"))
    length = tiny_model.SEQUENCE_LENGTH
    return trace_all(tiny_model.MODEL, "causal-lm", length, A100, specs, server=here.workers)


@functools.cache
def estimator(config: TrainConfig) -> Estimator:
    spec = TraceSpec.of(config)
    trace = one_gpu_traces()[dataclasses.replace(spec, parallelism="none", no_sync=False)]
    assert isinstance(trace, Trace)
    shared = None
    if config.parallelism != "none":
        shared = shared_trace(trace, spec, num_gpus=config.num_gpus, hidden_size=1024)
    traces = {spec: shared or trace}
    return Estimator(traces, A100, memory_budget_bytes=80 * 10**9)


@functools.cache
def predicted(config: TrainConfig) -> tuple[Estimate, PerGpu]:
    estimate = estimator(config).estimate(config)
    assert estimate.per_gpu is not None
    return estimate, estimate.per_gpu


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("bert", "masked-lm"),
        ("bert", "sequence-classification"),
        ("roberta", "sequence-classification"),
    ],
)
def test_an_encoder_whose_embedding_has_a_norm(kind: str, task: str) -> None:
    """Its gradient comes with the embedding's, and BERT's tied head has a bias as wide as the vocabulary."""
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    tiny["type_vocab_size"] = 1
    config = {"model_type": kind, "num_hidden_layers": 5, "vocab_size": 1000, **tiny}
    model = dataclasses.replace(tiny_model.MODEL, config=config)
    spec = TraceSpec.of(dataclasses.replace(CHECKPOINTED, parallelism="none", num_gpus=1))
    trace = trace_all(model, task, 64, A100, {spec}, server=here.workers)[spec]
    assert isinstance(trace, Trace)
    assert is_tied(trace.parameters()) == (task == "masked-lm")
    for name in ("ddp", "zero1", "zero2", "zero3", "fsdp2"):
        sharing = dataclasses.replace(spec, parallelism=name)
        shared = shared_trace(trace, sharing, num_gpus=2, hidden_size=64)
        assert shared.first
        if name == "ddp":
            # The embedding's gradient arrives last, also where it is the head's, too.
            sizes = shared.sizes(2, 0)
            *_, last = buckets = [sizes[n] for n in shared.behind_first if n >= 0 and sizes[n]]
            assert last == max(buckets) > 1000 * 64 * 2


def test_ddp_takes_the_time_to_clone_what_the_model_returns() -> None:
    """Once, behind the forward pass; not where layers are checkpointed, where it looks for nothing unused."""
    alone = dataclasses.replace(DDP, parallelism="none", num_gpus=1)
    trace = one_gpu_traces()[TraceSpec.of(alone)]
    assert isinstance(trace, Trace)
    assert trace.returned is not None
    sizes = [evaluate(term, 4, 0) for _, term in trace.returned.tensors]
    for every, expected in ((0, sizes), (1, [])):
        spec = dataclasses.replace(TraceSpec.of(DDP), activation_checkpointing=every)
        shared = shared_trace(trace, spec, num_gpus=2)
        own = len(trace.launches(4, 0))
        clones = shared.launches(4, 0)[own:]
        assert [clone.bytes_moved for clone in clones] == [2 * size for size in expected]
        shares, order = shared.stretches
        assert shares[order][:, own:].sum(axis=0).tolist() == [1.0] * len(expected)
        assert len(order) == len(trace.stretches[1]) + bool(expected)


def test_ddp_holds_everything_and_buckets_beside() -> None:
    estimate, share = predicted(DDP)
    alone = dataclasses.replace(DDP, parallelism="none", num_gpus=1)
    one = estimator(alone).estimate(alone)
    assert one.per_gpu is None
    assert share.parameters_bytes == one.state.parameters_bytes == 2 * P + BUFFERS_BYTES
    assert share.gradients_bytes == 2 * P
    assert share.optimizer_state_bytes == one.state.optimizer_state_bytes
    # Every weight's size is a multiple of 512 bytes, and so are the buckets'.
    assert share.buffers_bytes == 2 * P
    # The allocator leaves up to 1 MiB of a large block unsplit; there are fewer than 16 buckets.
    more_bytes = estimate.peak_allocated_bytes - one.peak_allocated_bytes
    assert 2 * P <= more_bytes <= 2 * P + 16 * 2**20
    # Rings: 3/4 of the gradients twice. NCCL: 32 channels of 12 MiB on NVLink.
    assert share.sent_bytes_per_step == 3 * P
    assert estimate.nontorch_bytes - one.nontorch_bytes == 384 * 2**20


def test_checkpointed_ddp_makes_its_buckets_anew_before_the_second_step() -> None:
    steps, _ = estimator(CHECKPOINTED).replayed(CHECKPOINTED)

    def buckets(step: int) -> list[int]:
        """Bytes of the buckets that are made before the step's first layer, by their sign: made or freed."""
        events = next(part.events for part in steps.parts if part.step == step).tolist()
        numbers = ((event, max(event, ~event)) for event in events if event > EMPTY_CACHE)
        return [
            steps.sizes[number] * (1 if event >= 0 else -1)
            for event, number in numbers
            if steps.categories[number] == "workspace" and steps.sizes[number] > 2**20
        ]

    assert buckets(-1) == [2 * P]
    freed, *anew = buckets(1)
    assert freed == -2 * P == -sum(anew)
    # The last layers' gradients come first, and with 1 MiB a bucket is full; the embedding's comes last.
    assert len(anew) > 5
    assert anew[-1] >= 2 * EMBEDDING
    assert not buckets(2)


def test_ddp_sends_once_a_step_however_many_micro_steps() -> None:
    config = dataclasses.replace(DDP, gradient_accumulation_steps=4)
    assert predicted(config)[1].sent_bytes_per_step == 3 * P


def test_fsdp2_holds_a_quarter_in_float32() -> None:
    estimate, share = predicted(FSDP2)
    assert share.parameters_bytes == P + BUFFERS_BYTES
    assert share.gradients_bytes == P
    assert share.optimizer_state_bytes == 2 * P + 4 * NUM_WEIGHTS
    assert share.buffers_bytes == 0
    # The head in 16 bits, the buffer that it arrives in, and that of the layer before it.
    assert share.gathered_bytes == 2 * 2 * TAIL + 2 * LAYER
    # All is gathered twice but the tail, once; gradients go once: three quarters of each.
    assert share.sent_bytes_per_step == 3 * (2 * P + P - TAIL) * 2 // 4
    # 300 GB/s in one direction, of which such messages reach less than three quarters.
    assert share.communication_seconds is not None
    assert 100e9 < share.sent_bytes_per_step / share.communication_seconds < 225e9
    assert estimate.step_seconds is not None
    assert estimate.overlapped_step_seconds == pytest.approx(
        estimate.step_seconds - share.communication_seconds
    )


def test_messages_are_as_many_as_the_libraries_send() -> None:
    """DDP has buckets of 25 MiB, FSDP2 takes a unit at a time, ZeRO a weight and buckets of hidden^2."""

    def counts(config: TrainConfig) -> list[dict[str, int]]:
        exchange = estimator(config)._times.exchange(
            TraceSpec.of(config), config.micro_batch_size, config.lora_rank or 0
        )
        assert exchange is not None
        found = []
        for messages in (exchange.messages_per_micro_step, exchange.messages_per_step):
            found.append(Counter[str]())
            for message in messages:
                found[-1][message.operation] += message.count
        return [dict(each) for each in found]

    # The head, 62.5 MiB, is one; layers of 22.5 MiB close a bucket every second; then the embedding.
    _, of_ddp = counts(DDP)
    assert of_ddp["all_reduce"] == pytest.approx(2 * P / (30 * 2**20), abs=3)
    # Embedding and five layers twice, the tail once; seven units reduced.
    assert counts(FSDP2) == [{"all_gather": 13, "reduce_scatter": 7}, {}]
    # Seven products a layer, the embedding and the head twice; norms stay whole.
    assert counts(zero("zero3"))[0]["all_gather"] == 2 * (5 * 7 + 2)
    # No two products of a layer share a bucket of 1024^2 elements, but k and v, and norms with others.
    assert 5 * 6 + 2 <= counts(zero("zero3"))[0]["reduce_scatter"] <= 5 * 7 + 4
    assert counts(zero("zero1"))[0] == {}
    assert counts(zero("zero1"))[1]["all_gather"] == 1
    assert counts(zero("zero2"))[0]["all_reduce"] == counts(zero("zero1"))[1]["all_reduce"]


@pytest.mark.parametrize(
    # Frozen weights have no gradients.
    ("config", "share"),
    [(DDP, 2 / 3), (dataclasses.replace(LORA, parallelism="ddp"), 0.51)],
)
def test_the_backward_pass_hides_gradients_for_as_long_as_it_takes(
    config: TrainConfig, share: float
) -> None:
    times = estimator(config)._times
    sizes = (config.micro_batch_size, config.lora_rank or 0, config.precision)
    assert times._backward_share(TraceSpec.of(config), *sizes) == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("name", SHARING)
def test_pcie_takes_longer_than_nvlink(name: str) -> None:
    config = dataclasses.replace(lora_on(name), parallelism=name)
    is_hidden = name == "ddp"
    fast, slow = (
        Estimator(estimator(config)._traces, card, memory_budget_bytes=40 * 10**9).seconds(config)
        for card in (A100, find_gpu("a100-pcie-80gb"))
    )
    assert fast is not None
    assert slow is not None
    assert slow.communication_seconds > 3 * fast.communication_seconds > 0
    # Half and more of DDP's gradients is hidden, of all others nothing.
    assert (slow.hidden_seconds > slow.communication_seconds / 2) == is_hidden
    assert (slow.hidden_seconds > 0) == is_hidden


def test_cp_shares_weights_as_fsdp2_and_a_fourth_of_the_work() -> None:
    config = dataclasses.replace(FSDP2, parallelism="cp")
    (alone, whole), (estimate, share) = predicted(FSDP2), predicted(config)
    assert share.parameters_bytes == whole.parameters_bytes
    assert share.gradients_bytes == whole.gradients_bytes
    assert config.effective_batch_size * 4 == FSDP2.effective_batch_size
    assert 4 * estimate.flops_per_step == pytest.approx(alone.flops_per_step, rel=0.02)
    # Weights go as in FSDP2. In each layer keys and values of all go round twice (8 heads of 64), and the
    # part that is the GPU's own of their gradients four times, in float32.
    tokens, width = FSDP2.micro_batch_size * tiny_model.SEQUENCE_LENGTH, 2 * 8 * 64
    ring = 5 * (2 * 3 * width * tokens // 4 * 2 + 4 * width * tokens // 4 * 4)
    assert share.sent_bytes_per_step == whole.sent_bytes_per_step + ring


def test_a_pipeline_fills_and_then_goes_as_its_slowest_gpu() -> None:
    """Five layers on four GPUs: the first has two of them, the last the head, of 1.4 layers' weights."""
    config = dataclasses.replace(DDP, parallelism="pp", gradient_accumulation_steps=8)
    shared = estimator(config)
    in_turn = dataclasses.replace(config, parallelism="device-map")
    alone = [
        estimator(in_turn).seconds(dataclasses.replace(in_turn, gradient_accumulation_steps=n))
        for n in (4, 8)
    ]
    steps = [
        shared.seconds(dataclasses.replace(config, gradient_accumulation_steps=n)) for n in (4, 8)
    ]
    assert None not in (*alone, *steps)
    each = (alone[1].total_seconds - alone[0].total_seconds) / 4
    slowest = (steps[1].total_seconds - steps[0].total_seconds) / 4
    assert 2 / 7 < slowest / each < 1 / 2
    # There and back between neighbours: the first micro-batch all the way, the others once.
    _, share = predicted(config)
    hidden_bytes = 2 * config.micro_batch_size * tiny_model.SEQUENCE_LENGTH * 1024
    assert share.sent_bytes_per_step == (2 * 8 + 2 * 2) * hidden_bytes
    assert share.layers == (2, 1, 1, 1)
    assert shared.fits(shared.estimate(config))


def test_gpus_of_a_pipeline_hold_their_layers() -> None:
    config = dataclasses.replace(DDP, parallelism="pp", gradient_accumulation_steps=8)
    states = [each.state.parameters_bytes for each in estimator(config).of_each_gpu(config)]
    of_layers = [2 * LAYER + EMBEDDING, LAYER, LAYER, LAYER + TAIL]
    assert states == [2 * elements + BUFFERS_BYTES for elements in of_layers]


def test_fsdp2_that_keeps_weights_gathers_each_once_and_holds_all_by_the_end() -> None:
    estimate, share = predicted(dataclasses.replace(FSDP2, parallelism="fsdp2-no-reshard"))
    resharded, of_resharded = predicted(FSDP2)
    # Three quarters of what is gathered, in 16 bits, and of what is reduced.
    assert share.sent_bytes_per_step == 3 * (P + P) * 2 // 4
    # All weights in 16 bits, the buffer that the head arrives in, and that of the layer before it.
    assert share.gathered_bytes == 2 * P + 2 * TAIL + 2 * LAYER
    assert share.parameters_bytes == of_resharded.parameters_bytes
    assert estimate.peak_allocated_bytes > resharded.peak_allocated_bytes
    assert estimate.step_seconds < resharded.step_seconds


def test_fsdp2_reduces_in_every_micro_step() -> None:
    once, twice = FSDP2, dataclasses.replace(FSDP2, gradient_accumulation_steps=2)
    assert predicted(twice)[1].sent_bytes_per_step == 2 * predicted(once)[1].sent_bytes_per_step
    assert predicted(twice)[1].gradients_bytes == P
    # The second micro-step's shard of a unit exists beside the sum: at most the head's in float32.
    more = predicted(twice)[0].peak_allocated_bytes - predicted(once)[0].peak_allocated_bytes
    assert 0 <= more <= P + TAIL


@pytest.mark.parametrize("accumulation", [2, 5])
def test_fsdp2_that_does_not_sync_keeps_whole_gradients_and_reduces_once(accumulation: int) -> None:
    """Each GPU has all gradients in 16 bits until the last micro-step, which parts them."""
    syncing = dataclasses.replace(FSDP2, gradient_accumulation_steps=accumulation)
    config = dataclasses.replace(syncing, no_sync=True)
    estimate, share = predicted(config)
    of_syncing, share_of_syncing = predicted(syncing)
    # Three quarters of what is gathered in each micro-step, and of what is reduced once.
    assert share.sent_bytes_per_step == 3 * (accumulation * (2 * P - TAIL) + P) * 2 // 4
    less_bytes = share_of_syncing.sent_bytes_per_step - share.sent_bytes_per_step
    assert less_bytes == 3 * (accumulation - 1) * P * 2 // 4
    # 2 bytes a weight on each GPU, where a quarter of 4 bytes is kept otherwise.
    more_bytes = estimate.peak_allocated_bytes - of_syncing.peak_allocated_bytes
    assert P / 2 < more_bytes < 2 * P
    assert share.gradients_bytes == share_of_syncing.gradients_bytes == P
    assert estimate.step_seconds < of_syncing.step_seconds
    priced = estimator(config)
    trace = priced._traces[TraceSpec.of(config)]
    assert isinstance(trace, RankTrace)
    whole_bytes = trace.bytes_of(trace.whole_gradients, 2, 0)
    assert whole_bytes == 2 * P
    again, last = (trace.running_bytes(events, 2, 0) for events in ("again", "next"))
    loss_bytes = trace.bytes_of([trace.loss], 2, 0)
    assert again[-1] == whole_bytes + loss_bytes
    assert last[-1] == trace.bytes_of(trace.gradients, 2, 0) + loss_bytes - whole_bytes
    assert priced.floor_bytes(config) <= estimate.peak_device_bytes


def test_offloaded_gradients_that_are_reduced_once_go_to_the_host_once() -> None:
    syncing = dataclasses.replace(FSDP2, parallelism="fsdp2-offload", gradient_accumulation_steps=4)
    exchanges = [
        estimator(config)._times.exchange(TraceSpec.of(config), 2, 0)
        for config in (syncing, dataclasses.replace(syncing, no_sync=True))
    ]
    each, once = exchanges
    copied = [e.host_copy_bytes_per_micro_step + e.host_copy_bytes_per_step for e in exchanges]
    assert copied[0] == copied[1]
    assert (each.host_copy_bytes_per_step, once.host_copy_bytes_per_step) == (0, 2 * P // 4)


def test_fsdp2_in_bfloat16_has_bfloat16_shards() -> None:
    _, share = predicted(dataclasses.replace(FSDP2, precision="bf16-true"))
    assert share.parameters_bytes == P // 2 + BUFFERS_BYTES
    assert share.gradients_bytes == P // 2


def preferences(parallelism: str) -> tuple[SharedTrace, PerGpu]:
    """A step of TRL's DPOTrainer, with a frozen copy of the model, on two GPUs in bfloat16."""
    config = dataclasses.replace(
        DDP,
        trainer="trl-dpo",
        batching="padded",
        num_gpus=2,
        parallelism=parallelism,
        precision="bf16-mixed" if parallelism.startswith("zero") else "bf16-true",
    )
    length = tiny_model.SEQUENCE_LENGTH
    spec = TraceSpec.of(config)
    traces = trace_all(
        tiny_model.MODEL, "dpo", length, A100, [spec], num_gpus=2, server=here.workers
    )
    estimate = Estimator(traces, A100, memory_budget_bytes=80 * 10**9).estimate(config)
    trace = traces[spec]
    assert isinstance(trace, SharedTrace)
    assert estimate.per_gpu is not None
    return trace, estimate.per_gpu


def test_ddp_leaves_a_reference_whole_and_fsdp2_gathers_its_parts_at_once() -> None:
    whole, _ = preferences("ddp")
    # The model and its copy, a bucket for each gradient; of the copy none is sent.
    assert whole.left_bytes("setup", 2, 0) == pytest.approx(2 * 2 * P + 2 * P, rel=1e-3)
    parts, per_gpu = preferences("fsdp2")
    assert parts.left_bytes("setup", 2, 0) == pytest.approx(2 * P, rel=1e-3)
    # Of all GPUs, and then as weights, beside norm and head, which stay for the backward pass.
    assert per_gpu.gathered_bytes == pytest.approx(2 * 2 * P + 2 * TAIL, rel=1e-3)
    alone = dataclasses.replace(FSDP2, precision="bf16-true", num_gpus=2)
    _, without = predicted(alone)
    # Half of what is gathered: the other GPU's.
    assert per_gpu.sent_bytes_per_step - without.sent_bytes_per_step == pytest.approx(P, rel=1e-3)


def test_zero3_has_parts_of_a_reference_and_holds_the_head_in_each_pass() -> None:
    trace, per_gpu = preferences("zero3")
    held, _ = preferences("zero2")
    sizes = trace.sizes(2, 0)
    category = trace.categories
    alive = most = 0
    for event in trace.first:
        number = event if event >= 0 else ~event
        if category[number] == "parameter":
            alive += sizes[number] if event >= 0 else -sizes[number]
            most = max(most, alive)
    # The head, and the embedding beside it.
    assert most == pytest.approx(2 * 2 * EMBEDDING, rel=1e-3)
    # In 16 bits the model and its copy whole, half of it in float32; then halves, and half a gradient.
    assert held.left_bytes("setup", 2, 0) == pytest.approx(2 * P + 2 * P + 2 * P, rel=1e-3)
    left_bytes = trace.left_bytes("setup", 2, 0) - per_gpu.buffers_bytes
    assert left_bytes == pytest.approx(P + P + 2 * P + P, rel=1e-3)


def test_fsdp2_shares_out_frozen_weights_too() -> None:
    _, share = predicted(LORA)
    _, ddp = predicted(dataclasses.replace(LORA, parallelism="ddp"))
    # Rank 8 on seven linear layers: (in + out) x 8 each, in float32.
    trained = 5 * 8 * (2 * 2048 + 2 * 1536 + 3 * 3840)
    assert ddp.parameters_bytes == 2 * P + 4 * trained + BUFFERS_BYTES
    assert share.parameters_bytes == (2 * P + 4 * trained) // 4 + BUFFERS_BYTES
    assert share.gradients_bytes == trained
    assert ddp.buffers_bytes == 4 * trained


def model_states_bytes(config: TrainConfig) -> int:
    """Weights, gradients (those in float32 for the step too) and optimizer state on one GPU."""
    _, share = predicted(config)
    trace = estimator(config)._traces[TraceSpec.of(config)]
    assert isinstance(trace, RankTrace)
    before, _ = trace.around_update()
    freed = {~event for event in before if event < 0}
    made = [event for event in before if event >= 0 and event not in freed]
    # The last that is made; ZeRO 1 makes its own part of the gradients, too, as the whole ones go.
    step = trace.bytes_of(made[-1:], 2, 0)
    held = share.parameters_bytes + share.gradients_bytes + share.optimizer_state_bytes
    return held + step - BUFFERS_BYTES


@pytest.mark.parametrize(
    ("name", "num_gpus", "expected"),
    [
        # deepspeed 0.19.8 stage_1_and_2.py estimate_zero2_model_states_mem_needs: 2 P + 18 P / N
        # (2 and 4 bytes of gradients, 4 of weights, 8 of moments), 2 P with the optimizer offloaded.
        ("zero2", 4, 2 * P + 18 * P // 4),
        ("zero2", 8, 2 * P + 18 * P // 8),
        ("zero2-offload", 4, 2 * P),
        # The same with whole gradients.
        ("zero1", 4, 2 * P + 2 * P + 16 * P // 4),
        # stage3.py estimate_zero3_model_states_mem_needs has 18 P / N: the 2 bytes of gradients
        # that grad_partitions_flat_buffer keeps are missing from it.
        ("zero3", 4, 20 * P // 4),
        ("zero3", 8, 20 * P // 8),
        ("zero3-offload", 4, 0),
    ],
)
def test_zero_holds_what_deepspeed_says(name: str, num_gpus: int, expected: int) -> None:
    # What its formulas leave out: the largest group is all that has float32 gradients at a time (the
    # norms' are 11 x 1024), and state beside the moments (a step count per group).
    norms = 11 * 1024 * 4
    # They leave out, too, that a GPU keeps all of each weight whose gradient it needs a part of: the first
    # and the last of its part, of which the largest is the head.
    more = 2 * 2 * TAIL if name == "zero2" else 0
    found = model_states_bytes(zero(name, num_gpus))
    assert expected - norms - 1024 <= found <= expected + norms + 1024 + more


def test_zero_offload_takes_host_memory() -> None:
    # estimate_zero3_model_states_mem_needs: 18 bytes a weight on the host (before its factor 1.5).
    assert predicted(zero("zero3-offload"))[1].host_bytes == 18 * P // 4
    assert predicted(zero("zero2"))[1].host_bytes == 0


def test_zero_buckets_have_a_square_of_the_hidden_size() -> None:
    assert predicted(zero("zero2"))[1].buffers_bytes == 2 * 1024**2
    # ZeRO 3 keeps weights of up to 10 x 1024 elements whole: the eleven norms.
    assert predicted(zero("zero3"))[1].buffers_bytes == 2 * 1024**2 + 2 * 11 * 1024


def test_offloading_costs_time() -> None:
    here, _ = predicted(zero("zero2"))
    there, _ = predicted(zero("zero2-offload"))
    assert there.peak_device_bytes < here.peak_device_bytes
    assert here.step_seconds is not None
    assert there.step_seconds is not None
    # 30 bytes an element at 50 GB/s: the host updates what all GPUs train.
    assert there.step_seconds - here.step_seconds > 0.9 * P * 30 / 50e9


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("name", SHARING)
def test_every_event_list_adds_up(name: str, method: str, accumulation: int) -> None:
    config = dataclasses.replace(
        FSDP2 if method == "full" else lora_on(name),
        parallelism=name,
        gradient_accumulation_steps=accumulation,
    )
    priced = estimator(config)
    trace = priced._traces[TraceSpec.of(config)]
    rank = config.lora_rank or 0
    parts_of_it = getattr(trace, "stages", ()) or (trace,)
    losses = 0
    for part in parts_of_it:
        again, later = (part.running_bytes(events, 2, rank) for events in ("again", "next"))
        # A micro-step leaves its gradients and the loss, and ZeRO 1's bucket; one that adds, the loss.
        loss_bytes = part.bytes_of([part.loss] if part.loss is not None else [], 2, rank)
        left_bytes = part.bytes_of(part.left, 2, rank) if isinstance(part, RankTrace) else 0
        assert again[-1] == part.bytes_of(part.gradients, 2, rank) + left_bytes + loss_bytes
        assert later[-1] == loss_bytes
        assert min(again.min(), later.min()) >= 0
        losses += loss_bytes
    # The last of the GPUs that hold different layers has it, else each.
    assert losses == 512 * (len(parts_of_it) if isinstance(parts_of_it[0], RankTrace) else 1)
    estimate = priced.estimate(config)
    parts = dataclasses.asdict(estimate.breakdown)
    assert sum(parts.values()) == estimate.peak_allocated_bytes
    assert parts["rounding_bytes"] >= 0
    assert priced.floor_bytes(config) <= estimate.peak_device_bytes


def test_more_gpus_need_less_of_each() -> None:
    peaks = [
        predicted(dataclasses.replace(FSDP2, num_gpus=num))[0].peak_device_bytes
        for num in (2, 4, 8)
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > peaks[-1]


def test_tokens_are_those_of_all_gpus() -> None:
    estimate, share = predicted(DDP)
    assert estimate.step_seconds is not None
    assert estimate.tokens_per_second == pytest.approx(4 * 2 * 512 / estimate.step_seconds)
    assert share.num_gpus == 4


@pytest.mark.usefixtures("forked_workers")
def test_a_search_shares_out_what_does_not_fit() -> None:
    """Two GPUs: float32 weights, gradients and moments of AdamW do not fit, half of them do."""
    workload = dataclasses.replace(tiny_model.workload(2_600_000_000, ("full",)), num_gpus=2)
    mixed = dataclasses.replace(
        tiny_model.SPACE.methods[0],
        domains={
            **tiny_model.SPACE.methods[0].domains,
            "precision": ("bf16-mixed",),
            "optimizer": ("adamw_torch_fused",),
        },
    )
    space = dataclasses.replace(tiny_model.SPACE, methods=(mixed,))
    answer = predict_best.find(
        tiny_model.MODEL, workload, space, tiny_model.gpu(), allow="numerics"
    ).answer
    assert PARALLELISMS[answer.best.config.parallelism].is_fsdp
    assert answer.best.config.num_gpus == 2
    assert answer.best.config.effective_batch_size == tiny_model.EFFECTIVE_BATCH_SIZE
    assert answer.base.parallelism == "ddp"
