"""A step whose sequences several GPUs share, as Transformers and accelerate have torch run it.

Each process keeps a stretch from the beginning of every sequence and the one that mirrors it at the end.
Attention goes round the ring: keys and values of the others are gathered while a process works on its own,
and the results are merged in float32: whole ones by the last process alone, whose merged result lies by
token, so that Transformers need not copy it. Where a step is traced the others are torch's fake ones, as
under tensor parallelism, and the process is the first or the last. Of all but the last, positions jump in
the middle, so that Transformers takes a row for two samples and makes a mask, which no layer is given.

Source: transformers 5.23 Trainer._prepare_context_parallel_inputs; accelerate 1.15 Accelerator._prepare_cp
and big_modeling.py _attach_context_parallel_hooks; torch 2.13
distributed/tensor/experimental/_context_parallel/_attention.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn

from autotune.errors import first_line
from autotune.worker.build.model import UnsupportedModel
from autotune.worker.build.tensor_parallel import is_part

aten = torch.ops.aten
_collectives = torch.ops._c10d_functional
KERNEL_NAMES: dict[Any, str] = {_collectives.all_to_all_single.default: "permute"}
"""Names of collectives, beside those of tensor parallelism, as autotune.speed.links has them."""


def prepare(model: nn.Module) -> None:
    """Have attention do without masks, as accelerate does.

    Raises UnsupportedModel where it refuses the model, or would leave its masks.
    """
    from accelerate.big_modeling import _attach_context_parallel_hooks

    if not any(name.endswith("self_attn") for name, _ in model.named_modules()):
        raise UnsupportedModel(
            "context parallelism takes masks from modules called self_attn alone, and it has none"
        )
    try:
        _attach_context_parallel_hooks(model)
    except ValueError as error:
        what, _, _ = first_line(error).partition(". ")
        raise UnsupportedModel(what) from error
    add_cpu_kernel()


def whole_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a batch with what the Trainer adds to it before it is shared out: labels shifted, positions.

    It keeps both with the micro-batch; they have no values here.
    """
    ids = inputs["input_ids"]
    positions = torch.arange(ids.size(1), device=ids.device).expand(ids.size(0), -1)
    shifted = torch.empty_like(inputs["labels"])
    return {**inputs, "shift_labels": shifted, "position_ids": positions}


@contextlib.contextmanager
def shared_out(inputs: dict[str, Any], num_gpus: int) -> Iterator[None]:
    """Leave this process its part of a batch, and let attention go round the ring of so many; 1: nothing."""
    if num_gpus == 1:
        yield
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (num_gpus,), mesh_dim_names=("cp",))
    buffers = [value for value in inputs.values() if value.dim() == 2]
    with context_parallel(
        mesh,
        buffers=buffers,
        buffer_seq_dims=[1] * len(buffers),
        no_restore_buffers=set(buffers),
    ):
        yield


def check_kernel(kernel: str, query: torch.Tensor) -> None:
    """Refuse attention without a fused kernel: it would not go round the ring.

    Raises UnsupportedModel. Source: torch 2.13 _context_parallel/_attention.py, custom_ops.
    """
    is_of_ring = is_part(query) and any(p.is_shard(2) for p in cast(Any, query).placements)
    if kernel == "math" and is_of_ring:
        raise UnsupportedModel(
            "the ring of context parallelism needs a fused kernel: attention has none here"
        )


def add_cpu_kernel() -> None:
    """Let torch's ring run the CPU's attention, too: it knows three kernels of CUDA's alone.

    Its loop over the ring takes any kernel.
    """
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental._context_parallel import _attention

    ring: Any = _attention
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def run_backward(*, scale: float | None, **given: Any) -> Any:
        return backward(*(given[name] for name in _BACKWARD_ARGUMENTS), scale=scale)

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mesh = args[0].device_mesh
        group, scale = mesh.get_group(), kwargs.get("scale")
        parts = [part.to_local() if isinstance(part, DTensor) else part for part in args]
        if func is forward:
            query, key, value, dropout_p, is_causal = [*parts, 0.0, False][:5]
            found = ring._templated_ring_attention(
                group, 2, func, query, key, value, is_causal, dropout_p=dropout_p, scale=scale
            )
        else:
            *tensors, dropout_p, is_causal = parts[: len(_BACKWARD_ARGUMENTS)]
            gradient, *saved = tensors
            found = ring._templated_ring_attention_backward(
                group, 2, run_backward, gradient, _BACKWARD_ARGUMENTS[0], *saved, is_causal,
                dropout_p=dropout_p, scale=scale,
            )  # fmt: skip
        return tuple(DTensor.from_local(part, mesh, [Shard(2)], run_check=False) for part in found)

    ring.custom_ops |= {forward: run, backward: run}


_BACKWARD_ARGUMENTS = (
    "grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal"
)  # fmt: skip


def stand_ins(*, is_last: bool) -> dict[Any, Callable[..., Any]]:
    """Return answers to what a trace cannot know: whether each row's positions are of one sample."""

    def is_one_sample(tensor: torch.Tensor) -> Any:
        is_asked = tensor.is_meta and tensor.dtype is torch.bool
        return is_last if is_asked and not hasattr(tensor, "is_of_faults") else NotImplemented

    return {aten._local_scalar_dense.default: is_one_sample}
