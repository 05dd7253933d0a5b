"""A traced step, extrapolated: in layers, in the micro-batch and in the LoRA rank.

The worker traces a few layers with prime dimensions (autotune.worker.trace.step). From its answer a Trace
makes the event lists of the whole model: the blocks of the middle period of layers are copied, and
each reference to a neighbour's tensor is shifted with the copy. Sizes are
`coefficient x micro_batch^i x rank^j`. BrokenTrace: the blocks do not repeat the way this assumes.

    terms.py     sizes, evaluated at a micro-batch and a rank
    copies.py    layers, and the numbers of the tensors that copies of a block make
    running.py   bytes alive after each event
    blocks.py    phases, events and kernels of one block
    trace.py     all of it for the whole model
"""

from autotune.memory.traces.blocks import (
    FETCH_PHASES,
    FORWARD_PHASES,
    SETUP_PHASES,
    Place,
    TracedKernel,
    is_forward,
    is_setup,
)
from autotune.memory.traces.copies import BrokenTrace
from autotune.memory.traces.terms import Sums, Term, Terms, evaluate
from autotune.memory.traces.trace import Launch, Trace, TracedParameter

__all__ = [
    "FETCH_PHASES",
    "FORWARD_PHASES",
    "SETUP_PHASES",
    "BrokenTrace",
    "Launch",
    "Place",
    "Sums",
    "Term",
    "Terms",
    "Trace",
    "TracedKernel",
    "TracedParameter",
    "evaluate",
    "is_forward",
    "is_setup",
]
