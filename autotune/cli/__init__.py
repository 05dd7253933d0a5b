"""The command line: a module per command.

Everything slow is imported inside the commands, so that `autotune --help` stays quick. Results go
to stdout, progress, warnings and errors to stderr. Exit codes: autotune.errors; 2 as well for a
wrong option, 1 for a mistake of our own, whose traceback AUTOTUNE_DEBUG=1 shows.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from autotune.cli import (
    completion,
    estimate,
    export,
    find,
    maximum,
    nightly,
    report,
    studies,
    tables,
)
from autotune.cli.output import drop_output, explain, say
from autotune.errors import EXIT_INTERRUPTED, AutotuneError, StorageError
from autotune.version import __version__

_DEBUG = "AUTOTUNE_DEBUG"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit: the one place that catches everything."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a model's name may hold what a terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    sys.exit(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    try:
        code = cli.main(arguments, prog_name="autotune", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        say("Interrupted. What was stored before is as it was.")
        return EXIT_INTERRUPTED
    except AutotuneError as error:
        explain(error)
        return error.exit_code
    except BrokenPipeError:  # whoever reads has what it wanted
        drop_output()
        return 1
    except Exception as error:
        if os.environ.get(_DEBUG):
            raise
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            drop_output()
            explain(
                StorageError(
                    "The output cannot be written",
                    why=error.strerror or str(error),
                    remedy="Free some space",
                )
            )
            return StorageError.exit_code
        say(
            f"internal error: {type(error).__name__}: {str(error)[:500]}. Please report it with the "
            f"traceback that {_DEBUG}=1 shows."
        )
        return 1
    return code if isinstance(code, int) else 0


@click.group(context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="autotune")
def cli() -> None:
    """Find the fastest fine-tuning configuration of a model that fits a GPU.

    Example: autotune find --model Qwen/Qwen2.5-1.5B --gpu-mem 12GB

    Exit codes: 2 wrong input, 3 hardware, 4 nothing fits, 5 a worker failed, 6 database or files,
    7 and 8 what a night found (autotune nightly), 130 interrupted. AUTOTUNE_DEBUG=1 shows the traceback
    of an internal error.
    """


for command in (
    find.find,
    estimate.estimate,
    maximum.maximum,
    export.export,
    report.report,
    studies.studies,
    nightly.nightly,
    completion.completion,
    tables.gpus,
    tables.models,
    tables.spaces,
):
    cli.add_command(command)
