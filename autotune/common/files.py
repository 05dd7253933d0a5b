"""Files read with a limit of size, written all or none, and folders that survive a power cut.

What is written is written beside its place and moved there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from autotune.common.units import KIB, MIB
from autotune.errors import ConfigError, StorageError

STDOUT = "-"
"""Name of a file that is stdout where something is written, and stdin where it is read."""


def read_bytes(path: Path, max_bytes: int, *, usual: str = "") -> bytes:
    """Content of a user's file, of whole KiB at most. `usual` says how large one is, or can be made.

    Raises ConfigError for what cannot be read or is too large.
    """
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path} cannot be read", why=why) from error
    if len(content) > max_bytes:
        size = f"{max_bytes // KIB} KiB" if max_bytes % MIB else f"{max_bytes // MIB} MiB"
        raise ConfigError(f"{path} is larger than {size}", why=usual)
    return content


def read_text(path: Path, max_bytes: int, *, usual: str = "") -> str:
    """Text of a user's file in UTF-8, under the rules of read_bytes.

    Raises ConfigError for what is no text, too.
    """
    try:
        return read_bytes(path, max_bytes, usual=usual).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text") from error


def write_all(
    texts: Mapping[Path, Iterable[str]],
    *,
    what: str,
    to: Path,
    kind: str,
    option: str = "--out",
) -> None:
    """Write all of the files, each in pieces, or none; their folders are created.

    Moving starts when all are written: a full disk leaves the earlier files as they were. So does a file
    that cannot be moved, and an interrupt: what was moved before it is undone. A cut of the power while
    files are moved may leave some of each. Devices and pipes are written into. Raises StorageError: "`what`
    cannot be written to `to`", and the remedy to name another `kind` with the option.
    """
    places, earlier = dict[Path, Path](), dict[Path, Path]()
    try:
        streams = [path for path in texts if _is_stream(path)]
        places |= _beside([path for path in texts if path not in streams])
        earlier |= _beside(places)
        for path, place in places.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with place.open("x", encoding="utf-8", newline="\n") as file:
                file.writelines(texts[path])
                file.flush()
                os.fsync(file.fileno())
        _move(places, earlier)
        for path in streams:
            with path.open("w", encoding="utf-8", newline="\n") as file:
                file.writelines(texts[path])
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{what} cannot be written to {str(to)[:200]}",
            why=getattr(error, "strerror", None) or str(error),
            remedy=f"Free some space, check the permissions, or name another {kind} with {option}",
        ) from error
    finally:
        for place in (*places.values(), *earlier.values()):
            with contextlib.suppress(OSError, ValueError):
                place.unlink()


def _is_stream(path: Path) -> bool:
    """Whether it is a device or a pipe: root would have a file in its place, /dev/null's or /dev/stdout's."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return path.parent == Path("/dev") or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _beside(paths: Collection[Path]) -> dict[Path, Path]:
    """A new hidden name beside each of the files. Raises OSError for a folder's path."""
    if not all(path.name for path in paths):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return {path: path.with_name(f".{path.name[:40]}.{secrets.token_hex(4)}.tmp") for path in paths}


def _move(places: Mapping[Path, Path], earlier: Mapping[Path, Path]) -> None:
    """Move every file from its place to its path, or none.

    If one fails, what was at the others' paths is put back; it is kept under its name in `earlier` meanwhile.
    """
    is_new = {path: not os.path.lexists(path) for path in places}
    for path, kept in earlier.items():
        if not is_new[path]:
            _keep(path, kept)
    moved = list[Path]()
    try:
        for path, place in places.items():
            place.replace(path)
            moved.append(path)
    except BaseException:
        for path in moved:
            with contextlib.suppress(OSError):
                if is_new[path]:
                    path.unlink()
                else:
                    earlier[path].replace(path)
        raise


def _keep(path: Path, name: Path) -> None:
    """Give a file a second name, or a copy where the file system has no such thing."""
    try:
        os.link(path, name, follow_symlinks=False)
    except OSError:
        shutil.copy2(path, name, follow_symlinks=False)


def existing(path: Path) -> Path:
    """Return the path, or of the folders above it the first that is there."""
    return next(each for each in (path, *path.parents) if each.exists())


def check_folder(folder: Path, *, what: str, remedy: str) -> None:
    """Check that files can be written into the folder, which need not be there yet; nothing is made.

    Raises StorageError: "`what` cannot be written to the folder".
    """
    why = ""
    try:
        place = existing(folder)
        if not place.is_dir():
            why = f"{place} is a file"
        elif not os.access(place, os.W_OK | os.X_OK):
            why = f"There is no permission to write into {place}"
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
    if why:
        raise StorageError(
            f"{what} cannot be written to {str(folder)[:200]}", why=why, remedy=remedy
        )


def make_folder(folder: Path) -> None:
    """Make a folder, and what is missing above it; there to stay, whatever happens next. Raises OSError."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_names(path.parent)


def sync_names(folder: Path) -> None:
    """Write the names in a folder to disk: what was made, moved or removed there is kept after a power cut.

    A file's own fsync says nothing of its name (fsync(2)). A file system that refuses is not waited for:
    SQLite takes that for no error, either (os_unix.c, unixSync).
    """
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def user_folder(variable: str, usual: str) -> Path:
    """Return autotune's folder in the one that the variable names, else in that one of the user's.

    A name that is not absolute is to be ignored, says the XDG Base Directory Specification.
    """
    named = os.environ.get(variable, "")
    return Path(named if os.path.isabs(named) else os.path.expanduser(f"~/{usual}")) / "autotune"
