"""autotune jobs: what waits for other machines, and what has become of it. And `find --enqueue`."""

from __future__ import annotations

import functools
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.cli.options import stored_command
from autotune.cli.output import command_on, note, print_json, say, storage_words
from autotune.store import database

if TYPE_CHECKING:
    from autotune.records.question import Question
    from autotune.store.jobs import Job, JobTable

STUDIES = Path("studies")
POLL_SECONDS = 1.0
"""Between two looks at a job that is waited for."""

# What is larger fits into no database's column.
_number = click.argument("number", type=click.IntRange(1, 2**31 - 1), metavar="NUMBER")


@click.group()
def jobs() -> None:
    """List the jobs of `find --enqueue`, show or cancel them."""


_command = functools.partial(stored_command, jobs, of="jobs")


@_command("list")
def list_jobs(*, storage: str, as_json: bool) -> None:
    """List every job: what was asked, where it is, how far."""
    from autotune.report.jobs import draw_list
    from autotune.store.jobs import open_jobs

    found = []
    if _is_there(storage):
        with open_jobs(storage) as table:
            found = table.listed()
    if as_json:
        print_json({"jobs": [job.to_dict() for job in found]})
    elif found:
        draw_list(found, sys.stdout)
    else:
        say(
            f"There are no jobs in {database.shown_url(storage)}: `autotune find --enqueue` makes one."
        )


@_command("show")
@_number
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Write the files of its answer there, and print what `find` would have printed.",
)
def show(*, number: int, storage: str, out: Path | None, as_json: bool) -> None:
    """Show a job, and its answer once it has one."""
    from autotune.records.answer import answer_from_dict
    from autotune.report.jobs import draw_job
    from autotune.store.jobs import open_jobs

    _refuse_missing(storage, number)
    with open_jobs(storage) as table:
        job = table.get(number)
    if out is not None:
        _deliver(job, folder=out, storage=storage, as_json=as_json)
    elif as_json:
        result = None if job.result is None else answer_from_dict(job.result).to_dict()
        print_json({**job.to_dict(), "result": result})
    else:
        files = f"{command_on(str(number), 'jobs show', storage)} --out FOLDER"
        draw_job(job, sys.stdout, files=files if job.study else "")


@_command("cancel")
@_number
def cancel(*, number: int, storage: str, as_json: bool) -> None:
    """Cancel a job: a worker that runs it stops within seconds. What was measured is kept."""
    from autotune.store.jobs import open_jobs

    _refuse_missing(storage, number)
    with open_jobs(storage) as table:
        table.cancel(number)
    if as_json:
        print_json({"job": number, "state": "cancelled"})
    else:
        say(f"Job {number} is cancelled.")


def _is_there(storage: str) -> bool:
    """Whether there is a database: who only looks for a job, in the wrong folder maybe, makes none."""
    file = database.file_of(database.parse_url(storage))
    return file is None or file.exists()


def _refuse_missing(storage: str, number: int) -> None:
    from autotune.errors import ConfigError

    if not _is_there(storage):
        raise ConfigError(
            f"There is no job {number}", why=f"There is no database {database.shown_url(storage)}"
        )


def enqueue(
    options: Question,
    *,
    storage: str,
    command: str,
    waits: bool,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Put the question into the queue; `waits`: until it is answered, and write its files then."""
    from autotune.jobs import asking
    from autotune.store.jobs import open_jobs

    question, wanted = asking.prepare(options, note=note)
    with open_jobs(storage) as table:
        number = table.add(question, wanted, command=command, asked_by=asking.who())
        follow = command_on(str(number), "jobs show", storage)
        if not waits:
            if as_json:
                print_json({"job": number, "state": "queued"})
            else:
                print(f"Job {number} waits for a worker with {wanted.card}.")
                answered = shlex.join(["autotune", "worker", *storage_words(storage)])
                print(f"  follow it    {follow}")
                print(f"  answered by  {answered}    on such a machine")
            return
        say(f"Job {number} waits for a worker with {wanted.card}; Ctrl-C leaves it waiting.")
        try:
            job = _ended(table, number)
        except KeyboardInterrupt:
            say(f"Job {number} stays where it is: {follow}")
            raise
    _deliver(job, folder=folder, storage=storage, as_json=as_json)


def _ended(table: JobTable, number: int) -> Job:
    """The job, once it has; what changes until then goes to stderr."""
    from autotune.store.jobs import patiently

    said = ""
    while not (job := patiently(lambda: table.get(number), say)).has_ended:
        at = f" on {job.worker.split()[0]}" if job.worker else ""
        now = f"Job {number} is {job.state}{at}" + (f": {job.progress}" if job.progress else "")
        if now != said:
            say(now)
        said = now
        time.sleep(POLL_SECONDS)
    return job


def _deliver(job: Job, *, folder: Path | None, storage: str, as_json: bool) -> None:
    """Print and write an answer as `find` does its own, without the report."""
    from autotune.errors import ConfigError, StorageError
    from autotune.jobs import asking
    from autotune.report import terminal
    from autotune.store import study_names

    if job.result is None:
        if job.state == "cancelled":
            raise ConfigError(f"Job {job.number} was cancelled")
        if not job.has_ended:
            raise ConfigError(f"Job {job.number} has no answer yet", why=f"It is {job.state}")
        raise asking.error_of(job.problem, job.exit_code)
    # As `find` calls it: a name of the user's own need not be fit for a folder.
    is_named = job.question["options"].get("study") is not None
    folder = folder or STUDIES / (study_names.folder_of(job.study) if is_named else job.study)
    answered, notes = asking.answered(job, folder)
    if not as_json:
        # Before anything is written: what cannot be written does not cost the answer.
        terminal.draw_answer(answered.answer, sys.stdout)
        sys.stdout.flush()
    files: list[Path] = []
    problem = None
    try:
        files = answered.write()
    except StorageError as error:
        problem = error
    if as_json:
        print_json({**answered.result, "files": [str(path) for path in files]})
    else:
        place = f"{job.study} in {database.shown_url(storage)}"
        report = command_on(job.study, "report", storage)
        terminal.draw_outcome(
            files,
            place,
            sys.stdout,
            answer=answered.answer,
            report=report,
            command=answered.command if files else "",
            unsaid=answered.unsaid,
        )
    for words in (*notes, *answered.notes):
        note(words)
    if problem is not None:
        raise problem
