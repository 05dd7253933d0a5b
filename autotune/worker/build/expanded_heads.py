"""Attention whose key and value heads are expanded before PyTorch's kernel: `sdpa_expanded`.

Where each head of keys serves several of queries, Transformers passes that on to PyTorch (`enable_gqa`),
whose memory-efficient kernel does not know it: cards without FlashAttention, and float32 everywhere, fall
to the unfused one. With expanded heads the memory-efficient kernel runs. The mathematics is the same.

What follows the imports is put into train.py and train_sft.py as it stands (autotune.export.train_py).

Sources: transformers 5.23 integrations/sdpa_attention.py; pytorch v2.13 sdp_utils.cpp,
can_use_mem_efficient_attention; studies/attention-kernels.
"""

from __future__ import annotations

from typing import Any


def expand_key_heads() -> None:
    """Let Transformers know an attention that expands key and value heads before PyTorch's kernel."""
    from types import SimpleNamespace

    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
    ) -> Any:
        groups = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        # Of a module without groups PyTorch is asked for no kernel that knows them.
        ungrouped: Any = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
        return sdpa_attention_forward(ungrouped, query, key, value, attention_mask, **options)

    AttentionInterface.register("sdpa_expanded", attention)
    AttentionMaskInterface.register("sdpa_expanded", sdpa_mask)
