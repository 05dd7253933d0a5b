"""search/tips.py: which tip, where it pays, and nowhere else; report/tips.py: in two lines at most."""

from __future__ import annotations

import dataclasses
from typing import Any

import answers
import pytest
import tiny_model

from autotune.catalogue import models
from autotune.common.units import GIB
from autotune.records.answer import Tip
from autotune.records.estimate import Breakdown, Estimate, ParameterCount
from autotune.report import tips
from autotune.search import beside
from autotune.search.tips import best_tip
from autotune.space.rules import Context

CONTEXT = Context(effective_batch_size=32, compute_capability=(8, 9), task="causal-lm")
T4 = dataclasses.replace(CONTEXT, compute_capability=(7, 5))


def spending(
    *, logits: float = 0.0, idle: float = 0.0, bound: str = "compute", **settings: Any
) -> Estimate:
    """10 GiB, of which these shares are logits, and idle."""
    parts = {field.name: 0 for field in dataclasses.fields(Breakdown)}
    return dataclasses.replace(
        answers.estimate(dataclasses.replace(answers.CONFIG, **settings)),
        breakdown=Breakdown(**parts | {"logits_bytes": int(10 * GIB * logits)}),
        peak_reserved_bytes=9 * GIB,
        nontorch_bytes=GIB,
        peak_allocated_bytes=int(9 * GIB - 10 * GIB * idle),
        bound=bound,
    )


def tip_of(
    best: Estimate,
    *,
    model_type: str = "llama",
    context: Context = CONTEXT,
    config: dict[str, Any] | None = None,
    **offered: Any,
) -> Tip | None:
    model = dataclasses.replace(
        tiny_model.MODEL,
        config={**tiny_model.MODEL.config, "model_type": model_type, **(config or {})},
    )
    sections = [
        dataclasses.replace(section, domains={**section.domains, **offered})
        for section in tiny_model.SPACE.methods
    ]
    space = dataclasses.replace(tiny_model.SPACE, methods=tuple(sections))
    return best_tip(best, model, space, context, "numerics")


def test_batches_of_like_lengths_where_much_is_padding() -> None:
    half, little = (
        dataclasses.replace(spending(logits=0.11, batching="padded"), useful_share=share)
        for share in (0.5, 0.9)
    )
    assert tip_of(half) is Tip.BY_TOKENS
    assert tip_of(half, batching=("padded", "grouped")) is Tip.LIGER
    assert tip_of(little) is Tip.LIGER
    masked = dataclasses.replace(CONTEXT, task="sequence-classification")
    assert tip_of(half, context=masked) is Tip.GROUPED


def test_liger_where_logits_are_a_large_share_and_nothing_else_stands_against_it() -> None:
    large = spending(logits=0.11)
    assert tip_of(large) is Tip.LIGER
    assert tip_of(spending(logits=0.09)) is None
    assert tip_of(large, liger=(False, True)) is None
    assert tip_of(spending(logits=0.5, liger=True)) is None
    masked = dataclasses.replace(CONTEXT, task="masked-lm")
    assert tip_of(large, context=masked) is None


@pytest.mark.usefixtures("torch_before_2_14")
def test_a_loss_in_parts_where_liger_cannot_be() -> None:
    large = spending(logits=0.11)
    half = spending(logits=0.11, precision="fp16-mixed", attention="sdpa_expanded")
    assert tip_of(half, context=T4) is Tip.CHUNKED_LOSS
    assert tip_of(large, model_type="gpt2") is Tip.CHUNKED_LOSS
    assert tip_of(half, context=T4, chunked_loss=(False, True)) is None
    in_parts = dataclasses.replace(half, config=dataclasses.replace(half.config, chunked_loss=True))
    assert tip_of(in_parts, context=T4) is None
    capped = dataclasses.replace(
        tiny_model.MODEL, config={**tiny_model.MODEL.config, "final_logit_softcapping": 30.0}
    )
    assert best_tip(half, capped, tiny_model.SPACE, T4, "numerics") is None


