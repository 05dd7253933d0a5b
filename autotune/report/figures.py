"""A report's charts as plotly.js takes them: plain dicts, colours by the names of the page's CSS.

A string that starts with `--` where plotly wants a colour is one of page.css's variables, which page.js
puts in, so that a chart follows the page into the dark. A trace with `rows` takes its points from the
table of trials: `x` and `y` name its columns. Text of others is escaped: plotly reads HTML in it.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

from autotune.common.units import Unit, unit_for
from autotune.records.charts import StepPhase, Timeline
from autotune.records.estimate import Estimate
from autotune.records.measurement import Measurement
from autotune.report.data import FITS, ReportData, TrialRow

Figure = dict[str, Any]
"""A chart as plotly.js takes it: a dict of `data` and `layout`."""

_STACK = (
    # category of allocator.CATEGORIES, name, colour
    ("parameter", "weights", "--weights"),
    ("gradient", "gradients", "--gradients"),
    ("optimizer_state", "optimizer", "--optimizer"),
    ("activation", "activations", "--activations"),
    ("logits", "logits", "--logits"),
    ("temporary", "temporaries", "--other"),
    ("workspace", "workspace", "--cached"),
)
_PHASE_WORDS = {
    StepPhase.FORWARD_AGAIN: "forward again",
    StepPhase.BACKWARD_AGAIN: "backward again",
}


def unit_of(data: ReportData) -> Unit:
    """The unit (name, bytes) of memory in all of a report's charts, chosen by its budget."""
    return unit_for(data.stored.answer.workload.memory_budget_bytes)


def all_figures(data: ReportData) -> dict[str, Figure]:
    """All charts of a report by the name of their place in the page; one with nothing to draw is left out."""
    details = data.stored.details
    figures = {"speed-memory": speed_against_memory(data)}
    if details is not None:
        budget_bytes = data.stored.answer.workload.memory_budget_bytes
        lines = [line for line in (details.answer, details.base) if line is not None]
        top_bytes = max(line.at(line.peak_point) for line in lines)
        # A budget far above would leave the areas flat.
        if budget_bytes < 3 * top_bytes:
            top_bytes = max(top_bytes, budget_bytes)
        unit = unit_of(data)
        figures["timeline-answer"] = memory_over_step(details.answer, budget_bytes, top_bytes, unit)
        if details.base is not None and len(details.path) > 1:
            figures["timeline-base"] = memory_over_step(details.base, budget_bytes, top_bytes, unit)
    compared = [
        index
        for index, row in enumerate(data.trials)
        if row.predicted_tokens_per_second is not None and row.outcome == "ok"
    ]
    if compared:
        for name, figure, unit in (
            ("speed", "tokens_per_second", (_speed_unit(data), 1)),
            ("memory", "peak_device_bytes", unit_of(data)),
        ):
            seen = [
                value / unit[1]
                for index in compared
                for kind in ("predicted_", "")
                if (value := getattr(data.trials[index], kind + figure)) is not None
            ]
            figures[f"compared-{name}"] = _predicted_against_measured(name, unit, compared, seen)
    return figures


def memory_over_step(timeline: Timeline, budget_bytes: int, top_bytes: int, unit: Unit) -> Figure:
    """Draw memory over a step: stacked areas by category, and the budget as a line."""
    name_of_unit, unit_bytes = unit
    points = list(range(timeline.num_points))
    traces = [
        _trace(
            "lines",
            name,
            points,
            [round(value / unit_bytes, 4) for value in timeline.bytes_by_category[category]],
            stackgroup="one",
            line={"width": 0.5, "color": color},
            fillcolor=color,
            hovertemplate=f"%{{y:.2f}} {name_of_unit}",
        )
        for category, name, color in _STACK
        if any(timeline.bytes_by_category[category])
    ]
    starts = list(timeline.phases.values())
    ends = [*starts[1:], timeline.num_points]
    shapes = [_vertical(start, "--grid") for start in starts[1:]]
    return {
        "data": traces,
        "layout": {
            "hovermode": "x unified",
            "showlegend": False,
            "shapes": [*shapes, _horizontal(budget_bytes / unit_bytes)],
            "annotations": [
                _budget_label(budget_bytes, unit, x=0.01, xref="paper", xanchor="left")
            ],
            "xaxis": {
                "tickvals": [(a + b) / 2 for a, b in zip(starts, ends, strict=True)],
                "ticktext": [_PHASE_WORDS.get(name, name) for name in timeline.phases],
                "showgrid": False,
                "range": [0, timeline.num_points - 1],
            },
            "yaxis": {"title": {"text": name_of_unit}, "range": [0, 1.08 * top_bytes / unit_bytes]},
        },
    }


