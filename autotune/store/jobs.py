"""Questions that wait for a machine that can answer them: table `autotune_jobs`.

| from            | to        | by                                                                   |
|-----------------|-----------|----------------------------------------------------------------------|
|                 | queued    | `find --enqueue`                                                     |
| queued          | running   | a worker with the card it wants; rows that others claim are skipped  |
| running         | running   | another worker, when the first was silent for GRACE_SECONDS          |
| running         | queued    | its worker, which was told to stop                                   |
| running         | done      | its worker, with the result                                          |
| running         | failed    | its worker, with the problem; whoever finds MAX_CLAIMS silent ones   |
| queued, running | cancelled | `jobs cancel`                                                        |

Silence is told by the database's clock, whatever the machines' say.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from autotune.common import json_records
from autotune.errors import ConfigError
from autotune.store import optuna_study
from autotune.store.database import damage_explained
from autotune.store.upgrade import open_engine

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection, Engine, Row, Select

T = TypeVar("T")

QUEUED, RUNNING, DONE, FAILED, CANCELLED = "queued", "running", "done", "failed", "cancelled"
MAX_CLAIMS = 3
"""How many workers may take a job and fall silent before the job is failed. [judgement] Workers are lost by
chance; a job that so many did not survive is what killed them."""
PROGRESS_CHARS = 200
AGAIN_SECONDS = 1.0
"""Time between two attempts to reach a database that is away."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedMachine:
    """The machine that a question asks for."""

    card: str
    """Name of the card in the catalogue; "CPU" for probes on a CPU."""
    budget_bytes: int | None
    """Memory budget of the question; None: all of the card's memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerMachine:
    """A worker's machine: who it is and what card it has."""

    worker: str
    """A name that tells the worker apart from any other, and tells people where it is."""
    card: str
    capacity_bytes: int
    fingerprint: str
    """Digest of the machine's fingerprint: equal where measurements may be compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One question, and what has become of it."""

    number: int
    state: str
    card: str
    budget_bytes: int | None
    question: dict[str, Any]
    command: str
    asked_by: str
    asked_at: datetime.datetime
    """Time of the question; like all times here in UTC, with its time zone."""
    worker: str
    heartbeat_at: datetime.datetime | None
    num_claims: int
    """How often a worker took it and did not give it back."""
    progress: str
    ended_at: datetime.datetime | None
    study: str
    result: dict[str, Any] | None
    """The object of `find --json`, once it is done."""
    problem: str
    exit_code: int | None
    """The exit code that `find` would have ended with; None until the job has ended."""

    @property
    def has_ended(self) -> bool:
        return self.state not in (QUEUED, RUNNING)

    def to_dict(self) -> dict[str, object]:
        """An entry of `jobs list --json`; the model's configuration and the result left out."""
        times = {name: _iso(getattr(self, name)) for name in _TIMES}
        left_out = ("number", "question", "result")
        names = (f.name for f in dataclasses.fields(self) if f.name not in left_out)
        fields = {name: getattr(self, name) for name in names}
        asked = {"model": self.question["model"]["name"], "options": self.question["options"]}
        return {"job": self.number, **fields, **times, **asked}


_TIMES = ("asked_at", "heartbeat_at", "ended_at")


