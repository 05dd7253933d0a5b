"""What is predicted for `--backend cpu`: a real Trainer's step on the CPU, event for event, and a probe.

Nothing takes the CPU's kernels away: dropout makes its noise in the input's dtype, sdpa picks the kernel
that it picks. What is undone by name is that of test_trace_is_the_trainer.py, but for the dropout.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import test_trace_is_the_trainer as trainer_test
from test_trace_is_the_trainer import (
    SEQUENCE_LENGTH,
    SMALL,
    Case,
    _quiet_libraries,  # noqa: F401
    assert_as_traced,
)

from autotune.catalogue.gpus import cpu_stand_in
from autotune.catalogue.models import resolve
from autotune.common.units import GIB
from autotune.predict.estimator import Estimator
from autotune.predict.tracing import trace_all
from autotune.records.estimate import TraceSpec
from autotune.records.measurement import ProbeSpec
from autotune.space.config import TrainConfig
from autotune.space.trainers import TRAINERS
from autotune.worker.probe.run import probe
from autotune.worker.trace.cuda import Device

pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning")

# The compute capability of gpus.cpu_stand_in: what it would say of a card's kernels must not matter.
CPU = Device(compute_capability=(8, 9), cublas_workspace_bytes=0, backend="cpu")
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 4,
        "n_positions": 64,
        "vocab_size": 512,
    },
    "bert without dropout": {
        **SMALL,
        "model_type": "bert",
        "num_hidden_layers": 4,
        "intermediate_size": 256,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "falcon": {
        **SMALL,
        "model_type": "falcon",
        "num_hidden_layers": 4,
        "multi_query": True,
    },
    "siglip": {
        "model_type": "siglip",
        "vision_config": {
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "image_size": 32,
            "patch_size": 8,
        },
    },
    "t5": {
        "model_type": "t5",
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 4,
        "num_decoder_layers": 4,
        "num_heads": 4,
        "vocab_size": 512,
        "decoder_start_token_id": 0,
    },
}
BERT = Case(architecture="bert", task="masked-lm", attention="sdpa", device=CPU, accumulation=1)
GPT2 = dataclasses.replace(BERT, architecture="gpt2", task="causal-lm")
T5 = dataclasses.replace(BERT, architecture="t5", task="seq2seq-lm", precision="fp32")
LLAMA = dataclasses.replace(GPT2, architecture="llama")
CASES = {
    "bert": BERT,
    "bert fp32": dataclasses.replace(BERT, precision="fp32"),
    "bert eager": dataclasses.replace(BERT, attention="eager"),
    "bert mixed": dataclasses.replace(BERT, precision="bf16-mixed"),
    "bert padded": dataclasses.replace(BERT, batching="padded"),
    "bert without dropout, padded": dataclasses.replace(
        BERT, architecture="bert without dropout", batching="padded"
    ),
    "gpt2": GPT2,
    "gpt2 fp32 accumulating": dataclasses.replace(GPT2, precision="fp32", accumulation=2),
    "gpt2 mixed": dataclasses.replace(GPT2, precision="bf16-mixed"),
    # Its head is torch's own MultiheadAttention.
    "siglip mixed": dataclasses.replace(
        BERT, architecture="siglip", task="image-classification", precision="bf16-mixed"
    ),
    "siglip lora": dataclasses.replace(
        BERT,
        architecture="siglip",
        task="image-classification",
        method="lora",
        precision="bf16-autocast",
    ),
    "t5": T5,
    "t5 mixed": dataclasses.replace(T5, precision="bf16-mixed"),
    "t5 plan": dataclasses.replace(
        T5,
        checkpointing=1,
        settings={"checkpoint_plan": "recompute-products", "checkpoint_layers": 2},
    ),
    "llama expanded heads": dataclasses.replace(LLAMA, precision="fp32", attention="sdpa_expanded"),
    "llama plan": dataclasses.replace(
        LLAMA,
        architecture="llama, wide",
        precision="fp32",
        checkpointing=1,
        settings={"checkpoint_plan": "recompute-products", "checkpoint_layers": 2},
    ),
    "llama fp32": dataclasses.replace(LLAMA, precision="fp32"),
    "llama mixed": dataclasses.replace(LLAMA, precision="bf16-mixed", checkpointing=1),
}


@pytest.fixture(autouse=True)
def _architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, config in CONFIGS.items():
        layers = {"num_hidden_layers": 4} if config["model_type"] == "bert" else {}
        monkeypatch.setitem(trainer_test.CONFIGS, name, config | layers)


@pytest.mark.parametrize("name", CASES)
def test_micro_steps_allocate_and_free_as_traced(name: str, tmp_path: Path) -> None:
    assert_as_traced(CASES[name], tmp_path)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("architecture", "task", "changes"),
    [
        ("gpt2", "causal-lm", {}),
        ("bert", "masked-lm", {"precision": "bf16-true", "batching": "padded"}),
        # It has two tensors of an index in each layer, on the host where the card is another device.
        ("falcon", "causal-lm", {"precision": "bf16-true"}),
        ("t5", "seq2seq-lm", {"method": "lora", "lora_rank": 4, "lora_targets": "all-linear"}),
        # TRL scores every position here, and folds logits in PyTorch.
        ("llama", "dpo", {"precision": "bf16-true", "trainer": "trl-dpo", "batching": "padded"}),
    ],
)
def test_a_probe_needs_what_was_predicted(
    architecture: str, task: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = TrainConfig(
        **{
            "method": "full",
            "micro_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "sequence_length": SEQUENCE_LENGTH,
            "precision": "fp32",
            "optimizer": "adamw_torch_fused",
            "attention": "sdpa",
            **changes,
        }
    )
    if TRAINERS[config.trainer].is_trl:
        pytest.importorskip("trl")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(trainer_test.CONFIGS[architecture]), encoding="utf-8")
    model, card, spec = resolve(str(file)), cpu_stand_in(), TraceSpec.of(config)
    traces = trace_all(model, task, config.sequence_length, card, {spec})
    predicted = Estimator(traces, card, memory_budget_bytes=GIB).estimate(config)
    measured = probe(
        model.config,
        config,
        ProbeSpec(
            task=task,
            backend="cpu",
            memory_budget_bytes=GIB,
            max_seconds=0.1,
            target_spread=0.0,
            max_steps=1,
        ),
    )
    assert (measured.outcome, measured.message) == ("ok", "")
    assert measured.peak_allocated_bytes == pytest.approx(predicted.peak_allocated_bytes, rel=0.005)