def speed_against_memory(data: ReportData) -> Figure:
    """Draw every trial's speed against its memory, with the frontier, the base and what was only priced."""
    answer, details = data.stored.answer, data.stored.details
    budget_bytes = answer.workload.memory_budget_bytes
    name_of_unit, unit_bytes = unit = unit_of(data)
    traces: list[Figure] = []
    if details is not None and details.priced:
        traces.append(
            _trace(
                "markers",
                "priced only: memory at least",
                [round(num_bytes / unit_bytes, 3) for _, num_bytes in details.priced],
                [speed for speed, _ in details.priced],
                marker={"size": 4, "color": "--muted", "opacity": 0.35},
                hoverinfo="skip",
                # Predictions of another speed than what was measured would take all the room.
                visible=True if answer.measured is None else "legendonly",
            )
        )
    groups = (
        # name, marker, which
        (
            "predicted to fit",
            {"symbol": "circle-open", "size": 8, "color": "--predicted", "line": {"width": 1.6}},
            lambda row: row.outcome == FITS,
        ),
        (
            "predicted not to fit",
            {"symbol": "x-thin-open", "size": 7, "color": "--muted", "line": {"width": 1.4}},
            lambda row: row.evidence == "predicted" and row.outcome != FITS,
        ),
        (
            "measured",
            {"symbol": "circle", "size": 8, "color": "--measured"},
            lambda row: row.outcome == "ok" and not row.reason,
        ),
        (
            "measured, not to be used",
            {"symbol": "x", "size": 7, "color": "--muted"},
            lambda row: row.evidence == "measured" and (row.outcome != "ok" or row.reason != ""),
        ),
    )
    for name, marker, wanted in groups:
        rows = _drawable(data, wanted)
        if rows:
            traces.append(_points(name, rows, marker, unit, _speed_unit(data)))
    for evidence, dash in (("predicted", "dot"), ("measured", "solid")):
        frontier = [
            index
            for index, row in enumerate(data.trials)
            if row.is_frontier and row.evidence == evidence
        ]
        frontier.sort(key=lambda index: data.trials[index].resident_bytes or 0)
        if len(frontier) > 1:
            line = {"shape": "hv", "width": 1.4, "dash": dash, "color": f"--{evidence}"}
            own = {"mode": "lines", "line": line, "hoverinfo": "skip", "hovertemplate": None}
            traces.append(
                _points(f"frontier, {evidence}", frontier, {}, unit, _speed_unit(data)) | own
            )
    traces += _landmarks(data, unit)
    return {
        "data": traces,
        "layout": {
            "hovermode": "closest",
            "legend": {"orientation": "h", "y": -0.2, "x": 0},
            "shapes": [_vertical(budget_bytes / unit_bytes, "--budget", dash="dash")],
            "annotations": [_budget_label(budget_bytes, unit, y=1, yref="paper", yanchor="bottom")],
            "xaxis": {
                "title": {"text": f"{name_of_unit} on the device at the peak"},
                "rangemode": "normal",
            },
            "yaxis": {"title": {"text": _speed_unit(data)}, "rangemode": "normal"},
        },
    }


