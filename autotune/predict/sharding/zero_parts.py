"""Sizes of what DeepSpeed's ZeRO copies and sends, weight by weight, as its own code works them out.

Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py (get_partition_info, average_tensor,
copy_grads_in_partition, get_grad_norm_direct), stage3.py (get_grad_norm_direct) and
runtime/comm/coalesced_collectives.py (reduce_scatter_coalesced).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from autotune.predict.sharding.library_rules import zero3_partition_elements
from autotune.predict.sharding.shards import Shares

_NORM_BYTES = 8
"""A gradient is copied to float64 for its norm (runtime/zero/utils.py, get_norm_dtype)."""
_NORM_BLOCK = 250_000_000
"""Elements of a gradient that ZeRO 3 copies at a time (runtime/zero/stage3.py, _constant_buffered_norm2)."""


class ZeroParts:
    """The GPUs' parts of one model's trainable weights, which are named by their positions."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._by_gpu = functools.cache(self._slices_by_gpu)

    def held_bytes(self, rank: int, gpu: int) -> int:
        """Bytes of the gradients that a GPU keeps under ZeRO 1 and 2: all of each weight it has a part of."""
        weights = self._shares.weights(rank)
        return sum(self._shares.working_bytes(weights[p]) for p in self._by_gpu(rank)[gpu])

    def fullest_gpu(self, rank: int) -> int:
        """Number of the first GPU that keeps the most gradients under ZeRO 1 and 2."""
        return max(range(self._shares.num_gpus), key=lambda number: self.held_bytes(rank, number))

    def is_held(self, rank: int, gpu: int, position: int) -> bool:
        return position in self._by_gpu(rank)[gpu]

    def gradient_bytes(self, rank: int, position: int) -> int:
        """Bytes of a weight's gradient, whole."""
        return self._shares.working_bytes(self._shares.weights(rank)[position])

    def norm_bytes(self, rank: int, gpu: int) -> int:
        """Bytes of the largest copy that a GPU makes for the norm of its gradients."""
        if self._shares.row.stage == 3:
            largest = max(
                (self._part_elements(w.num_elements) for w in self._shares.trained(rank)), default=0
            )
        else:
            largest = max(self._by_gpu(rank)[gpu].values(), default=0)
        return _NORM_BYTES * largest

    def sent_elements(self, rank: int, position: int) -> int:
        """Most elements of a weight's gradient that a GPU sends to its host under offloading."""
        if self._shares.row.stage == 3:
            return self._part_elements(self._shares.weights(rank)[position].num_elements)
        return max(held.get(position, 0) for held in self._by_gpu(rank))

    def part_bytes(self, rank: int, position: int) -> int:
        """Bytes of the GPU's part of a weight's gradient under ZeRO 3."""
        weight = self._shares.weights(rank)[position]
        element_bytes = self._shares.working_bytes(weight) // weight.num_elements
        return self._part_elements(weight.num_elements) * element_bytes

    def normed_bytes(self, num_elements: int) -> int:
        """Bytes of the copy that is made for the norm of so many elements; ZeRO 3 goes by blocks."""
        is_by_blocks = self._shares.row.stage == 3
        return _NORM_BYTES * (min(num_elements, _NORM_BLOCK) if is_by_blocks else num_elements)

    def flat_bytes(self, rank: int) -> int:
        """Bytes of the GPU's gradients of a group in one piece, before they are made float32; else 0."""
        step_bytes = self._shares.step_gradient_bytes(rank)
        compute_bytes = self._shares.compute_bytes
        return step_bytes // 4 * compute_bytes if compute_bytes < 4 else 0

    def reduced_bytes(self, rank: int, positions: Sequence[int]) -> int:
        """Bytes of the copy that is made of a bucket's gradients to reduce them; 0 where none is."""
        weights = [self._shares.weights(rank)[position] for position in positions]
        num_gpus = self._shares.num_gpus
        if self._shares.row.stage == 3:
            if len(weights) == 1 and not weights[0].num_elements % num_gpus:
                return 0
            return sum(
                num_gpus
                * self._part_elements(weight.num_elements)
                * (self._shares.working_bytes(weight) // weight.num_elements)
                for weight in weights
            )
        owners = (gpu for position in positions for gpu in self._owners(rank, position))
        num_slices = sum(1 for _ in itertools.groupby(owners))
        return sum(map(self._shares.working_bytes, weights)) if num_slices > 1 else 0

    def _owners(self, rank: int, position: int) -> list[int]:
        return [gpu for gpu, held in enumerate(self._by_gpu(rank)) if position in held]

    def _part_elements(self, num_elements: int) -> int:
        return zero3_partition_elements(num_elements, self._shares.num_gpus)

    def _slices_by_gpu(self, rank: int) -> list[dict[int, int]]:
        """Return the positions of the weights that each GPU has a part of, with the part's elements."""
        found: list[dict[int, int]] = [{} for _ in range(self._shares.num_gpus)]
        sizes = self._shares.partitions(rank)
        ends = dict.fromkeys(self._shares.groups, 0)
        for position, weight in enumerate(self._shares.weights(rank)):
            if not weight.trainable:
                continue
            begin = ends[weight.group]
            end = ends[weight.group] = begin + weight.num_elements
            size = sizes[weight.group]
            for gpu in range(begin // size, (end - 1) // size + 1):
                found[gpu][position] = min(end, (gpu + 1) * size) - max(begin, gpu * size)
        return found
