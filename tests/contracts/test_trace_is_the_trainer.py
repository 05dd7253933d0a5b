"""A real `transformers.Trainer` on the CPU, against the trace of the same step on `meta`.

The same tracker watches both. Allocations and frees must agree one by one, in order, to the byte,
but for DIFFERENCES, each of which is undone by name and by nothing else. The trace is extrapolated
(a few of the layers, a symbolic micro-batch and LoRA rank) before it is compared.

Not compared: sdpa by any kernel but math (the CPU has not CUDA's; test_op_memory.py has their
bytes), QLoRA and fp16 (no such Trainer on a CPU), offloading (nothing to offload to), BERT under
autocast (the CPU's list leaves softmax, layer_norm and gelu in bfloat16).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from trainer_step import (
    NUM_PADDED,
    NUM_STEPS,
    PICTURE,
    Events,
    Run,
    canonical,
    ragged,
    run_trainer,
    spoken,
    tokenizer,
)

from autotune.catalogue.tasks import CTC, TASKS
from autotune.common.json_lines import decode, encode
from autotune.export.training_args import checkpointing_arguments
from autotune.memory.allocator import Tape
from autotune.memory.optimizers import write_clip
from autotune.memory.traces import Trace
from autotune.memory.traces.running import in_blocks
from autotune.predict.steps import _updating_in_backward
from autotune.records.estimate import TraceSpec
from autotune.search.sounds import adapted, num_moments
from autotune.space.checkpoint_plans import CHECKPOINT_PLANS
from autotune.space.config import TrainConfig
from autotune.space.media import Media, MediaTensor
from autotune.space.optimizers import OPTIMIZERS, UPDATERS
from autotune.space.precisions import PRECISIONS
from autotune.space.trainers import row_of
from autotune.worker.build import fp8
from autotune.worker.build import model as models
from autotune.worker.build.backward_update import UpdateInBackward
from autotune.worker.build.checkpoint_plan import HostMemory, checkpoint_layers
from autotune.worker.build.chunked_loss import chunk_loss
from autotune.worker.build.expanded_heads import expand_key_heads
from autotune.worker.build.sound import shape_of
from autotune.worker.build.sound_input import dtype_read_by
from autotune.worker.build.sound_rows import collate_sounds
from autotune.worker.trace import attention, liger, masked_spans, sdpa, sft
from autotune.worker.trace import step as trace_module
from autotune.worker.trace.autocast import POLICIES
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.stand_ins import replaced
from autotune.worker.trace.tracker import Tracker, unrecorded

# PEFT 0.21 asks Transformers 5.23 by the old names of activation checkpointing.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning"),
    # PEFT 0.21 doubles the rank of fused projections by a pattern, which dense layers do not match.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]

FIELDS = {each.name for each in dataclasses.fields(transformers.TrainingArguments)}
COUNTERS = ("aten::div", "aten::floor_divide")
"""The last operation on the number of labels: that of today's Trainer, and of Transformers 5.22's.

