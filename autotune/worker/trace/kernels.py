"""A kernel as a trace records it: its launch, the buffers inside it, the order of its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autotune.worker.trace.meta_values import channels_lie_last

aten = torch.ops.aten


ATTENTION_SHAPE = ("samples", "heads", "key heads", "tokens", "keys", "size", "causal")
"""Names of the sizes that an attention's speed depends on, in their order."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer inside a kernel. `rule` names a size that is not a product of the traced dimensions."""

    size_bytes: int
    rule: tuple[Any, ...] | None = None
    comes_first: bool = False
    """Whether the buffer is there before the results are."""
    goes_first: bool = False
    """Whether it is given back before the kernel asks for its other buffers."""


HiddenBuffers = Callable[[Any, tuple[Any, ...], Any], tuple[Buffer, ...]]
"""A function from (operation, arguments, output) to the buffers that the CUDA kernel allocates and frees
inside."""


def parted(
    buffers: tuple[Buffer, ...],
) -> tuple[tuple[Buffer, ...], tuple[Buffer, ...], tuple[Buffer, ...]]:
    """Part the buffers: there before the results, given back early, and the others."""
    first = tuple(each for each in buffers if each.comes_first)
    brief = tuple(each for each in buffers if each.goes_first and not each.comes_first)
    return first, brief, tuple(each for each in buffers if each not in (*first, *brief))


@dataclass(slots=True)
class TrackedKernel:
    """One launch of a kernel: its arithmetic and the bytes it reads and writes, tensor by tensor."""

    name: str
    dtype: str
    num_flops: int
    tensor_bytes: tuple[int, ...]
    shape: tuple[int, ...]
    """Sizes that its speed depends on: autotune.speed.roofline.Kernel."""
    recomputed: bool
    """Whether activation checkpointing's second forward pass launched it."""
    repeated: bool = False
    """Whether it is launched for each chunk of tokens but the first (autotune.worker.trace.chunks)."""
    pieces: int = 1
    """How many launches of its size stand here (autotune.worker.trace.pictures)."""

    def in_pieces(self, pieces: int) -> TrackedKernel:
        """Return the launch of one piece. A trace runs attention on all as if they were further heads."""
        # Attention has heads of queries and of keys in second and third place; a product its batch first.
        split = (1, 2) if len(self.shape) == len(ATTENTION_SHAPE) else (0,)
        return replace(
            self,
            num_flops=self.num_flops // pieces,
            tensor_bytes=tuple(
                size if size % pieces else size // pieces for size in self.tensor_bytes
            ),
            shape=tuple(
                size // pieces if place in split else size for place, size in enumerate(self.shape)
            ),
            pieces=pieces,
        )


@dataclass(slots=True)
class KernelCost:
    """The cost of one call's kernels."""

    kernels: tuple[Callable[..., TrackedKernel], ...]
    """Make its launches, one each, of whether they are recomputed and repeated."""
    first: tuple[Buffer, ...]
    """Buffers inside the kernel that are there before its results."""
    brief: tuple[Buffer, ...]
    """Buffers that are given back before the others are asked for."""
    then: tuple[Buffer, ...]
    """The others."""
    made: dict[tuple[bool, bool, int], tuple[TrackedKernel, ...]] = field(default_factory=dict)
    """Launches that were made, by those two and the number of pieces: one object for all that are alike."""

    def launches(
        self, recomputed: bool, repeated: bool, pieces: int = 1
    ) -> tuple[TrackedKernel, ...]:
        key = recomputed, repeated, pieces
        found = self.made.get(key)
        if found is None:
            found = tuple(
                kernel(recomputed=recomputed, repeated=repeated) for kernel in self.kernels
            )
            if pieces > 1:
                found = tuple(kernel.in_pieces(pieces) for kernel in found)
            self.made[key] = found
        return found


def _weight_first_by_depth(args: tuple[Any, ...], out: Any) -> Any:
    """Order a convolution's gradients: the weight's first where each channel is convolved by itself.

    PyTorch's own kernels run there, where channels do not lie last; else cuDNN's.
    """
    gradient_of_input, gradient_of_weight, gradient_of_bias = out
    if args[1].shape[1] == args[9] > 1 and not channels_lie_last(*args[1:3]):
        return gradient_of_weight, gradient_of_input, gradient_of_bias
    return out


ORDERS: dict[Any, Callable[[tuple[Any, ...], Any], Any]] = {
    aten.native_dropout.default: lambda _, out: out[::-1],
    aten._ctc_loss.Tensor: lambda _, out: out[::-1],
    # Seed and offset first.
    aten._scaled_dot_product_cudnn_attention.default: lambda _, out: (
        *out[6:8],
        *out[:6],
        *out[8:],
    ),
    aten.convolution_backward.default: _weight_first_by_depth,
}
"""Operations that allocate their results in another order than they return them: torch 2.13
native/cuda/Dropout.cu and LossCTC.cu; native/transformers/cuda/attention.cu; native/cuda/DepthwiseConv2d.cu,
conv_depthwise2d_backward_cuda_out."""
