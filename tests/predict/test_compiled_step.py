"""Prices of a small model's compiled steps, beside those of the eager ones."""

from __future__ import annotations

import dataclasses

import here
import pytest
import tiny_model

from autotune.memory.traces import Trace
from autotune.predict.estimator import Estimator
from autotune.predict.tracing import trace_all
from autotune.records.estimate import TraceSpec
from autotune.space.compilation import why_not_predicted
from autotune.space.config import TrainConfig

pytestmark = pytest.mark.worker

FULL = TrainConfig(
    method="full",
    micro_batch_size=4,
    gradient_accumulation_steps=2,
    sequence_length=tiny_model.SEQUENCE_LENGTH,
    precision="bf16-true",
    optimizer="adamw_torch_fused",
)
CHECKPOINTED = dataclasses.replace(FULL, activation_checkpointing=1)
LORA = dataclasses.replace(
    FULL, method="lora", precision="bf16-autocast", lora_rank=16, lora_targets="all-linear"
)
EAGER = (FULL, CHECKPOINTED, LORA)
MIXED = dataclasses.replace(FULL, precision="bf16-mixed")


def compiled(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, torch_compile="default")


@pytest.fixture(scope="module")
def estimator() -> Estimator:
    specs = {TraceSpec.of(each) for config in EAGER for each in (config, compiled(config))}
    traces = trace_all(
        tiny_model.SHALLOW,
        "causal-lm",
        tiny_model.SEQUENCE_LENGTH,
        tiny_model.gpu(),
        specs,
        server=here.workers,
    )
    assert len(traces) == 2 * len(EAGER)
    return Estimator(traces, tiny_model.gpu(), memory_budget_bytes=100 * 10**9)


@pytest.mark.parametrize("config", EAGER, ids=["full", "checkpointed", "lora"])
def test_a_compiled_step_moves_less_in_fewer_kernels(
    estimator: Estimator, config: TrainConfig
) -> None:
    eager, fused = estimator.estimate(config), estimator.estimate(compiled(config))
    assert not fused.is_bound
    assert fused.peak_allocated_bytes < eager.peak_allocated_bytes
    moved, launched = (
        [
            sum(
                kernel.count * (kernel.bytes_moved if of_bytes else 1)
                for kernel in estimator.kernels(each)
                if kernel.kind not in ("matmul", "attention") and kernel.phase != "update"
            )
            for each in (config, compiled(config))
        ]
        for of_bytes in (True, False)
    )
    assert moved[1] < 0.6 * moved[0]
    assert launched[1] < 0.5 * launched[0]
    assert fused.state == eager.state
    assert fused.parameters == eager.parameters
    # What is multiplied is the same, but for scores that a mask hides.
    assert eager.flops_per_step <= fused.flops_per_step < 1.2 * eager.flops_per_step


def test_a_compiled_time_is_less_sure_and_says_what_compiling_takes(estimator: Estimator) -> None:
    eager, fused = estimator.estimate(FULL), estimator.estimate(compiled(FULL))
    assert eager.compile_seconds is None
    assert fused.compile_seconds is not None
    assert 0 < fused.compile_seconds[0] < fused.compile_seconds[1]
    assert eager.step_spread is not None
    assert fused.step_spread is not None
    assert fused.step_spread > eager.step_spread
    said = fused.to_dict(10**9)
    assert said["compile_seconds"] == list(fused.compile_seconds)
    assert said["bounded_by_eager"] is False


def test_gradients_are_added_when_all_are_there(estimator: Estimator) -> None:
    """The backward pass is one call: beside gradients that exist, all new ones are alive at its end."""
    state = estimator.estimate(compiled(FULL)).state
    trace = estimator.trace_of(compiled(FULL))
    sizes, categories = trace.sizes(FULL.micro_batch_size, 1), trace.categories
    alive = highest = 0
    for event in trace.next:
        number = event if event >= 0 else ~event
        if categories[number] == "gradient":
            alive += sizes[number] if event >= 0 else -sizes[number]
            highest = max(highest, alive)
    assert highest == state.gradients_bytes
    assert alive == 0


