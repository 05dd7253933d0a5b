"""The memory that batches of varied lengths need beside what is predicted at full length. No card.

    python -m tools.no_card --gpu H200 --padded -- CUDA_PYTHON -m validation.no_card_room --seed 1 --num 20 \\
        --out studies/no-card/room.jsonl

Configurations of real models, drawn as validation.no_card_fuzz draws them, whose batches are padded, grouped
or filled by tokens, with samples of one of the kinds of LENGTHS. The budget is what the prediction takes and
a share of what it reserves besides: of SHARES the least with which about 100 micro-batches end is found from
the middle. A JSON line each: {"key", "model", "num_layers", "lengths", "prediction", "tried": [{"share",
"outcome", "message", "num_varied_retries", "varied_device_bytes"}]}; what the file has is not run again. No
time means anything (tools/no_card).

--compare: the file's rows against steps of such lengths as autotune.predict.varied_steps replays them, on any
machine, as the table of studies/no-card/README.md; nothing is run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from autotune.catalogue.gpus import find_gpu
from autotune.catalogue.models import ModelSource
from autotune.common import json_records
from autotune.errors import AutotuneError
from autotune.predict.estimator import Estimator
from autotune.predict.tracing import trace_all
from autotune.probe.fleet.one_card import OneCard
from autotune.probe.run_one import Prober
from autotune.records.estimate import Estimate, TraceSpec
from autotune.records.measurement import Measurement, ProbeSpec, varied_steps
from autotune.space.config import METHODS, TrainConfig
from autotune.space.lengths import BY_TOKENS, Lengths
from autotune.store.trace_cache import TraceCache
from autotune.worker.client.forkserver import ForkServer
from tools.gpu_check.cases import TASK
from tools.gpu_check.check import Nothing, card_and_budget, say, shown
from tools.gpu_check.records import Record, Records, read_records
from validation import no_card_fuzz

SHARES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
BATCHINGS = ("padded", "padded", "grouped", BY_TOKENS)
"""Padded batches are the Trainer's default."""
LEAST_TOKENS = 1024
"""Of a micro-batch at full length: fewer hold next to nothing beside the weights."""


