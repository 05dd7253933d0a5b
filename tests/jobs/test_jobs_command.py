"""`find --enqueue` and `autotune jobs`: what is typed, what is printed, what is written."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import answers
import pytest

from autotune import cli
from autotune.cli import jobs as command
from autotune.records.answer import stored_record
from autotune.store.jobs import JobTable, WorkerMachine, open_jobs

pytestmark = pytest.mark.worker

ASKED = ("find", "--model", "openai-community/gpt2", "--gpu", "rtx-4090", "--enqueue")
MACHINE = WorkerMachine(
    worker="me@gpu-1 7 9", card="NVIDIA RTX 4090", capacity_bytes=10**12, fingerprint="f"
)


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


Main = Callable[..., Ran]


@pytest.fixture
def main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Main:
    """Run a command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "POLL_SECONDS", 0.05)

    def invoke(*arguments: str) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        out, err = capsys.readouterr()
        return Ran(int(ended.value.code or 0), " ".join(out.split()), " ".join(err.split()))

    return invoke


@pytest.fixture
def jobs(main: Main) -> Iterator[JobTable]:  # in its folder
    with open_jobs("sqlite:///studies/autotune.db") as table:
        yield table


def finish(jobs: JobTable, study: str = "on-4090") -> None:
    job = jobs.claim(MACHINE)
    assert job is not None
    result = stored_record(answers.answer())
    assert jobs.finish(job.number, MACHINE.worker, study=study, result=result, problem="")


def soon(act: Callable[[], None]) -> threading.Thread:
    def later() -> None:
        time.sleep(0.3)
        act()

    thread = threading.Thread(target=later)
    thread.start()
    return thread


def test_a_job_says_how_to_follow_it_and_does(main: Main, jobs: JobTable) -> None:
    asked = main(*ASKED)
    assert asked.code == 0
    assert "Job 1 waits for a worker with NVIDIA RTX 4090" in asked.out
    assert "autotune jobs show 1" in asked.out
    shown = main("jobs", "show", "1")
    assert "1, queued" in shown.out
    assert "autotune find --model openai-community/gpt2 --gpu rtx-4090 --enqueue" in shown.out
    assert jobs.claim(MACHINE) is not None
    assert jobs.beat(1, MACHINE.worker, "3 of at most 20 probes")
    listed = main("jobs", "list").out
    assert "running" in listed
    assert "me@gpu-1" in listed
    (told,) = json.loads(main("jobs", "list", "--json").out)["jobs"]
    assert (told["job"], told["state"], told["progress"]) == (
        1,
        "running",
        "3 of at most 20 probes",
    )
    assert told["model"] == "openai-community/gpt2"
    assert told["options"] == {"model": "openai-community/gpt2", "gpu": "rtx-4090"}
    assert main("jobs", "cancel", "1").code == 0
    again = main("jobs", "cancel", "1")
    assert again.code == 2
    assert "It is cancelled" in again.err


def test_the_answer_that_is_waited_for_is_drawn_and_written(
    main: Main, jobs: JobTable, tmp_path: Path
) -> None:
    thread = soon(lambda: finish(jobs))
    found = main(*ASKED, "--wait", "--out", "here")
    thread.join()
    assert found.code == 0, found.err
    assert "Job 1 is queued" in found.err
    assert "answer" in found.out
    assert "on-4090 in" in found.out
    assert (tmp_path / "here" / "train.py").exists()
    shown = main("jobs", "show", "1")
    assert "1, done" in shown.out
    assert "autotune jobs show 1 --out FOLDER" in shown.out
    assert main("jobs", "show", "1", "--out", "later").code == 0
    written = {path.name for path in (tmp_path / "here").rglob("*")}
    assert {path.name for path in (tmp_path / "later").rglob("*")} == written
    as_json = json.loads(main("jobs", "show", "1", "--json").out)
    assert as_json["result"]["best"]["config"] == answers.CONFIG.to_dict()


def test_a_name_of_ones_own_becomes_a_folder_as_find_makes_it(
    main: Main, jobs: JobTable, tmp_path: Path
) -> None:
    thread = soon(lambda: finish(jobs, "My study/1"))
    found = main(*ASKED, "--wait", "--study", "My study/1")
    thread.join()
    assert found.code == 0, found.err
    assert (tmp_path / "studies" / "my-study-1" / "train.py").exists()


