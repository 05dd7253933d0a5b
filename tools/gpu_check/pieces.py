"""The pieces of a check: what each probes or runs, and in which order."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from autotune.catalogue.gpus import Gpu
from autotune.catalogue.installed import version
from autotune.catalogue.own_rates import OwnRates
from autotune.common.units import parse_bytes
from autotune.records.estimate import Estimate
from autotune.space import requirements
from autotune.space.config import TrainConfig, Workload
from autotune.space.enumeration import enumerate_configs
from autotune.space.rules import Context, broken_rules
from autotune.space.search_space import SearchSpace
from tools.gpu_check import cases as gpu_cases
from tools.gpu_check.cases import Case
from tools.gpu_check.check import ROOT, Check, say, shown
from tools.gpu_check.deadline import run_until
from tools.gpu_check.kernels import host_factor_in, kernels, reprice
from tools.gpu_check.operations import operations
from tools.gpu_check.predictions import Predictions
from tools.gpu_check.probes import Probes
from tools.gpu_check.processes import processes
from tools.gpu_check.records import Record
from tools.gpu_check.speedups import speedups, storage
from tools.gpu_check.summary import QUANTITIES

PREDICT_SECONDS = 5.0
TECHNIQUE_SECONDS = 3.0
SWEEP_SECONDS = 1.0
"""Of timed steps per probe, at most."""
HOPELESS = 1.25
"""What is predicted to need so much more than the card has is not tried."""


def worth_trying(check: Check, predictions: Predictions, case: Case) -> Estimate | None:
    """The prediction of a case; None, and a line that says why, where a probe would tell nothing."""
    estimate = predictions.of(case.model, case.config)
    if estimate is None or estimate.peak_device_bytes <= HOPELESS * check.budget_bytes:
        return estimate
    say(f"left out, far too large for this card: {case.model} {shown(case.config)}")
    return None


def predict(check: Check) -> bool:
    """Every case with all of the card; some right after with their own prediction as budget."""
    cases = gpu_cases.TINY_CASES if check.tiny else gpu_cases.CASES
    probes = Probes(check, check.records("predicted_vs_measured"), check.seconds or PREDICT_SECONDS)

    def uncapped(case: Case) -> bool:
        tried = functools.partial(worth_trying, check, predictions, case)
        return probes.measure(case.model, case.config, check.budget_bytes, tried)

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

    with Predictions(check.card, cases, check.budget_bytes) as predictions:
        return all(uncapped(case) and (not case.capped or capped(case)) for case in cases)


def techniques(check: Check) -> bool:
    """Every technique that this card and what is installed can run, with all of the card."""
    listed = gpu_cases.TINY_TECHNIQUES if check.tiny else gpu_cases.TECHNIQUES
    cases = [case for case in listed if can_run(check, case)]
    probes = Probes(
        check, check.records("predicted_vs_measured"), check.seconds or TECHNIQUE_SECONDS
    )
    with Predictions(check.card, cases, check.budget_bytes) as predictions:
        return all(
            probes.measure(
                case.model,
                case.config,
                check.budget_bytes,
                functools.partial(worth_trying, check, predictions, case),
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
            probes.measure(
                model, config, budget_bytes, functools.partial(predictions.of, model, config)
            )
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
    private = ["--storage", storage(check), "--out", str(scratch / "out")]
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
    """Put today's predictions beside what was measured; figures of the first ones are kept.

    Where the budget was a prediction, that prediction stays: the run survived it or did not. Another
    version of torch allocates otherwise, by up to a percent: predict with the one that measured.
    """
    reprice(check)
    for name in ("predicted_vs_measured", "sweep"):
        path = check.folder / f"{name}.jsonl"
        if not path.exists():
            continue
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        measured_with = {_torch_of(record) for record in records}
        if measured_with != {version("torch")}:
            names = " and ".join(sorted(measured_with))
            say(f"{name}: measured with torch {names}, predicted with torch {version('torch')}")
        for record, estimate, budget_bytes in _predicted(check.card, records):
            before, now = record["prediction"], estimate.to_dict(budget_bytes)
            figures = {name: before.get(name) for name in QUANTITIES.values()}
            record.setdefault("first_prediction", figures)
            record["prediction"] = now
        host_factor = host_factor_in(check.folder)
        if host_factor is not None:
            own = dataclasses.replace(check.card, rates=OwnRates(host_factor=host_factor))
            for record, estimate, _ in _predicted(own, records):
                record["step_seconds_with_its_host"] = estimate.step_seconds
        whole = path.with_suffix(".new")
        whole.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
        whole.replace(path)
    return True


def _predicted(card: Gpu, records: Sequence[Record]) -> Iterator[tuple[Record, Estimate, int]]:
    """(record, estimate, budget) of the runs that had a budget of their own, as far as can be predicted.

    Not of what ran another program than the present one (`other_program` says how it differs).
    """
    by_budget = defaultdict(list)
    for record in records:
        if not record["capped_at_prediction"] and "other_program" not in record:
            budget_bytes = record["measurement"]["spec"]["memory_budget_bytes"]
            config = TrainConfig(**record["measurement"]["config"])
            by_budget[budget_bytes].append((record, Case(model=record["model"], config=config)))
    for budget_bytes, pairs in by_budget.items():
        with Predictions(card, [c for _, c in pairs], budget_bytes) as predictions:
            for record, case in pairs:
                estimate = predictions.of(case.model, case.config)
                if estimate is not None:
                    yield record, estimate, budget_bytes


def _torch_of(record: Record) -> str:
    return str(dict(record["measurement"]["fingerprint"]["versions"])["torch"])


PIECES: dict[str, Callable[[Check], bool]] = {
    "kernels": kernels,
    "operations": operations,
    "predict": predict,
    "techniques": techniques,
    "sweep": sweep,
    "find": find,
    "processes": processes,
    "speedups": speedups,
    "repredict": repredict,
}
"""Each returns False when its time was over before its end."""