def _short(longest: int) -> dict[int, int]:
    """Half of the samples are shorter than a quarter of the longest, few are nearly as long."""
    return {longest * n // 100: round(1e4 / n**1.5) for n in range(4, 101)}


def _of_two_kinds(longest: int) -> dict[int, int]:
    """Questions of a line and whole documents."""
    return {longest // 20: 50, longest // 10: 30, longest * 9 // 10: 12, longest: 8}


def _cut_off(longest: int) -> dict[int, int]:
    """Two samples of three are cut off at the longest."""
    return {longest // 3: 10, longest // 2: 12, longest * 3 // 4: 12, longest: 66}


LENGTHS = {"mostly short": _short, "of two kinds": _of_two_kinds, "mostly cut off": _cut_off}
ANY_LENGTH = "any length"


def percentiles(kind: str, longest: int) -> tuple[int, ...]:
    """Lengths at 101 percentiles; none where any is as likely."""
    if kind == ANY_LENGTH:
        return ()
    counts = LENGTHS[kind](longest)
    total = sum(counts.values())
    return Lengths.of(counts, longest, num_samples=total, longest=longest).percentiles


def drawn(
    chance: random.Random, options: argparse.Namespace, capability: tuple[int, int] | None
) -> tuple[ModelSource, TrainConfig]:
    """One that breaks no rule."""
    methods = options.method or [name for name in METHODS if name != "peft"]
    while True:
        source = no_card_fuzz.cut(
            chance.choice(options.model or no_card_fuzz.MODELS), options.layers
        )
        config = no_card_fuzz.draw(chance, options.only, methods, source.num_layers)
        config = dataclasses.replace(config, batching=chance.choice(BATCHINGS))
        tokens = config.micro_batch_size * config.sequence_length
        if (
            tokens >= LEAST_TOKENS
            and not config.torch_empty_cache_steps
            and no_card_fuzz.is_valid(config, source, TASK, capability)
        ):
            return source, config


def tried(ends: Callable[[float], Measurement]) -> dict[float, Measurement]:
    """How runs end by their share, from the middle of SHARES to the least that holds."""
    seen: dict[float, Measurement] = {}
    low, high = -1, len(SHARES)
    while high - low > 1:
        middle = (low + high) // 2
        seen[SHARES[middle]] = ends(SHARES[middle])
        if seen[SHARES[middle]].outcome == "ok":
            high = middle
        else:
            low = middle
    return seen


def run(
    probes: ForkServer, source: ModelSource, spec: ProbeSpec, estimate: Estimate, share: float
) -> Measurement:
    """Train under a budget of what is predicted and a share of what it reserves besides."""
    budget_bytes = estimate.peak_device_bytes + round(share * estimate.peak_reserved_bytes)
    capped = dataclasses.replace(spec, memory_budget_bytes=budget_bytes)
    table: Any = Nothing()
    return Prober(OneCard(probes), table, source, capped).measure(estimate.config)


def row_of(share: float, seen: Measurement) -> dict[str, Any]:
    return {
        "share": share,
        "outcome": seen.outcome,
        "message": seen.message,
        "num_varied_steps": seen.num_varied_steps,
        "num_varied_retries": seen.num_varied_retries,
        "full_length_device_bytes": seen.full_length_device_bytes,
        "varied_device_bytes": seen.varied_device_bytes,
    }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bracket:
    """The largest share that memory ran out with, and the least that was enough; None: none was seen."""

    failed: float | None
    held: float | None

    @classmethod
    def of(cls, holds: Mapping[float, bool]) -> Bracket:
        return cls(
            failed=max((share for share, is_held in holds.items() if not is_held), default=None),
            held=min((share for share, is_held in holds.items() if is_held), default=None),
        )

    def cells(self) -> list[str]:
        return ["" if share is None else f"{share:.0%}" for share in (self.failed, self.held)]


def of_run(record: Record) -> Bracket:
    """What a run needed. What came to no end in time says nothing."""
    outcomes = {each["share"]: each["outcome"] for each in record["tried"]}
    return Bracket.of(
        {share: end == "ok" for share, end in outcomes.items() if end in ("ok", "oom")}
    )


def of_replay(record: Record) -> Bracket:
    """What the same steps need where they are replayed."""
    card = find_gpu("H200")
    config = json_records.read(TrainConfig, record["prediction"]["config"])
    source = no_card_fuzz.cut(record["model"], record["num_layers"])
    length = config.sequence_length
    traces = trace_all(source, TASK, length, card, [TraceSpec.of(config)], cache=TraceCache())
    estimator = Estimator(traces, card, memory_budget_bytes=card.capacity_bytes)
    reserved_bytes = record["prediction"]["peak_reserved_bytes"]
    lengths = percentiles(record["lengths"], length)
    return Bracket.of(
        {
            share: estimator.goes_on(config, lengths, round((1 + share) * reserved_bytes))
            for share in SHARES
        }
    )


def compare(records: Iterable[Record]) -> None:
    """Print a row for each record, those in which the replay holds too early first."""
    rows = []
    for record in records:
        ran = of_run(record)
        if ran == Bracket(failed=None, held=None):
            continue
        replayed = of_replay(record)
        failed = -1.0 if ran.failed is None else ran.failed
        is_early = replayed.held is not None and replayed.held <= failed
        model, _, rest = record["key"].partition(f" {record['num_layers']} ")
        what = rest.rpartition(" 0.0 ")[0]
        cells = [model, what, record["lengths"], *ran.cells(), *replayed.cells()]
        rows.append((not is_early, -failed, cells))
    print("| model | configuration | lengths | ran out with | went on with | replay: out | on |")
    print("|---|---|---|---:|---:|---:|---:|")
    for _, _, cells in sorted(rows):
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=20, help="configurations")
    parser.add_argument("--layers", type=int, default=8, help="of each model, at most [8]; 0: all")
    parser.add_argument("--model", action="append", help="one of these alone, or a family")
    parser.add_argument("--method", action="append", help="one of these alone")
    parser.add_argument("--only", action="append", default=[], help="a setting that differs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compare", action="store_true", help="with the replay, and run nothing")
    options = parser.parse_args()
    if options.compare:
        compare(read_records(options.out))
        return
    card, card_bytes = card_and_budget("cuda", None)
    chance, records = random.Random(options.seed), Records(options.out)
    with ForkServer() as tracers, ForkServer() as probes:
        for _ in range(options.num):
            source, config = drawn(chance, options, card.compute_capability)
            kind = chance.choice((ANY_LENGTH, *LENGTHS))
            key = f"{source.name} {options.layers} {shown(config)} {config.lora_dropout} {kind}"
            if key in records:
                continue
            length = config.sequence_length
            try:
                traces = trace_all(
                    source, TASK, length, card, [TraceSpec.of(config)], server=tracers
                )
                estimate = Estimator(traces, card, memory_budget_bytes=card_bytes).estimate(config)
            except AutotuneError as error:
                say(f"not predicted: {error}: {key}")
                continue
            most_bytes = estimate.peak_device_bytes + SHARES[-1] * estimate.peak_reserved_bytes
            if estimate.is_bound or most_bytes > card_bytes:
                say(f"does not fit, or is only bound: {key}")
                continue
            spec = ProbeSpec(
                task=TASK,
                backend="cuda",
                memory_budget_bytes=card_bytes,
                max_seconds=0.1,
                confirm_steps=1,
                varied_steps=varied_steps(config, "cuda"),
                lengths=percentiles(kind, length),
            )

            seen = tried(functools.partial(run, probes, source, spec, estimate))
            records.add(
                key,
                model=source.name,
                num_layers=options.layers,
                lengths=kind,
                prediction=estimate.to_dict(card_bytes),
                tried=[row_of(share, each) for share, each in sorted(seen.items())],
            )
            ends = {
                share: f"{each.outcome} {each.num_varied_retries}" for share, each in seen.items()
            }
            print(f"{ends}: {key}", flush=True)


if __name__ == "__main__":
    main()
