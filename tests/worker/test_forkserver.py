"""Servers here import nothing and have verbs of a few lines in place of the real ones."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from autotune.errors import WorkerError
from autotune.worker.client import forkserver, isolate, launching
from autotune.worker.client.forkserver import ForkServer
from autotune.worker.client.orphans import PARENT_VARIABLE, adopt_orphans

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.worker,
    pytest.mark.skipif(sys.platform != "linux", reason="forks are safe on Linux only"),
]

SERVER = """
import os, random, signal, subprocess, sys, threading, time
from autotune.worker import server

def echo(request):
    yield {"pid": os.getpid(), "parent": os.getppid(), "request": request}

def count(request):
    # Each answer is noted beside the result file once it is there to be read.
    with open(request["log"], "a") as log:
        for n in range(request["num"]):
            yield {"n": n, "pid": os.getpid()}
            print(n, file=log, flush=True)
            time.sleep(request["pause_seconds"])

def brood(request):
    for number in request.get("ignore", []):
        signal.signal(number, signal.SIG_IGN)
    children = [subprocess.Popen(["sleep", "60"], start_new_session=own) for own in (False, True)]
    yield {"pid": os.getpid(), "children": [child.pid for child in children]}
    time.sleep(request["seconds"])

def leave(request):
    yield {"n": 1}
    how = request["how"]
    if how == "raise":
        raise SystemError("went wrong")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(how)

def look(request):
    print("printed")
    os.system("echo from a child >&2")
    yield {
        "environment": dict(os.environ),
        "files": [os.readlink(f"/proc/self/fd/{n}") for n in (0, 1, 2)],
        "num_files": len(os.listdir("/proc/self/fd")),
        "session": os.getsid(0),
        "group": os.getpgrp(),
        "random": random.random(),
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "term": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    }

def preload():
    print("a library says hello")
    PRELOAD

server.main(preload, {f.__name__: f for f in (echo, count, brood, leave, look)})
"""


FRESH = """
import json, os, sys
print(json.dumps({"parent": os.getppid()}), file=open(sys.argv[2], "a"))
"""


@pytest.fixture(autouse=True, scope="module")
def _no_orphans_are_adopted() -> Iterator[None]:
    """Begin as a process does that has no server, whatever tests of other files have left."""
    before = adopt_orphans(False)
    yield
    adopt_orphans(before)


@pytest.fixture(autouse=True)
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What every process of this test has in its environment."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    mark = f"AUTOTUNE_TEST_MARK={uuid.uuid4().hex}"
    monkeypatch.setenv(*mark.split("="))
    return mark


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    return server_command(tmp_path)


def server_command(folder: Path, preload: str = "pass") -> list[str]:
    path = folder / "server.py"
    path.write_text(SERVER.replace("PRELOAD", preload))
    return [sys.executable, str(path)]


@pytest.fixture
def server(command: list[str], mark: str) -> Iterator[ForkServer]:
    with ForkServer(command=command) as server:
        yield server
    assert left_behind(mark) == []


def run(server: ForkServer, verb: str, **request: Any) -> isolate.WorkerEnd:
    return server.run(verb, request, deadline_seconds=20)


def processes() -> Iterator[tuple[int, str, int]]:
    """Process id, state and parent of all that there are."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        yield int(folder.name), fields[0], int(fields[1])


def left_behind(mark: str) -> list[int]:
    """Zombies of this process, and what still runs with the mark."""
    found = []
    for pid, state, parent in processes():
        if state == "Z" and parent == os.getpid():
            found.append(pid)
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if pid != os.getpid() and mark.encode() in environment.split(b"\0"):
            found.append(pid)
    return found


def test_jobs_have_processes_of_their_own_and_one_parent(server: ForkServer) -> None:
    ends = [run(server, "echo", n=n) for n in range(3)]
    assert [end.how for end in ends] == ["ok"] * 3
    answers = [end.answers[0] for end in ends]
    assert [answer["request"] for answer in answers] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert len({answer["pid"] for answer in answers}) == 3
    assert {answer["parent"] for answer in answers} == {server.server_pid}
    assert os.getpid() not in {answer["pid"] for answer in answers}


