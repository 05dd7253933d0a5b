"""The cache of models whose figure is published or follows from one line of arithmetic."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import ConfigError
from autotune.memory.kv_cache import CACHES, KvCache, kv_cache

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
}  # fmt: skip
MISTRAL = {**LLAMA, "model_type": "mistral", "num_key_value_heads": 8, "sliding_window": 4096}


def cache(config: dict[str, Any], context: int = 1000, batch_size: int = 1) -> KvCache:
    return kv_cache(config, batch_size=batch_size, context=context, dtype="bfloat16")


@pytest.mark.parametrize(
    ("config", "bytes_per_token", "what"),
    [
        (LLAMA, 512 * 1024, "2 x 32 heads x 128"),  # Llama 2 7B: half a MiB
        ({**LLAMA, "num_key_value_heads": 8}, 128 * 1024, "2 x 8 heads x 128"),  # Llama 3 8B
        ({**LLAMA, "num_key_value_heads": 8, "head_dim": 64}, 64 * 1024, "2 x 8 heads x 64"),
        (
            {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768},
            12 * 2 * 768 * 2,
            "2 x 12 heads x 64",
        ),
        ({"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 64}, 256, "2 x 1 head x 64"),
        # Falcon 7B and StarCoder: one head for all.
        (
            {"model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544}
            | {"num_attention_heads": 71, "multi_query": True},
            8 * 1024,
            "2 x 1 head x 64",
        ),
        (
            {"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144},
            20 * 1024,
            "2 x 1 head x 128",
        ),
        (
            {"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144}
            | {"multi_query": False},
            48 * 20 * 1024,
            "2 x 48 heads x 128",
        ),
        # Falcon 40B repeats its 8 heads for all 128 before it keeps them.
        (
            {"model_type": "falcon", "num_hidden_layers": 60, "hidden_size": 8192}
            | {"num_attention_heads": 128, "new_decoder_architecture": True, "num_kv_heads": 8},
            60 * 2 * 8192 * 2,
            "2 x 128 heads x 64",
        ),
        # DeepSeek-V3: 70 KB per token, as its report says.
        (
            {"model_type": "deepseek_v3", "num_hidden_layers": 61},
            70_272,
            "(latent 512 + rotated 64)",
        ),
    ],
)
def test_bytes_per_token(config: dict[str, Any], bytes_per_token: int, what: str) -> None:
    found = cache(config, batch_size=3)
    assert found.bytes_per_token == bytes_per_token
    assert found.total_bytes == found.textbook_bytes == 3 * 1000 * bytes_per_token
    assert [layer.what for layer in found.layers] == [what]
    assert found.to_dict()["total_bytes"] == found.total_bytes
    assert found.to_dict()["bytes_per_token"] == bytes_per_token
    assert found.to_dict()["textbook_bytes"] == found.textbook_bytes


def declared(model_type: str) -> dict[str, Any]:
    """Defaults of a model's configuration, read in the source of the installed Transformers."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    name = {"gemma3_text": "gemma3"}.get(model_type, model_type)
    source = Path(spec.origin).parent / "models" / name / f"configuration_{name}.py"
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ClassDef):
            continue
        lines = [each for each in node.body if isinstance(each, ast.Assign | ast.AnnAssign)]
        values = {
            ast.unparse(
                each.targets[0] if isinstance(each, ast.Assign) else each.target
            ): each.value
            for each in lines
        }
        plain = {k: v.value for k, v in values.items() if isinstance(v, ast.Constant)}
        if plain.get("model_type") == model_type:
            return plain
    raise AssertionError(model_type)


@pytest.mark.parametrize("model_type", CACHES)
def test_what_a_configuration_may_leave_out_is_transformers_default(model_type: str) -> None:
    defaults = CACHES[model_type].defaults
    theirs = declared(model_type)
    assert {key: theirs[key] for key in defaults} == defaults
    left_out = {key for key in ("num_key_value_heads", "head_dim") if theirs.get(key)} - {*defaults}
    assert not left_out or CACHES[model_type].elements is not CACHES["llama"].elements


@pytest.mark.parametrize(("context", "num_tokens"), [(4094, 4094), (4095, 4095), (4096, 4095)])
def test_a_window_keeps_what_the_newest_token_sees(context: int, num_tokens: int) -> None:
    found = cache(MISTRAL, context)
    assert found.total_bytes == num_tokens * 128 * 1024
    assert found.textbook_bytes == context * 128 * 1024


QWEN = {**MISTRAL, "model_type": "qwen2", "max_window_layers": 28}
KINDS = ["sliding_attention"] * 5 + ["full_attention"] * 27


@pytest.mark.parametrize(
    ("config", "num_windowed"),
    [
        (MISTRAL, 32),
        ({**MISTRAL, "sliding_window": None}, 0),
        ({**MISTRAL, "layer_types": KINDS}, 5),
        ({**MISTRAL, "model_type": "gemma2"}, 16),  # every second layer sees all
        ({**MISTRAL, "model_type": "gpt_oss"}, 16),
        ({**MISTRAL, "model_type": "cohere2"}, 24),  # every fourth
        ({**MISTRAL, "model_type": "olmo3"}, 24),
        ({**MISTRAL, "model_type": "gemma3_text"}, 27),  # every sixth
        ({**MISTRAL, "model_type": "gemma3_text", "sliding_window_pattern": 4}, 24),
        (QWEN, 0),
        ({**QWEN, "use_sliding_window": True}, 4),  # the layers from the 28th on
        ({**QWEN, "use_sliding_window": True, "max_window_layers": None}, 32),
        ({**QWEN, "model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 1}, 31),
        ({**MISTRAL, "model_type": "qwen3_moe"}, 0),
        ({**MISTRAL, "model_type": "qwen3_moe", "use_sliding_window": True}, 32),
        ({**MISTRAL, "model_type": "smollm3"}, 0),
        # The n-th layer of each n sees all, not the first: of one layer or two more none does.
        ({**MISTRAL, "model_type": "gemma2", "num_hidden_layers": 33}, 17),
        ({**MISTRAL, "model_type": "cohere2", "num_hidden_layers": 35}, 27),
        ({**MISTRAL, "model_type": "gemma3_text", "num_hidden_layers": 35}, 30),
    ],
)
def test_which_layers_have_the_window(config: dict[str, Any], num_windowed: int) -> None:
    layers = {each.window: each.num_layers for each in cache(config).layers}
    assert layers.get(4096, 0) == num_windowed
    assert sum(layers.values()) == config["num_hidden_layers"]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"model_type": "bert"}, "bert is not modelled"),
        ({"layer_types": ["mamba"] * 32}, "layer 0 is not modelled"),
        ({"layer_types": ["full_attention"] * 3}, "layer 3 is not modelled"),
        ({"layer_types": 5}, "layer_types"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads"),
        ({"num_key_value_heads": -2}, "num_key_value_heads"),
        ({"sliding_window": [1]}, "sliding_window"),
        ({"sliding_window": True}, "sliding_window"),
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"num_hidden_layers": 0}, "no num_hidden_layers"),
        ({"hidden_size": 40.96}, "no hidden_size"),
    ],
)
def test_a_configuration_that_does_not_say_is_refused(change: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        cache({**MISTRAL, **change})


def test_false_is_no_window() -> None:
    assert cache({**MISTRAL, "sliding_window": False}).layers[0].window is None
