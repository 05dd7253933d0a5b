"""Lines of the doctor's findings, one per check as it is known, its remedy below it."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import TextIO

from autotune.common.units import format_seconds
from autotune.common.user_text import printable
from autotune.doctor import CHECKS, CheckResult
from autotune.doctor.verdict import Status
from autotune.report import terminal

_STYLES = {Status.OK: "green", Status.WARN: "bold yellow", Status.FAIL: "bold red"}
_STATUS_WIDTH = 6
_NAME_WIDTH = max(len(check.name) for check in CHECKS) + 2
_NARROW_COLUMNS = 60
"""Width below which the text goes under its label, where there is room for it."""


def draw_finding(found: CheckResult, file: TextIO) -> None:
    """Draw a status word, which needs no colour, the check's name, what was found, what to do."""
    from rich.text import Text

    console = terminal.console_on(file)
    verdict = found.verdict
    texts = [(printable(verdict.said), "")]
    if verdict.remedy:
        texts.append((f"-> {printable(verdict.remedy)}", "bold"))
    head: tuple[str | tuple[str, str], ...] = (
        (f"{verdict.status.value:<{_STATUS_WIDTH}}", _STYLES[verdict.status]),
        (f"{found.check.name:<{_NAME_WIDTH}}", "dim"),
    )
    indent = _STATUS_WIDTH + _NAME_WIDTH
    if console.width < _NARROW_COLUMNS:
        label = Text.assemble(*head)
        label.rstrip()
        console.print(label, soft_wrap=True)
        indent = 2
        head = (" " * indent,)
    width = max(console.width - indent, 20)
    for text, style in texts:
        for line in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False):
            console.print(Text.assemble(*head, (line, style)), soft_wrap=True)
            head = (" " * indent,)


def draw_end(findings: Sequence[CheckResult], file: TextIO) -> None:
    """Draw how many there are of each, and how long it took."""
    counts = Counter(found.verdict.status for found in findings)
    seconds = sum(found.seconds for found in findings)
    each = ", ".join(f"{counts[status]} {status.value}" for status in Status)
    terminal.console_on(file).print(f"{each}; in {format_seconds(seconds)}", soft_wrap=True)
