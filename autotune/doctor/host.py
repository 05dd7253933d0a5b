"""Checks of the folders that autotune writes to: whether it may, and how much is free."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from autotune.common.files import existing
from autotune.common.units import GIB, format_bytes
from autotune.doctor.machine import CheckedMachine
from autotune.doctor.verdict import Diagnosis, fail, ok, warn
from autotune.errors import StorageError
from autotune.store.database import file_of, parse_url

FAIL_DISK_BYTES = GIB // 4
WARN_DISK_BYTES = 10 * GIB
"""Least free bytes without a warning: the winner's confirmation writes a checkpoint; `find` checks no disk
before. [judgement]"""


_HUBS_CACHE = "the Hub's cache"
_REMEDIES = {
    "studies": "Run autotune in a folder that can be written, or name one with --storage",
    "temporary files": "Let TMPDIR name a folder that can be written",
    _HUBS_CACHE: "Let HF_HOME name a folder that can be written; the catalogue's models work",
}


def disk(machine: CheckedMachine) -> Diagnosis:
    """Check that the folders for studies, the Hub's cache and workers' files can be written and have room.

    Whether files can be written there is asked by writing one, as a full quota says nothing before.
    """
    places = _places(machine.storage)
    refused = {name: why for name, path in places.items() if (why := _why_not_written(path))}
    unwritten = "; ".join(f"{each} in {places[each]}: {why}" for each, why in refused.items())
    if vital := [name for name in refused if name != _HUBS_CACHE]:
        return fail(f"cannot be written: {unwritten}", _REMEDIES[vital[0]])
    free = {
        f"{name} ({path})": shutil.disk_usage(existing(path)).free for name, path in places.items()
    }
    name, least_bytes = min(free.items(), key=lambda item: item[1])
    said = f"{format_bytes(least_bytes)} are free for {name}"
    if least_bytes < FAIL_DISK_BYTES:
        return fail(said, "Free some space there")
    if refused:
        return warn(f"cannot be written: {unwritten}", _REMEDIES[_HUBS_CACHE])
    if least_bytes < WARN_DISK_BYTES:
        return warn(said, "Free some space there: a checkpoint of the winner may not fit")
    return ok(said if len(set(free.values())) == 1 else f"{said}, more for the others")


def _places(storage: str) -> Mapping[str, Path]:
    from huggingface_hub import constants

    places = {
        "studies": _studies_folder(storage),
        _HUBS_CACHE: Path(constants.HF_HUB_CACHE),
        "temporary files": Path(_temporary_folder()),
    }
    return {name: path.absolute() for name, path in places.items()}


def _temporary_folder() -> str:
    """Folder that tempfile would choose; where none can be written it says so, and that is our own check."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return os.environ.get("TMPDIR", "/tmp")


def _studies_folder(storage: str) -> Path:
    """Folder of SQLite's file; `find` writes its own files into studies/ anyway."""
    try:
        file = file_of(parse_url(storage))
    except StorageError:  # which the check of the database tells
        file = None
    return Path("studies") if file is None else file.parent


def _why_not_written(path: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=existing(path)) as file:
            file.write(b"autotune")
    except OSError as error:
        return error.strerror or str(error)
    return ""
