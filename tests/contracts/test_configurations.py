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
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.worker.build.model import build_base, load_config, tied_weight

BART = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 32, "encoder_ffn_dim": 32}
BERT = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
FULL = TraceSpec.of(
    TrainConfig(
        method="full",
        micro_batch_size=2,
        gradient_accumulation_steps=1,
        sequence_length=8,
        precision="fp32",
        optimizer="sgd",
    )
)
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


@pytest.mark.parametrize("says", [True, False, None])
@pytest.mark.parametrize("kind", ["t5", "mt5", "umt5"])
def test_a_head_is_a_weight_of_its_own_where_the_file_and_the_checkpoint_say_so(
    kind: str, says: bool | None, tmp_path: Path
) -> None:
    """Flan-T5's and mT5's are; Transformers forgets what the file says, and sees it in the checkpoint."""
    sizes = {
        "vocab_size": 64,
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 4,
    }
    real = transformers.AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(kind, **sizes))
    if says is False:
        real.lm_head.weight = torch.nn.Parameter(torch.randn(64, 16))
        for tied in ("encoder.embed_tokens", "decoder.embed_tokens"):
            assert real.get_parameter(f"{tied}.weight") is real.shared.weight
        real.all_tied_weights_keys.pop("lm_head.weight")
    real.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["tie_word_embeddings"]
    config |= {} if says is None else {"tie_word_embeddings": says}
    config.pop("scale_decoder_outputs", None)
    path.write_text(json.dumps(config))
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    built = build_base(load_config(config), "seq2seq-lm", FULL)
    assert sizes_of(built) == sizes_of(loaded)
    assert (tied_weight(built) is None) == (says is False)


def sizes_of(model: torch.nn.Module) -> dict[str, int]:
    return {name: weight.numel() for name, weight in model.named_parameters()}