Their results have 4 and 8 bytes, which are one block of the allocator; so sizes are compared in blocks there.
"""

DIFFERENCES = {
    "attention kernel": "CUDA's kernels do not run on a CPU: eager on both sides, or sdpa by its "
    "math kernel (what CUDA takes for bfloat16 below compute capability 8.0)",
    "library workspace": "cuBLAS keeps one per thread: left out of the trace",
    "hidden buffers": "CUDA's embedding backward sorts its indices in buffers of its own, the "
    "CPU's does not: left out of the trace",
    "layer norm statistics": "float32 on CUDA and meta, the dtype of the input on a CPU: the real "
    "sizes are doubled in 16 bits",
    "dropout": "CUDA's fused kernel makes a mask of bytes, the CPU multiplies by noise in the "
    "input's dtype: the real run is sent to the fused operation, which a CPU has too",
    "autocast cache": "a hash table, emptied in no order: adjacent frees are compared as a set "
    "(an allocator cannot tell either)",
    "einsum": "CUDA's autocast casts its operands, in their order; a CPU's the product within it, whose last "
    "goes first: the trace casts in the CPU's order",
    "linalg norms": "CUDA's autocast casts what they get to float32, a CPU's does not (DoRA)",
    "norm's partial sums": "made by CUDA's _foreach_norm only: left out of the prediction",
    "empty tensors": "a literal of no elements is made on the CPU first: what has no bytes is left out",
    "strength of the noise": "five numbers that NEFTune makes on the CPU even when the model is on a "
    "GPU, before all other numbers of a micro-step: left out of the real run",
    "flash attention": "its kernel is another on both sides, that keeps and makes what its does; the "
    "buffers inside are left out. Transformers' own code around it runs",
    "mask added in place": "as unfused attention does while no dispatch mode is on: the real run is "
    "watched by one, and its scores are copied, so the trace's are too",
    "padding": "the trace takes every place for a token; what the real run has of the tokens alone, it "
    "has in proportion (61 of 64 places, a prime)",
    "liger": "its Python code runs, its Triton kernels are not launched: a CPU has none",
    "masks of spans": "made on the CPU, copied to a GPU: the copy counts; where they are true is listed "
    "inside the operation: left out of the trace",
    "step counts": "on the CPU even when the parameters are on a GPU: left out of the real run",
    "states of layers": "stay until the next step's forward pass, and end with their own step in the "
    "trace: where they are freed is left out",
}
"""What a GPU does and a CPU does not, or the other way round, or a trace leaves out; and how it is undone."""

expand_key_heads()

FLASH_2 = "flash_attention_2"
SEQUENCE_LENGTH = 32
RANK = 4
SMALL = {
    "hidden_size": 64,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
WHISPER = {
    "model_type": "whisper",
    "vocab_size": 512,
    "d_model": 64,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "num_mel_bins": 16,
    "max_source_positions": 20,
    "max_target_positions": 48,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
HEARS = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 2, 2],
    "conv_kernel": [10, 3, 3],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "feature_projection_input_dim": 24,
    "mask_feature_length": 4,
    "layerdrop": 0.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **SMALL,
        "model_type": "llama",
        "num_hidden_layers": 4,
        "intermediate_size": 176,
        "num_key_value_heads": 2,
    },
    "qwen2": {
        **SMALL,
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "intermediate_size": 176,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    # Products of long inner dimensions: a plan of checkpointing keeps them.
    "llama, wide": {
        **SMALL,
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 320,
        "num_key_value_heads": 2,
    },
    "bert, wide": {
        **SMALL,
        "model_type": "bert",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 320,
    },
    "gpt_neox": {
        **SMALL,
        "model_type": "gpt_neox",
        "num_hidden_layers": 5,
        "intermediate_size": 256,
    },
    "bert": {**SMALL, "model_type": "bert", "num_hidden_layers": 4, "intermediate_size": 256},
    "qwen3_moe, every second": {
        **SMALL,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 8,
        "intermediate_size": 176,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 2,
    },
    "deepseek_v3, two dense": {
        **SMALL,
        "model_type": "deepseek_v3",
        "num_hidden_layers": 7,
        "first_k_dense_replace": 2,
        "intermediate_size": 176,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
    },
    "gemma3, which sees": {
        "model_type": "gemma3",
        "text_config": {
            **SMALL,
            "num_hidden_layers": 8,
            "intermediate_size": 128,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
        },
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 8,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "image_size": 28,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 4,
    },
    "vit": {
        "model_type": "vit",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "image_size": 32,
        "patch_size": 8,
    },
    "wav2vec2": HEARS | {"model_type": "wav2vec2"},
    "wav2vec2, norms first": HEARS
    | {"model_type": "wav2vec2", "feat_extract_norm": "layer", "do_stable_layer_norm": True},
    "wavlm": HEARS | {"model_type": "wavlm"},
    "sew": HEARS | {"model_type": "sew"},
    "data2vec-audio": HEARS | {"model_type": "data2vec-audio"},
    "wav2vec2-bert": HEARS
    | {"model_type": "wav2vec2-bert", "mask_feature_prob": 0.1, "vocab_size": 32},
    "ast": {
        **HEARS,
        "model_type": "audio-spectrogram-transformer",
        "max_length": 64,
        "num_mel_bins": 32,
    },
    "recurrent_gemma": {
        **SMALL,
        "model_type": "recurrent_gemma",
        "num_hidden_layers": 9,
        "intermediate_size": 128,
        "num_key_value_heads": 1,
        "lru_width": 64,
        "attention_window_size": 16,
    },
    "segformer": {
        "model_type": "segformer",
        "image_size": 32,
        "depths": [1, 2, 1, 1],
        "hidden_sizes": [16, 16, 32, 32],
        "num_attention_heads": [1, 1, 2, 2],
        "decoder_hidden_size": 16,
        **dict.fromkeys(("classifier_dropout_prob", "drop_path_rate"), 0.0),
    },
    "swin": {
        "model_type": "swin",
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [1, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    },
    "whisper": WHISPER,
    "whisper, masked": {
        **WHISPER,
        "apply_spec_augment": True,
        "mask_time_length": 5,
        "mask_feature_prob": 0.1,
        "mask_feature_length": 4,
    },
    "whisper, short decoder": {**WHISPER, "encoder_layers": 7, "decoder_layers": 4},
    "bloom": {
        "model_type": "bloom",
        "hidden_size": 64,
        "n_layer": 5,
        "n_head": 4,
        "vocab_size": 512,
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    architecture: str
    task: str = "causal-lm"
    method: str = "full"
    precision: str = "bf16-true"
    checkpointing: int = 0
    num_layers: int | None = None
    """None: as in CONFIGS."""
    micro_batch: int = 2
    accumulation: int = 2
    attention: str = "eager"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of TraceSpec."""
    peft: Any = None
    """PEFT's own configuration of the adapter; None: LoRA on every linear layer."""
    decompositions: Any = None
    """Operations that the real run computes as CUDA does."""
    liger: bool = False
    trainer: str = "transformers"
    neftune_noise_alpha: float = 0.0
    batching: str = "packed"
    updates_in_backward: bool = False
    teacher: str = ""
    """Architecture of a teacher with seven layers; empty: there is none."""
    device: Device | None = None
    """None: a card on which the real run can be made to do what the trace does."""

    @property
    def config(self) -> transformers.PretrainedConfig:
        values = dict(CONFIGS[self.architecture])
        if self.num_layers is not None:
            values["num_hidden_layers"] = self.num_layers
        return models.load_config(values)

    @property
    def teacher_config(self) -> transformers.PretrainedConfig | None:
        if not self.teacher:
            return None
        return dataclasses.replace(self, architecture=self.teacher, num_layers=7).config

    @property
    def spec(self) -> TraceSpec:
        fields: dict[str, Any] = {
            "method": self.method,
            "lora_targets": "all-linear" if self.method == "lora" else None,
            "quantization": "none",
            "precision": self.precision,
            "activation_checkpointing": self.checkpointing,
            "activation_offloading": False,
            "attention": self.attention,
            "single": self.micro_batch == 1,
            "liger": self.liger,
            "trainer": self.trainer,
            "neftune_noise_alpha": float(self.neftune_noise_alpha > 0),
            "batching": self.batching,
        }
        return TraceSpec(**{**fields, **self.settings})


