"""A worker: which jobs it answers, and how it ends."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import answers
import pytest
import sqlalchemy
from here import command, workers
from tokenizers import Tokenizer, models, pre_tokenizers

from autotune import cli
from autotune.catalogue import gpus
from autotune.errors import HardwareError, NothingFitsError, StorageError
from autotune.jobs import asking, serving
from autotune.jobs.serving import Gone, Here, serve
from autotune.probe import fingerprint
from autotune.records.question import Question
from autotune.search.find import Finding
from autotune.store import jobs as module
from autotune.store import optuna_study, schema
from autotune.store.jobs import JobTable, WorkerMachine, open_jobs
from autotune.store.recommendations import open_recommendations

pytestmark = pytest.mark.worker

MACHINE = WorkerMachine(worker="me@here 1 2", card="CPU", capacity_bytes=10**9, fingerprint="f")
HERE = Here(backend="cpu", machine=MACHINE)
TINY = Path(__file__).parents[2] / "examples" / "tiny-llama.json"
SPACE = """
name: tiny
methods:
  full:
    micro_batch_size: [2, 4]
    precision: [bf16-true]
    optimizer: [adamw_torch_fused]
    activation_checkpointing: [none]
    attention: [eager]
"""
BASE = """
# of the first try
output_dir: out   # never looked at
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
optim: adamw_torch_fused
bf16: true
dataloader_num_workers: 1
my_hub_token: abcdefghij
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/autotune.db"


@pytest.fixture
def jobs(url: str) -> Iterator[JobTable]:
    with open_jobs(url) as table:
        yield table


def add(jobs: JobTable) -> int:
    options = Question(model="openai-community/gpt2", backend="cpu", gpu_mem="500MB")
    question, wanted = asking.prepare(options, note=print)
    return jobs.add(question, wanted, command="autotune find -x", asked_by="me@laptop")


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """What stands in for the search; it is called with its options and its listener."""

    def put(search: Callable[..., Any]) -> None:
        def find(options: Question, *, listener: Any, **_: Any) -> Finding:
            search(options, listener)
            return answers.finding(study="made-up", folder_name="made-up")

        monkeypatch.setattr(serving, "find", find)

    return put


def worked(url: str, *, once: bool = True) -> list[str]:
    said: list[str] = []
    serve(url, HERE, once=once, log=said.append)
    return said


def test_an_answer_goes_back_into_the_job(url: str, jobs: JobTable, finds: Any) -> None:
    def search(options: Question, listener: Any) -> None:
        assert (options.backend, options.gpu_mem) == ("cpu", "500MB")
        with listener.measuring(None, 20, 10) as heard:
            heard.on_probe(3, None, None)
            assert jobs.get(1).progress == "3 of at most 20 probes, nothing fits yet"

    finds(search)
    number = add(jobs)
    assert worked(url)[-1] == "job 1: done, study made-up"
    job = jobs.get(number)
    assert (job.state, job.study, job.exit_code) == ("done", "made-up", 0)
    assert job.result is not None
    assert job.result["best"]["config"] == answers.CONFIG.to_dict()
    assert worked(url) == []


@pytest.mark.parametrize(
    ("error", "exit_code"), [(NothingFitsError("Nothing fits."), 4), (ZeroDivisionError("x"), 1)]
)
def test_why_there_is_no_answer_goes_back_as_well(
    url: str, jobs: JobTable, finds: Any, error: Exception, exit_code: int
) -> None:
    def search(*_: Any) -> None:
        raise error

    finds(search)
    number = add(jobs)
    worked(url)
    assert (jobs.get(number).state, jobs.get(number).exit_code) == ("failed", exit_code)
    assert str(error) in jobs.get(number).problem


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), HardwareError("The card is taken."), StorageError("Full.")]
)
def test_what_says_nothing_of_the_question_gives_the_job_back(
    url: str, jobs: JobTable, finds: Any, error: BaseException
) -> None:
    def search(*_: Any) -> None:
        raise error

    finds(search)
    number = add(jobs)
    with pytest.raises(type(error)):
        worked(url, once=False)
    job = jobs.get(number)
    assert (job.state, job.worker, job.num_claims) == ("queued", "", 0)


