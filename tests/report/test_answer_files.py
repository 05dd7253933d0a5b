"""An answer's files in a folder where an earlier answer's are."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import answers
import pytest

from autotune.common.files import write_all
from autotune.errors import StorageError
from autotune.export.base import own_run
from autotune.report.answer_files import AnswerFiles
from autotune.space.config import TrainConfig


def write(config: TrainConfig, folder: Path, base: Path | None = None) -> list[Path]:
    answer = answers.answer(best=answers.estimate(config))
    run = None
    if base is not None:
        run = own_run.read_run(
            base,
            seq_len=None,
            methods=(),
            num_gpus=1,
            effective_batch=32,
            has_bf16=True,
            usual_length=1024,
            note=lambda _: None,
        )
    return AnswerFiles.of(answer, folder=folder, run=run).write()


def present(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def test_what_an_earlier_answer_wrote_does_not_stay_beside_another(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write(answers.ADAPTER, folder)
    assert (folder / "exports" / "adapter_config.json").exists()
    # The folder may have moved since, and others may have put their files there.
    folder = folder.rename(tmp_path / "b")
    (folder / "notes.txt").touch()
    (folder / "exports" / "adapter_config.bak").touch()
    written = write(answers.CONFIG, folder)
    assert not (folder / "exports" / "adapter_config.json").exists()
    others = {folder / "notes.txt", folder / "exports" / "adapter_config.bak"}
    assert present(folder) == {*written, *others}


def test_what_somebody_changed_or_named_stays(tmp_path: Path) -> None:
    """A trained adapter is saved under the name of what was exported; a list is a file like others."""
    write(answers.ADAPTER, tmp_path)
    trained = tmp_path / "exports" / "adapter_config.json"
    later = (tmp_path / "result.json").stat().st_mtime + 60
    os.utime(trained, (later, later))
    theirs = tmp_path / "notes.txt"
    theirs.touch()
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    result["files"].append(str(theirs))
    (tmp_path / "result.json").write_text(json.dumps(result), encoding="utf-8")
    os.utime(tmp_path / "result.json", (later - 60, later - 60))
    written = write(answers.CONFIG, tmp_path)
    assert present(tmp_path) == {*written, trained, theirs}


def test_the_base_stays_where_the_answer_goes_beside_it(tmp_path: Path) -> None:
    write(answers.ADAPTER, tmp_path)
    base = tmp_path / "exports" / "adapter_config.json"
    before = base.read_text(encoding="utf-8")
    adapter = dataclasses.replace(answers.ADAPTER, lora_rank=8)
    written = write(adapter, tmp_path / "exports", base=base)
    assert base not in written
    assert base.read_text(encoding="utf-8") == before


def test_copies_of_an_earlier_base_go_unless_they_were_changed(tmp_path: Path) -> None:
    """Their names are the user's: what was there long before is not ours, whatever the list says."""
    folder = tmp_path / "a"
    names = ("kept.yaml", "gone.yaml", "older.yaml")
    for name in names:
        base = tmp_path / name
        base.write_text("per_device_train_batch_size: 4\nbf16: true\n", encoding="utf-8")
        written = write(answers.CONFIG, folder, base=base)
        assert folder / "yours" / name in written
        if name == "kept.yaml":
            later = (folder / "result.json").stat().st_mtime + 60
            os.utime(folder / "yours" / name, (later, later))
        if name == "older.yaml":
            os.utime(folder / "yours" / name, (1e9, 1e9))
    left = {folder / "yours" / name for name in ("kept.yaml", "older.yaml")}
    assert present(folder) == {*written, *left}
    written = write(answers.CONFIG, folder)
    assert present(folder) == {*written, *left}
    only = tmp_path / "b"
    write(answers.CONFIG, only, base=tmp_path / "gone.yaml")
    write(answers.CONFIG, only)
    assert not (only / "yours").exists()


@pytest.mark.parametrize(
    "content", ["", "[" * 100_000, "[1]", "{}", '{"files": 1}', '{"files": ["", "/", "..", 3]}']
)
def test_a_result_that_lists_nothing_takes_nothing_away(tmp_path: Path, content: str) -> None:
    theirs = tmp_path / "adapter_config.json"
    theirs.touch()
    (tmp_path / "result.json").write_text(content, encoding="utf-8")
    written = write(answers.CONFIG, tmp_path)
    assert present(tmp_path) == {*written, theirs}
    assert json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["files"]


def test_when_one_file_cannot_be_moved_all_are_as_they_were(tmp_path: Path) -> None:
    """A folder has the name of the third file: neither of the first two changes or stays."""
    old, new, taken = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "c.txt"
    old.write_text("before", encoding="utf-8")
    os.utime(old, (1e9, 1e9))
    taken.mkdir()
    with pytest.raises(StorageError, match="Is a directory"):
        write_texts(old, new, taken)
    assert present(tmp_path) == {old}
    assert (old.read_text(encoding="utf-8"), old.stat().st_mtime) == ("before", 1e9)


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_move_that_fails_half_way_undoes_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, links: bool
) -> None:
    """So on file systems that know no second name for a file, too."""
    first, new, last = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "c.txt"
    for file in (first, last):
        file.write_text(f"{file.name} before", encoding="utf-8")
    move = os.replace

    def fail_at_the_last(source: Path, target: Path) -> None:
        if Path(target) == last:
            raise error
        move(source, target)

    monkeypatch.setattr(os, "replace", fail_at_the_last)
    if not links:
        monkeypatch.setattr(os, "link", refused)
    with pytest.raises(StorageError if isinstance(error, OSError) else KeyboardInterrupt):
        write_texts(first, new, last)
    assert present(tmp_path) == {first, last}
    for file in (first, last):
        assert file.read_text(encoding="utf-8") == f"{file.name} before"


def test_files_replace_earlier_ones_and_leave_nothing_else(tmp_path: Path) -> None:
    first, new = tmp_path / "a.txt", tmp_path / "further" / "b.txt"
    first.write_text("before", encoding="utf-8")
    write_texts(first, new)
    assert present(tmp_path) == {first, new}
    assert {file.read_text(encoding="utf-8") for file in (first, new)} == {"after"}


def test_a_pipe_is_written_into_and_stays(tmp_path: Path) -> None:
    """As root a file took the place of /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_texts(tmp_path / "a.txt", pipe)
        assert os.read(reader, 100) == b"after"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert sorted(tmp_path.iterdir()) == [tmp_path / "a.txt", pipe]


def test_a_path_without_a_name_is_refused() -> None:
    with pytest.raises(StorageError, match=r"cannot be written to .*Is a directory"):
        write_texts(Path(""))


def write_texts(*paths: Path) -> None:
    texts = {path: ["af", "ter"] for path in paths}
    write_all(texts, what="The files", to=paths[0].parent, kind="folder")


def refused(*_: object, **__: object) -> None:
    raise PermissionError(1, "Operation not permitted")
