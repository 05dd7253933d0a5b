"""Cut the power while somebody writes into the database, on a disk that keeps no more than it must.

    python -m tests.faults.power_cut [--cuts 300] [--seed 1]

Needs a C compiler. Three writers: one searches in studies, probe after probe, and says each when it is kept;
one upgrades a database to a revision after the newest; one imports a file of studies. What each does to its
files is recorded, call by call (file_operations.c). Then the power is cut at random moments: of what no fsync
has covered by then any part may be missing, torn or there without what came before it (torn_disk.py says
exactly what is assumed). After every cut the database is whole (SQLite's integrity_check), opens, and holds
every probe and every answer that was said to be kept, every old record, no study of which a trial is
missing; the same command goes on, and makes none of those probes again. A database that is upgraded has
the copy of what it was beside it, whole.

Optuna's own tables do not wait for the disk, so the last trials may go: they are counted, and no problem.
That the disk is a hard one is shown by the first writer with a database that waits less than ours does: it
loses probes, and then is damaged. Exits 1 when anything was lost otherwise, or when nothing was lost there.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import datetime
import functools
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.catalogue.models import ModelSource
from autotune.probe.fleet.one_card import OneCard
from autotune.probe.loop import Plan, search
from autotune.probe.run_one import Prober
from autotune.records.estimate import Estimate
from autotune.records.measurement import Measurement
from autotune.space.config import TrainConfig, Workload
from autotune.store import database, schema
from autotune.store.optuna_study import open_study
from autotune.store.probe_key import probe_key
from autotune.store.probe_table import ProbeTable, open_probes
from autotune.store.recommendations import Recommendation, open_recommendations
from autotune.worker.client.isolate import WorkerEnd
from tests.faults import torn_disk
from tests.faults.kill_store import (
    HERE,
    MODEL,
    NUM_OLD_RECORDS,
    ROOT,
    SPEC,
    all_old,
    is_whole,
    measured,
    no_half_study,
    old_database,
    studies_file,
    take_in,
)
from tests.support.answers import estimate as made_up_estimate
from tests.support.ends import ended
from tests.support.next_revision import NEXT, next_revision

NAME = "studies/autotune.db"
"""Of the database, within the folder that is recorded; the folder in between is made by the writer."""
BUDGET_BYTES = SPEC.memory_budget_bytes
MODELS = tuple(f"m{number}" for number in range(8))
NUM_ALONE = 2
"""Of the models: searched by one command each, which closes the database; the others by one that keeps it
open, so that its log grows, is copied into the database meanwhile, and begins again."""
POOL = [
    dataclasses.replace(
        measured(0).config,
        micro_batch_size=2**power,
        gradient_accumulation_steps=16 // 2**power,
        activation_checkpointing=every,
        optimizer=optimizer,
    )
    for power in range(5)
    for every in (0, 1, 2)
    for optimizer in ("adamw_torch_fused", "adamw_torch", "adafactor")
]
MAX_PROBES = 24

Say = Callable[[str], None]


def source(model: str) -> ModelSource:
    return ModelSource(
        name=model,
        config={**MODEL, "name": model},
        origin="file",
        path=Path(f"{model}.json"),
    )


def seen(config: TrainConfig) -> Measurement:
    """What a probe of it measures: never quite what was predicted."""
    off = random.Random(POOL.index(config)).uniform(0.8, 1.25)
    seconds = 0.1 * config.micro_batch_size**0.5 * off
    return dataclasses.replace(
        measured(0),
        config=config,
        micro_step_seconds=seconds,
        optimizer_step_seconds=0.1,
        num_steps=5,
        spread=0.01,
        loss_is_finite=True,
    )


@functools.cache
def an_estimate() -> Estimate:
    """Of anything."""
    return made_up_estimate()


def predicted(config: TrainConfig) -> Estimate:
    return dataclasses.replace(
        an_estimate(),
        config=config,
        micro_step_seconds=0.1 * config.micro_batch_size**0.5,
        optimizer_step_seconds=0.1,
        peak_reserved_bytes=10**8,
        nontorch_bytes=0,
    )


@dataclass(slots=True)
class Server:
    """Stands where the processes that measure are started, and notes what they were asked for."""

    probed: list[int] = field(default_factory=list)

    def run(self, verb: str, request: Mapping[str, Any], **_: object) -> WorkerEnd:
        if verb == "fingerprint":
            return ended({"fingerprint": dataclasses.asdict(HERE)})
        config = TrainConfig(**request["train_config"])
        self.probed.append(POOL.index(config))
        return ended({"measurement": seen(config).to_dict()})


class SayingTable(ProbeTable):
    """Says of each probe that it is kept, as soon as `add` has returned."""

    say: Say

    def add(self, *args: Any, **kwargs: Any) -> None:
        super().add(*args, **kwargs)
        measurement: Measurement = args[1]
        self.say(f"probe {kwargs['model']} {POOL.index(measurement.config)}")


def search_in(url: str, model: str, say: Say) -> list[int]:
    """Search in the study of that model; what was measured for it."""
    server = Server()
    workload = Workload(model=model, memory_budget_bytes=BUDGET_BYTES)
    plan = Plan(
        pool=[predicted(config) for config in POOL],
        base=POOL[0],
        baseline=None,
        budget_bytes=BUDGET_BYTES,
        max_probes=MAX_PROBES,
    )
    with (
        open_study(url, model, workload=workload, gpu="CPU", searches=True) as study,
        open_probes(url) as opened,
    ):
        table = SayingTable(opened._engine)
        table.say = say
        prober = Prober(OneCard(server), table, source(model), SPEC)  # type: ignore[arg-type]
        best = search(study, plan, prober, on_probe=lambda *_: say(f"trial {model}")).best
    with open_recommendations(url) as answers:
        answers.add(answer(model, best))
        say(f"answer {model}")
    return server.probed


def answer(model: str, best: Measurement) -> Recommendation:
    return Recommendation(
        question_key=model,
        question={"model": model},
        device="a CPU",
        fingerprint=HERE,
        made_at=datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        study=model,
        evidence="measured",
        tokens_per_second=best.tokens_per_second,
        spread=best.spread,
        peak_device_bytes=best.peak_device_bytes,
        config=best.config.to_dict(),
        result={},
        reason="first",
    )


def write_searches(url: str, num_models: int) -> None:
    models = MODELS[:num_models]
    for model in models[:NUM_ALONE]:
        search_in(url, model, lambda line: print(line, flush=True))
    with open_probes(url):
        for model in models[NUM_ALONE:]:
            search_in(url, model, lambda line: print(line, flush=True))


def write_upgrade(url: str, _: int) -> None:
    """As a search does: Optuna's tables first, whose log is there then, and ours beside them."""
    workload = Workload(model="m", memory_budget_bytes=BUDGET_BYTES)
    with (
        next_revision(),
        open_study(url, "m", workload=workload, gpu="CPU"),
        open_probes(url),
    ):
        print("upgraded", flush=True)


