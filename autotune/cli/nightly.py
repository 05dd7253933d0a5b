"""autotune nightly: a matrix of workloads, kept tuned on this machine."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import click

from autotune.cli.options import Minutes, command_line, json_option, one_of, storage_option
from autotune.cli.output import note, print_json, say
from autotune.records.question import BACKENDS

MATRIX = Path("studies") / "nightly.yaml"
STUDIES = Path("studies")


@click.command()
@click.argument("file", type=click.Path(path_type=Path), default=MATRIX)
@click.option(
    "--backend",
    type=one_of(("auto", *BACKENDS)),
    default="auto",
    help="Where to measure; auto is this machine's CUDA card.",
)
@click.option(
    "--max-minutes",
    type=Minutes(0.1, 10_000),
    metavar="N",
    help="Time of this night [default: the matrix's time_budget].",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Say what would be done, why and for how long. Measures and writes nothing.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=STUDIES,
    metavar="FOLDER",
    help="Where the folder of this machine is.",
)
@click.option(
    "--machine",
    metavar="NAME",
    help="Of this machine, where others with a card of that name share the database or the folder.",
)
@storage_option()
@json_option
@click.pass_context
def nightly(
    context: click.Context,
    /,
    *,
    file: Path,
    backend: str,
    max_minutes: float | None,
    dry_run: bool,
    out: Path,
    machine: str | None,
    storage: str,
    as_json: bool,
) -> int:
    """Tune again what is new or has changed in a matrix of workloads, and tell drift from noise.

    Example: autotune nightly --dry-run

    FILE is the matrix [default: studies/nightly.yaml, which explains itself].

    Exit codes: 0 nothing changed, 7 a regression, 8 an improvement, others as ever. What runs it every
    night, and tells others, is in examples/nightly.
    """
    from autotune.nightly import draw, matrix, run
    from autotune.nightly.cell import Place
    from autotune.report.progress import on_stderr
    from autotune.search.listener import SILENT

    asked = matrix.read(file)
    budget_seconds = asked.time_budget_seconds if max_minutes is None else 60 * max_minutes
    place = Place(
        storage=storage,
        out=out,
        backend=run.backend_here(backend),
        machine=machine,
        command=command_line(context),
        listener=SILENT if as_json else on_stderr(quiet=True),
    )
    if dry_run:
        prepared = run.dry_run(asked, place, budget_seconds=budget_seconds)
        if as_json:
            print_json(prepared.to_dict())
        else:
            sys.stdout.write(draw.plan_text(prepared, budget_seconds, asked.num_skipped))
        return 0
    # A service manager's stop is a Ctrl-C: what was done is kept, and the digest says so.
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        delivered = run.night(
            asked,
            place,
            budget_seconds=budget_seconds,
            on_plan=lambda prepared: None if as_json else say(draw.plan_line(prepared)),
            on_done=lambda done: None if as_json else say(draw.done_line(done)),
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    if as_json:
        print_json({**delivered.digest.to_dict(), "files": [str(p) for p in delivered.files]})
    else:
        sys.stdout.write(draw.digest_text(delivered.digest, delivered.files))
    for text in delivered.digest.notes:
        note(text)
    return delivered.digest.exit_code


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
