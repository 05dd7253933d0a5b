"""flex_attention in a trace: Transformers' own integration runs, with what Inductor makes of PyTorch's.

Transformers compiles that one function, whatever else is compiled. AOTAutograd saves query, key and value
(cast where autocast is on), the output, its logsumexp and the tensors of the block mask; the kernels are
Triton templates with float32 sums in registers, so that gradients are written once, for the heads that
keys and values have. tests/contracts/test_flex_attention.py asks AOTAutograd itself, on the CPU.

A micro-batch has one block mask for all layers, eight int32 tensors, of blocks of 128 by 128.

Compiling keeps what it was called with, until Python's collector of cycles comes by: queries, keys and values
of the first layer of each kind of mask, and where layers are checkpointed and the embeddings are frozen two
tensors as large as the first layer's input. A step makes so few objects that the collector may never come:
they count as kept. Seen with PyTorch 2.13 for CUDA under tools/no_card (studies/no-card); what refers to
them was not found.

Not modelled: compiling (half a minute at the first step, and again for another length); the counts of
places per block while the mask is made; a trained term in the scores (T5's position bias), which is
refused.

Source: transformers 5.23 integrations/flex_attention.py and masking_utils.py, flex_attention_mask; torch
2.13 nn/attention/flex_attention.py, _higher_order_ops/flex_attention.py and
_inductor/kernel/flex/flex_attention.py.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autotune.worker.trace.cuda import Workspaces
from autotune.worker.trace.kernel_costs import attention_shape
from autotune.worker.trace.stand_ins import replaced
from autotune.worker.trace.tracker import Tracker

FLEX = "flex_attention"
SMALLEST_HEAD = 16
"""Fewest elements of a head: Triton's products take no fewer."""

_BLOCK = 128
_KERNEL = "_scaled_dot_product_flex_attention"


@contextlib.contextmanager
def on_meta(tracker: Tracker, workspaces: Workspaces, bytes_per_input: int) -> Iterator[None]:
    """Let flex_attention and its masks run without values, and record what they allocate and launch.

    `bytes_per_input`: of what a layer gets of a token, where compiling keeps that; 0 elsewhere.
    """
    from transformers import masking_utils
    from transformers.integrations import flex_attention

    compiled: set[tuple[str, ...]] = set()

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any) -> Any:
        kind = _kind_of(given["block_mask"])
        if kind not in compiled and tracker.knows(query):
            num_tokens = query.shape[0] * query.shape[2]
            of_input = 0 if compiled else num_tokens * bytes_per_input
            called_with = {tracker.index_of(each) for each in (query, key, value)}
            sizes = [tracker.recording.tensors[index].size_bytes for index in sorted(called_with)]
            for size_bytes in filter(None, [*sizes, of_input, of_input]):
                workspaces.indices.append(tracker.record_forever(size_bytes))
            compiled.add(kind)
        return _attend(tracker, query, key, value, **given)

    with replaced(
        [
            (flex_attention, "compile_friendly_flex_attention", attend),
            (masking_utils, "create_block_mask", block_mask),
        ]
    ):
        yield


