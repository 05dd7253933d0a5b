"""The host's side of a step: what it launches, what it does beside, and when the GPU waits for it.

There are two queues. The host launches one operation after the other and runs ahead; the GPU works through
what has been launched. Where a stretch of operations takes the GPU longer, the host gets ahead; where it
takes the host longer, it falls behind, and once its lead is used up the GPU waits. With H and G the times
of host and GPU from the micro-step's begin to the end of a stretch, the GPU waits for max(H - G) over all
stretches: no loop over operations is needed. A stretch is one block of a trace (a layer's forward pass, the
head, a layer's backward pass with what it recomputes); within it, both are taken to go on evenly.

The host waits for the GPU once a micro-step (transformers 5.23 Trainer, logging_nan_inf_filter), so that each
micro-step begins with no lead, and what the host does between two of them is time in which the GPU idles.

`Host` holds what was measured: validation/timing/host_time.py and host_causes.py on an AMD EPYC
(studies/host-time). A factor makes a slower or faster machine of it.

Known limitations
- One host for every prediction. Published programs take 0.8 to 2.2 times this one's time for an operation,
  some 2.8 times (studies/host-time): a step that the host bounds may be off by as much. A probe or a
  calibration says.
- CUDA's queue has an end: the host cannot run more than some 1,000 launches ahead.
- Data loading that a worker process does not hide, logging, evaluation and checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MODULES_PER_WEIGHT = 13 / 9
MODULES_PER_ADAPTER_WEIGHT = 70 / 14
"""Modules of a layer of Llama against its weights, and those that PEFT 0.21's LoRA of all linear layers adds
against the weights that it adds (dictionaries for each of A, B, dropout, embeddings and DoRA)."""

HOST_FACTORS = (0.8, 2.2)
"""Range of the time that an operation takes on other hosts, against this one's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Seconds that the host spends; see USUAL for where they are from."""

    launch_seconds: Mapping[str, float] = field(hash=False)
    """On one operation, by phase of the step (roofline.PHASES)."""
    micro_step_seconds: float
    """On a micro-step beside its operations and modules."""
    module_seconds: float
    """On a micro-step for each module: the Trainer puts all into training mode, and walks through them to
    count floating-point operations (transformers 5.23 Trainer.training_step, floating_point_ops)."""
    step_seconds: float
    """On an optimizer step beside its launches."""
    tensor_seconds: float
    """On an optimizer step for each tensor that is trained."""
    call_seconds: float
    """On a step of one tensor by itself, beside that."""

    def between_micro_steps_seconds(self, num_weights: int, num_adapter_weights: int) -> float:
        """Time of a micro-step in which the GPU has nothing to do.

        `num_weights`: tensors, those of adapters among them.
        """
        num_modules = MODULES_PER_WEIGHT * (num_weights - num_adapter_weights)
        num_modules += MODULES_PER_ADAPTER_WEIGHT * num_adapter_weights
        return self.micro_step_seconds + num_modules * self.module_seconds

    def times(self, factor: float) -> Host:
        """The same on a host that takes `factor` times as long."""
        return Host(
            launch_seconds={phase: factor * s for phase, s in self.launch_seconds.items()},
            micro_step_seconds=factor * self.micro_step_seconds,
            module_seconds=factor * self.module_seconds,
            step_seconds=factor * self.step_seconds,
            tensor_seconds=factor * self.tensor_seconds,
            call_seconds=factor * self.call_seconds,
        )


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


# Python and dispatch of Llama's layers, full fine-tuning and LoRA: 10.7 us in the forward pass, 8.4 in the
# backward pass (validation/timing/host_time.py on an idle AMD EPYC, torch 2.13, transformers 5.23, peft
# 0.21); [judgement] 3 more for a launch on the GPU. Recomputed ones: chosen with Qwen 1's LoRA at 256
# tokens on the A100, which the host bounds (studies/published-speed, the rows `chosen with`); on a CPU they
# take 20 to 38, as each tensor that is saved passes through Python. What is beside the operations is in
# multiples of a forward operation's 10.7 us (studies/host-time): 0.28 for a module, 14 to 44 for a
# micro-step, 80 for an optimizer step, 0.55 to 1.2 for a trained tensor (the fused AdamW's state, zero_grad).
# A step of one tensor of 338 takes 56 us (fused AdamW) to 102 us (foreach) more than its part of a step of
# all (torch 2.13 on two shared cores): [judgement] about the fused one's.
USUAL = Host(
    launch_seconds={"forward": 14e-6, "backward": 11e-6, "recompute": 20e-6, "update": 10e-6},
    micro_step_seconds=0.3e-3,
    module_seconds=3.0e-6,
    step_seconds=0.8e-3,
    tensor_seconds=9e-6,
    call_seconds=60e-6,
)
"""An idle server of some years ago, whatever the machine."""
