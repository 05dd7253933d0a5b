"""A micro-step under ZeRO 1, 2 and 3, and what comes before and after the update, as DeepSpeed runs them.

Every gradient is copied into a bucket as soon as its weight gets it, and freed; one that is larger than the
bucket stays until the next comes. A full bucket is reduced, and what a GPU keeps of it is copied to its own
gradients: under ZeRO 1 and 2 they are made with the first bucket, and those of a further micro-batch stand
beside them until the end of its backward pass. ZeRO 1 does this before the update, with the sums of all
micro-batches. DeepSpeed's hooks are on what adds gradients up: what one was made of has gone by then, and
that of a weight which is embedding and head comes when both have gone backward.
ZeRO 3 gathers a module's weight as the module is used, and drops it behind it: nothing is gathered ahead
(deepspeed_json has stage3_prefetch_bucket_size 0; with it DeepSpeed runs ahead without end, and keeps up to
stage3_max_live_parameters weights, a billion, until the backward pass).

Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py (create_gradient_handling_hooks,
reduce_independent_p_g_buckets_and_remove_grads, copy_grads_in_partition, reduce_ipg_grads,
independent_gradient_partition_epilogue, step), stage3.py (the same names),
partitioned_param_coordinator.py (fetch_sub_module, release_sub_module). Held against real processes:
studies/zero, tests/contracts/test_zero.py.

Known limitations
- The largest weight of a layer is taken to be gathered for all of the layer's pass, and all of them where the
  layer is computed again: those that are behind their use already, too.
- DeepSpeed's linear layers keep their inputs though their weights are frozen (runtime/zero/linear.py,
  LinearFunctionForZeroStage3): the head's is predicted. With adapters on some layers alone ZeRO 3 keeps more.
- Under offloading, which gradients share a bucket is worked out at one LoRA rank; so is, for all, which are
  larger than a bucket.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from autotune.memory.traces import EMBED_PHASES, FORWARD_PHASES, REFERENCE_PHASES, Phase, Place
from autotune.predict.sharding.added_tensors import AddedTensors, Size, Stream
from autotune.predict.sharding.layer_counts import USUAL_RANK
from autotune.predict.sharding.shards import EMBED, TAIL, Shares, Unit
from autotune.predict.sharding.step import (
    Blocks,
    Writer,
    at_logits_gradient,
    unit_in,
    units_in,
)
from autotune.predict.sharding.zero_parts import ZeroParts


def _in_float32(num_elements: int) -> int:
    return 4 * num_elements


def _of_elements(size: Size, elements: Size) -> Size:
    return lambda rank: size(elements(rank))


class _ZeroWriter(Writer):
    """Writes what goes through ZeRO's bucket."""

    def __init__(self, extra: AddedTensors, shares: Shares, parts: ZeroParts, gpu: int) -> None:
        """`gpu`: the number of the GPU whose gradients under ZeRO 1 and 2 are told of."""
        super().__init__(extra, shares)
        self._parts = parts
        self._gpu = gpu
        self._put_so_far: list[int] = []
        """Positions of all weights whose gradients have come to a bucket, in their order."""
        self._bucket: list[int] = []
        """Positions of the weights whose gradients are in the bucket now, at USUAL_RANK."""
        self._elements = 0
        self._goes_by_rank = not shares.row.offload and shares.goes_by_rank
        self._buckets = functools.cache(self._fill)
        self._first_kept = functools.cache(self._find_first_kept)
        self._large: int | None = None
        """A gradient that is larger than the bucket, and waits to be reduced."""
        self.only_last: list[int] = []
        """Tensors that the last micro-step of a step makes, and no other."""
        self._late: list[int] = []
        """Such gradients of which the GPU keeps nothing, and which ZeRO 1 frees last."""

    @property
    def _reducing_stream(self) -> Stream:
        """The stream that reduces: ZeRO 3 has one of its own (overlap_comm in deepspeed.json)."""
        return Stream.REDUCES if self._shares.row.stage == 3 else Stream.COMPUTES

    def _pass(self, size: Size, stream: Stream = Stream.COMPUTES) -> int:
        """Make and free a tensor."""
        number = self._new("temporary", size, stream=stream)
        self._free(number)
        return number

    def _put(self, gradient: int, position: int) -> None:
        """Copy a gradient into the bucket, which is reduced before where it has no room."""
        num_elements = self._shares.weights(USUAL_RANK)[position].num_elements
        is_full = self._elements + num_elements > self._shares.bucket_elements
        self._reduce(is_full=is_full)
        self._put_so_far.append(position)
        self._bucket.append(position)
        self._elements += num_elements
        if num_elements > self._shares.bucket_elements:
            is_cloned = self._is_cloned(position)
            self._large = self._cloned(gradient, position) if is_cloned else gradient
        else:
            self._free(gradient)

    def _fill(self, rank: int) -> dict[int, tuple[int, ...]]:
        """Return the buckets, each by how many gradients have come when it is reduced."""
        weights, cap = self._shares.weights(rank), self._shares.bucket_elements
        found: dict[int, tuple[int, ...]] = {}
        begin = elements = 0
        for index, position in enumerate(self._put_so_far):
            num_elements = weights[position].num_elements
            if index > begin and elements + num_elements > cap:
                found[index] = tuple(self._put_so_far[begin:index])
                begin, elements = index, 0
            elements += num_elements
        return found | {len(self._put_so_far): tuple(self._put_so_far[begin:])}

    def _is_cloned(self, position: int) -> bool:
        """Whether a gradient is cloned: one that goes by itself, where ZeRO 1 and 2 offload."""
        row = self._shares.row
        num_elements = self._shares.weights(USUAL_RANK)[position].num_elements
        return row.offload and row.stage < 3 and num_elements > self._shares.bucket_elements

    def _cloned(self, gradient: int, position: int) -> int:
        size = functools.partial(self._parts.gradient_bytes, position=position)
        clone = self._new("gradient", size)
        self._free(gradient)
        return clone

    def _reduce(self, *, is_full: bool = True) -> None:
        """Reduce what is in the bucket, if it `is_full` or at an end.

        Where buckets go by the LoRA rank, what is made has no bytes at the ranks at which it is not full.
        """
        if not self._bucket or not (is_full or self._goes_by_rank):
            return
        reduced = functools.partial(self._reduced_bytes, bucket=self._bucket_now())
        self._pass(reduced, self._reducing_stream)
        self._keep()
        if not is_full:
            return
        if self._shares.row.offload:
            self._send_to_host(self._bucket)
        if (
            self._large is not None
            and self._shares.row.stage == 1
            and not self._holds(self._bucket)
        ):
            self._late.append(self._large)
        else:
            self._free(self._large)
        self._bucket, self._elements, self._large = [], 0, None

    def _bucket_now(self) -> Callable[[int], Sequence[int]]:
        """Return a function from the LoRA rank to the positions that are reduced now, if any are."""
        now, at_usual_rank = len(self._put_so_far), tuple(self._bucket)
        if self._goes_by_rank:
            return lambda rank: self._buckets(rank).get(now, ())
        return lambda _: at_usual_rank

    def _reduced_bytes(self, rank: int, bucket: Callable[[int], Sequence[int]]) -> int:
        return self._parts.reduced_bytes(rank, bucket(rank))

    def _keep(self) -> None:
        """Make the GPU's own gradients, where they are not there and some of the bucket's are its."""
        if self._shares.row.stage == 3 or self._shares.row.offload:
            return
        if self._goes_by_rank:
            size = functools.partial(self._kept_bytes, now=len(self._put_so_far))
            self.gradients.append(self._new("gradient", size))
        elif not self.gradients and self._holds(self._bucket):
            held = functools.partial(self._parts.held_bytes, gpu=self._gpu)
            self.gradients = [self._new("gradient", held)]

    def _kept_bytes(self, rank: int, now: int) -> int:
        return self._parts.held_bytes(rank, self._gpu) if self._first_kept(rank) == now else 0

    def _find_first_kept(self, rank: int) -> int:
        """Return how many gradients have come when the first bucket is reduced that has some of the GPU's."""
        held = functools.partial(self._parts.is_held, rank, self._gpu)
        return next((n for n, bucket in self._buckets(rank).items() if any(map(held, bucket))), -1)

    def _send_to_host(self, positions: Iterable[int]) -> None:
        """Make what leads from gradients to their float32 copies on the host: a norm, and a cast.

        ZeRO 3 makes a copy of each part besides, and keeps it until the bucket is done with (0.19.8
        stage3.py, partition_grads; stage_1_and_2.py, copy_grads_in_partition).
        """
        copies: list[int] = []
        for position in positions:
            if self._shares.row.stage == 3:
                part = functools.partial(self._parts.part_bytes, position=position)
                copies.append(self._new("gradient", part, stream=self._reducing_stream))
            elements = functools.partial(self._parts.sent_elements, position=position)
            for size in (self._parts.normed_bytes, _in_float32):
                of_part = _of_elements(size, elements)
                self.only_last.append(self._pass(of_part, self._reducing_stream))
        self._free(*copies)

    def _free_gradients(self) -> None:
        self._free(*self.gradients)
        self.gradients = []

    def _holds(self, positions: Iterable[int]) -> bool:
        return any(self._parts.is_held(USUAL_RANK, self._gpu, each) for each in positions)


