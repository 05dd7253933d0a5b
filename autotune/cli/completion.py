"""Shell completion: click's own script, and the names that it completes.

What is completed is looked up at each press of the key, so nothing slow is imported here: a database is
read by sqlite3, read-only, and whatever stands in the way completes nothing.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import quote

import click
from click.shell_completion import CompletionItem, get_completion_class

from autotune.store import database

PROGRAM = "autotune"
SHELLS = ("bash", "zsh", "fish")
BUSY_SECONDS = 0.1
_SQLITE = "sqlite:///"

_OURS = """
    SELECT study_name FROM studies WHERE study_id IN
    (SELECT study_id FROM study_user_attributes WHERE key = 'workload') ORDER BY study_id
"""
"""Optuna 5.0's tables (storages/_rdb/models.py), and the attribute that store.open_study leaves."""


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, /, *, shell: str) -> None:
    """Print the script that completes commands, options, models, cards, spaces and studies.

    bash: eval "$(autotune completion bash)" in ~/.bashrc; zsh: the same in ~/.zshrc;
    fish: autotune completion fish > ~/.config/fish/completions/autotune.fish
    """
    shell_class = get_completion_class(shell)
    assert shell_class is not None
    program = shell_class(context.find_root().command, {}, PROGRAM, "_AUTOTUNE_COMPLETE")
    click.echo(program.source())


def models(_context: click.Context, _option: click.Parameter, typed: str) -> list[CompletionItem]:
    """Models of the catalogue, by Hub id or by the name after its slash; else folders and files."""
    from autotune.catalogue.models import known

    start = typed.casefold()
    found = [
        CompletionItem(entry.hub_id)
        for entry in known()
        if entry.hub_id.casefold().startswith(start)
    ] + [
        CompletionItem(entry.short_name)
        for entry in known()
        if typed and entry.short_name.casefold().startswith(start)
    ]
    return found or _paths(typed)


def cards(_context: click.Context, _option: click.Parameter, typed: str) -> list[CompletionItem]:
    """Cards of the catalogue."""
    from autotune.catalogue.gpus import catalogue

    return _starting((card.slug for card in catalogue()), typed)


def spaces(_context: click.Context, _option: click.Parameter, typed: str) -> list[CompletionItem]:
    """Spaces that come along; else files."""
    from autotune.space.space_file import names

    return _starting(names(), typed) or _paths(typed)


def studies(context: click.Context, _option: click.Parameter, typed: str) -> list[CompletionItem]:
    """autotune's, of the database that was named before, or else of the default one."""
    return _starting(_stored(context.params.get("storage") or database.DEFAULT_URL), typed)


def _stored(url: str) -> Iterator[str]:
    path = Path(os.path.expanduser(url.removeprefix(_SQLITE)))
    with contextlib.suppress(sqlite3.Error, OSError, ValueError):
        if url.startswith(_SQLITE) and path.is_file():
            database = f"file:{quote(str(path))}?mode=ro"
            connection = sqlite3.connect(database, uri=True, timeout=BUSY_SECONDS)
            with contextlib.closing(connection):
                names = [name for (name,) in connection.execute(_OURS)]
            yield from (name for name in names if isinstance(name, str) and name.isprintable())


def _starting(names: Iterable[str], typed: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(typed)]


def _paths(typed: str) -> list[CompletionItem]:
    """The shell completes them itself."""
    return [CompletionItem(typed, type="file")]
