"""A published pass is predicted as its program, and what is recorded is what is predicted.

The benchmark is validation/published_passes.py, what it found is in studies/published-passes/.
"""

from __future__ import annotations

import json

import pytest

from autotune.records.estimate import TraceSpec
from autotune.speed.host import NO_WORK, USUAL
from validation import published_passes
from validation.kernels import steps
from validation.published.own_loop import precision_of_loop, without_trainer

pytestmark = pytest.mark.worker


def test_a_pass_has_neither_a_loss_nor_an_optimizer() -> None:
    row = published_passes.published()["distilbert-001"]
    with precision_of_loop():
        config = published_passes.config_of(row)
        trace = published_passes.traced(
            row["model"], row["task"], TraceSpec.of(config), config.sequence_length, row["card"]
        )
        side = published_passes.side_of("distilbert-001", row)
    names = {kernel.name for kernel in steps.launched(trace, config.micro_batch_size)}
    assert {"addmm", "_softmax", "sum"} <= names
    assert not {"_log_softmax", "nll_loss_forward", "_foreach_norm"} & names
    recorded = json.loads((published_passes.STUDY / "rows.json").read_text(encoding="utf-8"))
    ratios = {each["id"]: each["ratio"] for each in recorded["rows"]}
    assert side.ratio == pytest.approx(ratios["distilbert-001"], rel=0.01)


def test_a_plain_loop_walks_through_no_modules() -> None:
    plain = without_trainer(USUAL)
    assert plain.before_micro_step == plain.after_micro_step == plain.before_update == NO_WORK
    assert plain.update.of(1000, 0) == 0
    assert plain.update.of(0, 3) == pytest.approx(3 * USUAL.update.tensor_seconds)
    assert plain.launch_seconds == USUAL.launch_seconds
