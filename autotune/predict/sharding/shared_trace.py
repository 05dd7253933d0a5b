"""The answers that steps of several GPUs have in common with the trace of one GPU's step."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from autotune.memory.optimizers import TensorSpec
from autotune.memory.traces import Launch, Trace
from autotune.memory.traces.running import in_blocks, running
from autotune.memory.traces.terms import Array
from autotune.predict.sharding.exchange import Exchange


class SharedTrace:
    """A Trace as one of several GPUs runs it: it answers the same questions, and has `exchange`."""

    setup: list[int]
    first: list[int]
    again: list[int]
    next: list[int]
    gradients: list[int]
    step_buffers: list[int]
    left: Sequence[int] = ()
    """Tensors that a step's first micro-step leaves, beside gradients and the loss."""
    whole_gradients: Sequence[int] = ()
    """Gradients of all weights that the micro-steps but the last leave, and which the last reduces."""
    only_last: Sequence[int] = ()
    """Tensors that the last micro-step of an optimizer step makes and frees, and no other."""
    behind_first: Sequence[int] = ()
    """Events between the first optimizer step and the second."""
    aside: Sequence[Sequence[int]] = ()
    """The tensors that each further CUDA stream allocates."""
    workspaces: list[int]
    stages: tuple[SharedTrace, ...] = ()
    """One of each GPU that is predicted by itself, where they hold different tensors."""
    of_micro_batches: Sequence[int] = ()
    """Tensors of which there is one for each micro-batch of a step, from the first step on."""
    of_losses: Sequence[int] = ()
    """Tensors that a micro-batch makes before all else, and that stay with its loss until the next step."""
    batch: list[int]
    count: list[int]
    loss: int | None
    num_prepared_events: int
    num_own_events: int
    _weights: Collection[int] | None = None
    """The weights that the GPU has, among them those that it updates; None: all."""
    identity: str = ""
    """Trace.identity, but empty: what several GPUs make of a step is worked out anew."""

    @property
    def of_one(self) -> Trace:
        """The step of a GPU that has all to itself."""
        return self._trace

    def __init__(self, trace: Trace, name: str) -> None:
        """`name`: of the way to share, which goes for the operation that makes the tensors it adds."""
        self._trace = trace
        self.name = name
        # What prices a configuration asks for the same sizes several times in a row.
        self._all_sizes = functools.lru_cache(maxsize=2)(self._put_together)
        self._all_blocks = functools.lru_cache(maxsize=2)(self._in_blocks)
        self._left = functools.cache(self._find_left)
        self._order = functools.cache(self._find_order)

    def _put_together(self, micro_batch: int, rank: int) -> Array:
        """Return the bytes of each tensor, those that sharing adds last."""
        raise NotImplementedError

    @property
    def added_categories(self) -> list[str]:
        """One of allocator.CATEGORIES per tensor that sharing adds."""
        raise NotImplementedError

    def trainable(self, rank: int) -> list[TensorSpec]:
        """The tensors that the optimizer updates on this GPU."""
        return self._trace.trainable(rank, self._weights)

    def trainable_by_all(self, rank: int) -> list[TensorSpec]:
        """The tensors that all GPUs together update, whole."""
        return self._trace.trainable(rank)

    def exchange(self, micro_batch: int, rank: int) -> Exchange:
        """Bytes that are sent between the GPUs and to the host, and that are kept for it."""
        raise NotImplementedError

    def around_update(self) -> tuple[list[int], list[int]]:
        """Events before the update, and after it: by default gradients go with what the update needs."""
        done = [~number for number in (*self.step_buffers, *self.gradients)]
        return list(self.step_buffers), done

    @functools.cached_property
    def categories(self) -> list[str]:
        """One of allocator.CATEGORIES per tensor."""
        return [*self._trace.categories, *self.added_categories]

    @property
    def operations(self) -> list[str]:
        """The operation that made each tensor, as Trace.operations.

        Tensors that sharing adds have the parallelism's name instead.
        """
        return [*self._trace.operations, *[self.name] * len(self.added_categories)]

    @property
    def layers(self) -> dict[int, int]:
        """The layers of the trace, as Trace.layers."""
        return self._trace.layers

    @property
    def num_weights(self) -> int:
        """Number of weights of the whole model, as Trace.num_weights."""
        return self._trace.num_weights

    @property
    def stretches(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Order of the kernels, as Trace.stretches."""
        return self._trace.stretches

    def launches(self, micro_batch: float, rank: int) -> list[Launch]:
        """The kernels of a micro-step, as Trace.launches."""
        return self._trace.launches(micro_batch, rank)

    def num_parameters(self, rank: int) -> tuple[int, int]:
        """Elements of the whole model: (all, trainable)."""
        return self._trace.num_parameters(rank)

    def sizes(self, micro_batch: int, rank: int) -> list[int]:
        """Bytes of each tensor."""
        listed: list[int] = self._all_sizes(micro_batch, rank).tolist()
        return listed

    def order_of(self, events: str) -> NDArray[np.int64]:
        """Return the list of events of that name, as Trace.order_of."""
        return self._order(events)

    def _find_order(self, events: str) -> NDArray[np.int64]:
        order = np.asarray(getattr(self, events), dtype=np.int64)
        order.flags.writeable = False
        return order

    def order_of_earlier(self, events: str) -> NDArray[np.int64]:
        """Return the list of events of that name in a micro-step that is not the last of its step."""
        order = self.order_of(events)
        kept: NDArray[np.int64] = order[
            ~np.isin(np.where(order < 0, ~order, order), self.only_last)
        ]
        return kept

    def running_bytes(self, events: str, micro_batch: int, rank: int) -> Array:
        """Bytes alive after each event of `setup`, `again` or `next`, from zero; 512 B blocks."""
        return running(self.order_of(events), self._all_blocks(micro_batch, rank))

    def left_bytes(self, events: str, micro_batch: int, rank: int) -> int:
        """Bytes that are left after the events."""
        numbers, signs = self._left(events)
        return int((self._all_blocks(micro_batch, rank)[numbers] * signs).sum())

    def _in_blocks(self, micro_batch: int, rank: int) -> Array:
        return in_blocks(self._all_sizes(micro_batch, rank))

    def _find_left(self, events: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the tensors that are left after the events (1), or were there before and are not (-1)."""
        order = self.order_of(events)
        signs = np.bincount(order[order >= 0], minlength=(num := len(self.categories)))
        signs -= np.bincount(~order[order < 0], minlength=num)
        (numbers,) = signs.nonzero()
        return numbers, signs[numbers]

    def bytes_of(self, numbers: Sequence[int], micro_batch: int, rank: int) -> int:
        """Sum of tensors' sizes, each rounded to 512 B."""
        return int(self._all_blocks(micro_batch, rank)[list(numbers)].sum())
