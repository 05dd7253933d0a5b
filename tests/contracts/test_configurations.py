"""Configurations as Transformers writes and reads them, and the lengths that models have positions for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from autotune.catalogue.models import ModelSource
from autotune.worker.build.model import load_config

BART = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 32, "encoder_ffn_dim": 32}
BERT = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
GPT = {"n_layer": 1, "n_embd": 32, "n_head": 4, "n_positions": 40}


@pytest.mark.parametrize(
    ("kind", "auto", "settings"),
    [
        ("bart", "AutoModelForSeq2SeqLM", {**BART, "max_position_embeddings": 40}),
        ("biogpt", "AutoModelForCausalLM", {**BERT, "max_position_embeddings": 40}),
        ("deberta-v2", "AutoModelForMaskedLM", {**BERT, "max_position_embeddings": 40}),
        ("gptj", "AutoModelForCausalLM", {**GPT, "rotary_dim": 4}),
        ("mpnet", "AutoModelForMaskedLM", {**BERT, "max_position_embeddings": 42}),
    ],
)
def test_a_model_runs_as_many_tokens_as_its_table_has_positions(
    kind: str, auto: str, settings: dict[str, Any]
) -> None:
    config = AutoConfig.for_model(kind, **settings)
    source = ModelSource(
        name=kind,
        config={"model_type": kind, **settings},
        origin="file",
        path=Path("config.json"),
    )
    limit = source.max_sequence_length
    assert limit == 40
    model = getattr(transformers, auto).from_config(config)
    model(input_ids=torch.full((1, limit), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, limit + 1), 5))


def test_a_configuration_with_an_infinite_number_is_read_as_transformers_reads_it(
    tmp_path: Path,
) -> None:
    written = AutoConfig.for_model("mamba2", num_heads=8, head_dim=16, hidden_size=64)
    written.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["time_step_limit"][1] == {"__float__": "Infinity"}
    assert load_config(config).time_step_limit[1] == float("inf")
