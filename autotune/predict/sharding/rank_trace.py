"""One GPU's step when several share it: a trace's events with shards, gathered layers and buffers.

A trace is of one GPU. What DDP, FSDP2 or DeepSpeed ZeRO do to it follows from rules: weights and
gradients give way to the GPU's part of them, a layer's weights are gathered before each use and
dropped after, gradients are reduced at the end of a layer's backward pass, the optimizer sees the
part. The result answers what a Trace answers (autotune.predict.estimator), and says what is sent.

As run: Transformers' Trainer under `accelerate launch` with the files of autotune.export. DDP sends flat
copies of the weights as it is made, two of 250 MiB at a time, and keeps
its buckets beside the gradients (accelerate leaves gradient_as_bucket_view False) and averages once an
optimizer step. Where it looks for unused parameters (the Trainer has it do so, but for a model that is
checkpointed and has no adapter) it clones what the model returns. FSDP2 wraps each layer, the embedding, and
final norm with head; it gathers the next layer in the backward pass; it is told whether to reduce in every
micro-step (`sync_each_batch`), or to keep whole gradients between micro-steps (`no_sync`). ZeRO has
the settings of deepspeed.json: buckets of hidden_size^2 elements, weights gathered one at a time and dropped
after each use. HSDP is FSDP2 within each group of GPUs; each part of the gradients is then averaged between
the groups.

Under tensor parallelism the trace itself is of the first GPU: a worker splits the model as Transformers does
(autotune.worker.build.tensor_parallel), so that parts, activations and collectives are those of its step.
So is it under context parallelism (autotune.worker.build.context_parallel), where FSDP2 shares out the
weights besides. The last GPU has the fewest activations there: of its stretches one follows the other, so
that it makes no mask, and its merges in attention need less. Of two GPUs it is traced, too.

Sources: torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py;
accelerate 1.15 utils/fsdp_utils.py fsdp2_prepare_model; deepspeed 0.19.8 runtime/zero/ (zero_step).
Shards, buckets and optimizer state of DDP, FSDP2, HSDP and tensor parallelism are compared with two to four
real processes, of the last activations and collectives too (tests/contracts/test_parallel_real.py), and
peaks of whole steps with what probes of them measure (tests/contracts/test_probe_shared.py). ZeRO is held
against DeepSpeed itself (studies/zero, tests/contracts/test_zero.py). What CUDA's streams make of all that,
and of ZeRO's offloading, is held against PyTorch's CUDA build without a card (studies/no-card, shared.jsonl).

What TRL's trainers compare a model with is a frozen copy of it, which DDP and ZeRO 1 and 2 leave whole on
each GPU. FSDP2 has its own parts of it, and gathers it at once for its pass; ZeRO 3 has an engine for it
(trl 1.16 models/utils.py, prepare_fsdp and prepare_deepspeed). Under DDP and ZeRO 1 and 2 each GPU
writes completions of its own prompts, as one by itself does. Of embedders under DDP the trace itself is of
a model that DDP wraps (worker.trace.embedding_step); under ZeRO 1 and 2 it is one GPU's.

Known limitations
- A compiled step: DDP clones what it returns, too, which is not counted.
- Streams: what one has freed is taken to be free for it at once, though another may be at work on it.
- FSDP2 in float16 is traced under autocast, though accelerate puts none around it.
- Of the communication only DDP's gradients are taken to overlap with kernels, by six tenths of what they
  may (autotune.speed.links.hidden_seconds); Estimate.overlapped_step_seconds is the bound if all did. On two
  cards that reach each other slowly published runs waited for all that FSDP sent (studies/published-shared).
- What ZeRO 2 and 3 cost beside what they send: by DeepSpeed of 2021 7 to 22 % (the same study).
- Adapters under ZeRO run in 16 bits; beside codes their small casts under autocast are counted all the same,
  and QLoRA of an encoder was predicted 20 % too large (155 MiB).
- Under ZeRO 1 and 2, whose GPUs keep other gradients, the first, the last and the one that keeps most are
  predicted, under FSDP2 the first, which loads weights otherwise, and the last. The fullest speaks. Others
  merge otherwise, and their free blocks lie elsewhere. Of three and more GPUs under context parallelism the
  second one stands for the last, with attention like the first's.
- Loading: ZeRO 1 and 2 hold the weights twice while they flatten them, which is left out; a program that
  loads its model before its TrainingArguments has all of it on each GPU before ZeRO 3 parts it. Saving
  gathers it again.
- Tensor parallelism: what DTensors cost the host beside each operation, and the few bytes that clipping
  sends to add up norms. Where a dimension does not divide, the first GPU has the largest part.
- Context parallelism: what DTensors cost the host in each attention. What goes round the ring is not taken
  to overlap either, though keys and values are gathered while a GPU works on its own.
- Several machines, unlike GPUs, and Ulysses' or expert parallelism. Pipelines are in pipeline.py.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from autotune.memory.optimizers import TensorSpec
from autotune.memory.traces import Launch, Phase, Trace, TracedKernel
from autotune.memory.traces.running import running
from autotune.memory.traces.terms import Array, Term, evaluate, summable
from autotune.predict.sharding.added_tensors import AddedTensors, SizesByRank
from autotune.predict.sharding.exchange import Exchange
from autotune.predict.sharding.layer_counts import USUAL_RANK
from autotune.predict.sharding.rank_set_up import RankSetUp
from autotune.predict.sharding.shards import ROOT, TAIL, Shares
from autotune.predict.sharding.shared_trace import SharedTrace
from autotune.predict.sharding.step import PASSES_BESIDES, Blocks, MicroStep
from autotune.predict.sharding.zero_parts import ZeroParts
from autotune.predict.sharding.zero_step import (
    ZeroMicroStep,
    ZeroUpdate,
    positions_of,
    summed_in_place,
)
from autotune.records.estimate import TraceSpec
from autotune.space.trainers import TRAINERS
from autotune.speed.links import COLLECTIVES, Message

# deepspeed 0.19.8 runtime/zero/config.py, default of allgather_bucket_size.
_ZERO_GATHERED_ELEMENTS = 500_000_000


class RankTrace(SharedTrace):
    """A Trace as one of several GPUs runs it: it answers the same questions, and has `exchange`."""

    def __init__(
        self,
        trace: Trace,
        spec: TraceSpec,
        *,
        num_gpus: int,
        hidden_size: int = 0,
        on_card: bool = True,
        of_last: Trace | None = None,
        gpu: int | None = None,
    ) -> None:
        """`on_card`: whether CUDA's streams allocate, and weights are dealt out on it: not so on a CPU.

        `gpu`: number of the GPU that is predicted, where each keeps other gradients (ZeRO 1 and 2) or the
        first loads otherwise (FSDP2). None: what goes for all, with `stages` for those that are unlike.
        `of_last`: the last GPU's own step, where it is another.
        """
        super().__init__(trace, spec.parallelism)
        self._gpu = gpu
        blocks = trace.blocks()
        has_head = any(phase == Phase.HEAD for phase, *_ in blocks)
        of_others = set(_events_of(trace, Phase.REFERENCE_WEIGHTS))
        self._shares = shares = Shares(
            [each for each in trace.parameters() if each.number not in of_others],
            spec,
            num_gpus=num_gpus,
            hidden_size=hidden_size,
            is_one_unit=not has_head,
        )
        self._num_gpus = num_gpus
        self._no_sync = spec.no_sync
        trainer = TRAINERS[spec.trainer]
        self._head_makes_loss = trainer.head_makes_loss
        self._copies = self._find_copies() if not trainer.has_teacher else {}
        """Positions of the weights that those of a frozen copy are like, by their numbers."""
        self._num_passes = len({phase for phase, *_ in blocks} & PASSES_BESIDES)
        self._extra = AddedTensors(len(trace.template), shares)
        self._own_sizes = functools.cache(self._work_out_sizes)
        self.workspaces = trace.workspaces
        self.batch, self.count, self.loss = trace.batch, trace.count, trace.loss
        self._clones: dict[int, Term] = {}
        """Sizes of the clones of what the model returns, which go with the micro-batch, by their numbers."""
        self._buffers: list[int] = []
        self.step_buffers: list[int] = []
        self._around: tuple[list[int], list[int]] | None = None
        if shares.row.is_deepspeed:
            self._run_zero()
        elif shares.row.stage == 0:
            if shares.rebuilds:
                shares.arriving = shares.with_tied_last(self._positions(blocks).values())
            self.gradients = trace.gradients
            self.first, self.again, self.next = map(
                self._clone_outputs, (trace.first, trace.again, trace.next)
            )
        else:
            workspaces = set(trace.workspaces)
            logits = self._logits_of_model()
            of_root = set(filter(trace.is_of_root, trace.gradients) if shares.has_root else ())
            step = functools.partial(
                MicroStep,
                self._extra,
                shares,
                trace.gradients,
                logits,
                of_root,
                has_copy=bool(self._copies),
                head_makes_loss=self._head_makes_loss,
            )
            first = step(adds=False, reduces=not spec.no_sync)
            self.first = first.written(blocks)
            self.again = [event for event in self.first if event not in workspaces]
            if spec.no_sync:
                # The last micro-step, which makes the GPU's part of the gradients. One between is no larger.
                later = step(adds=False, kept=first.unreduced)
                self.whole_gradients = list(chain.from_iterable(first.unreduced.values()))
                self.next = later.written(trace.next_blocks())
            else:
                later = step(adds=True)
                self.next = [event for event in later.written(blocks) if event not in workspaces]
            self.gradients = (later if spec.no_sync else first).gradients
        set_up = self._set_up = RankSetUp(
            trace,
            shares,
            self._extra,
            self._copies,
            gpu=gpu,
            on_card=on_card,
            is_quantized=spec.quantization != "none",
        )
        self.setup, self.behind_first = set_up.events, set_up.behind_first
        self.num_prepared_events = set_up.num_prepared_events
        self.num_own_events = set_up.num_own_events
        self._buffers += set_up.buffers
        self.aside = self._extra.aside if on_card else ()
        if gpu is None:
            self.stages = tuple(
                RankTrace(
                    of_last if of_last is not None and each == num_gpus - 1 else trace,
                    spec,
                    num_gpus=num_gpus,
                    hidden_size=hidden_size,
                    on_card=on_card,
                    gpu=each,
                )
                for each in self._unlike_gpus()
            )

    def _find_copies(self) -> dict[int, int]:
        own = _events_of(self._trace, Phase.WEIGHTS)
        copied = _events_of(self._trace, Phase.REFERENCE_WEIGHTS)
        if self._shares.row.stage < 3 or not copied:
            return {}
        return {
            copy: self._shares.position_of[number]
            for copy, number in zip(copied, own, strict=True)
            if number in self._shares.position_of
        }

    def _logits_of_model(self) -> set[int]:
        """Numbers of the logits that leave the model; none where its head makes the loss of them."""
        if self._head_makes_loss:
            return set()
        return {n for n, name in enumerate(self._trace.categories) if name == "logits"}

    def _clone_outputs(self, events: list[int]) -> list[int]:
        """Have DDP clone what the model returns, where it looks for unused parameters.

        The clones are what the Trainer holds then: the model's own go as all are cloned, but for those that
        the backward pass needs. Source: torch 2.13 nn/parallel/distributed.py, _post_forward and _DDPSink.
        """
        returned = self._trace.returned if self._shares.clones_outputs else None
        if returned is None:
            return events
        if not self._clones:
            names = self._trace.categories
            for number, term in returned.tensors:
                category = "logits" if names[number] == "logits" else "temporary"
                self._clones[self._extra.new(category, lambda _: 0)] = term
        clone_of = dict(zip((number for number, _ in returned.tensors), self._clones, strict=True))
        begins = events.index(returned.after) + 1
        ends = max(begins, events.index(returned.until) + 1)
        held = events[begins:ends]
        given_up = [event for event in held if ~event in clone_of]
        kept = [clone for number, clone in clone_of.items() if ~number not in given_up]
        replaced = [~clone_of[~event] if event in given_up else event for event in held]
        own = [*self._clones, *given_up, *replaced, *(~clone for clone in kept)]
        return [*events[:begins], *own, *events[ends:]]

    def _unlike_gpus(self) -> list[int]:
        """Numbers of the GPUs that hold other tensors than each other; none where all go for one."""
        shares, last = self._shares, self._num_gpus - 1
        if self._set_up.is_dealt_out:
            return [0, last]
        if shares.row.is_deepspeed and shares.row.stage < 3 and not shares.row.offload:
            return sorted({0, ZeroParts(shares).fullest_gpu(USUAL_RANK), last})
        return []

    def _run_zero(self) -> None:
        """Write the micro-steps, and what is around the update, as DeepSpeed runs them."""
        trace, shares = self._trace, self._shares
        parts = ZeroParts(shares)
        workspaces = set(trace.workspaces)
        logits = self._logits_of_model()
        blocks: Blocks = trace.released_blocks()
        positions = self._positions(blocks)
        # The one that makes gradients of its own first: ZeRO 1 goes through the weights in their order.
        usual = 0 if shares.row.stage == 1 else shares.num_gpus - 1
        gpu = usual if self._gpu is None else self._gpu
        update = ZeroUpdate(self._extra, shares, parts, gpu)
        bucket: int | None = None
        whole: dict[int, int] = {}
        if shares.row.stage == 1:
            bucket = self._extra.new("workspace", shares.bucket_bytes)
            self._buffers.append(bucket)
            self.left, whole = [bucket], positions
            self.gradients, self.next = trace.gradients, trace.next
            arrives = next(n for n, e in enumerate(trace.released_first) if ~e in positions)
            self.first = [*trace.first[:arrives], bucket, *trace.first[arrives:]]
            self.again = [event for event in self.first if event not in workspaces]
        else:
            summed: dict[int, int] = {}
            if shares.row.stage == 3:
                blocks, summed = summed_in_place(
                    blocks, positions, trace.sizes(1, USUAL_RANK).__getitem__
                )
            step = functools.partial(
                ZeroMicroStep,
                self._extra,
                shares,
                parts,
                gpu,
                positions,
                logits,
                summed,
                has_copy=bool(self._copies),
                head_makes_loss=self._head_makes_loss,
            )
            steps = [step(adds=False), step(adds=True)]
            again, later = (each.written(blocks) for each in steps)
            self.first = again
            if shares.row.stage == 3 and self._head_makes_loss:
                steps.append(step(adds=False, is_very_first=True))
                self.first = steps[-1].written(blocks)
            self.only_last = [number for step in steps for number in step.only_last]
            self.gradients = steps[0].gradients
            self.again = [event for event in again if event not in workspaces]
            self.next = [event for event in later if event not in workspaces]
            self._buffers += [b for b in (steps[0].bucket,) if b is not None]
        before = update.before(bucket, whole, () if whole else self.gradients)
        self._around = before, update.after()
        # Those of a single group go before the update, and ZeRO 1's whole ones: no bound below.
        if shares.row.stage == 3 or (shares.row.stage == 2 and len(shares.groups) > 1):
            self.step_buffers = list(update.step_gradients)

    def _positions(self, blocks: Blocks) -> dict[int, int]:
        """Positions of the weights that the trace's gradients are of, in the order in which they are made."""
        trace = self._trace
        return positions_of(
            blocks,
            self._shares,
            frozenset(trace.gradients),
            lambda gradient: trace.parameter_of(gradient, USUAL_RANK).num_elements,
        )

    def around_update(self) -> tuple[list[int], list[int]]:
        return self._around or super().around_update()

    @property
    def added_categories(self) -> list[str]:
        return self._extra.categories

    def trainable(self, rank: int) -> list[TensorSpec]:
        """The tensors that the optimizer updates on this GPU."""
        return self._shares.optimizer_specs(self._trace.trainable(rank), rank)

    def launches(self, micro_batch: float, rank: int) -> list[Launch]:
        """The kernels of a micro-step; of collectives what they cost beside sending; DDP's clones last."""
        own = [
            replace(launch, bytes_moved=0.0) if launch.kernel.name in COLLECTIVES else launch
            for launch in self._trace.launches(micro_batch, rank)
        ]
        return [
            *own,
            *(
                Launch(_clone_of(term), 0.0, 2 * evaluate(term, micro_batch, rank), 1, ())
                for term in self._clones.values()
            ),
        ]

    @property
    def stretches(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Order of the kernels, as Trace.stretches: DDP's clones are a stretch behind the forward pass."""
        shares, order = self._trace.stretches
        if not self._clones:
            return shares, order
        is_forward = [launch.kernel.phase == "forward" for launch in self._trace.launches(1, 1)]
        last = max(n for n, block in enumerate(order) if shares[block, is_forward].any())
        num_blocks, num_kernels = shares.shape
        wider = np.zeros((num_blocks + 1, num_kernels + len(self._clones)))
        wider[:-1, :num_kernels] = shares
        wider[-1, num_kernels:] = 1
        return wider, np.insert(order, last + 1, num_blocks)

    def exchange(self, micro_batch: int, rank: int) -> Exchange:
        """Bytes that are sent between the GPUs and to the host, and that are kept for it."""
        shares, stage, num_gpus = self._shares, self._shares.row.stage, self._num_gpus
        trained_bytes = sum(map(shares.working_bytes, shares.trained(rank)))
        gathered_bytes = shares.gathered_bytes(rank)
        # Gathered for the forward pass, and again for the backward; FSDP2's tail stays in between.
        used_bytes = (2 + self._num_passes) * gathered_bytes
        if shares.is_torch:
            used_bytes -= sum(shares.gathered_bytes(rank, unit) for unit in (TAIL, ROOT))
        is_offloaded = shares.row.offload
        brought_bytes = used_bytes if stage == 3 else 0
        # Gradients go to the host as they are reduced.
        given_bytes = 0 if self._no_sync else trained_bytes
        copied_bytes = (brought_bytes + given_bytes) // num_gpus
        return Exchange(
            num_gpus=num_gpus,
            messages_per_micro_step=(
                *self._messages_of_kernels(micro_batch, rank),
                *self._messages_per_micro_step(rank),
            ),
            messages_per_step=self._messages_per_step(rank),
            hides_gradients=shares.row.name == "ddp",
            host_copy_bytes_per_micro_step=copied_bytes if is_offloaded else 0,
            host_copy_bytes_per_step=(
                trained_bytes // num_gpus if is_offloaded and (stage < 3 or self._no_sync) else 0
            ),
            host_bytes=shares.host_bytes(rank),
            host_update_elements=(
                sum(w.num_elements for w in shares.trained(rank)) if is_offloaded else 0
            ),
            gathered_bytes=self._most_gathered_bytes(rank),
            buffers_bytes=self.bytes_of(self._buffers, 1, rank),
        )

    def _messages_of_kernels(self, micro_batch: int, rank: int) -> tuple[Message, ...]:
        """Collectives that run among the step's kernels, where those are split."""
        return tuple(
            Message(
                operation=launch.kernel.name,
                num_bytes=round(launch.bytes_moved),
                count=launch.count,
            )
            for launch in self._trace.launches(micro_batch, rank)
            if launch.kernel.name in COLLECTIVES
        )

    def _messages_per_micro_step(self, rank: int) -> tuple[Message, ...]:
        shares, stage, row = self._shares, self._shares.row.stage, self._shares.row
        if stage < 2:
            return ()
        gathers: Counter[int] = Counter()
        for unit in shares.members:
            stays = row.keeps_gathered or (unit in (TAIL, ROOT) and shares.is_torch)
            besides = 0 if row.keeps_gathered else self._num_passes
            for size_bytes in shares.gathers(rank, unit):
                gathers[size_bytes] += (1 if stays else 2) + besides
        gathered = _messages("all_gather", gathers, shares.num_gpus)
        return gathered if self._no_sync else (*gathered, *self._reductions(rank))

    def _reductions(self, rank: int) -> tuple[Message, ...]:
        """Gradients that GPUs send each other where they keep parts of them."""
        shares, row = self._shares, self._shares.row
        # stage_1_and_2.py, use_multi_rank_bucket_allreduce: buckets are all-reduced.
        reduction = "all_reduce" if row.stage == 2 else "reduce_scatter"
        reduced = Counter(shares.reductions(rank))
        among = shares.num_gpus
        between: tuple[Message, ...] = ()
        if row.num_replicas > 1:
            # Each GPU's part, with those that hold the same part in the other groups.
            parts: Counter[int] = Counter()
            for size_bytes, count in reduced.items():
                parts[size_bytes // among] += count
            between = _messages("all_reduce", parts, row.num_replicas)
        return (*_messages(reduction, reduced, among), *between)

    def _messages_per_step(self, rank: int) -> tuple[Message, ...]:
        """Gradients that are sent once, and the weights that ZeRO 1 and 2 have updated in parts."""
        shares, stage, row = self._shares, self._shares.row.stage, self._shares.row
        found: tuple[Message, ...] = ()
        if row.splits:
            return found
        if self._no_sync:
            found += self._reductions(rank)
        if stage < 2:
            found += _messages("all_reduce", Counter(shares.reductions(rank)))
        if stage in (1, 2):
            trained_bytes = sum(map(shares.working_bytes, shares.trained(rank)))
            count = -(-trained_bytes // (_ZERO_GATHERED_ELEMENTS * shares.compute_bytes)) or 1
            found += _messages("all_gather", Counter({trained_bytes // count: count}))
        return found

    def _put_together(self, micro_batch: int, rank: int) -> Array:
        whole = summable(self._trace.sizes_of_part(micro_batch, rank))
        numbers, replaced, extra, ratio = self._own_sizes(rank)
        whole[numbers] = replaced
        whole[self._whole_gradients] //= ratio
        every = np.concatenate((whole, extra))
        for number, term in self._clones.items():
            every[number] = evaluate(term, micro_batch, rank)
        return every

    def _work_out_sizes(self, rank: int) -> tuple[Array, Array, Array, int]:
        """Work out the sizes in which this GPU differs from the trace.

        Returns tensors of other sizes than the trace's, their sizes, those of what is added, and how many
        times smaller gradients are (a library that casts fp32 adapters to 16 bits: twice).
        """
        trained = self._shares.trained(rank)
        ratio = trained[0].size_bytes // self._shares.working_bytes(trained[0]) if trained else 1
        return (
            np.asarray(list(self._set_up.replaced), dtype=np.int64),
            self._replaced_sizes.at(rank),
            self._extra.sizes.at(rank),
            ratio,
        )

    @functools.cached_property
    def _replaced_sizes(self) -> SizesByRank:
        return SizesByRank(self._shares, self._set_up.replaced.values())

    @functools.cached_property
    def _whole_gradients(self) -> list[int]:
        """Numbers of the trace's own gradients, and of what is added to them."""
        return [n for n, name in enumerate(self._trace.categories) if name == "gradient"]

    def _most_gathered_bytes(self, rank: int) -> int:
        alive = running(self._gathered_in_order, self._all_sizes(1, rank))
        return int(alive.max(initial=0))

    @functools.cached_property
    def _gathered_in_order(self) -> NDArray[np.int64]:
        """Events of a micro-step that make or free what is gathered."""
        gathered = self._extra.gathered
        order = [e for e in self.again if (e if e >= 0 else ~e) in gathered]
        return np.asarray(order, dtype=np.int64)


def _events_of(trace: Trace, phase: Phase) -> list[int]:
    """Return the events of a phase of the setup."""
    return [event for each, _, events in trace.setup_blocks() if each == phase for event in events]


def _clone_of(term: Term) -> TracedKernel:
    """Return the kernel that clones a tensor of that size."""
    return TracedKernel(
        name="clone",
        dtype="float32",
        flops=(0, 0, 0),
        moved=(term, term),
        phase="forward",
        count=1,
    )


def _messages(
    operation: str, counts: Mapping[int, int], num_gpus: int | None = None
) -> tuple[Message, ...]:
    """Collectives of one kind, by bytes."""
    return tuple(
        Message(operation=operation, num_bytes=num_bytes, count=count, num_gpus=num_gpus)
        for num_bytes, count in counts.items()
    )
