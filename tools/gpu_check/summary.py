"""The README of studies/<gpu>/, made from its records; and whether they hold what is promised.

Errors are predicted / measured - 1, of runs that had all of the card and did not fail. Where a run was
recorded several times (other versions, other budgets of its own prediction) the last one counts.

Where there was no card (tools/no_card) no time is told, nor what lies outside the allocator: both were
put in.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from autotune.common.units import format_bytes
from autotune.records.measurement import Measurement, measurement_from_dict
from autotune.speed.sureness import within
from tools.gpu_check import kernels, speedup_table
from tools.gpu_check.records import Record, read_records
from tools.no_card import DRIVER as NO_CARD

ALLOCATED_MEDIAN = 0.02
RESERVED_MEDIAN = 0.03
UNDER = 0.03
"""No prediction may be further below what was measured."""
SURVIVE = 0.98
"""Of the runs whose budget was their own predicted peak."""
MAX_ACCUMULATION = 2
"""Micro-batches that a probe really runs (autotune.worker.probe.training)."""

QUANTITIES = {
    "allocated": "peak_allocated_bytes",
    "reserved": "peak_reserved_bytes",
    "outside": "nontorch_bytes",
    "device": "peak_device_bytes",
    "time": "step_seconds",
}
"""Column -> the name of the figure in Estimate and Measurement."""
NO_CARDS_QUANTITIES = ("allocated", "reserved")

KNOBS = (
    "model",
    "method",
    "precision",
    "optimizer",
    "activation_checkpointing",
    "activation_offloading",
    "attention",
    "sequence_length",
    "micro_batch_size",
    "quantization",
)


def knob_of(record: Record, knob: str) -> Any:
    """The value by which a table is divided: the model, or a setting."""
    return record["model"] if knob == "model" else record["measurement"]["config"][knob]


def measured(record: Record) -> Measurement:
    return measurement_from_dict(record["measurement"])


def uncapped(records: Iterable[Record]) -> list[Record]:
    return [r for r in records if not r["capped_at_prediction"]]


def errors(records: Iterable[Record], figure: str) -> list[float]:
    """predicted / measured - 1 of the runs that came to their end."""
    found = []
    for record in uncapped(records):
        measurement = measured(record)
        predicted, seen = record["prediction"][figure], getattr(measurement, figure)
        if measurement.outcome == "ok" and predicted is not None and seen:
            found.append(predicted / seen - 1)
    return found


def survival(records: Iterable[Record]) -> tuple[int, int]:
    """(runs that fitted, runs) of those whose budget was their own predicted peak.

    What ended otherwise than by its memory says nothing here.
    """
    capped = [measured(r) for r in records if r["capped_at_prediction"]]
    told = [m for m in capped if m.outcome in ("ok", "oom")]
    return sum(m.fits for m in told), len(told)


def breaches(records: Sequence[Record]) -> list[str]:
    """What the records do not hold of that which is promised, a line each."""
    found = []
    limits = {"allocated": ALLOCATED_MEDIAN, "reserved": RESERVED_MEDIAN}
    for name, limit in limits.items():
        of_figure = errors(records, QUANTITIES[name])
        if not of_figure:
            continue
        median = statistics.median(map(abs, of_figure))
        if median > limit:
            found.append(f"{name}: median error {median:.1%}, promised {limit:.0%}")
        if min(of_figure) < -UNDER:
            found.append(f"{name}: worst {min(of_figure):+.1%}, promised never below -{UNDER:.0%}")
    num_fitting, num_capped = survival(records)
    if num_capped and num_fitting < SURVIVE * num_capped:
        found.append(
            f"survival: {num_fitting} of {num_capped} at their own prediction, promised {SURVIVE:.0%}"
        )
    return found


def write_summary(folder: Path) -> None:
    """Write README.md from the records of the folder; nothing where there are none."""
    if not any(folder.glob("*.jsonl")):
        return
    predicted = read_records(folder / "predicted_vs_measured.jsonl")
    swept = read_records(folder / "sweep.jsonl")
    timed = read_records(folder / "kernels.jsonl")
    sections = [
        *_head(folder.name, [*predicted, *swept], timed),
        *_predictions(f"Predicted against {_theirs([*predicted, *swept])}", predicted),
        *_predictions("The sweep", swept),
    ]
    if not _is_without_card([*predicted, *swept, *timed]):
        sections += [
            *_best(swept),
            *_speedups(read_records(folder / "speedups.jsonl")),
            *_finds(read_records(folder / "find.jsonl")),
            *_kernels(timed),
        ]
    sections += _processes(read_records(folder / "processes.jsonl"))
    (folder / "README.md").write_text("\n".join(sections) + "\n", encoding="utf-8")


def _head(name: str, records: Sequence[Record], timed: Sequence[Record]) -> list[str]:
    """The title; `timed` are records of kernels, and `records` those of probes."""
    lines = [f"# What was measured on {name}", "", "Made by `make gpu-check`; do not edit.", ""]
    is_without_card = _is_without_card([*records, *timed])
    if is_without_card:
        lines[0] = f"# PyTorch's own memory, on a card ({name}) that was not there"
    for text in sorted(set(map(_fingerprint, [*records, *timed]))):
        lines += [f"- {text}"]
    if any(r["measurement"]["spec"]["backend"] == "cpu" for r in records):
        lines += ["", "Steps ran on a CPU, bytes are the tracker's: no measure of any card."]
    if is_without_card:
        lines += [
            "",
            "There was no card, and nothing was computed: PyTorch's CUDA build ran on a CUDA runtime that",
            "does nothing (`tools/no_card`). Its choice of kernels and every allocation are its own:",
            "what it allocated and reserved is held against the prediction. Of times, of the context, of",
            "cuDNN's own workspace and of managed memory this says nothing.",
        ]
    return [*lines, ""]


def _theirs(records: Iterable[Record]) -> str:
    return "PyTorch's own" if _is_without_card(records) else "measured"


def _is_without_card(records: Iterable[Record]) -> bool:
    return any(_prints(record)["driver"] == NO_CARD for record in records)


def _prints(record: Record) -> Record:
    """The fingerprint of a probe or a kernel."""
    found: Record = record.get("measurement", record)["fingerprint"]
    return found


def _fingerprint(record: Record) -> str:
    prints = _prints(record)
    versions = ", ".join(f"{name} {version}" for name, version in prints["versions"])
    driver = f", driver {prints['driver']}, CUDA {prints['cuda']}" if prints["driver"] else ""
    allocator = f", {prints['allocator']}" if prints["allocator"] else ""
    return f"{prints['device']}{driver}: {versions}{allocator}"


def _predictions(title: str, records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    outcomes = Counter(r["measurement"]["outcome"] for r in records)
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    lines = [f"## {title}", "", f"{len(records)} probes: {told}.", ""]
    both = [
        (r["prediction"]["fits"], measured(r).fits)
        for r in uncapped(records)
        if r["measurement"]["outcome"] in ("ok", "oom")
    ]
    lines += [
        f"- predicted to fit, and did not: {both.count((True, False))} of {len(both)}",
        f"- predicted not to fit, and did: {both.count((False, True))} of {len(both)}",
    ]
    num_fitting, num_capped = survival(records)
    if num_capped:
        lines += [
            f"- with their own predicted peak as budget: {num_fitting} of {num_capped} fitted"
        ]
    has_times = not _is_without_card(records)
    if has_times:
        lines += [*_within_their_range(records), *_with_its_host(records)]
        lines += _mended_by_one_probe(records)
    lines += _seen_on_the_card(records)
    seconds = [_overhead_seconds(r) for r in records if r["measurement"]["outcome"] == "ok"]
    if seconds and has_times:
        lines += [
            f"- outside its timed steps a probe took {statistics.median(seconds):.1f} s (median), "
            f"{max(seconds):.1f} s (longest)"
        ]
    lines += [f"- NOT HELD: {breach}" for breach in breaches(records)]
    return [*lines, "", *_table(records), *_as_predicted_first(records), *_failures(records)]


def _mended_by_one_probe(records: Sequence[Record]) -> list[str]:
    """What is left of the error in time once the first run of a model and method is known.

    Of the others: predicted times the first's measured / predicted, against measured.
    """
    factors: dict[tuple[str, str], float] = {}
    left = []
    for record in uncapped(records):
        seen, predicted = measured(record), record["prediction"]["step_seconds"]
        if seen.outcome != "ok" or not predicted or not seen.step_seconds:
            continue
        what = (record["model"], seen.config.method)
        if what in factors:
            left.append(factors[what] * predicted / seen.step_seconds - 1)
        else:
            factors[what] = seen.step_seconds / predicted
    if not left:
        return []
    return [
        f"- time, once one probe of the same model and method is known: "
        f"{statistics.median(map(abs, left)):.1%} off (median), {max(left, key=abs):+.1%} (furthest), "
        f"of {len(left)}"
    ]


def _within_their_range(records: Sequence[Record]) -> list[str]:
    """How many measured steps lie in the range that their prediction says holds 80 % of them."""
    held = []
    for record in uncapped(records):
        seen, predicted = measured(record), record["prediction"]
        below, above = predicted.get("step_spread"), predicted.get("slow_spread")
        if seen.outcome == "ok" and seen.step_seconds and below is not None and above is not None:
            least, most = within(predicted["step_seconds"], below, above)
            held.append(least <= seen.step_seconds <= most)
    if not held:
        return []
    return [f"- time, in the range that is predicted to hold 80 %: {sum(held)} of {len(held)}"]


def _with_its_host(records: Sequence[Record]) -> list[str]:
    """Return the error in time of predictions that know how long this host takes for an operation."""
    left = [
        record["step_seconds_with_its_host"] / seconds - 1
        for record in uncapped(records)
        if "step_seconds_with_its_host" in record and (seconds := measured(record).step_seconds)
    ]
    if not left:
        return []
    return [
        f"- time, predicted with this host's time for an operation (kernels.jsonl): "
        f"{statistics.median(map(abs, left)):.1%} off (median), {max(left, key=abs):+.1%} (furthest), "
        f"of {len(left)}; {sum(1 / 1.25 <= 1 + each <= 1.25 for each in left)} within a quarter"
    ]


def _seen_on_the_card(records: Sequence[Record]) -> list[str]:
    """What NVML saw from outside: whether budgets hold, and whether probes know what they hold.

    Kernels that are loaded in the first warm-up step come on top of a cap that did not know of them:
    that step is not counted, and is seen here.
    """
    seen = [
        (r["card_peak_bytes"], measured(r)) for r in records if r.get("card_peak_bytes") is not None
    ]
    if not seen:
        return []
    over = [held - m.spec.memory_budget_bytes for held, m in seen]
    lines = [
        f"- by NVML {sum(excess > 0 for excess in over)} of {len(over)} passed their budget at any moment, "
        f"by {format_bytes(max(*over, 0))} at most"
    ]
    beside = [m.peak_device_bytes / held - 1 for held, m in seen if held and m.peak_device_bytes]
    if beside:
        lines += [
            f"- a probe's own figure beside NVML's: {statistics.median(beside):+.1%} (median), "
            f"{max(beside, key=abs):+.1%} (furthest off)"
        ]
    return lines


def _overhead_seconds(record: Record) -> float:
    seen = measured(record)
    if seen.micro_step_seconds is None or seen.optimizer_step_seconds is None:
        return float(record["wall_seconds"])
    micro_steps = min(seen.config.gradient_accumulation_steps, MAX_ACCUMULATION)
    step_seconds = micro_steps * seen.micro_step_seconds + seen.optimizer_step_seconds
    return float(record["wall_seconds"]) - seen.num_steps * step_seconds


def _as_predicted_first(records: Sequence[Record]) -> list[str]:
    """A table of the predictions that were made before the runs, where today's have replaced them."""
    first = [r | {"prediction": r["first_prediction"]} for r in records if "first_prediction" in r]
    if not first:
        return []
    names = NO_CARDS_QUANTITIES if _is_without_card(records) else tuple(QUANTITIES)
    methods = sorted({knob_of(record, "method") for record in first})
    return [
        "The same of the predictions that were made before the runs:",
        "",
        *_head_of(names),
        _row("all", "", first, names),
        *(
            _row("method", each, [r for r in first if knob_of(r, "method") == each], names)
            for each in methods
        ),
        "",
    ]


