"""What commands print, and how a problem is told: results on stdout, the rest on stderr."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from typing import Any

from autotune import database
from autotune.errors import AutotuneError


def drop_output() -> None:
    """Python writes what is left when it exits, and would complain once more."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """One line on stderr, with whatever is in it made printable."""
    line = " ".join(text.split())
    with contextlib.suppress(OSError):
        print("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line), file=sys.stderr)


def note(text: str) -> None:
    say(f"note: {text}")


def explain(error: AutotuneError) -> None:
    say(f"error: {error}")


def command_on(study: str, command: str, storage: str) -> str:
    """What to type for a command on a study; an address that may hold a password is left to the user."""
    words = ["autotune", *command.split(), study]
    if storage != database.DEFAULT_URL:
        words += ["--storage", "URL" if database.has_secret(storage) else storage]
    return shlex.join(words)


def print_json(result: dict[str, Any]) -> None:
    import json

    print(json.dumps(result, indent=2, allow_nan=False))
