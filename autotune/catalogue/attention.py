"""The implementations of attention, and which families Transformers has no fast one for.

Families are named by `model_type`. Facts are those of Transformers 5.23, as its classes for language models
and for classification say; tests/contracts/test_attention_support.py asks the installed ones.
"""

from __future__ import annotations

ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
FLASH_ATTENTIONS = ("flash_attention_2", "flash_attention_3")

WITHOUT_SDPA = frozenset({
    "big_bird", "bigbird_pegasus", "bloom", "canine", "codegen", "convbert", "cpmant",
    "deberta", "deberta-v2", "deepseek_v4", "falcon_mamba", "flaubert", "flint", "fnet", "fsmt",
    "funnel", "gemma2", "git", "got_ocr2", "gpt_neo", "gpt_neox_japanese", "gpt_oss", "gptj",
    "granite_swa", "granitemoe_swa", "hy_v4", "ibert", "inkling2_text", "layoutlmv2",
    "layoutlmv3", "led", "lilt", "longformer", "longt5", "luke", "mamba", "mamba2", "markuplm",
    "megatron-bert", "mimo_v2_flash", "mpnet", "mpt", "mra", "mvp", "nllb-moe", "nystromformer",
    "openai-gpt", "pegasus_x", "perceiver", "prophetnet", "reformer", "rembert", "roformer",
    "rwkv", "squeezebert", "switch_transformers", "t5gemma", "tapas", "trocr", "vaultgemma",
    "xglm", "xlm", "xlnet", "xlstm", "yoso",
})  # fmt: skip
"""Families without sdpa (`_supports_sdpa`): soft caps, sinks, relative positions, or no attention at all."""

WITHOUT_FLASH = frozenset({
    "axk2", "big_bird", "bigbird_pegasus", "bloom", "blt", "canine", "codegen", "convbert",
    "cpmant", "deberta", "deberta-v2", "deepseek_v32", "deepseek_v4", "doge", "dots3_note",
    "dots3_note_text", "falcon_mamba", "flaubert", "fnet", "fsmt", "funnel", "git",
    "glm_moe_dsa", "got_ocr2", "gpt_neox_japanese", "granite_speech", "granite_speech_plus",
    "hy_v4", "ibert", "inkling2_text", "inkling_text", "layoutlm", "layoutlmv2", "layoutlmv3",
    "led", "lilt", "llama4", "llama4_text", "longformer", "longt5", "luke", "mamba", "mamba2",
    "markuplm", "megatron-bert", "minimax_m3_vl_text", "mllama", "mpnet", "mpt", "mra", "mt5",
    "mvp", "nllb-moe", "nystromformer", "openai-gpt", "perceiver", "prophetnet", "qwen4_exp",
    "qwen4_exp_text", "reformer", "rembert", "roformer", "rwkv", "seamless_m4t",
    "seamless_m4t_v2", "squeezebert", "switch_transformers", "t5", "t5gemma2", "tapas", "trocr",
    "umt5", "xglm", "xlm", "xlnet", "xlstm", "yoso",
})  # fmt: skip
"""Families without flash attention (`_supports_flash_attn`)."""

WITHOUT_FLEX = frozenset({
    "aria_text", "audioflamingo3", "axk2", "bailing_hybrid", "bamba", "big_bird",
    "bigbird_pegasus", "bloom", "blt", "canine", "codegen", "cohere_compass_text", "convbert",
    "cpmant", "deberta", "deberta-v2", "deepseek_v32", "deepseek_v4", "dots3_note",
    "dots3_note_text", "encoder-decoder", "falcon", "falcon_h1", "falcon_mamba", "flaubert",
    "fnet", "fsmt", "funnel", "gemma4_assistant", "gemma4_unified_assistant", "git",
    "glm_moe_dsa", "glmasr", "got_ocr2", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo",
    "gpt_neox_japanese", "gptj", "granite_speech", "granite_speech_plus", "hy_v4", "ibert",
    "inkling2_text", "jamba", "kimi_linear", "layoutlm", "layoutlmv2", "layoutlmv3", "led",
    "lilt", "longformer", "longt5", "luke", "mamba", "mamba2", "markuplm", "megatron-bert",
    "mimo_v2_flash", "minimax_m3_vl_text", "moss_transcribe_diarize", "mpnet", "mpt", "mra",
    "musicflamingo", "mvp", "nemo_speechlm", "nllb-moe", "nystromformer", "olmo_hybrid",
    "olmoe", "openai-gpt", "perceiver", "persimmon", "prophetnet", "qwen2_audio", "qwen3_5",
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_asr", "qwen3_next", "qwen4_exp",
    "qwen4_exp_text", "reformer", "rembert", "roformer", "rwkv", "squeezebert", "stablelm",
    "switch_transformers", "t5gemma2", "tapas", "trocr", "vibevoice_asr", "xglm", "xlm",
    "xlnet", "xlstm", "yoso", "zamba",
})  # fmt: skip
"""Families without flex attention (`_supports_flex_attn`)."""

WITHOUT = {
    "sdpa": WITHOUT_SDPA,
    "flash_attention_2": WITHOUT_FLASH,
    "flash_attention_3": WITHOUT_FLASH,
    "flex_attention": WITHOUT_FLEX,
}
"""Families that lack an attention, by its name; every family has eager."""
