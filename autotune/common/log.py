"""The log: a file that every command adds to, so that what went wrong can be read afterwards.

AUTOTUNE_LOG or --log-file names the file, else it is autotune/autotune.log in XDG_STATE_HOME. It is
turned over at MAX_BYTES, and BACKUPS older ones stay. A log that cannot be written costs one warning and
nothing else. Secrets are taken out of every line (autotune.common.secrets).

A module logs to `log.logger(__name__)`. Only the command line sets a file up; in code that imports
autotune, what happens to the records is the program's own business, and by default nothing does.

Known limitation: several processes may write into one file. One that turns it over leaves the others
writing into what is then an older one, until they turn it over in turn.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from autotune.common.files import user_folder
from autotune.common.secrets import redacted
from autotune.common.user_text import printable

NAME = "autotune"
VARIABLE = "AUTOTUNE_LOG"
MAX_BYTES = 2**20
BACKUPS = 3
SAID = {"said": True}
"""Value of `extra` in a record whose text is on stderr already: -v does not say it again."""

_FORMAT = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"
_STDERR_FORMAT = "%(levelname)s %(name)s: %(message)s"

OnStage = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""

# Without it Python prints warnings on stderr where a program has set nothing up.
logging.getLogger(NAME).addHandler(logging.NullHandler())


def logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def path() -> Path:
    """Return where the log goes, unless a command names another file ."""
    given = os.environ.get(VARIABLE)
    return Path(given) if given else user_folder("XDG_STATE_HOME", ".local/state") / f"{NAME}.log"


def set_up(file: Path | None, *, verbosity: int, warn: Callable[[str], None]) -> None:
    """Log to a file, and to stderr from verbosity 1 on.

    `file` None: `path()`. `warn` is told, once, why the file cannot be written. A second call starts
    afresh.
    """
    tear_down()
    root = logging.getLogger(NAME)
    root.propagate = False
    level = logging.DEBUG if verbosity > 1 else logging.INFO
    root.setLevel(level)
    if verbosity:
        stderr = _Stderr()
        stderr.setFormatter(_Formatter(_STDERR_FORMAT))
        stderr.addFilter(lambda record: not getattr(record, "said", False))
        root.addHandler(stderr)
    target = path() if file is None else file
    handler = _file_handler(target, warn)
    if handler is not None:
        root.addHandler(handler)


def file_in_use() -> Path | None:
    """Return where records go; None where no file is set up, or it could not be written."""
    for handler in logging.getLogger(NAME).handlers:
        if isinstance(handler, logging.FileHandler):
            return Path(handler.baseFilename)
    return None


def tear_down() -> None:
    """Close what `set_up` has opened, and leave the logger as it was."""
    root = logging.getLogger(NAME)
    for handler in list(root.handlers):
        if not isinstance(handler, logging.NullHandler):
            root.removeHandler(handler)
            with contextlib.suppress(OSError):
                handler.close()
    root.propagate = True
    root.setLevel(logging.NOTSET)


def stages(to: logging.Logger, heard: OnStage) -> OnStage:
    """Return a function that passes stages on to `heard`, and logs each with the seconds since the last."""
    since = time.monotonic()

    def tell(stage: str, done: int, total: int) -> None:
        nonlocal since
        heard(stage, done, total)
        if stage != "trace" or done == total:  # which is told for each of them
            now = time.monotonic()
            to.info("stage %s: %d of %d, %.2f s", stage, done, total, now - since)
            since = now

    return tell


class _Formatter(logging.Formatter):
    """One line per message, whatever a model is called; a traceback below it; no secrets."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = printable(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


class _Stderr(logging.Handler):
    """Writes to sys.stderr as it is at the time: a progress bar replaces it, and keeps lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            print(self.format(record), file=sys.stderr)


def _file_handler(target: Path, warn: Callable[[str], None]) -> logging.Handler | None:
    """Handler that writes to the file, or None where it cannot be opened."""
    from logging.handlers import RotatingFileHandler

    class Handler(RotatingFileHandler):
        """A handler that gives up at its first failure."""

        def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802
            error = sys.exception()
            logging.getLogger(NAME).removeHandler(self)
            with contextlib.suppress(OSError):  # it tries to write the rest
                self.close()
            warn(_refusal(target, error))

    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handler = Handler(
            target,
            maxBytes=MAX_BYTES,
            backupCount=BACKUPS,
            encoding="utf-8",
            errors="backslashreplace",
        )
    except OSError as error:
        warn(_refusal(target, error))
        return None
    handler.setFormatter(_Formatter(_FORMAT))
    return handler


def _refusal(target: Path, error: BaseException | None) -> str:
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return (
        f"this command leaves no log: {target} cannot be written ({why}). {VARIABLE} names another "
        "file."
    )
