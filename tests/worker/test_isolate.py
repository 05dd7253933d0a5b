"""Children here are a few lines of Python in place of the real worker."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from autotune.errors import WorkerError
from autotune.records.estimate import SCHEMA_VERSION
from autotune.worker.client import isolate, launching, orphans

pytestmark = pytest.mark.worker

ROOT = Path(__file__).resolve().parents[2]
Commands = Callable[[str], list[str]]

HEADER = """
import json, os, signal, sys, time
content = json.load(open(sys.argv[1]))
request = content["request"]
result = open(sys.argv[2], "a")
def answer(**values):
    print(json.dumps(values), file=result, flush=True)
"""


@pytest.fixture
def worker(tmp_path: Path) -> Commands:
    """Turn the body of a worker into its command."""

    def write(body: str) -> list[str]:
        path = tmp_path / "worker.py"
        path.write_text(HEADER + body)
        return [sys.executable, "-S", str(path)]

    return write


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def run(command: list[str], request: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    kwargs.setdefault("deadline_seconds", 20)
    return isolate.run("trace", request or {}, command=command, **kwargs)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_what_runs_in_the_background_ends_with_the_block(
    worker: Commands, temporary_folder: Path
) -> None:
    command = worker("answer(pid=os.getpid())\ntime.sleep(600)")
    launch = functools.partial(launching.spawn, command)
    with isolate.in_background("trace", {}, launch=launch) as new_answers:
        answers: list[Any] = []
        wait_until(lambda: answers.extend(new_answers()) or answers)
        assert is_alive(answers[0]["pid"])
        assert new_answers() == []
    assert not is_alive(answers[0]["pid"])
    assert list(temporary_folder.iterdir()) == []


def test_request_goes_in_and_answers_come_out(worker: Commands, temporary_folder: Path) -> None:
    command = worker("answer(sum=sum(request['numbers']), verb=content['verb'])\nanswer(n=2)")
    end = run(command, {"numbers": [1, 2, 3]})
    assert end == isolate.WorkerEnd(
        how="ok",
        exit_code=0,
        answers=({"sum": 6, "verb": "trace"}, {"n": 2}),
        problem="",
        stderr_tail="",
    )
    assert list(temporary_folder.iterdir()) == []


def test_request_carries_the_schema_version(worker: Commands) -> None:
    assert run(worker("answer(v=content['schema_version'])")).answers == ({"v": SCHEMA_VERSION},)


def test_answers_arrive_while_the_child_runs(worker: Commands, tmp_path: Path) -> None:
    # The child ends only once its first answer has been seen, so a late delivery is a timeout.
    seen = tmp_path / "seen"
    body = f"answer(n=1)\nwhile not os.path.exists({str(seen)!r}): time.sleep(0.01)\nanswer(n=2)"
    end = run(worker(body), on_answer=lambda answer: seen.touch())
    assert (end.how, end.answers) == ("ok", ({"n": 1}, {"n": 2}))


def test_a_crash_keeps_the_answers_before_it(worker: Commands) -> None:
    end = run(worker("answer(n=1)\nraise SystemError('went wrong')"))
    assert (end.how, end.exit_code, end.answers) == ("crashed", 1, ({"n": 1},))
    assert "went wrong" in end.stderr_tail
    error = end.to_error("trace")
    assert isinstance(error, WorkerError)
    assert str(error) == "The trace process ended with exit code 1. SystemError: went wrong."


def test_what_libraries_print_after_a_traceback_does_not_hide_it(worker: Commands) -> None:
    leak = "import atexit, sys; atexit.register(lambda: print('leaked 3 types', file=sys.stderr))"
    error = run(worker(f"{leak}\nraise SystemError('went wrong')")).to_error("trace")
    assert str(error) == "The trace process ended with exit code 1. SystemError: went wrong."


def test_a_killed_child_and_its_half_line(worker: Commands) -> None:
    body = "answer(n=1)\nresult.write('{\"n\": ')\nresult.flush()\nos.kill(os.getpid(), 9)"
    end = run(worker(body))
    assert (end.how, end.exit_code) == ("crashed", -signal.SIGKILL)
    assert end.answers == ({"n": 1},)
    assert "SIGKILL" in end.problem
    assert "memory" in str(end.to_error("trace"))


@pytest.mark.parametrize("line", ["hello", "[1]", "", "\udcff", "[" * 100_000])
def test_a_line_that_is_no_object_is_named(worker: Commands, line: str) -> None:
    body = (
        f"answer(n=1)\nos.write(result.fileno(), {line!r}.encode('utf-8', 'surrogateescape')"
        " + b'\\n')\nanswer(n=3)\ntime.sleep(60)"
    )
    end = run(worker(body))
    assert (end.how, end.answers) == ("unreadable", ({"n": 1},))
    assert "line 2" in end.problem
    assert len(end.problem) < 200


def test_success_with_a_cut_off_line_is_not_success(worker: Commands) -> None:
    end = run(worker("answer(n=1)\nresult.write('{\"n\": 2}')"))
    assert (end.how, end.answers) == ("unreadable", ({"n": 1},))
    assert "line 2" in end.problem


START_SECONDS = 1.5
"""For a Python to start and to answer, thirty times what it takes on an idle machine."""


def test_deadline(worker: Commands) -> None:
    start = time.monotonic()
    end = run(worker("answer(n=1)\ntime.sleep(60)"), deadline_seconds=START_SECONDS)
    assert (end.how, end.answers) == ("timeout", ({"n": 1},))
    assert end.exit_code == -signal.SIGTERM
    assert f"{START_SECONDS} s" in end.problem
    # Half of what it would have taken: not waited for.
    assert time.monotonic() - start < 30


def test_each_answer_may_renew_the_deadline(worker: Commands) -> None:
    """Many traces on a busy machine take long; one that never ends takes longer than the deadline."""
    steady = worker("for n in range(4):\n    time.sleep(0.5)\n    answer(n=n)")
    assert run(steady, deadline_seconds=1.5, answers_renew=True).how == "ok"
    end = run(
        worker("answer(n=1)\ntime.sleep(60)"), deadline_seconds=START_SECONDS, answers_renew=True
    )
    assert (end.how, end.answers) == ("timeout", ({"n": 1},))


def test_deadline_kills_what_ignores_term_and_its_children(worker: Commands) -> None:
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child:
    answer(child=child)
time.sleep(60)
"""
    end = run(worker(body), deadline_seconds=START_SECONDS)
    assert (end.how, end.exit_code) == ("timeout", -signal.SIGKILL)
    assert wait_until(lambda: not is_alive(end.answers[0]["child"]))


