"""flex_attention as it is traced, against AOTAutograd's graphs of PyTorch's own on the CPU.

PyTorch refuses a backward pass of it on the CPU (2.13 nn/attention/flex_attention.py, _validate_device),
though its reference runs there: the two checks that refuse it are replaced, and what AOTAutograd's
partitioner keeps, makes and casts is compared. The Triton kernels themselves need a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from test_attention import (
    ADA,
    BATCH,
    LAYERS,
    LENGTH,
    LLAMA,
    flops,
    kept_bytes,
    kernel_names,
    peak_bytes,
    trace,
)
from torch._dynamo.backends.common import aot_autograd
from transformers.masking_utils import causal_mask_function, flex_attention_mask

from autotune.catalogue.models import ModelSource, catalogue, resolve
from autotune.catalogue.tasks import PICTURES, TASKS, tasks_of
from autotune.worker.build.model import UnsupportedModel, load_config
from autotune.worker.trace import flex
from autotune.worker.trace.cuda import Workspaces, device_choices
from autotune.worker.trace.stand_ins import replaced
from autotune.worker.trace.tracker import Tracker

ROWS, HEADS, KEY_HEADS, TOKENS, SIZE = 2, 4, 2, 200, 32
Kept = list[tuple[tuple[int, ...], torch.dtype]]


def keep_score(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return score


def causal(
    b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
) -> torch.Tensor:
    return q_idx >= kv_idx


def inputs(device: str, first: torch.dtype, size: int = SIZE) -> list[torch.Tensor]:
    """Query, key and value as a layer has them: heads behind tokens in memory."""
    return [
        torch.zeros(ROWS, TOKENS, heads, size, dtype=dtype, device=device)
        .transpose(1, 2)
        .requires_grad_()
        for heads, dtype in ((HEADS, first), (KEY_HEADS, first), (KEY_HEADS, torch.bfloat16))
    ]


def looks(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


@contextlib.contextmanager
def kept() -> Iterator[Kept]:
    """Shape and dtype of what the forward pass saves, each storage once."""
    seen: dict[Any, tuple[tuple[int, ...], torch.dtype]] = {}
    held: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)  # no address is used twice
        seen[tensor.untyped_storage()._cdata] = tuple(tensor.shape), tensor.dtype
        return tensor

    saved: Kept = []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved
    saved += sorted(seen.values(), key=str)


def real(autocast: bool, first: torch.dtype) -> tuple[Kept, list[Any], list[Any]]:
    """(what is kept, the two results, the gradients) of PyTorch's own."""
    options = torch_flex._apply_kernel_options

    def with_logsumexp(*args: Any) -> Any:
        return {**options(*args), "OUTPUT_LOGSUMEXP": True}  # as on a GPU

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        return make_boxed_func(graph.forward)  # type: ignore[no-any-return]

    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=min_cut_rematerialization_partition,  # Inductor's
    )
    torch._dynamo.reset()
    compiled = torch.compile(torch_flex.flex_attention, backend=backend)
    with (
        replaced(
            [
                (torch_flex, "_validate_device", lambda *_: None),
                (torch_flex, "_apply_kernel_options", with_logsumexp),
            ]
        ),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
    ):
        mask = torch_flex.create_block_mask(causal, ROWS, None, TOKENS, TOKENS, device="cpu")
        query, key, value = inputs("cpu", first)
        with kept() as saved:
            out, aux = compiled(
                query,
                key,
                value,
                score_mod=keep_score,
                block_mask=mask,
                enable_gqa=True,
                return_aux=torch_flex.AuxRequest(lse=True),
            )
        out.backward(torch.ones_like(out))
    return saved, [looks(out), looks(aux.lse)], [looks(t.grad) for t in (query, key, value)]  # type: ignore[arg-type]


def traced(autocast: bool, first: torch.dtype) -> tuple[Kept, list[Any], list[Any]]:
    """The same of the stand-in."""
    tracker = Tracker("meta")
    with (
        device_choices(ADA),
        tracker,
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
    ):
        mask = flex.block_mask(causal, B=ROWS, H=None, Q_LEN=TOKENS, KV_LEN=TOKENS)
        query, key, value = inputs("meta", first)
        with kept() as saved:
            out, aux = flex._attend(
                tracker, query, key, value, score_mod=keep_score, block_mask=mask
            )
        torch.autograd.graph._engine_run_backward(
            (out,), (torch.ones_like(out),), False, False, (), True, True
        )
    return saved, [looks(out), looks(aux.lse)], [looks(t.grad) for t in (query, key, value)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("autocast", "first"),
    [(False, torch.bfloat16), (True, torch.float32)],
    ids=["bf16", "float32 query and key under autocast"],
)
def test_a_forward_pass_keeps_what_aotautograd_keeps(autocast: bool, first: torch.dtype) -> None:
    """Casts rather than what was cast; results and gradients with the same places in memory."""
    assert traced(autocast, first) == real(autocast, first)


