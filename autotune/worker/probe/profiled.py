"""A probe whose steps PyTorch's profiler watches: which operation of the device took how long."""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from autotune.records.measurement import ProbeSpec
from autotune.space.config import TrainConfig
from autotune.worker.probe import run
from autotune.worker.probe.probe_callback import ProbeCallback

FIRST_STEP = 5
"""Steps before the one that is watched: warm-up is over by then."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of events that keep the device busy."""
MOST_ROWS = 150
"""Rows that are kept of each table, those of the most device time first."""


def profiled(request: dict[str, Any]) -> dict[str, Any]:
    """Run the probe of a request with the profiler on for one optimizer step; return the verb's answer."""
    spec = ProbeSpec(**request["spec"])
    is_cuda = spec.backend == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    profiler = profile(activities=activities, record_shapes=True)
    found: dict[str, Any] = {}

    class Watched(ProbeCallback):
        """Watches one step."""

        num_ended = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            super().on_step_end(args, state, control, **rest)
            self.num_ended += 1
            if self.num_ended not in (FIRST_STEP, FIRST_STEP + 1):
                return
            if is_cuda:
                torch.cuda.synchronize()
            if self.num_ended == FIRST_STEP:
                profiler.start()
                found["began"] = time.perf_counter()
            else:
                found["wall_seconds"] = time.perf_counter() - found.pop("began")
                profiler.stop()

    run.ProbeCallback = Watched  # type: ignore[misc]
    config = TrainConfig(**request["train_config"])
    measurement = run.probe(request["config"], config, spec).to_dict()
    if "wall_seconds" not in found:
        return {"measurement": measurement}
    with tempfile.TemporaryDirectory() as scratch:
        path = f"{scratch}/trace.json"
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    return {
        "num_micro_steps": min(config.gradient_accumulation_steps, 2),
        "wall_seconds": found["wall_seconds"],
        **sums(events),
        "measurement": measurement,
    }


def sums(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Sums of a trace in Chrome's format: kernels, and the operations that launched them."""
    launched = [event for event in events if event.get("cat") in ON_DEVICE]
    operations = {
        event["args"]["External id"]: event for event in events if event.get("cat") == "cpu_op"
    }
    by_operation: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    by_kernel: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in launched:
        operation = operations.get(event["args"].get("External id"))
        args = {} if operation is None else operation["args"]
        what = [
            event["name"].partition(" (")[0] if operation is None else operation["name"],
            args.get("Input Dims", []),
            args.get("Input type", []),
        ]
        for table, name in ((by_operation, json.dumps(what)), (by_kernel, event["name"][:200])):
            table[name][0] += 1
            table[name][1] += event["dur"] / 1e6
    return {
        "busy_seconds": sum(event["dur"] for event in launched) / 1e6,
        "num_launches": len(launched),
        "num_operations": len(operations),
        "operations": [
            {"name": name, "shapes": shapes, "dtypes": dtypes, "kernels": count, "seconds": seconds}
            for text, (count, seconds) in _most(by_operation)
            for name, shapes, dtypes in [json.loads(text)]
        ],
        "kernels": [
            {"name": name, "count": count, "seconds": seconds}
            for name, (count, seconds) in _most(by_kernel)
        ],
    }


def _most(table: dict[str, list[float]]) -> list[tuple[str, list[float]]]:
    return sorted(table.items(), key=lambda row: -row[1][1])[:MOST_ROWS]
