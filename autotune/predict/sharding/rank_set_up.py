"""How weights come to one of several GPUs, and what each way to share makes around them before a step.

Events as in Trace.setup. DDP sends flat copies of the weights and makes its buckets; accelerate deals
weights out for FSDP2, or cuts those that are whole on each GPU; DeepSpeed brings them from the host, flattens
them or parts them as they are loaded. What a GPU does not keep is freed before the first step, and leaves
free blocks behind, which is why the order counts.

Sources: those of autotune.predict.sharding.rank_trace, by function.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

from autotune.memory.traces import Trace
from autotune.predict.sharding.added_tensors import AddedTensors, Size
from autotune.predict.sharding.shards import EMBED, ROOT, TAIL, Shares

_MOST_RANK = 1024
"""LoRA rank up to which copies of adapters that DDP sends are counted. [judgement]"""


class RankSetUp:
    """One GPU's set-up: a trace's, with its parts in place of what is shared out, and buffers that stay."""

    def __init__(
        self,
        trace: Trace,
        shares: Shares,
        extra: AddedTensors,
        copies: Mapping[int, int],
        *,
        gpu: int | None,
        on_card: bool,
        is_quantized: bool,
    ) -> None:
        """`extra`: takes the tensors that it adds. `copies`: positions of the weights of a frozen copy.

        `gpu`, `on_card`: as of RankTrace. `is_quantized`: whether weights are on each GPU already.
        """
        self._shares = shares
        self._extra = extra
        self._copies = copies
        self._gpu = gpu
        self._on_card = on_card
        self._is_quantized = is_quantized
        self.events = list(trace.setup)
        self.num_prepared_events = trace.num_prepared_events
        self.num_own_events = trace.num_own_events
        self.behind_first: Sequence[int] = ()
        """Events between the first optimizer step and the second."""
        self.buffers: list[int] = []
        """Tensors that stay for all steps."""
        self.replaced: dict[int, Size] = {}
        """Sizes of the weights of which the GPU has a part or none, by their numbers in the trace."""
        self._write()

    def _write(self) -> None:
        """Put the GPU's parts in place of what is shared out, and add the buffers that stay."""
        shares, row = self._shares, self._shares.row
        if row.name == "ddp":
            self._send_weights()
            self._make_buckets()
            return
        if row.splits:
            return
        self._replace_weights()
        if shares.is_torch:
            return
        if row.stage < 3 and self._is_brought:
            self._flatten()
            return
        if row.stage == 3:
            if self._is_brought:
                self._part_as_loaded()
            self.buffers.append(self._keep("workspace", shares.bucket_bytes))
            self.buffers.append(self._keep("parameter", shares.persistent_bytes))
        elif row.offload:
            self.buffers.append(self._keep("workspace", shares.largest_bytes))
        for group in shares.groups:
            if row.stage < 3:
                # The trained weights are views of one flat tensor.
                num_gpus = shares.num_gpus
                whole = functools.partial(shares.partition_bytes, group=group, num_parts=num_gpus)
                self._keep("parameter", whole)
            elif not row.offload:
                part = functools.partial(shares.partition_bytes, group=group)
                self._keep("gradient", part)
            if not row.offload and not (row.stage == 3 and self._is_brought):
                master = functools.partial(shares.master_bytes, group=group)
                self._keep("optimizer_state", master)
        if row.stage == 3 and self._is_brought:
            self._gather_each()

    @property
    def _is_brought(self) -> bool:
        """Whether DeepSpeed brings weights from the host: 4-bit ones are on each GPU already."""
        return self._on_card and not self._is_quantized

    def _part_as_loaded(self) -> None:
        """Have each weight come whole, be parted, and go again (deepspeed 0.19.8, zero.Init).

        Trained parts go before the optimizer is made, and come again as one tensor, of which float32 copies
        are made twice; the largest group's gradients are made and dropped (stage3.py,
        _create_fp16_partitions_with_defragmentation, _create_fp32_partitions, initialize_optimizer_states).
        """
        shares = self._shares
        is_offloaded = shares.row.offload
        pieces: list[list[int]] = []
        gone: list[int] = []
        for event in self.events[: self.num_own_events]:
            piece = [event]
            if event in self._copies:
                size = functools.partial(self._working_bytes, position=self._copies[event])
                whole = self._extra.new("temporary", size)
                piece = [whole, event, ~whole]
            elif event in self._shares.position_of:
                position = self._shares.position_of[event]
                size = functools.partial(self._working_bytes, position=position)
                whole = self._extra.new("temporary", size)
                piece = [whole, event, ~whole]
                if shares.parameters[position].trainable and not is_offloaded:
                    part = self._extra.new(
                        "temporary", functools.partial(shares.part_bytes, position=position)
                    )
                    piece = [whole, part, ~whole]
                    gone.append(~part)
            pieces.append(piece)
        behind = self.events[self.num_own_events :]
        own = [*itertools.chain(*pieces), *gone]
        self.num_prepared_events = sum(map(len, pieces[: self.num_prepared_events]))
        self.num_own_events = len(own)
        self.events = [*own, *behind]
        if not is_offloaded:
            self._keep("parameter", shares.trained_parts_bytes)
            self._copy_to_float32()

    def _copy_to_float32(self) -> None:
        shares = self._shares
        before: list[int] = []
        for group in shares.groups:
            master = functools.partial(shares.master_bytes, group=group)
            if shares.compute_bytes < 4:
                cast = self._keep("temporary", master)
                self._drop(before)
                before = [cast]
            self._keep("optimizer_state", master)
        self._drop(before)
        self._drop([self._keep("temporary", shares.step_gradient_bytes)])

    def _gather_each(self) -> None:
        """Gather each trained weight once (0.19.8 stage3.py, create_reduce_and_remove_grad_hooks)."""
        shares = self._shares
        for position, parameter in enumerate(shares.parameters):
            if parameter.trainable:
                size = functools.partial(shares.whole_bytes, position=position)
                gathered = [self._keep("temporary", size)]
                if shares.row.offload:
                    part = functools.partial(shares.part_bytes, position=position)
                    gathered.append(self._keep("temporary", part))
                self._drop(gathered)

    def _send_weights(self) -> None:
        """Add the flat copies of weights that DDP sends as it is made: two at a time."""
        shares = self._shares
        numbers = [
            self._extra.new("temporary", functools.partial(shares.ddp_broadcast_bytes, index=index))
            for index in range(shares.num_ddp_broadcasts(_MOST_RANK))
        ]
        for index, number in enumerate(numbers):
            self.events += [~numbers[index - 2]] if index >= 2 else []
            self.events.append(number)
        self.events += [~number for number in numbers[-2:]]

    def _make_buckets(self) -> None:
        """Add DDP's buckets: first one for all gradients of a dtype, where they are made anew later."""
        shares = self._shares
        trained = [parameter for parameter in shares.parameters if parameter.trainable]
        # As many as there can be: how many there are follows from the LoRA rank.
        sizes = [functools.partial(shares.ddp_bucket_bytes, index=n) for n in range(len(trained))]
        if not shares.rebuilds:
            self.buffers += [self._keep("workspace", size) for size in sizes]
            return
        for index in range(len({parameter.dtype for parameter in trained})):
            first = functools.partial(shares.ddp_first_bucket_bytes, index=index)
            self.buffers.append(self._keep("workspace", first))
        anew = [self._extra.new("workspace", size) for size in sizes]
        self.behind_first = [*(~number for number in self.buffers), *anew]

    def _keep(self, category: str, size: Size) -> int:
        number = self._extra.new(category, size)
        self.events.append(number)
        return number

    def _replace_weights(self) -> None:
        shares = self._shares

        def size(rank: int, position: int) -> int:
            weight = shares.weights(rank)[position]
            if shares.row.stage == 3:
                is_flat = weight.trainable and shares.row.is_deepspeed and self._is_brought
                return 0 if shares.row.offload or is_flat else shares.shard_bytes(weight)
            return 0 if weight.trainable else shares.working_bytes(weight)

        for position, parameter in enumerate(shares.parameters):
            self.replaced[parameter.number] = functools.partial(size, position=position)
        for number, position in self._copies.items():
            self.replaced[number] = functools.partial(shares.part_bytes, position=position)
        if self.is_dealt_out:
            self._load()
        elif self._is_cut:
            self._cut()

    @property
    def is_dealt_out(self) -> bool:
        """Whether FSDP2 deals weights out on the card: 4-bit ones are on each GPU already."""
        row = self._shares.row
        return row.is_fsdp and not row.offload and self._on_card and not self._is_quantized

    @property
    def _is_cut(self) -> bool:
        """Whether FSDP2 cuts weights that are whole on each GPU, as 4-bit ones are loaded."""
        row = self._shares.row
        return row.is_fsdp and not row.offload and self._on_card and self._is_quantized

    def _cut(self) -> None:
        """Have weights be whole, and FSDP2 cut one unit after the other; they go as all of them are cut.

        Source: accelerate 1.15 utils/fsdp_utils.py, fsdp2_prepare_model: its `original_sd` holds them.
        """
        shares = self._shares
        whole = {
            number: self._extra.new("temporary", functools.partial(self._whole_bytes, position=at))
            for number, at in self._shares.position_of.items()
        }
        self.events = [
            whole.get(event, event) if event >= 0 else ~whole.get(~event, ~event)
            for event in self.events
        ]
        self._cast_adapter(whole)
        order = {position: n for n, position in enumerate(shares.by_module)}
        layers = sorted((unit for unit in shares.members if unit[1][1] >= 0), key=lambda u: u[1])
        cut = [
            shares.parameters[position].number
            for unit in (*layers, EMBED, TAIL, ROOT)
            for position in sorted(shares.members.get(unit, ()), key=order.__getitem__)
        ]
        behind = self.events[self.num_own_events :]
        self.events = [*self.events[: self.num_own_events], *cut]
        self._drop([whole[number] for number in cut])
        self.events += behind

    def _cast_adapter(self, whole: Mapping[int, int]) -> None:
        """Have an adapter come in 16 bits, PEFT cast it to float32, and TRL cast it back.

        The trace, which is of 16 bits where FSDP2 casts, has it in those from the start. `whole`: numbers of
        whole weights, by those of the trace. Source: as worker.trace.meta_step, _load_adapter.
        """
        shares = self._shares
        if not shares.casts_adapter:
            return
        adapted = [
            (n, at) for n, at in self._shares.position_of.items() if shares.parameters[at].trainable
        ]
        stages = (
            [self._stored_bytes] if shares.upcasts else [self._stored_bytes, self._float32_bytes]
        )
        numbers = [
            *(
                [
                    self._extra.new("temporary", functools.partial(size, position=at))
                    for _, at in adapted
                ]
                for size in stages
            ),
            [whole[number] for number, _ in adapted],
        ]
        first = dict(zip(numbers[-1], numbers[0], strict=True))
        own = [first.get(event, event) for event in self.events[: self.num_own_events]]
        behind = self.events[self.num_own_events :]
        self.events = own
        for before, after in itertools.pairwise(numbers):
            for old, new in zip(before, after, strict=True):
                self.events += [new, ~old]
        self.num_own_events = len(self.events)
        self.events += behind

    def _flatten(self) -> None:
        """Have weights come whole, and DeepSpeed copy the trained ones into one tensor for each group.

        The cache is given back before each group, so that of whole weights only the last group's leave free
        blocks behind; so do float32 gradients that are made and dropped at the end. Source: deepspeed 0.19.8
        runtime/zero/stage_1_and_2.py, __init__ and initialize_optimizer_states.
        """
        shares = self._shares
        loaded, behind = self._loaded_apart()
        last = shares.groups[-1] if shares.groups else None
        whole: list[int] = []
        for event in loaded:
            position = self._shares.position_of[event]
            if not shares.parameters[position].trainable:
                self.events.append(event)
            elif shares.parameters[position].group == last:
                size = functools.partial(self._working_bytes, position=position)
                whole.append(self._keep("temporary", size))
        for group in shares.groups:
            part = functools.partial(shares.partition_bytes, group=group)
            self._keep("parameter", functools.partial(part, num_parts=shares.num_gpus))
            self._drop(whole if group == last else ())
            self._copy_part(group, is_cloned=group == last)
        if shares.row.offload:
            self.buffers.append(self._keep("workspace", shares.largest_bytes))
        else:
            self._drop(
                [
                    self._keep("temporary", functools.partial(shares.master_bytes, group=group))
                    for group in shares.groups
                ]
            )
        self.events += behind

    def _copy_part(self, group: int, *, is_cloned: bool) -> None:
        """Copy the GPU's part of a group: in 16 bits, then in float32, which offloading keeps on the host."""
        shares = self._shares
        cloned: list[int] = []
        if is_cloned and (shares.compute_bytes < 4 or shares.row.offload):
            part = functools.partial(shares.partition_bytes, group=group)
            cloned = [self._keep("temporary", part)]
        if not shares.row.offload:
            self._keep("optimizer_state", functools.partial(shares.master_bytes, group=group))
        self._drop(cloned)

    def _drop(self, numbers: Sequence[int]) -> None:
        self.events += [~number for number in numbers]

    def _load(self) -> None:
        """Have each weight come whole, be cut, and go again: so Accelerator.prepare deals them out.

        They come in the model's order, adapters among them, and a tied head a second time. All GPUs but the
        first have the next weight before one goes. A last part of fewer rows than the others is copied with
        its padding. Source: accelerate 1.15 utils/fsdp_utils.py, fsdp2_load_full_state_dict; torch 2.13
        distributed/tensor/placement_types.py, _shard_tensor.
        """
        shares, is_first = self._shares, self._gpu == 0
        weights, behind = self._loaded_apart()
        order = {position: n for n, position in enumerate(shares.by_module)}
        weights.sort(key=lambda event: order[self._shares.position_of[event]])
        loaded: list[int] = []
        again: list[int] = []
        gone: list[int] = []
        for event in weights:
            position = self._shares.position_of[event]
            whole = self._extra.new(
                "temporary", functools.partial(self._whole_bytes, position=position)
            )
            padded = self._extra.new(
                "temporary", functools.partial(shares.padded_part_bytes, position=position)
            )
            loaded += [*gone, whole] if is_first else [whole, *gone]
            loaded += [padded, event, ~padded]
            gone = [~whole]
            if shares.is_tied_head(position):
                part = self._extra.new("temporary", self.replaced[event])
                again += [whole, padded, part, ~padded, ~whole, ~part]
        loaded += gone
        self._deal_out_copy()
        self.events += [*loaded, *again, *behind]

    def _deal_out_copy(self) -> None:
        """Have a frozen copy come whole before the model, and go as all of it has been cut.

        Source: trl 1.16 models/utils.py, prepare_fsdp; torch 2.13 distributed/fsdp/_fully_shard/,
        _fsdp_init.py, _move_states_to_device, and _fsdp_param.py, _init_sharded_param.
        """
        others = [event for event in self.events if event not in self._copies]
        whole = [
            self._extra.new("temporary", functools.partial(self._whole_bytes, position=position))
            for position in self._copies.values()
        ]
        self.events = [*whole, *self._copies, *(~number for number in whole), *others]
        self.num_own_events += 2 * len(whole)

    def _loaded_apart(self) -> tuple[list[int], list[int]]:
        """Take weights, and what is behind the trace's own events, out of `events`: return both."""
        own, behind = self.events[: self.num_own_events], self.events[self.num_own_events :]
        kept = [event not in self._shares.position_of for event in own]
        self.num_prepared_events = sum(kept[: self.num_prepared_events])
        self.num_own_events = sum(kept)
        self.events = [event for event, is_kept in zip(own, kept, strict=True) if is_kept]
        return [event for event in own if event in self._shares.position_of], behind

    def _working_bytes(self, rank: int, position: int) -> int:
        return self._shares.working_bytes(self._shares.weights(rank)[position])

    def _stored_bytes(self, rank: int, position: int) -> int:
        return self._shares.weights(rank)[position].size_bytes

    def _float32_bytes(self, rank: int, position: int) -> int:
        return 4 * self._shares.weights(rank)[position].num_elements

    def _whole_bytes(self, rank: int, position: int) -> int:
        """Return the bytes of a weight as accelerate has cast it before FSDP2 deals it out."""
        return self._shares.loaded_bytes(self._shares.weights(rank)[position])
