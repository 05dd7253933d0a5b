"""Traces in the user's cache folder: what is kept, for whom, and what befalls the file."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import json
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import here
import pytest

import autotune
from autotune.store import trace_cache
from autotune.store.trace_cache import TraceCache

ANSWER = {"trace": {"tensors": [[1, 2, 3]], "text": "a"}}


def test_what_is_kept_is_found_in_another_process_or_folder(tmp_path: Path) -> None:
    cache = TraceCache(tmp_path / "new" / "folder")
    assert cache.find(["a"]) == {}
    assert not cache.file.parent.exists()  # Only what is to be kept makes it.
    cache.add({"a": ANSWER})
    assert stat.S_IMODE(cache.file.parent.stat().st_mode) == 0o700  # Nobody else looks into it.
    cache.add({"a": ANSWER, "b": {"unsupported": "no"}})
    again = TraceCache(tmp_path / "new" / "folder")
    assert again.find(["a", "b", "c"]) == {"a": ANSWER, "b": {"unsupported": "no"}}
    assert again.contents().num_traces == 2


def add_some(folder: Path, number: int) -> None:
    TraceCache(folder).add({f"{number} {each}": {"number": each} for each in range(20)})


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(add_some, [tmp_path] * 16, range(16)))
    assert TraceCache(tmp_path).contents().num_traces == 320


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv(trace_cache.VARIABLE, str(tmp_path / "given"))
    assert trace_cache.folder() == tmp_path / "given"
    monkeypatch.delenv(trace_cache.VARIABLE)
    assert trace_cache.folder() == tmp_path / "home" / ".cache" / "autotune"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert trace_cache.folder() == tmp_path / "xdg" / "autotune"


def random_answer(num_bytes: int) -> dict[str, str]:
    """An answer that hardly gets smaller."""
    return {"hex": os.urandom(num_bytes).hex()}


def test_what_was_used_longest_ago_goes_when_there_is_too_much(tmp_path: Path) -> None:
    cache = TraceCache(tmp_path, max_bytes=25_000)
    cache.add({name: random_answer(6000) for name in ("first", "second", "third")})
    with contextlib.closing(sqlite3.connect(cache.file)) as connection, connection:
        connection.execute("UPDATE traces SET used_at = used_at - 10 * 86400")
    assert cache.find(["first"])  # It counts as used now.
    cache.add({"fourth": random_answer(6000), "fifth": random_answer(6000)})
    kept = cache.find(["first", "second", "third", "fourth", "fifth"])
    assert kept.keys() == {"first", "fourth", "fifth"}
    cache.add({str(number): random_answer(6000) for number in range(30)})
    assert cache.contents().file_bytes < 50_000  # SQLite's own pages come on top.


@pytest.mark.parametrize("damage", ["no database", "cut off", "in the middle"])
def test_a_damaged_file_starts_afresh(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "autotune")
    cache = TraceCache(tmp_path)
    cache.add({str(number): random_answer(6000) for number in range(20)})
    content = cache.file.read_bytes()
    half = len(content) // 2
    cache.file.write_bytes(
        {
            "no database": b"something else" * 1000,
            "cut off": content[:half],
            "in the middle": content[:4096] + os.urandom(len(content) - 4096),
        }[damage]
    )
    caplog.clear()
    found = cache.find(list(map(str, range(20))))
    assert len(found) < 20
    cache.add({"new": ANSWER})
    cache.add({"new": ANSWER})
    assert cache.find(["new"]) == {"new": ANSWER}
    assert "so it starts afresh" in caplog.text


def test_a_damaged_answer_is_asked_for_again(tmp_path: Path) -> None:
    cache = TraceCache(tmp_path)
    cache.add({"a": ANSWER, "b": ANSWER})
    with contextlib.closing(sqlite3.connect(cache.file)) as connection, connection:
        connection.execute(
            "UPDATE traces SET answer = substr(answer, 1, 20) WHERE key = ?",
            (trace_cache._key("a"),),
        )
    assert cache.find(["a", "b"]) == {"b": ANSWER}
    cache.add({"a": ANSWER})
    assert cache.find(["a", "b"]).keys() == {"a", "b"}


def test_a_folder_that_cannot_be_made_costs_a_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "autotune")
    (tmp_path / "file").touch()
    cache = TraceCache(tmp_path / "file" / "folder")
    cache.add({"a": ANSWER})
    assert cache.find(["a"]) == {}
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "cannot be written" in caplog.text


def test_what_another_process_holds_costs_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "autotune")
    cache = TraceCache(tmp_path)
    cache.add({"a": ANSWER})
    monkeypatch.setattr(trace_cache, "_BUSY_SECONDS", 0.05)
    with contextlib.closing(sqlite3.connect(cache.file)) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert cache.find(["a"]) == {}
        cache.add({"b": ANSWER})
    assert caplog.text.count("database is locked") == 2
    assert cache.find(["a", "b"]) == {"a": ANSWER}


def test_the_command_shows_and_clears_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trace_cache.VARIABLE, str(tmp_path))
    TraceCache().add({"a": ANSWER})
    TraceCache().replays().add({"b": {}, "c": {}})
    (tmp_path / "traces-0.db").touch()
    (tmp_path / "mine.txt").touch()
    shown = here.command("cache", cwd=tmp_path)
    assert shown.stdout.startswith("1 trace and 2 replays, ")
    assert str(TraceCache().file) in shown.stdout
    said = json.loads(here.command("cache", "--clear", "--json", cwd=tmp_path).stdout)
    assert (said["num_traces"], said["is_cleared"]) == (1, True)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]
    assert json.loads(here.command("cache", "--json", cwd=tmp_path).stdout)["num_traces"] == 0


PACKAGE = Path(autotune.__file__).parent


def said_by(code: str, *, path: Path) -> str:
    """What a fresh process prints, with the package that is in that folder."""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=path,  # where it looks first
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return ended.stdout


def key_after_an_edit(module: str | None, folder: Path) -> str:
    """The key of a request, and of prices, in a copy of the package in which this module was edited."""
    shutil.copytree(PACKAGE, folder / "autotune", ignore=shutil.ignore_patterns("__pycache__"))
    if module is not None:
        found = importlib.util.find_spec(module)
        assert found is not None
        assert found.origin is not None
        edited = folder / "autotune" / Path(found.origin).relative_to(PACKAGE)
        with edited.open("a", encoding="utf-8") as file:
            file.write("# edited\n")
    return said_by(
        f"from {trace_cache.__name__} import _key, PriceCache;"
        "print(_key('a request'), PriceCache()._key_of('a request'), sep='\\n')",
        path=folder,
    )


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> str:
    return key_after_an_edit(None, tmp_path_factory.mktemp("as_it_is"))


@pytest.mark.worker
@pytest.mark.parametrize(
    ("module", "is_kept", "keeps_prices"),
    [
        ("autotune.probe.loop", True, True),
        ("autotune.search.predict_best", True, True),
        ("autotune.worker.probe.run", True, True),
        ("autotune.speed.matmul", True, False),
        ("autotune.predict.floors", True, False),
        ("autotune.worker.trace.tracker", False, False),
        ("autotune.worker.trace.liger", False, False),
        ("autotune.memory.reductions", False, False),
        ("autotune.records.estimate", False, False),
    ],
)
def test_an_edit_drops_traces_where_it_may_change_them(
    key: str, module: str, is_kept: bool, keeps_prices: bool, tmp_path: Path
) -> None:
    edited = key_after_an_edit(module, tmp_path).splitlines()
    same = [one == other for one, other in zip(edited, key.splitlines(), strict=True)]
    assert same == [is_kept, keeps_prices]


@pytest.mark.worker
@pytest.mark.slow  # imports torch
def test_all_that_a_tracing_process_imports_is_in_the_key() -> None:
    code = (
        "import sys; from autotune.worker.trace import imports; imports.import_libraries([]); "
        "import autotune.worker.trace.answers; print(*sys.modules)"
    )
    loaded = names(PACKAGE.rglob("*.py")).intersection(said_by(code, path=PACKAGE.parent).split())
    assert "autotune.worker.trace.encode" in loaded
    assert loaded - names(trace_cache._sources()) == {"autotune"}


def names(files: Iterable[Path]) -> set[str]:
    """The names of modules of the package."""
    places = (file.relative_to(PACKAGE.parent).with_suffix("") for file in files)
    return {".".join(place.parts).removesuffix(".__init__") for place in places}


def test_answers_of_each_kind_are_kept_apart_in_one_file(tmp_path: Path) -> None:
    cache = TraceCache(tmp_path)
    kinds = (
        cache,
        cache.replays(),
        cache.prices(),
        trace_cache.AnsweredQuestions(tmp_path),
        trace_cache.SeenPictures(tmp_path),
    )
    assert {each.file for each in kinds} == {cache.file}
    for number, kind in enumerate(kinds):
        assert kind.find(["a"]) == {}
        kind.add({"a": {"number": number}})
    for number, kind in enumerate(kinds):
        again = type(kind)(tmp_path)
        assert again.find(["a", "b"]) == {"a": {"number": number}}
    contents = cache.contents()
    assert (contents.num_traces, contents.num_replays) == (1, 1)
    assert contents.file_bytes == cache.file.stat().st_size
    (tmp_path / "traces-1.db").write_text("of an older form")
    (tmp_path / "mine.db").write_text("")
    cache.clear()
    assert [each.name for each in tmp_path.iterdir()] == ["mine.db"]
    assert trace_cache.AnsweredQuestions(tmp_path).contents().num_traces == 0


def test_prices_are_of_the_code_that_works_them_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = TraceCache(tmp_path)
    cache.add({"a": ANSWER})
    cache.prices().add({"a": ANSWER})
    with monkeypatch.context() as changed:
        changed.setattr(trace_cache, "_priced_by", lambda: "other code")
        assert cache.prices().find(["a"]) == {}
        assert cache.find(["a"]) == {"a": ANSWER}
    with monkeypatch.context() as changed:
        changed.setattr(trace_cache, "_made_by", lambda: "other code")
        assert cache.prices().find(["a"]) == {}
        assert cache.find(["a"]) == {}
    assert cache.prices().find(["a"]) == {"a": ANSWER}


def test_an_edit_of_the_code_of_prices_drops_prices_and_no_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / "a.py", tmp_path / "b.py"]
    for file in files:
        file.write_text("before")
    asked: list[object] = []
    monkeypatch.setattr(trace_cache, "_sources", lambda *names: asked.append(names) or files)
    digests = set()
    for file in (None, *files):
        if file is not None:
            file.write_text("after")
        digest = trace_cache._priced_by.__wrapped__()
        assert len(bytes.fromhex(digest)) == 32
        digests.add(digest)
    assert len(digests) == 3
    assert asked == [(trace_cache._CODE_OF_PRICES,)] * 3
