"""A probe's code for CUDA from its first line to its last, on the CPU, with torch.cuda made up.

It shows that the pieces go together: the memory, the clock, the checks, the ends. Of a card it shows nothing.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
from made_up_card import CONTEXT, OTHERS, Card, made_up_card
from transformers import Trainer

from autotune.catalogue import host_memory
from autotune.common.units import GIB, MIB
from autotune.records.measurement import Measurement, ProbeSpec
from autotune.space.config import TrainConfig
from autotune.worker.build.checkpoint_plan import HostMemory
from autotune.worker.probe import memory
from autotune.worker.probe.run import probe

pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator"),
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU"),
]

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 32,
}
FULL = TrainConfig(
    method="full",
    micro_batch_size=1,
    gradient_accumulation_steps=3,
    sequence_length=16,
    precision="bf16-true",
    optimizer="adamw_torch_fused",
)
SPEC = ProbeSpec(
    task="causal-lm", backend="cuda", memory_budget_bytes=12 * GIB, max_seconds=1.0, max_steps=2
)
LLAMA_PAGED_BYTES = 2 * 4 * (3 * 256 * 512 + 2 * 1000 * 256)
"""Two float32 moments of what has 1e5 elements: the MLP's three matrices, the embedding, the head."""


class Event:
    """torch.cuda.Event, on the host's clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self._seconds = 0.0

    def record(self) -> None:
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        return self._seconds > 0

    def synchronize(self) -> None:
        assert self.query()

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later._seconds - self._seconds)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = made_up_card(monkeypatch)
    card.reserve(GIB)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "made up")
    make = memory.CudaMemory.__init__

    def make_on_cpu(device_memory: Any, *arguments: Any, **named: Any) -> None:
        make(device_memory, *arguments, **named)
        device_memory.device = torch.device("cpu")

    monkeypatch.setattr(memory.CudaMemory, "__init__", make_on_cpu)
    return card


def run(config: TrainConfig = FULL, **spec: Any) -> Measurement:
    return probe(MODEL, config, dataclasses.replace(SPEC, **spec))


@pytest.mark.parametrize("spec", [{}, {"confirm_steps": 2}])
def test_a_probe_comes_to_its_end(card: Card, spec: dict[str, int]) -> None:
    measured = run(**spec)
    assert (measured.outcome, measured.problem, measured.num_steps) == ("ok", "", 2)
    assert (measured.peak_reserved_bytes, measured.nontorch_bytes) == (GIB, CONTEXT)
    assert measured.tokens_per_second is not None
    assert measured.fingerprint.device == "made up"


def test_what_varied_lengths_hold_and_flush_is_counted_by_itself(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator holds 3 GiB at full length, of which 1 is given back; then 5, after two retries."""
    card.reserve(3 * GIB)
    run_step, lengths = Trainer.training_step, []

    def training_step(self: Any, model: Any, inputs: Any, *rest: Any) -> Any:
        lengths.append(inputs["input_ids"].shape[1])
        if lengths[-1] < FULL.sequence_length and card.retries == 1:
            assert card.calls == ["empty_cache"]
            assert card.peak_bytes == 2 * GIB
            card.reserve(5 * GIB)
            card.retries = 3
        return run_step(self, model, inputs, *rest)

    def empty_cache() -> None:
        card.calls.append("empty_cache")
        card.reserved_bytes = 2 * GIB

    monkeypatch.setattr(Trainer, "training_step", training_step)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    card.retries = 1  # Before the model was built: none of its own.
    config = dataclasses.replace(FULL, batching="padded")
    measured = run(config, confirm_steps=2, varied_steps=4)
    assert (measured.outcome, measured.num_varied_steps) == ("ok", 4)
    assert measured.full_length_device_bytes == 3 * GIB + CONTEXT
    assert measured.peak_device_bytes == measured.varied_device_bytes == 5 * GIB + CONTEXT
    assert measured.num_varied_retries == measured.num_alloc_retries == 2
    assert measured.is_in_pieces
    assert not measured.fits


