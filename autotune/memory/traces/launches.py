"""Kernels of some of a trace's blocks, at any micro-batch and rank."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune.memory.traces.blocks import TracedKernel, count_kernels, stretches
from autotune.memory.traces.layers import Stacks
from autotune.memory.traces.terms import CHUNK_ROWS, Sums, Term, Terms, evaluate

Chunks = tuple[str, Term, int, int]
"""(a key of CHUNK_ROWS, tokens of a micro-batch, what is beyond that, the constant of the rule)."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel at one micro-batch and rank."""

    kernel: TracedKernel
    flops: float
    """Floating-point operations of one launch."""
    bytes_moved: float
    """Bytes that one launch reads and writes."""
    count: int
    shape: tuple[float, ...]
    """Sizes that its speed depends on: autotune.speed.roofline.Kernel."""


class Kernels:
    """The kernels of some blocks, equal ones once with their number."""

    def __init__(
        self, blocks: Sequence[Mapping[str, Any]], stacks: Stacks, chunks: Chunks | None
    ) -> None:
        self.all = count_kernels(blocks, stacks)
        self._flops = Terms([kernel.flops for kernel in self.all])
        self._moved = Sums([kernel.moved for kernel in self.all])
        self._shapes = Terms([size[:3] for kernel in self.all for size in kernel.shape])
        self._chunks = chunks
        self._make_stretches = functools.partial(stretches, blocks, stacks, self.all)

    @functools.cached_property
    def stretches(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Return the share of each kernel's launches in each traced block, and the order of the blocks."""
        return self._make_stretches()

    def launches(self, micro_batch: float, rank: int) -> list[Launch]:
        """The kernels at one size; of a part of a sample, as many on smaller shapes."""
        flops = self._flops.at(micro_batch, rank).tolist()
        moved = self._moved.at(micro_batch, rank).tolist()
        sizes = iter(self._shapes.at(micro_batch, rank).tolist())
        shapes = [tuple(islice(sizes, len(kernel.shape))) for kernel in self.all]
        return [
            Launch(kernel, num_flops, bytes_moved, _num_launches(kernel, micro_batch), shape)
            if kernel.chunk_moved is None
            else self._per_chunk(kernel, num_flops, bytes_moved, shape, micro_batch, rank)
            for kernel, num_flops, bytes_moved, shape in zip(
                self.all, flops, moved, shapes, strict=True
            )
        ]

    def _per_chunk(
        self,
        kernel: TracedKernel,
        flops: int,
        bytes_moved: float,
        shape: tuple[int, ...],
        micro_batch: float,
        rank: int,
    ) -> Launch:
        """Return a chunked kernel's launches. The last chunk has fewer tokens than the others: their mean."""
        assert self._chunks is not None
        rows, num_tokens = chunk_rows(self._chunks, micro_batch)
        num_chunks = -(-num_tokens // rows)
        mean_rows = num_tokens / num_chunks
        assert kernel.chunk_moved is not None
        per_row = sum(evaluate(term, micro_batch, rank) for term in kernel.chunk_moved)
        return Launch(
            kernel,
            flops * mean_rows,
            bytes_moved + per_row * mean_rows,
            kernel.count * (num_chunks - 1 if kernel.repeated else 1),
            tuple(
                size * (mean_rows if is_per_token else 1)
                for size, (*_, is_per_token) in zip(shape, kernel.shape, strict=True)
            ),
        )


def chunk_rows(chunks: Chunks, micro_batch: float) -> tuple[int, int]:
    """Return (tokens of a chunk, tokens of the micro-batch)."""
    name, tokens, beyond, constant = chunks
    num_tokens = max(round(evaluate(tokens, micro_batch, 1)) + beyond, 1)
    return CHUNK_ROWS[name](num_tokens, constant), num_tokens


def _num_launches(kernel: TracedKernel, micro_batch: float) -> int:
    """Return how often a kernel of no chunk is launched; for a part of a sample as for a whole one."""
    return kernel.count * (max(round(micro_batch), 1) if kernel.of_each else 1)
