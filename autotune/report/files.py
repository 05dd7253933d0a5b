"""Writes a report beside its place and moves it there: a full disk leaves the earlier one as it was."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from autotune.errors import StorageError


def write(path: Path, text: str) -> None:
    """The file; its folder is created. Raises StorageError."""
    place = path.with_name(f".{path.name[:40]}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with place.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        place.replace(path)
    except (OSError, ValueError) as error:
        raise StorageError(
            f"The report cannot be written to {path}",
            why=getattr(error, "strerror", None) or str(error),
            remedy="Free some space, check the permissions, or name another file with --out",
        ) from error
    finally:
        with contextlib.suppress(OSError, ValueError):
            place.unlink()
