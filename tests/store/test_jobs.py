"""Questions that wait for other machines: who may take one, and what becomes of it."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from autotune.errors import ConfigError, StorageError
from autotune.store.database import explained, parse_url
from autotune.store.jobs import (
    MAX_CLAIMS,
    Job,
    JobTable,
    WantedMachine,
    WorkerMachine,
    may_pass,
    open_jobs,
    patiently,
)

QUESTION = {
    "schema_version": 1,
    "options": {"model": "gpt2"},
    "model": {"name": "gpt2"},
    "space": None,
}
CARD = "NVIDIA GeForce RTX 4090"
HERE = WorkerMachine(worker="one", card=CARD, capacity_bytes=24 * 10**9, fingerprint="f")
OTHER = dataclasses.replace(HERE, worker="other")


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/autotune.db"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def jobs(url: str) -> Iterator[JobTable]:
    with open_jobs(url) as table:
        yield table


def add(jobs: JobTable, *, card: str = CARD, budget_bytes: int | None = None) -> int:
    wanted = WantedMachine(card=card, budget_bytes=budget_bytes)
    return jobs.add(QUESTION, wanted, command="autotune find", asked_by="me@laptop")


def claimed(jobs: JobTable, machine: WorkerMachine = HERE) -> Job:
    job = jobs.claim(machine)
    assert job is not None
    return job


def fall_silent(jobs: JobTable, number: int) -> None:
    table = jobs._table
    with jobs._engine.begin() as connection:
        long_ago = sqlalchemy.func.date("2026-01-01")
        if connection.dialect.name == "postgresql":
            long_ago = sqlalchemy.cast("2026-01-01", sqlalchemy.DateTime)  # type: ignore[assignment]
        values: dict[str, Any] = {"heartbeat_at": long_ago}
        if connection.dialect.name == "sqlite":
            values = {"heartbeat_at": sqlalchemy.text("'2026-01-01 00:00:00.000000'")}
        connection.execute(table.update().where(table.c.id == number).values(values))


def test_a_job_goes_to_one_machine_alone_and_in_its_turn(jobs: JobTable) -> None:
    first, second = add(jobs), add(jobs)
    assert [claimed(jobs).number, claimed(jobs, OTHER).number] == [first, second]
    assert jobs.claim(HERE) is None
    job = jobs.get(first)
    assert (job.state, job.worker, job.num_claims) == ("running", "one", 1)
    assert (job.asked_by, job.question) == ("me@laptop", QUESTION)
    assert job.heartbeat_at is not None
    # Both by the same clock, to a second: SQLite's has no more.
    assert abs((job.heartbeat_at - job.asked_at).total_seconds()) < 60


def test_a_row_that_another_claims_at_this_moment_is_skipped(url: str, jobs: JobTable) -> None:
    if url.startswith("sqlite"):
        pytest.skip("SQLite has no row locks")
    first, second = add(jobs), add(jobs)
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as other:
        other.execute(sqlalchemy.text("SELECT 1 FROM autotune_jobs WHERE id = 1 FOR UPDATE"))
        assert claimed(jobs).number == second
    engine.dispose()
    assert claimed(jobs).number == first


@pytest.mark.parametrize(
    ("wanted", "is_taken"),
    [
        ({"card": "CPU"}, False),
        ({"card": "NVIDIA A100-SXM4-80GB"}, False),
        ({"budget_bytes": 24 * 10**9}, True),
        ({"budget_bytes": 24 * 10**9 + 1}, False),
    ],
)
def test_a_machine_takes_what_it_can_answer(
    jobs: JobTable, wanted: dict[str, Any], is_taken: bool
) -> None:
    add(jobs, **wanted)
    assert (jobs.claim(HERE) is not None) is is_taken


def test_what_a_silent_worker_has_is_taken_over(jobs: JobTable) -> None:
    number = add(jobs)
    claimed(jobs)
    assert jobs.claim(OTHER) is None
    fall_silent(jobs, number)
    assert claimed(jobs, OTHER).num_claims == 2
    # The first one is not dead after all: it learns it, and cannot spoil anything.
    assert not jobs.beat(number, "one", "still here")
    assert not jobs.finish(number, "one", study="s", result={}, problem="")
    assert not jobs.fail(number, "one", problem="no", exit_code=5)
    assert jobs.give_back("one") == []
    assert (jobs.get(number).state, jobs.get(number).worker) == ("running", "other")
    assert jobs.beat(number, "other", "3 of 20 probes")
    assert jobs.get(number).progress == "3 of 20 probes"


def test_a_job_that_nobody_survives_is_not_tried_for_ever(jobs: JobTable) -> None:
    number = add(jobs)
    for _ in range(MAX_CLAIMS):
        assert claimed(jobs).number == number
        fall_silent(jobs, number)
    assert jobs.claim(OTHER) is None
    job = jobs.get(number)
    assert (job.state, job.exit_code) == ("failed", 5)
    assert "3 workers fell silent while they ran it" in job.problem


def test_a_job_that_is_given_back_is_free_at_once_and_as_often_as_one_likes(jobs: JobTable) -> None:
    number = add(jobs)
    for _ in range(MAX_CLAIMS + 1):
        assert claimed(jobs).num_claims == 1
        assert jobs.give_back("one") == [number]
    assert jobs.get(number).heartbeat_at is None


def test_a_job_ends_with_its_answer_or_with_why_there_is_none(jobs: JobTable) -> None:
    done, failed = add(jobs), add(jobs)
    for number in (done, failed):
        assert claimed(jobs).number == number
    assert jobs.finish(done, "one", study="s-measured", result={"evidence": "measured"}, problem="")
    assert jobs.fail(failed, "one", problem="Nothing fits.", exit_code=4)
    first, second = jobs.listed()
    assert (first.state, first.study, first.result) == (
        "done",
        "s-measured",
        {"evidence": "measured"},
    )
    assert (second.state, second.problem, second.exit_code) == ("failed", "Nothing fits.", 4)
    assert first.ended_at is not None
    for number in (done, failed):
        with pytest.raises(ConfigError, match="has ended already"):
            jobs.cancel(number)


def test_a_cancelled_job_is_nobodys(jobs: JobTable) -> None:
    waiting, running = add(jobs), add(jobs)
    jobs.cancel(waiting)
    assert claimed(jobs).number == running
    jobs.cancel(running)
    assert not jobs.beat(running, "one", "")
    assert not jobs.is_running(running)
    assert jobs.claim(HERE) is None
    assert {job.state for job in jobs.listed()} == {"cancelled"}


def test_only_machines_alike_help(jobs: JobTable) -> None:
    number = add(jobs)
    assert jobs.to_join(OTHER, leave_out=set()) is None
    claimed(jobs)
    helped = jobs.to_join(OTHER, leave_out=set())
    assert helped is not None
    assert helped.number == number
    assert jobs.to_join(OTHER, leave_out={number}) is None
    for unlike in ({"fingerprint": "another driver"}, {"card": "CPU"}):
        assert jobs.to_join(dataclasses.replace(OTHER, **unlike), leave_out=set()) is None
    fall_silent(jobs, number)
    assert jobs.to_join(OTHER, leave_out=set()) is None


def test_a_number_that_no_job_has(jobs: JobTable) -> None:
    for call in (jobs.get, jobs.cancel):
        with pytest.raises(ConfigError, match="no job 7"):
            call(7)


def test_a_database_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_text("no database at all, " * 10)
    with pytest.raises(StorageError, match="damaged"), open_jobs(f"sqlite:///{tmp_path}/x.db"):
        pass


@pytest.mark.parametrize(
    ("error", "is_waited_for"),
    [
        (sqlite3.OperationalError("database is locked"), True),
        (sqlite3.OperationalError("attempt to write a readonly database"), False),
        (OSError("server closed the connection unexpectedly"), True),
    ],
)
def test_who_asks_a_database_that_is_away_waits_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_waited_for: bool
) -> None:
    monkeypatch.setattr("autotune.store.jobs.AGAIN_SECONDS", 0.01)
    refused = sqlalchemy.exc.OperationalError("select", {}, error)
    answers: list[Exception | int] = [refused, refused, 7]
    said: list[str] = []

    def ask() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    if not is_waited_for:
        with pytest.raises(sqlalchemy.exc.OperationalError):
            patiently(ask, said.append)
        assert said == []
        return
    assert patiently(ask, said.append) == 7
    assert said == ["The database is away; waiting for it, at most 60 s."]
    monkeypatch.setattr("autotune.store.optuna_study.GRACE_SECONDS", -1)
    answers = [refused]
    with pytest.raises(sqlalchemy.exc.OperationalError):
        patiently(ask, said.append)


def test_a_connection_that_was_lost_may_come_back(postgres_url: str) -> None:
    engines = [sqlalchemy.create_engine(postgres_url) for _ in range(2)]
    others = "from pg_stat_activity where datname = current_database() and pid != pg_backend_pid()"

    def lose() -> None:
        with explained(parse_url(postgres_url)), engines[0].begin() as connection:
            connection.exec_driver_sql("select 1")
            with engines[1].connect() as other:
                other.exec_driver_sql(f"select pg_terminate_backend(pid) {others}")
            # As Optuna does, which takes the first error for a query with too many variables.
            with contextlib.suppress(sqlalchemy.exc.OperationalError):
                connection.exec_driver_sql("select 2")
            connection.exec_driver_sql("select 3")

    try:
        with pytest.raises(StorageError, match="The connection to its server was lost") as said:
            lose()
    finally:
        for engine in engines:
            engine.dispose()
    assert may_pass(said.value)


def test_a_job_has_ended_once_nobody_will_touch_it_again(jobs: JobTable) -> None:
    job = jobs.get(add(jobs))
    ended = {"queued": False, "running": False, "done": True, "failed": True, "cancelled": True}
    for state, has_ended in ended.items():
        assert dataclasses.replace(job, state=state).has_ended is has_ended


def test_times_of_a_job_are_in_utc(jobs: JobTable) -> None:
    add(jobs)
    job = claimed(jobs)
    assert job.heartbeat_at is not None
    for at in (job.asked_at, job.heartbeat_at):
        assert at.utcoffset() == datetime.timedelta(0)
        assert abs((datetime.datetime.now(datetime.UTC) - at).total_seconds()) < 600


def test_a_database_that_no_file_can_be_says_why_not() -> None:
    with pytest.raises(StorageError, match=r"cannot be used\. File name too long"):
        parse_url(f"sqlite:////tmp/{'x' * 300}.db")