def _head_of(names: Collection[str]) -> list[str]:
    head = "| knob | value | runs | " + " | ".join(names) + " |"
    return [head, "|---|---|---:|" + "---:|" * len(names)]


def _table(records: Sequence[Record]) -> list[str]:
    """Per value of each knob: median of the absolute error, and the error that is furthest off."""
    names = NO_CARDS_QUANTITIES if _is_without_card(records) else tuple(QUANTITIES)
    rows = [_row("all", "", records, names)]
    for knob in KNOBS:
        values = sorted(
            {knob_of(r, knob) for r in records}, key=lambda value: (str(type(value)), value)
        )
        if len(values) > 1:
            for value in values:
                rows += [
                    _row(knob, str(value), [r for r in records if knob_of(r, knob) == value], names)
                ]
    return [
        f"Median and worst error, predicted against {_theirs(records)}.",
        "",
        *_head_of(names),
        *rows,
        "",
    ]


def _row(knob: str, value: str, records: Sequence[Record], names: Iterable[str]) -> str:
    num_runs = len(errors(records, "peak_allocated_bytes"))
    cells = [knob, value, str(num_runs)]
    for name in names:
        of_figure = errors(records, QUANTITIES[name])
        if of_figure:
            median = statistics.median(map(abs, of_figure))
            cells += [f"{100 * median:.2f} %, {100 * max(of_figure, key=abs):+.2f} %"]
        else:
            cells += [""]
    return "| " + " | ".join(cells) + " |"


