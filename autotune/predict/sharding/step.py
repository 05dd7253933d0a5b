"""A micro-step under FSDP2: weights gathered, gradients reduced."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from autotune.memory.traces import EMBED_PHASES, FORWARD_PHASES, REFERENCE_PHASES, Phase, Place
from autotune.predict.sharding.added_tensors import AddedTensors, Size, Stream
from autotune.predict.sharding.layer_counts import USUAL_RANK
from autotune.predict.sharding.shards import EMBED, ROOT, TAIL, Shares, Unit

Blocks = Sequence[tuple[Phase, Place, list[int]]]
"""The events of a micro-step, by the part of the model that runs."""
PASSES_BESIDES = frozenset((Phase.MISMATCHED, Phase.POLICY, *REFERENCE_PHASES))
"""Passes beside the one that is trained, each of which gathers all weights."""


def at_logits_gradient(events: list[int], logits: Collection[int]) -> tuple[list[int], list[int]]:
    """Part the first events of a backward pass where the head begins to go backward.

    Until then the loss does, which needs no weights: FSDP2 and ZeRO 3 hear of the backward pass as the
    gradient comes to what the head returned (torch 2.13 _fsdp_state.py, _pre_backward).
    """
    last = max((n for n, event in enumerate(events) if event in logits), default=-1)
    after = (n for n, event in enumerate(events) if n > last and event >= 0)
    begins = next(after, len(events)) if last >= 0 else 0
    return events[:begins], events[begins:]


def unit_in(shares: Shares, phase: Phase, place: Place, *, begins_pass: bool = False) -> Unit:
    """Return the unit whose weights a block uses.

    `begins_pass`: whether it is the first of a pass that is one phase from embedding to head.
    """
    if place[1] >= 0:
        return "layer", place
    is_embedding = phase in EMBED_PHASES or begins_pass
    return EMBED if is_embedding and not shares.tail_stays else TAIL


def units_in(shares: Shares, blocks: Blocks) -> list[Unit]:
    """Return the unit whose weights each block uses."""
    before = [None, *(phase for phase, *_ in blocks)]
    return [
        unit_in(shares, phase, place, begins_pass=phase in PASSES_BESIDES and phase != last)
        for last, (phase, place, _) in zip(before, blocks, strict=False)
    ]


class Writer:
    """Writes events with tensors beside the trace's."""

    def __init__(self, extra: AddedTensors, shares: Shares) -> None:
        self.events: list[int] = []
        self.gradients: list[int] = []
        """Numbers of the gradients that the GPU keeps, which outlive the micro-step."""
        self._extra = extra
        self._shares = shares

    def _new(
        self,
        category: str,
        size: Size,
        *,
        is_gathered: bool = False,
        stream: Stream = Stream.COMPUTES,
    ) -> int:
        number = self._extra.new(category, size, is_gathered=is_gathered, stream=stream)
        self.events.append(number)
        return number

    def _free(self, *numbers: int | None) -> None:
        self.events += [~number for number in numbers if number is not None]


