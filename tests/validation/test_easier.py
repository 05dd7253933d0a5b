"""Answers of easier questions: what breaks the order, and what the page says is in the rows."""

from __future__ import annotations

import dataclasses

import answers
import pytest

from autotune.records.estimate import Estimate
from autotune.space.config import TrainConfig
from validation import easier
from validation.answers import rows_of

ADAPTER = dataclasses.replace(answers.ADAPTER, lora_rank=16)


def as_fast(config: TrainConfig, tokens_per_second: float) -> Estimate:
    return answers.estimate(config, step_seconds=config.tokens_per_step / tokens_per_second)


@pytest.mark.parametrize(
    ("tokens_per_second", "config", "broken"),
    [
        (1000.0, ADAPTER, ""),
        (985.0, ADAPTER, ""),  # It is noise.
        (950.0, ADAPTER, "5.0% slower"),
        # QLoRA gives up more, however fast.
        (
            3000.0,
            dataclasses.replace(ADAPTER, method="qlora", quantization="nf4"),
            "gives up more",
        ),
        # Full fine-tuning is no other training run.
        (500.0, answers.CONFIG, ""),
    ],
)
def test_an_easier_question_is_answered_as_well(
    tokens_per_second: float, config: TrainConfig, broken: str
) -> None:
    harder, of_easier = (
        dataclasses.replace(answers.answer(best=as_fast(config, speed)), base=answers.CONFIG)
        for config, speed in ((ADAPTER, 1000.0), (config, tokens_per_second))
    )
    assert easier.broken_by(harder, of_easier) == broken
    assert easier.broken_by(harder, None) == "nothing fits"


@pytest.mark.parametrize(
    ("tokens_per_second", "widened", "broken"),
    [(1500.0, True, ""), (1490.0, True, "gives up more"), (1500.0, False, "gives up more")],
)
def test_what_would_wait_for_the_host_may_give_way_to_what_is_far_faster(
    tokens_per_second: float, widened: bool, broken: str
) -> None:
    harder, of_easier = (
        dataclasses.replace(answers.answer(best=best, widened=widened), base=answers.CONFIG)
        for best in (as_fast(answers.CONFIG, 1000.0), as_fast(ADAPTER, tokens_per_second))
    )
    assert easier.broken_by(harder, of_easier) == broken


def test_the_page_is_of_the_rows() -> None:
    rows = rows_of(easier.Row, easier.STUDY)
    assert len(rows) >= 183
    assert not [row for row in rows if row.broken]
    assert easier.STUDY.with_suffix(".md").read_text("utf-8") == easier.page(rows)