def test_a_job_that_had_only_just_been_taken_goes_back_too(
    url: str, jobs: JobTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = add(jobs)
    claim = JobTable.claim

    def claim_and_stop(table: JobTable, machine: WorkerMachine) -> None:
        assert claim(table, machine) is not None
        raise KeyboardInterrupt

    monkeypatch.setattr(JobTable, "claim", claim_and_stop)
    with pytest.raises(KeyboardInterrupt):
        worked(url)
    assert jobs.get(number).state == "queued"


STOPPED_WHILE_IMPORTING = """
import signal
import sys
from autotune.cli import worker

signal.signal(signal.SIGTERM, worker._stop)
try:
    import slow
    signal.pause()
except KeyboardInterrupt:
    sys.exit("slow.text was " + getattr(sys.modules.get("slow"), "text", "not imported"))
"""
SLOW = """
import os
import signal

exec("os.kill(os.getpid(), signal.SIGTERM); text = 'imported'")
"""


def test_a_signal_while_something_is_imported_waits(tmp_path: Path) -> None:
    """CPython ends by SIGINT where a KeyboardInterrupt passed through exec, whatever caught it."""
    (tmp_path / "main.py").write_text(STOPPED_WHILE_IMPORTING)
    (tmp_path / "slow.py").write_text(SLOW)
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "main.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr.strip()) == (1, "slow.text was imported")


def cut_off(url: str) -> None:
    """End every connection to that database, as a server that restarts does."""
    engine = sqlalchemy.create_engine(url)
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql(
                "select pg_terminate_backend(pid) from pg_stat_activity "
                "where datname = current_database() and pid != pg_backend_pid()"
            )
    finally:
        engine.dispose()


def test_a_database_that_restarts_costs_a_worker_neither_its_job_nor_its_life(
    postgres_url: str, finds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.01)
    searched: list[str] = []

    def search(*_: Any) -> None:
        searched.append("again")
        if len(searched) < 3:
            with open_jobs(postgres_url) as table:
                table.get(1)
                cut_off(postgres_url)
                table.get(1)
        if len(searched) == 4:
            raise KeyboardInterrupt

    finds(search)
    said: list[str] = []
    with open_jobs(postgres_url) as jobs:
        add(jobs), add(jobs)
    with pytest.raises(KeyboardInterrupt):
        serve(postgres_url, HERE, once=False, log=said.append)
    assert said.count("job 1: given back, what was measured is kept") == 2
    with open_jobs(postgres_url) as jobs:
        assert [(job.state, job.num_claims) for job in jobs.listed()] == [
            ("done", 1),
            ("queued", 0),
        ]


def test_a_database_that_keeps_failing_ends_the_worker(
    url: str, jobs: JobTable, finds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optuna_study, "GRACE_SECONDS", 0)
    searched: list[str] = []

    def search(*_: Any) -> None:
        searched.append("again")
        away = sqlalchemy.exc.OperationalError("select", {}, OSError("connection refused"))
        raise StorageError("It is away") from away

    finds(search)
    add(jobs)
    with pytest.raises(StorageError):
        worked(url, once=False)
    assert len(searched) == 3
    assert jobs.get(1).state == "queued"


@pytest.mark.parametrize("is_own", [True, False])
def test_a_job_that_is_cancelled_is_broken_off(
    url: str, jobs: JobTable, finds: Any, monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    monkeypatch.setattr(optuna_study, "HEARTBEAT_SECONDS", 0.05)
    seen: list[type[BaseException]] = []

    def search(*_: Any) -> None:
        jobs.cancel(number)
        try:
            time.sleep(60)
        except BaseException as error:
            seen.append(type(error))
            raise

    finds(search)
    number = add(jobs)
    if not is_own:
        assert jobs.claim(dataclasses.replace(MACHINE, worker="another")) is not None
    before = signal.getsignal(signal.SIGUSR1)
    started = time.monotonic()
    assert "not ours any more" in worked(url)[-1]
    assert time.monotonic() - started < 30  # half of what it would have taken
    assert seen == [Gone]
    assert jobs.get(number).state == "cancelled"
    assert signal.getsignal(signal.SIGUSR1) == before


def test_who_has_no_job_helps_with_one_that_runs(url: str, jobs: JobTable, finds: Any) -> None:
    finds(lambda *_: None)
    number = add(jobs)
    other = dataclasses.replace(MACHINE, worker="another")
    assert jobs.claim(other) is not None
    assert worked(url)[-1] == "job 1: nothing is left to help with"
    # The answer is its own worker's.
    assert (jobs.get(number).state, jobs.get(number).worker) == ("running", "another")
    assert jobs.finish(number, "another", study="s", result={}, problem="")


def test_what_this_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    card = gpus.find_gpu("rtx-4090")
    monkeypatch.setattr(
        fingerprint, "fingerprint_here", lambda *_: answers.measurement().fingerprint
    )
    monkeypatch.setattr(gpus, "detect", lambda: [card])
    found = serving.here("auto")
    assert (found.backend, found.machine.card) == ("cuda", card.name)
    assert found.machine.capacity_bytes == card.capacity_bytes
    assert serving.here("cpu").machine.card == "CPU"
    monkeypatch.setattr(gpus, "detect", list)
    assert serving.here("auto").backend == "cpu"
    with pytest.raises(HardwareError, match="needs a CUDA GPU"):
        serving.here("cuda")


def test_the_backends_of_the_command() -> None:
    from autotune.cli import worker
    from autotune.records.question import BACKENDS

    assert ("auto", *BACKENDS) == worker.BACKENDS


def worker_process(folder: Path, url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "autotune",
            "worker",
            "--storage",
            url,
            "--backend",
            "cpu",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )


def num_probes(jobs: JobTable) -> int:
    with jobs._engine.connect() as connection:
        count = sqlalchemy.select(sqlalchemy.func.count()).select_from(schema.probes)
        return int(connection.execute(count).scalar_one())


def said(process: subprocess.Popen[str], part: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if part in line:
            return
    pytest.fail(f"it ended without having said {part!r}")


def make_tokenizer(folder: Path) -> None:
    """One that knows a word."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "word": 1}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def texts_in(folder: str) -> dict[str, str]:
    """Without what says how long it took, and where it is."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in files
        if path.name not in ("result.json", "report.html")
    }


@pytest.mark.slow  # real probes: a few processes that import torch
def test_a_worker_that_is_stopped_gives_the_job_back_and_the_next_one_answers_it_as_find_would(
    tmp_path: Path,
    url: str,
    jobs: JobTable,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    laptop, machine = tmp_path / "laptop", tmp_path / "machine"
    (laptop / "tiny").mkdir(parents=True)
    machine.mkdir()
    shutil.copy(TINY, laptop / "tiny" / "config.json")
    (laptop / "space.yaml").write_text(SPACE)
    (laptop / "run.yaml").write_text(BASE)
    make_tokenizer(laptop / "tiny")
    rows = [json.dumps({"body": "word " * count}) for count in (10, 20, 30, 48) * 20]
    (laptop / "data.jsonl").write_text("\n".join(rows))
    monkeypatch.chdir(laptop)

    def main(*arguments: str) -> dict[str, Any]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([*arguments, "--storage", url, "--json"])
        assert not ended.value.code
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    asked = (
        "find --model tiny --base run.yaml --dataset data.jsonl --text-field body --seq-len 64 "
        "--backend cpu --gpu-mem 30MB --space space.yaml --method full --effort quick --confirm-steps 0"
    )
    assert main(*asked.split(), "--enqueue") == {"job": 1, "state": "queued"}
    with worker_process(machine, url) as process:
        said(process, "job 1: taken")
        # The base is measured, and what could be faster is about to be.
        deadline = time.monotonic() + 90
        while not num_probes(jobs) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    assert main("jobs", "show", "1")["state"] == "queued"
    with workers.at_work():
        once = command("worker", "--storage", url, "--backend", "cpu", "--once", cwd=machine)
    assert once.returncode == 0, once.stderr
    job = main("jobs", "show", "1")
    assert (job["state"], job["result"]["evidence"]) == ("done", "measured")
    # What was measured before it was stopped is not measured again.
    assert job["result"]["measured"]["num_reused"] >= 1
    assert [each["job"] for each in main("jobs", "list")["jobs"]] == [1]
    assert list(machine.iterdir()) == []
    # Here, where the samples are, the same question has the same answer, files and place in history.
    there = main("jobs", "show", "1", "--out", "there")
    here = main(*asked.split(), "--out", "here")
    assert there["workload"] == here["workload"]
    assert here["workload"]["lengths"]["num_tokens"] == 20 * (10 + 20 + 30 + 48)
    # 2,160 tokens, 8 x 64 of them at a time.
    assert here["measured"]["train_steps"] == job["result"]["measured"]["train_steps"] == 5
    assert texts_in("there") == texts_in("here")
    assert "my_hub_token: abcdefghij" in texts_in("there")["yours/run.yaml"]
    with open_recommendations(url) as table:
        (one, other) = table.everything()
    assert one.question_key == other.question_key
    assert one.question == other.question
