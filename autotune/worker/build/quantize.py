"""Quantises a base: bitsandbytes' layers, its own code for the weights, and CUDA's for int8."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autotune.records.estimate import TraceSpec
from autotune.space.precisions import PRECISIONS, QUANTIZATIONS
from autotune.space.trainers import row_of
from autotune.worker.build.model import UnsupportedModel

LAYERS = ("Linear4bit", "Linear8bitLt")


_TAKE_WEIGHTS = ("layoutlmv3", "wavlm")
"""Families that hand weights of linear layers to a function of torch or pick rows of them (transformers 5.23
models/wavlm/modeling_wavlm.py, torch_multi_head_self_attention, and models/layoutlmv3/modeling_layoutlmv3.py,
_cal_1d_pos_emb), which ends in an error of packed ones."""


def quantize(model: Any, task: str, spec: TraceSpec) -> None:
    """Replace linear layers by bitsandbytes', their weights still to be made (`quantize_weight`).

    Raises UnsupportedModel where there is none, or where packed weights are not what the model takes.
    """
    import bitsandbytes as bnb
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # LLM.int8 warns in each layer
    # Its table for 8-bit codes is made once per process: every trace must see it made.
    bnb.functional.name2qmap.clear()
    compute = getattr(torch, PRECISIONS[spec.precision].compute_dtype)
    row = QUANTIZATIONS[spec.quantization]
    choices: dict[str, Any] = {"load_in_8bit": True}
    if row.codes:
        choices = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": row.codes,
            "bnb_4bit_use_double_quant": row.double,
            "bnb_4bit_compute_dtype": compute,
            "bnb_4bit_quant_storage": getattr(torch, spec.quantization_storage),
        }
    replace_with_bnb_linear(
        model,
        modules_to_not_convert=HfQuantizer.get_modules_to_not_convert(
            model,
            list(row_of(task).heads) or None,
            model._keep_in_fp32_modules,
        ),
        quantization_config=BitsAndBytesConfig(**choices),
    )
    if not any(map(is_quantized, model.modules())):
        raise UnsupportedModel(
            "none of its layers would be quantised: Transformers takes layers of the class Linear alone, and "
            "this family has another"
        )
    if model.config.model_type in _TAKE_WEIGHTS:
        raise UnsupportedModel(
            "its attention takes the weights of its layers as they lie, which would be packed: it is trained "
            "without quantisation"
        )
    # PEFT asks.
    if row.codes:
        model.is_loaded_in_4bit = True
    else:
        model.is_loaded_in_8bit = True
    for module in model.modules():
        if is_quantized(module):
            module.compute_type_is_set = True
            if module.bias is not None:  # the replacement made it fp32; loading keeps the dtype
                module.bias = nn.Parameter(module.bias.to(compute), requires_grad=False)


def prepare(module: Any) -> None:
    """Copy what is not quantised to float32, by PEFT's own function; checkpointing is left to the Trainer.

    Called without `use_gradient_checkpointing=False` it makes the embeddings' output require a gradient too,
    which a base with checkpointed layers need not have, and which is not priced.
    """
    from peft import prepare_model_for_kbit_training

    prepare_model_for_kbit_training(module, use_gradient_checkpointing=False)


def is_quantized(module: nn.Module) -> bool:
    """Whether a module is bitsandbytes' layer, and not PEFT's of the same name around it."""
    kind = type(module)
    return kind.__name__ in LAYERS and kind.__module__.startswith("bitsandbytes.")


def quantize_weight(linear: Any, weight: torch.Tensor) -> None:
    """Quantise one layer's weight, given in 16 bits, as loading does it layer by layer.

    The caller should hold no reference to `weight`, so that it is gone with the call.
    """
    import bitsandbytes as bnb

    old = linear.weight
    if type(linear).__name__ == "Linear8bitLt":
        # bitsandbytes 0.50 Int8Params._quantize, of a weight that the loader has moved to the host and back.
        half = weight.contiguous().to(torch.float16, copy=True)
        codes, scales, _ = bnb.functional.int8_vectorwise_quant(half)
        linear.weight = bnb.nn.Int8Params(
            codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales
        )
        return
    packed, state = bnb.functional.quantize_4bit(
        weight,
        blocksize=old.blocksize,
        compress_statistics=old.compress_statistics,
        quant_type=old.quant_type,
        quant_storage=old.quant_storage,
    )
    linear.weight = bnb.nn.Params4bit(
        packed,
        requires_grad=False,
        quant_state=state,
        blocksize=old.blocksize,
        compress_statistics=old.compress_statistics,
        quant_type=old.quant_type,
        quant_storage=old.quant_storage,
        module=linear,
        bnb_quantized=True,
    )
    linear.quant_state = state


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Bitsandbytes' operations as its CUDA backend computes them, for a trace to look into.

    It multiplies more than 1,536 rows of 4-bit weights by dequantising first.
    Source: bitsandbytes 0.50, backends/cuda/ops.py.
    """
    import bitsandbytes  # noqa: F401  (defines the operators)

    defined = torch.ops.bitsandbytes
    return {
        defined.quantize_4bit.default: _quantize_4bit,
        defined.gemm_4bit.default: _gemm_4bit,
        defined.int8_vectorwise_quant.default: _int8_vectorwise_quant,
        defined.int8_mixed_scaled_mm.default: _int8_mixed_scaled_mm,
        defined.int8_scaled_mm.default: _int8_scaled_mm,
    }


