"""PEFT's adapter on a model, by the fields of space.adapters.

It is added on `meta` for a trace, for real in a probe.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as fx_config

from autotune.errors import first_line, nearest
from autotune.space.adapters import (
    ADAPTERS,
    ATTENTION_PROJECTIONS,
    BESIDE_OUT_PROJ,
    WITHOUT_OUT_PROJ,
    AdapterSettings,
    peft_fields,
)
from autotune.space.precisions import PRECISIONS
from autotune.space.trainers import row_of
from autotune.worker.build.layers import num_layers
from autotune.worker.build.model import UnsupportedModel, reason_of
from autotune.worker.trace.stand_ins import replaced

RANK = 10_007
"""LoRA rank of a trace: a prime that divides no model dimension, so that sizes tell their factors."""


def add_adapter(
    model: Any, task: str, choice: AdapterSettings, rank: int | None = None
) -> nn.Module:
    """Add PEFT's adapter to the model, on the model's device; its weights are fp32 where PEFT casts them.

    Where the choice says so they stay in the base's dtype. A head that trains is fp32 under float16. `rank`
    replaces the choice's. Raises UnsupportedModel where PEFT has no such adapter for the model.
    """
    from peft import get_peft_model
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    config = peft_config(
        model, task, peft_fields(choice, lora_rank=rank, task=row_of(task)), choice.method
    )
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    # PEFT's option leaves an adapter's weights on `meta`, but not what its layers share (VeRA's
    # projections) or what DoRA works out from 4-bit weights; and it makes them on the CPU first, where
    # LoRA on the experts of a mixture, at a trace's rank, takes hundreds of gigabytes. Index tensors that
    # are no buffers must stay on the CPU: they are copied in each step.
    tuner = PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type)
    elsewhere = getattr(tuner, "uses_shared_state", False) or config.peft_type.value == "LORA"
    place = torch.device("meta") if on_meta and elsewhere else contextlib.nullcontext()
    # FourierFT and WaveFT shuffle the numbers of all weights to draw a few: seconds, for values that
    # a trace does not look at.
    unshuffled = [(torch, "randperm", _in_order)] if on_meta else []
    try:
        with place, replaced(unshuffled):
            adapted: nn.Module = get_peft_model(
                model,
                config,
                autocast_adapter_dtype=not choice.adapter_in_base_dtype,
                low_cpu_mem_usage=on_meta,
            )
    except Exception as error:
        raise UnsupportedModel(
            f"PEFT cannot add its {config.peft_type.value} adapter ({reason_of(error)})"
        ) from error
    if on_meta:
        _leave_no_values(adapted)
    if on_meta and choice.adapter_in_base_dtype:
        _cast_as_beside(adapted)
    if PRECISIONS[choice.precision].grad_scaler:
        cast_for_scaler(adapted)
    return adapted


def cast_for_scaler(model: Any) -> None:
    """Cast what trains in 16 bits to float32, as the exported programs do where float16 is scaled.

    The scaler takes no gradients in 16 bits. PEFT leaves a head that trains whole in the base's dtype, and
    TRL casts adapters beside a quantised base to bfloat16. Sources: torch 2.13 amp/grad_scaler.py,
    _unscale_grads_; trl 1.16 trainer/sft_trainer.py.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()


def _cast_as_beside(model: nn.Module) -> None:
    """Cast each adapter to the dtype of the weight beside it, where that is a float.

    PEFT does so but for weights on `meta` (peft 0.21 tuners/tuners_utils.py,
    _move_adapter_to_device_of_base_layer).
    """
    from peft.tuners.lora.layer import ParamWrapper

    for module, held in _parts_of(model):
        if isinstance(module, ParamWrapper):
            raise UnsupportedModel(
                "an adapter on experts that share one weight is traced in float32 alone, and here it has 16 "
                "bits (--targets attention leaves the experts out)"
            )
        beside: Any = module.get_base_layer()
        if beside.weight.dtype.is_floating_point:
            held.to(beside.weight.dtype)


def compute_dtypes(model: nn.Module) -> list[tuple[nn.Parameter, torch.dtype]]:
    """Return an adapter's weights beside 4-bit ones, with the dtype of those ones' products.

    PEFT makes them in it. Source: peft 0.21 tuners/tuners_utils.py, _get_base_layer_device_and_dtype.
    """
    dtypes = [
        (held, getattr(module.get_base_layer(), "compute_dtype", None))
        for module, held in _parts_of(model)
    ]
    return [
        (tensor, dtype)
        for held, dtype in dtypes
        if dtype is not None
        for tensor in held.parameters()
    ]


