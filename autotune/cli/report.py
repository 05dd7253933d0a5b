"""autotune report: the answer of a study with its evidence, as one file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.cli import completion
from autotune.cli.options import FILE_OR_DASH, one_of, storage_option
from autotune.cli.output import print_json
from autotune.common.files import STDOUT

if TYPE_CHECKING:
    from autotune.report.data import ReportData

FILENAME = "report.html"
FORMATS = ("html", "markdown", "json", "terminal")
"""The keys of autotune.report.files.TEXTS, whose import is slow."""


@click.command()
@click.argument("study", shell_complete=completion.studies)
@click.option(
    "--format",
    "format_name",
    type=one_of(FORMATS),
    default="html",
    help="html is one file that needs no network; the others go to stdout.",
)
@click.option(
    "--out",
    type=FILE_OR_DASH,
    metavar="FILE",
    help=f"Where it goes, - for stdout [default: {FILENAME} for html, else stdout].",
)
@storage_option()
def report(*, study: str, format_name: str, out: Path | None, storage: str) -> None:
    """Write the report of STUDY: the answer, its evidence, every trial.

    Example: autotune report qwen2.5-1.5b-12gb --out report.html
    """
    from autotune.common.units import format_bytes
    from autotune.report.data import read
    from autotune.report.files import TEXTS, write

    data = read(storage, study)
    if str(out) == STDOUT or (out is None and format_name != "html"):
        _print(data, format_name)
        return
    path = out or Path(FILENAME)
    text = TEXTS[format_name](data)
    write(path, text)
    click.echo(f"written {click.format_filename(path)} ({format_bytes(len(text.encode()))})")


def _print(data: ReportData, format_name: str) -> None:
    from autotune.report import terminal
    from autotune.report.files import TEXTS

    if format_name == "terminal":  # which has colours
        terminal.draw_answer(data.stored.answer, sys.stdout)
    elif format_name == "json":
        print_json(data.to_dict())
    else:
        sys.stdout.write(TEXTS[format_name](data))
