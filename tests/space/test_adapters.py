"""What PEFT is asked for, and how a file's adapter is said."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autotune.space.adapters import ATTENTION_PROJECTIONS, peft_fields, peft_words
from autotune.space.config import TrainConfig

LORA = TrainConfig(
    method="lora",
    micro_batch_size=1,
    gradient_accumulation_steps=8,
    sequence_length=1024,
    precision="bf16-true",
    optimizer="adamw_torch",
    lora_rank=16,
    lora_targets="all-linear",
)
OF_LORA = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
TOKENS = {"lora_rank": None, "lora_targets": None, "num_virtual_tokens": 20}


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({}, OF_LORA),
        ({"lora_targets": "attention"}, OF_LORA | {"target_modules": [*ATTENTION_PROJECTIONS]}),
        ({"lora_targets": "q, fc"}, OF_LORA | {"target_modules": ["q", "fc"]}),
        ({"lora_dropout": 0.1}, OF_LORA | {"lora_dropout": 0.1}),
        ({"lora_alpha_ratio": 0.5}, OF_LORA | {"lora_alpha": 8}),
        ({"lora_variant": "rslora"}, OF_LORA | {"use_rslora": True}),
        ({"lora_variant": "dora"}, OF_LORA | {"use_dora": True}),
        ({"method": "qlora", "quantization": "nf4"}, OF_LORA),
        ({"method": "vera"}, {"peft_type": "VERA", "r": 16, "target_modules": "all-linear"}),
        ({"method": "oft"}, {"peft_type": "OFT", "target_modules": "all-linear"}),
        ({"method": "ia3"}, {"peft_type": "IA3"}),
        (
            {"method": "prefix_tuning", **TOKENS},
            {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 20},
        ),
        (
            {"method": "adaption_prompt", **TOKENS},
            {"peft_type": "ADAPTION_PROMPT", "adapter_len": 20, "adapter_layers": "all"},
        ),
        (
            {"method": "trainable_tokens", **TOKENS},
            {"peft_type": "TRAINABLE_TOKENS", "token_indices": 20},
        ),
        ({"method": "peft", "peft": '{"n":3,"peft_type":"FOURIERFT"}'}, {"n": 3, "peft_type": "FOURIERFT"}),
    ],
)  # fmt: skip
def test_what_peft_is_asked_for(change: dict[str, Any], fields: dict[str, Any]) -> None:
    assert peft_fields(dataclasses.replace(LORA, **change)) == fields


def test_another_rank_keeps_the_ratio() -> None:
    assert peft_fields(LORA, lora_rank=4) == OF_LORA | {"r": 4, "lora_alpha": 8}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"peft_type":"IA3"}', "IA3"),
        ('{"peft_type":"OFT","r":8,"bias":"none"}', "OFT (r=8, bias=none)"),
        (f'{{"peft_type":"OFT","x":"{"a" * 40}"}}', f"OFT (x={'a' * 40})"),
        # 37 letters and three dots are 40.
        (f'{{"peft_type":"OFT","x":"{"a" * 41}"}}', f"OFT (x={'a' * 37}...)"),
    ],
)
def test_a_files_adapter_in_words(text: str, words: str) -> None:
    assert peft_words(text) == words
