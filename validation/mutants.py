"""Small faults put into the code one at a time: which of them do the tests of their own room notice?

    python -m validation.mutants --num 300 --seed 1 --out studies/mutants/rows.jsonl

The faults are drawn evenly over the rooms (`validation.faults`). coverage.py says once which tests of the
room run which lines; a fault asks those that run its statement, quick ones first, in a process of its own and
a copy of the tree, until the first fails. A row of JSON for each. A command that is given again goes on where
the last one ended, except in modules that have changed since; --again asks those anew that no test noticed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import difflib
import importlib
import itertools
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import coverage
import msgspec
import psutil
import pytest

from validation.faults import HERE, Fault, digest, draw, python_files, text_of

ROOMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **{
        room: ((f"autotune/{room}",), (f"tests/{room}",))
        for room in (
            *("memory", "space", "predict", "probe", "search", "store", "export", "report"),
            "nightly",
        )
    },
    "worker": (
        (
            "autotune/worker/probe/checks.py",
            "autotune/worker/trace/autocast.py",
            "autotune/worker/trace/sdpa.py",
        ),
        (
            "tests/contracts/test_probe.py",
            "tests/contracts/test_probe_compiled.py",
            "tests/contracts/test_kernel_order.py",
            "tests/contracts/test_attention.py",
            "tests/contracts/test_attention_kernels.py",
        ),
    ),
}
"""Rooms, what is in them, and their own tests; of `worker`, three modules that contracts hold."""

PRELOADED = (
    "hypothesis", "numpy", "pydantic", "msgspec", "yaml", "ruamel.yaml", "rich.console", "click", "jinja2",
    "sqlalchemy.orm", "alembic.command", "optuna", "torch", "transformers.trainer", "peft", "bitsandbytes",
)  # fmt: skip
"""What tests import of others: once, before the processes part."""

SLOWER = 10
"""How many times as long as without the fault tests may take, on a busy machine, and a minute more."""
ALL_SECONDS = 3600
QUICK_SECONDS = 0.5
LAST_SECONDS = 120
"""What slow tests may take for a fault that no quick one notices: the quicker ones, one at least."""
AT_IMPORT = ""
NO_END = "the limit of time, or a signal"
ROOT_OF_ORPHANS = 36
"""PR_SET_CHILD_SUBREAPER of <sys/prctl.h>."""


class Seen(msgspec.Struct):
    """What a run of tests showed."""

    failed: list[str] = []
    seconds: dict[str, float] = {}
    """Tests that passed, in the order of their files."""
    marked: list[str] = []
    """Tests that are marked as slow, or as asking workers."""
    sure: set[str] = set()
    """Those that have been asked again without a fault, and passed."""
    ran: dict[str, dict[int, list[str]]] = {}
    """The tests that ran each line of each module of the room; AT_IMPORT may be among them."""

    def tests_for(self, fault: Fault) -> tuple[list[str], list[str]]:
        """Order the tests that could notice a fault: quick ones that run it, then others; none if none does.

        The other quick tests of their files come too: they may use what the first to ask computed and
        kept. What runs at import, such as a table, is everybody's.
        """
        module = self.ran.get(fault.module, {})
        near = {test for line in fault.statement() for test in module.get(line, ())}
        slow = {test for test, each in self.seconds.items() if each > QUICK_SECONDS}
        slow |= set(self.marked)
        files = {file_of(test) for test in near}
        chosen = near | {test for test in self.seconds if file_of(test) in files} - slow
        if AT_IMPORT in near:
            chosen |= {test for tests in module.values() for test in tests}
            chosen |= set(self.seconds) - slow
        chosen &= set(self.seconds)
        of_file: Counter[str] = Counter()
        for test in chosen - slow:
            of_file[file_of(test)] += round(1000 * self.seconds[test])

        def order(test: str) -> tuple[bool, float, str]:
            file = file_of(test)
            return test in slow, self.seconds[test] if test in slow else of_file[file], file

        ordered = sorted((test for test in self.seconds if test in chosen), key=order)
        last = itertools.accumulate(self.seconds[test] for test in ordered if test in slow)
        num_last = max(1, sum(seconds <= LAST_SECONDS for seconds in last))
        del ordered[len(chosen - slow) + num_last :]
        first = [test for test in ordered if test in near - slow]
        return first, [test for test in ordered if test not in first]


def file_of(test: str) -> str:
    return test.partition("::")[0]


class Plugin:
    """A plugin of pytest that chooses and orders tests, and notes what they take and which lines they run."""

    def __init__(self, chosen: Iterable[str], cover: coverage.Coverage | None) -> None:
        self.chosen = {test: place for place, test in enumerate(chosen)}
        self.cover = cover
        self.seen = Seen()
        self.sharing: dict[str, list[str]] = {}
        """Tests by the fixtures that they share with others."""
        self.now = AT_IMPORT

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.chosen:
            items[:] = [item for item in items if item.nodeid in self.chosen]
            items.sort(key=lambda item: self.chosen[item.nodeid])

    def switch(self, context: str) -> None:
        if self.cover:
            self.cover.switch_context(context)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        for name in getattr(item, "fixturenames", ()):
            self.sharing.setdefault(f"fixture {name}", []).append(item.nodeid)
        if any(item.get_closest_marker(name) for name in ("slow", "worker")):
            self.seen.marked.append(item.nodeid)
        self.now = item.nodeid
        self.switch(item.nodeid)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        if fixturedef.scope != "function":
            self.switch(f"fixture {fixturedef.argname}")
        try:
            return (yield)
        finally:
            self.switch(self.now)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = self.seen.seconds
        seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.seen.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.seen.failed.append(report.nodeid)

    def end(self, code: int) -> Seen:
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            self.seen.failed = self.seen.failed or [f"pytest's exit code {code}"]
        for test in self.seen.failed:
            self.seen.seconds.pop(test, None)
        if self.cover:
            self.cover.stop()
            data = self.cover.get_data()
            for file in data.measured_files():
                self.seen.ran[str(Path(file).relative_to(Path.cwd()))] = {
                    line: sorted({t for each in tests for t in self.sharing.get(each, [each])})
                    for line, tests in data.contexts_by_lineno(file).items()
                }
        return self.seen


def run_tests(tree: Path, chosen: dict[str, float]) -> Seen:
    """Run the chosen tests, in their order, until one fails."""
    files = sorted({file_of(test) for test in chosen})
    return run(tree, [*files, "-x"], Plugin(chosen, None), SLOWER * sum(chosen.values()) + 60)


def run(tree: Path, words: list[str], plugin: Plugin, seconds: float) -> Seen:
    """Run tests in a process forked from this one, which has imported nothing of autotune."""
    end = tree.with_suffix(".json")
    end.unlink(missing_ok=True)
    child = multiprocessing.get_context("fork").Process(
        target=run_here, args=(tree, words, plugin, end)
    )
    child.start()
    child.join(seconds)
    code = child.exitcode
    stop_all()
    if end.exists():
        return msgspec.json.decode(end.read_bytes(), type=Seen)
    if code is not None and code >= 0:
        raise SystemExit(tree.with_suffix(".log").read_text(errors="replace"))
    return Seen(failed=[NO_END])


def run_here(tree: Path, words: list[str], plugin: Plugin, end: Path) -> None:
    os.setsid()
    log = os.open(tree.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    null = os.open(os.devnull, os.O_RDONLY)
    for new, old in ((null, 0), (log, 1), (log, 2)):
        os.dup2(new, old)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in (str(HERE), ""))]
    sys.argv[:] = ["pytest"]
    if plugin.cover:
        plugin.cover.start()
    quiet = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    seen = plugin.end(pytest.main([*quiet, "--rootdir", str(tree), *words], plugins=[plugin]))
    part = end.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(seen))
    part.rename(end)


def stop_all() -> None:
    """End what a run of tests has left, down to databases that made themselves independent."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def copy_of_tree(folder: Path) -> Path:
    tree = folder / "tree"
    skipped = shutil.ignore_patterns(".git", ".venv", "__pycache__", "mutants", ".*_cache")
    shutil.copytree(HERE, tree, ignore=skipped)
    return tree


