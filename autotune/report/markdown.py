"""Draws a report as Markdown: for an issue, a pull request, a wiki. Text of others is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from autotune.common.units import Unit, format_bytes
from autotune.report import facts, figures, words
from autotune.report.data import ReportData, TrialRow

MAX_TRIALS = 20
"""Most trials that are listed, the fastest first; all of them are in the HTML."""


def draw(data: ReportData) -> str:
    """Draw the report as one Markdown document."""
    answer = data.stored.answer
    budget_bytes = answer.workload.memory_budget_bytes
    banner = "Predicted, nothing was run"
    if answer.measured is not None:
        banner = f"Measured on {answer.measured.final.fingerprint.device}"
    parts = [
        f"# {plain(words.model_name(answer.workload.model))}",
        f"**{plain(banner)}.** The fastest configuration that fits {format_bytes(budget_bytes)} of "
        f"{plain(answer.gpu)}:",
        f"> {plain(', '.join(facts.config_parts(answer.best.config)))}",
        table(
            ("", "", "evidence", ""),
            (
                (tile.label, f"**{tile.figure}** {tile.unit}", tile.evidence, tile.note)
                for tile in facts.tiles(answer)
            ),
        ),
        "\n\n".join(plain(text) for text in facts.reasons(answer)),
        "## Memory at the peak, predicted",
        *map(_bar, facts.bars(data)),
    ]
    if path := facts.path_rows(data):
        parts += [
            "## What each change bought, predicted",
            table(
                ("change", "tokens/s>", ">", "peak>", ">", ""),
                (
                    (
                        row.change,
                        f"{row.tokens_per_second:,.0f}",
                        row.gain,
                        format_bytes(row.peak_device_bytes),
                        row.saving,
                        "" if row.fits else "does not fit",
                    )
                    for row in path
                ),
            ),
        ]
    parts += [
        "## Best of each trade-off class, predicted",
        table(
            ("class", "fastest of its class", "tokens/s>", "peak>", "speed>"),
            (
                (
                    f"{row.name} ({row.meaning})",
                    row.entry,
                    "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
                    "" if row.peak_device_bytes is None else format_bytes(row.peak_device_bytes),
                    row.against_answer,
                )
                for row in facts.class_rows(answer)
            ),
        ),
        _trials(data.trials, figures.unit_of(data)),
        "## Where this comes from",
        table(("", ""), facts.provenance(data)),
    ]
    return "\n\n".join(parts) + "\n"


def _bar(bar: facts.Bar) -> str:
    seen = "" if bar.measured_bytes is None else f", measured {format_bytes(bar.measured_bytes)}"
    listed = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in bar.parts)
    return (
        f"**{plain(bar.label)}** ({plain(bar.config)}): {format_bytes(bar.total_bytes)}{seen}. "
        f"{plain(listed)}."
    )


def _trials(rows: Sequence[TrialRow], unit: Unit) -> str:
    memory, unit_bytes = unit
    fastest = sorted(rows, key=lambda row: (row.tokens_per_second is None, -_speed(row)))
    title = f"## The fastest {MAX_TRIALS} of {len(rows):,} trials"
    listed = table(
        (
            "trial>",
            "outcome",
            "evidence",
            "class",
            "tokens/s>",
            f"{memory}>",
            "configuration",
            "reason",
        ),
        (
            (
                str(row.number),
                row.outcome,
                row.evidence,
                row.tradeoff,
                "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
                ""
                if row.peak_device_bytes is None
                else f"{row.peak_device_bytes / unit_bytes:.2f}",
                row.config,
                row.remark,
            )
            for row in fastest[:MAX_TRIALS]
        ),
    )
    return f"{title if len(rows) > MAX_TRIALS else '## Trials'}\n\n{listed}"


def _speed(row: TrialRow) -> float:
    return row.tokens_per_second or 0.0


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a column whose header ends in `>` is aligned to the right."""
    lines = [
        "| " + " | ".join(header.removesuffix(">") for header in headers) + " |",
        "|" + "|".join("---:" if header.endswith(">") else "---" for header in headers) + "|",
        *("| " + " | ".join(map(plain, row)) + " |" for row in rows),
    ]
    return "\n".join(lines)


def plain(text: str) -> str:
    """Escape text so that Markdown, and the HTML in it, leave it alone; our own ** stays."""
    line = " ".join(words.printable(text).split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`|_\[\]~$#]|(?<!\*)\*(?!\*))", r"\\\1", line)
