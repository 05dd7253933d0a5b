"""Charts of a report as records, without a browser: which trial is drawn as what."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import answers
import pytest

from autotune.common.units import GIB
from autotune.report import figures
from autotune.report.data import ReportData, TrialRow
from autotune.store.stored_answers import StoredAnswer

TRIAL = TrialRow(
    number=0,
    evidence="predicted",
    outcome="fits",
    tradeoff="exact",
    config="LoRA",
    tokens_per_second=1000.0,
    peak_device_bytes=6 * GIB,
    predicted_tokens_per_second=None,
    predicted_peak_device_bytes=None,
    reason="",
    is_frontier=False,
    is_answer=False,
)

ANSWER = StoredAnswer(
    study="s", answer=answers.answer(), files=(), command="", versions={}, details=None
)


def test_there_is_a_chart_of_all_that_is_known_and_of_nothing_else() -> None:
    assert set(figures.all_figures(ReportData(stored=ANSWER, trials=(TRIAL,)))) == {"speed-memory"}
    details = answers.details(base=answers.details().answer)
    measured = dataclasses.replace(
        TRIAL,
        evidence="measured",
        outcome="ok",
        predicted_tokens_per_second=900.0,
        predicted_peak_device_bytes=5 * GIB,
    )
    # Of a probe that did not end there is no speed to compare.
    for outcome in ("crashed", "oom", "slow"):
        failed = dataclasses.replace(measured, outcome=outcome)
        charts_of_failed = figures.all_figures(ReportData(stored=ANSWER, trials=(failed,)))
        assert set(charts_of_failed) == {"speed-memory"}
    stored = dataclasses.replace(ANSWER, details=details)
    drawn = set(figures.all_figures(ReportData(stored=stored, trials=(measured,))))
    charts = {"speed-memory", "compared-speed", "compared-memory"}
    assert drawn == charts | {"timeline-answer", "timeline-base"}


@pytest.mark.parametrize(
    ("changes", "group"),
    [
        ({}, "predicted to fit"),
        ({"outcome": "does not fit", "reason": "over the budget"}, "predicted not to fit"),
        ({"evidence": "measured", "outcome": "ok"}, "measured"),
        ({"evidence": "measured", "outcome": "ok", "reason": "paged"}, "measured, not to be used"),
        ({"evidence": "measured", "outcome": "oom"}, "measured, not to be used"),
        ({"tokens_per_second": None}, None),
        ({"peak_device_bytes": None}, None),
    ],
)
def test_each_trial_is_drawn_in_one_group(
    changes: dict[str, str | None], group: str | None
) -> None:
    data = ReportData(stored=ANSWER, trials=(dataclasses.replace(TRIAL, **changes),))
    traces = figures.speed_against_memory(data)["data"]
    drawn = [trace["name"] for trace in traces if trace.get("rows") == [0]]
    assert drawn == ([] if group is None else [group])


def opacities(part: Any) -> list[float]:
    """Every opacity within a figure."""
    if isinstance(part, dict):
        own = [part["opacity"]] if "opacity" in part else []
        return own + [each for value in part.values() for each in opacities(value)]
    return [each for value in part for each in opacities(value)] if isinstance(part, list) else []


def test_what_was_only_priced_is_faint() -> None:
    stored = dataclasses.replace(ANSWER, details=answers.details())
    (only,) = opacities(figures.speed_against_memory(ReportData(stored=stored, trials=(TRIAL,))))
    assert 0 < only < 1


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([100.0, 200.0, 150.0], 94.0, 206.0),
        # Of one value alone a twentieth of it lies on each side.
        ([100.0], 95.0, 105.0),
        ([100.0, 100.0], 95.0, 105.0),
    ],
)
def test_a_diagonal_goes_through_all_that_is_drawn(
    values: list[float], low: float, high: float
) -> None:
    drawn = figures._predicted_against_measured("speed", ("tokens/s", 1), [0], values)
    diagonal, points = drawn["data"]
    assert diagonal["x"] == diagonal["y"] == pytest.approx([low, high])
    for axis in ("xaxis", "yaxis"):
        assert drawn["layout"][axis]["range"] == pytest.approx([low, high])
    assert (points["x"], points["y"], points["rows"]) == ("predicted-speed", "speed", [0])


def test_the_budget_is_drawn_where_it_is() -> None:
    figure = figures.speed_against_memory(ReportData(stored=ANSWER, trials=(TRIAL,)))
    budget = answers.BUDGET_BYTES / GIB
    assert [s["x0"] for s in figure["layout"]["shapes"] if s["x0"] == s["x1"]] == [
        pytest.approx(budget)
    ]
    labels = [each["text"] for each in figure["layout"]["annotations"]]
    assert any(f"budget {budget:.2f} GiB" in label for label in labels)


def test_a_timeline_has_all_that_is_drawn_in_its_range() -> None:
    details = answers.details()
    stored = dataclasses.replace(ANSWER, details=details)
    drawn = figures.all_figures(ReportData(stored=stored, trials=(TRIAL,)))["timeline-answer"]
    layout, timeline = drawn["layout"], details.answer
    tallest = max(map(sum, zip(*timeline.bytes_by_category.values(), strict=True))) / GIB
    low, high = layout["yaxis"]["range"]
    assert low == 0
    assert (
        max(tallest, answers.BUDGET_BYTES / GIB)
        < high
        < 1.2 * max(tallest, answers.BUDGET_BYTES / GIB)
    )
    assert layout["xaxis"]["range"] == [0, timeline.num_points - 1]
    # Each phase is named in its middle, the budget at its height and at the left; arrows point nowhere.
    starts = [*timeline.phases.values(), timeline.num_points]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(starts)]
    assert layout["xaxis"]["tickvals"] == middles
    (label,) = layout["annotations"]
    assert label["y"] == pytest.approx(answers.BUDGET_BYTES / GIB)
    assert 0 <= label["x"] < 0.1
    assert label["showarrow"] is False