def test_the_state_before_the_fork_is_reported(server: ForkServer) -> None:
    end = run(server, "echo")
    assert server.last_fork == forkserver.Fork(
        pid=end.answers[0]["pid"],
        server_pid=end.answers[0]["parent"],
        num_threads=1,
        cuda_initialized=False,
        cuda_device_open=False,
    )


def test_a_job_costs_little(server: ForkServer) -> None:
    """CPU time, of this process, of the server and of its jobs: nothing is imported anew."""
    run(server, "echo")
    assert server.server_pid is not None
    start = time.process_time() + cpu_seconds_of(server.server_pid)
    for _ in range(10):
        run(server, "echo")
    spent = time.process_time() + cpu_seconds_of(server.server_pid) - start
    assert spent / 10 < 0.1


def cpu_seconds_of(pid: int) -> float:
    """User and system, of a process and the children that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def test_a_job_is_as_a_fresh_process(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = run(server, "look"), run(server, "look")
    seen = first.answers[0]
    assert first.stderr_tail == "printed\nfrom a child\n"
    assert seen["files"][0] == "/dev/null"
    assert seen["files"][1] == seen["files"][2]
    # Those three, the result, and the folder that is being listed: no control message can be read.
    assert seen["num_files"] == 5
    assert server.last_fork is not None
    assert second.answers[0]["session"] == second.answers[0]["group"] == server.last_fork.pid
    assert (seen["blocked"], seen["term"]) == ([], True)
    assert seen["random"] != second.answers[0]["random"]


def test_environment_is_the_one_of_the_moment(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert environment(server)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    first = server.server_pid
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    seen = environment(server)
    assert "PYTORCH_ALLOC_CONF" not in seen
    assert server.server_pid != first
    fresh = launching.worker_environment("look")
    del fresh[PARENT_VARIABLE]
    assert {name: seen.get(name) for name in fresh} == fresh


def environment(server: ForkServer) -> dict[str, str]:
    answer = run(server, "look").answers[0]
    found: dict[str, str] = answer["environment"]
    return found


@pytest.mark.parametrize(
    ("how", "exit_code", "last_words"),
    [
        ("raise", 1, "SystemError: went wrong\n"),
        ("no more", 1, "no more\n"),
        (3, 3, ""),
        ("kill", -signal.SIGKILL, ""),
    ],
)
def test_a_crash_keeps_answers_and_server(
    server: ForkServer, how: str | int, exit_code: int, last_words: str
) -> None:
    run(server, "echo")
    first = server.server_pid
    end = run(server, "leave", how=how)
    assert (end.how, end.exit_code, end.answers) == ("crashed", exit_code, ({"n": 1},))
    assert end.stderr_tail.endswith(last_words)
    assert run(server, "echo").how == "ok"
    assert server.server_pid == first


def test_exit_code_none_is_success(server: ForkServer) -> None:
    assert run(server, "leave", how=None).how == "ok"


def test_an_unknown_verb_is_a_crash_of_the_job(server: ForkServer) -> None:
    end = run(server, "dance")
    assert (end.how, end.exit_code) == ("crashed", 1)
    assert "KeyError: 'dance'" in end.stderr_tail


def test_deadline(server: ForkServer, mark: str) -> None:
    start = time.monotonic()
    end = server.run("brood", {"seconds": 60}, deadline_seconds=0.4)
    assert (end.how, end.exit_code) == ("timeout", -signal.SIGTERM)
    # Half of what it would have taken: not waited for.
    assert time.monotonic() - start < 30
    assert left_behind(mark) == [server.server_pid]


def test_deadline_of_what_ignores_term(server: ForkServer, mark: str) -> None:
    request = {"seconds": 60, "ignore": [signal.SIGTERM]}
    end = server.run("brood", request, deadline_seconds=0.4)
    assert (end.how, end.exit_code) == ("timeout", -signal.SIGKILL)
    assert left_behind(mark) == [server.server_pid]


def test_what_a_job_leaves_behind_is_killed_even_in_a_session_of_its_own(
    server: ForkServer, mark: str
) -> None:
    end = run(server, "brood", seconds=0)
    assert (end.how, len(end.answers[0]["children"])) == ("ok", 2)
    assert left_behind(mark) == [server.server_pid]


def test_imports_do_not_count_for_the_deadline(tmp_path: Path) -> None:
    command = server_command(tmp_path, "time.sleep(2.5)")
    with ForkServer(command=command) as server:
        assert server.run("echo", {}, deadline_seconds=2).how == "ok"


def test_start_does_not_wait(tmp_path: Path) -> None:
    """Whoever waited for these imports would wait until they give up."""
    go, over = tmp_path / "go", tmp_path / "over"
    preload = (
        f"[time.sleep(0.01) for _ in range(1500) if not os.path.exists({str(go)!r})]; "
        f"open({str(over)!r}, 'w').close()"
    )
    with ForkServer(command=server_command(tmp_path, preload)) as server:
        server.start("echo")
        assert not over.exists()
        go.touch()
        first = server.server_pid
        assert run(server, "echo").answers[0]["parent"] == first


def test_a_server_that_died_is_replaced(server: ForkServer) -> None:
    run(server, "echo")
    first = server.server_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert run(server, "echo").how == "ok"
    assert server.server_pid != first


def test_a_server_that_hangs_is_killed_with_its_job(
    server: ForkServer, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkserver, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(forkserver, "CLOSE_SECONDS", 0.2)

    def stop(answer: isolate.Reply) -> None:
        assert server.server_pid is not None
        os.kill(server.server_pid, signal.SIGSTOP)

    end = server.run("brood", {"seconds": 60}, deadline_seconds=1.5, on_answer=stop)
    assert (end.how, end.exit_code) == ("timeout", -signal.SIGKILL)
    # The job's own session is gone; what it had put into another dies with nobody.
    assert (set(left_behind(mark)) - {end.answers[0]["children"][1]}) == set()
    os.kill(end.answers[0]["children"][1], signal.SIGKILL)
    os.waitpid(end.answers[0]["children"][1], 0)
    assert run(server, "echo").how == "ok"


def test_a_server_that_cannot_import(tmp_path: Path, mark: str) -> None:
    command = server_command(tmp_path, "raise ImportError('no torch here')")
    with (
        ForkServer(command=command) as server,
        pytest.raises(WorkerError, match=r"fork server failed.*no torch here"),
    ):
        run(server, "echo")
    assert left_behind(mark) == []


def test_a_server_that_does_not_answer(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkserver, "READY_SECONDS", 0.2)
    monkeypatch.setattr(forkserver, "CLOSE_SECONDS", 0.2)
    command = server_command(tmp_path, "time.sleep(60)")
    with (
        ForkServer(command=command) as server,
        pytest.raises(WorkerError, match=r"no answer within 0.2 s"),
    ):
        run(server, "echo")
    assert left_behind(mark) == []


def test_a_command_that_does_not_exist() -> None:
    with ForkServer(command=["/no/such/program"]) as server:
        with pytest.raises(WorkerError, match=r"could not be started.*/no/such/program"):
            run(server, "echo")
        assert server.server_pid is None


@pytest.mark.parametrize(
    ("preload", "reason"),
    [
        ("threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "threads': 2"),
        (
            "import types; sys.modules['torch'] = types.SimpleNamespace("
            "cuda=types.SimpleNamespace(is_initialized=lambda: True))",
            "cuda_initialized': True",
        ),
        # A library that talks to the driver itself: torch would not know.
        (
            "import ctypes, types; "
            "driver = types.SimpleNamespace(cuDeviceGetCount=lambda count: 0); "
            "server.ctypes = types.SimpleNamespace(CDLL=lambda name, mode: driver,"
            " byref=ctypes.byref, c_int=ctypes.c_int)",
            "cuda_initialized': True",
        ),
        # A context that another library made, as seen from the open device.
        (
            "server._open_files = lambda: ['/dev/null', '/dev/nvidia-uvm']",
            "cuda_device_open': True",
        ),
    ],
)
def test_where_a_fork_is_not_safe_jobs_are_fresh_processes(
    tmp_path: Path, mark: str, preload: str, reason: str
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(FRESH)
    fresh_command = [sys.executable, str(worker)]
    with ForkServer(command=server_command(tmp_path, preload), fresh_command=fresh_command) as s:
        for _ in range(2):
            assert run(s, "echo").answers == ({"parent": os.getpid()},)
            assert reason in s.unfit_reason
            assert (s.server_pid, s.last_fork) == (None, None)


def test_what_libraries_do_in_a_fork_does_not_disturb_the_job(tmp_path: Path, mark: str) -> None:
    """asyncio of Python 3.12 takes the wake-up descriptor of signals away."""
    preload = "os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))"
    with ForkServer(command=server_command(tmp_path, preload)) as server:
        num_files = [run(server, "look").answers[0]["num_files"] for _ in range(2)]
        assert server.unfit_reason == ""
    with ForkServer(command=server_command(tmp_path)) as server:
        assert num_files == [run(server, "look").answers[0]["num_files"]] * 2


def test_an_exception_in_the_caller_ends_the_job(command: list[str], mark: str) -> None:
    def fail(answer: isolate.Reply) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), ForkServer(command=command) as server:
        server.run("brood", {"seconds": 60}, deadline_seconds=60, on_answer=fail)
    assert left_behind(mark) == []
    assert list(Path(tempfile.gettempdir()).iterdir()) == []


def test_an_interrupt_while_the_server_imports(tmp_path: Path, mark: str) -> None:
    command = server_command(tmp_path, "time.sleep(60)")
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt), ForkServer(command=command) as server:
        run(server, "echo")
    timer.join()
    assert left_behind(mark) == []


def test_orphans_are_adopted_only_while_a_server_runs(command: list[str]) -> None:
    with ForkServer(command=command) as server:
        run(server, "echo")
    # The orphan's parent is somebody else by the time that it looks.
    script = "import os, time\nif os.fork() == 0:\n time.sleep(0.2)\n print(os.getppid())"
    orphan = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert int(orphan.stdout) != os.getpid()


def test_orphans_are_adopted_until_the_last_server_ends(command: list[str]) -> None:
    """A search closes what traces while what probes goes on."""
    first, second = ForkServer(command=command), ForkServer(command=command)
    with second:
        with first:
            run(first, "echo")
            run(second, "echo")
        assert adopt_orphans()
    assert not adopt_orphans(False)


NUM_ROUNDS = 4


def moment_seconds(rng: random.Random, seed: int, within: float) -> float:
    """A random moment of that round's share of the time, so that all rounds together cover it."""
    return (seed + rng.random()) / NUM_ROUNDS * within


