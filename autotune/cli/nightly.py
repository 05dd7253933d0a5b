"""autotune nightly: a matrix of workloads, kept tuned on this machine."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.cli.options import PATH, Minutes, command_line, json_option, one_of, storage_option
from autotune.cli.output import note, print_json, say
from autotune.errors import ConfigError
from autotune.records.question import BACKENDS

if TYPE_CHECKING:
    from autotune.nightly.cell import Place
    from autotune.nightly.matrix import Matrix
    from autotune.search.fleet import Where

MATRIX = Path("studies") / "nightly.yaml"
STUDIES = Path("studies")


@click.command()
@click.argument("file", type=PATH, default=MATRIX)
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
    type=PATH,
    default=STUDIES,
    metavar="FOLDER",
    help="Where the folder of this machine is.",
)
@click.option(
    "--machine",
    metavar="NAME",
    help="Of this machine, where others with a card of that name share the database or the folder.",
)
@click.option(
    "--on",
    metavar="ADDRESS",
    help="Run it on the cards of a Ray cluster, ray://HOST:10001 or auto: each kind of card is a machine "
    "with its own history, and each card does one cell at a time.",
)
@click.option(
    "--cards",
    metavar="N|all",
    help="With --on: take so many cards, of whatever kinds [default: all there].",
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
    on: str | None,
    cards: str | None,
    storage: str,
    as_json: bool,
) -> int:
    """Tune again what is new or has changed in a matrix of workloads, and tell drift from noise.

    Example: autotune nightly --dry-run

    FILE is the matrix [default: studies/nightly.yaml, which explains itself].

    Exit codes: 0 nothing changed, 7 a regression, 8 an improvement, others as ever. What runs it every
    night, and tells others, is in examples/nightly.
    """
    from autotune.nightly import matrix
    from autotune.nightly.cell import Place
    from autotune.report.progress import on_stderr
    from autotune.search.fleet import Where
    from autotune.search.listener import SILENT

    where = Where(cards=cards, on=on)
    asked = matrix.read(file)
    budget_seconds = asked.time_budget_seconds if max_minutes is None else 60 * max_minutes
    place = Place(
        storage=storage,
        out=out,
        backend=_backend(backend, where),
        machine=machine,
        command=command_line(context),
        listener=SILENT if as_json else on_stderr(quiet=True),
    )
    runs = _here if on is None else functools.partial(_on_cluster, where=where)
    return runs(asked, place, budget_seconds, plans_only=dry_run, as_json=as_json)


def _backend(asked: str, where: Where) -> str:
    """Return the backend of the night. Raises ConfigError, HardwareError."""
    from autotune.nightly import run
    from autotune.search.fleet import backend_there

    if where.on is not None:
        return backend_there(asked)
    if where.cards is not None:
        raise ConfigError(
            "--cards of a night needs --on",
            why="On this machine a night measures on one card",
            remedy="Leave --cards out; --on auto takes the cards of this machine's Ray cluster",
        )
    return run.backend_here(asked)


def _here(
    asked: Matrix, place: Place, budget_seconds: float, *, plans_only: bool, as_json: bool
) -> int:
    from autotune.nightly import draw, run

    if plans_only:
        prepared = run.dry_run(asked, place, budget_seconds=budget_seconds)
        if as_json:
            print_json(prepared.to_dict())
        else:
            sys.stdout.write(draw.plan_text(prepared, budget_seconds, asked.num_skipped))
        return 0
    delivered = run.night(
        asked,
        place,
        budget_seconds=budget_seconds,
        on_plan=lambda prepared: None if as_json else say(draw.plan_line(prepared)),
        on_done=lambda done: None if as_json else say(draw.done_line(done)),
    )
    if as_json:
        print_json({**delivered.digest.to_dict(), "files": [str(p) for p in delivered.files]})
    else:
        sys.stdout.write(draw.digest_text(delivered.digest, delivered.files))
    for text in delivered.digest.notes:
        note(text)
    return delivered.digest.exit_code


def _on_cluster(
    asked: Matrix,
    place: Place,
    budget_seconds: float,
    *,
    where: Where,
    plans_only: bool,
    as_json: bool,
) -> int:
    from autotune.nightly import draw, on_cluster

    if plans_only:
        plans, problems = on_cluster.dry_run(asked, where, place, budget_seconds=budget_seconds)
        if as_json:
            print_json({"schema_version": 1, "machines": [plan.to_dict() for plan in plans]})
        else:
            for plan in plans:
                sys.stdout.write(draw.plan_text(plan, budget_seconds, asked.num_skipped))
        for each in problems:
            note(f"{each.of}: {each.problem}")
        return 0
    delivered = on_cluster.night(
        asked,
        where,
        place,
        budget_seconds=budget_seconds,
        on_plan=lambda prepared: None if as_json else say(draw.plan_line(prepared)),
        on_done=lambda device, done: None if as_json else say(f"{device}, {draw.done_line(done)}"),
    )
    digest = delivered.digest
    if as_json:
        print_json({**digest.to_dict(), "files": [str(path) for path in delivered.files]})
    else:
        sys.stdout.write(draw.cluster_text(digest, delivered.files))
    for text in dict.fromkeys(text for each in digest.digests for text in each.notes):
        note(text)
    return digest.exit_code
