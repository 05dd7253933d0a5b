"""The dtypes of weights and of computation (PRECISIONS), and storage in few bits (QUANTIZATIONS)."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.catalogue.installed import fuses_any_grouped_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """A value of `--precision`, as Transformers' Trainer takes it."""

    parameter_dtype: str
    """Storage type of the base weights (trainable or frozen, unless quantised)."""
    compute_dtype: str
    """Type in which matrix products are computed."""
    autocast: bool = False
    """Whether torch.autocast wraps the forward pass (TrainingArguments bf16=True or fp16=True)."""
    grad_scaler: bool = False
    """Whether torch.amp.GradScaler runs (fp16=True)."""
    tf32: bool = False
    """Whether float32 matrix products may use TF32 units."""
    fp8: bool = False
    """Whether accelerate's mixed_precision is "fp8" with torchao: linear layers multiply in fp8 under
    bfloat16 autocast, but for the first and the last and those whose sizes are no multiples of 16 (accelerate
    1.15 utils/ao.py)."""


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(
        parameter_dtype="float32",
        compute_dtype="float32",
    ),
    "tf32": Precision(
        parameter_dtype="float32",
        compute_dtype="float32",
        tf32=True,
    ),
    "fp16-mixed": Precision(
        parameter_dtype="float32",
        compute_dtype="float16",
        autocast=True,
        grad_scaler=True,
    ),
    "fp16-autocast": Precision(
        parameter_dtype="float16",
        compute_dtype="float16",
        autocast=True,
        grad_scaler=True,
    ),
    "bf16-mixed": Precision(
        parameter_dtype="float32",
        compute_dtype="bfloat16",
        autocast=True,
    ),
    "bf16-true": Precision(
        parameter_dtype="bfloat16",
        compute_dtype="bfloat16",
    ),
    "bf16-autocast": Precision(
        parameter_dtype="bfloat16",
        compute_dtype="bfloat16",
        autocast=True,
    ),
    "fp8-mixed": Precision(
        parameter_dtype="float32",
        compute_dtype="bfloat16",
        autocast=True,
        fp8=True,
    ),
    "fp8-autocast": Precision(
        parameter_dtype="bfloat16",
        compute_dtype="bfloat16",
        autocast=True,
        fp8=True,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """Storage of the frozen base weights."""

    name: str
    bits: int
    """Bits per weight, scales aside."""
    codes: str = ""
    """Value of bitsandbytes' `bnb_4bit_quant_type`; empty where it has no such choice."""
    double: bool = False
    """Whether the fp32 absmax per block of 64 is itself quantised (bitsandbytes
    `bnb_4bit_use_double_quant`)."""


QUANTIZATIONS: dict[str, Quantization] = {
    row.name: row
    for row in (
        Quantization(name="none", bits=16),
        Quantization(name="nf4", bits=4, codes="nf4"),
        Quantization(name="nf4-double", bits=4, codes="nf4", double=True),
        Quantization(name="fp4", bits=4, codes="fp4"),
        Quantization(name="fp4-double", bits=4, codes="fp4", double=True),
        Quantization(name="int8", bits=8),
    )
}
"""Storage formats by name. Matrix products run in the precision's compute dtype (`bnb_4bit_compute_dtype`);
int8 is LLM.int8."""


def dtype_beside(precision: str, quantization: str, quantization_storage: str) -> str:
    """Return the dtype of an adapter beside such weights, before PEFT casts 16 bits to float32.

    Codes in integers leave it in float32 (peft 0.21 tuners/tuners_utils.py,
    _move_adapter_to_device_of_base_layer).
    """
    if quantization == "none":
        return PRECISIONS[precision].parameter_dtype
    return "float32" if quantization_storage == "uint8" else quantization_storage


QUANTIZATION_STORAGES = ("uint8", "bfloat16", "float16", "float32")
"""Types that hold the packed codes of 4-bit weights (`bnb_4bit_quant_storage`): the same bytes in each. Only
those of a floating dtype can be shared out (accelerate 1.15 utils/fsdp_utils.py)."""


def shared_storage(precision: str, quantization: str) -> str:
    """Return the dtype that packs weights which FSDP2 shares out.

    It takes float tensors only, of the dtype that is computed with: of codes in another, every GPU would
    keep all.
    """
    return PRECISIONS[precision].compute_dtype if QUANTIZATIONS[quantization].codes else "uint8"


def fuses_grouped_heads(precision: str, compute_capability: tuple[int, int] | None) -> bool | None:
    """Return whether a fused kernel of PyTorch takes attention with fewer heads of keys than of queries.

    None: the card is not known. Flash attention and cuDNN's do, in 16 bits on cards from compute capability
    8.0 on; the memory-efficient kernel does since torch 2.14. Sources: pytorch v2.13 and v2.14 sdp_utils.cpp;
    which card chooses which kernel: studies/attention-kernels.
    """
    if fuses_any_grouped_heads():
        return True
    if PRECISIONS[precision].compute_dtype == "float32":
        return False
    return None if compute_capability is None else compute_capability >= (8, 0)
