"""Writes a report as text in each format."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

from autotune.common import files
from autotune.report import html, markdown, terminal
from autotune.report.data import ReportData


def _terminal(data: ReportData) -> str:
    file = io.StringIO()
    terminal.draw_answer(data.stored.answer, file)
    return file.getvalue()


TEXTS: dict[str, Callable[[ReportData], str]] = {
    "html": html.draw,
    "markdown": markdown.draw,
    "json": lambda data: json.dumps(data.to_dict(), indent=2, allow_nan=False) + "\n",
    "terminal": _terminal,
}
"""The formats of `autotune report --format`, and for each a function that makes the whole text."""


def write(path: Path, text: str) -> None:
    """Write the file; its folder is created where it is missing.

    Raises StorageError.
    """
    files.write_all({path: [text]}, what="The report", to=path, kind="file")
