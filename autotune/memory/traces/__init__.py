"""A traced step, extrapolated: in layers, in the micro-batch and in the LoRA rank.

The worker traces a few layers with prime dimensions (autotune.worker.trace.step). From its answer a Trace
makes the event lists of the whole model: the blocks of the middle period of layers are copied, and
each reference to a neighbour's tensor is shifted with the copy. Sizes are
`coefficient x micro_batch^i x rank^j`. BrokenTrace: the blocks do not repeat the way this assumes.

    terms.py     sizes, evaluated at a micro-batch and a rank
    layers.py    which layers were traced, and which each of the whole model copies
    copies.py    the numbers of the tensors that copies of a block make
    running.py   bytes alive after each event
    phases.py    what a block is a part of, and where in the model
    blocks.py    events and kernels of one block
    launches.py  kernels of some blocks, at a micro-batch and a rank
    trace.py     all of it for the whole model
    later.py     the same, put together once it is needed
"""

from autotune.memory.traces.blocks import TracedKernel
from autotune.memory.traces.later import LaterTrace, with_lean_layers_later
from autotune.memory.traces.launches import Launch
from autotune.memory.traces.layers import TOWER, BrokenTrace, Stacks
from autotune.memory.traces.phases import (
    EMBED_PHASES,
    FETCH_PHASES,
    FORWARD_PHASES,
    GENERATION_PHASES,
    OUTSIDE,
    REFERENCE_PHASES,
    SCORING_PHASES,
    SETUP_PHASES,
    Phase,
    Place,
)
from autotune.memory.traces.terms import Sums, Term, Terms, evaluate
from autotune.memory.traces.trace import Trace, TracedParameter, on_card_with

__all__ = [
    "EMBED_PHASES",
    "FETCH_PHASES",
    "FORWARD_PHASES",
    "GENERATION_PHASES",
    "OUTSIDE",
    "REFERENCE_PHASES",
    "SCORING_PHASES",
    "SETUP_PHASES",
    "TOWER",
    "BrokenTrace",
    "LaterTrace",
    "Launch",
    "Phase",
    "Place",
    "Stacks",
    "Sums",
    "Term",
    "Terms",
    "Trace",
    "TracedKernel",
    "TracedParameter",
    "evaluate",
    "on_card_with",
    "with_lean_layers_later",
]
