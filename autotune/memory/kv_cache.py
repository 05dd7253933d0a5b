"""Bytes of the KV cache: keys and values of every token so far, from a model's configuration alone.

    2 x batch x layers x key-value heads x head size x context x bytes

is the textbook's; layers with a sliding window keep the window only, multi-query models one head, and
latent attention one vector for all heads. CACHES says which family does what, as Transformers' own
DynamicCache holds it (5.23, cache_utils.py); tests/contracts/test_kv_cache_real.py runs each of them.

Not modelled: the step's activations, a cache quantised or allocated in advance (StaticCache), pages of
serving engines, encoder-decoders, state-space and other recurrent layers (refused, not guessed).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.common import json_records
from autotune.common.dtypes import DTYPE_BYTES
from autotune.errors import ConfigError

Config = Mapping[str, Any]
"""A model's configuration, as it stands in config.json."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCache:
    """Layers that keep equally much per token."""

    num_layers: int
    num_tokens: int
    """Tokens kept of each sequence: the context, or what the window leaves of it."""
    window: int | None
    elements_per_token: int
    """Elements of the keys and values of one layer, per token."""
    what: str
    """How the elements come about, such as `2 x 8 heads x 128`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvCache:
    """Bytes of the cache of a batch of sequences once each has `context` tokens."""

    batch_size: int
    context: int
    dtype: str
    layers: tuple[LayerCache, ...]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token of one sequence adds, no window being full."""
        elements = sum(each.num_layers * each.elements_per_token for each in self.layers)
        return elements * DTYPE_BYTES[self.dtype]

    @property
    def total_bytes(self) -> int:
        elements = sum(
            each.num_layers * each.elements_per_token * each.num_tokens for each in self.layers
        )
        return self.batch_size * elements * DTYPE_BYTES[self.dtype]

    @property
    def textbook_bytes(self) -> int:
        """Bytes of the cache if no layer had a window."""
        return self.batch_size * self.context * self.bytes_per_token

    def to_dict(self) -> dict[str, object]:
        """Return the `kv_cache` of `estimate --json`."""
        return {
            **dataclasses.asdict(self),
            "bytes_per_token": self.bytes_per_token,
            "total_bytes": self.total_bytes,
            "textbook_bytes": self.textbook_bytes,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How models of one type differ from the textbook, and what a missing key means to their class."""

    defaults: Config = field(hash=False)
    windowed: Callable[[Config, int], bool]
    """Whether a layer has the window, where there is one and no `layer_types` says."""
    elements: Callable[[Config], tuple[int, str]]
    """Elements per token and layer, and how they come about."""


def _grouped(config: Config) -> tuple[int, str]:
    """Elements of keys and values, where several heads share them."""
    heads = _count(config, "num_attention_heads", "n_head", "num_heads", "n_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    return _heads(kv_heads, _head_size(config, heads))


def _falcon(config: Config) -> tuple[int, str]:
    """Elements of Falcon's cache: its new architecture repeats what is shared first (modeling_falcon.py)."""
    heads = _count(config, "num_attention_heads", "n_head")
    size = _head_size({**config, "head_dim": None}, heads)
    if config.get("new_decoder_architecture"):
        return _heads(heads, size)
    return _heads(
        1 if config.get("multi_query", True) else config.get("num_kv_heads") or heads, size
    )


def _big_code(config: Config) -> tuple[int, str]:
    heads = _count(config, "num_attention_heads", "n_head")
    return _heads(1 if config.get("multi_query", True) else heads, _head_size(config, heads))


def _latent(config: Config) -> tuple[int, str]:
    """Elements of the compressed keys and values, and of the key's rotated part, for all heads together."""
    latent, rotated = _count(config, "kv_lora_rank"), _count(config, "qk_rope_head_dim")
    return latent + rotated, f"(latent {latent} + rotated {rotated})"


def _heads(num_heads: int, size: int) -> tuple[int, str]:
    shown = f"{num_heads} head{'s' if num_heads > 1 else ''}"
    return 2 * num_heads * size, f"2 x {shown} x {size}"


def _head_size(config: Config, heads: int) -> int:
    size: int = (
        config.get("head_dim") or _count(config, "hidden_size", "n_embd", "d_model") // heads
    )
    return size


def _from_layer(config: Config, layer: int) -> bool:
    return bool(config.get("use_sliding_window")) and layer >= (config["max_window_layers"] or 0)


def _every(period: int) -> Callable[[Config, int], bool]:
    """Return a rule: a window in all but each n-th layer; Gemma 3 and Cohere 2 may name another n."""
    return lambda config, layer: (layer + 1) % (config.get("sliding_window_pattern") or period) != 0


def _family(
    windowed: Callable[[Config, int], bool] = lambda *_: True,
    elements: Callable[[Config], tuple[int, str]] = _grouped,
    **defaults: Any,
) -> Family:
    return Family(defaults=defaults, windowed=windowed, elements=elements)


CACHES: dict[str, Family] = {
    "bloom": _family(),
    "codegen": _family(),
    "cohere": _family(),
    "cohere2": _family(_every(4), sliding_window=4096),
    "deepseek_v2": _family(elements=_latent, kv_lora_rank=512, qk_rope_head_dim=64),
    "deepseek_v3": _family(elements=_latent, kv_lora_rank=512, qk_rope_head_dim=64),
    "falcon": _family(elements=_falcon),
    "gemma": _family(num_key_value_heads=16, head_dim=256),
    "gemma2": _family(_every(2), num_key_value_heads=4, head_dim=256, sliding_window=4096),
    "gemma3_text": _family(_every(6), num_key_value_heads=4, head_dim=256, sliding_window=4096),
    "glm": _family(num_key_value_heads=2, head_dim=128),
    "glm4": _family(num_key_value_heads=2, head_dim=128),
    "gpt2": _family(),
    "gpt_bigcode": _family(elements=_big_code),
    "gpt_neo": _family(),
    "gpt_neox": _family(),
    "gpt_oss": _family(_every(2), num_key_value_heads=8, head_dim=64, sliding_window=128),
    "gptj": _family(),
    "granite": _family(),
    "llama": _family(),
    "ministral": _family(num_key_value_heads=8, sliding_window=4096),
    "mistral": _family(num_key_value_heads=8, sliding_window=4096),
    "mixtral": _family(num_key_value_heads=8),
    "mpt": _family(),
    "nemotron": _family(),
    "olmo": _family(),
    "olmo2": _family(),
    "olmo3": _family(_every(4), sliding_window=4096),
    "opt": _family(),
    "phi": _family(),
    "phi3": _family(),
    "qwen2": _family(
        _from_layer, num_key_value_heads=32, sliding_window=4096, max_window_layers=28
    ),
    "qwen3": _family(
        _from_layer,
        num_key_value_heads=32,
        head_dim=128,
        sliding_window=4096,
        max_window_layers=28,
    ),
    "qwen3_moe": _family(
        lambda config, _: bool(config.get("use_sliding_window")),
        num_key_value_heads=4,
        sliding_window=4096,
    ),
    "smollm3": _family(lambda *_: False, num_key_value_heads=4),
    "stablelm": _family(num_key_value_heads=32),
    "starcoder2": _family(num_key_value_heads=2),
}
"""Families by model_type. A model that is not here has a cache of which nothing is known."""


def kv_cache(config: Config, *, batch_size: int, context: int, dtype: str) -> KvCache:
    """Return the cache of a model for `batch_size` sequences of `context` tokens each.

    Raises ConfigError where the model's family is not in CACHES, or the configuration lacks a key.
    """
    # The part for text of a model that sees may name none.
    kind = str(config.get("model_type", "a model without a model_type"))
    family = CACHES.get(kind)
    if family is None:
        raise ConfigError(
            f"The KV cache of {kind} is not modelled",
            why="It has another kind of cache, or none (an encoder, say)",
            remedy="Leave --kv-cache out",
        )
    known = {**family.defaults, **config}
    _check(known)
    elements, what = family.elements(known)
    num_layers = _count(known, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    windows = [_window(known, family, layer) for layer in range(num_layers)]
    groups = itertools.groupby(sorted(windows, key=lambda window: window or 0))
    return KvCache(
        batch_size=batch_size,
        context=context,
        dtype=dtype,
        layers=tuple(
            LayerCache(
                num_layers=len(list(group)),
                # The newest token joins those that the window keeps (DynamicSlidingWindowLayer).
                num_tokens=context if window is None else min(context, window - 1),
                window=window,
                elements_per_token=elements,
                what=what,
            )
            for window, group in groups
        ),
    )


def _window(config: Config, family: Family, layer: int) -> int | None:
    window: int | None = config.get("sliding_window")
    types = config.get("layer_types")
    if types is None:
        return window if window and family.windowed(config, layer) else None
    kind = types[layer] if layer < len(types) else None
    if kind not in ("full_attention", "sliding_attention"):
        raise ConfigError(
            f"The KV cache of layer {layer} is not modelled",
            why=f"Its kind is {kind!r}",
            remedy="Leave --kv-cache out",
        )
    return window if kind == "sliding_attention" else None


_WHOLE = (
    "head_dim", "max_window_layers", "num_key_value_heads", "num_kv_heads", "sliding_window",
    "sliding_window_pattern",
)  # fmt: skip
"""Keys of whole numbers, each of which may be left out or null."""


def _check(config: Config) -> None:
    """Raise ConfigError for a value that the model's class could not work with either."""
    for name in (*_WHOLE, "layer_types"):
        value = config.get(name)
        if name == "layer_types":
            is_good, words = isinstance(value, list), "a list"
        else:
            is_good = value is False or (type(value) is int and value >= 0)
            words = "a whole number, not negative"
        if value is not None and not is_good:
            raise ConfigError(
                f"{name} of the configuration is {json_records.shown(value)}",
                why=f"It should be {words}: the size of the cache follows from it",
            )


def _count(config: Config, *names: str) -> int:
    for name in names:
        value = config.get(name)
        if type(value) is int and value > 0:
            return value
    raise ConfigError(
        f"The configuration has no {names[0]}", why="The size of the cache follows from it"
    )
