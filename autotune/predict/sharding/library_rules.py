"""Rules by which DDP, FSDP2 and DeepSpeed ZeRO deal out one weight, or fill buckets with a list of them.

Sources: torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param.py and nn/parallel/distributed.py with
csrc/distributed/c10d/reducer.cpp; deepspeed 0.19.8 runtime/zero/stage_1_and_2.py, stage3.py and
partition_parameters.py. tests/contracts/test_parallel_real.py runs DDP and FSDP2 in real processes,
tests/contracts/test_zero.py DeepSpeed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from autotune.common.dtypes import DTYPE_BYTES
from autotune.common.units import MIB

# torch 2.13 csrc/distributed/c10d/reducer.hpp kDefaultFirstBucketBytes and kDefaultBucketBytesCap.
DDP_FIRST_BUCKET_BYTES = MIB
DDP_BUCKET_BYTES = 25 * MIB
# torch 2.13 nn/parallel/distributed.py, broadcast_bucket_size.
DDP_BROADCAST_BYTES = 250 * MIB

# deepspeed 0.19.8 runtime/zero/stage_1_and_2.py: nccl_start_alignment_factor.
_ZERO_ALIGNMENT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """One weight of the model, whole."""

    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    group: int
    """Number of the optimizer's parameter group."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]


def fsdp2_shard_shape(shape: tuple[int, ...], num_gpus: int) -> tuple[int, ...]:
    """The shape of one GPU's shard under FSDP2: rows are dealt out, ceil(rows / GPUs) to each.

    Every GPU keeps the padding of the last ones.
    """
    rows, *rest = shape or (1,)
    return (-(-rows // num_gpus), *rest)


def zero_partition_elements(num_elements: int, num_gpus: int) -> int:
    """Elements of one GPU's part of a flat group (ZeRO 1 and 2), padded so that parts start at 4 bytes."""
    alignment = _ZERO_ALIGNMENT * num_gpus
    return -(-num_elements // alignment) * alignment // num_gpus


def zero3_partition_elements(num_elements: int, num_gpus: int) -> int:
    """Elements of one GPU's part of one weight: ZeRO 3 deals out each by itself."""
    return -(-num_elements // num_gpus)


def ddp_buckets(weights: Iterable[Weight]) -> list[int]:
    """Bytes of DDP's buckets where it looks for unused parameters, in the order in which it makes them.

    They hold every gradient once. A bucket is closed by the gradient that fills it, in the model's order;
    each dtype has buckets of its own. Source: torch 2.13 nn/parallel/distributed.py, _ddp_init_helper.
    """
    trained = [weight for weight in weights if weight.trainable]
    filled = _closed_when_full(trained, first_cap=DDP_FIRST_BUCKET_BYTES, cap=DDP_BUCKET_BYTES)
    return [sum(sizes) for sizes in reversed(_by_first_weight(filled))]


def ddp_rebuilt_buckets(arriving: Iterable[Weight]) -> list[int]:
    """Bytes of the buckets that DDP makes anew once it knows the order in which gradients arrive."""
    filled = _closed_when_full(arriving, first_cap=DDP_FIRST_BUCKET_BYTES, cap=DDP_BUCKET_BYTES)
    return list(map(sum, filled.values()))


def ddp_first_buckets(weights: Iterable[Weight]) -> list[int]:
    """Bytes of the buckets that DDP has before those are made anew: one of each dtype.

    Source: torch 2.13 nn/parallel/distributed.py, _ddp_init_helper.
    """
    found: dict[str, int] = {}
    for weight in weights:
        if weight.trainable:
            found[weight.dtype] = found.get(weight.dtype, 0) + weight.size_bytes
    return [*reversed(found.values())]


def ddp_broadcasts(weights: Iterable[Weight]) -> list[int]:
    """Bytes of the flat copies of weights that DDP sends from the first GPU as it is made.

    A weight that is sent by itself is not copied: 0. Source: torch 2.13 distributed/utils.py
    _sync_module_states, csrc/distributed/c10d/comm.cpp and csrc/utils/tensor_flatten.h.
    """
    filled = _closed_when_full(weights, first_cap=DDP_BROADCAST_BYTES, cap=DDP_BROADCAST_BYTES)
    return [sum(sizes) if len(sizes) > 1 else 0 for sizes in _by_first_weight(filled)]


Filled = dict[int, list[int]]
"""Bytes of the weights in each bucket, by the position of its first weight, in the order of closing."""


def _closed_when_full(weights: Iterable[Weight], *, first_cap: int, cap: int) -> Filled:
    """Fill buckets, each of which is closed by what fills it; each dtype has its own.

    Source: torch 2.13 csrc/distributed/c10d/reducer.cpp compute_bucket_assignment_by_size.
    """
    closed: Filled = {}
    opened: dict[str, tuple[int, list[int]]] = {}
    caps: dict[str, int] = {}
    for position, weight in enumerate(weights):
        begin, sizes = opened.setdefault(weight.dtype, (position, []))
        sizes.append(weight.size_bytes)
        if sum(sizes) >= caps.get(weight.dtype, first_cap):
            closed[begin] = sizes
            del opened[weight.dtype]
            caps[weight.dtype] = cap
    return closed | dict(opened.values())


def _by_first_weight(filled: Filled) -> list[list[int]]:
    return [sizes for _, sizes in sorted(filled.items())]


def zero_buckets(sizes_bytes: Iterable[int], cap_bytes: int) -> list[int]:
    """Bytes of DeepSpeed's buckets for reducing gradients: a gradient that would overfill one opens the next.

    One that is larger than a bucket goes by itself.
    """
    buckets: list[int] = []
    for size_bytes in sizes_bytes:
        if buckets and buckets[-1] + size_bytes <= cap_bytes:
            buckets[-1] += size_bytes
        else:
            buckets.append(size_bytes)
    return buckets