class JobTable:
    """The jobs of one database."""

    def __init__(self, engine: Engine) -> None:
        from autotune.store.schema import jobs

        self._engine = engine
        self._table = jobs

    def add(
        self, question: Mapping[str, Any], wanted: WantedMachine, *, command: str, asked_by: str
    ) -> int:
        """Put a question into the queue and return its number."""
        from autotune.store.schema import utc_now

        row = {
            **dataclasses.asdict(wanted),
            "state": QUEUED,
            "question": json.dumps(question),
            "command": command,
            "asked_by": asked_by,
            "asked_at": utc_now(),
        }
        with self._engine.begin() as connection:
            added = connection.execute(self._table.insert().values(row))
            assert added.inserted_primary_key is not None
            return int(added.inserted_primary_key[0])

    def get(self, number: int) -> Job:
        """The job of that number.

        Raises ConfigError for a number that no job has.
        """
        with damage_explained(self._engine.url), self._engine.connect() as connection:
            row = connection.execute(
                self._table.select().where(self._table.c.id == number)
            ).one_or_none()
            if row is None:
                raise ConfigError(f"There is no job {number}", remedy="See `autotune jobs list`")
            return _job(row)

    def listed(self) -> list[Job]:
        """All jobs, the oldest first."""
        with damage_explained(self._engine.url), self._engine.connect() as connection:
            return [
                _job(row)
                for row in connection.execute(self._table.select().order_by(self._table.c.id))
            ]

    def claim(self, machine: WorkerMachine) -> Job | None:
        """Take the oldest job that the machine can answer and no live worker runs; None where there is none.

        A job that MAX_CLAIMS workers did not survive is failed on the way.
        """
        table = self._table
        while True:
            with self._engine.begin() as connection:
                stale = (table.c.state == RUNNING) & ~self._is_alive(connection)
                free = self._for(machine).where((table.c.state == QUEUED) | stale)
                # On SQLite, which has no row locks, the update's condition tells.
                row = connection.execute(free.limit(1).with_for_update(skip_locked=True)).first()
                if row is None:
                    return None
                values: dict[str, Any] = {
                    "state": RUNNING,
                    "worker": machine.worker,
                    "fingerprint": machine.fingerprint,
                    "heartbeat_at": _now(connection),
                    "num_claims": row.num_claims + 1,
                    "progress": "",
                }
                if row.num_claims >= MAX_CLAIMS:
                    problem = f"{MAX_CLAIMS} workers fell silent while they ran it, the last was {row.worker}"
                    values = self._ended(FAILED, problem=problem, exit_code=5)
                is_same = (table.c.id == row.id) & (table.c.num_claims == row.num_claims)
                changed = connection.execute(
                    table.update().where(is_same & (table.c.state == row.state)).values(values)
                )
                if changed.rowcount and values["state"] == RUNNING:
                    return _job(
                        connection.execute(table.select().where(table.c.id == row.id)).one()
                    )

    def to_join(self, machine: WorkerMachine, *, leave_out: set[int]) -> Job | None:
        """The oldest running job of machines like this one, for a worker to join; None without one."""
        table = self._table
        with self._engine.connect() as connection:
            running = self._for(machine).where(
                table.c.state == RUNNING,
                table.c.fingerprint == machine.fingerprint,
                table.c.id.not_in(leave_out),
                self._is_alive(connection),
            )
            row = connection.execute(running.limit(1)).first()
        return None if row is None else _job(row)

    def beat(self, number: int, worker: str, progress: str) -> bool:
        """Record a sign of life and the progress of a job; return whether the job still is that worker's."""
        with self._engine.begin() as connection:
            values = {"heartbeat_at": _now(connection), "progress": progress[:PROGRESS_CHARS]}
            return self._update(connection, number, worker, values)

    def is_running(self, number: int) -> bool:
        with self._engine.connect() as connection:
            state = self._table.c.state
            query = self._table.select().with_only_columns(state)
            return connection.execute(query.where(self._table.c.id == number)).scalar() == RUNNING

    def give_back(self, worker: str) -> list[int]:
        """Return the jobs of a worker that stops to the queue; their numbers.

        The next worker can take them at once.
        """
        table = self._table
        is_held = (table.c.worker == worker) & (table.c.state == RUNNING)
        values = {
            "state": QUEUED,
            "worker": "",
            "fingerprint": "",
            "heartbeat_at": None,
            "num_claims": table.c.num_claims - 1,
        }
        with self._engine.begin() as connection:
            held = connection.execute(table.select().with_only_columns(table.c.id).where(is_held))
            numbers = list(held.scalars())
            connection.execute(table.update().where(is_held).values(values))
        return numbers

    def finish(
        self, number: int, worker: str, *, study: str, result: Mapping[str, Any], problem: str
    ) -> bool:
        """Keep the answer of a job; return whether the job still was that worker's."""
        values = self._ended(DONE, problem=problem, exit_code=0)
        values |= {"study": study, "result": json.dumps(result)}
        with self._engine.begin() as connection:
            return self._update(connection, number, worker, values)

    def fail(self, number: int, worker: str, *, problem: str, exit_code: int) -> bool:
        """Keep why a job has no answer; return whether the job still was that worker's."""
        with self._engine.begin() as connection:
            values = self._ended(FAILED, problem=problem, exit_code=exit_code)
            return self._update(connection, number, worker, values)

    def cancel(self, number: int) -> None:
        """Cancel a job; a worker that runs it stops at its next heartbeat.

        Raises ConfigError where the job has ended.
        """
        table = self._table
        with self._engine.begin() as connection:
            is_open = (table.c.id == number) & table.c.state.in_([QUEUED, RUNNING])
            values = self._ended(CANCELLED, problem="", exit_code=None)
            if connection.execute(table.update().where(is_open).values(values)).rowcount:
                return
        raise ConfigError(f"Job {number} has ended already", why=f"It is {self.get(number).state}")

    def _for(self, machine: WorkerMachine) -> Select[Any]:
        """Select the jobs that the machine can answer, the oldest first."""
        table = self._table
        fits = table.c.budget_bytes.is_(None) | (table.c.budget_bytes <= machine.capacity_bytes)
        return table.select().where(table.c.card == machine.card, fits).order_by(table.c.id)

    def _is_alive(self, connection: Connection) -> ColumnElement[bool]:
        silent_since = _now(connection) - datetime.timedelta(seconds=optuna_study.GRACE_SECONDS)
        return self._table.c.heartbeat_at >= silent_since

    def _update(
        self, connection: Connection, number: int, worker: str, values: Mapping[str, Any]
    ) -> bool:
        table = self._table
        is_ours = (table.c.id == number) & (table.c.worker == worker) & (table.c.state == RUNNING)
        return bool(connection.execute(table.update().where(is_ours).values(values)).rowcount)

    @staticmethod
    def _ended(state: str, *, problem: str, exit_code: int | None) -> dict[str, Any]:
        from autotune.store.schema import utc_now

        ended = {"state": state, "problem": problem, "exit_code": exit_code}
        return {**ended, "ended_at": utc_now(), "progress": ""}