def write_import(url: str, _: int) -> None:
    take_in(url)


def check_searches(file: Path, said: list[str]) -> tuple[str, Counter[str]]:
    kept: dict[str, set[int]] = {model: set() for model in MODELS}
    counts: Counter[str] = Counter()
    for line in said:
        what, model, *which = line.split()
        counts[f"{what}s said to be kept" if what != "trial" else "trials told"] += 1
        if what == "probe":
            kept[model].add(int(which[0]))
    if said and not file.exists():
        return "there is no database any more", counts
    url = f"sqlite:///{file}"
    with open_probes(url) as table:
        for model, numbers in kept.items():
            for number in numbers:
                key = probe_key(source(model).config, POOL[number], SPEC, HERE)
                if table.find(key, BUDGET_BYTES) != seen(POOL[number]):
                    return (
                        f"probe {number} of {model} was said to be kept, and is not there",
                        counts,
                    )
    with open_recommendations(url) as answers:
        for model in MODELS:
            if f"answer {model}" in said and answers.latest(model, "a CPU") is None:
                return f"the answer of {model} was said to be kept, and is not there", counts
    counts["trials lost"] += counts["trials told"] - num_trials(file)
    latest = max((model for model in MODELS if kept[model]), default=MODELS[0])
    again = kept[latest].intersection(search_in(url, latest, lambda _: None))
    return f"{len(again)} probes of {latest} were made again" if again else "", counts


