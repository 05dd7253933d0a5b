"""A model that cannot be trained here is refused with what it is, and what can be done."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from autotune.catalogue.embeddings import BEHIND
from autotune.catalogue.tasks import EMBEDDINGS, PICTURES, SEEING, TASKS, Task, tasks_of
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.worker.build.embedder import embedder
from autotune.worker.build.model import CrashedStep, UnsupportedModel, build_base, load_config
from autotune.worker.build.pictures import FAMILIES
from autotune.worker.build.quantize import quantize
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.step import trace_step

HERE = Device(compute_capability=(8, 0), cublas_workspace_bytes=0)
PLAIN = TrainConfig(
    method="full",
    micro_batch_size=1,
    gradient_accumulation_steps=1,
    sequence_length=8,
    precision="fp32",
    optimizer="sgd",
)


@pytest.mark.parametrize(
    ("config", "task", "said"),
    [
        ({"model_type": "t5"}, "causal-lm", r"another task may be its own \(--task\)"),
        ({"model_type": "qwen2_audio"}, "seq2seq-lm", "it is no encoder with a decoder"),
        ({"model_type": "not-out-yet"}, "causal-lm", "pip install --upgrade transformers"),
    ],
)
def test_it_says_what_the_model_is(config: dict[str, Any], task: str, said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        build_base(load_config(config), task, TraceSpec.of(PLAIN))


def test_types_that_see_are_those_that_have_pictures() -> None:
    assert set(SEEING) == set(FAMILIES)


ANY_TYPE = [row for row in TASKS.values() if not row.families and row.name != PICTURES]


@pytest.mark.parametrize("row", ANY_TYPE)
def test_tasks_of_a_type_are_those_that_transformers_has_classes_for(row: Task) -> None:
    classes = set(getattr(transformers, row.model_class)._model_mapping.keys())
    known = {kind for kind in CONFIG_MAPPING_NAMES if tasks_of(kind) is not None}
    found = {kind for kind in known if row.name in tasks_of(kind)}
    assert found == {kind for kind in known if row.has_loss and CONFIG_MAPPING[kind] in classes}


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("recurrent_gemma", {"activation_checkpointing": 1}, "train it without checkpointing"),
        ("ibert", {}, "makes its buffer .*x_min anew"),
        ("cpmant", {"activation_checkpointing": 1}, "Transformers checkpoints none of its layers"),
        (
            "phimoe",
            {"method": "lora", "lora_rank": 8, "lora_targets": "all-linear"},
            "one of these returns more, as a router of experts does",
        ),
    ],
)
def test_a_step_that_cannot_be_run_says_why(kind: str, changes: dict[str, Any], said: str) -> None:
    small = {"num_hidden_layers": 3, "hidden_size": 32, "lru_width": 32, "vocab_size": 64}
    spec = dataclasses.replace(TraceSpec.of(PLAIN), attention="eager", **changes)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    config = load_config({"model_type": kind, **heads, **small})
    with pytest.raises(UnsupportedModel, match=said) as refused:
        trace_step(config, tasks_of(kind)[0], spec, sequence_length=8, device=HERE)
    assert not isinstance(refused.value, CrashedStep)


@pytest.mark.parametrize(
    ("kind", "task", "said"),
    [
        # Its layers are of a class of its own (FalconLinear), which Transformers leaves as it is.
        ("falcon", "causal-lm", "none of its layers would be quantised"),
        ("wavlm", "ctc", "its attention takes the weights of its layers as they lie"),
        ("layoutlmv3", "token-classification", "takes the weights of its layers as they lie"),
    ],
)
def test_a_model_that_cannot_be_quantised_has_no_qlora(kind: str, task: str, said: str) -> None:
    spec = TraceSpec.of(
        dataclasses.replace(
            PLAIN, method="qlora", lora_rank=8, lora_targets="all-linear", quantization="nf4"
        )
    )
    config = load_config({"model_type": kind, "hidden_size": 64, "num_attention_heads": 4})
    if kind != "falcon":
        spec = dataclasses.replace(spec, attention="eager")
    with pytest.raises(UnsupportedModel, match=said):
        quantize(build_base(config, task, spec), task, spec)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "t5"}, "an encoder beside a decoder is not trained to embed texts here"),
        (
            {"model_type": "bert", BEHIND: {"others": "sentence_transformers.models.Router"}},
            "its vectors go through sentence_transformers.models.Router: pooling, plain dense layers",
        ),
        (
            {"model_type": "bert", BEHIND: {"layers": [{"dimension": 5}]}},
            "a module behind it reads vectors of 5 numbers, and is given 768",
        ),
        ({"model_type": "bert", BEHIND: {"pooling": "median"}}, "Invalid pooling mode: 'median'"),
    ],
)
def test_an_embedder_says_what_it_is_made_of(config: dict[str, Any], said: str) -> None:
    pytest.importorskip("sentence_transformers")
    small = {"num_hidden_layers": 1, "num_layers": 1, "vocab_size": 8}
    model = build_base(load_config({**small, **config}), EMBEDDINGS, TraceSpec.of(PLAIN))
    with pytest.raises(UnsupportedModel, match=said):
        embedder(model, torch.device("meta"))
