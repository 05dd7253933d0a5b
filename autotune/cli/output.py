"""Output of commands: results go to stdout, problems and notes to stderr."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import click

from autotune.common import log
from autotune.common.secrets import redacted
from autotune.common.user_text import printable
from autotune.errors import AutotuneError, ConfigError, StorageError
from autotune.report.stderr import tell
from autotune.store import database

_log = log.logger(__name__)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def drop_output() -> None:
    """Python writes what is left when it exits, and would complain once more."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def full_disk_explained(error: Exception, remedy: str = "Free some space") -> StorageError | None:
    """Return what to say where stdout has no room for more; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
        return None
    return StorageError(
        "The output cannot be written",
        why=error.strerror or str(error),
        remedy=remedy,
    )


@contextlib.contextmanager
def as_far_as_possible(problems: list[AutotuneError], remedy: str) -> Iterator[None]:
    """Go on where a reader of stdout leaves, such as head: it has what it wanted.

    Where stdout is a file on a full disk, that and the remedy are added to `problems`.
    """
    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # The second is what rich makes of the first.
        drop_output()
    except OSError as error:
        problem = full_disk_explained(error, remedy)
        if problem is None:
            raise
        drop_output()
        problems.append(problem)


def say(text: str, *, level: int = logging.INFO, cause: BaseException | None = None) -> None:
    """One line on stderr, with whatever is in it made printable; in the log with its cause."""
    line = redacted(" ".join(text.split()))
    _log.log(level, "%s", line, exc_info=cause, extra=log.SAID)
    tell(printable(line))


def note(text: str) -> None:
    say(f"note: {text}", level=logging.WARNING)


def explain(error: AutotuneError) -> None:
    # What the user typed needs no traceback.
    cause = None if isinstance(error, ConfigError) else error
    say(f"error: {error}", level=logging.ERROR, cause=cause)


def show_usage(error: click.ClickException) -> None:
    """Say what is wrong with what was typed, below the command's line of usage."""
    if isinstance(
        error, click.exceptions.NoArgsIsHelpError
    ):  # a group of commands by its name alone
        click.echo(error.format_message(), err=True)
        return
    context = getattr(error, "ctx", None)
    if context is not None:
        hint = f"Try '{context.command_path} {context.help_option_names[0]}' for help."
        click.echo(f"{context.get_usage()}\n{hint}\n", err=True)
    said = error.format_message()
    if isinstance(error, click.NoSuchOption) and context is not None:
        of_all = {name for each in context.find_root().command.params for name in each.opts}
        if error.option_name in of_all:
            command = context.command_path.partition(" ")[2]
            said = f"{error.option_name} stands before the command: autotune {error.option_name} {command}"
    say(f"error: {said}", level=logging.ERROR)


def command_on(study: str, command: str, storage: str) -> str:
    """Return what to type for a command on a study; an address with a password is left to the user."""
    return shlex.join(["autotune", *command.split(), study, *storage_words(storage)])


def storage_words(storage: str) -> list[str]:
    """The option that names the database, where it is not the usual one."""
    if storage == database.DEFAULT_URL:
        return []
    has_password = database.holds_password(database.parse_url(storage))
    return ["--storage", "URL" if has_password else storage]


def print_json(result: dict[str, Any]) -> None:
    import json

    print(json.dumps(result, indent=2, allow_nan=False))