def _failures(records: Sequence[Record]) -> list[str]:
    lines = []
    for record in records:
        measurement = record["measurement"]
        if measurement["outcome"] not in ("ok", "oom"):
            message = " ".join(measurement["message"].split())[:200].replace("|", "/")
            config = measurement["config"]
            what = f"{config['method']} {config['precision']} {config['optimizer']}"
            lines += [f"- {measurement['outcome']}: {record['model']} {what}: {message}"]
    return ["Neither measured nor out of memory:", "", *lines, ""] if lines else []


def _best(records: Sequence[Record]) -> list[str]:
    fitting = [(record, measured(record)) for record in records]
    fitting = [(record, m) for record, m in fitting if m.fits and m.tokens_per_second]
    if not fitting:
        return []
    record, best = max(fitting, key=lambda pair: pair[1].tokens_per_second or 0.0)
    config = best.config
    return [
        f"Fastest within {format_bytes(best.spec.memory_budget_bytes)}: {record['model']} "
        f"{config.method}, {config.precision}, {config.optimizer}, micro-batch "
        f"{config.micro_batch_size} x {config.gradient_accumulation_steps}, checkpointing "
        f"{config.activation_checkpointing}: {best.tokens_per_second:,.0f} tokens/s measured.",
        "",
    ]


