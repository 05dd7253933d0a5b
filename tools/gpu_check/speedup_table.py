"""The table of speed-ups, drawn from their records."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.records.measurement import Measurement, measurement_from_dict
from tools.gpu_check.records import Record

CONTENDERS = ("defaults", "hand", "find")
UNSTEADY = 0.05
"""Spread of the rounds from which on a row is not to be trusted."""


def table(records: Sequence[Record]) -> list[str]:
    """The speed-ups in Markdown; nothing without records."""
    if not records:
        return []
    lines = [
        "| model | method | budget | tokens x batch | defaults | hand | find | over defaults | over hand |"
        " class | spread |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|---:|",
    ]
    ratios: dict[str, list[float]] = {"defaults": [], "hand": []}
    num_unsteady = 0
    for record in records:
        speeds = {name: speeds_of(record, name) for name in CONTENDERS}
        medians = {name: statistics.median(s) if s else None for name, s in speeds.items()}
        cells = [
            record["model"],
            record["method"],
            record["gpu_mem"],
            f"{record['sequence_length']} x {record['effective_batch_size']}",
            *(shown(record, name, medians[name]) for name in CONTENDERS),
        ]
        for name in ratios:
            ratio = over(medians["find"], medians[name])
            if ratio is not None:
                ratios[name].append(ratio)
            cells.append("" if ratio is None else f"{ratio:.2f}x")
        largest = max((spread(s) for s in speeds.values() if s), default=0.0)
        num_unsteady += largest > UNSTEADY
        cells += [record["find"]["class"] or "", f"{largest:.1%}"]
        lines.append("| " + " | ".join(cells) + " |")
    means = [
        f"{statistics.geometric_mean(values):.2f}x over {name} (of {len(values)})"
        for name, values in ratios.items()
        if values
    ]
    return [
        *lines,
        "",
        "Tokens per second, measured (median of the rounds), with micro-batch and checkpointing in "
        "brackets; spread: (highest - lowest) / median of the rounds, the largest of the three.",
        *([f"Geometric mean: {', '.join(means)}."] if means else []),
        *(
            [
                f"UNSTEADY: {num_unsteady} of {len(records)} rows have a spread over {UNSTEADY:.0%}. "
                "Delete their lines and measure again on an idle machine."
            ]
            if num_unsteady
            else []
        ),
        "",
    ]


def speeds_of(record: Record, name: str) -> list[float]:
    """Of the rounds that fitted."""
    measurements = [measurement_from_dict(m) for m in record["contenders"][name]["measurements"]]
    effective = record["effective_batch_size"]
    return [tokens_per_second(m, effective) for m in measurements if m.fits]


def shown(record: Record, name: str, speed: float | None) -> str:
    if speed is None:
        return "does not fit"
    config: Mapping[str, Any] = record["contenders"][name]["measurements"][0]["config"]
    checkpointing = config["activation_checkpointing"]
    note = f", ckpt {checkpointing}" if checkpointing else ""
    return f"{speed:,.0f} ({config['micro_batch_size']}{note})"


def over(faster: float | None, slower: float | None) -> float | None:
    return None if faster is None or slower is None else faster / slower


def spread(speeds: Sequence[float]) -> float:
    return (max(speeds) - min(speeds)) / statistics.median(speeds)


def tokens_per_second(measurement: Measurement, effective_batch_size: int) -> float:
    """At exactly that batch, whether or not the micro-batch divides it."""
    assert measurement.micro_step_seconds is not None
    assert measurement.optimizer_step_seconds is not None
    config = measurement.config
    num_micro_steps = effective_batch_size / config.micro_batch_size
    step_seconds = (
        num_micro_steps * measurement.micro_step_seconds + measurement.optimizer_step_seconds
    )
    return effective_batch_size * config.sequence_length / step_seconds