def patiently(ask: Callable[[], T], say: Callable[[str], None]) -> T:
    """Return what `ask` returns, calling it again while the database is away.

    The wait is announced once, through `say`. Raises the database's own exception after GRACE_SECONDS, and at
    once an exception that waiting does not mend.
    """
    began = None
    while True:
        try:
            return ask()
        except Exception as error:
            now = time.monotonic()
            began = began or now
            if not may_pass(error) or now - began > optuna_study.GRACE_SECONDS:
                raise
            if began == now:
                say(
                    f"The database is away; waiting for it, at most {optuna_study.GRACE_SECONDS} s."
                )
            time.sleep(AGAIN_SECONDS)


def may_pass(error: BaseException | None) -> bool:
    """Whether this exception of a database may pass by itself: it restarts, or is locked."""
    import sqlalchemy

    while error is not None:
        if isinstance(error, sqlalchemy.exc.PendingRollbackError):
            return True  # Of a connection that was lost before.
        if isinstance(error, sqlalchemy.exc.OperationalError):
            return not isinstance(error.orig, sqlite3.Error) or "is locked" in str(error.orig)
        error = error.__cause__
    return False


def _now(connection: Connection) -> datetime.datetime:
    """The time of the database's clock in UTC, without a time zone, as the tables hold it."""
    import sqlalchemy

    now = connection.execute(sqlalchemy.select(sqlalchemy.func.now())).scalar_one()
    assert isinstance(now, datetime.datetime)
    return now if now.tzinfo is None else now.astimezone(datetime.UTC).replace(tzinfo=None)


def _job(row: Row[Any]) -> Job:
    values = {str(name): value for name, value in row._mapping.items()}
    values["number"] = values.pop("id")
    del values["fingerprint"]
    values["question"] = json_records.mapping(
        json.loads(values["question"]), "the question of a job"
    )
    for part in ("model", "options"):
        json_records.mapping(values["question"].get(part), f"the {part} of a job's question")
    if "name" not in values["question"]["model"]:
        raise ValueError("the model of a job's question has no name")
    if values["result"] is not None:
        values["result"] = json_records.mapping(json.loads(values["result"]), "the result of a job")
    for name in _TIMES:
        at = values[name]
        values[name] = None if at is None else at.replace(tzinfo=datetime.UTC)
    # A column of SQLite holds values of any type.
    return msgspec.convert(values, Job)


def _iso(at: datetime.datetime | None) -> str | None:
    return None if at is None else at.isoformat()


@contextmanager
def open_jobs(url: str) -> Iterator[JobTable]:
    """The table of the database at that address, created where it is missing.

    Raises StorageError for everything that the database refuses, inside the `with` block too.
    """
    with open_engine(url) as engine:
        yield JobTable(engine)
