"""Predicted answers against their base: three small models on three kinds of card, and what a row says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from autotune.catalogue.gpus import find_gpu
from validation.answers import PutBack, Row, asked, page, pairs, read_rows

STUDY = Path(__file__).parents[2] / "studies" / "answers"

SIZES = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 32_000}
MODELS = {
    "llama": {**SIZES, "intermediate_size": 704, "num_key_value_heads": 4},
    "opt": {**SIZES, "ffn_dim": 1024, "word_embed_proj_dim": 256, "max_position_embeddings": 1024},
    "gpt_neox": {**SIZES, "intermediate_size": 1024},
}
SPACE = """
methods:
  full:
    micro_batch_size: [1, 2, 4, 8, 16, 32]
    precision: [bf16-true, fp16-mixed]
    optimizer: [adamw_torch_fused, adamw_bnb_8bit, sgd]
    activation_checkpointing: [none, full]
    expandable_segments: [false, true]
"""
ROOMS = {"t4": 900, "rtx-4090": 1400, "a100-sxm4-40gb": 2400}
"""MB: so little that the answer depends on memory."""


@pytest.mark.worker
@pytest.mark.usefixtures("forked_workers")
def test_no_answer_is_slower_than_a_base_that_fits(tmp_path: Path) -> None:
    space = tmp_path / "space.yaml"
    space.write_text(SPACE, encoding="utf-8")
    rows = []
    for family, sizes in MODELS.items():
        config = tmp_path / f"{family}.json"
        config.write_text(json.dumps({"model_type": family, **sizes}), encoding="utf-8")
        for card, room in ROOMS.items():
            rows.append(asked(str(config), find_gpu(card), str(space), f"{room}MB"))
    assert [row.outcome for row in rows] == ["answer"] * len(rows)
    assert any(row.settings for row in rows)
    assert any(row.speedup is not None for row in rows)
    assert [row.violations() for row in rows] == [[]] * len(rows)


PLAIN = Row(
    model="m",
    gpu="t4",
    space="default",
    outcome="answer",
    tokens_per_second=100.0,
    fastest_tokens_per_second=101.0,
    base_tokens_per_second=90.0,
    is_base_offered=True,
)


def with_setting(buys_share: float | None, *, within_noise: bool) -> Row:
    setting = PutBack(
        setting="optimizer",
        value="sgd",
        base_value="adamw_torch",
        buys_share=buys_share,
        within_noise=within_noise,
    )
    return dataclasses.replace(PLAIN, settings=(setting,))


def test_what_breaks_a_promise_is_said() -> None:
    assert PLAIN.violations() == []
    slower = dataclasses.replace(PLAIN, tokens_per_second=89.0)
    assert slower.violations() == ["slower than the base (0.989 x), which is in the space"]
    (idle,) = with_setting(0.004, within_noise=True).violations()
    assert idle == "optimizer sgd instead of adamw_torch buys 0.40%"
    assert with_setting(0.03, within_noise=False).violations() == []
    assert with_setting(None, within_noise=True).violations() == []
    straw = with_setting(0.015, within_noise=False)
    assert straw.violations() == []
    assert len(straw.last_straws()) == 1


def test_a_sample_is_the_same_for_each_seed_and_has_every_model() -> None:
    sample = [(model, card.slug) for model, card in pairs(0, 2)]
    assert sample == [(model, card.slug) for model, card in pairs(0, 2)]
    assert sample != [(model, card.slug) for model, card in pairs(1, 2)]
    every = [(model, card.slug) for model, card in pairs(0, None)]
    assert set(sample) < set(every)
    assert len(set(every)) == len(every)


def test_the_page_is_that_of_the_rows() -> None:
    rows = read_rows(STUDY / "rows.json")
    assert len(rows) >= 100
    written = (STUDY / "README.md").read_text(encoding="utf-8")
    assert written == "\n".join(page(rows))
    assert [row.violations() for row in rows if row.is_base_offered and row.violations()] == []
