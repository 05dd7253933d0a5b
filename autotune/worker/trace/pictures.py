"""Pictures in a trace: what models ask of their values, answered for all samples of a micro-batch at once.

All samples have as many pictures, of one size: none is padding, and no place of one is. What a model makes of
pictures it takes apart by samples or by pictures, and joins again: in a trace that list has one entry, which
is what all of them are together. The backward pass joins their gradients either way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autotune.worker.trace.stand_ins import replaced
from autotune.worker.trace.tracker import Tracker


class _EachSample:
    """The numbers of each sample's pictures, a list of as many as there are samples."""


@contextlib.contextmanager
def on_meta(micro_batch: int) -> Iterator[None]:
    """Let models take apart what pictures make."""
    plain: Any = torch.Tensor
    tolist, split, iterate = plain.tolist, plain.split, plain.__iter__

    def as_list(tensor: Any) -> Any:
        return _EachSample() if tensor.is_meta else tolist(tensor)

    def parts(tensor: Any, sizes: Any, dim: int = 0) -> Any:
        if isinstance(sizes, _EachSample):
            return torch.split_with_sizes(tensor, [tensor.shape[dim]], dim)
        return split(tensor, sizes, dim)

    def entries(tensor: Any) -> Any:
        is_of_pictures = micro_batch > 1 and tensor.is_meta and tensor.shape[:1].numel() != 0
        if is_of_pictures and tensor.dim() > 1 and tensor.shape[0] % micro_batch == 0:
            return iter(tensor.flatten(0, 1).unsqueeze(0).unbind(0))
        return iterate(tensor)

    with replaced(
        [(plain, "tolist", as_list), (plain, "split", parts), (plain, "__iter__", entries)]
    ):
        yield


def hook_towers(model: nn.Module, tracker: Tracker) -> list[Any]:
    """Let no place of a picture be padding, whatever the text has; return the hooks' handles."""
    has_padding = tracker.has_padding

    def enter(*_: Any) -> None:
        tracker.has_padding = False

    def leave(*_: Any) -> None:
        tracker.has_padding = has_padding

    return [
        handle
        for tower in towers(model)
        for handle in (
            tower.register_forward_pre_hook(enter),
            tower.register_forward_hook(leave),
        )
    ]


def towers(model: nn.Module) -> list[PreTrainedModel]:
    """The parts of a model that read pictures alone."""
    return [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and list(module.input_modalities) == ["image"]
    ]
