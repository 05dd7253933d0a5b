"""Kernels of a calibration are the ones that their names say: each runs, here on the CPU."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import here
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.catalogue.gpus import cpu_stand_in
from autotune.probe.calibrate import host_factor_of, time_on_card
from autotune.speed.calibration_plan import (
    BYTES_PER_ELEMENT,
    moving_kernel,
    num_elements_of,
    tiny_plan,
)
from autotune.speed.roofline import Kernel
from autotune.worker.calibrate import host
from autotune.worker.calibrate.host import DEPTHS, OPERATIONS, _model
from autotune.worker.calibrate.operations import operation_of
from autotune.worker.trace.kernel_costs import launches, moved_bytes

CPU = torch.device("cpu")
PLAN = tiny_plan("bfloat16")


class Calls(TorchDispatchMode):
    """Counts calls that launch a kernel, and the bytes of the tensors that the largest one touches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.most_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = [each for each in _flat(out) if isinstance(each, torch.Tensor)]
        inputs = [each for each in _flat(args) if isinstance(each, torch.Tensor)]
        storages = {each.untyped_storage().data_ptr() for each in inputs}
        is_fresh = any(each.untyped_storage().data_ptr() not in storages for each in outputs)
        if launches(func, is_fresh):
            self.names[func._overloadpacket.__name__] += 1
            self.most_bytes = max(self.most_bytes, sum(map(moved_bytes, (*inputs, *outputs))))
        return out


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [part for each in value for part in _flat(each)]
    return [value]


@pytest.mark.parametrize("kernel", PLAN, ids=lambda k: f"{k.name}-{k.dtype}-{k.bytes_moved:.0f}")
def test_a_launch_is_one_call_of_that_name(kernel: Kernel) -> None:
    operation = operation_of(kernel, CPU)
    with torch.no_grad(), Calls() as calls:
        operation.launch(0)
    name = kernel.name.removesuffix("_pageable").replace("copy_host", "copy_")
    if kernel.kind == "dequantize":  # bitsandbytes' own kernel, of several steps on a CPU
        assert sum(calls.names.values()) >= 1
        return
    (found,) = calls.names
    assert calls.names[found] == 1
    on_cpu = found.replace("_for_cpu", "")
    assert on_cpu in (name, {"mm": "linear", "mul": "mul"}.get(name, name)), found


@pytest.mark.parametrize(
    "name", ["add", "mul", "_to_copy", "clone", "cat", "native_dropout", "_softmax"]
)
def test_bytes_are_those_of_the_tensors(name: str) -> None:
    kernel = next(each for each in PLAN if each.name == name)
    if name in BYTES_PER_ELEMENT:
        kernel = moving_kernel(name, "bfloat16", 2**20)
    operation = operation_of(kernel, CPU)
    with torch.no_grad(), Calls() as calls:
        operation.launch(0)
    assert calls.most_bytes == pytest.approx(kernel.bytes_moved, rel=0.02)


def test_sizes_that_do_not_divide_are_rounded() -> None:
    kernel = next(each for each in PLAN if each.name == "embedding")
    assert num_elements_of(kernel) == 2**14


def test_a_layer_launches_as_many_operations_as_the_host_is_divided_by() -> None:
    ids = torch.ones((2, 16), dtype=torch.int64)
    counts = []
    for depth in DEPTHS:
        model = _model(depth, CPU)
        with Calls() as forward:
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)["loss"]
        with Calls() as backward:
            loss.backward()
        counts.append([sum(each.names.values()) for each in (forward, backward)])
    layers = DEPTHS[1] - DEPTHS[0]
    per_layer = [(deep - shallow) / layers for shallow, deep in zip(*counts, strict=True)]
    assert per_layer == pytest.approx(list(OPERATIONS.values()), rel=0.1)


def test_the_host_is_timed_again_while_others_are_in_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each layer takes 34 and 67 microseconds, and three times as long beside others, for three times."""
    per_times = len(DEPTHS) * (1 + host.ROUNDS)
    shares = iter([0.6] * per_times + [0.5] * per_times + [0.01] * per_times)

    def passes(model: Any, _ids: torch.Tensor) -> Any:
        waited = next(shares)
        layers = model.config.num_hidden_layers + 3
        slow = 3 if waited > 0.1 else 1
        seconds = {phase: slow * layers * n * 1e-6 for phase, n in OPERATIONS.items()}
        return host._Passes(seconds=seconds, waited=waited)

    monkeypatch.setattr(host, "_passes", passes)
    found = host.host_times(CPU)
    assert found.waited == 0.01
    assert found.seconds == pytest.approx({"forward": 1e-6, "backward": 1e-6})
    assert next(shares, None) is None
    shares = itertools.chain(iter([0.4] * per_times), itertools.repeat(0.5))
    assert host.host_times(CPU).waited == 0.4


def test_another_process_on_the_processor_is_seen() -> None:
    model, ids = host._model(DEPTHS[1], CPU), torch.ones((2, 16), dtype=torch.int64)
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
            waited = statistics.median(host._passes(model, ids).waited for _ in range(9))
            other.kill()
    finally:
        os.sched_setaffinity(0, cpus)
    assert 0.2 < waited < 0.9


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_times_all_of_them(tmp_path: Path) -> None:
    seen = []
    timing = time_on_card(
        cpu_stand_in(), None, is_tiny=True, progress=lambda *so_far: seen.append(so_far)
    )
    assert timing.skipped == ()
    assert [each.kernel for each in timing.timed] == PLAN
    assert seen[-1] == (len(PLAN), len(PLAN))
    assert all(0 < each.seconds < 1 and math.isfinite(each.spread) for each in timing.timed)
    factor = host_factor_of(timing.host_seconds)
    assert factor is not None
    assert 0.1 < factor < 50
    assert 0 <= timing.host_waited < 1
    ended = here.command("calibrate", "--backend", "cpu", cwd=tmp_path)
    assert ended.returncode == 0
    assert ended.stdout.startswith(f"{len(PLAN)} tiny kernels were timed on the CPU.")
    assert list(tmp_path.iterdir()) == []
