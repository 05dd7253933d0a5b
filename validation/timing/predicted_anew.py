"""The probes of an H200 and an H100, predicted anew: what the host takes, against what was measured.

    python -m validation.timing.predicted_anew

predicted_vs_measured.jsonl of each folder has the probes, and what was predicted of them before they ran;
kernels.jsonl has the time of an operation on that machine's host. No constant was chosen with either. Writes
the tables `h200` and `h100` of studies/host-time/README.md: predicted over measured with the usual host and
with the machine's own, and whole steps as they were predicted first. Probes that were capped at their own
prediction are left out: they ran before.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from autotune.catalogue.gpus import Gpu, find_gpu
from autotune.common.units import GIB
from autotune.predict.estimator import Estimator
from autotune.predict.step_times import StepSeconds
from autotune.predict.tracing import trace_all
from autotune.probe.calibrate import host_factor_of
from autotune.records.estimate import TraceSpec
from autotune.records.measurement import Measurement
from autotune.space.config import TrainConfig
from autotune.speed.host import USUAL
from autotune.worker.client.forkserver import ForkServer
from tools.gpu_check import cases
from tools.gpu_check.records import read_records
from tools.gpu_check.summary import measured
from validation.published.tables import write_sections

STUDIES = Path(__file__).parents[2] / "studies"
CARDS = {"h200": ("h200", "H200"), "h100": ("h100-80gb-hbm3", "H100 80GB HBM3")}
"""Folder and card, by the table's name."""
WITHIN = 1.25
LITTLE = 0.1
BY_CARD = "bound by the card: its host is predicted to add at most a tenth"
"""Also where all that the host does takes as much longer as its operations."""
Ratios = tuple[Any, ...]


def ratios_of(found: StepSeconds, seen: Measurement) -> tuple[float, float, float]:
    """Micro-step, update and whole step, each over what was measured."""
    micro_step, update, whole = (
        seen.micro_step_seconds,
        seen.optimizer_step_seconds,
        seen.step_seconds,
    )
    assert micro_step is not None
    assert update is not None
    assert whole is not None
    return (
        found.micro_step_seconds / micro_step,
        found.optimizer_step_seconds / update,
        found.total_seconds / whole,
    )


def group_of(config: TrainConfig) -> str:
    if config.liger:
        return "Liger"
    if config.update_in_backward:
        return "updated in the backward pass"
    method = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}[config.method]
    return f"{method}, checkpointed" if config.activation_checkpointing else method


def predicted(records: Path, card: Gpu) -> dict[str, list[Ratios]]:
    """Ratios of each probe, by group: its step as first predicted, all with the usual host and its own."""
    own = next(r for r in read_records(records / "kernels.jsonl") if r["key"] == "host")
    factor = host_factor_of(own["host_seconds"] or {})
    assert factor is not None
    by_model = defaultdict(list)
    for record in read_records(records / "predicted_vs_measured.jsonl"):
        if record["capped_at_prediction"]:
            continue
        seen, first = measured(record), record.get("first_prediction") or record["prediction"]
        by_model[record["model"], seen.config.sequence_length].append((seen, first["step_seconds"]))
    found = defaultdict(list)
    with ForkServer() as server:
        for (model, length), probes in by_model.items():
            specs = {TraceSpec.of(seen.config) for seen, _ in probes}
            source = cases.source(model)
            traces = trace_all(source, cases.TASK, length, card, specs, server=server)
            hosts = (USUAL, USUAL.timed(factor), USUAL.times(factor), USUAL.times(0.0))
            estimators = [
                Estimator(traces, card, memory_budget_bytes=1000 * GIB, host=host) for host in hosts
            ]
            for seen, first_seconds in probes:
                usual, own_host, slow_host, no_host = (
                    each.seconds(seen.config) for each in estimators
                )
                assert seen.step_seconds is not None
                assert usual is not None
                assert own_host is not None
                assert slow_host is not None
                assert no_host is not None
                ratios = [ratios_of(each, seen) for each in (usual, own_host)]
                beside = slow_host.total_seconds / no_host.total_seconds - 1
                by_card = [BY_CARD] if beside <= LITTLE else []
                for group in (group_of(seen.config), *by_card, "all"):
                    found[group].append((first_seconds / seen.step_seconds, *ratios))
    return found


def markdown(found: dict[str, list[Ratios]]) -> str:
    lines = [
        "| probes | | micro-step, median | update, median | whole step, median | within a quarter |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in sorted(found, key=lambda name: (name == "all", name.lower())):
        rows = found[name]
        first = [row[0] for row in rows]
        micro, update, whole = (
            [[ratios[part] for ratios in host] for host in list(zip(*rows, strict=True))[1:]]
            for part in range(3)
        )
        near = (sum(1 / WITHIN <= ratio <= WITHIN for ratio in each) for each in (first, *whole))
        lines.append(
            f"| {name} | {len(rows)} | {_medians(micro)} | {_medians(update)} |"
            f" {_medians([first, *whole])} | {', '.join(map(str, near))} |"
        )
    return "\n".join(lines)


def _medians(columns: list[list[float]]) -> str:
    return ", ".join(f"{statistics.median(column):.2f}" for column in columns)


def main() -> None:
    for name, (folder, card) in CARDS.items():
        table = markdown(predicted(STUDIES / folder, find_gpu(card)))
        print(table)
        write_sections(STUDIES / "host-time" / "README.md", {name: table})


if __name__ == "__main__":
    main()
