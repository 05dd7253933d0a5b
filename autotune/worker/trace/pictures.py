"""Pictures in a trace: what models ask of their values, answered for all samples of a micro-batch at once.

All samples have as many pictures, of one size: none is padding, and no place of one is. What a model makes of
pictures it takes apart by samples or by pictures, and joins again: in a trace that list has one entry, which
is what all of them are together. The backward pass joins their gradients either way.

Some models (Qwen-VL) look at the grid of each picture, and attend within each. Their functions that read
grids run for one sample, whose values are known (autotune.worker.trace.known_values); what they make is then
stretched to all samples. Attention takes what is of one length at once, in all samples: as many bytes in
fewer pieces. Its kernels are counted as the trainer launches them.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from autotune.space.media import Media
from autotune.worker.build.pictures import places_of
from autotune.worker.trace import known_values, sft
from autotune.worker.trace.cuda import META
from autotune.worker.trace.stand_ins import replaced
from autotune.worker.trace.tracker import Tracker

MOST_PIECES = 16
"""Most pieces of one sample that attention is traced for one by one. [judgement: of a window each, they
would be nearly all events of a trace]"""
_OF_GRIDS = {
    "get_vision_position_ids": 1,
    "get_vision_window_index": 1,
    "get_vision_interpolation_indices_and_weights": 2,
}
"""Functions of Transformers that read the grids of all pictures, and how many of the tensors that each
returns have a row per patch, or per few of them: those come first."""


class _EachSample:
    """The numbers of each sample's pictures, a list of as many as there are samples."""


@contextlib.contextmanager
def on_meta(model: nn.Module, tracker: Tracker, micro_batch: int, sees: Media) -> Iterator[None]:
    """Let models read what pictures are like, and take apart what they make."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_taken_apart(tracker, micro_batch))
        if sees.grids:
            stack.enter_context(known_values.worked_out(tracker))
            stack.enter_context(replaced(_for_one_sample(model, tracker, micro_batch, sees)))
        yield


def grids_of(sees: Media) -> torch.Tensor:
    """Make the grids of a sample's pictures, a tensor on `meta` whose values are known."""
    grids = torch.empty((len(sees.grids), 3), dtype=torch.int64, device=META)
    known_values.know(grids, torch.tensor(sees.grids))
    return grids


def _for_one_sample(
    model: nn.Module, tracker: Tracker, micro_batch: int, sees: Media
) -> list[tuple[Any, str, Any]]:
    """Return what stands in for functions that go through all samples, as `replaced` takes it."""
    config: Any = model.config
    code: Any = sys.modules[type(model).__module__]
    interfaces = type(ALL_ATTENTION_FUNCTIONS)
    found: list[tuple[Any, str, Any]] = [
        (interfaces, "get_interface", _in_pieces(interfaces.get_interface, tracker)),
    ]
    found += [
        (code, name, _stretching(getattr(code, name), num_tensors, micro_batch))
        for name, num_tensors in _OF_GRIDS.items()
        if micro_batch > 1 and hasattr(code, name)
    ]
    places = {*places_of(config, sees)}
    kinds: set[Any] = {type(module) for module in model.modules()}
    for kind in kinds:
        if "get_rope_index" in vars(kind):
            found.append((kind, "get_rope_index", _of_first(kind.get_rope_index, places)))
        if "_deepstack_process" in vars(kind):
            found.append((kind, "_deepstack_process", _at_pictures(kind._deepstack_process)))
    return found


