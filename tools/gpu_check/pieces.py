"""Predictions held against a real card: what an owner of a CUDA machine runs. Not yet run on a GPU.

    python benchmarks/gpu_check.py processes predict techniques find sweep speedups
                                                                                (or: make gpu-check)

Each piece stops when its --minutes are over, and the next call goes on: what is recorded is not run
again. To have something run again, delete its line. Written to studies/<gpu>/, a JSON object per line,
failures included:

predicted_vs_measured.jsonl, sweep.jsonl
    {"schema_version", "key", "model", "capped_at_prediction": bool, "prediction": {Estimate.to_dict},
    "measurement": {Measurement.to_dict}, "wall_seconds": of the whole probe, as its parent saw it,
    "card_peak_bytes": the most that NVML saw of it meanwhile, or null}
find.jsonl
    {"schema_version", "key", "model", "gpu_mem", "command", "exit_code", "wall_seconds",
    "answer": what `find --json` printed, or null, "stderr_tail"}
processes.jsonl
    {"schema_version", "key": what was tried, "fork": {Fork}, ...}: see gpu_processes.py
speedups.jsonl
    see speedups.py
README.md
    the summary, made anew from all of these

`predict` takes the cases of gpu_cases.py, `techniques` those of one more setting each, as far as the card
and what is installed can run them (both write the same file); `sweep` every point of one small space
(benchmarks/sampler.py searches it); `find` is the command itself under several budgets; `processes` is what
forking and killing leave on the card; `speedups` sets find's answers beside what people run. `repredict`
needs no GPU: it puts the present version's predictions beside what was measured. --backend cpu --tiny tries
the whole of it on a CPU, and is no measure of any card.

Where a card is lent for half an hour: `autotune doctor`, then `processes predict`, then `techniques find`.
--studies names a folder that stays when the machine goes; the next call goes on from a copy of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_cases
from gpu_cases import Case
from gpu_deadline import Deadline, PunctualServer, run_until
from gpu_processes import PeakOnCard, processes
from gpu_summary import write_summary
from speedups import speedups

from autotune.catalogue.gpus import Gpu, cpu_stand_in, detect, find_gpu
from autotune.catalogue.models import ModelSource
from autotune.common.units import MIB, parse_bytes
from autotune.errors import AutotuneError, HardwareError
from autotune.predict.estimator import Estimator
from autotune.predict.tracing import trace_all
from autotune.probe.run_one import Prober
from autotune.records.estimate import SCHEMA_VERSION, Estimate, TraceSpec
from autotune.records.measurement import BACKENDS, ProbeSpec
from autotune.search import budget
from autotune.space import requirements
from autotune.space.config import TrainConfig, Workload
from autotune.space.knobs import describe
from autotune.space.rules import Context, broken_rules
from autotune.space.search_space import SearchSpace, enumerate_configs
from autotune.store.probe_key import probe_key
from autotune.worker.client.forkserver import ForkServer

ROOT = Path(__file__).parents[1]

PREDICT_SECONDS = 5.0
TECHNIQUE_SECONDS = 3.0
SWEEP_SECONDS = 1.0
"""Of timed steps per probe, at most."""
HOPELESS = 1.25
"""What is predicted to need so much more than the card has is not tried."""
TINY_BUDGET = "200MB"


class Records:
    """One file of JSON lines, each written out at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys: set[str] = set()
        if not path.exists():
            return
        complete, _, torn = path.read_text(encoding="utf-8").rpartition("\n")
        if torn:  # by a kill in the middle of a line
            path.write_text(complete + "\n" if complete else "", encoding="utf-8")
        self._keys = {json.loads(line)["key"] for line in complete.splitlines()}

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def add(self, key: str, **fields: Any) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"schema_version": SCHEMA_VERSION, "key": key, **fields}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._keys.add(key)


class Nothing:
    """Stands for the table of probes: the records remember."""

    def find(self, *_: Any, **__: Any) -> None:
        return None

    def add(self, *_: Any, **__: Any) -> None:
        pass


Group = tuple[str, int]
"""Model and length: their traces are asked for together."""