def test_what_has_no_answer_yet_has_no_files(main: Main) -> None:
    assert main(*ASKED).code == 0
    shown = main("jobs", "show", "1", "--out", "here")
    assert shown.code == 2
    assert "Job 1 has no answer yet. It is queued" in shown.err
    assert not Path("here").exists()


def test_a_job_without_an_answer_ends_the_command_as_find_would_have(
    main: Main, jobs: JobTable
) -> None:
    def fail() -> None:
        assert jobs.claim(MACHINE) is not None
        jobs.fail(1, MACHINE.worker, problem="Nothing fits.", exit_code=4)

    thread = soon(fail)
    found = main(*ASKED, "--wait")
    thread.join()
    assert (found.code, found.out) == (4, "")
    assert "error: Nothing fits." in found.err


def test_a_cancelled_job_is_no_longer_waited_for(main: Main, jobs: JobTable) -> None:
    thread = soon(lambda: jobs.cancel(1))
    found = main(*ASKED, "--wait")
    thread.join()
    assert found.code == 2
    assert "Job 1 was cancelled" in found.err


def test_who_stops_waiting_leaves_the_job_where_it_is(
    main: Main, jobs: JobTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", interrupted)
    found = main(*ASKED, "--wait")
    assert found.code == 130
    assert "autotune jobs show 1" in found.err
    assert jobs.get(1).state == "queued"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("find", "--model", "gpt2", "--gpu", "rtx-4090", "--wait"), "--wait goes with --enqueue"),
        ((*ASKED, "--base", "x.yaml"), "x.yaml cannot be read. No such file or directory"),
        ((*ASKED, "--space", "nowhere"), "no search space"),
        (("jobs", "show", "7"), "There is no job 7"),
        (("jobs", "show", "0"), "0 is not in the range"),
        (("jobs", "list", "--storage", "nonsense"), "cannot be read"),
        (("worker", "--storage", "sqlite:////nowhere/x/y.db", "--backend", "tpu"), "tpu"),
    ],
)
def test_what_cannot_be_used_is_said(main: Main, arguments: tuple[str, ...], message: str) -> None:
    found = main(*arguments)
    assert found.code in (2, 6)
    assert message in found.err
    assert found.out == ""


def test_no_jobs(main: Main) -> None:
    found = main("jobs", "list")
    assert (found.code, found.out) == (0, "")
    assert "There are no jobs" in found.err


def test_a_password_is_not_repeated(main: Main, postgres_url: str) -> None:
    url = f"{postgres_url}&password=secret"
    found = main(*ASKED, "--storage", url)
    assert found.code == 0, found.err
    assert "secret" not in found.out + found.err
    shown = main("jobs", "show", "1", "--storage", url)
    assert "secret" not in shown.out + shown.err


@pytest.mark.parametrize("verb", ["show", "cancel"])
@pytest.mark.parametrize("number", ["0", "2147483648", "99999999999999999999", "one"])
def test_a_number_that_no_job_can_have_is_refused(main: Main, verb: str, number: str) -> None:
    ran = main("jobs", verb, number)
    assert ran.code == 2
    assert number in ran.err
    assert "internal error" not in ran.err


@pytest.mark.parametrize("as_json", [False, True])
def test_an_answer_whose_files_cannot_be_written_is_printed(
    main: Main, jobs: JobTable, as_json: bool
) -> None:
    main(*ASKED)
    finish(jobs)
    Path("taken").write_text("a file", encoding="utf-8")
    ran = main("jobs", "show", "1", "--out", "taken", *(["--json"] if as_json else []))
    assert ran.code == 6
    assert "The files cannot be written to taken" in ran.err
    if as_json:
        assert json.loads(ran.out)["files"] == []
    else:
        assert "4,096 tokens/s" in ran.out


@pytest.mark.parametrize(("verb", "code"), [("list", 0), ("show", 2), ("cancel", 2)])
def test_who_looks_for_jobs_in_the_wrong_folder_makes_no_database_there(
    main: Main, tmp_path: Path, verb: str, code: int
) -> None:
    ran = main("jobs", verb, *(["1"] if code else []))
    assert ran.code == code
    assert ("There is no database sqlite:///studies/autotune.db" in ran.err) == bool(code)
    assert list(tmp_path.iterdir()) == []
