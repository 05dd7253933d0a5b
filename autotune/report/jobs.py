"""Draws the jobs that wait for other machines, and one of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from autotune.records.answer import answer_from_dict
from autotune.report import terminal, words
from autotune.report.words import printable
from autotune.store.jobs import Job


def draw_list(jobs: Iterable[Job], file: TextIO) -> None:
    """Draw a row per job."""
    headers = ("job>", "state", "model", "card", "budget>", "asked", "by", "worker", "progress")
    terminal.draw_table(headers, map(_cells, jobs), file, is_list=True)


def _cells(job: Job) -> tuple[str, ...]:
    return (
        f"{job.number}",
        job.state,
        words.model_name(str(job.question["model"]["name"])),
        printable(job.card),
        "" if job.budget_bytes is None else words.short_size(job.budget_bytes),
        f"{job.asked_at.astimezone():%Y-%m-%d %H:%M}",
        printable(job.asked_by),
        printable(job.worker.partition(" ")[0]),
        printable(job.problem or job.progress or job.study),
    )


def draw_job(job: Job, file: TextIO, *, files: str) -> None:
    """Draw one job: first its answer, as `find` draws it, then what else is known.

    `files`: the command that writes the answer's files.
    """
    if job.result is not None:
        terminal.draw_answer(answer_from_dict(job.result), file)
        print(file=file)
    rows = [
        ("job", f"{job.number}, {job.state}"),
        ("command", printable(job.command)),
        ("asked", f"{job.asked_at.astimezone():%Y-%m-%d %H:%M} by {printable(job.asked_by)}"),
        ("card", printable(job.card)),
        ("worker", printable(job.worker)),
        ("progress", printable(job.progress)),
        ("problem", printable(job.problem)),
        ("study", printable(job.study)),
        ("files", printable(files).replace(" ", words.GLUE)),
    ]
    terminal.draw_rows([row for row in rows if row[1]], file)
