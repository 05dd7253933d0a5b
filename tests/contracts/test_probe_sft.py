"""Real probes of TRL's SFTTrainer on the CPU, against the prediction: bytes as in test_probe.py.

Where TRL has no Triton it folds a chunk's logits in PyTorch, whose temporaries a GPU has in registers:
they are not counted here. In 16 bits the product that sums in float32 is CUDA's alone; on the CPU TRL
makes copies for it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_probe import (
    FULL,
    LORA,
    MODEL,
    QLORA,
    SEQUENCE_LENGTH,
    SPEC,
    _quiet_and_steady,  # noqa: F401
    estimated,
    run,
)
from torch.utils._python_dispatch import _disable_current_modes

from autotune.common.units import MIB
from autotune.memory.traces import Trace
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.worker.build import model as models
from autotune.worker.build.real_model import build
from autotune.worker.probe.run import probe
from autotune.worker.probe.training import build_trainer
from autotune.worker.trace import sft
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.stand_ins import replaced
from autotune.worker.trace.step import trace_step
from autotune.worker.trace.tracker import Tracker

pytest.importorskip("trl")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SFT = dataclasses.replace(FULL, trainer="trl-sft")
CONFIGS = {
    "full": SFT,
    "padded": dataclasses.replace(SFT, batching="padded"),
    "lora plan": dataclasses.replace(
        LORA,
        trainer="trl-sft",
        precision="fp32",
        activation_checkpointing=1,
        checkpoint_plan="recompute",
        checkpoint_layers=2,
    ),
    "micro-batch 1": dataclasses.replace(SFT, micro_batch_size=1),
    "lora checkpointed": dataclasses.replace(
        LORA, trainer="trl-sft", precision="fp32", activation_checkpointing=1
    ),
}


MODULES = ("trl.kernels.chunked_logprob", "trl.kernels.chunked_divergence")


@pytest.fixture(autouse=True)
def _folded_in_registers() -> Iterator[None]:

    def unseen(fold: Callable[..., None]) -> Callable[..., None]:
        def folded(*args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():
                fold(*args, **kwargs)

        return folded

    folds = [
        (kernels, name, unseen(fold))
        for kernels in map(importlib.import_module, MODULES)
        for name, fold in vars(kernels).items()
        if name.endswith("_tile")
    ]
    with replaced(folds):
        yield


@pytest.mark.parametrize("name", CONFIGS)
def test_a_probe_needs_what_was_predicted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS[name]
    measured, predicted = run(config), estimated(config, monkeypatch)
    assert (measured.outcome, measured.message) == ("ok", "")
    assert measured.loss_is_finite
    assert measured.peak_allocated_bytes is not None
    assert measured.peak_reserved_bytes is not None
    difference = measured.peak_allocated_bytes - predicted.peak_allocated_bytes
    # Token ids, labels and a mask, which TRL's collator gives in any case.
    batch_bytes = 3 * config.micro_batch_size * SEQUENCE_LENGTH * 8
    assert 0 <= difference <= 4 * batch_bytes
    assert abs(measured.peak_reserved_bytes - predicted.peak_reserved_bytes) <= 2 * MIB


def test_in_16_bits_a_probe_needs_a_little_more(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(SFT, precision="bf16-mixed")
    measured, predicted = run(config), estimated(config, monkeypatch)
    assert measured.outcome == "ok"
    assert measured.peak_allocated_bytes is not None
    difference = measured.peak_allocated_bytes - predicted.peak_allocated_bytes
    # addmm_(a.float(), b.float()): the gradient of the logits, and the head or what goes into it.
    num_tokens = config.micro_batch_size * SEQUENCE_LENGTH
    copies_bytes = 4 * MODEL["vocab_size"] * (num_tokens + MODEL["hidden_size"])
    assert 0 <= difference <= copies_bytes


def test_a_confirmation_evaluates_and_saves() -> None:
    measured = run(SFT, confirm_steps=2)
    assert (measured.outcome, measured.message, measured.num_steps) == ("ok", "", 2)


@pytest.mark.parametrize("batching", ["padded", "grouped", "padding-free", "by-tokens"])
def test_it_goes_on_with_varied_lengths(batching: str) -> None:
    config = dataclasses.replace(SFT, batching=batching)
    measured = run(config, confirm_steps=1, varied_steps=4, lengths=(4, 40))
    assert (measured.outcome, measured.message, measured.num_varied_steps) == ("ok", "", 4)


@pytest.mark.parametrize(
    ("task", "config"), [("masked-lm", SFT), ("seq2seq-lm", SFT)], ids=["masked-lm", "seq2seq-lm"]
)
def test_it_trains_causal_language_models_alone(task: str, config: TrainConfig) -> None:
    model = {**MODEL, "model_type": "bert" if task == "masked-lm" else "t5"}
    measured = probe(model, config, dataclasses.replace(SPEC, task=task))
    assert measured.outcome == "invalid"
    assert measured.message == "SFTTrainer trains causal language models only"


QUANTISED = {
    "a prompt": {
        "method": "p_tuning",
        "lora_rank": None,
        "lora_targets": None,
        "num_virtual_tokens": 4,
    },
    "a magnitude": {"method": "qlora", "lora_variant": "dora"},
}


@pytest.mark.parametrize("adapter", QUANTISED)
def test_trl_casts_what_trains_on_a_quantised_base(adapter: str, tmp_path: Path) -> None:
    """All of it but DoRA's magnitudes, whatever the method."""
    config = dataclasses.replace(
        LORA,
        trainer="trl-sft",
        precision="bf16-autocast",
        quantization="nf4",
        **QUANTISED[adapter],
    )
    hf_config = models.load_config(MODEL)

    def built() -> Any:
        return build(hf_config, SPEC.task, config, torch.device("cpu"))

    def dtypes(model: Any) -> dict[str, torch.dtype]:
        return {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}

    ours = built()
    assert set(dtypes(ours).values()) == {torch.float32}
    for name, parameter in ours.named_parameters():
        if sft.is_cast(name, parameter):
            parameter.data = parameter.data.to(torch.bfloat16)
    theirs = dtypes(build_trainer(built(), hf_config, config, SPEC, str(tmp_path)).model)
    assert dtypes(ours) == theirs
    assert torch.bfloat16 in theirs.values()
    kept = {name for name, dtype in theirs.items() if dtype is torch.float32}
    assert bool(kept) == (adapter == "a magnitude")