SPEECH = "automatic-speech-recognition"
LISTENING = "audio-classification"
IN_PARTS = {"chunked_loss": True}
HEARD = {
    "whisper": ("input_features", (16, 40)),
    "ast": ("input_values", (64, 32)),
    "wav2vec2-bert": ("input_features", (50, 24)),
}
"""Name and shape of what architectures hear, where it is not a row of numbers."""
OF_HEADS = (
    ("bert", "token-classification"),
    ("llama", "token-classification"),
    ("bert", "question-answering"),
    ("vit", "image-classification"),
    ("wav2vec2", LISTENING),
    ("wav2vec2", CTC),
)
"""Architectures whose head is another for each task."""
WITH_HEADS: dict[str, dict[str, Any]] = {
    "full": {"precision": "fp32"},
    "lora checkpointed": {"precision": "fp32", "method": "lora", "checkpointing": 1},
}


def plan(name: str, num_layers: int, **more: Any) -> dict[str, Any]:
    return {"checkpoint_plan": name, "checkpoint_layers": num_layers, **more}


CASES = {
    "llama full": Case(architecture="llama"),
    "llama full fp32 checkpointed": Case(architecture="llama", precision="fp32", checkpointing=1),
    "llama full every 2nd layer": Case(architecture="llama", num_layers=8, checkpointing=2),
    "llama full micro-batch 1": Case(architecture="llama", micro_batch=1, accumulation=1),
    "llama full sdpa": Case(architecture="llama", attention="sdpa", accumulation=1),
    "llama full expanded heads": Case(architecture="llama", attention="sdpa_expanded"),
    "qwen2 lora expanded heads checkpointed": Case(
        architecture="qwen2", method="lora", attention="sdpa_expanded", checkpointing=1
    ),
    "llama full bf16-mixed": Case(architecture="llama", precision="bf16-mixed", checkpointing=1),
    "llama lora checkpointed": Case(architecture="llama", method="lora", checkpointing=1),
    "llama lora bf16-autocast": Case(
        architecture="llama", method="lora", precision="bf16-autocast", accumulation=1
    ),
    "qwen2 full": Case(architecture="qwen2", accumulation=1),
    "qwen2 lora fp32": Case(architecture="qwen2", method="lora", precision="fp32"),
    "gpt_neox full checkpointed": Case(architecture="gpt_neox", checkpointing=1),
    "gpt_neox lora": Case(architecture="gpt_neox", method="lora", accumulation=1),
    "gpt_neox full bf16-mixed": Case(
        architecture="gpt_neox", precision="bf16-mixed", accumulation=1
    ),
    "llama loss in parts": Case(architecture="llama", settings=IN_PARTS),
    "llama loss in parts bf16-mixed checkpointed": Case(
        architecture="llama", precision="bf16-mixed", checkpointing=1, settings=IN_PARTS
    ),
    "qwen2 loss in parts lora": Case(
        architecture="qwen2", method="lora", micro_batch=1, settings=IN_PARTS
    ),
    "llama loss in parts padded": Case(
        architecture="llama", attention="sdpa", batching="padded", settings=IN_PARTS
    ),
    "llama plan recompute": Case(
        architecture="llama, wide", checkpointing=1, settings=plan("recompute", 3)
    ),
    "llama plan products": Case(
        architecture="llama, wide", checkpointing=1, settings=plan("products", 2)
    ),
    "llama plan recompute-products": Case(
        architecture="llama, wide", checkpointing=1, settings=plan("recompute-products", 1)
    ),
    "llama plan of many layers": Case(
        architecture="llama, wide",
        num_layers=9,
        checkpointing=1,
        settings=plan("recompute-products", 5),
    ),
    "llama plan offload": Case(
        architecture="llama, wide", num_layers=10, checkpointing=1, settings=plan("offload", 5)
    ),
    "llama plan offload-products lora sdpa": Case(
        architecture="llama, wide",
        method="lora",
        attention="sdpa",
        num_layers=10,
        checkpointing=1,
        settings=plan("offload-products", 6),
    ),
    "llama plan recompute-offload bf16-mixed": Case(
        architecture="llama, wide",
        num_layers=11,
        precision="bf16-mixed",
        checkpointing=1,
        settings=plan("recompute-offload", 4),
    ),
    "llama plan of many layers bf16-mixed": Case(
        architecture="llama, wide",
        num_layers=9,
        precision="bf16-mixed",
        checkpointing=1,
        settings=plan("products", 4),
    ),
    "llama plan lora sdpa": Case(
        architecture="llama, wide",
        method="lora",
        attention="sdpa",
        num_layers=8,
        checkpointing=1,
        settings=plan("products", 5),
    ),
    "llama plan lora of a rank whose products are kept": Case(
        architecture="llama, wide",
        method="lora",
        precision="fp32",
        checkpointing=1,
        settings=plan("products", 4, lora_rank=256),
    ),
    "llama plan padded flash loss in parts": Case(
        architecture="llama, wide",
        attention=FLASH_2,
        batching="padded",
        checkpointing=1,
        settings=plan("recompute", 2, **IN_PARTS),
    ),
    "llama plan liger": Case(
        architecture="llama, wide",
        checkpointing=1,
        liger=True,
        settings=plan("recompute-products", 2),
    ),
    "bert plan": Case(
        architecture="bert, wide",
        task="masked-lm",
        checkpointing=1,
        settings=plan("recompute-products", 2),
    ),
    "experts plan": Case(
        architecture="qwen3_moe, every second",
        checkpointing=1,
        accumulation=1,
        settings=plan("recompute", 3),
    ),
    "llama neftune": Case(architecture="llama", neftune_noise_alpha=5.0),
    "llama lora neftune": Case(
        architecture="llama", method="lora", precision="fp32", neftune_noise_alpha=5.0
    ),
    "llama liger": Case(architecture="llama", liger=True),
    "llama liger micro-batch 1": Case(architecture="llama", micro_batch=1, liger=True),
    "llama liger lora checkpointed": Case(
        architecture="llama", method="lora", checkpointing=1, liger=True
    ),
    "llama liger many layers": Case(architecture="llama", num_layers=8, liger=True),
    "qwen2 liger": Case(architecture="qwen2", micro_batch=3, accumulation=1, liger=True),
    "llama padded sdpa": Case(architecture="llama", attention="sdpa", batching="padded"),
    "llama padded sdpa micro-batch 1": Case(
        architecture="llama", attention="sdpa", micro_batch=1, batching="padded"
    ),
    "llama padded flash": Case(architecture="llama", attention=FLASH_2, batching="padded"),
    "llama padded flash checkpointed": Case(
        architecture="llama", method="lora", attention=FLASH_2, checkpointing=1, batching="padded"
    ),
    "gpt_neox padded flash": Case(architecture="gpt_neox", attention=FLASH_2, batching="padded"),
    "llama padding-free": Case(architecture="llama", attention=FLASH_2, batching="padding-free"),
    "llama padding-free micro-batch 1": Case(
        architecture="llama", attention=FLASH_2, micro_batch=1, batching="padding-free"
    ),
    "qwen2 padding-free checkpointed": Case(
        architecture="qwen2",
        method="lora",
        attention=FLASH_2,
        checkpointing=1,
        micro_batch=3,
        batching="padding-free",
    ),
    "llama padding-free liger": Case(
        architecture="llama", attention=FLASH_2, liger=True, batching="padding-free"
    ),
    "bert padded": Case(architecture="bert", task="masked-lm", attention="sdpa", batching="padded"),
    "bert padded micro-batch 1": Case(
        architecture="bert", task="masked-lm", attention="sdpa", micro_batch=1, batching="padded"
    ),
    "bert padded flash": Case(
        architecture="bert", task="masked-lm", attention=FLASH_2, batching="padded"
    ),
    "bert full": Case(architecture="bert", task="masked-lm"),
    "bert lora fp32 checkpointed": Case(
        architecture="bert", task="masked-lm", method="lora", precision="fp32", checkpointing=1
    ),
    "bert classification": Case(
        architecture="bert", task="sequence-classification", precision="fp32", accumulation=1
    ),
    **{
        f"{architecture} {words} {task}": Case(
            architecture=architecture, task=task, accumulation=1, **settings
        )
        for architecture, task in OF_HEADS
        for words, settings in WITH_HEADS.items()
    },
    **{
        f"{architecture} hears": Case(architecture=architecture, task=LISTENING, accumulation=1)
        for architecture in ("sew", "data2vec-audio", "wav2vec2-bert", "ast", "whisper")
    },
    **{
        f"{architecture} writes": Case(architecture=architecture, task=CTC, accumulation=1)
        for architecture in ("sew", "data2vec-audio", "wav2vec2-bert", "wavlm")
    },
    "wav2vec2 writes, sdpa checkpointed": Case(
        architecture="wav2vec2, norms first", task=CTC, attention="sdpa", checkpointing=1
    ),
    "wav2vec2 sdpa checkpointed": Case(
        architecture="wav2vec2, norms first", task=LISTENING, attention="sdpa", checkpointing=1
    ),
    "wavlm lora": Case(architecture="wavlm", task=LISTENING, method="lora", precision="fp32"),
    # Its convolution takes pictures in its weights' dtype alone.
    "swin": Case(architecture="swin", task="image-classification", precision="fp32"),
    # What it convolves lies with its channels last.
    "segformer": Case(architecture="segformer", task="image-classification", precision="fp32"),
    "vit sdpa": Case(architecture="vit", task="image-classification", attention="sdpa"),
    "vit micro-batch 1": Case(architecture="vit", task="image-classification", micro_batch=1),
    "whisper full": Case(architecture="whisper", task=SPEECH, precision="fp32"),
    "whisper full bf16 sdpa": Case(architecture="whisper", task=SPEECH, attention="sdpa"),
    "whisper masked": Case(architecture="whisper, masked", task=SPEECH, precision="fp32"),
    "whisper lora checkpointed": Case(
        architecture="whisper", task=SPEECH, precision="fp32", method="lora", checkpointing=1
    ),
    "whisper, short decoder": Case(
        architecture="whisper, short decoder", task=SPEECH, precision="fp32", micro_batch=1
    ),
    "llama classification": Case(architecture="llama", task="sequence-classification"),
    "experts": Case(architecture="qwen3_moe, every second"),
    "experts fp32": Case(architecture="qwen3_moe, every second", precision="fp32", accumulation=1),
    "experts checkpointed lora": Case(
        architecture="qwen3_moe, every second", method="lora", checkpointing=1, accumulation=1
    ),
    "dense layers, then experts": Case(architecture="deepseek_v3, two dense", checkpointing=1),
    "images besides": Case(architecture="gemma3, which sees", checkpointing=1),
    "images besides plan of unlike layers": Case(
        architecture="gemma3, which sees",
        method="lora",
        accumulation=1,
        checkpointing=1,
        settings=plan("recompute", 5),
    ),
    "bloom": Case(architecture="bloom", accumulation=1),
    "recurrent layers": Case(architecture="recurrent_gemma"),
}


