"""Which published runs make a pair, and which of two is counted as the faster one. The runs here are made up.

The benchmark is validation/published_pairs.py, what it found is in studies/published-pairs/.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autotune.catalogue.models import resolve
from autotune.space.config import TrainConfig
from validation import published_pairs
from validation.published.plan import Plan, Timed
from validation.published_pairs import Side, pairs, setting_that_differs, timed_of

pytestmark = pytest.mark.worker

LORA = TrainConfig(
    method="lora",
    micro_batch_size=2,
    gradient_accumulation_steps=4,
    sequence_length=1024,
    precision="bf16-autocast",
    optimizer="adamw_torch",
    lora_rank=8,
    lora_targets="all-linear",
)


def side(
    name: str,
    *,
    published: float = 1.0,
    predicted: float = 1.0,
    group: str = "a program",
    card: str = "A100",
    stated: int | None = None,
    **changes: Any,
) -> Side:
    config = replace(LORA, **changes)
    return Side(
        id=name,
        group=group,
        timed=Timed(
            plan=Plan(model=resolve("gpt2"), gpu=card, config=config, metric="time"),
            group=group,
            published_seconds=published,
            evidence="B",
            assumed=(),
            resolution=0.001,
        ),
        predicted_seconds=predicted,
        parts={},
        is_within=True,
        stated_length=stated or config.sequence_length,
        knows_length=True,
    )


FULL = {"method": "full", "lora_rank": None, "lora_targets": None}


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"card": "RTX 4090"}, "card"),
        ({"micro_batch_size": 4}, "micro-batch"),
        (
            {"micro_batch_size": 4, "gradient_accumulation_steps": 2},
            "micro-batch, same effective batch",
        ),
        ({"sequence_length": 2048}, "sequence length"),
        ({"lora_rank": 16}, "LoRA's rank"),
        ({"lora_variant": "dora"}, "LoRA's variant"),
        ({"method": "qlora", "quantization": "nf4"}, "LoRA or QLoRA"),
        (FULL, "full or an adapter"),
        (
            {"method": "ia3", "lora_rank": None, "lora_targets": None},
            "adapter's type or its own setting",
        ),
        ({"liger": True}, "Liger"),
    ],
)
def test_a_pair_differs_in_one_setting(changes: dict[str, Any], setting: str) -> None:
    assert setting_that_differs(side("one"), side("other", **changes)) == setting


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"group": "another program"},
        {"micro_batch_size": 4, "gradient_accumulation_steps": 1},
        {"card": "RTX 4090", "precision": "bf16-true"},
        {"lora_rank": 16, "lora_targets": "attention"},
        {"optimizer": "sgd", "attention": "eager"},
        {**FULL, "optimizer": "sgd"},
    ],
)
def test_what_differs_in_nothing_or_in_more_is_no_pair(changes: dict[str, Any]) -> None:
    assert setting_that_differs(side("one"), side("other", **changes)) is None


def test_an_assumed_length_is_no_setting() -> None:
    one = side("one", sequence_length=100, stated=512)
    other = side("other", sequence_length=140, stated=512, micro_batch_size=8)
    assert setting_that_differs(one, other) == "micro-batch"


def test_lengths_that_are_guessed_make_no_pair() -> None:
    one, other = side("one"), side("other", sequence_length=2048)
    guessed = replace(other, knows_length=False)
    assert setting_that_differs(one, other) == "sequence length"
    assert setting_that_differs(one, guessed) is None


def test_a_pair_names_the_faster_one_first() -> None:
    slow = side("slow", published=3.0, predicted=2.0)
    fast = side("fast", published=2.0, predicted=2.5, attention="eager")
    (pair,) = pairs([slow, fast])
    assert (pair.faster, pair.slower) == ("fast", "slow")
    assert pair.published == pytest.approx(1.5)
    assert pair.predicted == pytest.approx(0.8)
    assert not pair.is_ordered
    assert pair.is_close


def test_rates_count_not_the_time_of_a_step() -> None:
    # Twice the samples in 1.6 times the time; then twice the tokens in 2.5 times the time.
    small = side("small", published=1.0, predicted=1.0)
    large = side("large", published=1.6, predicted=1.9, micro_batch_size=4)
    long = side("long", published=2.5, predicted=1.9, sequence_length=2048)
    by_setting = {pair.setting: pair for pair in pairs([small, large, long])}
    assert by_setting["micro-batch"].faster == "large"
    assert by_setting["micro-batch"].published == pytest.approx(2 / 1.6)
    assert by_setting["micro-batch"].is_ordered
    assert by_setting["sequence length"].faster == "small"
    assert by_setting["sequence length"].published == pytest.approx(2.5 / 2)
    assert not by_setting["sequence length"].is_ordered


def test_what_is_as_fast_is_no_pair() -> None:
    assert pairs([side("one"), side("other", published=1.029, attention="eager")]) == []
    assert len(pairs([side("one"), side("other", published=1.05, attention="eager")])) == 1


def test_seconds_follow_from_the_unit() -> None:
    row = {
        **dict.fromkeys(("predicted_length", "lora_variant", "lora_dropout", "adapter"), ""),
        "model": "gpt2", "card": "A100", "group": "a program", "task": "causal-lm", "method": "lora",
        "lora_rank": "8", "lora_targets": "all-linear", "quantization": "none",
        "precision": "bf16-true", "optimizer": "adamw_torch", "micro_batch": "2", "accumulation": "4",
        "packing": "packed", "sequence_length": "512", "checkpointing": "0", "attention": "sdpa",
        "kernels": "none", "half_digit": "0.5", "evidence": "B",
    }  # fmt: skip
    expected = {
        "tokens per second": 4096 / 100,
        "samples per second": 8 / 100,
        "seconds of a step": 100,
        "seconds of 5,000 micro-steps": 100 / 5000 * 4,
    }
    assert expected.keys() == published_pairs.SECONDS.keys()
    for unit, seconds in expected.items():
        timed = timed_of({**row, "figure": "100", "unit": unit}, {})
        assert timed.published_seconds == pytest.approx(seconds)
        assert timed.resolution == pytest.approx(0.005)


def test_every_row_that_is_predicted_can_be_read() -> None:
    adapters = published_pairs.adapters()
    rows = published_pairs.published().values()
    timed = [timed_of(row, adapters) for row in rows if not row["left_out"]]
    assert len(timed) >= 100
    assert all(each.published_seconds > 0 for each in timed)
