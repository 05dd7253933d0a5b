"""A real SFTTrainer of TRL on the CPU, against the trace of the same step on `meta`.

As in test_trace_is_the_trainer.py, allocations and frees must agree one by one, but for its DIFFERENCES
and these: TRL takes its way for CUDA on both sides, whose Triton kernels are not launched; the places
that a mask becomes are a buffer inside an operation; float32 throughout, as the product that sums
16-bit factors in float32 is CUDA's alone (FlashAttention's stand-in does not mind); the trace counts
every token in the loss, so that what the real run has of those that count is scaled up to it; a number
that TRL makes on the device (8 bytes) is made on `meta` unseen, and left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trace_is_the_trainer import (
    FLASH_2,
    Case,
    _differences,  # noqa: F401
    canonical,
    predicted,
    real_model,
    traced,
)
from test_trace_on_cpu import CPU
from torch.nn.attention import SDPBackend, sdpa_kernel
from trainer_step import NUM_PADDED, NUM_STEPS, ragged, run_trainer, tokenizer

from autotune.worker.trace import attention, sft
from autotune.worker.trace import step as trace_module
from autotune.worker.trace.tracker import Tracker

trl = pytest.importorskip("trl")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning"),
    # TRL's collator, of rows that are tensors already.
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),
]

CASES = {
    "full": Case(architecture="llama", precision="fp32"),
    "full micro-batch 1": Case(architecture="llama", precision="fp32", micro_batch=1),
    "tied head": Case(architecture="qwen2", precision="fp32", micro_batch=3, accumulation=1),
    "lora checkpointed": Case(
        architecture="llama", method="lora", precision="fp32", checkpointing=1
    ),
    "padded": Case(architecture="llama", precision="fp32", batching="padded"),
    "padding-free": Case(
        architecture="llama", precision="fp32", attention=FLASH_2, batching="padding-free"
    ),
    "padding-free micro-batch 1": Case(
        architecture="llama",
        precision="fp32",
        attention=FLASH_2,
        micro_batch=1,
        batching="padding-free",
    ),
    "padded on a CPU": Case(
        architecture="llama",
        precision="bf16-true",
        attention="sdpa",
        batching="padded",
        device=CPU,
    ),
}

COUNTED = {
    # Of two rows of 31 tokens that have one before them, three are padding.
    "padded": (59, 62),
    "padded on a CPU": (59, 62),
    # Of 63, the first of the second sample has none before it.
    "padding-free": (62, 63),
}
"""Tokens in the loss: of the real run, of the trace."""


@pytest.fixture(autouse=True)
def _no_hidden_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "hidden_buffers", lambda *_: ())
    monkeypatch.setattr(sft, "places_of", lambda _: ())
    monkeypatch.setattr(sft, "copy_of", lambda *_: ())
    monkeypatch.setattr(attention, "_require", lambda _: None)


@contextlib.contextmanager
def way_of_cuda() -> Iterator[None]:
    with sft.as_on_cuda(lambda *_: None), sdpa_kernel(SDPBackend.MATH):
        yield


def _modes_see_literals() -> bool:
    """Whether torch.tensor on `meta` is seen by modes, as by those of torch 2.15, and so traced."""
    with Tracker("meta") as tracker:
        return tracker.knows(torch.tensor(0, device="meta"))


def dataset(rows: list[Any]) -> Any:
    from datasets import Dataset

    plain = [{name: list(map(int, column)) for name, column in row.items()} for row in rows]
    return Dataset.from_list(plain).with_format("torch")


@pytest.mark.parametrize("name", CASES)
def test_micro_steps_allocate_and_free_as_traced(name: str, tmp_path: Path) -> None:
    case = dataclasses.replace(CASES[name], trainer="trl-sft")
    arguments: dict[str, Any] = {"bf16": False, "gradient_checkpointing": False}
    if case.checkpointing:
        arguments["gradient_checkpointing"] = True
        arguments["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    rows = None
    if case.batching != "packed":
        num_samples = NUM_STEPS * case.accumulation * case.micro_batch
        num_missing = NUM_PADDED if case.batching == "padded" else 0
        rows = ragged(num_samples, 32, num_missing)
        arguments["train_sampling_strategy"] = "sequential"
        arguments["padding_free"] = case.batching == "padding-free"
        arguments["max_length"] = None
    way = way_of_cuda() if case.device is None else contextlib.nullcontext()
    with way, attention.without_library(case.attention):
        run = run_trainer(
            real_model(case),
            tmp_path,
            case.task,
            sequence_length=32,
            micro_batch_size=case.micro_batch,
            accumulation=case.accumulation,
            trainer_class=trl.SFTTrainer,
            arguments_class=trl.SFTConfig,
            make_dataset=dataset,
            rows=rows,
            more={"processing_class": tokenizer()},
            dataset_kwargs={"skip_prepare_dataset": True},
            **arguments,
        )
    trace = traced(case)
    counted, all_tokens = COUNTED.get(name, (1, 1))
    sizes = [
        t.size_bytes // counted * all_tokens if t.size_bytes % counted == 0 else t.size_bytes
        for t in run.tensors
    ]
    literals = {n for n, operation in run.made_by.items() if operation == "aten::lift_fresh"}
    if _modes_see_literals():
        literals = set()
    for number, window in enumerate(run.micro_steps):
        events = [event for event in run.window(window) if max(event, ~event) not in literals]
        real = canonical(events, sizes)
        expected = predicted(case, trace, is_first=number % case.accumulation == 0)
        assert real == expected, f"micro-step {number}"
    assert len(run.micro_steps) == 2 * case.accumulation


def test_the_loss_makes_no_logits() -> None:
    """Trainer's logits, their float32 copy and its gradient: 128 tokens of 512 words."""
    case = Case(architecture="llama", micro_batch=4)
    peaks = []
    for kind in ("transformers", "trl-sft"):
        trace = traced(dataclasses.replace(case, trainer=kind))
        logits = {n for n, c in enumerate(trace.categories) if c == "logits"}
        peaks.append(len(logits))
    assert peaks[0] > 0
    assert peaks[1] == 0