class MicroStep(Writer):
    """Writes a micro-step's forward and backward as FSDP2 runs them.

    `adds`: gradients exist already, and what is reduced is added to them. `reduces`: False where whole
    gradients stay, as accelerate has it in all micro-steps but the last. Source: torch 2.13
    _fsdp_param_group.py, post_backward; accelerate 1.15 Accelerator.no_sync.
    """

    def __init__(
        self,
        extra: AddedTensors,
        shares: Shares,
        whole: Iterable[int],
        logits: Collection[int],
        of_root: Collection[int] = (),
        *,
        adds: bool,
        reduces: bool = True,
        kept: Mapping[Unit, Sequence[int]] = MappingProxyType({}),
        has_copy: bool = False,
        head_makes_loss: bool = False,
    ) -> None:
        """`whole`: numbers of the trace's gradients; `logits`: of what the loss is made of.

        `kept`: whole gradients of each unit that earlier micro-steps have left, and which are reduced here.
        `of_root`: those of the gradients that are of the root's weights. `has_copy`: a frozen copy of the
        model is shared out besides. `head_makes_loss`: no logits leave the model.
        """
        super().__init__(extra, shares)
        self._whole = set(whole)
        self._of_root = of_root
        self._logits = logits
        self._head_makes_loss = head_makes_loss
        self._keeps = not adds and not shares.row.offload
        self._reduces = reduces
        self._order: list[Unit] = []
        """Units in the order in which the forward pass uses them, or is done with them."""
        self._gathered: dict[Unit, list[int]] = {}
        self._arriving: dict[Unit, int] = {}
        self._arrived: int | None = None
        self._reducing: int | None = None
        self._held: list[int] = []
        self.unreduced: dict[Unit, list[int]] = {unit: list(made) for unit, made in kept.items()}
        """Whole gradients of each unit that are there, by their numbers."""
        self._has_copy = has_copy
        self._brings_head = head_makes_loss and shares.head_is_alone
        self._heads: list[int] = []
        """The head's weights that the loss has gathered."""
        self._copied: list[int] = []
        """Weights of the copy that are whole."""

    def written(self, blocks: Blocks) -> list[int]:
        last_forward = max(i for i, (phase, *_) in enumerate(blocks) if phase in FORWARD_PHASES)
        if ROOT in self._shares.members:
            self._gather(ROOT, is_backward=False)
        for index, (unit, (phase, _, events)) in enumerate(
            zip(units_in(self._shares, blocks), blocks, strict=True)
        ):
            if self._has_copy and phase in REFERENCE_PHASES:
                begins = index == 0 or blocks[index - 1][0] != phase
                if begins:
                    self._gather_copy()
                self.events += events
                if blocks[index + 1][0] != phase:
                    self._drop_copy()
                continue
            is_backward = index > last_forward
            if phase in PASSES_BESIDES and phase != blocks[index - 1][0]:
                # The pass before has ended, and with it what its last unit arrived in.
                self._free(self._arrived)
                self._arrived = None
            if index == last_forward + 1:
                if self._head_makes_loss:
                    # A head that is the embedding, too, is done with last. Runs without a card show it where
                    # the head makes the loss; where it makes logits, OPT's show no layer beside it.
                    self._order.sort(key=lambda used: used == TAIL)
                # The last unit's buffer (_fsdp_state.py _post_forward).
                self._free(self._arrived)
                self._arrived = None
                of_loss, events = at_logits_gradient(events, self._logits)
                self.events += of_loss
            is_used = phase != Phase.END
            is_brought = unit == TAIL and self._brings_head
            if is_used and is_brought:
                self._bring_head(is_backward=is_backward)
            elif is_used and unit in self._shares.members:
                self._use(unit, is_backward=is_backward)
            self.events += events
            for gradient in (event for event in events if event in self._whole):
                made_of = ROOT if gradient in self._of_root else unit
                self.unreduced.setdefault(made_of, []).append(gradient)
            stays = unit == TAIL and (not is_backward or self._shares.tail_stays)
            if is_brought and phase in PASSES_BESIDES:
                self._free(self._heads.pop())
            if is_used and not stays:
                if is_backward and unit == EMBED:
                    self._finish_root()
                self._finish(unit, is_backward=is_backward)
        self._finish_root()
        for unit in list(self.unreduced):
            self._reduce(unit)
        self._free(*itertools.chain(*self._gathered.values()), *self._arriving.values())
        self._free(self._reducing, *self._held)
        return self.events

    def _bring_head(self, *, is_backward: bool) -> None:
        """Have the loss gather the head's weight itself, which the pass that is trained keeps for backward.

        A head that is a unit by itself is not called, so that FSDP2 does not gather it. Then what is backward
        begins with the root, which has the last layer brought. Source: trl 1.16 trainer/utils.py,
        add_fused_lm_head.
        """
        if is_backward:
            if self._order[-1] not in self._gathered:
                self._arrive(self._order[-1])
            self._gathered[TAIL] = self._heads
            return
        size = functools.partial(self._shares.whole_shards_bytes, unit=TAIL)
        self._heads.append(self._new("parameter", size, is_gathered=True))

    def _gather_copy(self) -> None:
        """Gather all of a frozen copy of the model at once, as TRL has FSDP2 do before its pass.

        A root of its own has streams of its own. Source: trl 1.16 models/utils.py, prepare_fsdp.
        """
        shares = self._shares
        self._free(self._arrived)
        cast_bytes = functools.partial(shares.cast_shards_bytes, positions=tuple(shares.by_module))
        cast = self._new("temporary", cast_bytes, stream=Stream.GATHERS_COPY)
        size = shares.gathered_bytes
        self._arrived = self._new("temporary", size, is_gathered=True, stream=Stream.GATHERS_COPY)
        self._free(cast)
        self._copied = [
            self._new(
                "parameter",
                functools.partial(shares.gathered_weight_bytes, position=position),
                is_gathered=True,
            )
            for position in shares.by_module
        ]

    def _drop_copy(self) -> None:
        self._free(*self._copied, self._arrived)
        self._arrived = None

    def _use(self, unit: Unit, *, is_backward: bool) -> None:
        """Gather a unit; in the backward pass, have the one before it on the way."""
        if unit not in self._gathered:
            self._gather(unit, is_backward=is_backward)
        if not is_backward:
            self._order += [unit] if unit not in self._order else []
        elif unit in self._order and (position := self._order.index(unit)):
            before = self._order[position - 1]
            if before not in self._gathered:
                self._arrive(before)

    def _arrive(self, unit: Unit) -> None:
        if unit not in self._arriving:
            sent = self._sent(unit)
            size = functools.partial(self._shares.gathered_bytes, unit=unit)
            self._arriving[unit] = self._new(
                "temporary", size, is_gathered=True, stream=Stream.GATHERS
            )
            self._free(*sent)

    def _sent(self, unit: Unit) -> list[int]:
        """Make what a GPU sends of a unit: its shards as they are computed with, where that is a cast.

        Shards that wait on the host come first, each before it is cast (torch 2.13 _fsdp_collectives.py,
        _get_param_all_gather_inputs; _fsdp_param.py, all_gather_inputs).
        """
        members = self._shares.members[unit]
        if not self._shares.row.offload:
            cast = functools.partial(self._shares.cast_shards_bytes, positions=tuple(members))
            return [self._new("temporary", cast, stream=Stream.GATHERS)]
        found: list[int] = []
        for position in members:
            shard = functools.partial(self._shares.fetched_shard_bytes, position=position)
            fetched = self._new("temporary", shard, stream=Stream.GATHERS)
            cast = functools.partial(self._shares.cast_shards_bytes, positions=(position,))
            found += [fetched, self._new("temporary", cast, stream=Stream.GATHERS)]
            if self._shares.casts_shard(position):
                self._free(found.pop(-2))
        return found

    def _gather(self, unit: Unit, *, is_backward: bool) -> None:
        """Gather a unit: the GPUs' shards arrive in one buffer and are copied out of it.

        In the forward pass the buffer stays until the next has arrived, so that both overlap.
        """
        self._arrive(unit)
        arrived = self._arriving.pop(unit)
        self._gathered[unit] = [
            self._new(
                "parameter",
                functools.partial(self._shares.gathered_weight_bytes, position=position),
                is_gathered=True,
            )
            for position in self._shares.members[unit]
        ]
        # It goes as what waits for the next returns (_fsdp_param_group.py, wait_for_unshard).
        self._free(self._arrived)
        self._arrived = arrived
        if is_backward:
            self._free(arrived)
            self._arrived = None

    def _finish(self, unit: Unit, *, is_backward: bool) -> None:
        """Drop what was gathered, unless it stays for the backward pass; reduce the gradients."""
        if is_backward or not self._shares.row.keeps_gathered:
            self._free(*self._gathered.pop(unit, ()))
        if is_backward:
            self._reduce(unit)

    def _finish_root(self) -> None:
        """Drop the root's weights and reduce its gradients, before those of an embedding.

        No gradient comes to what either was given, so that the end of the backward pass sees to both (torch
        2.13 _fsdp_state.py, _root_post_backward_final_callback).
        """
        self._finish(ROOT, is_backward=True)

    def _reduce(self, unit: Unit) -> None:
        """Copy and free a unit's whole gradients.

        They go into the input of a reduce-scatter, which stays until the next.
        """
        made = self.unreduced.pop(unit, []) if self._reduces else []
        if not made:
            return
        self._free(self._reducing)
        reduced = functools.partial(self._shares.reduced_bytes, unit=unit)
        self._reducing = self._new("temporary", reduced)
        self._free(*made)
        reduced_part: int | None = None
        stream = Stream.REDUCES
        if self._shares.row.num_replicas > 1:
            self._hold_all_reduced(unit)
            # What is cast from the average is made where the groups average.
            is_cast = self._shares.is_cast(USUAL_RANK, unit)
            stream = Stream.AVERAGES if is_cast else stream
        else:
            in_their_dtype = functools.partial(self._cast_part_bytes, unit=unit)
            reduced_part = self._new("temporary", in_their_dtype, stream=Stream.REDUCES)
        part = self._new("gradient", functools.partial(self._part_bytes, unit=unit), stream=stream)
        self._free(reduced_part)
        if self._keeps:
            self.gradients.append(part)
        else:
            self._free(part)

    def _cast_part_bytes(self, rank: int, unit: Unit) -> int:
        """Return the bytes of what is reduced, where the gradient that is kept is cast from it."""
        is_cast = self._shares.is_cast(rank, unit)
        return self._shares.all_reduced_bytes(rank, unit) if is_cast else 0

    def _hold_all_reduced(self, unit: Unit) -> None:
        """Hold what HSDP averages between the groups until the backward pass has ended.

        Source: torch 2.13 _fsdp_param_group.py, AllReduceState.
        """

        def size(rank: int) -> int:
            is_gradient = self._keeps and not self._shares.is_cast(rank, unit)
            return 0 if is_gradient else self._shares.all_reduced_bytes(rank, unit)

        self._held.append(self._new("temporary", size, stream=Stream.REDUCES))

    def _part_bytes(self, rank: int, unit: Unit) -> int:
        """Return the bytes of this GPU's part of a unit's gradients, beside what is held."""
        is_held = self._shares.row.num_replicas > 1 and not self._keeps
        if is_held and not self._shares.is_cast(rank, unit):
            return 0
        return self._shares.gradient_shard_bytes(rank, unit)