@pytest.mark.parametrize("trainer", ["transformers", "trl-sft"])
def test_an_adapter_is_cast_beside_a_quantised_base_as_traced(trainer: str, tmp_path: Path) -> None:
    """What casts leave between the weights that stay is lost to large tensors: 2 % at rank 256."""
    rank = 7
    config = dataclasses.replace(QLORA, trainer=trainer, lora_rank=rank)
    hf_config = models.load_config(MODEL)
    tracker = Tracker("cpu")
    with tracker:
        model = build(hf_config, SPEC.task, config, torch.device("cpu"))
        build_trainer(model, hf_config, config, SPEC, str(tmp_path))
    tensors = tracker.recording.tensors
    thin = [n for n, each in enumerate(tensors) if rank in each.shape and len(each.shape) == 2]
    # PEFT makes each in float32 on the host first, which is a card's neighbour and the CPU itself here.
    num_weights = sum(rank in each.shape for each in model.parameters())
    on_host = [n for n in thin if tensors[n].dtype == "float32"][:num_weights]
    real = [
        (event >= 0, tensors[number].size_bytes)
        for event in tracker.recording.events
        if (number := max(event, ~event)) in thin and number not in on_host
    ]

    device = Device(compute_capability=(8, 0), cublas_workspace_bytes=0)
    answer = trace_step(
        hf_config,
        SPEC.task,
        TraceSpec.of(config),
        sequence_length=config.sequence_length,
        device=device,
    )
    trace = Trace(json.loads(json.dumps(answer)))
    sizes = trace.sizes(config.micro_batch_size, rank)
    events = trace.setup[trace.num_prepared_events :]
    assert real == [(event >= 0, sizes[max(event, ~event)]) for event in events]
    casts = sum(allocates for allocates, _ in real) / num_weights
    assert casts == (3 if trainer == "trl-sft" else 2)
