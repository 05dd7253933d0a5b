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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from unittest import mock

import numpy as np
import torch
import transformers

from autotune.catalogue.gpus import Gpu, find_gpu
from autotune.memory.traces import Trace
from autotune.predict.estimator import Estimator
from autotune.records.estimate import TraceSpec
from autotune.speed import roofline, step_parts
from autotune.speed.host import USUAL, Host, Stretches
from autotune.speed.host import late_seconds as late_seconds_of
from autotune.speed.sureness import (
    Parts,
    TimedWork,
    added,
    odds_of,
    slow_share_of,
    spread_of,
)
from autotune.worker.build.model import load_config
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.step import trace_step
from validation.published.old_attention import OLD_ATTENTIONS
from validation.published.own_loop import without_trainer
from validation.published.plan import SPEED as STUDY
from validation.published.plan import Plan, Timed, published
from validation.published.runs import (
    chosen_with,
    held_out,
    held_out_table,
    timed_runs,
    why_left_out,
)
from validation.published.tables import num_near, write_sections
from validation.published_memory import describe
from validation.step_spread import within_step

TRAINERS = (
    "Qwen, A100",
    "BERT, V100",
    "optimum-benchmark, A100",
    "optimum-benchmark of September, A100",
    "optimum-benchmark of September, RTX 4090",
    "GLUE, TITAN RTX",
    "XNLI, V100",
    "BERT, A10G",
    "BERT, L4",
    "LLaMA-Factory, RTX 5090",
    "LLaMA-Factory, GB10",
    "LLaMA-Factory, V100S",
)
"""Groups whose program is Transformers' Trainer; what it does beside the passes costs the others nothing."""

REENTRANT = replace(
    USUAL,
    launch_seconds={**USUAL.launch_seconds, "recompute": 0.75 * USUAL.launch_seconds["forward"]},
    region_seconds=38 * USUAL.launch_seconds["forward"],
)
"""The host of these programs, all older than transformers 5: they recompute with `use_reentrant`, where no
tensor that is saved passes through Python (studies/host-time)."""

ADAMW_PASSES = 18
"""Tensors that AdamW of transformers 4.16 reads or writes for each (optimization.py)."""

LONGER = 1.9
"""Length of Alpaca2k's samples against Alpaca's, by the parquet files on the Hub: 1.76 MB for 2,000 rows
(mhenrichsen/alpaca_2k_test), 24.2 MB for 52,002 (tatsu-lab/alpaca)."""
LENGTHS_OF_ALPACA = "Alpaca2k's lengths are taken to be Alpaca's"

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
    parts: Parts
    """Predicted seconds by cause, and how sure each is."""

    @property
    def is_within(self) -> bool:
        """Whether the published time lies in the interval that should hold it with 80 %."""
        low, high = within_step(
            self.predicted_seconds, spread_of(self.parts), slow_share_of(self.parts)
        )
        return low <= self.published_seconds <= high

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


def predict_held_out(ids: Collection[str] | None = None) -> list[Row]:
    """All rows of held_out.csv, or those that are named."""
    found = [row_of(name, timed) for name, timed in held_out().items() if not ids or name in ids]
    rows = [row for row in found if row is not None]
    assert len(rows) == len(found)
    return rows


def row_of(name: str, timed: Timed) -> Row | None:
    """None where the card's rate for a kernel is unknown."""
    plan = timed.plan
    gpu = find_gpu(plan.gpu)
    assert gpu.capacity_bytes is not None
    traces = {TraceSpec.of(plan.config): _trace(plan, gpu)}
    host = REENTRANT if timed.group in TRAINERS else without_trainer(REENTRANT)
    estimator = Estimator(traces, gpu, memory_budget_bytes=gpu.capacity_bytes, host=host)
    seconds, parts = estimator.seconds(plan.config), estimator.parts(plan.config)
    if seconds is None or parts is None:
        return None
    trace = traces[TraceSpec.of(plan.config)]
    kept = added(_of_kept_gradients(plan, trace, gpu), _of_own_optimizer(plan, trace, gpu, host))
    return Row(
        id=name,
        group=timed.group,
        run=describe(plan),
        evidence=timed.evidence,
        published_seconds=timed.published_seconds,
        predicted_seconds=seconds.total_seconds + sum(part.seconds for part in kept.values()),
        bound=seconds.bound,
        parts=added(parts, kept),
    )


def _of_kept_gradients(plan: Plan, trace: Trace, gpu: Gpu) -> Parts:
    """The time of a program that fills gradients with zeros: for that, and for adding the first to them."""
    if plan.program.gradients != "kept":
        return {}
    kernels = [
        roofline.Kernel(
            name=name,
            kind="elementwise",
            dtype=spec.dtype,
            flops=0,
            bytes_moved=num_passes * spec.size_bytes,
        )
        for spec in trace.trainable(plan.config.lora_rank or 0)
        for name, num_passes in (("zero_", 1), ("add_", 3))
    ]
    found = step_parts.parts(kernels, roofline.ceilings(gpu))
    assert found is not None
    return found


