"""What the user insists on (Workload) and one complete point of the space (TrainConfig).

Both are values: frozen, complete, comparable and hashable. The tables below give the meaning of each
categorical setting once; every other module asks them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

TRADEOFF_CLASSES = ("exact", "numerics", "recipe")
"""Lowest first: what a setting gives up (DESIGN section 5)."""

TASKS = ("causal-lm", "masked-lm", "sequence-classification", "seq2seq-lm")
METHODS = ("full", "lora", "qlora")
ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""torch.compile's `mode`, with Inductor (torch 2.13 torch/__init__.py)."""
TRAINERS = ("transformers", "trl-sft")
"""Transformers' Trainer, or TRL's SFTTrainer."""


ATTENTION_PROJECTIONS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "query_key_value", "c_attn", "out_proj",
    "query", "key", "value", "q", "k", "v", "o", "dense",
)  # fmt: skip
"""What `attention` means as LoRA targets, as far as a model has them."""

CLASSIFIER_HEADS = ("classifier", "score")
"""What PEFT trains in full beside the adapter of a classifier, and so must not be quantised
(peft 0.21 utils/constants.py, SEQ_CLS_HEAD_NAMES)."""

PEFT_TASK_TYPES = {
    "causal-lm": "CAUSAL_LM",
    "masked-lm": None,
    "sequence-classification": "SEQ_CLS",
    "seq2seq-lm": "SEQ_2_SEQ_LM",
}
"""PEFT's `task_type`: it decides which heads train beside the adapter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """What a value of `--precision` means to Transformers' Trainer."""

    parameter_dtype: str
    """dtype of the base weights (trainable or frozen, unless quantised)."""
    compute_dtype: str
    """dtype of matrix products."""
    autocast: bool
    """TrainingArguments bf16=True or fp16=True: torch.autocast around the forward pass."""
    grad_scaler: bool
    """fp16=True: torch.amp.GradScaler."""
    tf32: bool
    """float32 matrix products may use TF32 units."""
    summary: str


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(
        parameter_dtype="float32",
        compute_dtype="float32",
        autocast=False,
        grad_scaler=False,
        tf32=False,
        summary="everything in float32",
    ),
    "tf32": Precision(
        parameter_dtype="float32",
        compute_dtype="float32",
        autocast=False,
        grad_scaler=False,
        tf32=True,
        summary="float32 storage, TF32 matrix products",
    ),
    "fp16-mixed": Precision(
        parameter_dtype="float32",
        compute_dtype="float16",
        autocast=True,
        grad_scaler=True,
        tf32=False,
        summary="float32 weights, float16 autocast with loss scaling",
    ),
    "fp16-autocast": Precision(
        parameter_dtype="float16",
        compute_dtype="float16",
        autocast=True,
        grad_scaler=True,
        tf32=False,
        summary="frozen float16 weights, float32 adapters under float16 autocast",
    ),
    "bf16-mixed": Precision(
        parameter_dtype="float32",
        compute_dtype="bfloat16",
        autocast=True,
        grad_scaler=False,
        tf32=False,
        summary="float32 weights, bfloat16 autocast",
    ),
    "bf16-true": Precision(
        parameter_dtype="bfloat16",
        compute_dtype="bfloat16",
        autocast=False,
        grad_scaler=False,
        tf32=False,
        summary="bfloat16 weights, no autocast (Transformers 5 with bf16 left False)",
    ),
    "bf16-autocast": Precision(
        parameter_dtype="bfloat16",
        compute_dtype="bfloat16",
        autocast=True,
        grad_scaler=False,
        tf32=False,
        summary="bfloat16 weights under bfloat16 autocast: fp32 adapters compute in bfloat16",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """Storage of the frozen base weights."""

    name: str
    bits: int
    """Bits per weight, scales aside."""
    double: bool
    """The fp32 absmax per block of 64 is itself quantised (bitsandbytes `bnb_4bit_use_double_quant`)."""


QUANTIZATIONS: dict[str, Quantization] = {
    "none": Quantization(name="none", bits=16, double=False),
    "nf4": Quantization(name="nf4", bits=4, double=False),
    "nf4-double": Quantization(name="nf4-double", bits=4, double=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What the search may not change."""

    model: str
    """Model as the user named it: Hub id, catalogue id, folder or config.json."""
    task: str = "causal-lm"
    """One of TASKS."""
    sequence_length: int = 1024
    """Tokens per sample after truncation or packing."""
    effective_batch_size: int = 32
    """Samples per optimizer step: micro-batch x accumulation (one device)."""
    methods: tuple[str, ...] = METHODS
    """Training methods allowed, of METHODS."""
    memory_budget_bytes: int
    """peak_device_bytes may not exceed this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """One point of the space, complete: an export needs nothing else but the Workload."""

    method: str
    """full, lora or qlora."""
    micro_batch_size: int
    """Samples in one forward/backward."""
    gradient_accumulation_steps: int
    """Micro-batches per optimizer step."""
    sequence_length: int
    """Tokens per sample."""
    precision: str
    """A key of PRECISIONS."""
    optimizer: str
    """A key of autotune.optimizers.OPTIMIZERS (an `optim` value of TrainingArguments)."""
    activation_checkpointing: int = 0
    """0: none; 1: every layer; n: every n-th layer."""
    activation_offloading: bool = False
    """Checkpointed activations wait in host memory."""
    attention: str = "sdpa"
    """Transformers' attn_implementation."""
    lora_rank: int | None = None
    """None for method full."""
    lora_targets: str | None = None
    """`all-linear`, `attention`, or module names joined by commas; None for method full."""
    quantization: str = "none"
    """A key of QUANTIZATIONS."""
    liger: bool = False
    """Liger's Triton kernels: norms, rotary embedding, gated MLP, and a loss that makes no logits."""
    trainer: str = "transformers"
    """One of TRAINERS."""
    torch_empty_cache_steps: int = 0
    """0: never; n: the allocator's cache is emptied in every n-th step, before the backward pass."""
    neftune_noise_alpha: float = 0.0
    """0: none; else noise of that strength is added to the embeddings."""
    torch_compile: str = "none"
    """none, or one of COMPILE_MODES."""

    @property
    def effective_batch_size(self) -> int:
        return self.micro_batch_size * self.gradient_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step."""
        return self.effective_batch_size * self.sequence_length

    def to_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)
