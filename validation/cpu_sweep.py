"""Every configuration of a small space, really run on the CPU: a recorded table to search in.

    python -m validation.cpu_sweep            (a quarter of an hour at most; on an otherwise idle machine)

The model is studies/cpu-sweep/config.json. Writes studies/cpu-sweep/sweep.jsonl, an object per line:
{"schema_version", "prediction": {Estimate}, "measurement": {Measurement}}. Bytes are counted by the
tracker and the budget enforced by it, so some points run out of memory. A CPU says nothing about a
GPU; what the table is for is holding the sampler against reality (tests/probe/test_recorded_sweep.py).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from autotune.catalogue.gpus import cpu_stand_in
from autotune.catalogue.models import resolve
from autotune.predict.estimator import Estimator
from autotune.predict.tracing import trace_all
from autotune.probe.fleet.one_card import OneCard
from autotune.probe.run_one import Prober
from autotune.records.estimate import SCHEMA_VERSION, TraceSpec
from autotune.records.measurement import ProbeSpec
from autotune.space.config import Workload
from autotune.space.enumeration import enumerate_configs
from autotune.space.search_space import MethodSpace, SearchSpace
from autotune.store.probe_table import open_probes
from autotune.worker.client.forkserver import ForkServer

FOLDER = Path(__file__).parents[1] / "studies" / "cpu-sweep"
SEQUENCE_LENGTH = 64
EFFECTIVE_BATCH_SIZE = 16
BUDGET_BYTES = 50_000_000
"""About a seventh of the points do not fit into it."""
SPACE = SearchSpace(
    name="cpu-sweep",
    description="every point is probed",
    methods=(
        MethodSpace(
            method="full",
            domains={
                "micro_batch_size": (1, 2, 4, 8, 16),
                "precision": ("fp32", "bf16-true"),
                "optimizer": (
                    "adamw_torch",
                    "adamw_torch_fused",
                    "adamw_bnb_8bit",
                    "lion_8bit",
                    "sgd",
                ),
                "activation_checkpointing": (0, 1, 2),
                "activation_offloading": (False,),
                "attention": ("eager",),
            },
        ),
    ),
)


def main() -> None:
    card = cpu_stand_in()
    with tempfile.TemporaryDirectory() as name:
        model = resolve(str(FOLDER / "config.json"))
        workload = Workload(
            model=model.name,
            sequence_length=SEQUENCE_LENGTH,
            effective_batch_size=EFFECTIVE_BATCH_SIZE,
            memory_budget_bytes=BUDGET_BYTES,
        )
        configs = enumerate_configs(
            SPACE, workload, num_layers=4, compute_capability=(8, 9)
        ).configs
        traces = trace_all(
            model, "causal-lm", SEQUENCE_LENGTH, card, {TraceSpec.of(c) for c in configs}
        )
        estimator = Estimator(traces, card, memory_budget_bytes=BUDGET_BYTES)
        spec = ProbeSpec(
            task="causal-lm", backend="cpu", memory_budget_bytes=BUDGET_BYTES, max_seconds=3.0
        )
        with (
            ForkServer() as server,
            open_probes(f"sqlite:///{name}/probes.db") as table,
            open(FOLDER / "sweep.jsonl", "w", encoding="utf-8") as file,
        ):
            prober = Prober(OneCard(server), table, model, spec)
            for number, config in enumerate(configs, start=1):
                measurement = prober.measure(config)
                record = {
                    "schema_version": SCHEMA_VERSION,
                    "prediction": estimator.estimate(config).to_dict(BUDGET_BYTES),
                    "measurement": measurement.to_dict(),
                }
                file.write(json.dumps(record) + "\n")
                file.flush()
                print(f"{number} of {len(configs)}: {measurement.outcome} {measurement.message}")


if __name__ == "__main__":
    main()