def test_what_a_child_leaves_behind_is_killed(worker: Commands) -> None:
    body = "child = os.fork()\nif child == 0: time.sleep(60)\nanswer(child=child)"
    end = run(worker(body))
    assert end.how == "ok"
    assert wait_until(lambda: not is_alive(end.answers[0]["child"]))


def test_stderr_is_kept_but_not_all_of_it(worker: Commands) -> None:
    end = run(worker("print('start')\nsys.stderr.write('x' * 1_000_000 + 'end \\udcff')"))
    assert end.how == "ok"
    assert end.stderr_tail.startswith("xxx")
    assert "end" in end.stderr_tail[-12:]
    assert len(end.stderr_tail.encode()) <= isolate.MAX_STDERR_BYTES


def test_print_is_no_answer(worker: Commands) -> None:
    end = run(worker("print(json.dumps({'n': 1}))"))
    assert (end.how, end.answers, end.stderr_tail) == ("ok", (), '{"n": 1}\n')


def test_environment(worker: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("HF_HOME", "/somewhere")
    # A library's warning would be kept as the outcome of a probe.
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    end = run(worker("answer(**os.environ)"))
    assert end.answers[0]["PYTHONWARNINGS"] == ""
    assert end.answers[0]["CUDA_VISIBLE_DEVICES"] == ""
    assert end.answers[0]["HF_HOME"] == "/somewhere"
    assert end.answers[0][orphans.PARENT_VARIABLE] == str(os.getpid())


def test_the_real_command_ignores_modules_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not the json you want')")
    monkeypatch.chdir(tmp_path)
    python, *options, module_option, module = launching.worker_command()
    assert (python, module_option, module) == (sys.executable, "-m", "autotune.worker")
    end = run([python, *options, "-c", "import autotune.records.estimate, json"])
    assert (end.how, end.stderr_tail) == ("ok", "")


def test_several_children_answer_and_keep_their_order(worker: Commands) -> None:
    command = worker("time.sleep(request['seconds'])\nanswer(n=request['n'])")
    requests = [{"n": n, "seconds": 0.3 if n == 0 else 0.0} for n in range(4)]
    arrived: list[int] = []
    ends = isolate.run_many(
        "trace",
        requests,
        deadline_seconds=20,
        on_answer=lambda answer: arrived.append(answer["n"]),
        command=command,
        max_children=2,
    )
    assert [end.answers for end in ends] == [({"n": n},) for n in range(4)]
    assert sorted(arrived) == [0, 1, 2, 3]


def test_never_more_children_than_allowed(worker: Commands, tmp_path: Path) -> None:
    body = f"""
folder = {str(tmp_path)!r}
open(f"{{folder}}/at-work-{{os.getpid()}}", "w").close()
answer(num=sum(name.startswith("at-work-") for name in os.listdir(folder)))
time.sleep(0.1)
os.remove(f"{{folder}}/at-work-{{os.getpid()}}")
"""
    ends = isolate.run_many(
        "trace", [{}] * 5, deadline_seconds=20, command=worker(body), max_children=2
    )
    assert {end.answers[0]["num"] for end in ends} <= {1, 2}


def test_one_child_crashes_the_other_goes_on(worker: Commands) -> None:
    command = worker("answer(n=request['n'])\nsys.exit(request['n'])")
    ends = isolate.run_many("trace", [{"n": 3}, {"n": 0}], deadline_seconds=20, command=command)
    assert [(end.how, end.exit_code) for end in ends] == [("crashed", 3), ("ok", 0)]


def test_an_exception_in_the_caller_ends_the_children(
    worker: Commands, temporary_folder: Path
) -> None:
    pids: list[int] = []

    def fail(answer: dict[str, Any]) -> None:
        pids.append(answer["pid"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(worker("answer(pid=os.getpid())\ntime.sleep(60)"), on_answer=fail)
    assert not is_alive(pids[0])
    assert list(temporary_folder.iterdir()) == []


PARENT = """
import os, sys
from autotune.worker.client import isolate
def show(answer):
    print(answer["pid"], flush=True)
try:
    isolate.run("trace", {}, deadline_seconds=60, on_answer=show, command=sys.argv[1:])
except KeyboardInterrupt:
    sys.exit(130)
"""


def start_parent(tmp_path: Path, command: list[str]) -> tuple[subprocess.Popen[str], int]:
    """A parent process that runs a worker; also the worker's process id."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script), *command],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def test_ctrl_c_ends_the_child(worker: Commands, tmp_path: Path) -> None:
    command = worker("answer(pid=os.getpid())\ntime.sleep(60)")
    parent, child = start_parent(tmp_path, command)
    with parent:
        parent.send_signal(signal.SIGINT)
        assert parent.wait(10) == 130
    assert not is_alive(child)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_the_child_dies_with_its_parent(worker: Commands, tmp_path: Path) -> None:
    command = worker(
        "from autotune.worker.client import orphans\norphans.die_with_parent()\n"
        "answer(pid=os.getpid())\ntime.sleep(60)"
    )
    parent, child = start_parent(tmp_path, command)
    with parent:
        assert is_alive(child)
        parent.kill()
    assert wait_until(lambda: not is_alive(child))


def test_an_orphan_does_not_start(worker: Commands, tmp_path: Path) -> None:
    command = worker(
        f"os.environ[{orphans.PARENT_VARIABLE!r}] = '1'\n"
        "from autotune.worker.client import orphans\norphans.die_with_parent()\nanswer(n=1)"
    )
    end = run(command)
    assert (end.how, end.answers) == ("crashed", ())
    assert "gone" in end.stderr_tail


def test_die_with_parent_leaves_a_process_of_its_own_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(orphans.PARENT_VARIABLE, raising=False)
    orphans.die_with_parent()


def test_full_disk(worker: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, *args: Any, **kwargs: Any) -> int:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(WorkerError, match=r"could not be written.*No space left.*TMPDIR"):
        isolate.run("trace", {}, deadline_seconds=1, command=["unused"])


def test_no_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(WorkerError, match="could not be written"):
        isolate.run("trace", {}, deadline_seconds=1, command=["unused"])


def test_a_command_that_does_not_exist(temporary_folder: Path) -> None:
    with pytest.raises(WorkerError, match=r"could not be started.*/no/such/program"):
        run(["/no/such/program"])
    assert list(temporary_folder.iterdir()) == []


def test_the_request_is_written_as_json(worker: Commands) -> None:
    name = 'quote " newline \n \u2028 emoji \U0001f600'
    end = run(worker("answer(name=request['name'])"), {"name": name})
    assert json.dumps(end.answers[0]["name"]) == json.dumps(name)
