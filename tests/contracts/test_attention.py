"""FlashAttention through Transformers' integration, without its library, against PyTorch's own."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from autotune.catalogue.attention import ATTENTIONS, FLASH_ATTENTIONS
from autotune.catalogue.installed import OTHER_ATTENTION_SINCE
from autotune.memory.traces import Trace
from autotune.records.estimate import TraceSpec
from autotune.worker.build import model as models
from autotune.worker.build.expanded_heads import expand_key_heads
from autotune.worker.build.model import UnsupportedModel
from autotune.worker.trace import attention as attention_module
from autotune.worker.trace import kernel_costs, sdpa
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.sdpa import Call, attention_kernel
from autotune.worker.trace.step import trace_step

ADA = Device(compute_capability=(8, 9), cublas_workspace_bytes=8_519_680)

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "vocab_size": 1000,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 352,
}
ODD_HEADS = {**LLAMA, "hidden_size": 480}
"""Heads of 60, which the kernels pad to 64."""


def trace(
    attention: str,
    config: dict[str, Any],
    *,
    sequence_length: int = 1000,
    device: Device = ADA,
    **changes: Any,
) -> Trace:
    spec = {
        "method": "full",
        "lora_targets": None,
        "quantization": "none",
        "precision": "bf16-true",
        "activation_checkpointing": 0,
        "activation_offloading": False,
        "single": False,
        **changes,
    }
    answer = trace_step(
        models.load_config(config),
        "causal-lm",
        TraceSpec(attention=attention, **spec),
        sequence_length=sequence_length,
        device=device,
    )
    return Trace(json.loads(json.dumps(answer)))


def peak_bytes(traced: Trace) -> int:
    return int(traced.running_bytes("again", 4, 16).max())


def flops(traced: Trace) -> float:
    return sum(launch.count * launch.flops for launch in traced.launches(4, 16))


@pytest.mark.parametrize("config", [LLAMA, ODD_HEADS], ids=["heads of 64", "heads of 60"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"single": True},
        {"precision": "bf16-mixed", "activation_checkpointing": 1},
        {"method": "lora", "lora_targets": "all-linear", "precision": "bf16-autocast"},
    ],
    ids=["full", "micro-batch 1", "mixed", "lora"],
)
def test_the_second_keeps_what_pytorch_keeps(
    config: dict[str, Any], changes: dict[str, Any]
) -> None:
    """PyTorch's flash kernels are FlashAttention 2's; sdpa picks them on this card, without a mask."""
    own, library = (trace(name, config, **changes) for name in ("sdpa", "flash_attention_2"))
    assert peak_bytes(library) == peak_bytes(own)
    assert flops(library) == flops(own)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_attention_2", "flex_attention"])
def test_a_shape_is_that_of_the_arithmetic(attention: str) -> None:
    """Products multiply and add m x n x k times; attention has two such products, its backward pass five."""
    launches = trace(attention, LLAMA).launches(4, 16)
    products = [launch for launch in launches if launch.kernel.name in ("mm", "bmm")]
    assert products
    for launch in products:
        assert launch.flops == 2 * math.prod(launch.shape), launch
    fused = [launch for launch in launches if "attention" in launch.kernel.name]
    assert bool(fused) == (attention != "eager")
    for launch in fused:
        samples, heads, key_heads, queries, keys, size, is_causal = launch.shape
        assert (samples, queries, keys, is_causal) == (4, 1000, 1000, 1)
        assert (heads, key_heads) == (LLAMA["num_attention_heads"], LLAMA["num_key_value_heads"])
        num_products = 5 if "backward" in launch.kernel.name else 2
        assert launch.flops == num_products * samples * heads * queries * keys * size


def test_a_reduction_has_rows_and_columns() -> None:
    launches = trace("eager", LLAMA).launches(4, 16)
    shapes = {launch.shape for launch in launches if launch.kernel.name == "_softmax"}
    assert shapes == {(4 * LLAMA["num_attention_heads"] * 1000, 1000)}
    losses = [launch for launch in launches if launch.kernel.name == "_log_softmax"]
    assert {launch.shape[1] for launch in losses} == {LLAMA["vocab_size"]}


BERT = {
    "model_type": "bert",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}


@pytest.mark.parametrize(
    ("config", "precision"),
    [(LLAMA, "fp16-mixed"), (BERT, "fp16-mixed"), (BERT, "bf16-mixed"), (BERT, "bf16-true")],
)
def test_a_softmax_is_a_kernel_in_any_precision(config: dict[str, Any], precision: str) -> None:
    """BERT's scores are float16 where nothing masks them: one kernel makes float32 of them."""
    launches = trace("eager", config, precision=precision).launches(4, 16)
    for name in ("_softmax", "_softmax_backward_data"):
        of_softmax = [launch for launch in launches if launch.kernel.name == name]
        assert sum(launch.count for launch in of_softmax) == config["num_hidden_layers"], name


