"""Liger's kernels in a trace: its own Python code runs, its Triton kernels are noted, not launched.

What Liger allocates it allocates in Python, so a trace sees it where Liger takes `meta` for CUDA: the
name that it compares a tensor's device with is exchanged in its functions. A Triton kernel is noted
with the bytes of its tensors, times PASSES.

Source: liger-kernel 0.8.5, transformers 5.23 integrations/liger.py and Trainer._inner_training_loop.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from autotune.catalogue.tasks import CAUSAL
from autotune.space.trainers import TRAINERS, model_task
from autotune.worker.build.layers import inner_of
from autotune.worker.build.model import UnsupportedModel
from autotune.worker.trace.chunks import CHUNK_ROWS, Chunks
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.stand_ins import replaced, taken_for_cuda
from autotune.worker.trace.tracker import Tracker

aten = torch.ops.aten

PASSES = {
    # Read once for the running maximum and sum, once more for the gradient, which is written over them.
    "liger_cross_entropy_kernel": 3,
    # In place: read and written.
    "_triton_rope": 2,
    "_swiglu_backward_kernel": 2,
    "_swiglu_backward_kernel_tiled": 2,
    "_geglu_tanh_backward_kernel": 2,
    "element_mul_kernel": 2,
}
"""Number of times that a kernel touches its tensors, where that is not once."""


def apply(model: Any, task: str, trainer: str) -> None:
    """Apply Liger as TrainingArguments(use_liger_kernel=True) does; TRL's trainers keep their own loss.

    Raises UnsupportedModel where Liger is not installed or does not know the model.
    """
    if model_task(task) != CAUSAL:
        raise UnsupportedModel("Liger replaces the forward pass of causal language models only")
    kind = inner_of(model).config.model_type
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
        from transformers.integrations.liger import apply_liger_kernel
    except ImportError as error:
        raise UnsupportedModel(
            f"Liger is not installed here ({error}). It needs: pip install liger-kernel"
        ) from error
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UnsupportedModel(f"Liger has no kernels for model type {kind}")
    own_loss = {"fused_linear_cross_entropy": False} if TRAINERS[trainer].is_trl else None
    apply_liger_kernel(model, own_loss)


@contextlib.contextmanager
def on_meta(tracker: Tracker, device: Device, chunks: Chunks) -> Iterator[None]:
    """Let Liger's kernels be applied and traced."""
    try:
        from liger_kernel.ops import fused_linear_cross_entropy as fused
    except ImportError:
        yield  # `apply` says so.
        return

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        name = kernel.fn.__name__
        tracker.record_kernel(name, (args, tuple(kwargs.values())), passes=PASSES.get(name, 1))

    counting = _Counting()
    tracker.decompositions[aten.equal.default] = functools.partial(_differ, tracker)
    tracker.answer_too(aten._local_scalar_dense.default, counting.answer)
    loss = functools.partial(counting.run, fused.fused_linear_cross_entropy_forward)
    attributes: list[tuple[Any, str, Any]] = [(fused, "fused_linear_cross_entropy_forward", loss)]
    if chunks.is_symbolic:
        attributes += [
            (fused, "triton", _ChunkSizes(fused.triton, chunks)),
            (fused, "range", chunks.over_chunks),
        ]
    with as_on_cuda("meta", device, launch), replaced(attributes):
        yield


@contextlib.contextmanager
def as_on_cuda(device_type: str, device: Device, launch: Callable[..., None]) -> Iterator[None]:
    """Let Liger take tensors of that type for CUDA's, on that card; `launch` gets its Triton kernels.

    What Liger patches in Transformers is undone at the end.
    """
    import liger_kernel.transformers  # noqa: F401  (its modules must be there)
    from liger_kernel.backends import available_impls
    from triton.runtime import autotuner, jit

    # Its first search for other implementations logs what it cannot import: not amid a step.
    available_impls("rope")

    properties = SimpleNamespace(multi_processor_count=device.num_sms)
    attributes: list[tuple[Any, str, Any]] = [
        (jit.JITFunction, "run", launch),
        (autotuner.Autotuner, "run", lambda tuner, *args, **kw: tuner.fn.run(*args, **kw)),
        (autotuner.Heuristics, "run", lambda rules, *args, **kw: rules.fn.run(*args, **kw)),
        (torch.cuda, "get_device_properties", lambda *_: properties),
        (torch.cuda, "get_device_capability", lambda *_: device.compute_capability),
    ]
    with (
        _unpatched_afterwards(),
        taken_for_cuda(device_type, "liger_kernel.ops"),
        replaced(attributes),
    ):
        yield


def _differ(tracker: Tracker, _: torch.Tensor, one: torch.Tensor) -> bool:
    """Answer that the gradient of a mean over tokens is not 1.

    Before torch 2.15 torch.tensor(1.0) is made unseen on `meta`.
    """
    tracker.index_of(one)
    return False


class _Counting:
    """Answers how many tokens count, which the loss alone may ask: its kernels scale by the number."""

    def __init__(self) -> None:
        self._is_asked = False

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._is_asked = True
        try:
            return forward(*args, **kwargs)
        finally:
            self._is_asked = False

    def answer(self, tensor: torch.Tensor) -> Any:
        return 1 if self._is_asked and tensor.is_meta else NotImplemented


class _ChunkSizes:
    """A stand-in for `triton` that the loss asks for the size and the number of its chunks."""

    def __init__(self, triton: ModuleType, chunks: Chunks) -> None:
        self._triton = triton
        self._chunks = chunks
        self._divided = (0, 0)

    def cdiv(self, dividend: int, divisor: int) -> int:
        if divisor == CHUNK_ROWS:
            return 2
        self._divided = (dividend, divisor)
        return -(-dividend // divisor)

    def next_power_of_2(self, number: int) -> int:
        if self._chunks.rule is None:
            self._chunks.meets("liger", *self._divided)
            return CHUNK_ROWS
        return int(self._triton.next_power_of_2(number))


@contextlib.contextmanager
def _unpatched_afterwards() -> Iterator[None]:
    """Undo Liger's changes afterwards.

    It replaces functions and classes of Transformers' modules, and some classes' forward pass.
    """
    modules = [m for n, m in sys.modules.items() if n.startswith("transformers.models.")]
    names = {module: dict(vars(module)) for module in modules if ".modeling_" in module.__name__}
    classes = {c for values in names.values() for c in values.values() if isinstance(c, type)}
    forwards: dict[Any, Any] = {c: vars(c)["forward"] for c in classes if "forward" in vars(c)}
    try:
        yield
    finally:
        for module, values in names.items():
            vars(module).update(values)
        for changed, forward in forwards.items():
            changed.forward = forward
