"""autotune find: the fastest configuration that fits, its files and its record in the database."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import click

from autotune.cli import completion
from autotune.cli.options import (
    COUNT,
    PATH,
    KnobType,
    base_option,
    command_line,
    is_given,
    methods_option,
    one_of,
    storage_option,
    workload_options,
)
from autotune.cli.output import as_far_as_possible, command_on, explain, print_json, say
from autotune.errors import AutotuneError
from autotune.records.question import CHOICES, EFFECTIVE_BATCH_SIZE, EFFORTS, Question
from autotune.space.knobs import KNOBS
from autotune.store import database

STUDIES = Path("studies")
"""Folder of the answers' files."""
_OF_A_BASE = ("num_gpus", "seq_len", "effective_batch")
"""Their defaults are shown, and give way to what the base has."""


@click.command()
@workload_options
@click.option(
    "--backend",
    type=one_of(CHOICES["backend"]),
    default="auto",
    help="Predict, or measure with real steps on this machine's CUDA card or CPU; auto measures where "
    "the card that is planned for is here.",
)
@click.option(
    "--effective-batch",
    type=COUNT,
    default=EFFECTIVE_BATCH_SIZE,
    help="Samples per optimizer step.",
)
@methods_option
@click.option(
    KNOBS["peft"].flag,
    type=KnobType(KNOBS["peft"]),
    metavar="FILE",
    help="A PeftConfig's fields as YAML or JSON: the adapter of method peft, which is then allowed.",
)
@click.option(
    "--space",
    default="default",
    metavar="NAME|FILE",
    shell_complete=completion.spaces,
    help="Search space: see `autotune spaces`.",
)
@click.option(
    "--allow",
    type=one_of(CHOICES["allow"]),
    help="Highest trade-off class of the answer [default: numerics, or recipe if nothing else fits, or only "
    "from host memory].",
)
@base_option("What to improve on")
@click.option(
    "--effort",
    type=one_of(EFFORTS),
    default="normal",
    help="How many configurations the study keeps.",
)
@click.option(
    "--confirm-steps",
    type=click.IntRange(0, 1_000_000),
    help="Optimizer steps of the measured winner's confirmation, those with varied lengths not counted; "
    "0 for none [default: 50 on cuda, 10 on cpu].",
)
@click.option(
    KNOBS["torch_compile"].flag,
    "compile_mode",
    type=one_of(CHOICES["compile_mode"]),
    help="Compile the best few with torch.compile in this mode, too. Mode default is predicted; what others "
    "are worth, only a measurement tells [default: as the space says].",
)
@click.option(
    "--train-steps",
    type=COUNT,
    metavar="N",
    help="Optimizer steps of the run, which a cold start has to pay for itself in [default: an epoch of "
    "the --dataset; without one, steady speed decides].",
)
@click.option(
    "--study",
    metavar="NAME",
    shell_complete=completion.studies,
    help="Name in the database [default: by the workload].",
)
@storage_option()
@click.option(
    "--out",
    type=PATH,
    metavar="FOLDER",
    help="Where the files go [default: studies/ and the study's name].",
)
@click.option(
    "--wait",
    is_flag=True,
    help="Where another search works in the same study, wait until it is done.",
)
@click.option(
    "--cards",
    metavar="N|all",
    help="Probe on so many cards at once: of this machine, or of the cluster [default: 1 here, all there].",
)
@click.option(
    "--on",
    metavar="ADDRESS",
    help="Measure on the cards of a Ray cluster: ray://HOST:10001, or auto on one of its machines.",
)
@click.pass_context
def find(
    context: click.Context,
    /,
    *,
    storage: str,
    out: Path | None,
    wait: bool,
    cards: str | None,
    on: str | None,
    as_json: bool,
    **typed: Any,
) -> None:
    """Find the fastest configuration that fits, and write it as files that a trainer loads.

    Example: autotune find --model Qwen/Qwen2.5-1.5B --gpu-mem 12GB --dataset data.jsonl
    """
    from autotune.search import ahead

    for name in _OF_A_BASE:
        if not is_given(context, name):
            typed[name] = None
    question = Question(**typed)
    with ahead.what_traces(question):
        _find(
            question,
            storage=storage,
            out=out,
            command=command_line(context),
            as_json=as_json,
            waits=wait,
            where={"cards": cards, "on": on},
        )


def _find(
    question: Question,
    *,
    storage: str,
    out: Path | None,
    command: str,
    as_json: bool,
    waits: bool,
    where: dict[str, str | None],
) -> None:
    """Find what was asked for, show it and write it."""
    from autotune.common.files import check_folder
    from autotune.report import terminal
    from autotune.report.deliver import deliver
    from autotune.report.progress import on_stderr
    from autotune.search import find as finding
    from autotune.search.fleet import Where

    check_folder(
        out or STUDIES,
        what="The files",
        remedy="Check its permissions, or name another folder with --out",
    )
    try:
        found = finding.find(
            question,
            storage=storage,
            command=command,
            listener=on_stderr(quiet=as_json),
            waits=waits,
            where=Where(**where),
        )
    except finding.NotMeasuredError as error:
        # Files are left alone: those in the folder may be of an answer that was measured.
        if as_json:
            print_json(deliver(error.predicted, folder=None, storage=None).result)
        else:
            terminal.draw_answer(error.predicted.answer, sys.stdout)
        sys.stdout.flush()
        raise
    folder = out or STUDIES / found.folder_name
    problems: list[AutotuneError] = []
    printing = functools.partial(
        as_far_as_possible, problems, remedy=f"Free some space, or read {folder / 'result.json'}"
    )
    if not as_json:
        # Before anything is written: what cannot be written does not cost the answer.
        with printing():
            terminal.draw_answer(found.answer, sys.stdout)
    delivered = deliver(found, folder=folder, storage=storage, command=command)
    if as_json:
        with printing():
            print_json({**delivered.result, "files": [str(path) for path in delivered.files]})
    else:
        study = delivered.study
        place = f"{study} in {database.shown_url(storage)}" if study else ""
        written, report = delivered.files, ""
        if delivered.report is not None:
            written = [*written, delivered.report]
        elif study:
            report = command_on(study, "report", storage)
        with printing():
            terminal.draw_outcome(
                written,
                place,
                sys.stdout,
                answer=found.answer,
                dataset=str(question.dataset or ""),
                tokenizer=str(question.tokenizer or ""),
                report=report,
                command=delivered.command,
                unsaid=delivered.unsaid,
            )
    for note in delivered.notes:
        say(f"note: {note}")
    problems += delivered.problems
    for problem in problems[:-1]:
        explain(problem)
    if problems:
        raise problems[-1]
