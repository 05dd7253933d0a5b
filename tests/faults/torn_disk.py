"""What a disk may hold after its power was cut, given what a program did to the files of a folder.

What the program did is recorded by file_operations.c. What is assumed of the disk, and of the file system:

| of                                | after the cut                                                          |
|-----------------------------------|------------------------------------------------------------------------|
| what an fsync covered             | all there: the disk does not lie                                       |
| bytes that were written since     | each sector of them (512 or 4096 bytes) as it was after any of the     |
|                                   | writes to it, whatever became of the others: any subset, in any order  |
| a sector that was being written   | may be torn: new from its beginning, or to its end                     |
| bytes beside those written        | as they were (https://www.sqlite.org/psow.html)                        |
| a size that changed since         | any that it has had since; what is new and was not written is zeros    |
|                                   | or noise                                                               |
| names made, moved, removed since  | any subset of it, or all of it up to some moment; an fsync of a file   |
| an fsync of their folder          | says nothing of its name; moving is all or nothing                     |

That is no less than what SQLite itself takes for possible (https://www.sqlite.org/atomiccommit.html, section
2; it takes a removal for all or nothing, too). Bits that rot, and a disk that acknowledges what it has not
kept, are none of it.
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).with_name("file_operations.c")
HEAD = struct.Struct("=4q")
STDOUT = 1
SECTORS_BYTES = (512, 4096)
SHARES = (0.0, 0.1, 0.5, 0.9, 1.0)
"""Of a file's sectors that hold the latest that was written to them."""
TORN_SHARE = 0.25
"""Of the others, in which a part of the next write is found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    kind: str
    """The letter in file_operations.c."""
    fd: int
    number: int
    data: bytes

    @property
    def paths(self) -> list[str]:
        return self.data.decode().split("\0")[:-1]


def build(folder: Path) -> Path:
    """The library that records, compiled. Raises OSError, CalledProcessError."""
    library = folder / "file_operations.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return library


def environment(library: Path, *, folder: Path, record: Path) -> dict[str, str]:
    """Of a process of which is recorded what it does in the folder."""
    recorded = {"LD_PRELOAD": str(library), "RECORD_OF": str(folder), "RECORD_IN": str(record)}
    return {**os.environ, **recorded}


def read(record: Path) -> list[Operation]:
    """What was recorded, in order."""
    content, place, found = record.read_bytes(), 0, []
    while place < len(content):
        letter, fd, number, length = HEAD.unpack_from(content, place)
        place += HEAD.size
        data = content[place : place + length]
        found.append(Operation(kind=chr(letter), fd=fd, number=number, data=data))
        place += length
    return found


@dataclass(slots=True)
class File:
    synced: bytes = b""
    unsynced: list[tuple[int, bytes | None]] = field(default_factory=list)
    """(offset, what was written there), or (size, None)."""

    @property
    def now(self) -> bytes:
        content = bytearray(self.synced)
        for place, data in self.unsynced:
            if data is None:
                content[place:] = bytes(max(0, place - len(content)))
            else:
                content.extend(bytes(max(0, place - len(content))))
                content[place : place + len(data)] = data
        return bytes(content)

    def sync(self) -> None:
        self.synced, self.unsynced = self.now, []

    def after_cut(self, draw: random.Random, sector_bytes: int) -> bytes:
        if not self.unsynced:
            return self.synced
        sizes, of_sector = self._sizes(), self._changes_of_sectors(sector_bytes)
        size = sizes[-1] if draw.random() < 0.5 else draw.choice(sizes)
        noise = draw.choice((bytes, draw.randbytes))
        content = bytearray(self.synced) + noise(max(0, max(sizes) - len(self.synced)))
        share = draw.choice(SHARES)
        for sector, changes in of_sector.items():
            num_kept = len(changes) if draw.random() < share else draw.randrange(len(changes))
            first, end = sector * sector_bytes, (sector + 1) * sector_bytes
            for place, data in changes[:num_kept]:
                _change(content, place, data, first, end)
            if num_kept < len(changes) and draw.random() < TORN_SHARE:
                torn = draw.randrange(first, end)
                part = draw.choice(((first, torn), (torn, end)))
                _change(content, *changes[num_kept], *part)
        return bytes(content[:size])

    def _sizes(self) -> list[int]:
        sizes = [len(self.synced)]
        for place, data in self.unsynced:
            sizes.append(place if data is None else max(sizes[-1], place + len(data)))
        return sizes

    def _changes_of_sectors(self, sector_bytes: int) -> dict[int, list[tuple[int, bytes | None]]]:
        found: dict[int, list[tuple[int, bytes | None]]] = defaultdict(list)
        for size, (place, data) in zip(self._sizes(), self.unsynced, strict=False):
            end = size if data is None else place + len(data)
            for sector in range(place // sector_bytes, -(-end // sector_bytes)):
                found[sector].append((place, data))
        return found


def _change(content: bytearray, place: int, data: bytes | None, first: int, end: int) -> None:
    """Those bytes of a change that lie in content[first:end]."""
    first, end = max(first, place), min(end, len(content))
    if data is not None:
        end = min(end, place + len(data))
    if first < end:
        content[first:end] = (
            bytes(end - first) if data is None else data[first - place : end - place]
        )


@dataclass(slots=True)
class Folder:
    synced: dict[str, File | Folder] = field(default_factory=dict)
    unsynced: list[Mapping[str, File | Folder | None]] = field(default_factory=list)
    """What changed at once: a name, two where it was moved; None where there is none any more."""

    @property
    def now(self) -> dict[str, File | Folder]:
        return self._with(self.unsynced)

    def sync(self) -> None:
        self.synced, self.unsynced = self.now, []

    def after_cut(self, draw: random.Random) -> dict[str, File | Folder]:
        if draw.random() < 0.5:
            return self._with(self.unsynced[: draw.randint(0, len(self.unsynced))])
        share = draw.choice(SHARES)
        return self._with(change for change in self.unsynced if draw.random() < share)

    def _with(
        self, changes: Iterable[Mapping[str, File | Folder | None]]
    ) -> dict[str, File | Folder]:
        entries: dict[str, File | Folder | None] = dict(self.synced)
        for change in changes:
            entries.update(change)
        return {name: entry for name, entry in entries.items() if entry is not None}


class Disk:
    """The files of a folder, as operations make them. What lies in it at first is on the disk."""

    def __init__(self, folder: Path) -> None:
        self._path = folder
        self._root = _taken_in(folder)
        self._open: dict[int, File | Folder] = {STDOUT: File()}

    @property
    def said(self) -> list[str]:
        """The whole lines on standard output."""
        output = self._open[STDOUT]
        assert isinstance(output, File)
        return b"".join(data or b"" for _, data in output.unsynced).decode().split("\n")[:-1]

    def do(self, operation: Operation) -> None:
        match operation.kind:
            case "o":
                self._open_file(operation)
            case "w":
                self._file(operation.fd).unsynced.append((operation.number, operation.data))
            case "t":
                self._file(operation.fd).unsynced.append((operation.number, None))
            case "s":
                self._open[operation.fd].sync()
            case "u":
                folder, name = self._place(operation.paths[0])
                folder.unsynced.append({name: None})
            case "m":
                folder, name = self._place(operation.paths[0])
                folder.unsynced.append({name: Folder()})
            case "r":
                (folder, name), (other, new_name) = map(self._place, operation.paths)
                assert folder is other
                folder.unsynced.append({name: None, new_name: folder.now[name]})
            case kind:
                raise AssertionError(kind)

    def now(self) -> dict[str, bytes]:
        """By path within the folder: what a program finds there."""
        return {path: file.now for path, file in _files(self._root, lambda folder: folder.now)}

    def sure(self) -> dict[str, bytes]:
        """By path within the folder: what is there after every cut, and as it is then at the least."""
        left = _files(self._root, lambda folder: folder.synced)
        return {path: file.synced for path, file in left}

    def after_cut(self, draw: random.Random) -> dict[str, bytes]:
        """By path within the folder: what is found after one of the possible cuts at this moment."""
        sector_bytes = draw.choice(SECTORS_BYTES)
        left = _files(self._root, lambda folder: folder.after_cut(draw))
        return {path: file.after_cut(draw, sector_bytes) for path, file in left}

    def _file(self, fd: int) -> File:
        file = self._open[fd]
        assert isinstance(file, File)
        return file

    def _open_file(self, operation: Operation) -> None:
        path = operation.paths[0]
        if Path(path) == self._path:
            self._open[operation.fd] = self._root
            return
        folder, name = self._place(path)
        if name not in folder.now:
            assert operation.number & os.O_CREAT
            folder.unsynced.append({name: File()})
        opened = self._open[operation.fd] = folder.now[name]
        if operation.number & os.O_TRUNC:
            assert isinstance(opened, File)
            opened.unsynced.append((0, None))

    def _place(self, path: str) -> tuple[Folder, str]:
        *parents, name = Path(path).relative_to(self._path).parts
        folder = self._root
        for parent in parents:
            entry = folder.now[parent]
            assert isinstance(entry, Folder)
            folder = entry
        return folder, name


def _taken_in(folder: Path) -> Folder:
    return Folder(
        {
            path.name: _taken_in(path) if path.is_dir() else File(path.read_bytes())
            for path in folder.iterdir()
        }
    )


def _files(
    folder: Folder, entries: Callable[[Folder], dict[str, File | Folder]]
) -> Iterator[tuple[str, File]]:
    for name, entry in entries(folder).items():
        if isinstance(entry, File):
            yield name, entry
        else:
            yield from ((f"{name}/{path}", file) for path, file in _files(entry, entries))
