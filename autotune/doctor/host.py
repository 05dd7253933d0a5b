"""Checks of the machine around the card: memory, disks, folders. Linux; elsewhere less is known."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from autotune.catalogue import host_memory
from autotune.common import log
from autotune.common.units import GIB, MIB, format_bytes
from autotune.doctor.machine import Machine
from autotune.doctor.verdict import Verdict, fail, ok, warn
from autotune.errors import StorageError
from autotune.store.database import file_of, parse_url

FAIL_MEMORY_BYTES = 1536 * MIB
"""A worker that imported torch, transformers and PEFT holds 0.46 GiB (measured with torch 2.13's CPU
build); the fork server, a probe and this process work at once."""
WARN_MEMORY_BYTES = 4 * GIB
"""[judgement] with CUDA's libraries a process takes some GiB, and checkpoints pass through memory."""

FAIL_DISK_BYTES = GIB // 4
WARN_DISK_BYTES = 10 * GIB
"""[judgement] the winner's confirmation writes a checkpoint; `find` checks no disk before."""


def memory(machine: Machine) -> Verdict:
    """Of the host, within the limit of this process's control group."""
    known = {
        name: size_bytes
        for name, size_bytes in (
            ("on this machine", host_memory.available_bytes(machine.root)),
            ("within the control group's limit", host_memory.left_in_group_bytes(machine.root)),
        )
        if size_bytes is not None
    }
    if not known:
        return ok("this system does not say how much memory is free")
    name, size_bytes = min(known.items(), key=lambda item: item[1])
    said = f"{format_bytes(size_bytes)} are left {name}"
    if size_bytes < FAIL_MEMORY_BYTES:
        remedy = f"Free some, or raise the limit: workers need {format_bytes(FAIL_MEMORY_BYTES)}"
        return fail(said, remedy)
    if size_bytes < WARN_MEMORY_BYTES:
        return warn(said, "Close other programs, or raise the limit, before you measure")
    return ok(said)


def disk(machine: Machine) -> Verdict:
    """Where studies, the Hub's cache and workers' files (a confirmation's checkpoint) go."""
    free = {
        f"{name} ({path})": shutil.disk_usage(_existing(path)).free
        for name, path in _places(machine.storage).items()
    }
    name, least_bytes = min(free.items(), key=lambda item: item[1])
    said = f"{format_bytes(least_bytes)} are free for {name}"
    if least_bytes < FAIL_DISK_BYTES:
        return fail(said, "Free some space there")
    if least_bytes < WARN_DISK_BYTES:
        return warn(said, "Free some space there: a checkpoint of the winner may not fit")
    return ok(said if len(set(free.values())) == 1 else f"{said}, more for the others")


_REMEDIES = {
    "studies": "Run autotune in a folder that can be written, or name one with --storage",
    "temporary files": "Let TMPDIR name a folder that can be written",
    "the Hub's cache": "Let HF_HOME name a folder that can be written; the catalogue's models work",
    "the log": f"Let {log.VARIABLE} name a file that can be written",
}
_CAN_DO_WITHOUT = ("the Hub's cache", "the log")


def folders(machine: Machine) -> Verdict:
    """Whether files can be written there: asked by writing one, as a full quota says nothing before."""
    places = {**_places(machine.storage), "the log": log.path().parent.absolute()}
    refused = {name: why for name, path in places.items() if (why := _why_not_written(path))}
    if not refused:
        return ok(f"{', '.join(places)} can be written")
    # What nothing works without comes first.
    name = min(refused, key=_CAN_DO_WITHOUT.__contains__)
    said = "; ".join(f"{each} in {places[each]}: {why}" for each, why in refused.items())
    judge = warn if name in _CAN_DO_WITHOUT else fail
    return judge(f"cannot be written: {said}", _REMEDIES[name])


def _places(storage: str) -> Mapping[str, Path]:
    from huggingface_hub import constants

    places = {
        "studies": _studies_folder(storage),
        "the Hub's cache": Path(constants.HF_HUB_CACHE),
        "temporary files": Path(_temporary_folder()),
    }
    return {name: path.absolute() for name, path in places.items()}


def _temporary_folder() -> str:
    """As tempfile would choose it; where none can be written it says so, and that is our own check."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return os.environ.get("TMPDIR", "/tmp")


def _studies_folder(storage: str) -> Path:
    """Of SQLite's file; `find` writes its own files into studies/ anyway."""
    try:
        file = file_of(parse_url(storage))
    except StorageError:  # which the check of the database tells
        file = None
    return Path("studies") if file is None else file.parent


def _existing(path: Path) -> Path:
    """The folder, or the one that it would be made in."""
    for each in (path, *path.parents):
        if each.exists():
            return each
    return Path("/")


def _why_not_written(path: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=_existing(path)) as file:
            file.write(b"autotune")
    except OSError as error:
        return error.strerror or str(error)
    return ""
