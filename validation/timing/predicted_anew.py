"""The probes of an H200, predicted anew: what the host takes, against what was measured.

    python -m validation.timing.predicted_anew

studies/h200/predicted_vs_measured.jsonl has the probes, and what was predicted of them then; kernels.jsonl
has the time of an operation on that machine's host. No constant was chosen with either. Writes the table
`h200` of studies/host-time/README.md: medians of predicted over measured, as it was, with the usual host, and
with the machine's own.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autotune.catalogue.gpus import find_gpu
from autotune.common.units import GIB
from autotune.predict.estimator import Estimator
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
RECORDS = STUDIES / "h200"
WITHIN = 1.25


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a micro-step and of the rest of an optimizer step."""

    micro_step: float
    update: float

    def ratios(self, seen: Measurement) -> tuple[float, float, float]:
        """Of micro-step, update and whole step, over what was measured."""
        micro_step, update = seen.micro_step_seconds, seen.optimizer_step_seconds
        assert micro_step is not None
        assert update is not None
        count = seen.config.gradient_accumulation_steps
        whole = (count * self.micro_step + self.update) / (count * micro_step + update)
        return self.micro_step / micro_step, self.update / update, whole


def group_of(config: TrainConfig) -> str:
    if config.liger:
        return "Liger"
    if config.update_in_backward:
        return "updated in the backward pass"
    method = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}[config.method]
    return f"{method}, checkpointed" if config.activation_checkpointing else method


def predicted() -> Iterator[tuple[Measurement, list[Times]]]:
    """Each probe, and its times as they were predicted, with the usual host, and with its own."""
    own = next(r for r in read_records(RECORDS / "kernels.jsonl") if r["key"] == "host")
    factor = host_factor_of(own["host_seconds"])
    assert factor is not None
    card = find_gpu("H200")
    groups = defaultdict(list)
    for record in read_records(RECORDS / "predicted_vs_measured.jsonl"):
        seen = measured(record)
        groups[record["model"], seen.config.sequence_length].append((seen, record["prediction"]))
    with ForkServer() as server:
        for (model, length), probes in groups.items():
            specs = {TraceSpec.of(seen.config) for seen, _ in probes}
            source = cases.source(model)
            traces = trace_all(source, cases.TASK, length, card, specs, server=server)
            hosts = (USUAL, USUAL.times(factor))
            estimators = [
                Estimator(traces, card, memory_budget_bytes=1000 * GIB, host=host) for host in hosts
            ]
            for seen, before in probes:
                found = [estimator.seconds(seen.config) for estimator in estimators]
                now = [
                    Times(each.micro_step_seconds, each.optimizer_step_seconds)
                    for each in found
                    if each is not None
                ]
                then = Times(before["micro_step_seconds"], before["optimizer_step_seconds"])
                yield seen, [then, *now]


def markdown(probes: list[tuple[Measurement, list[Times]]]) -> str:
    groups = defaultdict(list)
    for seen, times in probes:
        ratios = [each.ratios(seen) for each in times]
        groups[group_of(seen.config)].append(ratios)
        groups["all"].append(ratios)
    lines = [
        "| probes | | micro-step: before, usual host, its own | update | whole step within a quarter |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in sorted(groups, key=lambda name: (name == "all", name.lower())):
        rows = groups[name]
        micro, update = (
            ", ".join(f"{statistics.median(column):.2f}" for column in zip(*of_part, strict=True))
            for of_part in ([[ratios[part] for ratios in row] for row in rows] for part in (0, 1))
        )
        near = [sum(1 / WITHIN <= row[number][2] <= WITHIN for row in rows) for number in range(3)]
        lines.append(f"| {name} | {len(rows)} | {micro} | {update} | {', '.join(map(str, near))} |")
    return "\n".join(lines)


def main() -> None:
    table = markdown(list(predicted()))
    print(table)
    write_sections(STUDIES / "host-time" / "README.md", {"h200": table})


if __name__ == "__main__":
    main()
