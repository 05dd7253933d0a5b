"""A report as text in each format, written beside its place and moved there: a full disk leaves the
earlier one as it was."""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from autotune.errors import StorageError
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
    place = path.with_name(f".{path.name[:40]}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with place.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        place.replace(path)
    except (OSError, ValueError) as error:
        raise StorageError(
            f"The report cannot be written to {path}",
            why=getattr(error, "strerror", None) or str(error),
            remedy="Free some space, check the permissions, or name another file with --out",
        ) from error
    finally:
        with contextlib.suppress(OSError, ValueError):
            place.unlink()