def _landmarks(data: ReportData, unit: Unit) -> list[Figure]:
    """The answer and the base, with the evidence of the answer."""
    answer = data.stored.answer
    found = answer.measured
    marks = [
        ("the answer", answer.best if found is None else found.final, "star", "--accent", 15),
        (
            answer.base_name,
            answer.baseline if found is None else found.baseline,
            "square",
            "--text",
            9,
        ),
    ]
    return [
        _trace(
            "markers",
            f"{name}, {answer.evidence}",
            [round(needed_bytes / unit[1], 4)],
            [round(mark.tokens_per_second, 1)],
            marker={
                "symbol": symbol,
                "size": size,
                "color": color,
                "line": {"width": 1.2, "color": "--surface"},
            },
            hovertemplate=f"%{{y:,.0f}} {_speed_unit(data)}, %{{x:.2f}} {unit[0]}",
        )
        for name, mark, symbol, color, size in marks
        if mark is not None
        and mark.tokens_per_second is not None
        and (needed_bytes := _needed_bytes(mark)) is not None
    ]


def _needed_bytes(mark: Estimate | Measurement) -> int | None:
    return mark.resident_bytes if isinstance(mark, Estimate) else mark.peak_device_bytes


def _predicted_against_measured(
    column: str, unit: Unit, rows: list[int], values: list[float]
) -> Figure:
    """Draw predictions against measurements: points on the diagonal were predicted right.

    `values`: all that is to be seen, of both axes.
    """
    margin = 0.06 * (max(values) - min(values)) or 0.05 * max(values)
    low, high = min(values) - margin, max(values) + margin
    diagonal = _trace(
        "lines",
        "predicted = measured",
        [low, high],
        [low, high],
        line={"width": 1, "dash": "dash", "color": "--muted"},
        hoverinfo="skip",
    )
    marker = {"symbol": "circle", "size": 8, "color": "--measured"}
    points = _points("trials", rows, marker, unit) | {"x": f"predicted-{column}", "y": column}
    points["hovertemplate"] = "measured %{y:,.4~g}, predicted %{x:,.4~g}<br>%{text}<extra></extra>"
    return {
        "data": [diagonal, points],
        "layout": {
            "hovermode": "closest",
            "showlegend": False,
            "xaxis": {"title": {"text": f"predicted {unit[0]}"}, "range": [low, high]},
            "yaxis": {"title": {"text": f"measured {unit[0]}"}, "range": [low, high]},
        },
    }


def _speed_unit(data: ReportData) -> str:
    return data.stored.answer.best.config.speed_unit


def _drawable(data: ReportData, wanted: Callable[[TrialRow], bool]) -> list[int]:
    return [
        index
        for index, row in enumerate(data.trials)
        if row.tokens_per_second is not None and row.resident_bytes is not None and wanted(row)
    ]


def _points(
    name: str, rows: list[int], marker: Figure, unit: Unit, speed_unit: str = "tokens/s"
) -> Figure:
    hover = f"%{{y:,.0f}} {speed_unit}, %{{x:.2f}} {unit[0]}<br>%{{text}}<extra></extra>"
    return _trace(
        "markers", html.escape(name), "memory", "speed", rows, marker=marker, hovertemplate=hover
    )


def _trace(
    mode: str, name: str, x: Any, y: Any, rows: list[int] | None = None, **more: Any
) -> Figure:
    of_trials = {} if rows is None else {"rows": rows}
    return {"type": "scatter", "mode": mode, "name": name, **of_trials, "x": x, "y": y, **more}


def _vertical(x: float, color: str, dash: str = "solid") -> Figure:
    return _line({"x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper"}, color, dash)


def _horizontal(y: float) -> Figure:
    return _line({"x0": 0, "x1": 1, "xref": "paper", "y0": y, "y1": y}, "--budget", "dash")


def _line(place: Figure, color: str, dash: str) -> Figure:
    return {"type": "line", **place, "line": {"width": 1.4, "color": color, "dash": dash}}


def _budget_label(budget_bytes: int, unit: Unit, **place: Any) -> Figure:
    at = budget_bytes / unit[1]
    where = {"y": at, "yanchor": "bottom"} if "x" in place else {"x": at, "xanchor": "right"}
    return {
        "text": f"budget {at:.2f} {unit[0]}",
        "showarrow": False,
        "font": {"size": 12, "color": "--budget"},
        "bgcolor": "--surface",
        **where,
        **place,
    }
