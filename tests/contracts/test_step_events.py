"""What a step's events have beside the traced micro-steps: emptied caches, state, gradients given up."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from autotune.memory.allocator import EMPTY_CACHE
from autotune.memory.traces import Trace
from autotune.predict import steps as steps_module
from autotune.predict.optimizer_update import priced_update
from autotune.predict.steps import StepPart, Steps, first_steps
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.space.optimizers import OPTIMIZERS
from autotune.worker.build import model as models
from autotune.worker.trace import cuda
from autotune.worker.trace import step as trace_module
from autotune.worker.trace.cuda import Device

H200 = Device(compute_capability=(9, 0), cublas_workspace_bytes=33_554_432, num_sms=132)
SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 160,
}


def steps_of(
    optimizer: str,
    precision: str = "bf16-true",
    empty_cache_steps: int = 0,
    num_micro_batches: int = 1,
) -> Steps:
    config = TrainConfig(
        method="full",
        micro_batch_size=2,
        gradient_accumulation_steps=num_micro_batches,
        sequence_length=32,
        precision=precision,
        optimizer=optimizer,
        torch_empty_cache_steps=empty_cache_steps,
    )
    answer: dict[str, Any] = trace_module.trace_step(
        models.load_config(SMALL),
        "causal-lm",
        TraceSpec.of(config),
        sequence_length=32,
        device=H200,
    )
    trace = Trace(answer)
    update = priced_update(OPTIMIZERS[optimizer], trace.trainable(0), scaled=False)
    return first_steps(trace, config, update)


def is_emptied(part: StepPart) -> bool:
    return EMPTY_CACHE in part.events


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "lomo"])
@pytest.mark.parametrize(
    ("every", "emptied"), [(0, []), (1, list(range(8))), (2, [0, 2, 4, 6]), (5, [0, 5, 10])]
)
def test_the_cache_is_emptied_in_some_steps(optimizer: str, every: int, emptied: list[int]) -> None:
    """And always before the first: Accelerator.free_memory in Trainer._inner_training_loop. A step that
    empties it with the optimizer's state there is replayed in any case, and one after it."""
    steps = steps_of(optimizer, empty_cache_steps=every)
    setup, *others = steps.parts
    assert setup.step == -1
    assert is_emptied(setup)
    assert [part.step for part in others if is_emptied(part)] == emptied
    assert steps.sure_step == (every if every > 1 else 0)
    numbers = sorted({part.step for part in others})
    assert len(numbers) == 8
    assert numbers[-6:] == list(range(numbers[-6], numbers[-6] + 6))


def test_a_steps_micro_batches_are_there_until_the_next_are() -> None:
    """transformers 5.23 Trainer._run_epoch: `batch_samples` is all of a step's, until it is the next's."""
    steps = steps_of("adamw_torch_fused", num_micro_batches=3)
    events = steps.events()
    fetched = [part.events[:6] for part in steps.parts if part.phase == "forward"]
    assert len(fetched) == 8
    for tensors in fetched:
        assert [steps.sizes[tensor] for tensor in tensors] == 3 * 2 * [2 * 32 * 8]
    for tensors, later in itertools.pairwise(fetched):
        freed = [events.index(~tensor) for tensor in tensors]
        assert events.index(later[-1]) < min(freed)
    assert not {~tensor for tensor in fetched[-1]} & set(events)


def test_many_micro_batches_take_the_memory_of_all_and_few_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = steps_of("adamw_torch_fused", num_micro_batches=20_000)
    monkeypatch.setattr(steps_module, "_NUM_ALONE", 20_000)
    every = steps_of("adamw_torch_fused", num_micro_batches=20_000)
    assert len(few.events()) < len(every.events()) / 20
    together, alone = few.replay(), every.replay()
    assert together.peak_allocated_bytes == alone.peak_allocated_bytes
    # Token ids and labels, each with a segment of 2 MiB that the other does not fill.
    assert abs(together.peak_reserved_bytes - alone.peak_reserved_bytes) <= 2 * 2 * 2**20


@pytest.mark.parametrize("optimizer", ["adafactor", "galore_adamw", "apollo_adamw"])
def test_what_each_step_makes_anew_is_freed_once(optimizer: str) -> None:
    """In eight steps: a part of the state, the norm of the gradients, the loss."""
    events = steps_of(optimizer, empty_cache_steps=2).events()
    alive = set[int]()
    for event in events:
        if event >= 0:
            assert event not in alive
            alive.add(event)
        elif event != EMPTY_CACHE:
            alive.remove(~event)


@pytest.mark.parametrize(("optimizer", "phase"), [("adagrad", "set-up"), ("rmsprop", "optimizer")])
def test_adagrad_makes_its_state_when_it_is_made(optimizer: str, phase: str) -> None:
    """torch 2.13 optim/adagrad.py, __init__; rmsprop.py, _init_group in the first step."""
    steps = steps_of(optimizer)
    made_in = {
        part.phase
        for part in steps.parts
        if any(e >= 0 and steps.categories[e] == "optimizer_state" for e in part.events)
    }
    assert made_in == {phase}


@pytest.mark.parametrize(("precision", "copies_first"), [("bf16-true", True), ("fp32", False)])
def test_lomo_gives_a_gradient_up_for_its_copy(precision: str, copies_first: bool) -> None:
    """lomo-optim 0.1 adalomo.py: `grad_fp32 = p.grad.to(torch.float32)`, then `p.grad = None`."""
    steps = steps_of("adalomo", precision)
    events = steps.events()
    gradients = {e for e in events if e >= 0 and steps.categories[e] == "gradient"}
    head = max(gradients, key=lambda gradient: steps.sizes[gradient])
    freed = events.index(~head)
    copy_bytes = 160 * 64 * 4
    before, after = steps.sizes[events[freed - 1]], steps.sizes[events[freed + 1]]
    assert (before if copies_first else after) == copy_bytes


@pytest.mark.parametrize(
    ("family", "checkpointing", "num_kept"), [("qwen2", 0, 1), ("qwen2", 1, 2), ("llama", 1, 0)]
)
def test_an_older_torch_keeps_a_workspace_for_products_with_a_bias(
    family: str, checkpointing: int, num_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 MiB on each thread that adds one, as on the H100: Qwen2 has biases, Llama has none; only what is
    recomputed adds one on autograd's thread."""
    monkeypatch.setattr(cuda, "WORKSPACES_ARE_KEPT", True)
    monkeypatch.setattr(cuda, "_KEEPS_ONE_FOR_BOTH", False)
    config = TrainConfig(
        method="full",
        micro_batch_size=2,
        gradient_accumulation_steps=1,
        sequence_length=32,
        precision="bf16-true",
        optimizer="adamw_torch",
        activation_checkpointing=checkpointing,
    )
    answer = trace_module.trace_step(
        models.load_config(SMALL | {"model_type": family}),
        "causal-lm",
        TraceSpec.of(config),
        sequence_length=32,
        device=H200,
    )
    trace = Trace(answer)
    sizes = trace.sizes(2, 0)
    kept = [int(sizes[number]) for number in trace.workspaces]
    assert sorted(kept) == num_kept * [2**20] + 2 * [H200.cublas_workspace_bytes]
