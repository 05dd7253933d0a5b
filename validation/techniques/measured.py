"""What each technique saves, measured beside what was predicted: the rows of predicted.py, run for real.

Each row is a probe: the real Trainer with the exported arguments, in a process of its own. Writes
studies/techniques/<backend>.jsonl, a line per row, failures included: {"schema_version", "words",
"base": bool, "prediction": {Estimate}, "measurement": {Measurement}}; and the table, <backend>.md. On a
CPU bytes are counted by the tracker, and its speed says nothing about a card: the table then has no
speeds. What this machine cannot run is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from autotune.catalogue.models import ModelSource, resolve
from autotune.common.units import MIB
from autotune.predict.estimator import Estimator
from autotune.predict.tracing import trace_all
from autotune.probe import loop
from autotune.probe.fleet.one_card import OneCard
from autotune.probe.run_one import Prober
from autotune.records.estimate import SCHEMA_VERSION, Estimate, TraceSpec
from autotune.records.measurement import Measurement, ProbeSpec
from autotune.records.question import BACKENDS
from autotune.search import budget
from autotune.space import requirements
from autotune.space.config import METHODS, TrainConfig
from autotune.space.tradeoffs import tradeoff_class
from autotune.space.words import describe
from autotune.store.probe_table import open_probes
from autotune.worker.client.forkserver import ForkServer
from validation.techniques.predicted import EFFECTIVE_BATCH, base_of, changes_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "studies" / "techniques"
BUDGETS = {"cpu": "2GB", "cuda": None}
"""On a CPU far more than any row needs; on a card all of it."""
DIFFERS_ON_CPU = {
    "paged_": "a CPU has no managed memory: nothing is paged",
    "grokadamw": "its state waits in host memory, which is the device here",
    "QLoRA": "PEFT asks whether CUDA's autocast is on, and copies inputs to float32 here",
    "nf4": "as QLoRA",
    "fp4": "as QLoRA",
    "packed": "as QLoRA",
    "int8": "bitsandbytes multiplies int8 another way on a CPU; PEFT as in QLoRA",
    "SFTTrainer": "TRL folds a chunk's logits in PyTorch where it has no Triton",
}
"""How the words of a row begin, and why its peak is another one than on a card: what tests/contracts
undoes by name (test_quantized_real, test_probe_optimizers, test_probe_sft)."""
MAX_SECONDS = 1.0
"""Of timed steps per probe."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=str(FOLDER / "config.json"))
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--backend", choices=BACKENDS, default="cpu")


def main(options: argparse.Namespace) -> None:
    model = resolve(options.model)
    chosen = budget.CHOOSERS[options.backend](None, BUDGETS[options.backend])
    card, budget_bytes = chosen.gpu, chosen.budget_bytes
    bases = {m: base_of(m, model, card, options.seq_len) for m in METHODS}
    changes = list(changes_of(bases, card))
    specs = {TraceSpec.of(config) for pair in changes for config in pair[1:]}
    traces = trace_all(model, model.task, options.seq_len, card, specs)
    estimator = Estimator(traces, card, memory_budget_bytes=budget_bytes)
    spec = ProbeSpec(
        task=model.task,
        backend=options.backend,
        memory_budget_bytes=budget_bytes,
        max_seconds=MAX_SECONDS,
        max_steps=3,
    )
    found: dict[TrainConfig, tuple[Estimate, Measurement]] = {}
    not_run: list[str] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ForkServer() as server,
        open_probes(f"sqlite:///{folder}/probes.db") as table,
        (FOLDER / f"{options.backend}.jsonl").open("w", encoding="utf-8") as lines,
    ):
        prober = Prober(OneCard(server), table, model, spec)
        is_base = {base for _, base, _ in changes}
        words_of = {base: describe(base) for base in is_base} | {c: w for w, _, c in changes}
        for config, words in words_of.items():
            reason = why_not(config, options.backend, estimator)
            if reason:
                not_run.append(f"- {words}: {reason}")
                continue
            estimate, measurement = estimator.estimate(config), prober.measure(config)
            found[config] = estimate, measurement
            record = {
                "schema_version": SCHEMA_VERSION,
                "words": words,
                "base": config in is_base,
                "prediction": estimate.to_dict(budget_bytes),
                "measurement": measurement.to_dict(),
            }
            lines.write(json.dumps(record) + "\n")
            lines.flush()
    rows = [line(w, b, c, found, options.backend) for w, b, c in changes if {b, c} <= set(found)]
    text = heading(model, options, found, bases["full"])
    text += "\n".join(rows) + "\n"
    if options.backend == "cpu":
        text += "\nWhere a CPU differs from a card, and the prediction is the card's:\n\n"
        text += "".join(f"- {words.rstrip('_')}: {why}\n" for words, why in DIFFERS_ON_CPU.items())
    if not_run:
        text += "\nNot run here:\n\n" + "\n".join(not_run) + "\n"
    (FOLDER / f"{options.backend}.md").write_text(text, encoding="utf-8")


