"""Times kernels one by one: on CUDA by events around replays of a graph, so that no launch is in it.

A card is warmed up by products first, as training lasts and rested cards are up to a tenth quicker.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from autotune.common import json_records
from autotune.errors import first_line
from autotune.speed.calibration_plan import product
from autotune.speed.roofline import Kernel
from autotune.worker.calibrate.host import host_times
from autotune.worker.calibrate.operations import Operation, operation_of

_GRAPH_SECONDS = 0.02
"""Time that one replay of a graph takes about."""
_MOST_IN_GRAPH = 256
_RUNS = (5, 200)
"""Fewest and most runs of which the median is taken."""
_WARM_UP_SIZE = 4096


def time_kernels(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one answer per kernel, and then one of the host, as the verb `calibrate` gives them."""
    kernels = [json_records.read(Kernel, each, "kernel") for each in request["kernels"]]
    is_cuda = request["backend"] == "cuda"
    if is_cuda:
        try:
            torch.cuda.init()
            device = torch.device("cuda", torch.cuda.current_device())
            yield {"device": torch.cuda.get_device_name(device)}
            _warm_up(kernels, device, request["warm_up_seconds"])
        except (AssertionError, RuntimeError) as error:
            # No CUDA in this build; no driver, one too old, no memory left for a context.
            yield {"unusable": first_line(error, 200)}
            return
    else:
        torch.set_num_threads(1)
        device = torch.device("cpu")
    for number, kernel in enumerate(kernels):
        try:
            yield {"index": number, **_timed(kernel, device, request["seconds_each"])}
        except torch.OutOfMemoryError:
            yield {"index": number, "skipped": "out of memory"}
        except (ImportError, NotImplementedError, RuntimeError) as error:
            yield {"index": number, "skipped": first_line(error, 200)}
        # What it held is gone by now, and is not to be what the next one lacks.
        gc.collect()
        if is_cuda:
            torch.cuda.empty_cache()
    host = host_times(device)
    yield {"host": host.seconds, "waited": host.waited}


def _warm_up(kernels: Sequence[Kernel], device: torch.device, seconds: float) -> None:
    """Products until the card is as warm as in training, as far as that takes seconds."""
    half = next((each.dtype for each in kernels if each.kind == "matmul"), "float16")
    warm = operation_of(product(half, *([_WARM_UP_SIZE] * 3)), device)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for turn in range(20):
            warm.launch(turn)
        torch.cuda.synchronize(device)


def _timed(kernel: Kernel, device: torch.device, seconds: float) -> dict[str, Any]:
    """Median seconds of a launch, and their spread."""
    operation = operation_of(kernel, device)
    with torch.no_grad():
        if device.type != "cuda":
            runs = _on_cpu(operation, seconds)
        else:
            runs = _on_cuda(operation, device, seconds)
    middle = statistics.median(runs)
    if not middle > 0:
        raise RuntimeError("the clock saw no time go by")
    low, *_, high = statistics.quantiles(runs, n=6)
    return {
        "seconds": middle,
        "spread": (high - low) / 2 / middle,
        "num_weights": operation.num_weights,
    }


def _on_cpu(operation: Operation, seconds: float) -> list[float]:
    runs = list[float]()
    operation.launch(0)
    end = time.perf_counter() + seconds
    while len(runs) < _RUNS[0] or (time.perf_counter() < end and len(runs) < _RUNS[1]):
        start = time.perf_counter()
        operation.launch(len(runs))
        runs.append(time.perf_counter() - start)
    return runs


def _on_cuda(operation: Operation, device: torch.device, seconds: float) -> list[float]:
    for turn in range(3):
        operation.launch(turn)
    torch.cuda.synchronize(device)
    each = _between_events(lambda: operation.launch(0), 1)[0]
    turns = operation.num_weights
    wanted = math.ceil(_GRAPH_SECONDS / max(each, 1e-6) / turns) * turns
    num_launches = max(turns, min(wanted, _MOST_IN_GRAPH // turns * turns))

    def launch_all() -> None:
        for turn in range(num_launches):
            operation.launch(turn)

    run = _in_graph(launch_all) if operation.in_graph else launch_all
    run()
    torch.cuda.synchronize(device)
    at_once = max(num_launches * each, 1e-4)
    num_runs = max(_RUNS[0], min(math.ceil(seconds / at_once), _RUNS[1]))
    return [total / num_launches for total in _between_events(run, num_runs)]


def _in_graph(launch_all: Callable[[], None]) -> Callable[[], None]:
    """One graph of all launches: its replay needs the host once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_all()
    return graph.replay


def _between_events(run: Callable[[], Any], num_runs: int) -> list[float]:
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(num_runs)
    ]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]
