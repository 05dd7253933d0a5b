"""autotune export: the answer of a study as files of other programs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.cli import completion
from autotune.cli.options import UserPath, storage_option
from autotune.cli.output import say
from autotune.common.files import STDOUT
from autotune.common.user_text import printable
from autotune.errors import ConfigError, nearest

if TYPE_CHECKING:
    from autotune.export.exporter import Exporter
    from autotune.store.stored_answers import StoredAnswer

EVERY = "all"


@click.command()
@click.argument("study", shell_complete=completion.studies)
@click.option(
    "--format",
    "formats",
    required=True,
    multiple=True,
    metavar="NAME",
    help="What to write; repeat for several, `all` for everything that the answer has. A wrong name "
    "lists them.",
)
@click.option(
    "--out",
    type=UserPath(path_type=Path, allow_dash=True),
    required=True,
    metavar="PATH",
    help="A file for one format, a folder for several, - for stdout. What is there stays, but with "
    "--force.",
)
@click.option(
    "--target",
    "versions",
    multiple=True,
    metavar="LIBRARY==VERSION",
    help="Field names of that version of transformers or trl instead of the installed one's; for "
    "training-args (yaml, python) and sft.",
)
@click.option("--force", is_flag=True, help="Replace files that are there and say something else.")
@storage_option()
def export(
    *,
    study: str,
    formats: tuple[str, ...],
    out: Path,
    versions: tuple[str, ...],
    force: bool,
    storage: str,
) -> None:
    """Write the answer of a study as files that other programs load.

    Example: autotune export qwen2.5-1.5b-12gb --format sft --out sft_config.yaml
    """
    from autotune.export import check_targets, targets, unsaid_lines, write_texts
    from autotune.store import stored_answers

    named = targets.read(versions)
    stored = stored_answers.load(storage, study)
    exporters = _chosen(formats, stored)
    check_targets(exporters, named)
    workload, config = stored.answer.workload, stored.answer.exported
    with targets.named(named):
        texts = {exporter: _text(exporter, stored) for exporter in exporters}
        lines = unsaid_lines(exporters, workload, config, in_full=EVERY not in formats)
    if str(out) == STDOUT:
        if len(exporters) > 1:
            raise ConfigError(
                f"{len(exporters)} formats do not go to stdout together",
                remedy="Name one --format, or a folder with --out",
            )
        sys.stdout.write(texts[exporters[0]])
    else:
        places = _places(out, exporters, is_folder=len(formats) > 1 or EVERY in formats)
        files = {places[exporter]: text for exporter, text in texts.items()}
        _refuse_to_replace(files, force=force)
        write_texts(files)
        for path in files:
            print(printable(str(path)))
    for line in (*(target.note for target in named if target.note), *lines):
        say(f"note: {line}")


def _chosen(formats: tuple[str, ...], stored: StoredAnswer) -> list[Exporter]:
    from autotune.export import ALL, why_not

    workload, config = stored.answer.workload, stored.answer.exported
    unknown = [name for name in formats if name not in (*ALL, EVERY)]
    if unknown:
        raise ConfigError(
            f"There is no format {unknown[0][:40]!r}",
            why=nearest(unknown[0][:40], (*ALL, EVERY)),
            remedy=f"All: {', '.join(ALL)}, {EVERY}",
        )
    wanted = list(ALL) if EVERY in formats else list(dict.fromkeys(formats))
    reasons = {name: why_not(ALL[name], workload, config) for name in wanted}
    for name, reason in reasons.items():
        if reason and EVERY not in formats:
            raise ConfigError(f'The answer of "{stored.study}" has no {name} file', why=reason)
    return [ALL[name] for name in wanted if not reasons[name]]


def _text(exporter: Exporter, stored: StoredAnswer) -> str:
    from autotune.export import text_of

    answer = stored.answer
    return text_of(exporter, workload=answer.workload, config=answer.exported, result=stored.result)


def _places(out: Path, exporters: list[Exporter], *, is_folder: bool) -> dict[Exporter, Path]:
    """All in one folder: what is called by its name finds each other there."""
    if is_folder or os.path.isdir(out):
        return {exporter: out / exporter.filename for exporter in exporters}
    return dict.fromkeys(exporters, out)


def _refuse_to_replace(files: dict[Path, str], *, force: bool) -> None:
    """A file may be the user's, or edited since: nothing in it says so for sure, so that all count."""
    others = [
        path for path, text in files.items() if os.path.exists(path) and not _says(path, text)
    ]
    if others and not force:
        raise ConfigError(
            f"{others[0]} is there already and says something else",
            why=f"So do {len(others) - 1} more" if len(others) > 1 else "",
            remedy="Name another place with --out, or replace it with --force",
        )
    for path in others:
        say(f"note: {path} is replaced.")


def _says(path: Path, text: str) -> bool:
    try:
        return path.read_bytes() == text.encode("utf-8")
    except OSError:
        return False