@pytest.mark.parametrize("seed", range(NUM_ROUNDS))
@pytest.mark.parametrize("victim", ["job", "server"])
def test_killed_at_any_moment(
    command: list[str], mark: str, tmp_path: Path, victim: str, seed: int
) -> None:
    """Three jobs; one of them, or the server, is killed at a random moment from the very start on."""
    rng = random.Random(f"{victim} {seed}")
    delay_seconds = moment_seconds(rng, seed, 0.5)
    killed: list[int] = []
    with ForkServer(command=command) as server:
        killer = threading.Thread(target=kill_later, args=(server, victim, delay_seconds, killed))
        killer.start()
        ends = []
        for job in range(3):
            log = tmp_path / f"log-{job}"
            log.touch()
            end = run(server, "count", num=4, pause_seconds=0.03, log=str(log))
            ends.append(end)
            numbers = [answer["n"] for answer in end.answers]
            assert numbers == list(range(len(numbers)))
            # An answer that its job knew to be written is never lost.
            assert len(numbers) >= len(log.read_text().splitlines())
            if end.how == "ok":
                assert numbers == [0, 1, 2, 3]
            else:
                assert (end.how, end.exit_code) == ("crashed", -signal.SIGKILL)
            assert set(left_behind(mark)) <= {server.server_pid}
        killer.join()
        assert [end.how for end in ends].count("crashed") <= len(killed)
        if victim == "job" and killed:
            hit = [end for end in ends if end.how == "crashed" and end.answers]
            assert {end.answers[0]["pid"] for end in hit} <= set(killed)
        assert run(server, "echo").how == "ok"
    assert left_behind(mark) == []


