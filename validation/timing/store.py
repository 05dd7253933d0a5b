"""How long a database of many probes takes to answer.

    python -m validation.timing.store [--probes 1000000] [--storage URL]

Fills a database with made-up probes (of 40 models, 5 machines of which 4 are near each other), 200
answered studies and 2,000 recommendations, then times what a search asks for: one look-up by key,
one that finds nothing, what is near 500 candidates, the latest recommendation, `studies list`.
Prints a table; the median of each, and the longest. Exits 1 when a look-up takes 50 ms or `studies list` a
second.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from autotune.records.fingerprint import Fingerprint
from autotune.records.measurement import Measurement, ProbeSpec
from autotune.space.config import TrainConfig, Workload
from autotune.store import schema, stored_answers
from autotune.store.optuna_study import open_study
from autotune.store.probe_key import ProbeKey, columns_of, probe_key
from autotune.store.probe_table import ProbeTable
from autotune.store.recommendations import Recommendation, RecommendationTable, row_of
from autotune.store.upgrade import open_engine
from tests.support.answers import answer, details

NUM_MODELS = 40
NUM_STUDIES = 200
NUM_RECOMMENDATIONS = 2000
NUM_CANDIDATES = 500
ROWS_AT_ONCE = 10_000
SPEC = ProbeSpec(task="causal-lm", backend="cuda", memory_budget_bytes=12 * 10**9, max_seconds=20.0)
MACHINES = tuple(
    Fingerprint(
        device=device,
        driver="580.1",
        cuda="13.0",
        versions=(("torch", torch), ("transformers", "5.23.0")),
        allocator="",
    )
    for device, torch in (
        ("NVIDIA A100", "2.10.0"),
        ("NVIDIA A100", "2.11.0"),
        ("NVIDIA A100", "2.12.0"),
        ("NVIDIA A100", "2.13.0"),
        ("NVIDIA GeForce RTX 4090", "2.13.0"),
    )
)
NOTHING = "find that there is none"
LOOK_UP_SECONDS = 0.05
LIST_SECONDS = 1.0


def model(number: int) -> dict[str, Any]:
    return {"model_type": "llama", "hidden_size": 64 * (number + 1)}


def measured(number: int, fingerprint: Fingerprint) -> Measurement:
    """Of the configuration of that number."""
    config = TrainConfig(
        method="lora",
        micro_batch_size=1 + number % 64,
        gradient_accumulation_steps=1 + number // 64 % 64,
        sequence_length=128 * (1 + number // 4096),
        precision="bf16-true",
        optimizer="adamw_torch_fused",
        lora_rank=8,
        lora_targets="all-linear",
    )
    return Measurement(
        config=config,
        spec=SPEC,
        fingerprint=fingerprint,
        outcome="ok",
        message="",
        micro_step_seconds=0.1 + number / 10**7,
        optimizer_step_seconds=0.01,
        spread=0.01,
        num_steps=10,
        peak_allocated_bytes=9 * 10**9,
        peak_reserved_bytes=10 * 10**9,
        nontorch_bytes=10**9,
        loss_is_finite=True,
        elapsed_seconds=20.0,
    )


def rows(num_probes: int) -> Iterator[dict[str, Any]]:
    """Each configuration on each machine, of each model."""
    made_at = datetime(2026, 1, 1)
    per_config = NUM_MODELS * len(MACHINES)
    models = [json.dumps(model(number), sort_keys=True) for number in range(NUM_MODELS)]
    for number in range(-(-num_probes // per_config)):
        for fingerprint in MACHINES:
            record = json.loads(json.dumps(measured(number, fingerprint).to_dict()))
            columns = columns_of(record)
            text = json.dumps(record)
            for which, config in enumerate(models):
                key = ProbeKey(
                    model=config,
                    near_key=columns["near_key"],
                    fingerprint=columns["fingerprint"],
                )
                yield {
                    **columns,
                    "key": key.digest,
                    "model_digest": key.model_digest,
                    "model": f"model-{which}",
                    "made_at": made_at + timedelta(seconds=number),
                    "outcome": "ok",
                    "stderr_tail": "",
                    "record": text,
                }


def fill(url: str, num_probes: int) -> int:
    """How many were added."""
    count = 0
    with open_engine(url) as engine:
        page: list[dict[str, Any]] = []
        with engine.begin() as connection:
            for row in rows(num_probes):
                page.append(row)
                if len(page) == ROWS_AT_ONCE:
                    connection.execute(schema.probes.insert(), page)
                    count += len(page)
                    page = []
            if page:
                connection.execute(schema.probes.insert(), page)
            connection.execute(
                schema.recommendations.insert(),
                [row_of(recommendation(n)) for n in range(NUM_RECOMMENDATIONS)],
            )
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("ANALYZE")
    for number in range(NUM_STUDIES):
        workload = Workload(model=f"model-{number}", memory_budget_bytes=12 * 10**9)
        with open_study(url, f"study-{number}", workload=workload, gpu="a100") as study:
            stored_answers.keep(study, answer(), details())
    return count + len(page)


def recommendation(number: int) -> Recommendation:
    """Of 100 questions, 20 nights each."""
    return Recommendation(
        question_key=f"{number % 100:064x}",
        question={"model": f"model-{number % 100}"},
        device=MACHINES[0].device,
        fingerprint=MACHINES[0],
        made_at=datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=number // 100),
        study="s",
        evidence="measured",
        tokens_per_second=1000.0,
        spread=0.01,
        peak_device_bytes=10**10,
        config=measured(number, MACHINES[0]).config.to_dict(),
        # As long as an answer is.
        result={"filler": "x" * 50_000},
        reason="unchanged",
    )


Times = list[tuple[float, float]]
"""(wall, CPU) seconds of each."""


def times(ask: Callable[[int], object], num_times: int) -> Times:
    taken = []
    for number in range(num_times):
        began, cpu_began = time.perf_counter(), time.process_time()
        ask(number)
        taken.append((time.perf_counter() - began, time.process_time() - cpu_began))
    return taken


def time_all(url: str, num_probes: int) -> dict[str, Times]:
    draw = random.Random(1)
    num_configs = num_probes // (NUM_MODELS * len(MACHINES))

    def key_of(number: int, machine: Fingerprint) -> ProbeKey:
        one = measured(number, machine)
        return probe_key(model(draw.randrange(NUM_MODELS)), one.config, SPEC, machine)

    new = dataclasses.replace(MACHINES[0], driver="590")
    with open_engine(url) as engine:
        table, answers = ProbeTable(engine), RecommendationTable(engine)

        def found(_: int) -> None:
            key = key_of(draw.randrange(num_configs), draw.choice(MACHINES))
            assert table.find(key, 10**10) is not None

        def missing(number: int) -> None:
            assert table.find(key_of(number, new), 10**10) is None

        def near(_: int) -> None:
            of_one = json.dumps(model(3), sort_keys=True)
            numbers = range(min(NUM_CANDIDATES, num_configs))
            keys = (key_of(number, new) for number in numbers)
            asked = {dataclasses.replace(key, model=of_one): key for key in keys}
            assert len(table.near(asked)) == len(numbers)

        def latest(number: int) -> None:
            assert answers.latest(f"{number % 100:064x}", MACHINES[0].device) is not None

        return {
            "find a probe": times(found, 200),
            NOTHING: times(missing, 200),
            f"what is near {NUM_CANDIDATES} candidates": times(near, 5),
            "the latest recommendation": times(latest, 100),
            "studies list": times(lambda _: stored_answers.listed(url), 5),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--probes", type=int, default=10**6)
    parser.add_argument("--storage", metavar="URL", help="An empty database [default: a file]")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        url = options.storage or f"sqlite:///{name}/autotune.db"
        began = time.perf_counter()
        count = fill(url, options.probes)
        print(f"{count:,} probes added in {time.perf_counter() - began:.0f} s", end="")
        file = Path(name) / "autotune.db"
        print(f", {file.stat().st_size / 10**9:.2f} GB" if file.exists() else "")
        taken = time_all(url, options.probes)
    print("\n| what                              | median, ms | of CPU, ms | longest, ms |")
    print("|-----------------------------------|-----------:|-----------:|------------:|")
    for what, pairs in taken.items():
        walls, cpus = zip(*pairs, strict=True)
        median, of_cpu = statistics.median(walls), statistics.median(cpus)
        print(
            f"| {what:33} | {1000 * median:10.2f} | {1000 * of_cpu:10.2f} | {1000 * max(walls):11.1f} |"
        )
    look_ups = [wall for what in ("find a probe", NOTHING) for wall, _ in taken[what]]
    listed = statistics.median(wall for wall, _ in taken["studies list"])
    sys.exit(statistics.median(look_ups) >= LOOK_UP_SECONDS or listed >= LIST_SECONDS)


if __name__ == "__main__":
    main()
