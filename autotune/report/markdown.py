"""Draws a report as Markdown: for an issue, a pull request, a wiki. Text of others is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from autotune.common.user_text import printable
from autotune.report import facts, figures, html
from autotune.report.data import ReportData, TrialRow

MAX_TRIALS = 20
"""Most trials that are listed, the fastest first; all of them are in the HTML."""


def draw(data: ReportData) -> str:
    """Draw the report as one Markdown document."""
    answer = data.stored.answer
    unit, unit_bytes = figures.unit_of(data)
    banner = "Predicted, nothing was run"
    if answer.measured is not None:
        banner = f"Measured on {answer.measured.final.fingerprint.device}"
    return html.template("page.md.j2", plain, autoescape=False).render(
        facts.of_page(data),
        banner=banner,
        unit=unit,
        unit_bytes=unit_bytes,
        fastest=sorted(data.trials, key=_slowness),
        most_trials=MAX_TRIALS,
    )


def _slowness(row: TrialRow) -> tuple[bool, float]:
    return row.tokens_per_second is None, -(row.tokens_per_second or 0.0)


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
    line = " ".join(printable(text).split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`|_\[\]~$#]|(?<!\*)\*(?!\*))", r"\\\1", line)