def block_mask(mask_mod: Callable[..., Any], *, device: Any = "meta", **given: Any) -> Any:
    """The result of create_block_mask.

    That function is compiled: Inductor's code for it, on the CPU as well, counts the places of a block
    without a tensor of every pair.
    """
    from torch.nn.attention.flex_attention import BlockMask

    batch, heads = given["B"] or 1, given["H"] or 1
    lengths = given["Q_LEN"], given["KV_LEN"]
    rows, columns = (-(-length // _BLOCK) for length in lengths)

    def blocks(*shape: int) -> torch.Tensor:
        return torch.empty((batch, heads, *shape), dtype=torch.int32, device=device)

    names = [f"{full}{{}}_{name}" for full in ("", "full_") for name in ("num_blocks", "indices")]
    sides = {"kv": ((rows,), (rows, columns)), "q": ((columns,), (columns, rows))}
    tensors: dict[str, Any] = {
        name.format(side): blocks(*shape)
        for side, shapes in sides.items()
        for name, shape in zip(names, 2 * shapes, strict=True)
    }
    size = (_BLOCK, _BLOCK)
    return BlockMask(seq_lengths=lengths, BLOCK_SIZE=size, mask_mod=mask_mod, **tensors)


def _kind_of(block_mask: Any) -> tuple[str, ...]:
    """Names of the functions that a mask is made of: another set of them is compiled anew."""
    held = [] if block_mask is None else _held(block_mask.mask_mod)
    return tuple(sorted(getattr(each, "__name__", "") for each in held))


def _attend(
    tracker: Tracker,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    score_mod: Callable[..., Any],
    block_mask: Any,
    **_: Any,
) -> tuple[torch.Tensor, Any]:
    from torch.nn.attention.flex_attention import AuxOutput

    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    size = min(query.shape[-1], value.shape[-1])
    if size < SMALLEST_HEAD:
        raise ValueError(f"flex_attention has no heads of {size}: from {SMALLEST_HEAD}")
    if any(isinstance(term, torch.Tensor) for term in _held(score_mod)):
        raise ValueError("flex_attention adds a tensor to the scores here, which is not modelled")
    held = [] if block_mask is None else list(_held(block_mask.mask_mod))
    is_causal = any(getattr(part, "__name__", "") == "causal_mask_function" for part in held)
    of_mask = [part for part in held if isinstance(part, torch.Tensor)]
    if block_mask is not None:
        of_mask += [part for part in block_mask.as_tuple() if isinstance(part, torch.Tensor)]
    out, logsumexp = _Flex.apply(tracker, is_causal, query, key, value, *of_mask)
    return out, AuxOutput(lse=logsumexp, max_scores=None)


def _held(function: Any) -> Iterator[Any]:
    """Yield the function, and every function and tensor that its closure holds, at any depth."""
    yield function
    for value in inspect.getclosurevars(function).nonlocals.values():
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, torch.Tensor):
                yield each
            elif inspect.isfunction(each):
                yield from _held(each)


class _Flex(torch.autograd.Function):
    """Flex attention's graphs as AOTAutograd makes them, in the order in which Inductor runs them."""

    @staticmethod
    def forward(
        ctx: Any,
        tracker: Tracker,
        is_causal: bool,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *of_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        max_scores = torch.empty_like(logsumexp)
        out = _like(query, value.shape[-1])
        tracker.record_kernel(
            _KERNEL,
            (query, key, value, out, logsumexp, max_scores),
            num_flops=_num_flops(query, key, value, is_causal, of_scores=1, of_values=1),
            shape=attention_shape(query, key, is_causal),
        )
        del max_scores
        natural = torch.empty_like(logsumexp)  # of a logarithm to base 2
        tracker.record_kernel("mul", (logsumexp, natural))
        ctx.tracker, ctx.is_causal = tracker, is_causal
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, out, logsumexp, *of_mask)
        return out, natural

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        query, key, value, out, logsumexp, *of_mask = ctx.saved_tensors
        of_out, of_logsumexp = gradients
        tracker: Tracker = ctx.tracker
        assert of_out is not None
        if of_logsumexp is None:  # AOTAutograd makes what nobody asked for of zeros
            of_logsumexp = torch.zeros_like(logsumexp)
        scaled = torch.empty_like(logsumexp)
        tracker.record_kernel("mul", (of_logsumexp, scaled))
        del of_logsumexp
        delta = torch.empty_like(logsumexp)
        tracker.record_kernel("sum", (out, of_out, scaled, delta))
        of_query, of_value, of_key = _like(query), _like(value), _like(key)
        tracker.record_kernel(
            f"{_KERNEL}_backward",
            (query, key, value, logsumexp, delta, of_out, of_query, of_key, of_value),
            num_flops=_num_flops(query, key, value, ctx.is_causal, of_scores=3, of_values=2),
            shape=attention_shape(query, key, ctx.is_causal),
        )
        return None, None, of_query, of_key, of_value, *(None for _ in of_mask)


def _like(tensor: torch.Tensor, size: int | None = None) -> torch.Tensor:
    """Make another tensor with its dimensions in the same order in memory, without gaps; heads of `size`."""
    shape = [*tensor.shape[:-1], size or tensor.shape[-1]]
    order = sorted(range(tensor.dim()), key=lambda place: tensor.stride(place), reverse=True)
    within = tensor.new_empty([shape[place] for place in order])
    return within.permute([order.index(place) for place in range(tensor.dim())])


def _num_flops(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    *,
    of_scores: int,
    of_values: int,
) -> int:
    """Floating-point operations of so many products over a head's query and value.

    A head is filled up to a power of two; a block above the diagonal is left out. The backward pass counts
    five products, as FlashAttention's, although it makes seven: its rate is given for five.
    """
    filled = [1 << (tensor.shape[-1] - 1).bit_length() for tensor in (query, value)]
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    flops = 2 * pairs * (of_scores * filled[0] + of_values * filled[1])
    return flops // 2 if is_causal else flops
