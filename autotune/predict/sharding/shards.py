"""Sizes of what DDP, FSDP2 and DeepSpeed ZeRO give to each GPU, by the libraries' own rules.

The rules (autotune.predict.sharding.library_rules, which names their sources) are asked for a whole model. A
LoRA rank decides the sizes of adapters, so every figure of Shares is asked for with one (0: no adapter).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from autotune.common.dtypes import DTYPE_BYTES
from autotune.memory.optimizers import TensorSpec
from autotune.memory.traces import OUTSIDE, Place, Term, TracedParameter, evaluate
from autotune.predict.sharding.library_rules import (
    Weight,
    ddp_broadcasts,
    ddp_buckets,
    ddp_first_buckets,
    ddp_rebuilt_buckets,
    fsdp2_shard_shape,
    zero3_partition_elements,
    zero_buckets,
    zero_partition_elements,
)
from autotune.records.estimate import TraceSpec
from autotune.space.parallelisms import PARALLELISMS, ZERO3_SUB_GROUP_ELEMENTS
from autotune.space.precisions import PRECISIONS
from autotune.space.trainers import TRAINERS

Unit = tuple[str, Place]
"""Weights that are gathered together: a layer, the embedding, the tail (final norm and head), or the root."""

EMBED: Unit = ("embed", OUTSIDE)
TAIL: Unit = ("tail", OUTSIDE)
ROOT: Unit = ("root", OUTSIDE)
"""Weights that FSDP2 has in no other unit, such as learned positions: gathered from beginning to end."""

# transformers 5.23 integrations/deepspeed.py trainer_config_finalize, what `auto` becomes: of hidden_size.
_PERSISTENT_ROWS = 10


class _Sized(NamedTuple):
    """Sizes of a weight: those of layers that are alike are worked out once."""

    weight: Weight
    """The weight itself, so that no other has its id."""
    shard_elements: int
    working_element_bytes: int
    shard_bytes: int
    padded_bytes: int
    is_gathered: bool


class Shares:
    """One GPU's shares of a model under TraceSpec.parallelism."""

    def __init__(
        self,
        parameters: Sequence[TracedParameter],
        spec: TraceSpec,
        *,
        num_gpus: int,
        hidden_size: int,
        is_one_unit: bool,
    ) -> None:
        """Sort the weights into units.

        `is_one_unit`: nothing outside the layers is told apart.
        """
        self.row = PARALLELISMS[spec.parallelism]
        self.num_gpus = num_gpus // self.row.num_replicas
        """GPUs among which weights are dealt out."""
        self.parameters = parameters
        self.groups = sorted({p.group for p in parameters if p.trainable})
        self.is_torch = self.row.library == "torch"
        self._precision = PRECISIONS[spec.precision]
        # accelerate 1.15 utils/fsdp_utils.py: what trains beside 4-bit weights stays as it is, which is as
        # PEFT has made it, or TRL has cast it (1.16 sft_trainer.py and the like).
        is_quantized, is_cast = spec.quantization != "none", not spec.adapter_in_base_dtype
        is_cast_back = TRAINERS[spec.trainer].is_trl and not self._precision.grad_scaler
        is_float32 = not is_quantized or (is_cast and not is_cast_back)
        self.upcasts = self._precision.autocast and is_float32
        """Whether what trains is float32, and computed with in 16 bits."""
        self.casts_adapter = self._precision.autocast and is_quantized and is_cast
        """Whether PEFT casts an adapter to float32 beside 4-bit weights."""
        self.bucket_elements = hidden_size**2
        """Elements of DeepSpeed's bucket for reducing gradients (reduce_bucket_size)."""
        self.checkpoint_every = spec.activation_checkpointing
        self._persistent_elements = _PERSISTENT_ROWS * hidden_size
        # transformers 5.23 Trainer._build_accelerator_args: find_unused_parameters is off then.
        is_ddp = self.row.name == "ddp"
        is_plain = spec.method == "full" and not TRAINERS[spec.trainer].passes_apart
        self.rebuilds = is_ddp and is_plain and spec.activation_checkpointing > 0
        """Whether DDP makes its buckets anew as it knows the order in which gradients arrive."""
        self.clones_outputs = is_ddp and not self.rebuilds
        """Whether DDP looks for unused parameters, and clones what the model returns."""
        self._weights = functools.cache(self._evaluated)
        self._sized: dict[int, _Sized] = {}
        """Sizes by the weight's id."""
        self.partitions = functools.cache(self._partitions)
        self.gathered_bytes = functools.cache(self._gathered_bytes)
        self.reduced_bytes = functools.cache(self._reduced_bytes)
        self.gradient_shard_bytes = functools.cache(self._gradient_shard_bytes)
        self.arriving = [n for n, each in enumerate(parameters) if each.trainable][::-1]
        """Positions of the trained weights in the order in which gradients arrive: from the last on, unless
        it is known better."""
        self._ddp_buckets = functools.cache(self._find_ddp_buckets)
        self._ddp_first_buckets = functools.cache(
            lambda rank: ddp_first_buckets(self._weights(rank))
        )
        self._ddp_broadcasts = functools.cache(
            lambda rank: ddp_broadcasts(self._weights(rank)[n] for n in self.by_module)
        )
        self.has_root = self.row.is_fsdp and not is_one_unit
        """Whether weights outside layers may be in a unit that is none of the embedding and the tail."""
        self.tail_stays = is_one_unit or is_tied(parameters)
        """Whether the tail is gathered from beginning to end, as where the embedding is the head too."""
        self.members: dict[Unit, list[int]] = {}
        """Positions in the list of weights, by unit."""
        for position, parameter in enumerate(parameters):
            self.members.setdefault(self._unit_of(parameter), []).append(position)

    @property
    def head_is_alone(self) -> bool:
        """Whether the head is a unit without the norm before it, as accelerate finds none within PEFT."""
        members = self.members.get(TAIL, ())
        rows = {self.parameters[position].shape[0] for position in members}
        return not self.tail_stays and len(rows) == 1

    def is_tied_head(self, position: int) -> bool:
        """Whether the weight at that position is the embedding's and the head's."""
        return self.parameters[position].is_tied

    def with_tied_last(self, positions: Iterable[int]) -> list[int]:
        """Order weights as their gradients arrive, by the order in which these are made.

        That of a weight which is embedding and head is made as the head goes backward, and arrives when the
        embedding's part, which comes last, has been added to it.
        """
        return sorted(positions, key=self.is_tied_head)

    @property
    def compute_bytes(self) -> int:
        """Bytes of one element in the dtype that is computed with."""
        return DTYPE_BYTES[self._precision.compute_dtype]

    def weights(self, rank: int) -> list[Weight]:
        return self._weights(rank)

    def trained(self, rank: int, unit: Unit | None = None) -> list[Weight]:
        """Trainable weights, of one unit or of all."""
        weights = self._weights(rank)
        if unit is not None:
            weights = [weights[position] for position in self.members.get(unit, ())]
        return [weight for weight in weights if weight.trainable]

    @functools.cached_property
    def goes_by_rank(self) -> bool:
        """Whether some of what trains goes by the LoRA rank."""
        small, large = (sum(w.num_elements for w in self.trained(rank)) for rank in (1, 2))
        return small != large

    def optimizer_specs(self, whole: Sequence[TensorSpec], rank: int) -> list[TensorSpec]:
        """The tensors that the optimizer updates on the GPU: its part, or none where the host does it."""
        if self.row.stage == 0:
            return list(whole)
        if self.row.offload:
            return []
        if self.is_torch:
            return [
                TensorSpec(
                    shape=fsdp2_shard_shape(spec.shape, self.num_gpus),
                    dtype=self._shard_dtype(spec.dtype),
                    group=spec.group,
                    embedding=spec.embedding,
                )
                for spec in whole
            ]
        return [
            TensorSpec(shape=(elements,), dtype="float32", group=group)
            for group, elements in self.partitions(rank).items()
        ]

    def working_bytes(self, weight: Weight) -> int:
        """Bytes of the whole weight, and of its gradient, in the dtype that is computed with."""
        return weight.num_elements * self._of(weight).working_element_bytes

    def shard_bytes(self, weight: Weight) -> int:
        """Bytes of the GPU's part of a weight that is shared out."""
        return self._of(weight).shard_bytes

    def whole_shards_bytes(self, rank: int, unit: Unit) -> int:
        """Bytes of a unit's weights that a program gathers itself, in the dtype of their shards."""
        weights = self._weights(rank)
        members = self.members[unit]
        return self.num_gpus * sum(self.shard_bytes(weights[position]) for position in members)

    def loaded_bytes(self, weight: Weight) -> int:
        """Bytes of the whole weight in the dtype in which FSDP2 keeps its shards."""
        dtype = self._shard_dtype(weight.dtype) if weight.trainable else weight.dtype
        return weight.num_elements * DTYPE_BYTES[dtype]

    def _partitions(self, rank: int) -> dict[int, int]:
        """Elements of the GPU's part of each of the optimizer's groups (ZeRO)."""
        parts = dict.fromkeys(self.groups, 0)
        for weight in self.trained(rank):
            elements = weight.num_elements
            if self.row.stage == 3:
                elements = zero3_partition_elements(elements, self.num_gpus)
            parts[weight.group] += elements
        if self.row.stage == 3:
            return parts
        return {group: zero_partition_elements(n, self.num_gpus) for group, n in parts.items()}

    def partition_bytes(self, rank: int, group: int, num_parts: int = 1) -> int:
        """Bytes of `num_parts` parts of a group in the dtype that is computed with."""
        return num_parts * self.partitions(rank)[group] * self.compute_bytes

    def master_bytes(self, rank: int, group: int) -> int:
        """Bytes of the float32 copy of the GPU's part of a group."""
        return 4 * self.partitions(rank)[group]

    def step_gradient_bytes(self, rank: int) -> int:
        """Bytes of ZeRO's float32 gradients of the group that is being updated."""
        largest = max(self.partitions(rank).values(), default=0)
        return 4 * (min(largest, ZERO3_SUB_GROUP_ELEMENTS) if self.row.stage == 3 else largest)

    def _gathered_bytes(self, rank: int, unit: Unit | None = None) -> int:
        """Bytes of a unit's weights, or of all, once they are whole on the GPU; 0 where they always are."""
        if self.row.stage < 3:
            return 0
        weights = self._weights(rank)
        if unit is not None:
            weights = [weights[position] for position in self.members.get(unit, ())]
        return sum(self._padded_bytes(w) for w in weights if self._is_gathered(w))

    def whole_bytes(self, rank: int, position: int) -> int:
        """Bytes of the weight at that position once its parts, padded alike, are together."""
        return self._padded_bytes(self._weights(rank)[position])

    def part_bytes(self, rank: int, position: int) -> int:
        """Bytes of the GPU's part of the weight at that position."""
        return self.shard_bytes(self._weights(rank)[position])

    def padded_part_bytes(self, rank: int, position: int) -> int:
        """Bytes of a part of the weight at that position if the last one is padded; 0 if all are as long."""
        weight = self._weights(rank)[position]
        return self.shard_bytes(weight) if weight.shape[0] % self.num_gpus else 0

    def trained_parts_bytes(self, rank: int) -> int:
        """Bytes of the GPU's parts of all trainable weights."""
        return sum(map(self.shard_bytes, self.trained(rank)))

    def gathered_weight_bytes(self, rank: int, position: int) -> int:
        """Bytes of the weight at that position once it is whole on the GPU; 0 where it always is."""
        weight = self._weights(rank)[position]
        return self._padded_bytes(weight) if self._is_gathered(weight) else 0

    def casts_shard(self, position: int) -> bool:
        """Whether FSDP2 casts its shard of the weight at that position before it is gathered."""
        return position in self._cast_positions

    def cast_shards_bytes(self, rank: int, positions: Sequence[int]) -> int:
        """Bytes of a GPU's shards of these weights as they are cast to be gathered; 0 for others."""
        weights = self._weights(rank)
        sized = [self._of(weights[each]) for each in positions if each in self._cast_positions]
        return sum(each.shard_elements * each.working_element_bytes for each in sized)

    @functools.cached_property
    def _cast_positions(self) -> frozenset[int]:
        """Positions of weights whose shards are cast, of any LoRA rank: it is the dtype that tells."""
        return frozenset(
            position
            for position, sized in enumerate(map(self._of, self._weights(1)))
            if sized.is_gathered
            and sized.shard_bytes != sized.shard_elements * sized.working_element_bytes
        )

    def fetched_shard_bytes(self, rank: int, position: int) -> int:
        """Bytes of the GPU's shard of the weight at that position, as the host keeps it."""
        weight = self._weights(rank)[position]
        return self.shard_bytes(weight) if self._is_gathered(weight) else 0

    def gathers(self, rank: int, unit: Unit) -> list[int]:
        """Bytes of each all-gather of a unit: FSDP2's of all of it, DeepSpeed's of one weight."""
        if self.row.stage < 3:
            return []
        weights = [self._weights(rank)[position] for position in self.members.get(unit, ())]
        pieces = [self._padded_bytes(w) for w in weights if self._is_gathered(w)]
        return [sum(pieces)] if self.is_torch and pieces else pieces

    def reductions(self, rank: int) -> list[int]:
        """Bytes of each collective that reduces the gradients of one backward pass."""
        if self.row.stage == 0:
            return self._ddp_buckets(rank)
        if self.is_torch:
            of_units = (self.reduced_bytes(rank, unit) for unit in self.members)
            return [size_bytes for size_bytes in of_units if size_bytes]
        whole = (self.working_bytes(w) for w in reversed(self.trained(rank)))
        return zero_buckets(whole, self.bucket_bytes(rank))

    def largest_gathered_bytes(self, rank: int, unit: Unit) -> int:
        """Bytes of the largest weight of a unit that is gathered."""
        sizes = (self.gathered_weight_bytes(rank, p) for p in self.members.get(unit, ()))
        return max(sizes, default=0)

    def _reduced_bytes(self, rank: int, unit: Unit) -> int:
        """Bytes that go into FSDP2's reduce-scatter: whole gradients, padded to whole shards."""
        return sum(self._padded_bytes(w) for w in self.trained(rank, unit))

    def all_reduced_bytes(self, rank: int, unit: Unit) -> int:
        """Bytes of HSDP's part of a unit's gradients, which is averaged between the groups."""
        return self.reduced_bytes(rank, unit) // self.num_gpus

    def is_cast(self, rank: int, unit: Unit) -> bool:
        """Whether FSDP2 reduces a unit's gradients in another dtype than that in which it keeps them."""
        return self.all_reduced_bytes(rank, unit) != self.gradient_shard_bytes(rank, unit)

    def _gradient_shard_bytes(self, rank: int, unit: Unit) -> int:
        """Bytes of FSDP2's gradients of a unit: views of one tensor, in the shards' dtype."""
        return sum(self.shard_bytes(w) for w in self.trained(rank, unit))

    @functools.cached_property
    def like(self) -> list[int]:
        """The position of the first weight that each is like: of its shape at every rank, dtype and group."""
        first: dict[tuple[object, ...], int] = {}
        return [
            first.setdefault((_shape_of(each), each.dtype, each.trainable, each.group), position)
            for position, each in enumerate(self.parameters)
        ]

    def like_unit(self, unit: Unit) -> tuple[int, ...]:
        """Return what is equal for units whose weights are alike."""
        return tuple(self.like[position] for position in self.members.get(unit, ()))

    @functools.cached_property
    def position_of(self) -> dict[int, int]:
        """Position of the weight that each of the trace's numbers is of."""
        return {parameter.number: position for position, parameter in enumerate(self.parameters)}

    @functools.cached_property
    def by_module(self) -> list[int]:
        """Positions of the weights in the model's order, in which adapters are behind what they adapt."""
        places = [parameter.place for parameter in self.parameters]
        first_layer = min((n for n, (_, layer) in enumerate(places) if layer >= 0), default=0)

        def where(position: int) -> tuple[int, ...]:
            if places[position][1] < 0:
                return (0 if position < first_layer else 2,)
            return (1, *places[position], self.parameters[position].position)

        return sorted(range(len(places)), key=where)

    def _find_ddp_buckets(self, rank: int) -> list[int]:
        weights = self._weights(rank)
        if not self.rebuilds:
            return ddp_buckets(weights)
        return ddp_rebuilt_buckets(weights[position] for position in self.arriving)

    def ddp_bucket_bytes(self, rank: int, index: int) -> int:
        """Bytes of DDP's bucket of that index; 0 where there are not so many buckets."""
        buckets = self._ddp_buckets(rank)
        return buckets[index] if index < len(buckets) else 0

    def ddp_first_bucket_bytes(self, rank: int, index: int) -> int:
        """Bytes of DDP's bucket of that index before they are made anew; 0 where there are not so many."""
        buckets = self._ddp_first_buckets(rank)
        return buckets[index] if index < len(buckets) else 0

    def num_ddp_broadcasts(self, rank: int) -> int:
        """Number of flat copies of weights that DDP sends as it is made."""
        return len(self._ddp_broadcasts(rank))

    def ddp_broadcast_bytes(self, rank: int, index: int) -> int:
        """Bytes of the flat copy of that index; 0 where there are not so many."""
        sizes = self._ddp_broadcasts(rank)
        return sizes[index] if index < len(sizes) else 0

    def bucket_bytes(self, _: int) -> int:
        """Bytes of DeepSpeed's bucket for reducing gradients (reduce_bucket_size)."""
        return self.bucket_elements * self.compute_bytes

    def persistent_bytes(self, rank: int) -> int:
        """Bytes of the small weights that ZeRO 3 keeps whole beside their parts, padded to whole parts."""
        return sum(self._padded_bytes(w) for w in self._weights(rank) if not self._is_gathered(w))

    def largest_bytes(self, rank: int) -> int:
        """Bytes of ZeRO-Offload's buffer on the GPU (temp_grad_buffer_for_gpu_offload)."""
        return max(map(self.working_bytes, self.trained(rank)), default=0)

    def host_bytes(self, rank: int) -> int:
        """Bytes of host memory that each GPU's part takes under offloading; 0 without.

        They are weights, gradients and two moments in the optimizer's dtype, the copy that is fetched where
        there is one, and frozen weights that are shared out.
        """
        if not self.row.offload:
            return 0
        weights = self._weights(rank)
        if self.is_torch:
            return sum(self.shard_bytes(w) * (4 if w.trainable else 1) for w in weights)
        elements = sum(self.partitions(rank).values())
        if self.row.stage == 3:
            return 16 * elements + sum(map(self.shard_bytes, weights))
        return (16 + self.compute_bytes) * elements

    def _evaluated(self, rank: int) -> list[Weight]:
        """The weights; those that are alike are one object."""

        @functools.cache
        def weight(shape: tuple[Term, ...], dtype: str, trainable: bool, group: int) -> Weight:
            sizes = tuple(evaluate(term, 1, rank) for term in shape)
            return Weight(shape=sizes, dtype=dtype, trainable=trainable, group=group)

        return [
            weight(_shape_of(each), each.dtype, each.trainable, each.group)
            for each in self.parameters
        ]

    def _of(self, weight: Weight) -> _Sized:
        found = self._sized.get(id(weight))
        if found is None:
            found = self._sized[id(weight)] = self._size(weight)
        return found

    def _size(self, weight: Weight) -> _Sized:
        element_bytes = shard_element_bytes = self._working_element_bytes(weight)
        if self.is_torch:
            dtype = self._shard_dtype(weight.dtype) if weight.trainable else weight.dtype
            shard_element_bytes = DTYPE_BYTES[dtype]
        elements = self._shard_elements(weight)
        return _Sized(
            weight=weight,
            shard_elements=elements,
            working_element_bytes=element_bytes,
            shard_bytes=elements * shard_element_bytes,
            padded_bytes=self.num_gpus * elements * element_bytes,
            # The limit is DeepSpeed's stage3_param_persistence_threshold.
            is_gathered=self.is_torch or weight.num_elements > self._persistent_elements,
        )

    def _unit_of(self, parameter: TracedParameter) -> Unit:
        if parameter.place[1] >= 0:
            return "layer", parameter.place
        if parameter.of_root and self.has_root:
            return ROOT
        return EMBED if parameter.embedding and not self.tail_stays else TAIL

    def _working_element_bytes(self, weight: Weight) -> int:
        """Bytes of one element of a weight as it is computed with.

        Accelerate has FSDP2 gather 16 bits under autocast; DeepSpeed casts the model.
        """
        is_cast = not self.is_torch or (self.row.stage == 3 and self._precision.autocast)
        is_float = weight.dtype in ("float32", "float16", "bfloat16")
        return self.compute_bytes if is_cast and is_float else DTYPE_BYTES[weight.dtype]

    def _shard_dtype(self, dtype: str) -> str:
        """Dtype of a trainable FSDP2 shard: accelerate mostly makes it float32 under autocast."""
        return "float32" if self.upcasts else dtype

    def _shard_elements(self, weight: Weight) -> int:
        if self.is_torch:
            return math.prod(fsdp2_shard_shape(weight.shape, self.num_gpus))
        return zero3_partition_elements(weight.num_elements, self.num_gpus)

    def _padded_bytes(self, weight: Weight) -> int:
        return self._of(weight).padded_bytes

    def _is_gathered(self, weight: Weight) -> bool:
        """Whether ZeRO 3 or FSDP2 gathers a weight: ZeRO 3 leaves small ones whole."""
        return self._of(weight).is_gathered


def _shape_of(parameter: TracedParameter) -> tuple[Term, ...]:
    return tuple((fixed, of_batch, of_rank) for fixed, of_batch, of_rank in parameter.shape)


def is_tied(parameters: Iterable[TracedParameter]) -> bool:
    """Whether the embedding is the head too."""
    return any(parameter.is_tied for parameter in parameters)
