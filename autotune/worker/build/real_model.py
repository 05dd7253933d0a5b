"""Builds the model on a device with random weights, in no more memory than it needs there.

No weights are read: the model is made on `meta` and each tensor gets its storage where it is to stay. Those
of a quantised base come as a checkpoint's would (autotune.worker.build.loading).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from autotune.catalogue.tasks import PICTURES
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.space.precisions import PRECISIONS
from autotune.space.trainers import TRAINERS
from autotune.worker.build import adapters, loading, quantize, tensor_parallel
from autotune.worker.build import model as models

STANDARD_DEVIATION = 0.02
"""Standard deviation of quantised weights. The others get what Transformers gives their architecture (mostly
the same)."""

_UNFILLED = re.compile(r"\.parametrizations\.|^layer_weights$")
"""Names of weights that Transformers' initialisation leaves as they are: a norm's and a direction's, that
a convolution of models that hear is made of, and shares of layers (transformers 5.23)."""


def build(
    config: PretrainedConfig, task: str, train_config: TrainConfig, device: torch.device
) -> nn.Module:
    """Build the model that the Trainer gets: base, quantised where it should be, with its adapter.

    Without it where the trainer adds it.

    A plan of checkpointing is in it; Trainer's own checkpointing is not on yet. Of a model whose weights are
    split it is this process's part; the group of processes is there. Raises model.UnsupportedModel.
    """
    # What is traced in another precision is made in its own.
    precision = train_config.precision
    spec = dataclasses.replace(TraceSpec.of(train_config), precision=precision)
    model = models.build_base(config, task, spec)
    if spec.num_splits > 1:
        tensor_parallel.split(model, spec.num_splits, device.type)
    if train_config.quantization != "none":
        quantize.quantize(model, task, spec)
    materialize(model, getattr(torch, PRECISIONS[train_config.precision].parameter_dtype), device)
    if task == PICTURES:
        _fill_empty(model)
    if train_config.kbit_preparation:
        quantize.prepare(model)
    # TRL's trainer of preferences adds it, so that it can take it for switched off.
    if train_config.method != "full" and not TRAINERS[train_config.trainer].adds_adapter:
        base = _tensors_of(model)
        model = adapters.add_adapter(model, task, train_config)
        if spec.num_splits > 1:
            tensor_parallel.check_adapters(model)
        is_whole = train_config.quantization == "none" and spec.num_splits == 1
        if is_whole and device.type == "cuda":
            _bring((each for each in _tensors_of(model) if each not in base), device)
    if spec.chunked_loss:
        models.chunk_loss_of(model)
    if spec.has_plan:
        models.enable_checkpointing(model, spec)
    return model


def _tensors_of(model: nn.Module) -> dict[torch.Tensor, None]:
    """Return a model's weights and buffers, in its order."""
    return dict.fromkeys(itertools.chain(model.parameters(), model.buffers()))


def _bring(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Let an adapter's tensors come to the device as where from_pretrained leaves the base on the CPU.

    There the Trainer moves them, in their last dtype. Here the base is on the device already, and PEFT makes
    an adapter there in the base's dtype: holes stay where it is cast to float32.
    """
    tensors = list(tensors)
    for tensor in tensors:
        tensor.data = tensor.data.cpu()
    torch.cuda.empty_cache()
    for tensor in tensors:
        tensor.data = tensor.data.to(device)


def materialize(model: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Give a model on `meta` storages on the device, and random weights in them.

    `dtype` is what weights to be quantised are made in. Tied weights stay tied.
    """
    # The keys' tensors are kept beside the values, so that an id is never another's.
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    if any(quantize.is_quantized(module) for module in model.modules()):
        if device.type == "cuda":
            torch.empty(loading.block_bytes(model), dtype=torch.uint8, device=device)
        for module, name, _ in list(loading.checkpointed(model)):
            if loading.is_to_be_quantized(module, name):
                linear: Any = module
                shape = (linear.out_features, linear.in_features)
                quantize.quantize_weight(linear, _random(shape, dtype, device))
                # Transformers' initialisation knows no packed weights.
                linear.weight._is_hf_initialized = True
            elif name in module._parameters:
                _make(module, name, made, device)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                _make(module, name, made, device)
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device=device))
    model.initialize_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if _UNFILLED.search(name):
                parameter.normal_(std=STANDARD_DEVIATION)


def _fill_empty(model: nn.Module) -> None:
    """Give values to matrices that Transformers fills with zeros, as Gemma 3's projection of pictures.

    What such a matrix makes is zero, too, and the gradients of the norms that follow have no bounds.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.is_floating_point() and not parameter.any():
                parameter.normal_(std=STANDARD_DEVIATION)


def _make(
    module: nn.Module,
    name: str,
    made: dict[int, tuple[nn.Parameter, nn.Parameter]],
    device: torch.device,
) -> None:
    """Give a parameter its storage, that of the one that it is tied to where there is one."""
    parameter = module.get_parameter(name)
    if id(parameter) not in made:
        made[id(parameter)] = (parameter, _storage_for(parameter, device))
    setattr(module, name, made[id(parameter)][1])


def _random(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_(std=STANDARD_DEVIATION)


def _storage_for(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    empty = tensor_parallel.empty_like(parameter, device)
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)
