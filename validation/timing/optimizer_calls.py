"""What the host spends on each tensor where an optimizer steps tensor by tensor: bitsandbytes and torchao.

    python -m tools.no_card --gpu H200 -- python -m validation.timing.optimizer_calls

PyTorch's CUDA build runs on a CUDA runtime that computes nothing (tools/no_card), so a step's time is the
host's: Python, dispatch, and for torchao the compiled function's look at its guards. Every figure is a
multiple of the time of one operation of a full fine-tuning's forward pass in the same process
(autotune.worker.calibrate.host), so that it holds on slower hosts too. Tensors are those of Qwen2's layers;
differences between two numbers of layers; processor time of the thread, the shortest of several steps.
A launch on a real card, and its end that bitsandbytes waits for, are not in it. Writes
studies/host-time/OPTIMIZERS.md, which autotune/memory/optimizers/kernels.py takes its figures from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from autotune.worker.calibrate.host import host_times
from validation.published.tables import write_sections

PAGE = Path(__file__).parents[2] / "studies" / "host-time" / "OPTIMIZERS.md"
FEW, MANY = 2, 12
"""Layers of the two models that are compared."""
STEPS = 20
LAYER = (
    (128, 128), (128,), (64, 128), (64,), (64, 128), (64,), (128, 128),
    (256, 128), (256, 128), (128, 256), (128,), (128,),
)  # fmt: skip
"""Tensors of a layer of Qwen2: torchao compiles for each shape, and goes through what it compiled."""


def _bitsandbytes(name: str) -> Callable[[Sequence[Any]], torch.optim.Optimizer]:
    import bitsandbytes

    made: Callable[[Sequence[Any]], torch.optim.Optimizer] = getattr(bitsandbytes.optim, name)
    return made


def _torchao(name: str) -> Callable[[Sequence[Any]], torch.optim.Optimizer]:
    from torchao import optim

    def made(parameters: Sequence[Any]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(optim, name)(
            parameters, block_size=256, bf16_stochastic_round=True
        )
        return optimizer

    return made


CASES = {
    "bitsandbytes AdamW8bit": lambda: _bitsandbytes("AdamW8bit"),
    "bitsandbytes Lion8bit": lambda: _bitsandbytes("Lion8bit"),
    "torchao AdamW8bit": lambda: _torchao("AdamW8bit"),
    "torchao AdamW4bit": lambda: _torchao("AdamW4bit"),
}


def step_seconds(make: Callable[[Sequence[Any]], torch.optim.Optimizer], num_layers: int) -> float:
    """Seconds of a step of so many layers' tensors, the shortest."""
    parameters = [
        torch.nn.Parameter(torch.ones(shape, device="cuda", dtype=torch.bfloat16))
        for shape in LAYER * num_layers
    ]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = make(parameters)
    best = float("inf")
    for _ in range(STEPS):
        start = time.thread_time()
        optimizer.step()
        best = min(best, time.thread_time() - start)
    return best


def main() -> None:
    with mock.patch("time.perf_counter", time.thread_time):  # as the steps are timed
        unit = host_times(torch.device("cuda")).seconds["forward"]
    print(f"unit: {unit * 1e6:.1f} us", flush=True)
    lines = ["| optimizer | a tensor, in operations of a forward pass |", "|---|---:|"]
    for name, optimizer in CASES.items():
        make = optimizer()
        more = step_seconds(make, MANY) - step_seconds(make, FEW)
        each = more / (MANY - FEW) / len(LAYER)
        print(f"{name}: {each * 1e6:.1f} us a tensor, {each / unit:.1f} operations", flush=True)
        lines.append(f"| {name} | {each / unit:.1f} |")
    write_sections(PAGE, {"calls": "\n".join(lines)})


if __name__ == "__main__":
    main()
