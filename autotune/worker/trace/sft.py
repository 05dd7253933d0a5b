"""TRL's SFTTrainer in a trace: its own loss runs, with the entropy and the token accuracy it logs.

Its loss goes through the tokens in chunks and makes no logits. What runs where on CUDA is asked of
functions that are answered for `meta` here; its Triton kernels are noted, not launched. On a CPU it scores
every position, also those that do not count, and folds a chunk's logits in PyTorch: so does `meta` by itself.

Source: trl 1.16 trainer/sft_trainer.py (compute_loss), trainer/utils.py (add_fused_lm_head),
kernels/chunked_logprob.py.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from autotune.catalogue.tasks import CAUSAL, PICTURES
from autotune.worker.build.layers import inner_of
from autotune.worker.build.model import UnsupportedModel
from autotune.worker.trace.chunks import CHUNK_ROWS, Chunks
from autotune.worker.trace.kernels import Buffer
from autotune.worker.trace.stand_ins import replaced, taken_for_cuda
from autotune.worker.trace.tracker import Tracker

aten = torch.ops.aten

PASSES = {"_backward_kernel": 2}
"""Number of times that a kernel touches its tensors, which it reads and writes in place."""


def prepare(model: Any, task: str) -> None:
    """Prepare a model with its adapter as SFTTrainer does.

    Raises UnsupportedModel for another task, or where TRL is not installed.
    """
    if task not in (CAUSAL, PICTURES):
        raise UnsupportedModel("SFTTrainer trains causal language models only")
    try:
        from trl.trainer.utils import add_fused_lm_head
    except ImportError as error:
        raise UnsupportedModel(
            f"TRL is not installed here ({error}). It needs: pip install trl"
        ) from error
    add_fused_lm_head(inner_of(model), outputs=("log_probs", "entropy", "is_top1"))


def is_cast(name: str, parameter: nn.Parameter) -> bool:
    """Tell whether TRL's trainers cast this weight to bfloat16 where the base is quantised."""
    return parameter.requires_grad and "lora_magnitude_vector" not in name