@pytest.mark.parametrize(("config", "num_logits"), [(FULL, 3), (LORA, 1)], ids=["full", "lora"])
def test_the_gradient_of_logits_lies_where_they_were_unless_the_caller_has_them(
    estimator: Estimator, config: TrainConfig, num_logits: int
) -> None:
    """In bf16-true the model returns its logits: they, zeros for them and their gradient are there at once.

    Under autocast it returns a copy in float32, and writes the gradient over what it has saved in 16 bits.
    """
    vocabulary = tiny_model.SHALLOW.config["vocab_size"]
    logits_bytes = config.micro_batch_size * config.sequence_length * vocabulary * 2
    assert most_alive(estimator.trace_of(compiled(config)), logits_bytes) == num_logits


def test_a_gradient_is_not_written_over_what_was_scattered() -> None:
    """Inductor changes its own buffer in place: the sum with a tied head's gradient needs another one."""
    config = {**tiny_model.SHALLOW.config, "tie_word_embeddings": True}
    model = dataclasses.replace(tiny_model.SHALLOW, config=config, num_parameters_known=None)
    spec = TraceSpec.of(compiled(MIXED))
    length, gpu = tiny_model.SEQUENCE_LENGTH, tiny_model.gpu()
    trace = trace_all(model, "causal-lm", length, gpu, [spec], server=here.workers)[spec]
    assert isinstance(trace, Trace)
    assert most_alive(trace, config["vocab_size"] * config["hidden_size"] * 4) == 2


def most_alive(trace: Trace, size_bytes: int) -> int:
    """Most tensors of a size that a micro-batch holds at once, beside what was there."""
    sizes = trace.sizes(FULL.micro_batch_size, 1)
    alive = highest = 0
    for event in trace.next:
        if sizes[event if event >= 0 else ~event] == size_bytes:
            alive += 1 if event >= 0 else -1
            highest = max(highest, alive)
    return highest


def test_kernels_are_timed_beside_the_cards_cache_in_the_first_micro_batch(
    estimator: Estimator,
) -> None:
    trace, l2_bytes = estimator.trace_of(compiled(FULL)), tiny_model.gpu().l2_bytes
    sizes = trace.sizes(FULL.micro_batch_size, 1)
    timed = [sizes[event] for event in trace.first if event >= 0 and ~event in trace.first]
    assert timed.count(l2_bytes) > 5
    assert l2_bytes not in [sizes[event] for event in trace.again if event >= 0]
    assert l2_bytes not in [sizes[number] for number in trace.workspaces]


def test_a_step_that_breaks_into_graphs_has_eager_figures_as_a_bound() -> None:
    """GPT-2's loss has no name that Transformers knows, of which it warns: that breaks the graph."""
    model = dataclasses.replace(
        tiny_model.MODEL,
        config={"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 4, "vocab_size": 512},
    )
    both = (FULL, compiled(FULL))
    specs = [TraceSpec.of(config) for config in both]
    length, gpu = tiny_model.SEQUENCE_LENGTH, tiny_model.gpu()
    traces = trace_all(model, "causal-lm", length, gpu, specs, server=here.workers)
    estimator = Estimator(traces, gpu, memory_budget_bytes=100 * 10**9)
    eager, bound = map(estimator.estimate, both)
    assert bound.is_bound
    assert bound.compile_seconds is None
    assert bound.peak_device_bytes == eager.peak_device_bytes
    assert bound.step_seconds == eager.step_seconds
    found = traces[specs[1]]
    assert isinstance(found, Trace)
    assert "breaks its graph" in found.not_compiled


def test_ways_of_compiling_that_are_not_modelled_have_eager_figures() -> None:
    spec = TraceSpec.of(FULL)
    for changes in (
        {"torch_compile": "max-autotune"},
        {"torch_compile_backend": "cudagraphs"},
        {"batching": "padded"},
        {"liger": True},
    ):
        config = dataclasses.replace(compiled(FULL), **changes)  # type: ignore[arg-type]
        assert why_not_predicted(config)
        assert not TraceSpec.of(config).is_compiled
    assert TraceSpec.of(dataclasses.replace(FULL, torch_compile="max-autotune")) == spec
    assert why_not_predicted(compiled(FULL)) == ""
    assert TraceSpec.of(compiled(FULL)) == dataclasses.replace(spec, is_compiled=True)