def _of_own_optimizer(plan: Plan, trace: Trace, gpu: Gpu, host: Host) -> Parts:
    """The time by which a program is late whose optimizer goes through the tensors one by one.

    It begins with no lead, as the Trainer has read the loss, and a small tensor takes the GPU less than the
    host. The GPU's time for the bytes is in the Trainer's own optimizer, which moves as many.
    """
    launches = plan.program.launches_per_tensor
    if not launches:
        return {}
    specs = trace.trainable(plan.config.lora_rank or 0)
    kernels = [
        roofline.Kernel(
            name="optimizer",
            kind="elementwise",
            dtype=spec.dtype,
            flops=0,
            bytes_moved=ADAMW_PASSES * spec.size_bytes / launches,
            count=launches,
        )
        for spec in specs
    ]
    machine = roofline.ceilings(gpu)
    each = roofline.kernel_seconds(kernels, machine)
    assert each is not None
    on_gpu = np.array([launches * seconds for seconds, _ in each])
    on_host = np.full(
        len(specs), launches * host.launch_seconds["update"] + host.update.tensor_seconds
    )
    in_turn = Stretches(shares=np.eye(len(specs)), order=np.arange(len(specs)))
    late_seconds = late_seconds_of(on_gpu, on_host, in_turn)
    tails_seconds = launches * len(specs) * machine.kernel_tail_seconds
    return {"host": step_parts.of_host(late_seconds + tails_seconds, machine)}


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


def _timed_of(row: Row) -> Timed:
    return held_out()[row.id] if row.id in held_out() else timed_runs()[row.id]


def _tokens(row: Row) -> int:
    return _timed_of(row).plan.config.tokens_per_step


def published_rate(row: Row) -> float:
    """Tokens per second."""
    return _tokens(row) / row.published_seconds


def predicted_rate(row: Row) -> float:
    return _tokens(row) / row.predicted_seconds


def pairs(rows: Sequence[Row]) -> tuple[int, int]:
    """(pairs whose published throughputs differ, of these those predicted in that order)."""
    found = list(_told_apart(rows))
    return len(found), sum(predicted_rate(one) > predicted_rate(other) for one, other in found)


def ordered_by_odds(rows: Sequence[Row]) -> dict[str, tuple[int, int]]:
    """(pairs, those predicted in the published order) by the odds that the prediction gives its order."""
    counts = dict.fromkeys(_ODDS, (0, 0))
    for pair in _told_apart(rows):
        first, second = sorted(pair, key=predicted_rate, reverse=True)
        timed = [TimedWork(parts=row.parts, work=_tokens(row)) for row in (first, second)]
        odds = odds_of(timed[0], timed[1:], tolerance=0).of_first
        name = next(name for name, least in _ODDS.items() if odds >= least)
        num_pairs, num_ordered = counts[name]
        counts[name] = num_pairs + 1, num_ordered + (first is pair[0])
    return counts


_ODDS = {"95 % and more": 0.95, "80 to 95 %": 0.8, "less than 80 %": 0.0}