def test_flash_attention_instead_of_eager() -> None:
    eager = spending(attention="eager", logits=0.5)
    assert tip_of(eager) is Tip.FLASH_ATTENTION
    assert tip_of(eager, context=T4) is None
    # gpt_oss has sinks, which no trace has seen.
    assert tip_of(eager, model_type="gpt_oss") is Tip.LIGER


@pytest.mark.usefixtures("torch_before_2_14")
def test_grouped_heads_are_expanded_where_the_card_fuses_nothing_else() -> None:
    usual = spending(attention="sdpa", precision="fp16-mixed")
    assert tip_of(usual, context=T4) is Tip.EXPANDED_HEADS
    assert tip_of(usual, context=T4, attention=("sdpa_expanded",)) is None
    assert tip_of(usual) is None, "FlashAttention takes groups"
    assert tip_of(usual, context=dataclasses.replace(T4, compute_capability=None)) is None
    assert tip_of(spending(attention="sdpa_expanded", precision="fp16-mixed"), context=T4) is None
    every_head = {"num_key_value_heads": tiny_model.MODEL.config["num_attention_heads"]}
    assert tip_of(usual, context=T4, config=every_head) is None


def test_segments_that_grow_and_torch_compile() -> None:
    assert tip_of(spending(idle=0.11)) is Tip.EXPANDABLE_SEGMENTS
    assert tip_of(spending(idle=0.11), expandable_segments=(False, True)) is None
    assert tip_of(spending(idle=0.09)) is None
    assert tip_of(spending(bound="launch")) is Tip.COMPILE
    assert tip_of(spending(bound="memory bandwidth"), torch_compile=("default",)) is None


@pytest.mark.parametrize(
    ("model", "trainable", "expected"),
    [
        # What PEFT 0.21 trains of each, as `autotune estimate --method lora` counts it.
        ("mistralai/Mixtral-8x7B-v0.1", 359_665_664, True),
        ("Qwen/Qwen3-30B-A3B", 996_507_648, True),
        ("openai/gpt-oss-20b", 7_962_624, False),
        # Adapters on Mixtral's attention alone.
        ("mistralai/Mixtral-8x7B-v0.1", 13_631_488, False),
        ("Qwen/Qwen2.5-1.5B", 18_464_768, None),
    ],
)
def test_experts_are_reached_where_adapters_are_many(
    model: str, trainable: int, expected: bool | None
) -> None:
    config = dataclasses.replace(answers.ADAPTER, lora_rank=16)
    count = ParameterCount(total=50 * 10**9, trainable=trainable)
    best = answers.estimate(config, parameters=count)
    assert beside.reaches_experts(best, models.resolve(model)) is expected
    attention = dataclasses.replace(best, config=dataclasses.replace(config, lora_targets="q_proj"))
    assert beside.reaches_experts(attention, models.resolve(model)) is None


@pytest.mark.parametrize("tip", Tip)
@pytest.mark.parametrize("is_installed", [False, True])
def test_a_tip_takes_two_lines_at_most(
    tip: Tip, is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tips, "is_installed", lambda _: is_installed)
    best = spending(logits=0.25, idle=0.125, bound="memory bandwidth")
    said = tips.tip(answers.answer(best=best, tip=tip))
    assert len(said) <= 2 * 88
    library = {Tip.LIGER: "liger-kernel", Tip.FLASH_ATTENTION: "flash-attn"}.get(tip)
    assert (f"pip install {library}" in said) == (library is not None and not is_installed)
    figures = {Tip.LIGER: "2.50 GiB of 10.00 GiB", Tip.EXPANDABLE_SEGMENTS: "1.25 GiB of 10.00 GiB"}
    assert figures.get(tip, "") in said
    assert tips.tip(answers.answer(best=best)) == ""
