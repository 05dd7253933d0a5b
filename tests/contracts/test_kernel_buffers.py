"""Buffers inside kernels against what PyTorch's CUDA build asked its allocator for, operation by operation.

Recorded under a CUDA runtime that computes nothing: studies/op-memory-no-card/.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch

from autotune.memory.traces.terms import RULES
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.kernel_buffers import hidden_buffers
from autotune.worker.trace.kernels import parted
from validation.efficient_attention_no_card import operands

STUDY = Path(__file__).parents[2] / "studies" / "op-memory-no-card"
ROWS = STUDY / "rows.jsonl"
EFFICIENT = STUDY / "efficient_attention.jsonl"
FORWARD = STUDY / "efficient_attention_forward.jsonl"
EFFICIENT_FORWARD = torch.ops.aten._scaled_dot_product_efficient_attention.default
EFFICIENT_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
H200 = Device(compute_capability=(9, 0), cublas_workspace_bytes=0, num_sms=132)
NOT_MODELLED_BYTES = {
    # cub's temporary storage, pointers to each expert's matrices, random numbers' seeds, copies of masks.
    "aten.sort.default": 2**20,
    "aten.topk.default": 6_500_000,
    "aten.index_put.default": 700_000,
    "aten.cumsum.default": 1024,
    "aten._grouped_mm.default": 100_000,
    "aten.linalg_solve_triangular.default": 2**15,
    "aten.embedding.default": 2**15,
    "aten.index.Tensor": 2**16,
    "aten.sum.dim_IntList": 4096,
    "aten.sum.default": 2**15,
    "aten._safe_softmax.default": 4,
    "aten._scaled_dot_product_flash_attention.default": 16,
}
"""No more than so many bytes too few; nothing of the others."""
FEW_ROWS = 2
"""An embedding of no more has partial sums that are never made."""


def _recorded() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]


def test_buffers_are_what_pytorch_asks_for() -> None:
    rows = _recorded()
    assert len(rows) > 100
    for row in rows:
        func, args, out = _again(row)
        predicted = sum(b.size_bytes for b in hidden_buffers(H200.multiprocessors, func, args, out))
        missing = row["hidden_bytes"] - predicted
        if row["operation"].startswith("aten.embedding_dense") and args[2] <= FEW_ROWS:
            assert missing < 0
            continue
        assert 0 <= missing <= NOT_MODELLED_BYTES.get(row["operation"], 0), row


def test_what_lies_in_another_order_is_copied() -> None:
    """As under tools.no_card on an RTX 3090 (validation.no_card_fuzz): Wav2Vec2's norms and convolutions."""
    aten, multiprocessors = torch.ops.aten, H200.multiprocessors
    lying = torch.empty(3, 499, 512, device="meta", dtype=torch.bfloat16).transpose(1, 2)
    copy_bytes = lying.nbytes

    def found(func: Any, *args: Any) -> list[list[int]]:
        groups = parted(hidden_buffers(multiprocessors, func, args, None))
        return [[each.size_bytes for each in group] for group in groups]

    assert found(aten.native_layer_norm.default, lying) == [[copy_bytes], [], []]
    both = found(aten.native_layer_norm_backward.default, lying, lying)
    assert both == [[copy_bytes], [], [copy_bytes]]
    rest = (None, [512], [2], [0], [1], False, [0], 1)
    for has_bias in (False, True):
        asked = [True, True, has_bias]
        first, _, then = found(aten.convolution_backward.default, lying, lying, *rest, asked)
        assert first == [copy_bytes, copy_bytes]
        assert bool(then) is has_bias


def test_ctc_holds_sums_over_paths_from_both_ends() -> None:
    """As under tools.no_card on an RTX 3090 (torch 2.15): 4 samples of 499 moments, 150 tokens of 32."""
    aten = torch.ops.aten
    shapes = (4,), (499, 4, 32), (4, 499, 301)
    losses, log_probs, paths = (torch.empty(shape, device="meta") for shape in shapes)

    def found(func: Any, args: tuple[Any, ...], out: Any) -> list[list[int]]:
        groups = parted(hidden_buffers(H200.multiprocessors, func, args, out))
        return [[each.size_bytes for each in group] for group in groups]

    forward = found(aten._ctc_loss.Tensor, (log_probs,), (losses, paths))
    assert forward == [[32, 32, 32], [], []]
    args = (losses, log_probs, None, None, None, losses, paths)
    backward = found(aten._ctc_loss_backward.Tensor, args, log_probs)
    assert backward == [[32, 32, 32, 2_403_184], [], [1_205_584, 7_984, 7_984, 1_205_584, 7_984]]
    lying = log_probs.transpose(0, 1)
    assert found(aten._log_softmax_backward_data.default, (lying, log_probs), None)[2] == [255_488]