class Predictions:
    """Estimates of cases; a context manager.

    All is traced in the background, in the order of the cases, while the card runs what is predicted.
    """

    def __init__(self, card: Gpu, cases: Iterable[Case], budget_bytes: int) -> None:
        self._card = card
        self._budget_bytes = budget_bytes
        self._estimators: dict[Group, Estimator | None] = {}
        specs: dict[Group, set[TraceSpec]] = defaultdict(set)
        for case in cases:
            specs[case.model, case.config.sequence_length].add(TraceSpec.of(case.config))
        self._server = ForkServer()
        # A fork server is used from one thread alone.
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._traces = {
            group: self._thread.submit(self._trace, group, specs[group]) for group in specs
        }

    def __enter__(self) -> Predictions:
        return self

    def __exit__(self, *_: object) -> None:
        for future in self._traces.values():
            future.cancel()
        self._thread.submit(self._server.close)
        self._thread.shutdown()

    def of(self, model: str, config: TrainConfig) -> Estimate | None:
        """None, and a line that says why, where it cannot be predicted."""
        group = (model, config.sequence_length)
        if group not in self._estimators:
            self._estimators[group] = self._make(group)
        estimator = self._estimators[group]
        if estimator is None or not estimator.supports(config):
            say(f"left out, cannot be traced: {model} {shown(config)}")
            return None
        return estimator.estimate(config)

    def within_least(self, model: str, config: TrainConfig) -> tuple[Estimate, int] | None:
        """The prediction under the least budget that is predicted to do, to a MiB, and that budget.

        Where segments grow, how much is reserved hangs on the budget.
        """
        alone = self.of(model, config)
        if alone is None or not config.expandable_segments:
            return alone and (alone, alone.peak_device_bytes)
        estimator = self._estimators[model, config.sequence_length]
        assert estimator is not None
        too_small, enough = alone.peak_allocated_bytes, 2 * alone.peak_device_bytes
        while enough - too_small > MIB:
            budget_bytes = (too_small + enough) // 2
            estimate = estimator.with_budget(budget_bytes).estimate(config)
            if estimate.peak_device_bytes <= budget_bytes:
                enough = budget_bytes
            else:
                too_small = budget_bytes
        return estimator.with_budget(enough).estimate(config), enough

    def _make(self, group: Group) -> Estimator | None:
        try:
            traces = self._traces[group].result()
        except AutotuneError as error:
            model, length = group
            say(f"{model} at {length} tokens: {error}")
            return None
        return Estimator(traces, self._card, memory_budget_bytes=self._budget_bytes)

    def _trace(self, group: Group, specs: set[TraceSpec]) -> dict[TraceSpec, Any]:
        model, length = group
        source = gpu_cases.source(model)
        return trace_all(source, gpu_cases.TASK, length, self._card, specs, server=self._server)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Where and with what a piece runs."""

    backend: str
    tiny: bool
    card: Gpu
    budget_bytes: int
    folder: Path
    deadline: Deadline
    server: ForkServer
    """Of the probes of all pieces."""

    def records(self, name: str) -> Records:
        return Records(self.folder / f"{name}.jsonl")


class Probes:
    """Probes beside their predictions."""

    def __init__(self, check: Check, records: Records, max_seconds: float) -> None:
        self._check = check
        self._records = records
        self._max_seconds = max_seconds
        self._probers: dict[str, tuple[ModelSource, Prober]] = {}

    def measure(
        self,
        model: str,
        config: TrainConfig,
        budget_bytes: int,
        predict: Callable[[], Any],
        *,
        is_capped: bool = False,
    ) -> bool:
        """Probe and record, unless it is recorded. False when the time is over.

        `predict()` is the Estimate, or None for what is not to be probed. `is_capped`: the budget is
        what is predicted to do.
        """
        if not self._check.deadline.allows_another():
            return False
        spec = ProbeSpec(
            task=gpu_cases.TASK,
            backend=self._check.backend,
            memory_budget_bytes=budget_bytes,
            max_seconds=self._max_seconds,
        )
        source, prober = self._prober(model, spec)
        what = probe_key(source.config, config, spec, prober.fingerprint_of(config))
        # Each is measured under a budget of its own, and under no other's.
        key = f"{what.digest}-{budget_bytes}"
        if key in self._records:
            return True
        estimate = predict()
        if estimate is None:
            return True
        if not self._check.deadline.allows_another():
            return False
        prober.spec = spec
        began = time.monotonic()
        with PeakOnCard(self._check.backend) as seen:
            measurement = prober.measure(config)
        wall_seconds = time.monotonic() - began
        if measurement.outcome == "timeout" and not self._check.deadline.allows_another():
            return False  # cut off by the end of the piece: nothing is known of it
        self._records.add(
            key,
            model=model,
            capped_at_prediction=is_capped,
            prediction=estimate.to_dict(budget_bytes),
            measurement=measurement.to_dict(),
            card_peak_bytes=seen.peak_bytes,
            wall_seconds=wall_seconds,
        )
        say(f"{measurement.outcome:8}{wall_seconds:6.1f} s  {model} {shown(config)}")
        return True

    def _prober(self, model: str, spec: ProbeSpec) -> tuple[ModelSource, Prober]:
        if model not in self._probers:
            source = gpu_cases.source(model)
            server: Any = PunctualServer(self._check.server, self._check.deadline)
            table: Any = Nothing()
            self._probers[model] = source, Prober(server, table, source, spec)
        return self._probers[model]


def worth_trying(check: Check, predictions: Predictions, case: Case) -> Estimate | None:
    """The prediction of a case; None, and a line that says why, where a probe would tell nothing."""
    estimate = predictions.of(case.model, case.config)
    if estimate is None or estimate.peak_device_bytes <= HOPELESS * check.budget_bytes:
        return estimate
    say(f"left out, far too large for this card: {case.model} {shown(case.config)}")
    return None


def predict(check: Check) -> bool:
    """Every case with all of the card; some with their own prediction as budget."""
    cases = gpu_cases.TINY_CASES if check.tiny else gpu_cases.CASES
    num_first = 1 + max(i for i, case in enumerate(cases) if case.capped)
    probes = Probes(check, check.records("predicted_vs_measured"), PREDICT_SECONDS)
    predictions = Predictions(check.card, cases, check.budget_bytes)

    def uncapped(some: Sequence[Case]) -> bool:
        return all(
            probes.measure(
                c.model,
                c.config,
                check.budget_bytes,
                lambda c=c: worth_trying(check, predictions, c),
            )
            for c in some
        )

    def capped(case: Case) -> bool:
        if not check.deadline.allows_another():
            return False
        found = predictions.within_least(case.model, case.config)
        if found is None or found[1] > check.budget_bytes:
            return True
        estimate, least_bytes = found
        return probes.measure(
            case.model, case.config, least_bytes, lambda: estimate, is_capped=True
        )

    with predictions:
        return (
            uncapped(cases[:num_first])
            and all(capped(case) for case in cases if case.capped)
            and uncapped(cases[num_first:])
        )


def techniques(check: Check) -> bool:
    """Every technique that this card and what is installed can run, with all of the card."""
    listed = gpu_cases.TINY_TECHNIQUES if check.tiny else gpu_cases.TECHNIQUES
    cases = [case for case in listed if can_run(check, case)]
    probes = Probes(check, check.records("predicted_vs_measured"), TECHNIQUE_SECONDS)
    with Predictions(check.card, cases, check.budget_bytes) as predictions:
        return all(
            probes.measure(
                case.model,
                case.config,
                check.budget_bytes,
                lambda case=case: worth_trying(check, predictions, case),
            )
            for case in cases
        )


def can_run(check: Check, case: Case) -> bool:
    """Whether a probe of it makes sense here; a line says why not."""
    config = case.config
    context = Context(
        effective_batch_size=config.effective_batch_size,
        compute_capability=check.card.compute_capability,
    )
    reasons = [
        *requirements.of_config(config),
        *(rule.reason for rule in broken_rules(config, context)),
    ]
    if reasons:
        say(f"left out, {'; '.join(reasons)}: {case.model} {shown(config)}")
    return not reasons


def sweep(check: Check) -> bool:
    """Every point of one space, in an order that tells something when it is cut off."""
    model, budget_bytes, configs = sweep_points(check)
    cases = [Case(model=model, config=config) for config in configs]
    random.Random(0).shuffle(configs)
    probes = Probes(check, check.records("sweep"), SWEEP_SECONDS)
    with Predictions(check.card, cases, budget_bytes) as predictions:
        return all(
            probes.measure(model, config, budget_bytes, lambda c=config: predictions.of(model, c))
            for config in configs
        )


def sweep_points(check: Check) -> tuple[str, int, list[TrainConfig]]:
    """(model, budget, configurations) of the sweep."""
    space: SearchSpace
    if check.tiny:
        model, space = gpu_cases.TINY.name, gpu_cases.TINY_SWEEP
        length, batch = gpu_cases.TINY_LENGTH, gpu_cases.TINY_EFFECTIVE_BATCH
        budget_bytes = parse_bytes(gpu_cases.TINY_SWEEP_BUDGET)
    else:
        model, space = gpu_cases.SWEEP_MODEL, gpu_cases.SWEEP
        length, batch = gpu_cases.SWEEP_LENGTH, gpu_cases.SWEEP_EFFECTIVE_BATCH
        budget_bytes = min(parse_bytes(gpu_cases.SWEEP_BUDGET), check.budget_bytes)
    workload = Workload(
        model=model,
        sequence_length=length,
        effective_batch_size=batch,
        memory_budget_bytes=budget_bytes,
    )
    capability = check.card.compute_capability
    return (
        model,
        budget_bytes,
        enumerate_configs(space, workload, compute_capability=capability).configs,
    )


def find(check: Check) -> bool:
    """`autotune find` under several budgets. One that is cut off goes on from its study."""
    records = check.records("find")
    with tempfile.TemporaryDirectory() as scratch:
        for model, size, words, private in find_commands(check, Path(scratch)):
            key = f"{model} {size}"
            if key in records or parse_bytes(size) > check.budget_bytes:
                continue
            if not check.deadline.allows_another():
                return False
            began = time.monotonic()
            ended = run_until([sys.executable, "-m", *words, *private], check.deadline, cwd=ROOT)
            if ended is None:
                return False
            wall_seconds = time.monotonic() - began
            exit_code, printed, complaints = ended
            answer = None
            with contextlib.suppress(ValueError):
                answer = json.loads(printed)
                answer.pop("files", None)
            records.add(
                key,
                model=model,
                gpu_mem=size,
                command=" ".join(words),
                exit_code=exit_code,
                wall_seconds=wall_seconds,
                answer=answer,
                stderr_tail=complaints[-2000:],
            )
            say(f"exit code {exit_code}, {wall_seconds:.0f} s: find {key}")
    return True


def find_commands(check: Check, scratch: Path) -> Iterator[tuple[str, str, list[str], list[str]]]:
    """(model, budget, command, its files' options) of each search."""
    database = check.folder.parent.resolve() / f"gpu-check-{check.folder.name}.db"
    private = ["--storage", f"sqlite:///{database}", "--out", str(scratch / "out")]
    common = f"autotune find --json --backend {check.backend}"
    if not check.tiny:
        for model, size in gpu_cases.FINDS:
            yield model, size, f"{common} --model {model} --gpu-mem {size}".split(), private
        return
    model, size = gpu_cases.TINY.name, gpu_cases.TINY_SWEEP_BUDGET
    (scratch / "config.json").write_text(json.dumps(gpu_cases.TINY.config), encoding="utf-8")
    (scratch / "space.yaml").write_text(gpu_cases.TINY_FIND_SPACE, encoding="utf-8")
    private += ["--model", str(scratch / "config.json"), "--space", str(scratch / "space.yaml")]
    # By default a study is named after the model, whose folder changes with each call.
    words = f"{common} --study {model} --gpu-mem {size} --seq-len {gpu_cases.TINY_LENGTH}"
    words += f" --effective-batch {gpu_cases.TINY_EFFECTIVE_BATCH} --method full --effort quick"
    yield model, size, f"{words} --allow recipe".split(), private


def repredict(check: Check) -> bool:
    """Put today's predictions beside what was measured.

    Where the budget was a prediction, that prediction stays: the run survived it or did not.
    """
    for name in ("predicted_vs_measured", "sweep"):
        path = check.folder / f"{name}.jsonl"
        if not path.exists():
            continue
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        by_budget = defaultdict(list)
        for record in records:
            if not record["capped_at_prediction"]:
                budget_bytes = record["measurement"]["spec"]["memory_budget_bytes"]
                config = TrainConfig(**record["measurement"]["config"])
                by_budget[budget_bytes].append((record, Case(model=record["model"], config=config)))
        for budget_bytes, pairs in by_budget.items():
            with Predictions(check.card, [c for _, c in pairs], budget_bytes) as predictions:
                for record, case in pairs:
                    estimate = predictions.of(case.model, case.config)
                    if estimate is not None:
                        record["prediction"] = estimate.to_dict(budget_bytes)
        whole = path.with_suffix(".new")
        whole.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
        whole.replace(path)
    return True


PIECES: dict[str, Callable[[Check], bool]] = {
    "predict": predict,
    "techniques": techniques,
    "sweep": sweep,
    "find": find,
    "processes": processes,
    "speedups": speedups,
    "repredict": repredict,
}
"""Each returns False when its time was over before its end."""


def card_and_budget(backend: str, recorded: str | None) -> tuple[Gpu, int]:
    """The card of this machine and all of its memory, or the one that records are of."""
    if recorded is not None:
        card = cpu_stand_in() if recorded == "cpu" else find_gpu(recorded)
        return card, card.capacity_bytes
    if backend == "cpu":
        card, _, budget_bytes = budget.cpu_as_card(None, TINY_BUDGET)
        return card, budget_bytes
    here = detect()
    if not here:
        raise HardwareError(
            "There is no CUDA GPU here",
            why="NVIDIA's driver reports none on this machine",
            remedy="--backend cpu --tiny tries the pieces without one",
        )
    card = here[0]
    if card.peak_flop_per_second:
        return card, budget.card_here(None, None)[2]
    raise HardwareError(
        f"The {card.name} is not in the catalogue",
        why="Its speed is unknown, so that nothing can be predicted",
        remedy="Add its row to autotune/catalogue/data/gpus.toml (CONTRIBUTING.md)",
    )


def shown(config: TrainConfig) -> str:
    return f"{describe(config)}, {config.sequence_length} tokens"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pieces", nargs="+", choices=PIECES)
    parser.add_argument("--backend", choices=BACKENDS, default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a few cases of a tiny model")
    parser.add_argument("--minutes", type=float, default=8.0, help="of each piece, at most")
    parser.add_argument("--studies", type=Path, default=ROOT / "studies", metavar="FOLDER")
    parser.add_argument("--gpu", metavar="SLUG", help="for repredict: whose records")
    options = parser.parse_args(arguments)
    if options.backend == "cpu" and not options.tiny:
        parser.error("--backend cpu goes with --tiny only")
    if (options.gpu is None) == ("repredict" in options.pieces):
        parser.error("--gpu and repredict go together")
    try:
        card, budget_bytes = card_and_budget(options.backend, options.gpu)
        options.studies.mkdir(parents=True, exist_ok=True)
        with ForkServer() as server:
            server.start("probe")
            for name in options.pieces:
                check = Check(
                    backend=options.backend,
                    tiny=options.tiny,
                    card=card,
                    budget_bytes=budget_bytes,
                    folder=options.studies / card.slug,
                    deadline=Deadline(60 * options.minutes),
                    server=server,
                )
                try:
                    is_done = PIECES[name](check)
                finally:
                    write_summary(check.folder)
                end = "done" if is_done else "the time is over; the same command goes on"
                say(f"{name}: {end}")
    except AutotuneError as error:
        say(f"error: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
