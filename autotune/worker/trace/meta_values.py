"""Answers what tensors on `meta` cannot say: values that are asked for, shapes of some results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

aten = torch.ops.aten


def result_instead(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation that `meta` has none for, or another than CUDA; None: ask PyTorch."""
    if func is aten._grouped_mm.default:
        return _grouped_product(*args, **kwargs)
    if func is aten.native_layer_norm_backward.default:
        return _layer_norm_gradients(*args, **kwargs)
    if func is aten.convolution.default and channels_lie_last(*args[:2]):
        return _channels_last(func(*args, **kwargs))
    if func is aten.convolution_backward.default and channels_lie_last(*args[1:3]):
        *gradients, of_bias = func(*args, **kwargs)
        return *map(_channels_last, gradients), of_bias
    if func is aten.col2im.default:
        return _folded(func, *args, **kwargs)
    if (make := _OF_CTC.get(func)) is not None:
        return make(*args)
    if func is aten.cumsum.default and args[0].is_meta:  # what has values is added up
        return _running_sums(*args, **kwargs)
    # Before 2.13 PyTorch has none for it; nothing is computed there.
    return kwargs["out"] if func is aten.addmm.dtype_out else None


def channels_lie_last(*tensors: torch.Tensor) -> bool:
    """Whether cuDNN takes the channels of a convolution's tensors for the last dimension; `meta` never does.

    Sources: torch 2.13 aten/src/ATen/native/ConvUtils.h, cudnn_conv_suggest_memory_format;
    c10/core/MemoryFormat.h, is_channels_last_strides_2d_s4.
    """
    return any(tensor.dim() == 4 and _has_channels_last(tensor) for tensor in tensors)


def _has_channels_last(pictures: torch.Tensor) -> bool:
    least = 0
    for dim in (1, 3, 2, 0):  # From the innermost dimension out.
        size, stride = pictures.shape[dim], pictures.stride(dim)
        is_as_outer = dim == 0 and stride == pictures.stride(1)  # Of one channel and one pixel.
        if not size or not stride or stride < least or is_as_outer:
            return False
        least = stride * size
    return True


