"""How much faster `find`'s answer is than what people run: same card, same budget, same effective batch.

    python -m tools.gpu_check speedups

On a CPU: validation/cpu_speedups.py.

Three contenders, each a real probe (autotune.probe.run_one.Prober):

defaults  TrainingArguments as they are (transformers 5.23) with auto_find_batch_size: micro-batch 8, after
          each out of memory int(0.9 x) of it (accelerate.utils.find_executable_batch_size): 8, 7, ... 1.
          fp32 or bf16 weights as the checkpoint has them, no autocast, fused AdamW, sdpa, no checkpointing.
          The Trainer leaves the accumulation as it is, so that its effective batch is what it found and
          shrinks with it. Here it is held: accumulation is effective batch / micro-batch, and where that
          is no whole number the step is priced with the fraction of a micro-step that is missing
          (effective batch / micro-batch x the micro-step's seconds + the optimizer's). Each size is tried
          in a process of its own, so nothing is left of the failed ones, as would be in the Trainer's.
hand      what a competent user sets: bf16 (fp16 where the card has none), fused AdamW, sdpa, the largest
          power of two that fits as micro-batch; checkpointing of every layer only if 1 does not fit.
find      the answer of `autotune find` under its defaults for this method, measured again like the others.

An adapter has rank 16 on every linear layer with the first two. Once all are known they are measured in
turn, ROUNDS times, and the median counts: so an answer that owes its place to a lucky probe loses it again.

Written to studies/<card>/speedups.jsonl, an object per case
    {"schema_version", "key", "model", "gpu_mem", "memory_budget_bytes", "method", "sequence_length",
    "effective_batch_size", "backend", "find": {"command", "exit_code", "wall_seconds", "num_run", "class"},
    "contenders": {name: {"tried": [[micro-batch, checkpointing, outcome]], "measurements": [{Measurement}]}}}
of which speedup_table.py draws the table; speedups_found.jsonl keeps "find" and its answer as soon as they
are known: to have `find` run again, delete the case's line there, too. A CPU's speeds say nothing of a GPU's.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autotune.catalogue.models import ModelSource, resolve
from autotune.common.units import parse_bytes
from autotune.probe.fleet.one_card import OneCard
from autotune.probe.run_one import Prober
from autotune.records.measurement import Measurement, ProbeSpec
from autotune.space.config import TrainConfig, Workload
from autotune.space.defaults import default_base
from autotune.store.probe_table import ProbeTable, open_probes
from tools.gpu_check import cases as gpu_cases
from tools.gpu_check.cases import Comparison
from tools.gpu_check.check import ROOT, Check, Nothing
from tools.gpu_check.deadline import PunctualServer, run_until
from tools.gpu_check.records import Record, Records, read_records

PROBE_SECONDS = {"cuda": 20.0, "cpu": 5.0}
"""Of timed steps at most, as `find` has it."""
ROUNDS = 3
DEFAULT_MICRO_BATCH = 8
"""TrainingArguments.per_device_train_batch_size."""


class OutOfTime(Exception):
    """The piece's time is over."""


def speedups(check: Check) -> bool:
    """Every comparison that is not recorded yet. False when the time was over before the end."""
    records = check.records("speedups")
    for case in comparisons(check):
        if case.key in records or parse_bytes(case.gpu_mem) > check.budget_bytes:
            continue
        try:
            records.add(case.key, **compare(check, case))
        except OutOfTime:
            return False
        print(f"compared: {case.key}", file=sys.stderr, flush=True)
    return True


def comparisons(check: Check) -> Sequence[Comparison]:
    if check.backend == "cuda":
        return gpu_cases.COMPARISONS
    return gpu_cases.TINY_COMPARISONS if check.tiny else gpu_cases.CPU_COMPARISONS


def compare(check: Check, case: Comparison) -> Record:
    """The record of one comparison, its key aside. Raises OutOfTime."""
    found, winner = find(check, case)
    source = resolve(case.model)
    base = default_base(workload(case, source), check.card, source)
    with open_probes(storage(check)) as table_of_probes:
        contest = Contest(check, case, source, table_of_probes)
        tried = {
            "defaults": contest.first_that_fits(defaults(base, source)),
            "hand": contest.first_that_fits(hand_tuned(base)),
            "find": contest.first_that_fits([] if winner is None else [winner]),
        }
        rounds: dict[str, list[Measurement]] = {name: [] for name in tried}
        for _ in range(ROUNDS):
            for name, measurements in tried.items():
                if measurements and measurements[-1].fits:
                    rounds[name].append(contest.measure_again(measurements[-1].config))
    return {
        "model": case.model,
        "gpu_mem": case.gpu_mem,
        "memory_budget_bytes": parse_bytes(case.gpu_mem),
        "method": case.method,
        "sequence_length": case.sequence_length,
        "effective_batch_size": case.effective_batch_size,
        "backend": check.backend,
        "find": found,
        "contenders": {
            name: {
                "tried": [
                    [m.config.micro_batch_size, m.config.activation_checkpointing, m.outcome]
                    for m in measurements
                ],
                "measurements": [m.to_dict() for m in rounds[name]],
            }
            for name, measurements in tried.items()
        },
    }


def workload(case: Comparison, source: ModelSource) -> Workload:
    return Workload(
        model=source.name,
        task=source.task,
        sequence_length=case.sequence_length,
        effective_batch_size=case.effective_batch_size,
        methods=(case.method,),
        memory_budget_bytes=parse_bytes(case.gpu_mem),
    )


