"""The host's side of a step: what it launches, what it does beside, and when the GPU waits for it.

There are two queues. The host launches one operation after the other and runs ahead; the GPU works through
what has been launched. Where a stretch of operations takes the GPU longer, the host gets ahead; where it
takes the host longer, it falls behind, and once its lead is used up the GPU waits. With H and G the times
of host and GPU from the micro-step's begin to the end of a stretch, the GPU waits for max(H - G) over all
stretches: no loop over operations is needed. A stretch is one block of a trace (a layer's forward pass, the
head, a layer's backward pass with what it recomputes); within it, both are taken to go on evenly.

The host waits for the GPU once a micro-step (transformers 5.23 Trainer, logging_nan_inf_filter), so that each
micro-step begins with no lead, and what the host does between two of them is time in which the GPU idles.

`Host` holds what validation/timing/host_causes.py measured (studies/host-time). A factor makes a slower
or faster machine of it, and the time of an operation that was measured makes this machine of it.

Known limitations
- One host for every prediction. Published programs take 0.8 to 2.2 times this one's time for an operation,
  some 2.5 times (studies/host-time): a step that the host bounds may be off by as much. A probe says, or
  the time of this machine's own (search.timed_host, probe.calibrate).
- CUDA's queue has an end: the host cannot run more than some 1,000 launches ahead.
- Data loading that a worker process does not hide, logging, evaluation and checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

MODULES_PER_WEIGHT = 13 / 9
MODULES_PER_ADAPTER_WEIGHT = 70 / 14
"""Modules of a layer of Llama against its weights, and those that PEFT 0.21's LoRA of all linear layers adds
against the weights that it adds (dictionaries for each of A, B, dropout, embeddings and DoRA)."""

HOST_FACTORS = (0.8, 2.2)
"""Range of the time that an operation takes on other hosts, against this one's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Seconds that the host spends at one moment of a step, beside what it launches."""

    seconds: float
    """Once."""
    module_seconds: float
    """For each module of the model: all are walked through, in Python."""
    tensor_seconds: float = 0.0
    """For each tensor that is trained."""

    def of(self, num_modules: float, num_trained: int = 0) -> float:
        """Seconds for a model of so many modules and trained tensors."""
        walked_seconds = num_modules * self.module_seconds
        return self.seconds + walked_seconds + num_trained * self.tensor_seconds

    def times(self, factor: float) -> Work:
        """The same on a host that takes `factor` times as long."""
        return Work(
            seconds=factor * self.seconds,
            module_seconds=factor * self.module_seconds,
            tensor_seconds=factor * self.tensor_seconds,
        )


NO_WORK = Work(seconds=0, module_seconds=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Seconds that the host spends; see USUAL for where they are from."""

    launch_seconds: Mapping[str, float] = field(hash=False)
    """On one operation, by phase of the step (roofline.PHASES)."""
    python_seconds: float
    """On Python that takes as long as an operation of the forward pass: OptimizerCost.host_operations."""
    region_seconds: float
    """On each region that is recomputed, beside its operations: torch.utils.checkpoint's states of random
    numbers, contexts and hooks."""
    unpack_seconds: float
    """On unpacking a 4-bit weight, beside an operation: bitsandbytes' Python."""
    triton_seconds: float
    """On one of Liger's Triton kernels, beside an operation: its wrapper's Python, and Triton's."""
    copy_seconds: float
    """On a copy aside, beside an operation: a piece of host memory, and what the streams wait for."""
    before_micro_step: Work
    """In each micro-step: the batch is fetched, and all modules are put into training mode."""
    after_micro_step: Work
    """After each micro-step: the Trainer walks through all modules to count floating-point operations."""
    before_update: Work
    """In each optimizer step, before the optimizer's kernels: clipping, and what Accelerate asks."""
    update: Work
    """While they run: the optimizer's Python, zero_grad, the scheduler and callbacks."""
    call_seconds: float
    """On each tensor that is updated in the backward pass, beside `update`: a hook and a step of its own."""

    def times(self, factor: float) -> Host:
        """The same on a host that takes `factor` times as long."""
        return Host(
            launch_seconds={phase: factor * s for phase, s in self.launch_seconds.items()},
            python_seconds=factor * self.python_seconds,
            region_seconds=factor * self.region_seconds,
            unpack_seconds=factor * self.unpack_seconds,
            triton_seconds=factor * self.triton_seconds,
            copy_seconds=factor * self.copy_seconds,
            before_micro_step=self.before_micro_step.times(factor),
            after_micro_step=self.after_micro_step.times(factor),
            before_update=self.before_update.times(factor),
            update=self.update.times(factor),
            call_seconds=factor * self.call_seconds,
        )

    def timed(self, factor: float) -> Host:
        """A host whose operations were timed: they take `factor` times as long as this one's.

        The driver's launch was a part of that time, and what launches nothing takes the rest.
        """
        without_launch = self.times(factor * _PYTHON_SECONDS / _UNIT_SECONDS)
        return replace(without_launch, launch_seconds=self.times(factor).launch_seconds)


def num_modules(num_weights: int, num_adapter_weights: int) -> float:
    """Modules of a model of so many weights, those of adapters among them."""
    num_base_weights = num_weights - num_adapter_weights
    return MODULES_PER_WEIGHT * num_base_weights + MODULES_PER_ADAPTER_WEIGHT * num_adapter_weights


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stretches:
    """Order in which a micro-step's kernels run: stretches of some kinds, one after the other."""

    shares: NDArray[np.float64]
    """Share of each kernel's launches that lies in one stretch of a kind: kinds x kernels."""
    order: NDArray[np.int64]
    """Kind of each stretch, in order of execution."""


def late_seconds(
    gpu_seconds: NDArray[np.float64], host_seconds: NDArray[np.float64], stretches: Stretches
) -> float:
    """Time that the GPU waits for the host in a micro-step that begins with empty queues.

    `gpu_seconds`, `host_seconds`: of all launches of each kernel.
    """
    ahead = stretches.shares @ (host_seconds - gpu_seconds)
    return max(0.0, float(ahead[stretches.order].cumsum().max(initial=0.0)))


_PYTHON_SECONDS = 10.7e-6
"""Python and dispatch of an operation of the forward pass, on an idle AMD EPYC (torch 2.13)."""
_UNIT_SECONDS = 14e-6
"""An operation of the forward pass: those, and [judgement] 3.3 us for a real driver's launch. All else is a
multiple of it (studies/host-time), rounded. So is what launches nothing: most hosts are slower than this."""


def _usual(units: float) -> float:
    return units * _UNIT_SECONDS


USUAL = Host(
    launch_seconds={
        "forward": _usual(1),
        "backward": _usual(0.9),
        "recompute": _usual(1.6),
        "update": _usual(0.7),
    },
    python_seconds=_usual(1),
    region_seconds=_usual(65),
    unpack_seconds=_usual(6),
    triton_seconds=_usual(9),
    # [judgement] Out 41 us, back 60, where an addition takes 3 without the forward pass's Python (no card).
    copy_seconds=_usual(4),
    before_micro_step=Work(seconds=_usual(75), module_seconds=_usual(0.2)),
    after_micro_step=Work(seconds=0, module_seconds=_usual(0.25)),
    before_update=Work(seconds=_usual(90), module_seconds=_usual(0.1), tensor_seconds=_usual(0.45)),
    update=Work(seconds=_usual(10), module_seconds=_usual(0.1), tensor_seconds=_usual(0.6)),
    call_seconds=_usual(8.5),
)
"""An idle server of some years ago, whatever the machine."""