def kill_later(server: ForkServer, victim: str, delay_seconds: float, killed: list[int]) -> None:
    time.sleep(delay_seconds)
    fork = server.last_fork
    pid = server.server_pid if victim == "server" else (fork.pid if fork is not None else None)
    if pid is not None:
        # The thread that reaps may be quicker.
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        killed.append(pid)


PARENT = """
import sys
from autotune.worker.client.forkserver import ForkServer
from autotune.worker.client.isolate import private_folder
try:
    with ForkServer(command=sys.argv[2:]) as server, private_folder() as folder:
        print(0, flush=True)
        while True:
            server.run(sys.argv[1], {"seconds": 60, "num": 3, "pause_seconds": 0.02,
                       "log": "/dev/null", "folder": folder}, deadline_seconds=60,
                       on_answer=lambda answer: print(answer["pid"], flush=True))
except KeyboardInterrupt:
    sys.exit(130)
"""


def start_parent(folder: Path, verb: str, command: list[str]) -> subprocess.Popen[str]:
    """A process that runs a job after the other until it is stopped; it has begun."""
    script = folder / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script), verb, *command],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "0\n"
    return parent


@pytest.mark.parametrize("seed", range(NUM_ROUNDS))
def test_parent_killed_at_any_moment(
    command: list[str], mark: str, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    verb = ("count", "brood")[seed % 2]
    with start_parent(tmp_path, verb, command) as parent:
        time.sleep(moment_seconds(rng, seed, 0.3))
        parent.kill()
    assert wait_until(lambda: left_behind(mark) == [])


@pytest.mark.parametrize("preload", ["pass", "time.sleep(60)"])
def test_folders_of_a_job_go_where_its_parent_was_killed(
    tmp_path: Path, mark: str, preload: str
) -> None:
    """While it runs, and while it waits for imports."""
    with start_parent(tmp_path, "brood", server_command(tmp_path, preload)) as parent:
        assert parent.stdout is not None
        if preload == "pass":
            parent.stdout.readline()
        # The request's, and the one that the request is in.
        assert wait_until(lambda: len(list(tmp_path.glob("autotune-*"))) == 2)
        time.sleep(0.3)
        parent.kill()
    assert wait_until(lambda: not list(tmp_path.glob("autotune-*")))
    assert wait_until(lambda: left_behind(mark) == [])


def test_ctrl_c_ends_job_and_server(command: list[str], mark: str, tmp_path: Path) -> None:
    with start_parent(tmp_path, "brood", command) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        parent.send_signal(signal.SIGINT)
        assert parent.wait(10) == 130
        assert left_behind(mark) == []


def test_parent_and_server_killed_at_once(command: list[str], mark: str, tmp_path: Path) -> None:
    with start_parent(tmp_path, "count", command) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        (server,) = (pid for pid, _, parent_pid in processes() if parent_pid == parent.pid)
        parent.send_signal(signal.SIGSTOP)
        os.kill(server, signal.SIGKILL)
        parent.kill()
    assert wait_until(lambda: left_behind(mark) == [])


def test_the_request_is_written_as_json(server: ForkServer) -> None:
    name = 'quote " newline \n \u2028 emoji \U0001f600'
    assert json.dumps(run(server, "echo", name=name).answers[0]["request"]["name"]) == json.dumps(
        name
    )
