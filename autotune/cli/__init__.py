"""The command line: a module per command.

Everything slow is imported inside the commands, so that `autotune --help` stays quick. Results go
to stdout, progress, warnings and errors to stderr. Exit codes: autotune.errors; 2 as well for a
wrong option, 1 for a mistake of our own, whose traceback is in the log; AUTOTUNE_DEBUG=1 shows it.
Every command adds to the log (autotune.log): what was typed, how it went, how it ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from autotune.cli import (
    cache,
    calibrate,
    completion,
    debug,
    doctor,
    estimate,
    export,
    find,
    maximum,
    nightly,
    report,
    studies,
    tables,
)
from autotune.cli.options import FILE
from autotune.cli.output import drop_output, explain, full_disk_explained, note, say, show_usage
from autotune.common import log
from autotune.common.secrets import command_line
from autotune.common.version import __version__
from autotune.errors import EXIT_INTERRUPTED, AutotuneError

_log = log.logger(__name__)

_DEBUG = "AUTOTUNE_DEBUG"
_STOPS = (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else ()))
"""Signals of a service manager, of Slurm, of `timeout`, and of a terminal that has gone."""
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit: the one place that catches everything."""
    _open_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a model's name may hold what a terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    started = time.monotonic()
    typed = tuple(sys.argv[1:] if arguments is None else arguments)
    try:
        with _stopped_as_by_ctrl_c():
            code = _run(typed)
        _log.info("exit code %d after %.2f s", code, time.monotonic() - started)
    finally:
        log.tear_down()
    sys.exit(code)


def _open_streams() -> None:
    """Let streams that were closed lead nowhere: else the next files that are opened have their numbers."""
    if None not in (sys.stdin, sys.stdout, sys.stderr):
        return
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin, sys.stdout, sys.stderr = (
        stream or open(number, mode)  # noqa: SIM115 (for as long as the process lasts)
        for number, (stream, mode) in enumerate(
            ((sys.stdin, "r"), (sys.stdout, "w"), (sys.stderr, "w"))
        )
    )


@contextlib.contextmanager
def _stopped_as_by_ctrl_c() -> Iterator[None]:
    """Let a stop end the command in good order: nothing that it has started or made for a while is left."""
    before = {number: signal.getsignal(number) for number in _STOPS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup
            signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _run(arguments: tuple[str, ...]) -> int:
    try:
        code = cli.main(arguments, prog_name="autotune", standalone_mode=False, obj=arguments)
        sys.stdout.flush()
    except click.ClickException as error:
        show_usage(error)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        say("Interrupted. What was stored is kept: the same command goes on from there.")
        return EXIT_INTERRUPTED
    except AutotuneError as error:
        explain(error)
        return error.exit_code
    except BrokenPipeError:  # whoever reads has what it wanted
        drop_output()
        return 1
    except Exception as error:
        if os.environ.get(_DEBUG):
            _log.error("internal error", exc_info=error, extra=log.SAID)
            raise
        if problem := full_disk_explained(error):
            drop_output()
            explain(problem)
            return problem.exit_code
        kept = log.file_in_use()
        say(
            f"internal error: {type(error).__name__}: {str(error)[:500]}. Please report it with the "
            f"traceback {f'in {kept}' if kept else f'that {_DEBUG}=1 shows'} and what `autotune "
            "--version --verbose` prints.",
            level=logging.ERROR,
            cause=error,
        )
        return 1
    return code if isinstance(code, int) else 0


def _print_version(context: click.Context, _option: click.Parameter, is_asked: bool) -> None:
    if not is_asked:
        return
    click.echo(f"autotune, version {__version__}")
    if context.params["verbose"]:
        from autotune.doctor import versions

        for line in versions.lines():
            click.echo(line)
    context.exit()


@click.group(context_settings=_SETTINGS)
@click.option(
    "-v",
    "--verbose",
    count=True,
    is_eager=True,  # --version looks at it
    show_default=False,
    help="Show on stderr what goes into the log; twice for more of it.",
)
@click.option(
    "--log-file",
    type=FILE,
    metavar="FILE",
    help=f"The log [default: {log.VARIABLE}, or autotune/autotune.log in XDG_STATE_HOME].",
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version; with --verbose what a bug report needs.",
)
@click.pass_context
def cli(context: click.Context, /, *, verbose: int, log_file: Path | None) -> None:
    """Find the fastest fine-tuning configuration of a model that fits a GPU.

    Example: autotune find --model Qwen/Qwen2.5-1.5B --gpu-mem 12GB

    Exit codes: 2 wrong input, 3 hardware, 4 nothing fits, 5 a worker failed, 6 database or files,
    7 and 8 what a night found (autotune nightly), 130 interrupted. AUTOTUNE_DEBUG=1 shows the traceback
    of an internal error.
    """
    log.set_up(log_file, verbosity=verbose, warn=note)
    typed = command_line(("autotune", *(context.obj or ())))
    _log.info("autotune %s, Python %s: %s", __version__, platform.python_version(), typed)


for command in (
    find.find,
    estimate.estimate,
    maximum.maximum,
    export.export,
    report.report,
    studies.studies,
    nightly.nightly,
    completion.completion,
    cache.cache,
    calibrate.calibrate,
    doctor.doctor,
    debug.debug,
    tables.gpus,
    tables.models,
    tables.spaces,
):
    cli.add_command(command)
