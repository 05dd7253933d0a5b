"""Kill whoever writes into the database, in the middle of it; what was said to be kept must be there.

    python -m tests.faults.kill_store [--kills 100] [--seed 1]

Three writers, in turn: one adds probes and says the number of each when it is kept, one upgrades a database
to a revision after the newest (tests/support/next_revision.py), one imports a file of studies. Each is
killed (SIGKILL) after a random time within what it takes undisturbed. After every kill the database is whole
(SQLite's integrity_check), opens, and holds every probe that was said to be kept, every old record, no study
of which a trial is missing. In the end the same command finishes what was killed. Exits 1 when anything of
this fails.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from autotune.records.fingerprint import Fingerprint
from autotune.records.measurement import Measurement, ProbeSpec
from autotune.space.config import TrainConfig, Workload
from autotune.store import schema
from autotune.store.optuna_study import open_study
from autotune.store.predicted_trials import record_estimates
from autotune.store.probe_key import probe_key
from autotune.store.probe_table import open_probes
from autotune.store.transfer.exporting import export
from autotune.store.transfer.importing import import_file
from autotune.store.upgrade import open_engine
from tests.support.answers import estimate as made_up_estimate
from tests.support.next_revision import next_revision

ROOT = Path(__file__).parents[2]
NUM_OLD_RECORDS = 2000
NUM_TRIALS = 25
MODEL = {"model_type": "llama"}
SPEC = ProbeSpec(task="causal-lm", backend="cpu", memory_budget_bytes=10**9, max_seconds=1.0)
HERE = Fingerprint(device="a CPU", driver="", cuda="", versions=(), allocator="")

Check = Callable[[Path, list[str]], str]
"""(the database, what the writer has said) -> what is wrong; empty where nothing is."""


def measured(number: int) -> Measurement:
    """Of a configuration of its own."""
    config = TrainConfig(
        method="full",
        micro_batch_size=number + 1,
        gradient_accumulation_steps=1,
        sequence_length=128,
        precision="bf16-true",
        optimizer="adamw_torch_fused",
    )
    return Measurement(
        config=config,
        spec=SPEC,
        fingerprint=HERE,
        outcome="ok",
        message="",
        micro_step_seconds=0.5,
        optimizer_step_seconds=0.25,
        peak_reserved_bytes=10**8,
        nontorch_bytes=0,
    )


def add(url: str) -> None:
    """Add probes for ever; say each when it is kept."""
    with open_probes(url) as table:
        for number in range(10**6):
            one = measured(number)
            table.add(probe_key(MODEL, one.config, SPEC, HERE), one)
            print(number, flush=True)


def upgrade(url: str) -> None:
    print("begun", flush=True)
    with next_revision(), open_engine(url):
        print("upgraded", flush=True)


def take_in(url: str) -> None:
    print("begun", flush=True)
    import_file(url, Path(url.removeprefix("sqlite:///")).with_suffix(".jsonl"))
    print("imported", flush=True)


def old_database(file: Path) -> None:
    with open_engine(f"sqlite:///{file}") as engine, engine.begin() as connection:
        rows = []
        for one in map(measured, range(NUM_OLD_RECORDS)):
            key = probe_key(MODEL, one.config, SPEC, HERE)
            rows.append(
                {
                    "key": key.digest,
                    "near_key": key.near_key,
                    "model_digest": key.model_digest,
                    "fingerprint": key.fingerprint,
                    "device": HERE.device,
                    "made_at": schema.utc_now(),
                    "outcome": one.outcome,
                    "record": json.dumps(one.to_dict()),
                }
            )
        connection.execute(schema.probes.insert(), rows)


def studies_file(folder: Path) -> str:
    """The lines of an export: studies of NUM_TRIALS trials each."""
    # Only trials are wanted: their figures are of no matter.
    url = f"sqlite:///{folder}/exported.db"
    for name in ("first", "second"):
        workload = Workload(model="m", memory_budget_bytes=10**9)
        with open_study(url, name, workload=workload, gpu="g") as study:
            estimates = (
                dataclasses.replace(made_up_estimate(), config=measured(number).config)
                for number in range(NUM_TRIALS)
            )
            record_estimates(study, estimates, budget_bytes=10**9)
    export(url, [], folder / "exported.jsonl")
    return (folder / "exported.jsonl").read_text(encoding="utf-8")


def is_whole(file: Path) -> str:
    with contextlib.closing(sqlite3.connect(file, timeout=30)) as connection:
        ((said,),) = connection.execute("PRAGMA integrity_check").fetchall()
    return "" if said == "ok" else f"integrity_check: {said}"


def all_kept(file: Path, said: list[str]) -> str:
    with open_probes(f"sqlite:///{file}") as table:
        for number in map(int, said):
            one = measured(number)
            if table.find(probe_key(MODEL, one.config, SPEC, HERE), 10**9) != one:
                return f"probe {number} was said to be kept, and is not there"
    return ""


def all_old(file: Path, _: list[str]) -> str:
    with contextlib.closing(sqlite3.connect(file, timeout=30)) as connection:
        ((count,),) = connection.execute("SELECT count(*) FROM autotune_probes").fetchall()
    if count != NUM_OLD_RECORDS:
        return f"{count} of {NUM_OLD_RECORDS} old records"
    # Opened by the next one, it is upgraded after all, and everything is found.
    with next_revision():
        return all_kept(file, ["0", str(NUM_OLD_RECORDS - 1)])


def no_half_study(file: Path, said: list[str]) -> str:
    url = f"sqlite:///{file}"
    with contextlib.closing(sqlite3.connect(file, timeout=30)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        counts = []
        if "trials" in tables:
            counts = connection.execute(
                "SELECT count(trials.trial_id) FROM studies LEFT JOIN trials USING (study_id) "
                "GROUP BY study_id"
            ).fetchall()
    if any(count != (NUM_TRIALS,) for count in counts):
        return f"studies of {counts} trials"
    missing = 2 - len(counts)
    if missing and "imported" in said:
        return f"{missing} studies were said to be imported, and are not there"
    found = import_file(url, file.with_suffix(".jsonl"))
    return "" if found["trial"] == missing * NUM_TRIALS else f"then {found} were imported"


WRITERS: dict[str, tuple[Callable[[str], None], Check]] = {
    "add": (add, all_kept),
    "upgrade": (upgrade, all_old),
    "import": (take_in, no_half_study),
}
LONGEST_SECONDS = {"add": 1.0, "upgrade": 1.5, "import": 2.0}
"""After the writer has begun to write; an undisturbed one takes about as long."""


def run(num_kills: int, seed: int, folder: Path) -> tuple[list[str], Counter[str]]:
    """(problems, how many were killed, by writer and by whether it had finished)."""
    draw = random.Random(seed)
    lines = studies_file(folder)
    problems: list[str] = []
    killed: Counter[str] = Counter()
    for number in range(num_kills):
        name = list(WRITERS)[number % len(WRITERS)]
        check = WRITERS[name][1]
        file = folder / f"killed{number}.db"
        if name == "upgrade":
            old_database(file)
        file.with_suffix(".jsonl").write_text(lines, encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "tests.faults.kill_store",
            "--write",
            name,
            f"sqlite:///{file}",
        ]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            time.sleep(draw.uniform(0.0, LONGEST_SECONDS[name]))
            process.kill()
            # A number that was cut off was not said.
            said = [line for line in (first + process.stdout.read()).split("\n")[:-1] if line]
        is_done = name != "add" and len(said) == 2
        killed[f"{name}, {'finished' if is_done else 'writing'}"] += 1
        if name == "add":
            problem = is_whole(file) or check(file, said)
        else:
            problem = (is_whole(file) if file.exists() else "") or check(file, said)
        if problem:
            problems.append(f"kill {number} of {name}: {problem}")
    return problems, killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        name, url = options.write
        WRITERS[name][0](url)
        return
    with tempfile.TemporaryDirectory() as name:
        problems, killed = run(options.kills, options.seed, Path(name))
    for what, count in sorted(killed.items()):
        print(f"{count:4} killed: {what}")
    print("problems:", *(problems or ["none"]), sep="\n  ")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