def seen_of(room: str, tree: Path) -> Seen:
    """Look up what the room's tests show without a fault; they run where they or the code have changed."""
    modules, tests = ROOMS[room]
    names = ("autotune", *tests, "tests/support", "tests/conftest.py")
    texts = [text_of(str(file.relative_to(HERE))) for name in names for file in python_files(name)]
    kept = HERE / "build" / "mutants" / f"{room}-{digest(''.join(texts))}.json"
    if kept.exists():
        return msgspec.json.decode(kept.read_bytes(), type=Seen)
    include = [str(tree / name) + ("" if name.endswith(".py") else "/*") for name in modules]
    cover = coverage.Coverage(None, config_file=False, include=include)
    seen = run(tree, list(tests), Plugin((), cover), ALL_SECONDS)
    for test in seen.failed:
        print(f"left out, fails without a fault: {test}", file=sys.stderr)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(msgspec.json.encode(seen))
    return seen


def noticed_by(fault: Fault, seen: Seen, tree: Path) -> str | None:
    """Name the test that notices the fault, if one does."""
    file = tree / fault.module
    for tests in filter(None, seen.tests_for(fault)):
        put(file, fault.code() or "")
        failed = run_tests(tree, {test: seen.seconds[test] for test in tests}).failed
        put(file, text_of(fault.module))
        # On a busy machine, what waits for processes may fail by itself.
        if failed and failed[0] in {NO_END, *seen.marked} - seen.sure:
            asked = tests if failed[0] == NO_END else failed
            if run_tests(tree, {test: seen.seconds[test] for test in asked}).failed:
                seen.seconds = {t: s for t, s in seen.seconds.items() if t not in asked}
                return noticed_by(fault, seen, tree)
            seen.sure |= set(asked)
        if failed:
            return failed[0]
    return None