def undo_differences(patch: pytest.MonkeyPatch) -> None:
    """DIFFERENCES: dropout, hidden buffers, flash attention, einsum, masks of spans."""

    def fused(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p else input

    def varlen(q: Any, k: Any, v: Any, starts: Any, *_: Any, **__: Any) -> Any:
        return (KeepsWhatFlashKeeps.apply(q, k, v, starts),)

    patch.setattr(F, "dropout", fused)
    patch.setattr(trace_module, "hidden_buffers", lambda *_: ())
    patch.setattr(sft, "places_of", lambda *_: ())
    patch.setattr(attention, "buffers_of", lambda *_: lambda *_: ())
    patch.setattr(attention, "varlen_attention", varlen)
    patch.setattr(sdpa, "MaskAddedInPlace", contextlib.nullcontext)
    for function in (torch.einsum, torch.cat, torch.stack):
        patch.setitem(POLICIES["cuda"], function, POLICIES["cpu"][function])
    for function in (torch.linalg.norm, torch.linalg.vector_norm):
        patch.delitem(POLICIES["cuda"], function)


@pytest.fixture(autouse=True)
def _differences(monkeypatch: pytest.MonkeyPatch) -> None:
    undo_differences(monkeypatch)


class KeepsWhatFlashKeeps(torch.autograd.Function):
    """q, k, v, the output, a float32 number per head and token, and where samples begin."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, starts: Any) -> torch.Tensor:
        out = torch.empty_like(q)
        sums = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, k, v, starts, out, sums)
        return out.zero_()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors[:3]), None


# Compute capability 7.5: sdpa in bfloat16 takes the math kernel. With Liger 8.0, for its way of summing
# the head's gradient.
TURING = Device(compute_capability=(7, 5), cublas_workspace_bytes=0)
AMPERE = Device(compute_capability=(8, 0), cublas_workspace_bytes=0)


SEEN = Media(
    num_images=1,
    width=PICTURE[2],
    height=PICTURE[1],
    num_tokens=0,
    tensors=(MediaTensor(name="pixel_values", shape=(1, *PICTURE), dtype="float32"),),
)


def seen_by(case: Case) -> Media | None:
    """All that a model reads of a sample, where that is no text."""
    reads = row_of(case.task).reads
    if reads == "waves":
        name, shape = HEARD.get(case.architecture, ("input_values", (1200,)))
        heard = MediaTensor(name=name, shape=(1, *shape), dtype="float32")
        return dataclasses.replace(SEEN, tensors=(heard,))
    return SEEN if reads == "pixels" else None


@functools.cache
def traced_once(name: str) -> Trace:
    """Trace one of CASES, once for all tests."""
    return traced(CASES[name])


def traced(case: Case, *, whole: bool = False) -> Trace:
    """Through JSON, as the worker sends it."""
    answer = trace_module.trace_step(
        case.config,
        case.task,
        case.spec,
        sequence_length=SEQUENCE_LENGTH,
        device=case.device or (AMPERE if case.liger else TURING),
        whole=whole,
        sees=seen_by(case),
        teacher=case.teacher_config,
    )
    trace = Trace(decode(encode(answer)))
    if "cut" in answer["layers"]:
        trace = trace.with_lean_layers(case.spec.checkpoint_layers)
    return trace


def predicted(
    case: Case, trace: Trace, *, is_first: bool, leave_out: Collection[int] = ()
) -> Events:
    """DIFFERENCES: library workspace, empty tensors; and those whose numbers are to be left out."""
    sizes = trace.sizes(case.micro_batch, RANK)
    events = [
        event
        for event in (trace.first if is_first else trace.next)
        if trace.categories[max(event, ~event)] != "workspace"
        and sizes[max(event, ~event)]
        and max(event, ~event) not in leave_out
    ]
    assert trace.loss is not None
    assert trace.loss in events
    return canonical(events, sizes)


def real_sizes(run: Run, case: Case | None = None) -> list[int]:
    """DIFFERENCES: layer norm statistics, padding."""
    num_places = SEQUENCE_LENGTH * case.micro_batch if case else 0
    num_tokens = num_places - NUM_PADDED
    is_unpadded = case is not None and case.batching == "padded" and case.attention == FLASH_2
    return [
        2 * tensor.size_bytes
        if run.made_by.get(index) == "aten::native_layer_norm"
        and tensor.dtype == "bfloat16"
        and tensor.shape[-1] == 1
        else tensor.size_bytes // num_tokens * num_places
        if is_unpadded and tensor.size_bytes % num_tokens == 0
        else tensor.size_bytes
        for index, tensor in enumerate(run.tensors)
    ]


def without_noise_strength(run: Run, events: list[int]) -> list[int]:
    """DIFFERENCES: strength of the noise."""
    numbers = [event for event in events if event >= 0 and run.tensors[event].shape == ()]
    return [event for event in events if max(event, ~event) not in numbers[:5]]


def without_freed_states(case: Case, events: Events) -> Events:
    """DIFFERENCES: states of layers, freed where the step before has made them, or behind all else."""
    size_bytes = 4 * case.micro_batch * case.config.lru_width
    last = max(at for at, (what, *_) in enumerate(events) if what == "alloc")
    number_of: dict[int, int] = {}
    left: Events = []
    for at, (what, number, size) in enumerate(events):
        if what == "free" and size == size_bytes and (at > last or number not in number_of):
            continue
        left.append((what, number_of.setdefault(number, len(number_of)), size))
    return left


def frees_in_no_order(events: Events) -> Events:
    """DIFFERENCES: autocast cache."""
    return [
        event
        for _, group in itertools.groupby(events, key=lambda event: event[0])
        for event in sorted(group)
    ]


def on_device(make: Any) -> Any:
    """DIFFERENCES: masks of spans."""

    def made(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(data, np.ndarray):
            return make(data, *args, **kwargs)
        return torch.ops.aten.lift_fresh.default(unrecorded()(make)(data, *args, **kwargs))

    return made


def heard(case: Case, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    (each,) = seen_by(case).tensors
    text = torch.arange(SEQUENCE_LENGTH) % 30 + 1
    return [
        {
            each.name: torch.rand(each.shape[1:], dtype=dtype),
            "labels": text if case.task == CTC else torch.tensor(number % 2),
        }
        for number in range(NUM_STEPS * case.accumulation * case.micro_batch)
    ]


def real_model(case: Case, config: Any = None) -> Any:
    config = config or case.config
    config.use_cache = False
    for name, value in row_of(case.task).settings.items():
        setattr(config, name, value)
    if case.task == "reward":
        config.num_labels = 1
    auto = getattr(transformers, row_of(case.task).model_class)
    dtype = getattr(torch, PRECISIONS[case.precision].parameter_dtype)
    model = auto.from_config(config, dtype=dtype, attn_implementation=case.attention)
    if case.task != "causal-lm":
        model.accepts_loss_kwargs = False  # as train.py has it
    if case.task == CTC and hasattr(model, "freeze_feature_encoder"):
        model.freeze_feature_encoder()  # as train.py has it
    if case.method != "full":
        from peft import LoraConfig, get_peft_model

        rank = case.spec.lora_rank or RANK
        more: dict[str, Any] = {}
        if not row_of(case.task).has_known_heads:
            more = {**row_of(case.task).adapter_fields, "task_type": row_of(case.task).peft_type}
        lora = LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", bias="none", **more
        )
        casts = not case.spec.adapter_in_base_dtype
        model = get_peft_model(model, case.peft or lora, autocast_adapter_dtype=casts)
    if case.spec.chunked_loss:
        chunk_loss(model)
    if case.spec.has_plan:
        kept = CHECKPOINT_PLANS[case.spec.checkpoint_plan]
        checkpoint_layers(model, case.spec.checkpoint_layers, kept.first_keep, kept.others_keep)
    return model


def collator(case: Case) -> dict[str, Any]:
    """As train.py has them."""
    if case.task == "sequence-classification":
        # Its padding token becomes the model's, which a decoder asks for.
        return {"processing_class": tokenizer()}
    if case.batching == "packed":
        return {}
    if case.batching == "padding-free":
        return {
            "data_collator": transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        }
    guesses = {"mlm_probability": 0.15} if case.task == "masked-lm" else {"mlm": False}
    return {"data_collator": transformers.DataCollatorForLanguageModeling(tokenizer(), **guesses)}


def run_case(case: Case, folder: Path) -> Run:
    precision = PRECISIONS[case.precision]
    arguments: dict[str, Any] = {"bf16": precision.autocast and not precision.fp8}
    if precision.fp8:
        arguments["wrappers"] = fp8.wrappers()
    if case.neftune_noise_alpha:
        arguments["neftune_noise_alpha"] = case.neftune_noise_alpha
    if case.liger:
        arguments["use_liger_kernel"] = True
    if case.checkpointing and not case.spec.has_plan:
        arguments |= checkpointing_arguments(case.checkpointing, FIELDS)
    rows = None
    if case.batching != "packed":
        num_samples = NUM_STEPS * case.accumulation * case.micro_batch
        # The longest sample of a micro-batch has no padding.
        num_missing = NUM_PADDED if case.batching == "padded" and case.micro_batch > 1 else 0
        rows = ragged(num_samples, SEQUENCE_LENGTH, num_missing)
        arguments["train_sampling_strategy"] = "sequential"
    is_sound = row_of(case.task).reads == "sound"
    if is_sound:
        num_samples = NUM_STEPS * case.accumulation * case.micro_batch
        num_missing = NUM_PADDED if case.micro_batch > 1 else 0
        rows = spoken(num_samples, SEQUENCE_LENGTH, shape_of(case.config), num_missing)
        # The longest text of a micro-batch is whole.
        arguments["train_sampling_strategy"] = "sequential"
    with contextlib.ExitStack() as stack:
        if case.device is None:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(attention.without_library(case.attention))
        model = real_model(case)
        if case.spec.has_plan:  # What is in host memory is not on the device.
            hidden = [(HostMemory, n, unrecorded()(vars(HostMemory)[n])) for n in ("piece", "copy")]
            stack.enter_context(replaced(hidden))
        if case.liger:  # After the model's module is there, whose changes are undone at the end.
            pytest.importorskip("liger_kernel.transformers")
            stack.enter_context(liger.as_on_cuda("cpu", AMPERE, lambda *_, **__: None))
        more = collator(case)
        if is_sound:
            of_model = functools.partial(collate_sounds, dtype=dtype_read_by(model))
            more = {"data_collator": of_model}
        if row_of(case.task).reads == "waves":
            rows = heard(case, dtype_read_by(model))
        if row_of(case.task).reads in ("sound", "waves"):
            made = (torch, "tensor", on_device(torch.tensor))
            stack.enter_context(replaced([*masked_spans.drawing(model), made]))
        return run_trainer(
            model,
            folder,
            case.task,
            sequence_length=SEQUENCE_LENGTH,
            micro_batch_size=case.micro_batch,
            accumulation=case.accumulation,
            decompositions=case.decompositions,
            rows=rows,
            more=more,
            callbacks=[UpdateInBackward()] if case.updates_in_backward else [],
            **arguments,
        )


@pytest.mark.parametrize(
    ("length", "said"),
    [
        (100, "it masks spans of 10 positions, and a sample becomes 4: it needs longer ones"),
        (5, "its samples are shorter than what its convolutions take (--image-size, "),
    ],
)
def test_a_sound_may_be_too_short(length: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HEARD, "wav2vec2", ("input_values", (length,)))
    with pytest.raises(models.UnsupportedModel, match=re.escape(said)) as refused:
        traced(CASES["wav2vec2 full audio-classification"])
    assert not isinstance(refused.value, models.CrashedStep)


def test_a_picture_may_have_another_size_than_the_model_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CONFIGS["vit"], "image_size", 64)
    with pytest.raises(models.UnsupportedModel, match="leave --image-size out") as refused:
        traced(CASES["vit micro-batch 1"])
    assert not isinstance(refused.value, models.CrashedStep)


def test_a_convolution_may_take_pictures_in_its_own_dtype_alone() -> None:
    case = dataclasses.replace(CASES["swin"], precision="bf16-true")
    with pytest.raises(models.UnsupportedModel, match="--precision bf16-autocast") as refused:
        traced(case)
    assert not isinstance(refused.value, models.CrashedStep)


@pytest.mark.parametrize("kind", TASKS[CTC].families)
def test_moments_of_a_sound_are_counted_as_models_count_them(kind: str) -> None:
    is_of_frames = kind == "wav2vec2-bert"
    adapts = kind in ("wav2vec2", "wavlm", "data2vec-audio", "wav2vec2-bert")
    for more in ({}, {"add_adapter": True})[: 1 + adapts]:
        small = {"num_hidden_layers": 1, "vocab_size": 32, "model_type": kind, **more}
        config = models.load_config(small)
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCTC.from_config(config)
        for num_values in (100, 400, 16_000, 80_123):
            counted = (adapted if is_of_frames else num_moments)(small, num_values)
            own = model._get_feat_extract_output_lengths(torch.tensor([num_values]))
            assert counted == max(int(own), 0)


@pytest.mark.parametrize("name", CASES)
def test_micro_steps_allocate_and_free_as_traced(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    assert_same_micro_steps(case, run_case(case, tmp_path), traced_once(name))


def assert_as_traced(case: Case, folder: Path) -> None:
    assert_same_micro_steps(case, run_case(case, folder), traced(case))


def assert_same_micro_steps(case: Case, run: Run, trace: Trace) -> None:
    sizes = real_sizes(run, case)
    for number, window in enumerate(run.micro_steps):
        events = [e for e in run.window(window) if sizes[max(e, ~e)]]
        if case.neftune_noise_alpha:
            events = without_noise_strength(run, events)
        real = canonical(events, sizes)
        expected = predicted(case, trace, is_first=number % case.accumulation == 0)
        if case.architecture == "recurrent_gemma":
            real, expected = without_freed_states(case, real), without_freed_states(case, expected)
        if PRECISIONS[case.precision].autocast:
            real, expected = frees_in_no_order(real), frees_in_no_order(expected)
        assert real == expected, f"micro-step {number}"
    assert len(run.micro_steps) == 2 * case.accumulation


@pytest.mark.parametrize("name", ["llama full", "gpt_neox lora"])
def test_extrapolating_the_layers_changes_nothing(name: str) -> None:
    case = CASES[name]
    few, every = traced_once(name), traced(case, whole=True)
    assert max(few.template) < max(every.template), "nothing was extrapolated"
    for is_first in (True, False):
        expected = predicted(case, every, is_first=is_first)
        assert predicted(case, few, is_first=is_first) == expected


@pytest.mark.parametrize(
    "name", ["llama full", "llama padded sdpa", "bert full", "llama classification"]
)
def test_a_step_has_all_its_micro_batches_on_the_device(name: str, tmp_path: Path) -> None:
    """Of the last step: before others the data loader has one more here, which a GPU does not get yet."""
    case = dataclasses.replace(CASES[name], accumulation=3)
    run = run_case(case, tmp_path)
    before, through = run.micro_steps[3][0], run.micro_steps[5][1]
    alive = {e for e in run.events[:before] if e >= 0} - {~e for e in run.events[:through]}
    trace = traced_once(name)
    sizes = trace.sizes(case.micro_batch, RANK)

    tensors = [run.tensors[number] for number in alive]
    of_batch = [t for t in tensors if t.dtype == "int64" and t.shape[:1] == (case.micro_batch,)]
    collated = [tensor.size_bytes for tensor in of_batch]
    assert sorted(collated) == sorted(3 * [sizes[n] for n in trace.batch])
    counted = [run.tensors[n] for n in alive if run.made_by.get(n) in COUNTERS]
    kept = [e for e in trace.count if e >= 0 and ~e not in trace.count]
    real_bytes = in_blocks([tensor.size_bytes for tensor in counted])
    assert [*real_bytes] == [*in_blocks([sizes[number] for number in kept])]
    assert bool(kept) == (case.task == "causal-lm")


@pytest.mark.parametrize("name", ["llama full", "gpt_neox lora"])
def test_labels_are_counted_as_by_the_trainer(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    trainer = transformers.Trainer(
        model=real_model(case),
        args=transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True),
    )
    labels = torch.zeros(case.micro_batch, SEQUENCE_LENGTH, dtype=torch.int64)
    gc.collect()
    with Tracker("cpu") as tracker:
        tracker.index_of(labels)
        trainer._get_num_items_in_batch([{"labels": labels}], torch.device("cpu"))
    recording = tracker.recording
    sizes = [tensor.size_bytes for tensor in recording.tensors]
    real = canonical(recording.events[1:], in_blocks(sizes).tolist())
    trace = traced_once(name)
    sizes_traced = in_blocks(trace.sizes(case.micro_batch, RANK))
    expected = canonical(trace.count, sizes_traced.tolist())
    assert real[: len(expected)] == expected, "the trace keeps what was counted"
    assert [kind for kind, *_ in real[len(expected) :]] == ["free"]


@pytest.mark.parametrize("name", ["llama full", "gpt_neox lora", "bert lora fp32 checkpointed"])
def test_watching_does_not_change_how_autograd_sums(name: str) -> None:
    """A gradient that arrives twice is summed in place, or not, as it is when nobody watches."""
    case = CASES[name]

    def loss() -> torch.Tensor:
        torch.manual_seed(0)
        model = real_model(case).train()
        if case.checkpointing:
            models.enable_checkpointing(model, case.spec)
        tokens = torch.arange(2 * SEQUENCE_LENGTH).reshape(2, -1)
        outputs = model(input_ids=tokens, labels=tokens)
        return outputs["loss"]  # type: ignore[no-any-return]

    unwatched = loss()
    with torch.profiler.profile(acc_events=True) as profile:
        unwatched.backward()
    calls = sorted(profile.events(), key=lambda event: event.time_range.start)
    real = [e.name for e in calls if e.name in ("aten::add", "aten::add_")]

    watched = loss()
    with Tracker("cpu") as tracker:
        watched.backward()
    names = [f"aten::{kernel.name}" for kernel in tracker.recording.kernels]
    assert [name for name in names if name in real] == real
    assert "aten::add_" in real


@pytest.mark.parametrize("name", ["llama full", "qwen2 lora fp32", "bert full"])
def test_optimizer_steps_allocate_and_free_as_written(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    run = run_case(case, tmp_path)
    trace = traced_once(name)
    specs = trace.trainable(RANK)
    trainable = [p for p in run.model.parameters() if p.requires_grad]
    assert [spec.shape for spec in specs] == [tuple(p.shape) for p in trainable]

    states = None
    for window, gradients in zip(run.optimizer_steps, run.gradients, strict=True):
        tape = Tape()
        write_clip(tape, specs)
        partial_sums = 0  # DIFFERENCES: the first tensor of the one dtype
        states = OPTIMIZERS["adamw_torch"].algorithm.write_step(tape, specs, states)
        expected = [event for event in tape.events if max(event, ~event) != partial_sums]

        real = run.window(window)
        zeroed = [~event for event in real if ~event in set(gradients)]
        assert zeroed == gradients, "zero_grad frees them in the model's order"
        assert real[-len(zeroed) :] == [~gradient for gradient in zeroed]
        stepped = [
            event
            for event in real[: -len(zeroed)]
            if run.made_by[max(event, ~event)] != "aten::lift_fresh"
        ]
        assert canonical(stepped, real_sizes(run)) == canonical(expected, tape.sizes)


IN_BACKWARD = {
    "llama": Case(architecture="llama"),
    "llama fp32": Case(architecture="llama", precision="fp32"),
    # Two uses of one weight have one gradient, which comes last.
    "qwen2 checkpointed": Case(architecture="qwen2", checkpointing=1),
    "llama bf16-mixed": Case(architecture="llama", precision="bf16-mixed"),
    "qwen2 loss in parts": Case(architecture="qwen2", settings=IN_PARTS),
    "llama plan": Case(
        architecture="llama, wide", checkpointing=1, settings=plan("recompute-products", 2)
    ),
    "experts": Case(architecture="qwen3_moe, every second"),
}


@pytest.mark.parametrize("name", IN_BACKWARD)
def test_steps_that_update_in_the_backward_pass_allocate_and_free_as_predicted(
    name: str, tmp_path: Path
) -> None:
    """DIFFERENCES: library workspace, empty tensors, step counts, autocast cache."""
    case = dataclasses.replace(IN_BACKWARD[name], accumulation=1, updates_in_backward=True)
    run, trace = run_case(case, tmp_path), traced(case)
    config = TrainConfig(
        method="full",
        micro_batch_size=case.micro_batch,
        gradient_accumulation_steps=1,
        sequence_length=SEQUENCE_LENGTH,
        precision=case.precision,
        optimizer="adamw_torch",
        update_in_backward=True,
    )
    sizes = trace.sizes(case.micro_batch, 0)
    tape = Tape()
    parts = _updating_in_backward(trace, UPDATERS[config.updater], tape, len(sizes), rank=0)
    sizes += tape.sizes
    is_workspace = [category == "workspace" for category in trace.categories]
    is_workspace += [False] * len(tape.sizes)
    assert len(run.micro_steps) == NUM_STEPS
    for number, window in enumerate(run.micro_steps):
        real_bytes = real_sizes(run, case)
        real = canonical(
            [
                event
                for event in run.window(window)
                if real_bytes[max(event, ~event)]
                and run.made_by.get(max(event, ~event)) != "aten::lift_fresh"
            ],
            real_bytes,
        )
        expected = canonical(
            [
                event
                for part in parts
                if part.step == number
                for event in part.events
                if not is_workspace[max(event, ~event)] and sizes[max(event, ~event)]
            ],
            sizes,
        )
        if PRECISIONS[case.precision].autocast:
            real, expected = frees_in_no_order(real), frees_in_no_order(expected)
        assert real == expected, f"step {number}"


@pytest.fixture(scope="module", autouse=True)
def _quiet_libraries() -> Iterator[None]:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)
