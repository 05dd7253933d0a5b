"""Numbers of layers that each of several GPUs gets, so that the fullest is about as empty as can be."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from autotune.memory.traces import FORWARD_PHASES, Phase, Trace
from autotune.memory.traces.running import in_blocks, running
from autotune.predict.sharding.shards import is_tied

USUAL_RANK = 16
"""LoRA rank at which tensors are weighed and told apart. [judgement]"""
_STATE_BYTES = 8
"""Bytes of AdamW's state in float32, per weight that trains."""


def can_deal(trace: Trace, num_gpus: int) -> bool:
    """Whether the trace tells one stack of layers apart, and every GPU can have one of them."""
    places = {place for _, place, _ in trace.blocks() if place[1] >= 0}
    return len(places) >= num_gpus and len({stack for stack, _ in places}) == 1


def layers_per_gpu(trace: Trace, num_gpus: int, *, micro_batch: int) -> tuple[int, ...]:
    """Deal a trace's layers out so that the fullest GPU is about as empty as can be.

    Each layer goes to the GPU with the least on it: weights, what trains with AdamW, and what stays for
    the backward pass; beside them the embedding, and what the head takes at its peak.
    """
    sizes = in_blocks(trace.sizes(micro_batch, USUAL_RANK))
    parameters = trace.parameters()
    head = 0 if is_tied(parameters) else num_gpus - 1
    trained = {p.number for p in parameters if p.trainable}
    state_bytes = sum(
        _STATE_BYTES * spec.num_elements for spec in trace.trainable(USUAL_RANK, trained)
    )
    trained_bytes = int(sizes[list(trained)].sum()) if trained else 0
    times = 2 + state_bytes / trained_bytes if trained_bytes else 1.0

    def held(numbers: Iterable[int]) -> float:
        return sum(int(sizes[n]) * (times if n in trained else 1.0) for n in numbers)

    num_layers = 1 + max(place[1] for _, place, _ in trace.blocks())
    of_layers = held(p.number for p in parameters if p.place[1] >= 0)
    loads = [0.0] * num_gpus
    for parameter in parameters:
        if parameter.place[1] < 0:
            loads[0 if parameter.embedding else head] += held([parameter.number])
    for phase, place, events in trace.blocks():
        alive = running(np.asarray(events, dtype=np.int64), sizes)
        if phase in FORWARD_PHASES and place[1] >= 0:
            of_layers += int(alive[-1])
        elif phase == Phase.HEAD:
            loads[head] += int(alive.max(initial=0))
    each = of_layers / num_layers
    counts = [1] * num_gpus
    loads = [load + each for load in loads]
    for _ in range(num_layers - num_gpus):
        emptiest = loads.index(min(loads))
        counts[emptiest] += 1
        loads[emptiest] += each
    return tuple(counts)