def why_not(config: TrainConfig, backend: str, estimator: Estimator) -> str:
    """Why a row is no probe of this machine; empty where it is."""
    lacking = requirements.of_config(config)
    if lacking:
        return "; ".join(lacking)
    if not estimator.supports(config):
        return "not for this model"
    if backend == "cpu" and (reasons := requirements.of_cuda(config)):
        return "; ".join(reasons)
    return "" if loop.can_run(config, backend) else f"probes on {backend} do not run it"


def heading(
    model: ModelSource,
    options: argparse.Namespace,
    found: Mapping[TrainConfig, tuple[Estimate, Measurement]],
    base: TrainConfig,
) -> str:
    estimate, plain = found[base]
    command = f"python -m validation.techniques measured --backend {options.backend}"
    versions = ", ".join(f"{name} {version}" for name, version in plain.fingerprint.versions)
    speed = " | speed" if options.backend == "cuda" else ""
    return f"""# What each technique saves, measured

    {command} --model {shown(options.model)} --seq-len {options.seq_len}

A {model.config["model_type"]} of {estimate.parameters.total / 1e6:,.1f} M parameters on \
{plain.fingerprint.device}, {options.seq_len} tokens, effective batch {EFFECTIVE_BATCH};
{versions}.

Real steps of the real Trainer, one setting changed at a time from {describe(base)}
({mib(plain.peak_device_bytes)} MiB at the peak, measured), from LoRA or from QLoRA. The figures are the \
change of the peak in MiB.

| technique | predicted | measured | peak, predicted over measured{speed} | class |
|---|---:|---:|---:|{"---:|" if speed else ""}---|
"""


def line(
    words: str,
    base: TrainConfig,
    config: TrainConfig,
    found: Mapping[TrainConfig, tuple[Estimate, Measurement]],
    backend: str,
) -> str:
    (base_estimate, base_seen), (estimate, seen) = found[base], found[config]
    tradeoff = tradeoff_class(config, base)
    change = estimate.peak_device_bytes - base_estimate.peak_device_bytes
    cells = [words, f"{change / MIB:+,.1f}"]
    if seen.peak_device_bytes is None or base_seen.peak_device_bytes is None:
        cells += [seen.problem, ""]
    else:
        cells.append(f"{(seen.peak_device_bytes - base_seen.peak_device_bytes) / MIB:+,.1f}")
        cells.append(f"{100 * (estimate.peak_device_bytes / seen.peak_device_bytes - 1):+.1f} %")
    if backend == "cuda":
        speed, before = seen.tokens_per_second, base_seen.tokens_per_second
        cells.append(f"{100 * (speed / before - 1):+.0f} %" if speed and before else "")
    return "| " + " | ".join([*cells, tradeoff]) + " |"


def mib(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else f"{size_bytes / MIB:,.1f}"


def shown(model: str) -> str:
    """A file by its place in the repository."""
    path = Path(model).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else model
