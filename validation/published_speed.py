"""Predicted against published time of whole training runs.

Run: python -m validation.published_speed

The published figures are the column `throughput` of studies/published-memory/published_memory.csv;
nothing in them was measured by this project. studies/published-speed/runs.toml says which run each is of,
what is assumed where something is not published, and why the others are left out. Predicted is what
`autotune estimate` says of an optimizer step of the run's configuration, with the attention of the row's
day where that was another.

Three questions, per group of runs of one program on one card: how far off is a time; which of two
configurations is the faster one; and how far off are the others once one of them has been measured.
The answers are written to studies/published-speed/ (rows.json, and the tables of README.md).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from unittest import mock

import torch
import transformers

from autotune.catalogue.gpus import Gpu, find_gpu
from autotune.memory.traces import Trace
from autotune.predict.estimator import Estimator
from autotune.records.estimate import TraceSpec
from autotune.speed.host import USUAL
from autotune.worker.build.model import load_config
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.step import trace_step
from validation.published.old_attention import OLD_ATTENTIONS
from validation.published.plan import SPEED as STUDY
from validation.published.plan import Plan, Timed, published
from validation.published.runs import chosen_with, timed_runs, why_left_out
from validation.published.tables import write_section
from validation.published_memory import describe

TRAINERS = ("Qwen, A100", "BERT, V100")
"""Groups whose program is Transformers' Trainer; what it does beside the passes costs the others nothing."""

TIED = 0.03
"""Two published times that differ by less are not told apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published time beside the predicted one, of an optimizer step."""

    id: str
    group: str
    run: str
    evidence: str
    published_seconds: float
    predicted_seconds: float
    bound: str

    @property
    def ratio(self) -> float:
        return self.predicted_seconds / self.published_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """What the rows of one program on one card say."""

    name: str
    num_rows: int
    median_ratio: float
    smallest_ratio: float
    largest_ratio: float
    num_pairs: int
    """Of which the published times tell the faster one."""
    num_ordered: int
    """Of these, predicted to be the faster one too."""
    probe: str
    """The row with the highest predicted throughput: what a search would measure first."""
    median_error_after: float
    """Of the others, once all predictions are scaled by the probe's ratio."""
    largest_error_after: float
    median_error_any: float
    """The same over every choice of the probe."""


def predict(ids: Collection[str] | None = None) -> list[Row]:
    """All rows, or those that are named, by group; without those of which a rate is unknown."""
    found = (
        row_of(name, timed) for name, timed in timed_runs().items() if ids is None or name in ids
    )
    rows = [row for row in found if row is not None]
    names = list(dict.fromkeys(row.group for row in rows))
    return sorted(rows, key=lambda row: names.index(row.group))


def row_of(name: str, timed: Timed) -> Row | None:
    """None where the card's rate for a kernel is unknown."""
    plan = timed.plan
    gpu = find_gpu(plan.gpu)
    assert gpu.capacity_bytes is not None
    traces = {TraceSpec.of(plan.config): _trace(plan, gpu)}
    host = USUAL
    if timed.group not in TRAINERS:
        host = replace(USUAL, module_seconds=0, micro_step_seconds=0, step_seconds=0)
    estimator = Estimator(traces, gpu, memory_budget_bytes=gpu.capacity_bytes, host=host)
    seconds = estimator.seconds(plan.config)
    if seconds is None:
        return None
    return Row(
        id=name,
        group=timed.group,
        run=describe(plan),
        evidence=timed.evidence,
        published_seconds=timed.published_seconds,
        predicted_seconds=seconds.total_seconds,
        bound=seconds.bound,
    )


def _trace(plan: Plan, gpu: Gpu) -> Trace:
    assert gpu.compute_capability is not None
    assert gpu.cublas_workspace_bytes is not None
    device = Device(
        compute_capability=gpu.compute_capability,
        cublas_workspace_bytes=gpu.cublas_workspace_bytes,
    )
    of_its_day = plan.program.old_attention
    with mock.patch.object(*OLD_ATTENTIONS[of_its_day]) if of_its_day else contextlib.nullcontext():
        return Trace(
            trace_step(
                load_config(plan.model.config),
                plan.task,
                TraceSpec.of(plan.config),
                sequence_length=plan.config.sequence_length,
                device=device,
            )
        )


def _tokens(row: Row) -> int:
    return timed_runs()[row.id].plan.config.tokens_per_step


def published_rate(row: Row) -> float:
    """Tokens per second."""
    return _tokens(row) / row.published_seconds


def predicted_rate(row: Row) -> float:
    return _tokens(row) / row.predicted_seconds


def pairs(rows: Sequence[Row]) -> tuple[int, int]:
    """(pairs whose published throughputs differ, of these those predicted in that order)."""
    num_pairs = num_ordered = 0
    for one, other in itertools.combinations(rows, 2):
        rates = [published_rate(row) for row in (one, other)]
        noise = sum(timed_runs()[row.id].resolution for row in (one, other))
        if abs(rates[0] / rates[1] - 1) <= max(TIED, noise):
            continue
        num_pairs += 1
        is_first = predicted_rate(one) > predicted_rate(other)
        num_ordered += is_first == (rates[0] > rates[1])
    return num_pairs, num_ordered


