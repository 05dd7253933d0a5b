"""autotune studies: what a database holds, and how a study leaves it."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from autotune.cli import completion
from autotune.cli.options import FILE_OR_DASH, stored_command
from autotune.cli.output import command_on, print_json, say
from autotune.common.files import STDOUT
from autotune.common.units import counted
from autotune.errors import ConfigError
from autotune.store import database


@click.group()
def studies() -> None:
    """List the studies of a database, show, compare, move or remove them."""


_command = functools.partial(stored_command, studies)


@_command("list")
def list_studies(*, storage: str, as_json: bool) -> None:
    """List every study: what was asked, and the speed of its answer."""
    from autotune.report.studies import draw_list
    from autotune.store import stored_answers as stored

    found = stored.listed(storage)
    if as_json:
        print_json({"studies": [study.to_dict() for study in found]})
    elif found:
        draw_list(found, sys.stdout)
    else:
        say(f"There are no studies in {database.shown_url(storage)}: `autotune find` makes one.")


@_command("show")
@click.argument("study", shell_complete=completion.studies)
def show(*, study: str, storage: str, as_json: bool) -> None:
    """Show the answer of STUDY as `find` drew it, the command that made it and its trials."""
    from autotune.report.studies import draw_stored
    from autotune.store import stored_answers as stored

    answer = stored.load(storage, study)
    counts = stored.count_trials(storage, study)
    if not as_json:
        place = f"{study} in {database.shown_url(storage)}"
        report = command_on(study, "report", storage)
        export = f"{command_on(study, 'export', storage)} --format all --out FOLDER"
        commands = {"report": report, "export": export}
        draw_stored(answer, counts, place=place, commands=commands, file=sys.stdout)
        return
    details: dict[str, Any] = {"study": study, "command": answer.command, "made_at": answer.made_at}
    print_json({**details, "versions": answer.versions, "trials": counts, "result": answer.result})


@_command("compare")
@click.argument(
    "names", nargs=-1, required=True, metavar="STUDY STUDY...", shell_complete=completion.studies
)
def compare(*, names: tuple[str, ...], storage: str, as_json: bool) -> None:
    """Set the answers of several studies side by side: what differs, asked and answered."""
    from autotune.report import comparison
    from autotune.report.studies import draw_comparison
    from autotune.store import stored_answers as stored

    if len(names) < 2:
        raise ConfigError("One study alone compares with nothing", remedy="Name two or more")
    record = comparison.compare([stored.load(storage, name) for name in names])
    if as_json:
        print_json(record.to_dict())
    else:
        draw_comparison(record, sys.stdout)


@_command("rm")
@click.argument("study", shell_complete=completion.studies)
@click.option("--yes", is_flag=True, help="Do not ask.")
def rm(*, study: str, yes: bool, storage: str, as_json: bool) -> None:
    """Remove STUDY and its trials from the database. Probes and written files stay."""
    from autotune.report.studies import trials_in_words
    from autotune.store import stored_answers as stored

    counts = stored.count_trials(storage, study)
    num_trials = sum(count for of in counts.values() for count in of.values())
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(
                f"{study!r} is removed when somebody says so",
                why="Nobody can be asked here",
                remedy="Say it with --yes",
            )
        held = ", ".join(trials_in_words(evidence, of) for evidence, of in counts.items() if of)
        say(f"{study} in {database.shown_url(storage)} holds {held or 'no trials'}.")
        if not click.confirm("Remove it?", err=True):
            say("Nothing was removed.")
            return
    stored.remove(storage, study)
    if as_json:
        print_json({"removed": study, "num_trials": num_trials})
        return
    say(
        f"Removed {shlex.quote(study)} and its {counted(num_trials, 'trial')}. What its probes measured "
        "stays in the table of probes, for whatever asks for the same again; its files stay as well."
    )


@_command("export")
@click.argument("names", nargs=-1, metavar="[STUDY]...", shell_complete=completion.studies)
@click.option(
    "--out",
    type=FILE_OR_DASH,
    metavar="FILE.jsonl",
    required=True,
    help="Where the lines go; - for stdout.",
)
def export_studies(*, names: tuple[str, ...], out: Path, storage: str, as_json: bool) -> None:
    """Write studies, what was probed for them and what was recommended as JSON lines.

    Without a STUDY, all that the database holds.
    """
    from autotune.store.transfer.exporting import export

    is_stdout = str(out) == STDOUT
    if is_stdout and as_json:
        raise ConfigError(
            "--json does not go with --out -",
            why="Both go to stdout",
            remedy="Leave out one of them",
        )
    counts = export(storage, names, out)
    if as_json:
        print_json({"file": str(out), "exported": counts})
    else:
        say(f"Wrote {_counts_in_words(counts)} to {'stdout' if is_stdout else out}.")


@_command("import")
@click.argument("file", type=FILE_OR_DASH, metavar="FILE.jsonl")
def import_studies(*, file: Path, storage: str, as_json: bool) -> None:
    """Add what `studies export` wrote to a database. What is there already is not added again.

    - is stdin.
    """
    from autotune.store.transfer.importing import import_file

    counts = import_file(storage, file)
    if as_json:
        print_json({"file": str(file), "added": counts})
    else:
        place = database.shown_url(storage)
        say(
            f"Added {_counts_in_words(counts)} to {place}; what was there already was left as it is."
        )


def _counts_in_words(counts: Mapping[str, int]) -> str:
    plurals = (
        ("study", "studies"),
        ("trial", "trials"),
        ("probe", "probes"),
        ("recommendation", "recommendations"),
    )
    words = [
        f"{counts.get(one, 0):,} {one if counts.get(one) == 1 else many}" for one, many in plurals
    ]
    left_out = counts.get("left out", 0)
    also = (
        f" (left out: {counted(left_out, 'probe')} that another version wrote)" if left_out else ""
    )
    return f"{', '.join(words[:-1])} and {words[-1]}{also}"
