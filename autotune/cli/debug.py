"""autotune debug: a prediction in full, and where a real run parts from it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from autotune.cli.configuration import configuration_options, question_of
from autotune.cli.options import FILE, json_option
from autotune.cli.output import note, print_json
from autotune.common.user_text import printable


@click.group()
def debug() -> None:
    """Show a prediction in full, and where a real run parts from it.

    docs/debugging.md says how to record a run, and what to send us.
    """


@debug.command()
@configuration_options
@click.option("--out", type=FILE, metavar="FILE.json", help="Where the whole prediction goes.")
@click.pass_context
def trace(context: click.Context, /, *, as_json: bool, out: Path | None, **settings: Any) -> None:
    """Predict one configuration, and write every allocation with the operation that made it.

    Example: autotune debug trace --model Qwen/Qwen2.5-0.5B --gpu rtx-4090 --out tape.json
    """
    from autotune.common.files import write_all
    from autotune.common.units import format_bytes
    from autotune.debug.tape import tape_of
    from autotune.debug.words import lines_of_tape
    from autotune.report.progress import progress_on_stderr
    from autotune.search.estimate import priced
    from autotune.search.resolve import resolve_configuration
    from autotune.space.words import describe

    asked = resolve_configuration(question_of(context, **settings), note=note)
    with progress_on_stderr(quiet=as_json) as progress:
        estimator = priced(asked, progress=progress, with_operations=True).estimator
    tape = tape_of(estimator, asked.config, model=asked.source.name, task=asked.workload.task)
    text = json.dumps(tape.to_dict(), allow_nan=False)
    if out is not None:
        write_all({out: [text, "\n"]}, what="The prediction", to=out, kind="file")
    if as_json:
        click.echo(text)
        return
    _print(lines_of_tape(tape, describe(asked.config)))
    if out is not None:
        size = format_bytes(len(text.encode()))
        click.echo(f"written  {click.format_filename(out)} ({size})")


@debug.command()
@click.argument("file", type=FILE)
@click.option(
    "--trace",
    "tape_file",
    type=FILE,
    metavar="FILE.json",
    required=True,
    help="The prediction of the same run: autotune debug trace --out.",
)
@click.option(
    "--device",
    type=click.IntRange(0),
    metavar="N",
    help="GPU of the run [default: the one with the longest history].",
)
@click.option(
    "--at-least",
    metavar="SIZE",
    default="1MiB",
    help="Tensors that are smaller are left out.",
)
@json_option
def snapshot(
    *, file: Path, tape_file: Path, device: int | None, at_least: str, as_json: bool
) -> None:
    """Compare a run's memory snapshot with its prediction, and say where they part.

    FILE is what torch.cuda.memory._dump_snapshot wrote, or the same as JSON. Nothing in it is run.
    """
    from autotune.common.units import parse_bytes
    from autotune.debug.comparison import compare
    from autotune.debug.snapshot import read_snapshot, recorded
    from autotune.debug.tape import read_tape
    from autotune.debug.words import lines_of_comparison

    least_bytes = parse_bytes(at_least)
    tape = read_tape(tape_file)
    run = recorded(read_snapshot(file), file, device)
    found = compare(tape, run, least_bytes=least_bytes)
    if as_json:
        print_json(found.to_dict())
    else:
        _print(lines_of_comparison(found))


def _print(lines: Iterable[str]) -> None:
    """Names of a file's own may hold what a terminal would obey."""
    for line in lines:
        click.echo(printable(line))