def groups(rows: Sequence[Row]) -> list[Group]:
    """In the order of the rows."""
    found = []
    for name, members in itertools.groupby(rows, lambda row: row.group):
        of_group = list(members)
        ratios = [row.ratio for row in of_group]
        probe = max(of_group, key=predicted_rate)
        errors = _errors_after(probe, of_group)
        num_pairs, num_ordered = pairs(of_group)
        found.append(
            Group(
                name=name,
                num_rows=len(of_group),
                median_ratio=statistics.median(ratios),
                smallest_ratio=min(ratios),
                largest_ratio=max(ratios),
                num_pairs=num_pairs,
                num_ordered=num_ordered,
                probe=probe.id,
                median_error_after=statistics.median(errors),
                largest_error_after=max(errors),
                median_error_any=statistics.median(
                    error for row in of_group for error in _errors_after(row, of_group)
                ),
            )
        )
    return found


def _errors_after(probe: Row, rows: Sequence[Row]) -> list[float]:
    return [abs(row.ratio / probe.ratio - 1) for row in rows if row is not probe]


def summary(rows: Sequence[Row]) -> str:
    """Of all rows, and of those that chose no constant."""
    lines = []
    tests = [row for row in rows if row.evidence != "C" and row.id not in chosen_with()]
    for name, members in (
        ("all", rows),
        ("without evidence C and the rows that chose a constant", tests),
    ):
        ratios = {row.id: row.ratio for row in members}
        fastest = min(ratios, key=lambda row: ratios[row])
        slowest = max(ratios, key=lambda row: ratios[row])
        within = sum(0.8 <= ratio <= 1.25 for ratio in ratios.values())
        lines.append(
            f"- {name}: predicted over published, median {statistics.median(ratios.values()):.2f} of"
            f" {len(ratios)}, from {ratios[fastest]:.2f} ({fastest}) to {ratios[slowest]:.2f}"
            f" ({slowest}); {within} within a quarter"
        )
    per_group = groups(rows)
    num_pairs = sum(group.num_pairs for group in per_group)
    num_ordered = sum(group.num_ordered for group in per_group)
    lines.append(
        f"- which of two is the faster one, within a group: {num_ordered} of {num_pairs} pairs"
    )
    return "\n".join(lines)


def markdown_groups(found: Sequence[Group]) -> str:
    lines = [
        "| group | rows | predicted / published, median | from | to | pairs in the right order"
        " | probe | others after it, median error | largest | any as the probe |",
        "|---|---:|---:|---:|---:|---:|---|---:|---:|---:|",
    ]
    for group in found:
        lines.append(
            f"| {group.name} | {group.num_rows} | {group.median_ratio:.2f}"
            f" | {group.smallest_ratio:.2f} | {group.largest_ratio:.2f}"
            f" | {group.num_ordered} of {group.num_pairs} | {group.probe}"
            f" | {group.median_error_after:.0%} | {group.largest_error_after:.0%}"
            f" | {group.median_error_any:.0%} |"
        )
    return "\n".join(lines)


def markdown(rows: Sequence[Row]) -> str:
    lines = [
        "| row | run | evidence | published, ms | predicted, ms | predicted / published | bound |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    for row in rows:
        chosen = " (chosen with)" if row.id in chosen_with() else ""
        lines.append(
            f"| {row.id}{chosen} | {row.run} | {row.evidence} | {row.published_seconds * 1e3:.1f}"
            f" | {row.predicted_seconds * 1e3:.1f} | {row.ratio:.2f} | {row.bound} |"
        )
    return "\n".join(lines)


def markdown_assumed() -> str:
    names: dict[str, dict[str, int]] = {}
    for timed in timed_runs().values():
        for assumption in timed.assumed:
            counts = names.setdefault(assumption, {})
            counts[timed.group] = counts.get(timed.group, 0) + 1
    return "\n".join(
        f"- {assumption} ({'; '.join(f'{group}: {count}' for group, count in counts.items())})"
        for assumption, counts in names.items()
    )


def markdown_left_out(rows: Sequence[Row]) -> str:
    names: dict[str, list[str]] = {}
    predicted = {row.id for row in rows}
    for name, row in published().items():
        if not row["throughput"] or name in predicted:
            continue
        is_described = name in timed_runs()
        reason = (
            "the card's rate for a kernel is unknown" if is_described else why_left_out(STUDY, name)
        )
        names.setdefault(reason, []).append(name)
    return "\n".join(
        f"- {len(members)} x {reason} ({members[0]}{' ...' if len(members) > 1 else ''})"
        for reason, members in names.items()
    )


def main() -> None:
    rows = predict()
    record = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "rows": [{**asdict(row), "ratio": row.ratio} for row in rows],
        "groups": [asdict(group) for group in groups(rows)],
    }
    (STUDY / "rows.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sections = {
        "summary": summary(rows),
        "groups": markdown_groups(groups(rows)),
        "rows": markdown(rows),
        "assumed": markdown_assumed(),
        "left out": markdown_left_out(rows),
    }
    readme = STUDY / "README.md"
    text = readme.read_text(encoding="utf-8")
    for name, content in sections.items():
        text = write_section(text, name, content)
    readme.write_text(text, encoding="utf-8")
    print(sections["groups"], sections["summary"], sep="\n\n")


if __name__ == "__main__":
    main()