@pytest.mark.parametrize(("queries", "keys"), [(256, 256), (200, 330), (64, 64), (1024, 1024)])
def test_the_block_mask_is_as_large_as_pytorchs(queries: int, keys: int) -> None:
    asked = {"B": ROWS, "H": None, "Q_LEN": queries, "KV_LEN": keys, "device": "cpu"}
    own, theirs = (
        make(causal, **asked) for make in (flex.block_mask, torch_flex.create_block_mask)
    )
    assert own.shape == theirs.shape
    for one, other in zip(own.as_tuple(), theirs.as_tuple(), strict=True):
        if isinstance(other, torch.Tensor):
            assert looks(one) == looks(other)
            assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        elif not callable(other):
            assert one == other


def test_transformers_asks_for_a_mask_of_all_layers() -> None:
    """Its own function, with padding: the stand-in knows that it is causal, and holds its tensors."""
    padding = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    padding[0, :3] = False
    with flex.on_meta(Tracker("meta"), Workspaces(0), 0):
        mask = flex_attention_mask(
            ROWS, TOKENS, TOKENS, mask_function=causal_mask_function, attention_mask=padding
        )
    held = list(flex._held(mask.mask_mod))
    assert causal_mask_function in held
    assert any(isinstance(part, torch.Tensor) and part.shape == padding.shape for part in held)


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
def test_a_step_is_flash_attentions_but_for_the_mask(changes: dict[str, Any]) -> None:
    """Same work; kept are the same tensors, and eight small ones of the mask instead of a generator's
    state in each layer."""
    own, flash = (trace(name, LLAMA, **changes) for name in ("flex_attention", "sdpa"))
    assert flops(own) == flops(flash)
    of_mask = 4 * (512 + 1024)  # 4 x 8 and 4 x 8 x 8 int32, in blocks of 512 bytes
    assert 0 < kept_bytes(own) - kept_bytes(flash) <= of_mask
    assert peak_bytes(own) - peak_bytes(flash) < 0.01 * peak_bytes(flash)
    forward = "_scaled_dot_product_flex_attention"
    assert {name for name in kernel_names(own) if "scaled" in name} == {
        forward,
        f"{forward}_backward",
    }


def test_a_padded_batch_needs_no_mask_of_every_pair() -> None:
    """sdpa keeps one for each layer; here it is a row of flags per sample, once."""
    whole, padded = (trace("flex_attention", LLAMA, batching=name) for name in ("packed", "padded"))
    masks = BATCH * LENGTH
    assert kept_bytes(padded) - kept_bytes(whole) == pytest.approx(masks, abs=1024)
    assert len(padded.batch) == len(whole.batch) + 1, "the mask of integers"
    assert flops(padded) == flops(whole)
    sdpa = trace("sdpa", LLAMA, batching="padded")
    assert kept_bytes(sdpa) - kept_bytes(padded) > LAYERS * BATCH * LENGTH**2


def test_heads_that_are_no_power_of_two_are_computed_as_the_next() -> None:
    """Heads of 96 as of 128, the same number of them."""
    config = {**LLAMA, "num_attention_heads": 8, "num_key_value_heads": 8}
    small, large = (
        {
            launch.kernel.name: launch.flops
            for launch in trace("flex_attention", {**config, "head_dim": size}).launches(4, 16)
            if "flex" in launch.kernel.name
        }
        for size in (96, 128)
    )
    assert small == large


def test_heads_in_odd_numbers_are_repeated_as_transformers_does() -> None:
    """Not a power of two: keys and values are copied for each head before the kernel."""
    config = {**LLAMA, "hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 2}
    own, flash = (trace(name, config) for name in ("flex_attention", "sdpa"))
    copied = LAYERS * BATCH * LENGTH * 2 * (12 - 2) * 64 * 2
    assert kept_bytes(own) - kept_bytes(flash) == pytest.approx(copied, rel=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_dropout": 0.1}, "does not support `dropout`"),
        ({"head_dim": 8}, "no heads of 8: from 16"),
    ],
)
def test_what_it_refuses_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        trace("flex_attention", {**LLAMA, **change})


def test_a_trained_term_in_the_scores_is_refused() -> None:
    query, key, value = inputs("meta", torch.bfloat16)
    bias = torch.zeros(ROWS, HEADS, TOKENS, TOKENS, device="meta", requires_grad=True)

    def with_bias(score: torch.Tensor, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return score + bias[b, h, q, k]

    with pytest.raises(ValueError, match="adds a tensor to the scores"):
        flex._attend(Tracker("meta"), query, key, value, score_mod=with_bias, block_mask=None)


def test_the_models_that_have_it_are_transformers_own() -> None:
    sources = [resolve(entry.hub_id) for entry in catalogue()]
    kinds = {source.config["model_type"]: source for source in sources}
    has = {kind: "flex_attention" in source.attentions for kind, source in kinds.items()}
    assert has == {kind: _supports(source) for kind, source in kinds.items()}
    assert {"deberta-v2", "falcon", "gpt2", "qwen2_5_vl"} == {kind for kind in has if not has[kind]}


def _supports(source: ModelSource) -> bool:
    import transformers

    tasks = tasks_of(source.config["model_type"])
    assert tasks is not None
    task = source.task if source.task in tasks else PICTURES
    auto = getattr(transformers, TASKS[task].model_class)
    return bool(auto._model_mapping[type(load_config(source.config))]._supports_flex_attn)