def test_the_third_sums_grouped_heads_in_float32() -> None:
    """Its dK and dV are summed in float32 for the key heads, the second's kept for all in 16 bits."""
    names = {k.name for k in trace("flash_attention_3", LLAMA).kernels}
    assert {
        "_scaled_dot_product_flash3_attention",
        "_scaled_dot_product_flash3_attention_backward",
    } <= names
    assert not any("flash_attention" in name for name in names)


@pytest.mark.parametrize("attention", FLASH_ATTENTIONS)
@pytest.mark.parametrize(
    ("change", "precision", "message"),
    [
        ({"head_dim": 320}, "bf16-true", "no heads of 320: up to 256"),
        ({}, "fp32", "does not compute in torch.float32"),
    ],
)
def test_what_the_kernels_refuse_is_refused(
    attention: str, change: dict[str, Any], precision: str, message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        trace(attention, {**LLAMA, **change}, precision=precision)


# Samples, tokens of each, layers, heads and their size; bytes of a bfloat16.
BATCH, LENGTH, LAYERS, HEADS, SIZE, BF16 = 4, 1000, 3, 8, 64, 2


def kernel_names(traced: Trace) -> set[str]:
    return {kernel.name for kernel in traced.kernels}


def kept_bytes(traced: Trace) -> int:
    """Alive when the forward pass is over."""
    events = traced.running_bytes("again", BATCH, 16)
    return int(events[traced.num_forward_events - 1])


@pytest.mark.parametrize(
    ("capability", "kernel"),
    [((7, 5), "bmm"), ((8, 0), "efficient"), ((8, 9), "efficient"), ((9, 0), "cudnn")],
)
def test_a_mask_keeps_flash_attention_away(capability: tuple[int, int], kernel: str) -> None:
    """bfloat16 on Turing goes by the math kernel, with and without a mask."""
    device = Device(compute_capability=capability, cublas_workspace_bytes=0)
    names = kernel_names(trace("sdpa", LLAMA, device=device, batching="padded"))
    assert {name for name in names if kernel in name}
    assert not any("flash" in name for name in names)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
def test_heads_that_are_broadcast_keep_every_fused_kernel_away(capability: tuple[int, int]) -> None:
    """Falcon gives the one head of its keys as it is; since torch 2.14 it may be fused all the same."""
    device = Device(compute_capability=capability, cublas_workspace_bytes=0)
    for multi_query in (True, False):
        falcon = {
            "model_type": "falcon",
            "hidden_size": 512,
            "num_attention_heads": 8,
            "num_hidden_layers": 3,
            "vocab_size": 1000,
            "multi_query": multi_query,
        }
        names = kernel_names(trace("sdpa", falcon, device=device))
        is_fused = any("scaled_dot_product" in name for name in names)
        assert is_fused == (not multi_query or sdpa.TORCH_VERSION >= OTHER_ATTENTION_SINCE)


@pytest.mark.parametrize("batching", ["packed", "padded"])
def test_falcon_calls_flash_attention_itself(batching: str) -> None:
    """Its module imports the function only where the library is installed (modeling_falcon.py)."""
    falcon = {
        "model_type": "falcon",
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_hidden_layers": 3,
        "vocab_size": 1000,
    }
    names = kernel_names(trace("flash_attention_2", falcon, batching=batching))
    assert {name for name in names if "attention" in name} == {
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
    }


def test_each_layer_keeps_a_mask_of_its_own() -> None:
    """Added in bfloat16, for all heads; and grouped heads are repeated before it (use_gqa_in_sdpa)."""
    whole, padded = (trace("sdpa", LLAMA, batching=name) for name in ("packed", "padded"))
    masks = LAYERS * BATCH * LENGTH**2 * BF16
    repeated = LAYERS * 2 * BATCH * LENGTH * (HEADS - 2) * SIZE * BF16
    assert kept_bytes(padded) - kept_bytes(whole) == pytest.approx(masks + repeated, rel=0.02)
    # The causal half is no longer left out.
    half = LAYERS * BATCH * HEADS * LENGTH**2 * SIZE * (4 + 10) / 2
    assert flops(padded) - flops(whole) == pytest.approx(half, rel=0.01)


def test_a_mask_whose_rows_are_not_aligned_is_copied() -> None:
    """To rows of 1,008: so many bytes that live only while attention's first mask does."""
    even, odd = (
        trace("sdpa", LLAMA, sequence_length=length, batching="padded") for length in (1000, 1001)
    )
    aligned_bytes, copied_bytes = BATCH * 1000**2 * BF16, BATCH * 1001 * 1008 * BF16
    assert aligned_bytes in even.sizes(BATCH, 16)
    assert copied_bytes in odd.sizes(BATCH, 16)
    assert BATCH * 1000 * 1008 * BF16 not in even.sizes(BATCH, 16)


@pytest.mark.parametrize(
    ("capability", "dtype", "size", "kernel"),
    [
        # sdp_utils.cpp, minimum_gemm_alignment: eight 16-bit elements on tensor cores.
        ((8, 9), torch.bfloat16, 60, "math"),
        ((8, 9), torch.float32, 60, "efficient"),
        ((7, 5), torch.float16, 60, "math"),
        ((7, 5), torch.float16, 64, "efficient"),
        ((6, 1), torch.float16, 60, "efficient"),
    ],
)
def test_heads_of_odd_sizes_with_a_mask(
    capability: tuple[int, int], dtype: torch.dtype, size: int, kernel: str
) -> None:
    heads = torch.empty(2, 4, 16, size, dtype=dtype, device="meta", requires_grad=True)
    mask = torch.empty(2, 1, 16, 16, dtype=dtype, device="meta")
    call = Call(query=heads, key=heads, value=heads, mask=mask)
    assert attention_kernel(capability, call) == kernel


@pytest.mark.parametrize(
    ("prefers_cudnn", "plain", "masked"), [(True, "cudnn", "cudnn"), (False, "flash", "efficient")]
)
def test_builds_for_cuda_12_leave_cudnn_out(
    monkeypatch: pytest.MonkeyPatch, prefers_cudnn: bool, plain: str, masked: str
) -> None:
    """Their cuDNN is too old (check_prefer_cudnn_attention)."""
    monkeypatch.setattr(sdpa, "PREFERS_CUDNN", prefers_cudnn)
    heads = torch.empty(2, 4, 16, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    call = Call(query=heads, key=heads, value=heads, is_causal=True)
    assert attention_kernel((9, 0), call) == plain
    mask = torch.empty(2, 1, 16, 16, dtype=torch.bfloat16, device="meta")
    assert attention_kernel((9, 0), Call(query=heads, key=heads, value=heads, mask=mask)) == masked


@pytest.mark.parametrize("config", [LLAMA, ODD_HEADS], ids=["heads of 64", "heads of 60"])
@pytest.mark.parametrize("attention", FLASH_ATTENTIONS)
@pytest.mark.parametrize("batching", ["padded", "padding-free"])
def test_samples_of_their_own_take_the_same_kernels_by_their_beginnings(
    attention: str, batching: str, config: dict[str, Any]
) -> None:
    """The work and, but for the copies of q, k and v without padding, the memory is a whole batch's."""
    whole, own = (trace(attention, config, batching=name) for name in ("packed", batching))
    forward = "_scaled_dot_product_flash" + ("3" if attention.endswith("3") else "")
    assert {f"{forward}_attention", f"{forward}_attention_backward"} <= kernel_names(own)
    assert flops(own) == flops(whole)
    copied = LAYERS * BATCH * LENGTH * (HEADS + 2 + 2) * config["hidden_size"] // HEADS * BF16
    more = kept_bytes(own) - kept_bytes(whole)
    assert more < 1.1 * copied + BATCH * LENGTH * 64 if batching == "padded" else more < 2**20


@pytest.mark.parametrize("changes", [{}, {"liger": True}, {"trainer": "trl-sft"}])
def test_whatever_makes_the_loss_the_longest_sample_of_a_padded_batch_is_known(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("liger_kernel.transformers")
    longest = []

    def noting(*args: Any, **kwargs: Any) -> Any:
        longest.extend(args[5:7])
        return varlen_attention(*args, **kwargs)

    varlen_attention = attention_module.varlen_attention
    monkeypatch.setattr(attention_module, "varlen_attention", noting)
    trace("flash_attention_2", LLAMA, batching="padded", **changes)
    assert {*longest} == {1000}


def test_the_row_of_a_padding_free_batch_grows_with_its_samples() -> None:
    """A trace stands for every micro-batch: its sizes are those of a row traced at that length."""
    symbolic = trace("flash_attention_2", LLAMA, batching="padding-free")
    row = trace(
        "flash_attention_2", LLAMA, sequence_length=4000, batching="padding-free", single=True
    )
    assert kept_bytes(symbolic) == pytest.approx(
        int(row.running_bytes("again", 1, 16)[row.num_forward_events - 1]), rel=1e-3
    )


def test_a_row_of_long_samples_is_traced() -> None:
    """The running sum that tells samples apart was worked out in a tensor of the row's length squared."""
    assert trace("flash_attention_2", LLAMA, batching="padding-free", sequence_length=8192)


def test_the_names_are_transformers_own() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    expand_key_heads()  # It adds its own.
    assert set(ATTENTIONS) <= {"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()}


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("value_size", [64, 32])
def test_attentions_work_is_pytorchs_count(kernel: str, value_size: int) -> None:
    """Of grouped heads it is that of all the queries' heads, which every version of PyTorch counts."""

    def sized(heads: int, tokens: int, size: int) -> torch.Tensor:
        return torch.empty(2, heads, tokens, size, device="meta")

    query, gradient = sized(8, 100, 64), sized(8, 100, value_size)
    for name, before in (("", ()), ("_backward", (gradient,))):
        func = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{name}").default
        counted = flop_registry[func._overloadpacket]
        wanted = counted(*before, query, sized(8, 80, 64), sized(8, 80, value_size), out_val=None)
        for heads in (8, 2):
            given = (*before, query, sized(heads, 80, 64), sized(heads, 80, value_size))
            assert kernel_costs.count_flops(func, given, {"is_causal": False}, None) == wanted
            halved = {"is_causal": True}
            assert kernel_costs.count_flops(func, given, halved, None) == wanted // 2


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("num_key_heads", [1, 2, 4])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "added", "learned"])
def test_attention_on_a_cpu_is_pytorchs(mask: str, num_key_heads: int, dropout_p: float) -> None:
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 7, 8, generator=draw)
    key = torch.randn(2, num_key_heads, 7, 8, generator=draw)
    masks = {
        "bool": torch.ones(7, 7).tril().bool(),
        "added": torch.randn(7, 7, generator=draw),
        "learned": torch.randn(7, 7, generator=draw).requires_grad_(),
    }
    asked = {
        "attn_mask": masks.get(mask),
        "dropout_p": dropout_p,
        "is_causal": mask == "causal",
        "enable_gqa": num_key_heads == 2,
    }
    found = []
    for function in (sdpa.attention_on_cpu, torch.nn.functional.scaled_dot_product_attention):
        torch.manual_seed(0)
        found.append(function(query, key, key, **asked))
    torch.testing.assert_close(*found)
    assert found[0].requires_grad == (mask == "learned")
