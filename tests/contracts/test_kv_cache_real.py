"""The predicted cache against what a real model keeps after a real forward pass, in bytes."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from autotune.catalogue.models import catalogue
from autotune.errors import ConfigError
from autotune.memory.kv_cache import CACHES, kv_cache

BATCH, CONTEXT = 2, 24
SIZES = {"num_hidden_layers": 7, "num_attention_heads": 4, "hidden_size": 64}
SMALL = {**SIZES, "vocab_size": 64, "intermediate_size": 32, "pad_token_id": 0}
MANY_HEADS = {"num_key_value_heads": 2}
MLA = {
    "kv_lora_rank": 24, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 16, "n_shared_experts": 1, "head_dim": 8,
}  # fmt: skip
EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("bloom", {"n_layer": 7, "n_head": 4}),
    ("codegen", {"n_layer": 7, "n_head": 4, "n_embd": 64, "rotary_dim": 8}),
    ("cohere", MANY_HEADS),
    ("cohere2", {**MANY_HEADS, "sliding_window": 9}),
    ("deepseek_v2", MLA),
    ("deepseek_v3", MLA),
    ("falcon", {}),
    ("falcon", {"multi_query": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("gemma", {"num_key_value_heads": 4}),
    ("gemma2", {"sliding_window": 9}),
    ("gemma3_text", {"sliding_window": 9, "head_dim": 16}),
    ("gemma3_text", {"sliding_window": 9, "sliding_window_pattern": 3}),
    ("glm", {}),
    ("glm4", {"head_dim": 16}),
    ("gpt2", {"n_layer": 7, "n_head": 4, "n_embd": 64}),
    ("gpt_bigcode", {"n_layer": 7, "n_head": 4, "n_embd": 64}),
    ("gpt_bigcode", {"n_layer": 7, "n_head": 4, "n_embd": 64, "multi_query": False}),
    ("gpt_neo", {"num_layers": 7, "num_heads": 4, "attention_types": [[["global"], 7]]}),
    ("gpt_neox", {}),
    ("gpt_oss", {**EXPERTS, "num_key_value_heads": 2, "sliding_window": 9}),
    ("gptj", {"n_layer": 7, "n_head": 4, "n_embd": 64, "rotary_dim": 8}),
    ("granite", MANY_HEADS),
    ("llama", {}),
    ("llama", MANY_HEADS),
    ("llama", {"head_dim": 24}),
    ("ministral", {**MANY_HEADS, "sliding_window": 9, "head_dim": 16}),
    ("mistral", {**MANY_HEADS, "sliding_window": 9}),
    ("mistral", {**MANY_HEADS, "sliding_window": None}),
    ("mixtral", {**MANY_HEADS, **EXPERTS}),
    ("mpt", {"n_layers": 7, "n_heads": 4, "d_model": 64}),
    ("nemotron", MANY_HEADS),
    ("olmo", MANY_HEADS),
    ("olmo2", {}),
    ("olmo3", {"sliding_window": 9}),
    ("opt", {"ffn_dim": 32, "word_embed_proj_dim": 64}),
    ("phi", {}),
    ("phi3", {"sliding_window": 9}),
    ("qwen2", MANY_HEADS),
    ("qwen2", {**MANY_HEADS, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}),
    ("qwen3", {"num_key_value_heads": 4}),
    ("qwen3_moe", {**EXPERTS, "moe_intermediate_size": 16}),
    ("smollm3", {}),
    ("stablelm", {"num_key_value_heads": 4}),
    ("starcoder2", MANY_HEADS),
]  # fmt: skip


def real_bytes(model: Any, context: int) -> int:
    """Tokens one by one after a first pass, as `generate` does."""
    tokens = torch.zeros(BATCH, context, dtype=torch.int64)
    # Transformers 5.24 calls it by its new name.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        cache = model(tokens[:, :-2], use_cache=True)[name]
        for position in (-2, -1):
            new = tokens[:, position, None]
            cache = model(new, **{name: cache}, use_cache=True)[name]
    assert isinstance(cache, DynamicCache)
    return sum(
        kept.numel() * kept.element_size()
        for layer in cache.layers
        for kept in (layer.keys, layer.values)
    )


@pytest.mark.parametrize(("model_type", "changes"), CASES)
def test_the_cache_is_that_of_a_real_pass(model_type: str, changes: dict[str, Any]) -> None:
    config = {**SMALL, **changes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config)).eval()
    for context in (6, CONTEXT):  # below and above every window
        found = kv_cache(
            {"model_type": model_type, **config}, batch_size=BATCH, context=context, dtype="float32"
        )
        assert found.total_bytes == real_bytes(model, context), context


def test_every_family_is_tried() -> None:
    assert {model_type for model_type, _ in CASES} == CACHES.keys()


@pytest.mark.parametrize("model_type", CACHES)
def test_a_missing_key_means_what_the_class_says(model_type: str) -> None:
    real = AutoConfig.for_model(model_type)
    for name, value in CACHES[model_type].defaults.items():
        fields = type(real).__dataclass_fields__
        assert fields[name].default == value, name


@pytest.mark.parametrize("entry", catalogue(), ids=lambda entry: entry.short_name)
def test_windows_of_the_catalogue_are_those_of_the_library(entry: Any) -> None:
    from autotune.catalogue import models
    from autotune.catalogue.tasks import tasks_of

    path = Path(models.__file__).with_name("data") / "models" / entry.file
    config = json.loads(path.read_text(encoding="utf-8"))
    if config["model_type"] not in CACHES:
        with pytest.raises(ConfigError, match="not modelled"):
            kv_cache(config, batch_size=1, context=8, dtype="bfloat16")
        sees = models.PICTURES in (tasks_of(config["model_type"]) or ())
        assert sees or models.resolve(entry.hub_id).task != "causal-lm"
        return
    real = AutoConfig.for_model(**config)
    windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=real).layers]
    found = kv_cache(config, batch_size=1, context=8, dtype="bfloat16")
    ours = [each.window for each in found.layers for _ in range(each.num_layers)]
    assert sorted(ours, key=str) == sorted(windows, key=str)
