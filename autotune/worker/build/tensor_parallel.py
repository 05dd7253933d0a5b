"""A model whose products several GPUs share, as Transformers splits it; for a trace in one process alone.

Transformers makes DTensors of the weights that its plan names: each process holds its part, and a
collective follows where parts have to come together. Where a step is traced, the others are torch's fake
ones: a collective returns at once, and on `meta` nothing but its shape matters. Products are split for the
first process, whose parts are the largest where a dimension does not divide.

Source: transformers 5.23 distributed/tensor_parallel.py and distributed/mixin.py; torch 2.13
testing/_internal/distributed/fake_pg.py.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from autotune.errors import first_line
from autotune.worker.build.model import UnsupportedModel

_collectives = torch.ops._c10d_functional
KERNEL_NAMES: dict[Any, str] = {
    _collectives.all_reduce_.default: "all_reduce",
    _collectives.all_gather_into_tensor.default: "all_gather",
    _collectives.reduce_scatter_tensor.default: "reduce_scatter",
}
"""Names of collectives as autotune.speed.links has them."""


def _all_reduce(tensor: torch.Tensor, *of_group: Any) -> torch.Tensor:
    """Copy, then reduce in place, as torch 2.13 csrc/distributed/c10d/Functional.cpp does."""
    return _collectives.all_reduce_.default(tensor.contiguous().clone(), *of_group)


DECOMPOSITIONS: dict[Any, Any] = {_collectives.all_reduce.default: _all_reduce}
"""Functions in the place of operations that are made of others."""


def stand_ins() -> dict[Any, Any]:
    """Return functions in the place of operations that do something else where a step is traced.

    The tensor that waits for a collective holds the collective's result (torch 2.13
    distributed/_functional_collectives.py, AsyncCollectiveTensor); on `meta` it is a copy.
    """
    import torch.distributed.tensor  # which registers the operation

    wrap = getattr(_collectives, "_wrap_tensor_autograd", None)
    return DECOMPOSITIONS | ({} if wrap is None else {wrap.default: torch.ops.aten.alias.default})


def begin(num_processes: int, process: int = 0) -> None:
    """Let this process be one of so many that are not there, by default the first; 1: let it be alone.

    Meshes of an earlier model with as many stay good.
    """
    if dist.is_initialized():
        if (dist.get_world_size(), dist.get_rank()) == (num_processes, process):
            return
        dist.destroy_process_group()
    if num_processes > 1:
        # It has no public name: importing it is what makes the backend known.
        from torch.testing._internal.distributed import fake_pg  # noqa: F401

        dist.init_process_group(
            "fake", rank=process, world_size=num_processes, store=dist.HashStore()
        )


def has_begun() -> bool:
    """Whether this process is one of several."""
    return dist.is_initialized()


def split(model: Any, num_gpus: int, device_type: str = "cpu") -> None:
    """Split the model's weights, which are on `meta`, by its own plan, for devices of that type.

    A group of processes is there: `begin`'s, or real ones. Raises UnsupportedModel where the family has no
    plan, or one that does not go with so many GPUs.
    """
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import TransformersDeviceMesh

    if not getattr(model, "tp_plan", None):
        raise UnsupportedModel(
            f"Transformers has no tensor parallel plan for {model.config.model_type}"
        )
    check_heads(model.config.get_text_config(), num_gpus)
    config = DistributedConfig(tp_size=num_gpus)
    try:
        # Transformers' own function would take a GPU that is there.
        dense = init_device_mesh(
            device_type, (1, 1, 1, num_gpus), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")
        )
        experts = init_device_mesh(
            device_type, (1, 1, num_gpus, 1), mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep")
        )
        _untie(model)
        model.maybe_distribute_model(model, config, TransformersDeviceMesh(dense, experts))
        model.tie_weights()
    except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
        raise UnsupportedModel(first_line(error)) from error


def _untie(model: nn.Module) -> None:
    """Give each name a weight of its own, as they have where weights are loaded: tying comes after."""
    seen: set[int] = set()
    for name, weight in list(model.named_parameters(remove_duplicate=False)):
        if id(weight) in seen:
            module, _, own = name.rpartition(".")
            setattr(model.get_submodule(module), own, nn.Parameter(torch.empty_like(weight)))
        seen.add(id(weight))


def check_heads(config: Any, num_gpus: int) -> None:
    """Refuse a model whose attention heads do not divide: whole heads are dealt out.

    Raises UnsupportedModel.
    """
    for name, words in (
        ("num_attention_heads", "attention heads"),
        ("num_key_value_heads", "key-value heads"),
    ):
        count = getattr(config, name, None)
        if isinstance(count, int) and count % num_gpus:
            raise UnsupportedModel(f"its {count} {words} do not divide by {num_gpus} GPUs")


def check_adapters(model: nn.Module) -> None:
    """Refuse adapters on weights that are split by their rows, which end PEFT's first step in an error.

    Raises UnsupportedModel. Source: peft 0.21 tuners/lora/model.py, add_lora_tp_hooks_dtensor.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            weight: Any = module.get_base_layer().weight
            if is_part(weight) and any(p.is_shard(1) for p in weight.placements):
                raise UnsupportedModel(
                    f"PEFT cannot adapt {name.rpartition('.')[2]}, which is split by its rows: "
                    "name other targets"
                )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process holds; a whole one itself."""
    if is_part(tensor):
        with torch.no_grad():
            part: torch.Tensor = cast(Any, tensor).to_local()
            return part
    return tensor


def is_part(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for the part of one that this process holds: a DTensor."""
    # A trace of what no other GPU shares does without the library.
    library = sys.modules.get("torch.distributed.tensor")
    return library is not None and isinstance(tensor, library.DTensor)


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an empty tensor on the device like the one on `meta`; of the part where that stands for one."""
    if not is_part(tensor):
        return torch.empty_like(tensor, device=device)
    part = cast(Any, tensor)
    whole: torch.Tensor = type(part).from_local(
        torch.empty_like(local(part), device=device),
        part.device_mesh,
        part.placements,
        run_check=False,
        shape=part.shape,
        stride=part.stride(),
    )
    return whole


def wrappers() -> tuple[type, ...]:
    """Tensors that stand for a part of theirs, on which every operation runs."""
    from torch.distributed.tensor import DTensor

    return (DTensor,)
