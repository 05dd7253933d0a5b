"""The seconds that torch.compile takes before the first step, and how sure a compiled step's time is.

Compiling is Python's work: capturing the step, tracing it, lowering it and writing its kernels grow with the
number of kernels, as every layer is gone through; Triton's and the GPU's compiler then build the kernels that
differ, several at a time. Nothing published says how long that takes by kernel: the ranges are [judgement].

Not modelled: a cache of compiled kernels, which makes a second start quicker; the machine.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autotune.speed.sureness import Parts

FIXED_SECONDS = (5.0, 30.0)
"""Least and most seconds of a compilation beside its kernels: imports, the first start of the compilers.
[judgement]"""
SECONDS_PER_KERNEL = (0.03, 0.12)
"""Least and most seconds for each kernel that a step launches. [judgement]"""
SECONDS_PER_UPDATE = (1.0, 4.0)
"""Least and most seconds for each update that an optimizer compiles: a graph of a dozen operations, captured,
lowered and built by itself. [judgement]"""
COMPILED_SPREAD = 0.12
"""Spread of a compiled step's time beside that of its kernels: of what is fused, and of how well the made
kernels run. [judgement], made with three published gains in view that are missed by 4 to 9 %
(studies/compiled): they do not test it."""


def compile_seconds(*, num_kernels: float = 0, num_updates: int = 0) -> tuple[float, float]:
    """Least and most seconds that compiling adds to a run, before its first step is through.

    `num_kernels`: launches of a compiled step; `num_updates`: different updates that an optimizer compiles.
    """
    low, high = (
        fixed + num_kernels * of_kernel + num_updates * of_update
        for fixed, of_kernel, of_update in zip(
            FIXED_SECONDS, SECONDS_PER_KERNEL, SECONDS_PER_UPDATE, strict=True
        )
    )
    return low, high


def less_sure(parts: Parts) -> Parts:
    """The same time of a compiled step, each part less sure."""
    return {
        cause: replace(part, spread=math.hypot(part.spread, COMPILED_SPREAD))
        for cause, part in parts.items()
    }