def _quantize_4bit(
    weight: torch.Tensor, blocksize: int, quant_type: str, quant_storage: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the codes and the scales of blocks; the scales are made first."""
    weight = weight.contiguous()
    num = weight.numel()
    scales = torch.empty(-(-num // blocksize), dtype=torch.float32, device=weight.device)
    shape = (num + 1) // (2 * quant_storage.itemsize), 1
    return torch.empty(shape, dtype=quant_storage, device=weight.device), scales


def _gemm_4bit(
    rows: torch.Tensor,
    codes: torch.Tensor,
    shape: Sequence[int],
    scales: torch.Tensor,
    blocksize: int,
    quant_type: str,
    bias: torch.Tensor | None = None,
    codes_of_scales: torch.Tensor | None = None,
    table_of_scales: torch.Tensor | None = None,
    mean_of_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply as _dequant_linear_fallback does, whose every step is alive until it ends."""
    defined = torch.ops.bitsandbytes
    if codes_of_scales is not None:
        quantized = codes_of_scales, scales, table_of_scales, 256, torch.float32
        around_mean = defined.dequantize_blockwise.default(*quantized)
        scales = around_mean + mean_of_scales
    weight = defined.dequantize_4bit.default(
        codes, scales, blocksize, quant_type, shape, rows.dtype
    )
    return nn.functional.linear(rows, weight, bias)


def _int8_vectorwise_quant(
    tensor: torch.Tensor, threshold: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantise rows of float16 to int8 and a scale.

    A trace has no values, so no column has an outlier.
    """
    num_rows = tensor.numel() // tensor.shape[-1]
    scales = torch.empty(num_rows, dtype=torch.float32, device=tensor.device)
    codes = torch.empty(tensor.shape, dtype=torch.int8, device=tensor.device)
    if threshold > 0.0:
        is_outlier = tensor.abs() >= threshold
        is_outlier.any()
    codes.copy_(tensor)  # the kernel: reads the rows, writes the codes
    return codes, scales, None


def _int8_mixed_scaled_mm(
    tensor: torch.Tensor,
    codes: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    weight_scales: torch.Tensor,
    outliers: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    of_outliers = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    output = _int8_scaled_mm(codes, weight, scales, weight_scales, bias=bias, dtype=tensor.dtype)
    return output, of_outliers


def _int8_scaled_mm(
    codes: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply in int32, scale to float16 and convert to the dtype asked for."""
    product = torch._int_mm(codes.reshape(-1, codes.shape[-1]), weight.t())
    product = product.reshape(*codes.shape[:-1], weight.shape[0])
    output = torch.empty_like(product, dtype=torch.float16).copy_(product)
    if bias is not None and bias.dtype != torch.float16:
        output.add_(bias)
    return output.to(dtype or torch.float16)
