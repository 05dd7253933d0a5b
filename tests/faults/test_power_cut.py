"""A power cut: what disks may be left with, and what the store makes of it (power_cut.py)."""

from __future__ import annotations

import copy
import dataclasses
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults import kill_store, power_cut, torn_disk
from tests.support.next_revision import NEXT

pytestmark = pytest.mark.worker

OLD, NEW = b"o" * 10_000, b"n" * 10_000


@pytest.fixture
def do(tmp_path: Path) -> Any:
    """Operations, one by one, on a disk where a file `a` holds OLD."""
    (tmp_path / "a").write_bytes(OLD)
    disk = torn_disk.Disk(tmp_path)

    def one(kind: str, *names: str, fd: int = 3, number: int = 0, data: bytes = b"") -> Any:
        paths = "".join(f"{tmp_path / name}\0" for name in names).encode()
        disk.do(torn_disk.Operation(kind=kind, fd=fd, number=number, data=data or paths))
        return disk

    one("o", "a")
    return one


def left(disk: Any) -> list[dict[str, bytes]]:
    return [disk.after_cut(random.Random(seed)) for seed in range(200)]


def test_what_was_synced_is_there_after_every_cut(do: Any) -> None:
    do("w", data=NEW)
    do("t", number=9000)
    disk = do("s")
    assert {found["a"] for found in left(disk)} == {NEW[:9000]} == {disk.sure()["a"]}


def test_of_what_was_not_any_part_may_be_missing(do: Any) -> None:
    disk = do("w", number=100, data=NEW)
    contents = {found["a"] for found in left(disk)}
    assert {OLD, OLD[:100] + NEW} <= contents
    assert disk.sure()["a"] == OLD
    # A later sector without an earlier one, and a sector that is half of each.
    assert any(content[:512] == OLD[:512] and NEW[:512] in content for content in contents)
    assert any(b"on" in content[512:4096] for content in contents)
    # What no write has touched is never changed.
    assert {content[:100] for content in contents} == {OLD[:100]}
    assert {len(content) for content in contents} == {10_000, 10_100}
    # Its new end may be there before what was written to it.
    assert any(content[10_000:] == bytes(100) for content in contents)


def test_what_was_cut_off_may_be_there_still(do: Any) -> None:
    contents = {found["a"] for found in left(do("t", number=1000))}
    assert {OLD, OLD[:1000]} <= contents


def test_a_name_is_its_folders(do: Any) -> None:
    do("m", "folder")
    do("o", "folder/b", fd=4, number=os.O_CREAT)
    do("w", fd=4, data=NEW)
    disk = do("s", fd=4)
    assert {frozenset(found) for found in left(disk)} == {
        frozenset("a"),
        frozenset(["a", "folder/b"]),
    }
    do("o", "folder", fd=5)
    disk = do("s", fd=5)
    assert "folder/b" not in disk.sure()
    do("o", "", fd=6)
    disk = do("s", fd=6)
    assert disk.sure() == {"a": OLD, "folder/b": NEW}
    disk = do("r", "folder/b", "folder/c")
    assert {frozenset(found) for found in left(disk)} == {
        frozenset(["a", "folder/b"]),
        frozenset(["a", "folder/c"]),
    }
    disk = do("u", "a")
    assert any("a" in found for found in left(disk))
    assert any("a" not in found for found in left(disk))
    assert "a" not in disk.now()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (sys.platform == "linux" and shutil.which("cc")):
        pytest.skip("what a process does to its files is recorded by a library: needs cc")
    return torn_disk.build(tmp_path_factory.mktemp("library"))


@pytest.mark.slow
def test_no_probe_is_lost_where_the_power_is_cut(tmp_path: Path, library: Path) -> None:
    recording = power_cut.record("search", tmp_path, library, num_models=1)
    found = power_cut.cut(recording, 8, 1, tmp_path)
    assert found.problems == []
    assert found.counts["probes said to be kept"] > 8
    # Its folder's name is sure, too, which no cut has to show.
    disk = copy.deepcopy(recording.disk)
    for operation in recording.operations:
        disk.do(operation)
    assert power_cut.NAME in disk.sure()
    # On a disk that keeps nothing for sure, some are.
    hasty = [operation for operation in recording.operations if operation.kind != "s"]
    recording = dataclasses.replace(recording, operations=hasty)
    assert power_cut.cut(recording, 8, 1, tmp_path).problems


@pytest.mark.slow
def test_an_upgrade_begins_when_the_copy_is_sure(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kill_store, "NUM_OLD_RECORDS", 20)
    recording = power_cut.record("upgrade", tmp_path, library)
    disk, log = recording.disk, set()
    (moved,) = [n for n, one in enumerate(recording.operations) if one.kind == "r"]
    for number, operation in enumerate(recording.operations):
        if operation.kind == "o" and operation.paths[0].endswith("-wal"):
            log.add(operation.fd)
        elif operation.kind == "o":
            log.discard(operation.fd)
        if number > moved and operation.kind == "w" and operation.fd in log:
            break
        disk.do(operation)
    copies = {path: content for path, content in disk.sure().items() if ".before-" in path}
    assert list(copies) == [f"{power_cut.NAME}.before-{NEXT}"]
    (tmp_path / "copy.db").write_bytes(*copies.values())
    monkeypatch.setattr(power_cut, "NUM_OLD_RECORDS", 20)
    assert power_cut.is_whole(tmp_path / "copy.db") == ""
    assert power_cut.old_records_in(tmp_path / "copy.db") == ""