def _told_apart(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Pairs whose published throughputs differ, the faster one first."""
    for one, other in itertools.combinations(rows, 2):
        rates = [published_rate(row) for row in (one, other)]
        noise = sum(_timed_of(row).resolution for row in (one, other))
        if abs(rates[0] / rates[1] - 1) <= max(TIED, noise):
            continue
        yield (one, other) if rates[0] > rates[1] else (other, one)


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


def with_longer_samples() -> dict[str, Row]:
    """The rows of Alpaca2k once more, were its samples as long as the sizes of the files say."""
    found = {}
    for name, timed in timed_runs().items():
        if LENGTHS_OF_ALPACA in timed.assumed:
            config = timed.plan.config
            config = replace(config, sequence_length=round(LONGER * config.sequence_length))
            row = row_of(name, replace(timed, plan=replace(timed.plan, config=config)))
            assert row is not None
            found[name] = row
    return found


def markdown_longer(rows: Sequence[Row], longer: Mapping[str, Row]) -> str:
    """Both ratios of each row of Alpaca2k, and what becomes of all that test the model."""
    lines = [
        "| row | evidence | Alpaca's lengths | 1.9 times as long |",
        "|---|---|---:|---:|",
    ]
    for row in rows:
        if row.id in longer:
            other = longer[row.id]
            lines.append(f"| {row.id} | {row.evidence} | {row.ratio:.2f} | {other.ratio:.2f} |")
    tests = [row for row in rows if row.evidence != "C" and row.id not in chosen_with()]
    ratios = [longer.get(row.id, row).ratio for row in tests]
    near = num_near(ratios)
    num_within = sum(longer.get(row.id, row).is_within for row in tests)
    lines.append(
        f"\nOf the {len(tests)} rows without evidence C, with the longer samples: median"
        f" {statistics.median(ratios):.2f}, {near} within a quarter, {num_within} within their 80 %"
        " interval."
    )
    return "\n".join(lines)


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
        near = num_near(ratios.values())
        num_within = sum(row.is_within for row in members)
        lines.append(
            f"- {name}: predicted over published, median {statistics.median(ratios.values()):.2f} of"
            f" {len(ratios)}, from {ratios[fastest]:.2f} ({fastest}) to {ratios[slowest]:.2f}"
            f" ({slowest}); {near} within a quarter, {num_within} within their 80 % interval"
        )
    per_group = groups(rows)
    num_pairs = sum(group.num_pairs for group in per_group)
    num_ordered = sum(group.num_ordered for group in per_group)
    lines.append(
        f"- which of two is the faster one, within a group: {num_ordered} of {num_pairs} pairs"
    )
    by_group = itertools.groupby(rows, lambda row: row.group)
    by_odds = [ordered_by_odds(list(members)) for _, members in by_group]
    for name in _ODDS:
        told = [sum(counts[name][i] for counts in by_odds) for i in (0, 1)]
        lines.append(f"- of pairs whose order is predicted with {name}: {told[1]} of {told[0]}")
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


def held_out_summary(rows: Sequence[Row]) -> str:
    """Of held_out.csv: the predictions before a figure was compared, and today's."""
    first = {row.id: first_ratio(row) for row in rows}
    lines = [
        f"- {len(rows)} runs of {len({row['source'] for row in held_out_table().values()})} pages and"
        f" files, on {len({timed.plan.gpu for timed in held_out().values()})} cards"
    ]
    for name, ratios in (
        ("first predicted", list(first.values())),
        ("predicted today", [row.ratio for row in rows]),
    ):
        near = num_near(ratios)
        lines.append(
            f"- {name}, over published: median {statistics.median(ratios):.2f}, from"
            f" {min(ratios):.2f} to {max(ratios):.2f}; {near} within a quarter"
        )
    by_group = [list(members) for _, members in itertools.groupby(rows, lambda row: row.group)]
    counts = [pairs(members) for members in by_group]
    lines.append(
        f"- within their 80 % interval today: {sum(row.is_within for row in rows)}, and"
        f" {sum(all(row.is_within for row in members) for members in by_group)} of {len(by_group)}"
        " groups whole; which of two is the faster one, within a group:"
        f" {sum(right for _, right in counts)} of {sum(told for told, _ in counts)} pairs"
    )
    return "\n".join(lines)


def markdown_held_out_groups(rows: Sequence[Row]) -> str:
    lines = [
        "| group | rows | predicted / published, median | from | to | within 80 % | pairs in the right"
        " order |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, of_group in itertools.groupby(rows, lambda row: row.group):
        members = list(of_group)
        ratios = [row.ratio for row in members]
        told, right = pairs(members)
        lines.append(
            f"| {name} | {len(members)} | {statistics.median(ratios):.2f} | {min(ratios):.2f}"
            f" | {max(ratios):.2f} | {sum(row.is_within for row in members)} | {right} of {told} |"
        )
    return "\n".join(lines)


def first_ratio(row: Row) -> float:
    """Predicted over published, as a held-out row was first predicted."""
    first = float(held_out_table()[row.id]["first_predicted_seconds"])
    return first / row.published_seconds


def markdown_held_out(rows: Sequence[Row]) -> str:
    lines = [
        "| row | run | published, ms | first predicted / published | predicted today, ms"
        " | predicted / published | within 80 % | bound |",
        "|---|---|---:|---:|---:|---:|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.id} | {row.run} | {row.published_seconds * 1e3:.1f} | {first_ratio(row):.2f}"
            f" | {row.predicted_seconds * 1e3:.1f} | {row.ratio:.2f}"
            f" | {'yes' if row.is_within else 'no'} | {row.bound} |"
        )
    return "\n".join(lines)


def markdown_held_out_assumed() -> str:
    """Each source with what is assumed of its rows."""
    by_source: dict[str, dict[str, list[str]]] = {}
    for name, row in held_out_table().items():
        for assumption in held_out()[name].assumed:
            by_source.setdefault(row["source"], {}).setdefault(assumption, []).append(name)
    lines = []
    for source, assumptions in by_source.items():
        names = list(dict.fromkeys(name for of_one in assumptions.values() for name in of_one))
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        lines.append(f"- {span}: <{source}>. {'; '.join(assumptions)}")
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
    further = predict_held_out()
    record = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "rows": [{**asdict(row), "ratio": row.ratio} for row in rows],
        "groups": [asdict(group) for group in groups(rows)],
        "held_out": [
            {"id": row.id, "group": row.group, "ratio": row.ratio, "is_within": row.is_within}
            for row in further
        ],
    }
    (STUDY / "rows.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sections = {
        "summary": summary(rows),
        "groups": markdown_groups(groups(rows)),
        "rows": markdown(rows),
        "assumed": markdown_assumed(),
        "longer": markdown_longer(rows, with_longer_samples()),
        "left out": markdown_left_out(rows),
        "held out": held_out_summary(further),
        "held out groups": markdown_held_out_groups(further),
        "held out rows": markdown_held_out(further),
        "held out assumed": markdown_held_out_assumed(),
    }
    write_sections(STUDY / "README.md", sections)
    for name in ("groups", "summary", "longer", "held out", "held out groups"):
        print(sections[name], end="\n\n")


if __name__ == "__main__":
    main()
