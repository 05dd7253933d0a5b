"""Unsloth's programs read back: the table between our settings and FastLanguageModel's keywords.

Keywords and defaults of from_pretrained and get_peft_model as in unsloth 2026.10.9 models/loader.py and
models/llama.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from autotune.export.base.huggingface import TRAINING_ARGUMENTS
from autotune.export.base.section_rows import (
    ADAPTER,
    MODEL,
    QUANTIZATION,
    UNPREDICTED,
    adapter_rows,
    by_setting,
    precision_row,
    quantization_row,
)
from autotune.export.mapping import Row, Spelling, TrainerFile, choices, table

# Its trainer has max_seq_length as far as the model goes, and overwrites max_length with the model's (unsloth
# models/rl.py).
_LENGTH = Row(
    ours=("sequence_length",),
    keys=(f"{MODEL}max_seq_length", "max_seq_length"),
    say=lambda length: {f"{MODEL}max_seq_length": length},
    hear=lambda said: min(filter(None, said.values()), key=_as_number),
    unheard=("max_seq_length",),
)
_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def target_for(
    name: str, content: Mapping[str, Any], *, sections: Collection[str], has_trl_defaults: bool
) -> TrainerFile:
    """Return the table for FastLanguageModel.

    It loads, adapts, quantises and checkpoints by words of its own.
    """
    is_full = bool(content.get(f"{MODEL}full_finetuning"))
    has_config = QUANTIZATION in sections
    if not is_full and ADAPTER not in sections:
        raise ValueError("nothing trains: there is neither get_peft_model nor full_finetuning=True")
    bits = {f"{MODEL}load_in_4bit": "load_in_4bit", f"{MODEL}load_in_8bit": "load_in_8bit"}
    # Where neither is said, it switches on what the weights are in; full fine-tuning in 16 bits has none.
    is_mixed = has_trl_defaults or not is_full or content.get(f"{MODEL}dtype") == "float32"
    fixed: dict[str, Any] = {"trainer": "trl-sft"}
    rows: list[Row] = []
    if is_full:
        fixed |= {"method": "full", "quantization": "none", "quantization_storage": "uint8"}
    elif has_config:
        fixed["method"] = "qlora"
        rows.append(quantization_row(**bits))
    else:
        # Without a BitsAndBytesConfig its 4 bits are NF4 with quantised scales.
        rows.append(
            table(
                "method quantization",
                " ".join(bits),
                ("lora", "none", False, False),
                ("qlora", "nf4-double", True, False),
                ("qlora", "int8", False, True),
            )
        )
    if not is_full:
        rows += adapter_rows("lora")
    own = ("precision", "batching", "activation_checkpointing", "liger", "torch_compile",
           "torch_compile_backend")  # fmt: skip
    rows += [row for name, row in by_setting(TRAINING_ARGUMENTS).items() if name not in own]
    rows += [
        _LENGTH,
        table(
            "batching",
            "packing padding_free",
            ("packed", True),
            ("padded", False, False),
            ("padding-free", False, True),
        ),
        _unsloth_checkpointing(is_full=is_full),
        precision_row(f"{MODEL}dtype", is_quantized=has_config),
    ]
    return TrainerFile(
        name=name,
        source="unsloth 2026.10.9",
        rows=tuple(rows),
        defaults={
            **TRAINING_ARGUMENTS.defaults,
            **({"bf16": True} if is_mixed else {}),
            f"{ADAPTER}lora_alpha": 16,
            f"{ADAPTER}lora_dropout": 0.0,
            f"{QUANTIZATION}bnb_4bit_quant_type": "fp4",
            f"{MODEL}load_in_4bit": not is_full,
            f"{MODEL}max_seq_length": 2048,
            f"{MODEL}use_gradient_checkpointing": "unsloth",
            f"{ADAPTER}use_gradient_checkpointing": "unsloth",
            f"{ADAPTER}r": 16,
            f"{ADAPTER}target_modules": _TARGETS,
        },
        model_key=f"{MODEL}name",
        fixed=fixed,
        renamed=TRAINING_ARGUMENTS.renamed,
        refused={
            **TRAINING_ARGUMENTS.refused,
            f"{MODEL}load_in_16bit": "is said by load_in_4bit=False, which is on by default",
            f"{MODEL}load_in_fp8": "is a base that is not predicted",
            f"{MODEL}auto_model": "loads another kind of model than a causal language model",
            **dict.fromkeys(
                (f"{MODEL}qat_scheme", f"{ADAPTER}qat_scheme"), "adds quantisation to the step"
            ),
            f"{MODEL}fast_inference": "shares the card with vLLM, which is not predicted",
        },
        unpredicted={
            **UNPREDICTED,
            f"{MODEL}offload_embedding": "keeps embeddings in host memory",
            f"{MODEL}unsloth_tiled_mlp": "computes the MLP in pieces",
        },
        caveats=(
            (lambda _: True, "Unsloth has a loss and kernels of its own, which are not predicted"),
        ),
    )


def _as_number(length: object) -> float:
    return length if isinstance(length, int) else -math.inf  # What is no number is refused.


def _unsloth_checkpointing(*, is_full: bool) -> Row:
    """Row of checkpointing: `unsloth` checkpoints every layer and parks the rest in host memory.

    An adapter has two switches: the one where it is made decides.
    """
    of_model, of_adapter = (f"{name}use_gradient_checkpointing" for name in (MODEL, ADAPTER))
    ways = (((0, False), False), ((1, False), True), ((1, True), "unsloth"))
    both = (of_model,) if is_full else (of_adapter, of_model)
    return choices(
        ("activation_checkpointing", "activation_offloading"),
        *(
            Spelling(ours=ours, theirs=dict.fromkeys(keys, said))
            for keys in (both, both[:1])
            for ours, said in ways
        ),
        nearest={(): (1, False)},
    )