def _speedups(records: Sequence[Record]) -> list[str]:
    lines = speedup_table.table(records)
    return ["## Speed-ups", "", *lines] if lines else []


def _kernels(records: Sequence[Record]) -> list[str]:
    return ["## Kernels", "", *kernels.table(records)] if records else []


def _finds(records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    lines = [
        "## find",
        "",
        "| model | budget | exit code | wall | probes | of earlier calls | tokens/s | predicted |",
    ]
    lines += ["|---|---|---:|---:|---:|---:|---:|---:|"]
    for record in records:
        of_probes = (record["answer"] or {}).get("measured") or {}
        final = of_probes.get("confirmation" if of_probes.get("confirmed") else "best") or {}
        speed = final.get("tokens_per_second")
        predicted = of_probes.get("predicted_tokens_per_second")
        lines += [
            f"| {record['model']} | {record['gpu_mem']} | {record['exit_code']} | "
            f"{record['wall_seconds']:.0f} s | {_probes_of(of_probes)} | "
            f"{_count(speed)} | {_count(predicted)} |"
        ]
    return [*lines, ""]


def _probes_of(of_probes: Record) -> str:
    """How many probes the study has, and how many of them an earlier call ran."""
    if not of_probes:
        return " | "
    whole = sum(of_probes["outcomes"].values())
    return f"{whole} | {max(whole - of_probes['num_run'], 0)}"


def _processes(records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    lines = ["## Processes", "", "| what | ended | threads | CUDA in the server | memory back |"]
    lines += ["|---|---|---:|---|---|"]
    for record in records:
        fork = record["fork"] or {}
        touched = fork.get("cuda_initialized") or fork.get("cuda_device_open")
        has_cuda = touched or record["server_has_context"]
        lines += [
            f"| {record['key']} | {record['end']} | {fork.get('num_threads', '')} | "
            f"{('yes' if has_cuda else 'no') if fork else record['unfit_reason']} | "
            f"{_returned(record)} |"
        ]
    return [*lines, ""]


def _returned(record: Record) -> str:
    if record["device_before_bytes"] is None:
        return "not known: no card"
    if not record["has_returned"] or record["pids_left"]:
        return f"NO: {len(record['pids_left'])} processes left"
    return f"after {record['return_seconds']:.1f} s"


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"
