"""A report as text in each format, and as a file."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

from autotune.common import files
from autotune.report import html, markdown, terminal
from autotune.report.data import ReportData


def _json(data: ReportData) -> str:
    return json.dumps(data.to_dict(), indent=2, allow_nan=False) + "\n"


def _terminal(data: ReportData) -> str:
    file = io.StringIO()
    terminal.draw_summary(data.answer.summary, file)
    return file.getvalue()


TEXTS: dict[str, Callable[[ReportData], str]] = {
    "html": html.draw,
    "markdown": markdown.draw,
    "json": _json,
    "terminal": _terminal,
}
"""What `autotune report --format` takes, and the whole of such a file."""


def write(path: Path, text: str) -> None:
    """The file; its folder is created. Raises StorageError."""
    files.write_all({path: [text]}, what="The report", to=path, kind="file")