def loss_of(
    model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | None
) -> Any:
    """Compute the loss with SFTTrainer.compute_loss, on one device."""
    from trl.trainer.sft_trainer import SFTTrainer

    trainer: Any = SimpleNamespace(
        model=model,
        aux_loss_enabled=False,
        compute_loss_func=None,
        label_smoother=None,
        args=SimpleNamespace(loss_type="nll", average_tokens_across_devices=True, max_length=None),
        accelerator=SimpleNamespace(
            parallelism_config=None, num_processes=1, gather_for_metrics=lambda tensor: tensor
        ),
        get_tp_size=lambda: 1,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    return SFTTrainer.compute_loss(trainer, model, inputs, num_items_in_batch=num_items_in_batch)


@contextlib.contextmanager
def on_meta(
    tracker: Tracker, chunks: Chunks, counted: tuple[int, int], backend: str
) -> Iterator[None]:
    """Let TRL's loss be traced: of a row of so many tokens so many count, all of them or a completion's."""
    modules = chunking_modules()
    if not modules:
        yield  # `prepare` says so.
        return

    def launch(name: str, arguments: Iterable[Any]) -> None:
        tracker.record_kernel(name, tuple(arguments), passes=PASSES.get(name, 1))

    masks = Masks(tracker, counted)
    # The tracker answers what is true or not.
    tracker.answer_too(
        aten._local_scalar_dense.default,
        lambda tensor: 1 if tensor.is_meta and tensor.dtype is not torch.bool else NotImplemented,
    )
    tracker.decompositions |= {
        aten.index.Tensor: masks.index,
        aten._index_put_impl_.default: masks.gradient_put,
        aten.masked_scatter_backward.default: masks.masked_scatter_backward,
    }
    attributes: list[tuple[Any, str, Any]] = []
    if chunks.is_symbolic:
        for module in filter(lambda each: hasattr(each, "TOKEN_CHUNK_SIZE"), modules):
            over = functools.partial(_over, chunks, module.TOKEN_CHUNK_SIZE)
            attributes += [(module, "TOKEN_CHUNK_SIZE", CHUNK_ROWS), (module, "range", over)]
    with contextlib.ExitStack() as stack:
        if backend == "cuda":
            stack.enter_context(as_on_cuda(launch))
            stack.enter_context(taken_for_cuda("meta", "trl.kernels"))
        stack.enter_context(replaced(attributes))
        yield


def _over(chunks: Chunks, limit: int, *bounds: int) -> Iterable[int]:
    """Replace `range` in a module with a loop over chunks of so many tokens at most."""
    if bounds[2:] != (CHUNK_ROWS,):
        return builtins.range(*bounds)
    chunks.meets("trl", bounds[1], limit)
    return chunks.over_chunks(*bounds)


_CHUNKING = (
    "trl.trainer.utils",
    "trl.trainer.distillation_trainer",
    "trl.kernels.chunked_logprob",
    "trl.kernels.chunked_divergence",
)
"""Modules that take another way on CUDA, some of which a version of TRL may lack."""


def chunking_modules() -> list[Any]:
    """TRL's modules that take another way on CUDA; none where it has no chunked loss at all."""
    found = []
    for name in _CHUNKING:
        with contextlib.suppress(ImportError):
            found.append(importlib.import_module(name))
    return found if any(hasattr(module, "TOKEN_CHUNK_SIZE") for module in found) else []


def as_on_cuda(
    launch: Callable[[str, Iterable[Any]], None],
) -> contextlib.AbstractContextManager[None]:
    """Let TRL take the way it takes on CUDA; `launch` gets its Triton kernels."""
    division = SimpleNamespace(cdiv=lambda dividend, divisor: -(-dividend // divisor))
    attributes: list[tuple[Any, str, Any]] = []
    for module in chunking_modules():
        attributes.append((module, "_use_triton", lambda _: True))
        if hasattr(module, "TOKEN_CHUNK_SIZE"):
            attributes.append((module, "triton", division))
            kernels = (name for name in vars(module) if name.endswith("_kernel"))
            attributes += [(module, name, _Kernel(name, launch)) for name in kernels]
    return replaced(attributes)


class _Kernel:
    """A stand-in for a Triton kernel, called as `kernel[grid](...)`."""

    def __init__(self, name: str, launch: Callable[[str, Iterable[Any]], None]) -> None:
        self._name = name
        self._launch = launch

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: self._launch(self._name, [*args, *kwargs.values()])


def places_of(shape: tuple[int, int]) -> tuple[Buffer, ...]:
    """The places that `nonzero` finds in an indexing mask, gone with the operation (Indexing.cu)."""
    return (Buffer(math.prod(shape) * 8),)


def copy_of(mask: torch.Tensor, tensor: torch.Tensor) -> tuple[Buffer, ...]:
    """The mask as `nonzero` reads it: copied where it is stretched to the tensor (Nonzero.cu)."""
    return () if mask.numel() == tensor.numel() else (Buffer(tensor.numel()),)


class Masks:
    """Indexing with a mask, of which `meta` cannot know where it is true.

    It is so everywhere, or in as many places as it is said to be, or where something is scattered to, in as
    many places as that has elements; in a mask of rows of so many tokens, in so many of each.
    """

    def __init__(self, tracker: Tracker, counted: tuple[int, int] = (0, 0)) -> None:
        self._tracker = tracker
        self._row, self._counted = counted

    def index(self, tensor: torch.Tensor, indices: Any) -> Any:
        return self._run(aten.index.Tensor, indices, tensor)

    def gradient_put(self, tensor: torch.Tensor, indices: Any, *values: Any) -> Any:
        return self._run(aten._index_put_impl_.default, indices, tensor, *values)

    def index_put(self, tensor: torch.Tensor, indices: Any, *values: Any) -> Any:
        return self._run(aten.index_put.default, indices, tensor, *values)

    def index_put_(self, tensor: torch.Tensor, indices: Any, *values: Any) -> Any:
        return self._run(aten.index_put_.default, indices, tensor, *values)

    def masked_scatter_backward(
        self, gradient: torch.Tensor, mask: torch.Tensor, sizes: Any
    ) -> Any:
        self._tracker.record_buffers(copy_of(mask, gradient))
        shape = math.prod(sizes), gradient.dim()
        return self._index(aten.index.Tensor, shape, [], gradient).view(sizes)

    def _run(self, operation: Any, indices: Any, tensor: torch.Tensor, *rest: Any) -> Any:
        *before, mask = indices
        if any(index is not None for index in before):
            return NotImplemented
        if mask.dtype is not torch.bool or not mask.is_meta:
            return NotImplemented
        number = num_true(mask)
        if self._counted < self._row and mask.dim() == 2 and mask.shape[1] == self._row:
            number = mask.shape[0] * self._counted
        return self._index(operation, (number, mask.dim()), before, tensor, *rest)

    def _index(
        self, operation: Any, shape: tuple[int, int], before: Any, tensor: torch.Tensor, *rest: Any
    ) -> Any:
        with _disable_current_modes():
            empty = torch.empty(shape, dtype=torch.int64, device=tensor.device)
            places = list(empty.unbind(1))
        out = operation(tensor, [*before, *places], *rest)
        self._tracker.record_buffers(places_of(shape))
        return out


def num_true(mask: torch.Tensor) -> int:
    """Return in how many places a mask is true."""
    said: int = getattr(mask.untyped_storage(), "num_true", mask.numel())
    return said


def say_num_true(mask: torch.Tensor, number: int) -> None:
    """Say in how many places a mask is true."""
    storage: Any = mask.untyped_storage()
    storage.num_true = number