def put(file: Path, text: str) -> None:
    """Write a module whose compiled files are told apart by size and whole seconds."""
    second = file.stat().st_mtime - 1
    file.write_text(text, encoding="utf-8")
    os.utime(file, (second, second))


def row_of(place: str, room: str, fault: Fault) -> dict[str, Any]:
    before, after = text_of(fault.module).splitlines(), (fault.code() or "").splitlines()
    diff = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
    row = {"place": place, "room": room, **dataclasses.asdict(fault)}
    row["of"] = digest(text_of(fault.module))
    return {**row, "diff": [line for line in diff if not line.startswith("@@")]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", default=",".join(ROOMS))
    parser.add_argument("--again", action="store_true", help="ask what no test noticed anew")
    parser.add_argument("--out", type=Path, default=HERE / "studies" / "mutants" / "rows.jsonl")
    asked = parser.parse_args()
    rooms = asked.rooms.split(",")
    for name in PRELOADED:
        importlib.import_module(name)
    ctypes.CDLL(None).prctl(ROOT_OF_ORPHANS, 1, 0, 0, 0)
    known = read(asked.out)
    rows = {place: row for place, row in known.items() if row["room"] not in rooms}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = copy_of_tree(Path(folder))
        for room in rooms:
            seen = seen_of(room, tree)
            for place, fault in draw(
                ROOMS[room][0], -(-asked.num // len(ROOMS)), asked.seed
            ).items():
                row, old = row_of(place, room, fault), known.get(place, {})
                if old.get("of") == row["of"] and (old["noticed"] or not asked.again):
                    rows[place] = old
                    continue
                began = time.monotonic()
                by = noticed_by(fault, seen, tree)
                row |= {"tests": sum(map(len, seen.tests_for(fault))), "noticed": by is not None}
                row |= {"by": by, "seconds": round(time.monotonic() - began, 1)}
                rows[place] = {"at_first": row["noticed"], **old, **row}
                write(asked.out, {**known, **rows})
                print(json.dumps(rows[place]), flush=True)
    write(asked.out, rows)
    for room in rooms:
        of = [row for row in rows.values() if row["room"] == room]
        first, now = (sum(row[when] for row in of) for when in ("at_first", "noticed"))
        print(f"{room:8} of {len(of):3} faults {first:3} noticed at first, {now:3} now")
    return 0


def read(out: Path) -> dict[str, dict[str, Any]]:
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    return {row["place"]: row for row in map(json.loads, lines)}


def write(out: Path, rows: dict[str, dict[str, Any]]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_suffix(".part")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows.values()), encoding="utf-8")
    part.rename(out)


if __name__ == "__main__":
    sys.exit(main())