def num_trials(file: Path) -> int:
    """That have ended."""
    with contextlib.closing(sqlite3.connect(file)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        if "trials" not in tables:
            return 0
        ended_trials = "SELECT count(*) FROM trials WHERE state IN ('COMPLETE', 'PRUNED', 'FAIL')"
        ((count,),) = connection.execute(ended_trials).fetchall()
    return int(count)


def check_upgrade(file: Path, said: list[str]) -> tuple[str, Counter[str]]:
    with contextlib.closing(sqlite3.connect(file)) as connection:
        ((revision,),) = connection.execute(f"SELECT version_num FROM {schema.VERSION_TABLE}")
    is_upgraded = revision == NEXT
    copies = [path for path in file.parent.iterdir() if path.name.endswith(f".before-{NEXT}")]
    counts = Counter({"upgraded": int(is_upgraded), "copies": len(copies)})
    if said and not is_upgraded:
        return "it was said to be upgraded, and is not", counts
    if is_upgraded and not copies:
        return "it is upgraded, and there is no copy of what it was", counts
    for kept in copies:
        problem = is_whole(kept) or old_records_in(kept)
        if problem:
            return f"{kept.name}: {problem}", counts
    return all_old(file, said), counts


def old_records_in(file: Path) -> str:
    with contextlib.closing(sqlite3.connect(file)) as connection:
        ((count,),) = connection.execute("SELECT count(*) FROM autotune_probes").fetchall()
    return "" if count == NUM_OLD_RECORDS else f"{count} of {NUM_OLD_RECORDS} old records"


def check_import(file: Path, said: list[str]) -> tuple[str, Counter[str]]:
    return no_half_study(file, said), Counter({"said to be imported": "imported" in said})


@dataclass(frozen=True, kw_only=True, slots=True)
class Writer:
    write: Callable[[str, int], None]
    """(the address, how many models to search for)"""
    check: Callable[[Path, list[str]], tuple[str, Counter[str]]]
    """(the database, what was said) -> what is wrong, empty where nothing is; and what was counted."""


WRITERS = {
    "search": Writer(write=write_searches, check=check_searches),
    "upgrade": Writer(write=write_upgrade, check=check_upgrade),
    "import": Writer(write=write_import, check=check_import),
}

OURS = "as it is"
WAITS = {
    # how a database waits for the disk: pragmas of all connections, and of those of our own tables
    OURS: (database.SQLITE_PRAGMAS, database.DURABLE_PRAGMA),
    "probes waiting no longer than trials": (database.SQLITE_PRAGMAS, "synchronous=NORMAL"),
    "never waiting": (["synchronous=OFF", "journal_mode=WAL"], "synchronous=OFF"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """What one writer did, and said."""

    name: str
    disk: torn_disk.Disk
    """Before it began."""
    operations: Sequence[torn_disk.Operation]


def record(
    name: str, folder: Path, library: Path, *, wait: str = OURS, num_models: int = len(MODELS)
) -> Recording:
    """Let the writer write, in a folder that is made."""
    written, log = folder / "written", folder / "record"
    file = written / NAME
    written.mkdir(parents=True)
    if name != "search":
        file.parent.mkdir()
    if name == "upgrade":
        old_database(file)
    if name == "import":
        file.with_suffix(".jsonl").write_text(studies_file(folder), encoding="utf-8")
    disk = torn_disk.Disk(written)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.faults.power_cut",
            "--write",
            name,
            wait,
            str(num_models),
            f"sqlite:///{file}",
        ],
        cwd=ROOT,
        env=torn_disk.environment(library, folder=written, record=log),
        stdout=subprocess.DEVNULL,
        check=True,
    )
    recording = Recording(name=name, disk=disk, operations=torn_disk.read(log))
    after = copy.deepcopy(disk)
    for operation in recording.operations:
        after.do(operation)
    files = (path for path in written.rglob("*") if path.is_file())
    found = {str(path.relative_to(written)): path.read_bytes() for path in files}
    assert after.now() == found, "something was done to the files that was not recorded"
    return recording


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """After all cuts."""

    problems: list[str]
    counts: Counter[str]


def cut(recording: Recording, num_cuts: int, seed: int, folder: Path) -> Found:
    """Cut the writer's power so many times; what the disk is left with is written into the folder."""
    draw = random.Random(seed)
    moments = Counter(drawn_moments(recording.operations, num_cuts, draw))
    disk = copy.deepcopy(recording.disk)
    problems, counts = [], Counter[str]()
    for number, operation in enumerate(recording.operations, start=1):
        disk.do(operation)
        for repeat in range(moments[number]):
            left = folder / f"cut{number}-{repeat}"
            for path, content in disk.after_cut(draw).items():
                # That one is made anew, from the log, by whoever opens the database.
                if not path.endswith("-shm"):
                    (left / path).parent.mkdir(parents=True, exist_ok=True)
                    (left / path).write_bytes(content)
            problem, counted = judge(WRITERS[recording.name], left / NAME, disk.said)
            counts += counted
            if problem:
                problems.append(f"after operation {number}: {problem}")
            shutil.rmtree(left, ignore_errors=True)
    return Found(problems=problems, counts=counts)


def drawn_moments(
    operations: Sequence[torn_disk.Operation], num_cuts: int, draw: random.Random
) -> Iterator[int]:
    """How many operations are done: half of them just before or after one that is no write, some are the
    end."""
    rare = [number for number, one in enumerate(operations, start=1) if one.kind != "w"]
    for number in range(num_cuts):
        if number % 20 == 0:
            yield len(operations)
        elif number % 2:
            yield max(1, draw.choice(rare) - draw.randint(0, 1))
        else:
            yield draw.randint(1, len(operations))


def judge(writer: Writer, file: Path, said: list[str]) -> tuple[str, Counter[str]]:
    try:
        problem = is_whole(file) if file.exists() else ""
        if problem:
            return problem, Counter()
        return writer.check(file, said)
    except Exception as error:  # Of a damaged database anything may be read, and raised.
        return f"{type(error).__name__}: {error}", Counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cuts", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        name, wait, num_models, url = options.write
        database.SQLITE_PRAGMAS, database.DURABLE_PRAGMA = WAITS[wait]
        WRITERS[name].write(url, int(num_models))
        return
    num_cuts = options.cuts // len(WRITERS)
    is_bad = False
    print(f"SQLite {sqlite3.sqlite_version}, seed {options.seed}")
    with tempfile.TemporaryDirectory() as temporary:
        library = torn_disk.build(Path(temporary))
        cases = [(name, OURS) for name in WRITERS]
        cases += [("search", wait) for wait in WAITS if wait != OURS]
        for name, wait in cases:
            folder = Path(temporary) / f"{name} {wait}"
            recording = record(name, folder, library, wait=wait)
            found = cut(recording, num_cuts, options.seed, folder)
            print(
                f"{name}, {wait}: {num_cuts} cuts within {len(recording.operations)} operations, "
                f"{len(found.problems)} with a problem",
                *(f"{count:5} {what}" for what, count in sorted(found.counts.items())),
                *found.problems[:5],
                *["..."] * (len(found.problems) > 5),
                sep="\n  ",
                flush=True,
            )
            is_bad |= bool(found.problems) == (wait == OURS)
    sys.exit(is_bad)


if __name__ == "__main__":
    main()