def _channels_last(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else torch.empty_like(tensor, memory_format=torch.channels_last)


def _folded(func: Any, columns: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Make what columns add up to (ConvBERT's gradient of nn.functional.unfold), as a part of as many bytes.

    Kernels resize what is like the columns. Source: torch 2.13 aten/src/ATen/native/cuda/Col2Im.cu.
    """
    made: torch.Tensor = func(columns, *args, **kwargs)
    if made.numel() >= columns.numel():
        return made
    return columns.new_empty(columns.numel())[: made.numel()].view(made.shape)


def _selected(labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Select all labels: a mask of those that are no padding has none of it where all are as long."""
    return labels.new_empty((mask.numel(),))


def _path_sums(
    log_probs: torch.Tensor, targets: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the losses (samples,) of CTC, and the sums over paths (samples, frames, 2 x labels + 1).

    Each label has a blank on both sides. Source: torch 2.13 aten/src/ATen/native/cuda/LossCTC.cu.
    """
    frames, samples, _vocabulary = log_probs.shape
    sums = log_probs.new_empty((samples, frames, 2 * (targets.numel() // samples) + 1))
    return log_probs.new_empty((samples,)), sums


def _path_gradients(_: torch.Tensor, log_probs: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Make the gradients of CTC's log-probabilities, contiguous."""
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _log_softmax_gradient(
    gradient: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """Make the gradient of a log_softmax's input, contiguous.

    PyTorch's shape function lays it out as what comes in. Source: torch 2.13
    aten/src/ATen/native/SoftMax.cpp, log_softmax_backward_data.
    """
    return gradient.new_empty(gradient.shape, dtype=dtype)


_OF_CTC: dict[Any, Callable[..., Any]] = {
    aten._log_softmax_backward_data.default: _log_softmax_gradient,
    aten.masked_select.default: _selected,
    aten._ctc_loss.Tensor: _path_sums,
    aten._ctc_loss_backward.Tensor: _path_gradients,
}


def _running_sums(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Add up along a dimension; sums of whole numbers and truths are int64.

    PyTorch's own shape function makes a tensor of the row's length squared (torch 2.13 _refs,
    _cumsumprod_common): more bytes than can be counted, for a row of all samples of a trace's micro-batch.
    """
    kind = x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64
    return torch.empty_like(x, dtype=dtype or kind, memory_format=torch.contiguous_format)


def _grouped_product(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply the experts of a mixture, each with its rows, or make each expert's gradient.

    The result is laid out as by CUDA: rows of whole 16 bytes.

    PyTorch's own shape function takes bfloat16 alone, while CUDA multiplies float32 and float16 as well,
    expert by expert. Source: torch 2.13 _meta_registrations.py, _create_grouped_mm_output_tensor;
    aten/src/ATen/native/cuda/GroupedBlas.cpp, _grouped_mm_cuda.
    """
    num_groups = [offs.shape[0]] if offs is not None and a.dim() == b.dim() == 2 else []
    if a.dim() == b.dim() == 3:
        num_groups = [a.shape[0]]
    dtype = out_dtype or a.dtype
    rows, columns = a.shape[-2], b.shape[-1]
    per_16_bytes = 16 // dtype.itemsize
    stride = -(-columns // per_16_bytes) * per_16_bytes
    return torch.empty_strided(
        (*num_groups, rows, columns),
        (*(rows * stride for _ in num_groups), stride, 1),
        dtype=dtype,
        device=a.device,
    )


def _layer_norm_gradients(
    gradient: torch.Tensor,
    x: torch.Tensor,
    shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Make the gradients of a layer norm's input and weights, laid out as the kernels do: contiguous.

    PyTorch's own shape function lays the first out as the gradient that comes in, which is transposed where
    a pooling of pictures follows. Source: torch 2.13 aten/src/ATen/native/cuda/layer_norm_kernel.cu,
    layer_norm_backward_cuda.
    """
    return tuple(
        torch.empty_like(of, memory_format=torch.contiguous_format)
        if is_wanted and of is not None
        else None
        for of, is_wanted in zip((x, weight, bias), wanted, strict=True)
    )


def _rms_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a norm's result, and what each row was multiplied by, in float32 at least.

    `meta` has several operations in its place. Source: torch 2.13
    aten/src/ATen/native/cuda/layer_norm_kernel.cu, _fused_rms_norm_cuda.
    """
    rows = x.shape[: x.dim() - len(shape)]
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    factors = x.new_empty((*rows, *(1 for _ in shape)), dtype=dtype)
    return torch.empty_like(x, memory_format=torch.contiguous_format), factors


_LIBRARY = torch.library.Library("autotune", "FRAGMENT")
_LIBRARY.define(
    "_fused_rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) -> (Tensor, Tensor)"
)
_LIBRARY.impl("_fused_rms_norm", _rms_norm, "Meta")
FUSED_RMS_NORM = torch.ops.autotune._fused_rms_norm.default
"""CUDA's operation of that name, for `meta`."""


def labelled_rows(mask: torch.Tensor) -> Any:
    """Answer that all samples have a label, in place of `nonzero` (DeBERTa's classifier asks)."""
    if not mask.is_meta or mask.dim() != 1:
        return NotImplemented
    return torch.empty((mask.shape[0], 1), dtype=torch.int64, device=mask.device)


QUESTIONS = {aten.all.default, aten.sum.default, aten.eq.Scalar}
_OF_FAULTS = {aten.any.default, aten.all.default, aten.ge.Scalar}
FAULTS = {aten.isinf.default, aten.isnan.default, aten.max.default, *_OF_FAULTS}


def note_question(tensor: torch.Tensor, out: Any) -> None:
    """Remember that `all` is asked of a mask (batch, length).

    It may be asked by comparing the mask's sum with its size (transformers 5.23 masking_utils.py, fast_all).
    """
    if (tensor.dtype is torch.bool and tensor.dim() == 2) or hasattr(tensor, "is_of_mask"):
        out.is_of_mask = True


def note_fault(func: Any, tensor: torch.Tensor, out: Any) -> None:
    """Remember that infinities or NaNs are looked for, or labels that the vocabulary has not.

    So do peft 0.21 tuners/vblora/layer.py, trl 1.16 trainer/utils.py, nanmin, and transformers 5.23
    models/wav2vec2/modeling_wav2vec2.py.
    """
    if func not in _OF_FAULTS or hasattr(tensor, "is_of_faults"):
        out.is_of_faults = True


def scalar_of(tensor: torch.Tensor, *, has_padding: bool) -> bool:
    """The answer of `.item()` for a tensor without values.

    Transformers asks whether a whole mask is ones: yes, unless there is padding; and whether each row of
    a batch is one sample: yes. PEFT asks whether weights are infinite: no. A number cannot be answered.
    """
    if tensor.dtype is not torch.bool:
        raise NotImplementedError(
            "the model reads a number from a tensor, which a trace does not have"
        )
    return not (hasattr(tensor, "is_of_faults") or (has_padding and hasattr(tensor, "is_of_mask")))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments or results, in their order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))
