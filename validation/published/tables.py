"""What was predicted of the published runs, and the tables of it in studies/published-memory/README.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.common.units import GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published figure beside the predicted ones."""

    id: str
    run: str
    metric: str
    published_bytes: int
    as_trainer_bytes: int
    as_program_bytes: int
    quirks: tuple[str, ...]
    is_used: bool
    """Something unknown was solved from it: no evidence."""

    @property
    def error(self) -> float:
        return self.as_program_bytes / self.published_bytes - 1

    @property
    def trainer_error(self) -> float:
        return self.as_trainer_bytes / self.published_bytes - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEnd:
    """Bytes allocated after a step, mean of a run, beside those predicted for the mean batch."""

    id: str
    run: str
    published_bytes: int
    as_program_bytes: int
    is_used: bool

    @property
    def error(self) -> float:
        return self.as_program_bytes / self.published_bytes - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """One published verdict, fits or out of memory, beside the predicted one."""

    id: str
    run: str
    published_fits: bool
    predicted_fits: bool
    peak_device_bytes: int
    capacity_bytes: int
    quirks: tuple[str, ...]


def markdown(rows: Sequence[Row]) -> str:
    lines = [
        "| row | run | metric | published, GiB | as a Trainer, GiB | error | as its program, GiB"
        " | error |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {_named(row)} | {row.run} | {row.metric} | {row.published_bytes / GIB:.3f}"
            f" | {row.as_trainer_bytes / GIB:.3f} | {row.trainer_error:+.1%}"
            f" | {row.as_program_bytes / GIB:.3f} | {row.error:+.1%} |"
        )
    return "\n".join(lines)


def _named(row: Row | StepEnd) -> str:
    return f"{row.id} (used)" if row.is_used else row.id


def markdown_step_ends(rows: Sequence[StepEnd]) -> str:
    lines = [
        "| row | run | published, GiB | as its program, GiB | error |",
        "|---|---|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {_named(row)} | {row.run} | {row.published_bytes / GIB:.3f}"
            f" | {row.as_program_bytes / GIB:.3f} | {row.error:+.1%} |"
        )
    return "\n".join(lines)


def markdown_labels(labels: Sequence[Label]) -> str:
    lines = [
        "| row | run | predicted on the device, GiB | card, GiB | predicted | published |",
        "|---|---|---:|---:|---|---|",
    ]
    verdict = {True: "fits", False: "out of memory"}
    for label in labels:
        lines.append(
            f"| {label.id} | {label.run} | {label.peak_device_bytes / GIB:.2f}"
            f" | {label.capacity_bytes / GIB:.2f} | {verdict[label.predicted_fits]}"
            f" | {verdict[label.published_fits]} |"
        )
    return "\n".join(lines)


def markdown_quirks(rows: Sequence[Row | Label]) -> str:
    ids: dict[str, list[str]] = {}
    for row in rows:
        for quirk in row.quirks:
            ids.setdefault(quirk, []).append(row.id)
    return "\n".join(f"- {quirk} ({_listed(names)})" for quirk, names in ids.items())


def markdown_left_out(reasons: Mapping[str, str]) -> str:
    ids: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        ids.setdefault(reason, []).append(name)
    return "\n".join(
        f"- {len(names)} x {reason} ({_listed(names)})" for reason, names in ids.items()
    )


def _listed(names: Sequence[str]) -> str:
    """First and last of a series by one author, in the table's order."""
    groups: dict[str, list[str]] = {}
    for name in names:
        group, _, number = name.rpartition("-")
        groups.setdefault(group, []).append(number)
    return "; ".join(
        f"{group}-{', '.join(numbers)}"
        if len(numbers) <= 9
        else f"{group}-{numbers[0]} to {numbers[-1]}"
        for group, numbers in groups.items()
    )


def summary(rows: Sequence[Row], step_ends: Sequence[StepEnd]) -> str:
    """Median, smallest and largest error of both predictions; a row that was solved from counts not."""
    evidence = [row for row in rows if not row.is_used]
    peaks = {(row.published_bytes, row.as_program_bytes): row for row in evidence}
    of_peft = [row for row in evidence if row.id.startswith("peft-")]
    lines = []
    for name, errors in (
        ("as its program", {row.id: row.error for row in evidence}),
        (
            "as its program, peaks alone, equal runs once",
            {row.id: row.error for row in peaks.values() if row.metric != "step end"},
        ),
        ("as its program, PEFT's runs, peak", {row.id: row.error for row in of_peft}),
        (
            "as its program, PEFT's runs, between steps",
            {row.id: row.error for row in step_ends if not row.is_used},
        ),
        ("as a Trainer", {row.id: row.trainer_error for row in evidence}),
    ):
        worst = min(errors, key=lambda row: errors[row])
        largest = max(errors, key=lambda row: errors[row])
        lines.append(
            f"- {name}: median error {statistics.median(map(abs, errors.values())):.1%} of"
            f" {len(errors)} rows, from {errors[worst]:+.1%} ({worst})"
            f" to {errors[largest]:+.1%} ({largest}),"
            f" {sum(error < -0.03 for error in errors.values())} more than 3 % under,"
            f" {sum(error < -0.05 for error in errors.values())} more than 5 %"
        )
    used = ", ".join(row.id for row in rows if row.is_used)
    return "\n".join([*lines, f"- {used} counts in none: two lengths are solved from it"])


def num_near(ratios: Iterable[float]) -> int:
    """Number of ratios of predicted to published that lie within a quarter: a factor of 1.25 up or down."""
    return sum(0.8 <= ratio <= 1.25 for ratio in ratios)


def as_table(rows: Sequence[Mapping[str, object]]) -> str:
    """A Markdown table of rows that have the same keys, which head its columns."""
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", "|---|" + "---:|" * (len(names) - 1)]
    lines += [f"| {' | '.join(str(row[name]) for name in names)} |" for row in rows]
    return "\n".join(lines)


def write_sections(page: Path, sections: Mapping[str, str]) -> None:
    """Write each text between the marks of its name in a study's page."""
    text = page.read_text(encoding="utf-8")
    for name, content in sections.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end {name} -->\n"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        assert found, f"{page.name} has no section {name}"
        text = f"{before}{begin}{content}\n{end}{after}"
    page.write_text(text, encoding="utf-8")
