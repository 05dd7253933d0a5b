"""Memory that the host has left, the control groups of this process, and whether this is WSL 2.

Linux; elsewhere unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
"""The folder that has proc/ and sys/."""


def left_bytes(root: Path = ROOT) -> int | None:
    """Bytes that a process may still take: the machine's, within the groups' limits; None where unknown."""
    known = (available_bytes(root), left_in_group_bytes(root))
    return min((size_bytes for size_bytes in known if size_bytes is not None), default=None)


def available_bytes(root: Path = ROOT) -> int | None:
    """Bytes that the whole machine has available, without swapping; None where unknown."""
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def left_in_group_bytes(root: Path = ROOT) -> int | None:
    """Least bytes that a control group of this process or one above it has left; None without a limit.

    Linux, Documentation/admin-guide/cgroup-v2.rst (memory.max, memory.current) and
    cgroup-v1/memory.rst. Files that were read count as used there, and are given up first.
    """
    left = []
    for folder, limit_name, used_name in _groups(root):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is None or used is None:
            continue
        left.append(max(limit - used + _inactive_file_bytes(folder), 0))
    return min(left, default=None)


def in_wsl(root: Path = ROOT) -> bool:
    """Whether this is Windows' Linux, WSL 2, where CUDA's memory has limits of its own.

    Managed memory is no larger than the card, so that paged optimizers run out (NVIDIA's CUDA on WSL User
    Guide, constraints; bitsandbytes issues 453 and 726). Expandable segments may fail at the first
    allocation (pytorch issues 112957 and 192330).
    """
    return "microsoft" in "".join(_lines(root / "proc/sys/kernel/osrelease")).lower()


def _groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Folder and names of limit and use, from the process's group upwards; both versions."""
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth]), limit, used


_UNLIMITED_BYTES = 2**60
"""Limit from which on there is none: version 1 has no word for it but a number near 2^63."""


def _number(path: Path) -> int | None:
    """Number in the file; None where there is none, as version 2 says `max`."""
    text = "".join(_lines(path)[:1]).strip()
    return int(text) if text.isdecimal() and int(text) < _UNLIMITED_BYTES else None


def _inactive_file_bytes(folder: Path) -> int:
    for line in _lines(folder / "memory.stat"):
        name, _, size = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(size)
    return 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
