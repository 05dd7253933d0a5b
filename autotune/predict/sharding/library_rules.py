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


def ddp_buckets(weights: Iterable[Weight], *, rebuilt: bool) -> list[int]:
    """Bytes of DDP's buckets, one after the other; they hold every gradient once.

    `rebuilt`: DDP knows the order in which gradients arrive, the reverse of the model's; it does not
    where it looks for unused parameters. A bucket is closed by the gradient that fills it. Each dtype
    has buckets of its own.
    """
    order = [weight for weight in weights if weight.trainable]
    if rebuilt:
        order.reverse()
    return _closed_when_full(order, first_cap=DDP_FIRST_BUCKET_BYTES, cap=DDP_BUCKET_BYTES)


def ddp_broadcasts(weights: Iterable[Weight]) -> list[int]:
    """Bytes of the flat copies of weights that DDP sends from the first GPU as it is made.

    Source: torch 2.13 distributed/utils.py _sync_module_states, csrc/distributed/c10d/comm.cpp. A weight that
    fills one by itself is not copied, and stands here all the same.
    """
    return _closed_when_full(weights, first_cap=DDP_BROADCAST_BYTES, cap=DDP_BROADCAST_BYTES)


def _closed_when_full(weights: Iterable[Weight], *, first_cap: int, cap: int) -> list[int]:
    """Bytes of buckets, each closed by what fills it, those of each dtype by themselves.

    Source: torch 2.13 csrc/distributed/c10d/reducer.cpp compute_bucket_assignment_by_size.
    """
    closed: list[int] = []
    open_bytes: dict[str, int] = {}
    caps: dict[str, int] = {}
    for weight in weights:
        size_bytes = open_bytes.pop(weight.dtype, 0) + weight.size_bytes
        if size_bytes >= caps.get(weight.dtype, first_cap):
            closed.append(size_bytes)
            caps[weight.dtype] = cap
        else:
            open_bytes[weight.dtype] = size_bytes
    return [*closed, *open_bytes.values()]


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