def _stretching(
    function: Callable[..., Any], num_tensors: int, micro_batch: int
) -> Callable[..., Any]:
    """Return a function that makes of one sample's rows those of all."""

    def stretch(rows: torch.Tensor) -> torch.Tensor:
        if rows.is_meta:
            return rows.repeat(micro_batch, *(1 for _ in rows.shape[1:]))
        shape = (micro_batch * rows.shape[0], *rows.shape[1:])
        return torch.empty(shape, dtype=rows.dtype, device=META)

    def stretched(*args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        if isinstance(made, torch.Tensor):
            return stretch(made)
        return *map(stretch, made[:num_tensors]), *made[num_tensors:]

    return stretched


def _of_first(function: Callable[..., Any], places: Collection[int]) -> Callable[..., Any]:
    """Return a function that works out the first sample's positions, and takes the others to be alike."""

    def positions(self: Any, input_ids: Any, mm_token_type_ids: Any, **kwargs: Any) -> Any:
        num_samples, length = input_ids.shape
        kinds = mm_token_type_ids if num_samples == 1 else torch.empty_like(mm_token_type_ids[:1])
        value = [[int(place in places) for place in range(length)]]
        known_values.know(kinds, torch.tensor(value))
        if (mask := kwargs.get("attention_mask")) is not None:
            kwargs["attention_mask"] = mask[:1]
        made, deltas = function(self, input_ids[:1], mm_token_type_ids=kinds, **kwargs)
        del deltas  # For text that is generated: the model would keep them from step to step.
        return (made if num_samples == 1 else made.repeat(1, num_samples, 1)), None

    return positions


def _at_pictures(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that adds something to the tokens of pictures, as many as it has rows."""

    def add(self: Any, hidden: Any, mask: torch.Tensor, seen: torch.Tensor) -> Any:
        sft.say_num_true(mask, seen.shape[0])
        return function(self, hidden, mask, seen)

    return add


@contextlib.contextmanager
def _taken_apart(tracker: Tracker, micro_batch: int) -> Iterator[None]:
    """Let models take apart what pictures make."""
    plain: Any = torch.Tensor
    tolist, split, iterate = plain.tolist, plain.split, plain.__iter__

    def as_list(tensor: Any) -> Any:
        return _EachSample() if tensor.is_meta else tolist(tensor)

    def parts(tensor: Any, sizes: Any, dim: int = 0) -> Any:
        if isinstance(sizes, _EachSample):
            return torch.split_with_sizes(tensor, [tensor.shape[dim]], dim)
        is_of_one = tensor.is_meta and isinstance(sizes, list)
        if not is_of_one or sum(sizes) * micro_batch != tensor.shape[dim]:
            return split(tensor, sizes, dim)
        if dim == 0 and micro_batch > 1:
            return (tensor,)
        is_attention = dim == 2 and tensor.dim() == 4 and tensor.shape[0] == 1
        if is_attention and (micro_batch > 1 or len(sizes) > MOST_PIECES):
            return _ByLength.apply(tensor, sizes, micro_batch, tracker)
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


class _ByLength(torch.autograd.Function):
    """Parts of a tensor (1, heads, patches, size), one for all pieces of a length in all samples.

    Each has as many heads more as there are pieces: attention treats heads and pieces alike, and their
    tensors have as many bytes as those of all pieces.
    """

    @staticmethod
    def forward(
        context: Any, tensor: torch.Tensor, sizes: list[int], micro_batch: int, tracker: Tracker
    ) -> tuple[torch.Tensor, ...]:
        context.shape, context.tracker = tensor.shape, tracker
        _, num_heads, _, size = tensor.shape
        of_one, of_head, of_patch, of_number = tensor.stride()
        begin = tensor.storage_offset()
        parts = []
        for length, count in Counter(sizes).items():
            pieces = count * micro_batch
            part = (1, pieces * num_heads, length, size)
            strides = (of_one, of_head, pieces * of_patch, of_number)
            parts.append(tensor.as_strided(part, strides, begin))
            begin += length * pieces * of_patch
        return tuple(parts)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        context.tracker.pieces = 1
        # As PyTorch's own: torch 2.13 FunctionsManual.cpp, split_with_sizes_backward.
        _, num_heads, num_patches, size = context.shape
        each = [
            gradient.as_strided((num_heads, gradient.numel() // num_heads), (1, num_heads))
            for gradient in gradients
        ]
        joined = torch.cat(each, dim=1)
        return joined.as_strided(
            context.shape, (joined.numel(), num_patches * size, size, 1)
        ), *3 * (None,)


def _in_pieces(get: Callable[..., Any], tracker: Tracker) -> Callable[..., Any]:
    """Return a look-up of attentions that count their kernels for each piece, and put pieces in a row."""

    def get_interface(interfaces: Any, *asked: Any) -> Callable[..., Any]:
        attend = get(interfaces, *asked)

        def attention(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            num_heads = getattr(module, "num_heads", query.shape[1])
            pieces = query.shape[1] // num_heads
            if pieces == 1:
                return attend(module, query, *args, **kwargs)

            def count(_: Any = None) -> None:
                tracker.pieces = pieces

            count()
            try:
                out, weights = attend(module, query, *args, **kwargs)
            finally:
                tracker.pieces = 1
            if out.requires_grad:
                out.register_hook(count)
            return out.view(1, -1, num_heads, out.shape[-1]), weights

        return attention

    return get_interface


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
