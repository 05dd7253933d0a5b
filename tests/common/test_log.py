"""The log: what it holds, where it is, and that it never costs a command."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import answers
import pytest

from autotune import cli
from autotune.common import log
from autotune.errors import StorageError
from autotune.search import predict_best
from autotune.worker.client import isolate

pytestmark = pytest.mark.worker

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    log.tear_down()


@dataclasses.dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str
    log: str


Main = Callable[..., Ran]


@pytest.fixture
def main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Main:
    """Run a command in an empty folder, with a log of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autotune.catalogue.gpus.detect", list)
    file = tmp_path / "the.log"
    monkeypatch.setenv("AUTOTUNE_LOG", str(file))

    def invoke(*arguments: str) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        written = file.read_text(encoding="utf-8") if file.is_file() else ""
        return Ran(int(ended.value.code or 0), *capsys.readouterr(), written)

    return invoke


@pytest.fixture
def boom(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("boom at postgresql://me:hunter2@h/db")

    monkeypatch.setattr(predict_best, "find", fail)


FIND = ("find", "--model", "qwen2.5-1.5b", "--gpu-mem", "12GB")


def test_a_command_says_how_it_began_and_ended_and_is_quiet(main: Main) -> None:
    ran = main("spaces")
    first, last = ran.log.splitlines()
    assert "INFO autotune.cli: autotune 0" in first
    assert first.endswith(": autotune spaces")
    assert f" {os.getpid()} " in first
    assert "exit code 0 after " in last
    assert ran.err == ""


def test_the_next_command_adds_to_it(main: Main) -> None:
    main("spaces")
    assert main("models").log.count("exit code 0") == 2


def test_no_password_is_in_it(main: Main) -> None:
    url = "postgresql+nonsense://me:hunter2@host/db?password=hunter2"
    ran = main("studies", "list", "--storage", url)
    assert ran.code == StorageError.exit_code
    assert "postgresql+nonsense://***@host/db?password=***" in ran.log
    assert "hunter2" not in ran.log + ran.err
    assert "ERROR autotune.cli.output: error: " in ran.log


@pytest.mark.parametrize(
    "text",
    [
        "GET https://host/x?token=hunter2 failed",
        "https://me:hunter2@host/x",
        "WANDB_API_KEY=hunter2 autotune find",
        "the worker wrote {'api_key': 'hunter2', 'r': 4}",
        'the server sent {"api_key": "hunter2"}',
    ],
)
def test_no_secret_of_a_message_or_traceback_is_in_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "the.log"
    log.set_up(file, verbosity=0, warn=pytest.fail)
    try:
        raise RuntimeError(text)
    except RuntimeError:
        log.logger("autotune.test").exception("%s", text)
    log.tear_down()
    written = file.read_text(encoding="utf-8")
    assert written.count("***") >= 2
    assert "hunter2" not in written


def test_a_mistake_of_ours_leaves_its_traceback(main: Main, boom: None) -> None:
    ran = main(*FIND)
    assert ran.code == 1
    assert 'raise RuntimeError("boom at' in ran.log
    assert "Traceback (most recent call last)" in ran.log
    assert "hunter2" not in ran.log
    assert "Traceback" not in ran.err
    assert f"the traceback in {os.environ['AUTOTUNE_LOG']} and" in ran.err


def test_a_traceback_that_is_shown_is_kept_as_well(
    main: Main, boom: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AUTOTUNE_DEBUG", "1")
    with pytest.raises(RuntimeError, match="boom"):
        cli.main(FIND)
    assert 'raise RuntimeError("boom at' in (tmp_path / "the.log").read_text(encoding="utf-8")


def test_what_click_refuses_is_in_it(main: Main) -> None:
    ran = main("find", "--effort", "heroic")
    assert ran.code == 2
    assert "'heroic' is not one of" in ran.log
    assert "exit code 2" in ran.log


def test_verbose_shows_it_once(main: Main) -> None:
    quiet, shown = main("studies", "list"), main("-v", "studies", "list")
    assert "INFO autotune.cli: autotune " in shown.err
    assert quiet.code == shown.code == StorageError.exit_code
    # The error itself is on stderr already.
    assert shown.err.count("There is no database") == 1
    assert "There is no database" in quiet.err


def test_twice_verbose_shows_and_keeps_more(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(*arguments: Any, workload: Any = None, **named: Any) -> Any:
        log.logger("autotune.search.predict_best").debug("a detail")
        return answers.prediction(workload=arguments[1], gpu="NVIDIA RTX 4070")

    monkeypatch.setattr(predict_best, "find", find)
    once = main("-v", *FIND)
    assert "a detail" not in once.err + once.log
    twice = main("-vv", *FIND)
    assert "DEBUG autotune.search.predict_best: a detail" in twice.err
    assert "a detail" in twice.log


def test_the_stages_of_a_search_with_counts_and_seconds(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[tuple[str, int, int]] = []
    with caplog.at_level(logging.INFO, logger="autotune"):
        tell = log.stages(
            log.logger("autotune.search.predict_best"), lambda *told: heard.append(told)
        )
        for told in (("space", 6, 9), ("trace", 1, 2), ("trace", 2, 2), ("priced", 3, 6)):
            tell(*told)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.rpartition(", ")[0] for line in lines] == [
        "stage space: 6 of 9",
        "stage trace: 2 of 2",
        "stage priced: 3 of 6",
    ]
    assert all(line.endswith(" s") for line in lines)
    assert len(heard) == 4


def test_how_a_worker_ended_and_what_it_said(caplog: pytest.LogCaptureFixture) -> None:
    code = "import sys; print('a last word'); sys.exit(3)"
    with caplog.at_level(logging.INFO, logger="autotune"):
        isolate.run("trace", {}, deadline_seconds=30.0, command=[sys.executable, "-c", code])
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("worker trace: crashed, 0 answers, ")
    assert lines[1:] == [
        "worker trace ended with exit code 3",
        "worker trace: a last word",
    ]


def test_text_of_others_stays_on_its_line(main: Main) -> None:
    ran = main("find", "--model", "a\nb\x1b[2J", "--gpu-mem", "12GB")
    assert all(line.isprintable() for line in ran.log.splitlines())
    assert all(line.startswith("20") for line in ran.log.splitlines())


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_LOG", "/some/where.log")
    assert log.path() == Path("/some/where.log")
    monkeypatch.delenv("AUTOTUNE_LOG")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert log.path() == Path("/state/autotune/autotune.log")
    monkeypatch.setenv("HOME", "/home/me")
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", ignored)
        assert log.path() == Path("/home/me/.local/state/autotune/autotune.log")


def test_an_option_names_another_file(main: Main, tmp_path: Path) -> None:
    file = tmp_path / "a folder" / "other.log"
    ran = main("--log-file", str(file), "spaces")
    assert "exit code 0" in file.read_text(encoding="utf-8")
    assert ran.log == ""


def test_it_is_turned_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert log.MAX_BYTES <= 2**20
    monkeypatch.setattr(log, "MAX_BYTES", 10_000)
    file = tmp_path / "x.log"
    problems: list[str] = []
    log.set_up(file, verbosity=0, warn=problems.append)
    to = log.logger("autotune.search.predict_best")
    for number in range(6):
        to.info("%d %s", number, "x" * (log.MAX_BYTES - 1000))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "x.log",
        "x.log.1",
        "x.log.2",
        "x.log.3",
    ]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4 * log.MAX_BYTES
    assert ": 5 x" in file.read_text(encoding="utf-8")
    assert ": 2 x" in (tmp_path / "x.log.3").read_text(encoding="utf-8")
    assert not problems


def test_a_place_that_cannot_be_written_costs_one_line(main: Main, tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("")
    ran = main("--log-file", str(tmp_path / "a-file" / "x.log"), "spaces")
    assert ran.code == 0
    assert "default" in ran.out
    (line,) = ran.err.splitlines()
    assert line.startswith("note: this command leaves no log: ")
    assert "AUTOTUNE_LOG names another file" in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_full_disk_costs_one_line(main: Main, boom: None) -> None:
    """Several lines are logged; one warning is enough, and the error is told all the same."""
    ran = main("--log-file", "/dev/full", *FIND)
    assert ran.code == 1
    lines = ran.err.splitlines()
    assert ["No space left on device" in line for line in lines] == [True, False]
    assert lines[1].startswith("internal error: RuntimeError")
    # There is no file to look into.
    assert "that AUTOTUNE_DEBUG=1 shows" in lines[1]


def test_a_folder_in_its_place_costs_one_line(main: Main, tmp_path: Path) -> None:
    (tmp_path / "taken.log").mkdir()
    os.environ["AUTOTUNE_LOG"] = str(tmp_path / "taken.log")
    ran = main("spaces")
    assert ran.code == 0
    assert len(ran.err.splitlines()) == 1


def test_help_and_completion_leave_none(main: Main) -> None:
    assert main("--help").log == ""
    assert main("--version").log == ""


def test_a_program_that_imports_us_is_left_alone(tmp_path: Path) -> None:
    code = (
        "import autotune.worker.client.isolate as isolate, logging;"
        "log = logging.getLogger(isolate.__name__);"
        "log.warning('not on stderr'); logging.basicConfig(format='%(message)s');"
        "log.warning('where the program wants it')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert ran.stderr == "where the program wants it\n"
    assert list(tmp_path.iterdir()) == []