def test_efficient_attention_asks_for_what_it_was_recorded_to_on_seven_cards() -> None:
    rows = [json.loads(line) for line in EFFICIENT.read_text(encoding="utf-8").splitlines()]
    assert len({tuple(row["compute_capability"]) for row in rows}) == 7
    for row in rows:
        device = Device(
            compute_capability=tuple(row["compute_capability"]), cublas_workspace_bytes=0
        )
        call = row["call"]
        gradient, *inputs = operands(call, "meta")
        args = gradient, *inputs, *[None] * 5, call["dropout"]
        first, brief, then = parted(
            hidden_buffers(device.multiprocessors, EFFICIENT_BACKWARD, args, None)
        )
        made = [tensor.nbytes for tensor in inputs]
        for group in first, brief, then:
            assert all(
                b.rule is None or RULES[b.rule[0]](b.rule[1:]) == b.size_bytes for b in group
            )
        of_first, of_brief, of_then = ([b.size_bytes for b in g] for g in (first, brief, then))
        asked = [size_bytes for size_bytes in row["events"] if size_bytes > 0]
        assert {*of_first, *made, *of_brief, *of_then} == {*asked}, row
        peak_bytes = sum(of_first) + sum(made) + max(sum(of_brief), sum(of_then))
        assert peak_bytes == max(itertools.accumulate(row["events"])), row


def test_efficient_attention_sums_outputs_of_large_heads_in_a_buffer_on_seven_cards() -> None:
    rows = [json.loads(line) for line in FORWARD.read_text(encoding="utf-8").splitlines()]
    assert len({tuple(row["compute_capability"]) for row in rows}) == 7
    for row in rows:
        _, *inputs = operands(row["call"], "meta")
        found = hidden_buffers(H200.multiprocessors, EFFICIENT_FORWARD, tuple(inputs), None)
        given_back = [-size_bytes for size_bytes in row["events"] if size_bytes < 0]
        assert [buffer.size_bytes for buffer in found] == given_back, row


def test_grouped_heads_have_gradients_of_every_head_in_the_efficient_kernel() -> None:
    """Torch 2.14.1 allocates 2 x 2 MiB for these before the accumulator (tools/no_card, RTX 3090)."""
    query = torch.empty(2, 8, 512, 64, device="meta")
    key = torch.empty(2, 2, 512, 64, device="meta")
    found = hidden_buffers(H200.multiprocessors, EFFICIENT_BACKWARD, (query, query, key, key), None)
    alone = hidden_buffers(
        H200.multiprocessors, EFFICIENT_BACKWARD, (query, query, query, query), None
    )
    expanded = [buffer.size_bytes for buffer in found if buffer not in alone]
    assert expanded == [2 * 2**20] * 2
    assert len(found) == len(alone) + 2


def _again(row: dict[str, Any]) -> tuple[Any, tuple[Any, ...], Any]:
    """The same call on `meta`, where what it returns is asked for."""
    _, name, overload = row["operation"].split(".")
    func = getattr(getattr(torch.ops.aten, name), overload)
    args = tuple(_operand(value) for value in row["args"])
    kwargs = {name: getattr(torch, value) for name, value in row["kwargs"].items()}
    asks_for_out = name in ("sum", "mean", "cumsum", "_safe_softmax")
    return func, args, func(*args, **kwargs) if asks_for_out else None


def _operand(value: Any) -> Any:
    if isinstance(value, dict):
        dtype = getattr(torch, value["dtype"])
        return torch.empty_strided(value["shape"], value["stride"], dtype=dtype, device="meta")
    if isinstance(value, list):
        return [_operand(item) for item in value]
    return getattr(torch, value) if isinstance(value, str) else value  # a dtype