def _parts_of(model: nn.Module) -> Iterator[tuple[Any, nn.ModuleDict | nn.ParameterDict]]:
    """PEFT's layers, each with the containers of its adapters' tensors."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        for name in (*module.adapter_layer_names, *module.other_param_names):
            held: Any = getattr(module, name, None)
            if isinstance(held, (nn.ModuleDict, nn.ParameterDict)):
                yield module, held


def _in_order(count: int, *, generator: Any = None, **place: Any) -> torch.Tensor:
    """Stand in for torch.randperm: the same numbers, in their order."""
    return torch.arange(count, **place)


def peft_config(model: Any, task: str, fields: dict[str, Any], method: str) -> Any:
    """Make PEFT's configuration object, with what is left to the model filled in.

    Raises UnsupportedModel for a type, field or task that PEFT does not have.
    """
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kinds = {kind.value: config_class for kind, config_class in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    fields = {**fields}
    kind = fields.pop("peft_type")
    if kind not in kinds:
        raise UnsupportedModel(f"PEFT has no type {kind[:40]}. {nearest(kind[:40], list(kinds))}")
    known = [field.name for field in dataclasses.fields(kinds[kind])]
    for name in fields:
        if name not in known:
            near = nearest(str(name)[:40], known)
            raise UnsupportedModel(f"{kinds[kind].__name__} has no field {str(name)[:40]}. {near}")
    task_type = row_of(task).peft_type
    if fields.pop("task_type", task_type) not in (task_type, None):
        raise UnsupportedModel(f"the adapter's task_type is not that of {task}, {task_type}")
    if task_type is None and ADAPTERS[method].is_prompt:
        raise UnsupportedModel(f"PEFT's {ADAPTERS[method].words} does not know the task {task}")
    family = None if model is None else model.config.model_type
    if method != "peft" and kind == "LORA" and family in WITHOUT_OUT_PROJ:
        fields["target_modules"] = _adaptable(fields["target_modules"])
    if method != "peft" and isinstance(fields.get("target_modules"), list):
        fields["target_modules"] = _present(model, fields["target_modules"])
    if fields.get("adapter_layers") == "all":
        fields["adapter_layers"] = num_layers(model.config)
    if isinstance(fields.get("token_indices"), int):
        vocabulary = model.config.get_text_config().vocab_size
        first = max(vocabulary - fields["token_indices"], 0)
        fields["token_indices"] = list(range(first, vocabulary))
    try:
        return kinds[kind](**fields, task_type=task_type)
    except (TypeError, ValueError) as error:
        raise UnsupportedModel(f"PEFT refuses the adapter: {first_line(error)}") from error


def true_masks(choice: AdapterSettings) -> contextlib.AbstractContextManager[Any]:
    """Let a mask without values pick all of its elements.

    For the type of adapter that asks whether places lie within a weight (peft 0.21 tuners/waveft/layer.py).
    Elsewhere torch refuses.
    """
    settings: Any = fx_config
    if choice.method == "peft" and peft_fields(choice)["peft_type"] == "WAVEFT":
        picks_all: contextlib.AbstractContextManager[Any] = settings.patch(
            meta_nonzero_assume_all_nonzero=True
        )
        return picks_all
    return contextlib.nullcontext()


def _adaptable(targets: str | list[str]) -> list[str]:
    """The modules that targets mean in a model whose out_proj PEFT refuses."""
    if isinstance(targets, str):
        return list(BESIDE_OUT_PROJ[targets])
    is_attention = targets == list(ATTENTION_PROJECTIONS)
    return list(BESIDE_OUT_PROJ["attention"]) if is_attention else targets


def _present(model: nn.Module, wanted: list[str]) -> list[str]:
    """The names of target modules that linear layers of this model have.

    All must be there but for `attention` and `all-linear`. Raises UnsupportedModel.
    """
    projections = [f".{name}" for name, m in model.named_modules() if _is_projection(m)]
    found = [name for name in wanted if any(each.endswith(f".{name}") for each in projections)]
    missing = [name for name in wanted if name not in found]
    if missing and tuple(wanted) not in (ATTENTION_PROJECTIONS, *BESIDE_OUT_PROJ.values()):
        raise UnsupportedModel(
            f"LoRA targets {', '.join(missing)} are no linear layers of this model: it has "
            f"{', '.join(sorted({each.rpartition('.')[2] for each in projections}))}"
        )
    if not found:
        raise UnsupportedModel(
            "no attention projection is known for this model: name the LoRA targets"
        )
    return found


def _is_projection(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _leave_no_values(model: nn.Module) -> None:
    """Move to `meta` what PEFT made on the CPU all the same: a trace must see it."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                empty = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                setattr(module, name, empty)
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_meta:
                module._buffers[name] = buffer.to("meta")