class Contest:
    """Probes of one model under one budget."""

    def __init__(
        self, check: Check, case: Comparison, source: ModelSource, table_of_probes: ProbeTable
    ) -> None:
        self._check = check
        spec = ProbeSpec(
            task=source.task,
            backend=check.backend,
            memory_budget_bytes=parse_bytes(case.gpu_mem),
            max_seconds=PROBE_SECONDS[check.backend],
        )
        server: Any = PunctualServer(check.server, check.deadline)
        nothing: Any = Nothing()
        self._first = Prober(OneCard(server), table_of_probes, source, spec)
        self._again = Prober(OneCard(server), nothing, source, spec)

    def measure(self, config: TrainConfig) -> Measurement:
        """What is known of it, or a new probe. Raises OutOfTime."""
        return self._measure(self._first, config)

    def measure_again(self, config: TrainConfig) -> Measurement:
        """A new probe. Raises OutOfTime."""
        return self._measure(self._again, config)

    def _measure(self, prober: Prober, config: TrainConfig) -> Measurement:
        if not self._check.deadline.allows_another():
            raise OutOfTime
        measurement = prober.measure(config)
        if measurement.outcome == "timeout" and not self._check.deadline.allows_another():
            raise OutOfTime
        return measurement

    def first_that_fits(
        self, configs: Sequence[TrainConfig] | Iterator[TrainConfig]
    ) -> list[Measurement]:
        """Those tried, the last of them the one that fits, if any does."""
        tried = []
        for config in configs:
            tried.append(self.measure(config))
            if tried[-1].fits:
                break
        return tried


def defaults(base: TrainConfig, source: ModelSource) -> Iterator[TrainConfig]:
    """What auto_find_batch_size tries, in its order."""
    dtype = source.config.get("dtype") or source.config.get("torch_dtype") or "float32"
    precisions = {"bfloat16": "bf16-true", "float32": "fp32"}
    # A checkpoint in float16 is not trained as it is: for that the base knows what to do.
    precision = precisions.get(str(dtype), base.precision)
    if base.quantization != "none":
        precision = base.precision
    effective = base.effective_batch_size
    size = min(DEFAULT_MICRO_BATCH, effective)
    while size:
        yield with_micro_batch(dataclasses.replace(base, precision=precision), size)
        size = int(size * 0.9)


def hand_tuned(base: TrainConfig) -> Iterator[TrainConfig]:
    """Largest first; with checkpointing once nothing fits without."""
    effective = base.effective_batch_size
    for checkpointing in (0, 1):
        config = dataclasses.replace(base, activation_checkpointing=checkpointing)
        for power in reversed(range(effective.bit_length())):
            yield with_micro_batch(config, 2**power)


def with_micro_batch(config: TrainConfig, size: int) -> TrainConfig:
    """The accumulation that reaches the effective batch; speedup_table.py prices what is beyond it."""
    return dataclasses.replace(
        config,
        micro_batch_size=size,
        gradient_accumulation_steps=math.ceil(config.effective_batch_size / size),
    )


def find(check: Check, case: Comparison) -> tuple[Record, TrainConfig | None]:
    """`autotune find`, as typed; what it says of itself, and its answer. Raises OutOfTime.

    It is recorded before its contest, whose time may be over: the next call would run nothing anew.
    """
    path = check.folder / "speedups_found.jsonl"
    for known in read_records(path):
        if known["key"] == case.key:
            return known["find"], None if known["winner"] is None else TrainConfig(
                **known["winner"]
            )
    seen, winner = _found(check, case)
    Records(path).add(case.key, find=seen, winner=winner and winner.to_dict())
    return seen, winner


def _found(check: Check, case: Comparison) -> tuple[Record, TrainConfig | None]:
    words = [
        "autotune",
        *f"find --json --backend {check.backend} --model {case.model}".split(),
        *f"--gpu-mem {case.gpu_mem} --method {case.method}".split(),
        *f"--seq-len {case.sequence_length} --effective-batch {case.effective_batch_size}".split(),
        *case.options,
    ]
    if not check.deadline.allows_another():
        raise OutOfTime
    with tempfile.TemporaryDirectory() as scratch:
        private = ["--storage", storage(check), "--out", scratch]
        if case.space:
            file = Path(scratch) / "space.yaml"
            file.write_text(case.space, encoding="utf-8")
            private += ["--space", str(file)]
        began = time.monotonic()
        ended = run_until([sys.executable, "-m", *words, *private], check.deadline, cwd=ROOT)
        wall_seconds = time.monotonic() - began
    if ended is None:
        raise OutOfTime
    exit_code, printed, complaints = ended
    seen: Record = {
        "command": " ".join(words),
        "exit_code": exit_code,
        "wall_seconds": wall_seconds,
        "num_run": None,
        "class": None,
    }
    if exit_code:
        return seen | {"stderr_tail": complaints[-500:]}, None
    answer = json.loads(printed)
    seen |= {"num_run": answer["measured"]["num_run"], "class": answer["best"]["class"]}
    return seen, TrainConfig(**answer["measured"]["best"]["config"])


def storage(check: Check) -> str:
    """The database in which what is cut off goes on; gpu_check's own."""
    return f"sqlite:///{check.folder.parent.resolve()}/gpu-check-{check.folder.name}.db"
