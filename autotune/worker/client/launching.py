"""Starts a worker's process: `python -m autotune.worker`, in a process group and an environment of its own.

`forkserver` beside it has another Launch; `isolate` follows what either has started.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autotune.errors import WorkerError
from autotune.worker.client.orphans import PARENT_VARIABLE

_COMMON_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    # As an error, a warning of a library would be kept as the outcome of a probe.
    "PYTHONWARNINGS": "",
    "PYTHONUTF8": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
# A trace runs on `meta` and must not create a CUDA context, which takes memory from a real run.
# It computes nothing either: threads would only get in the way of the other child. Gemma 4 makes two tables
# in the order of a set of texts, which is another one in each process unless the seed of hashes is given.
_OF_TRACES = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
VERB_ENVIRONMENT = {
    "trace": _OF_TRACES,
    # Asked of the server that will trace, where there is one.
    "pictures": _OF_TRACES,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildJob:
    """A child's job: its verb and its three files."""

    verb: str
    request_path: Path
    result_path: Path
    printed_path: Path
    """File that gets the child's stdout and stderr."""
    folders: tuple[str, ...]
    """The private folders that it is about, which its parent removes."""


class Process(Protocol):
    """A started child, leader of a process group.

    Nothing else can take its id before `reap`.
    """

    def has_exited(self) -> bool: ...

    def signal(self, number: int) -> None:
        """Send a signal to the whole group; nothing happens when all of it is gone."""

    def reap(self) -> int:
        """Wait for the end and return the exit code, as subprocess gives it."""


Launch = Callable[[ChildJob], Process]
"""A function that starts a child. It raises WorkerError when it cannot."""


def worker_command() -> list[str]:
    """The command `python -m autotune.worker`, without the current folder on its path.

    `-P`, because a `torch.py` beside a downloaded model must not be run in place of torch.
    """
    return [sys.executable, "-P", "-m", "autotune.worker"]


def worker_environment(verb: str) -> dict[str, str]:
    """The parent's environment variables with ours on top; an uninstalled checkout stays importable."""
    environment = os.environ | _COMMON_ENVIRONMENT | VERB_ENVIRONMENT.get(verb, {})
    environment[PARENT_VARIABLE] = str(os.getpid())
    root = Path(__file__).resolve().parents[3]
    if root.name not in ("site-packages", "dist-packages"):
        paths = [environment.get("PYTHONPATH", ""), str(root)]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


class _Spawned:
    """A child of this process.

    It is not reaped before `reap`, so that its id stays its own.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def has_exited(self) -> bool:
        return self._process.returncode is not None or has_ended(self._process.pid)

    def signal(self, number: int) -> None:
        if self._process.returncode is not None:
            return
        # macOS answers EPERM for a group whose only member is a zombie.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def reap(self) -> int:
        return self._process.wait()


def has_ended(pid: int) -> bool:
    """Whether a child has ended. It is left a zombie. Raises ChildProcessError for no child."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def spawn(command: Sequence[str], job: ChildJob) -> Process:
    """Make the Launch that starts a fresh process: `command` with the job's two files."""
    arguments = [*command, str(job.request_path), str(job.result_path)]
    try:
        with job.printed_path.open("wb") as printed:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                env=worker_environment(job.verb),
                start_new_session=True,
            )
    except OSError as error:
        raise WorkerError(
            f"The {job.verb} process could not be started",
            why=f"{arguments[0]}: {error.strerror}",
        ) from error
    return _Spawned(process)