def raises_in_a_step(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """In the third step's second micro-step."""
    run_step, calls = Trainer.training_step, iter(range(100))

    def training_step(*arguments: Any, **named: Any) -> Any:
        if next(calls) == 5:
            raise error
        return run_step(*arguments, **named)

    monkeypatch.setattr(Trainer, "training_step", training_step)


def test_out_of_memory_under_the_cap(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    # pytorch c10/cuda/CUDACachingAllocator.cpp, with what it says of CUDA graphs' pools
    text = (
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 24.00 GiB of "
        "which 9.10 GiB is free. Including non-PyTorch memory, this process has 11.90 GiB memory in "
        "use. 11.50 GiB allowed; Of the allocated memory 9.50 GiB is allocated by PyTorch, with 24.00 "
        "MiB allocated in private pools (e.g., CUDA Graphs), and 512.00 MiB is reserved by PyTorch but "
        "unallocated."
    )
    raises_in_a_step(monkeypatch, torch.OutOfMemoryError(text))
    measured = run()
    assert (measured.outcome, measured.excess_bytes) == ("oom", GIB)


def test_a_broken_context_is_no_outcome(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process must end: nothing that it said of CUDA afterwards could be believed."""
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    raises_in_a_step(monkeypatch, error)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run()


NO_HANDLE = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
ALL = 24 * GIB - OTHERS - CONTEXT


def test_a_handle_finds_no_room_on_a_full_card(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    card.reserve(ALL - 16 * MIB)
    raises_in_a_step(monkeypatch, RuntimeError(NO_HANDLE))
    measured = run(memory_budget_bytes=24 * GIB)
    assert measured.outcome == "oom"
    assert measured.message == f"{NO_HANDLE} (the card had 16.0 MiB left)"
    assert measured.over_budget_bytes == 1


def test_a_handle_that_fails_with_room_is_no_outcome(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    card.reserve(ALL - GIB)
    raises_in_a_step(monkeypatch, RuntimeError(NO_HANDLE))
    with pytest.raises(RuntimeError, match="NOT_INITIALIZED"):
        run(memory_budget_bytes=24 * GIB)


def test_a_broken_context_does_not_say_what_is_left(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index out of bounds: every call fails from then on, and cuBLAS may be the first to say so."""

    def asked(*_: object) -> tuple[int, int]:
        raise RuntimeError("CUDA error: device-side assert triggered")

    def training_step(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(torch.cuda, "mem_get_info", asked)
        raise RuntimeError(NO_HANDLE)

    card.reserve(ALL)
    monkeypatch.setattr(Trainer, "training_step", training_step)
    with pytest.raises(RuntimeError, match="NOT_INITIALIZED"):
        run(memory_budget_bytes=24 * GIB)


@pytest.mark.parametrize(
    ("optimizer", "left_bytes", "outcome"),
    [
        ("paged_adamw_32bit", LLAMA_PAGED_BYTES - 1, "oom"),
        ("paged_adamw_32bit", LLAMA_PAGED_BYTES, "ok"),
        ("paged_adamw_32bit", None, "ok"),
        ("adamw_bnb_8bit", 0, "ok"),
        # The embedding's state stays in float32, a byte for each other moment.
        ("paged_adamw_8bit", 2 * (4 * 256_000 + 256_000 + 3 * 256 * 512) - 1, "oom"),
        ("paged_lion_32bit", LLAMA_PAGED_BYTES // 2 - 1, "oom"),
    ],
)
def test_no_more_is_paged_than_the_host_holds(
    card: Card,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: str,
    left_bytes: int | None,
    outcome: str,
) -> None:
    monkeypatch.setattr(host_memory, "left_bytes", lambda: left_bytes)
    measured = run(dataclasses.replace(FULL, optimizer=optimizer))
    assert measured.outcome == outcome
    if outcome == "oom":
        assert measured.message.startswith(f"{optimizer} pages ")
        assert "MiB of state, and the host has" in measured.message
        assert measured.over_budget_bytes == 1


# The one layer is given 17 tokens of 256 numbers in bfloat16; torch pins the next power of two.
@pytest.mark.parametrize(
    ("left_bytes", "outcome"),
    [(2 * 17 * 256, "oom"), (2 * 32 * 256 - 1, "oom"), (2 * 32 * 256, "ok"), (None, "ok")],
)
def test_no_more_is_parked_than_the_host_holds(
    card: Card, monkeypatch: pytest.MonkeyPatch, left_bytes: int | None, outcome: str
) -> None:
    num_asked = 0

    def left() -> int | None:
        nonlocal num_asked
        num_asked += 1
        return left_bytes

    monkeypatch.setattr(host_memory, "left_bytes", left)
    # Without a card nothing can be pinned; it is parked all the same.
    monkeypatch.setattr(torch.cpu, "is_available", lambda: False)
    config = dataclasses.replace(
        FULL, sequence_length=17, activation_checkpointing=1, activation_offloading=True
    )
    measured = run(config)
    assert measured.outcome == outcome
    if outcome == "oom":
        assert measured.message.startswith("activation offloading pins 16.0 KiB more, and the host")
    # Once for a paged optimizer's, once for what the first step parks.
    assert num_asked == 2


@pytest.mark.parametrize(
    ("left_bytes", "sends", "outcome", "message"),
    [
        (2 * 16 * 512, True, "ok", ""),
        (2 * 16 * 512 - 1, True, "oom", "activation offloading pins 16.0 KiB more, and the host"),
        (None, False, "invalid", "nothing waited in host memory of what layers are to offload"),
    ],
)
def test_a_plan_that_offloads_is_checked(
    card: Card,
    monkeypatch: pytest.MonkeyPatch,
    left_bytes: int | None,
    sends: bool,
    outcome: str,
    message: str,
) -> None:
    monkeypatch.setattr(host_memory, "left_bytes", lambda: left_bytes)
    if not sends:
        monkeypatch.setattr(HostMemory, "copy_out", lambda *_: None)
    plan = {"checkpoint_plan": "offload", "checkpoint_layers": 3}
    config = dataclasses.replace(FULL, activation_checkpointing=1, **plan)
    measured = probe({**MODEL, "num_hidden_layers": 4}, config, SPEC)
    assert (measured.outcome, measured.message[: len(message)]) == (outcome, message)