def _pass_of(phase: Phase, is_forward: bool) -> Phase | None:
    """Return the phase that names the forward pass of a block; None in the backward pass."""
    if not is_forward:
        return None
    return Phase.FORWARD if phase in (Phase.EMBED, Phase.HEAD) else phase


def _is_computed_again(shares: Shares, unit: Unit) -> bool:
    """Return whether checkpointing computes a unit again as it goes backward."""
    layer, every = unit[1][1], shares.checkpoint_every
    return layer >= 0 and every > 0 and layer % every == 0


class ZeroMicroStep(_ZeroWriter):
    """Writes a micro-step's forward and backward as ZeRO 2 and 3 run them.

    `adds`: gradients exist already, and what is reduced is added to them.
    """

    def __init__(
        self,
        extra: AddedTensors,
        shares: Shares,
        parts: ZeroParts,
        gpu: int,
        position_of: Mapping[int, int],
        logits: Collection[int],
        summed: Mapping[int, int],
        *,
        adds: bool,
        has_copy: bool = False,
        head_makes_loss: bool = False,
        is_very_first: bool = False,
    ) -> None:
        """`position_of`: of the weight, by the number of a gradient; `logits`: what the loss is made of.

        `summed`: as summed_in_place says. `has_copy`: a frozen copy of the model is shared out besides.
        `head_makes_loss`: no logits leave the model, which itself reads its head's weight for that.
        `is_very_first`: nothing has gone through the model, whose head makes the loss under ZeRO 3.
        """
        super().__init__(extra, shares, parts, gpu)
        self.bucket: int | None = None
        """Number of ZeRO 2's bucket, which lives for a backward pass."""
        self._position_of = position_of
        self._logits = logits
        self._summed = summed
        self._adds = adds
        self._has_copy = has_copy
        self._head_makes_loss = head_makes_loss
        self._is_very_first = is_very_first
        self._is_of_copy = False

    def written(self, blocks: Blocks) -> list[int]:
        """Return the events. In `blocks` a gradient goes where its weight gets it."""
        last_forward = max(i for i, (phase, *_) in enumerate(blocks) if phase in FORWARD_PHASES)
        late: list[int] = []
        read: list[int] = []
        within: Phase | None = None
        head: int | None = None
        # A further pass makes DeepSpeed lose count of which gradients a module waits for, so that none drops
        # its weights in the backward pass (runtime/zero/parameter_offload.py, ds_grads_remaining).
        is_lost = (
            self._shares.row.stage == 3
            and blocks[last_forward][0] in REFERENCE_PHASES
            and not self._has_copy
        )
        # DeepSpeed takes the head's weight for the model's own from when the model has first read it.
        is_known = not self._is_very_first
        for index, (unit, (phase, place, events)) in enumerate(
            zip(units_in(self._shares, blocks), blocks, strict=True)
        ):
            # TRL wraps a copy in an engine of its own, which gathers on its own stream.
            self._is_of_copy = self._has_copy and phase in REFERENCE_PHASES
            if self._head_makes_loss and within != (
                within := _pass_of(phase, index <= last_forward)
            ):
                # It is there from a pass's first module to its last. What goes into the model has no
                # gradient, so that all of the backward pass has it, too.
                self._free(head)
                head = self._gather(TAIL, is_backward=False) if is_known else None
            elif not is_known and unit == TAIL and blocks[index - 1][1] != place:
                head, is_known = self._read_head(), True
            before: list[int] = []
            after: list[int] = []
            if index == last_forward + 1:
                before, events = at_logits_gradient(events, self._logits)
                events = [*events[:1], *(~number for number in read), *events[1:]]
            elif phase == Phase.HEAD:
                made = next((n for n, e in enumerate(events) if e in self._logits), len(events))
                events, after = events[: made + 1], events[made + 1 :]
                read = self._read_by_head(events, after)
                after = [event for event in after if ~event not in read]
            self.events += before
            is_backward = index > last_forward
            gathered: int | None = None
            if phase in EMBED_PHASES and is_backward:
                # Token ids have no gradient, with which DeepSpeed hears that a module has gone backward.
                late += self._gather_trained(events)
            elif is_backward and is_lost and unit != TAIL:
                late += self._go_through_gathering(unit, events)
                events = []
            elif phase != Phase.END and (head is None or unit != TAIL):
                gathered = self._gather(unit, is_backward=is_backward)
            self._go_through(events)
            self._free(gathered)
            self.events += after
        self._reduce()
        self._free(self.bucket, *late, head)
        if self._adds:
            self._free_gradients()
        return self.events

    def _go_through(self, events: Iterable[int]) -> None:
        for event in events:
            if ~event in self._position_of:
                self._arrived(~event)
            elif event not in self._summed:
                self.events.append(event)

    def _read_by_head(self, events: Sequence[int], after: Sequence[int]) -> list[int]:
        """Return what a frozen head read, and is kept all the same: the last that goes once there are logits.

        Source: runtime/zero/linear.py, LinearFunctionForZeroStage3.
        """
        if self._shares.row.stage < 3:
            return []
        return [event for event in events[:-1] if ~event in after][-1:]

    def _gather(self, unit: Unit, *, is_backward: bool) -> int | None:
        """Gather the largest weight of a unit, or all where they are gathered to compute a layer again.

        Checkpointing holds what the layer saves then, weights among it (torch 2.13 utils/checkpoint.py,
        _recomputation_hook), though DeepSpeed has dropped them.
        """
        if self._shares.row.stage < 3 or unit not in self._shares.members:
            return None
        is_again = is_backward and _is_computed_again(self._shares, unit)
        largest = functools.partial(self._shares.largest_gathered_bytes, unit=unit)
        every_one = functools.partial(self._shares.gathered_bytes, unit=unit)
        return self._gather_of(every_one if is_again else largest, largest)

    def _go_through_gathering(self, unit: Unit, events: Sequence[int]) -> list[int]:
        """Write a block of the backward pass that drops none of its unit's weights; return what it gathers.

        An adapter's gradients say how far it has come: those of a layer's last module are there first, and
        what that adapts is gathered behind them. A layer that is computed again has them all from there on.
        """
        shares = self._shares
        order = {position: n for n, position in enumerate(shares.by_module)}
        waiting = sorted(shares.members.get(unit, ()), key=order.__getitem__)
        gathered: list[int] = []

        def gather() -> int:
            position = waiting.pop()
            size = functools.partial(shares.gathered_weight_bytes, position=position)
            gathered.append(self._gather_of(size, size))
            return position

        while waiting and _is_computed_again(self._shares, unit):
            gather()
        for event in events:
            position = self._position_of.get(event)
            while position in waiting and gather() != position:
                pass
            self._go_through((event,))
            if ~event in self._position_of:
                while waiting and not shares.parameters[waiting[-1]].trainable:
                    gather()
        return gathered

    def _read_head(self) -> int:
        """Gather the head's weight as the model reads it, of which DeepSpeed did not know before.

        It is gathered where the model computes (runtime/zero/parameter_offload.py, ZeROOrderedDict).
        """
        size = functools.partial(self._shares.largest_gathered_bytes, unit=TAIL)
        return self._new("parameter", size, is_gathered=True)

    def _gather_of(self, size: Size, largest: Size) -> int:
        """Make room for what is gathered; of a part on the host a copy is sent, and goes when it has arrived.

        `largest`: bytes of the largest weight, whole.
        Source: runtime/zero/partition_parameters.py, _all_gather_sequential.
        """
        stream = Stream.GATHERS_COPY if self._is_of_copy else Stream.GATHERS
        gathered = self._new("parameter", size, is_gathered=True, stream=stream)
        num_gpus = self._shares.num_gpus
        if self._shares.row.offload and num_gpus > 1:
            self._pass(lambda rank: largest(rank) // num_gpus, stream)
        return gathered

    def _gather_trained(self, events: Iterable[int]) -> list[int]:
        """Gather the weights by themselves whose gradients the events make: a model's embeddings."""
        if self._shares.row.stage < 3:
            return []
        sizes = [
            functools.partial(self._shares.gathered_weight_bytes, position=self._position_of[event])
            for event in events
            if event in self._position_of
        ]
        return [self._gather_of(size, size) for size in sizes]

    def _arrived(self, gradient: int) -> None:
        if self.bucket is None and self._shares.row.stage == 2:
            self.bucket = self._new("workspace", self._shares.bucket_bytes)
        self._put(self._summed.get(gradient, gradient), self._position_of[gradient])


class ZeroUpdate(_ZeroWriter):
    """Writes what stands before and after the update of the GPU's parts."""

    step_gradients: Sequence[int] = ()
    """Numbers of the float32 gradients of the group that is updated."""

    def before(
        self, bucket: int | None, whole: Mapping[int, int], kept: Sequence[int]
    ) -> list[int]:
        """Return the events that lead to float32 gradients of the largest group.

        `bucket`, `whole`: ZeRO 1's bucket and whole gradients, with the positions of their weights; `kept`:
        the gradients that the micro-steps have left under ZeRO 2.
        """
        row = self._shares.row
        self.gradients = list(kept)
        if row.stage == 1:
            groups = [weight.group for weight in self._shares.weights(USUAL_RANK)]
            for gradient in sorted(whole, key=lambda g: (groups[whole[g]], whole[g])):
                self._put(gradient, whole[gradient])
            self._reduce()
            self._free(*self._late, bucket)
        if not row.offload:
            self._pass(functools.partial(self._parts.norm_bytes, gpu=self._gpu))
            flat = self._new("temporary", self._parts.flat_bytes)
            self.step_gradients = [self._new("gradient", self._shares.step_gradient_bytes)]
            self._free(flat)
            if len(self._shares.groups) == 1:
                self._free_gradients()
        return self.events

    def after(self) -> list[int]:
        self.events = []
        if not self._shares.row.offload:
            self._free(self.step_gradients[0])
            self._free_gradients()
        return self.events


def positions_of(
    blocks: Blocks, shares: Shares, whole: Collection[int], elements_of: Callable[[int], int]
) -> dict[int, int]:
    """The positions of the weights that gradients are of.

    It is the last of the gradient's size in its unit that has none yet; else of those outside of layers, as
    for the norm behind BERT's embedding. An embedder's passes, each a stack of its own, share their weights.
    `elements_of`: from a gradient's number to its elements at USUAL_RANK.
    """
    found: dict[int, int] = {}
    weights = shares.weights(USUAL_RANK)
    left = {unit: list(reversed(members)) for unit, members in shares.members.items()}
    for phase, place, events in blocks:
        own = place if ("layer", place) in left else (0, place[1])
        units = [left.get(unit, []) for unit in (unit_in(shares, phase, own), EMBED, TAIL)]
        for gradient in (event for event in events if event in whole):
            found[gradient], of_unit = next(
                (position, of_unit)
                for of_unit in units
                for position in of_unit
                if weights[position].trainable
                and weights[position].num_elements == elements_of(gradient)
            )
            of_unit.remove(found[gradient])
    return found


def summed_in_place(
    blocks: Blocks, gradients: Collection[int], bytes_of: Callable[[int], int]
) -> tuple[Blocks, dict[int, int]]:
    """Have the two gradients of a weight that is used twice be added in place, as in ZeRO 3.

    DeepSpeed's linear layers return one that is no view (0.19.8 runtime/zero/linear.py), to which autograd
    may add. Returns the blocks, and which tensor stands for a sum: the sum marks where it is there.
    """
    summed: dict[int, int] = {}
    written: list[tuple[Phase, Place, list[int]]] = []
    for phase, place, events in blocks:
        found: list[int] = []
        index = 0
        while index < len(events):
            event, behind = events[index], events[index + 1 : index + 3]
            index += 1
            is_sum = event in gradients and len(behind) == 2 and max(behind) < 0
            if (
                is_sum
                and ~event not in behind
                and all(bytes_of(~freed) == bytes_of(event) for freed in behind)
            ):
                first, second = behind
                summed[event] = ~first
                found.append(second)
                index += 2
            found.append(event)
        written.append((phase, place, found))
    return written, summed
