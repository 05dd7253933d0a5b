"""Names of studies and of their answers' folders: the defaults, and what is allowed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path

from autotune.common.units import GIB
from autotune.errors import ConfigError
from autotune.space.config import METHODS, Workload

MAX_CHARS = 200
_ROUND_UNITS = ((10**9, "gb"), (GIB, "gib"), (10**6, "mb"))


def default_study_name(workload: Workload, *, gpu: str | None = None) -> str:
    """A name such as `qwen2.5-1.5b-12gb`, with whatever differs from `find`'s defaults appended.

    `gpu` only where the user named one: two cards of one budget need two studies. Its name stands for
    a budget that is no round figure, as the memory of a whole card is.
    """
    path = Path(workload.model)
    name = path.parent.name if path.name == "config.json" else path.name
    parts = [slug(name)]
    budget_bytes = workload.memory_budget_bytes
    if gpu is None or any(budget_bytes % unit_bytes == 0 for unit_bytes, _ in _ROUND_UNITS):
        parts.append(_short_size(budget_bytes))
    for field, prefix in (("sequence_length", "seq"), ("effective_batch_size", "batch")):
        value = getattr(workload, field)
        is_length_of_pictures = field == "sequence_length" and value == 1
        if value != _default(field) and not is_length_of_pictures:
            parts.append(f"{prefix}{value}")
    if workload.num_gpus > 1:
        parts.append(f"{workload.num_gpus}gpus")
    if workload.task != _default("task"):
        parts.append(workload.task)
    if workload.pictures is not None:
        seen = workload.pictures
        parts.append(seen.size if seen.seconds else f"{seen.num_images}x{seen.size}")
    if workload.teacher is not None:
        parts.append(slug(Path(workload.teacher.name).name))
    if set(workload.methods) != set(METHODS):
        parts += [method for method in METHODS if method in workload.methods]
    if workload.lengths is not None:
        known = json.dumps(dataclasses.asdict(workload.lengths))
        parts.append(f"data{hashlib.sha256(known.encode()).hexdigest()[:6]}")
    if workload.headroom != _default("headroom"):
        spare_bytes, odds = workload.headroom.spare_bytes, workload.headroom.odds
        parts.append(
            f"odds{1000 * odds:.0f}" if spare_bytes is None else f"room{_short_size(spare_bytes)}"
        )
    if workload.host_memory_bytes is not None:
        parts.append(f"host{_short_size(workload.host_memory_bytes)}")
    if gpu is not None:
        parts.append(slug(gpu))
    return "-".join(parts)


def slug(text: str) -> str:
    """Lower-case letters, digits, dots and dashes: fit for a file's name. Never empty."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower())[:60].strip("-.") or "model"


def folder_of(study: str) -> str:
    """The name of the folder for a study that the user has named.

    Names that differ only in letters which a slug leaves out, those beyond ASCII, get different folders.
    """
    made = slug(study)
    if study.isascii() and any(map(str.isalnum, study)):
        return made
    return f"{made}-{hashlib.sha256(study.encode()).hexdigest()[:6]}"


def check_name(name: str) -> None:
    """Check the name of a study.

    Raises ConfigError for one that no study can have.
    """
    if not name.strip() or len(name) > MAX_CHARS or not name.isprintable():
        raise ConfigError(
            f"{name[:40]!r} cannot name a study",
            why=f"A name is 1 to {MAX_CHARS} printable characters",
        )


def _short_size(size_bytes: int) -> str:
    """A size such as `12gb`, `24gib` or `11500mb`: the unit in which it is a whole number, else MiB."""
    for unit_bytes, unit in _ROUND_UNITS:
        if size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{unit}"
    return f"{size_bytes / 2**20:.0f}mib"


def _default(field: str) -> object:
    return next(row.default for row in dataclasses.fields(Workload) if row.name == field)
