"""Prices traces as Estimates: predicted memory and time of any number of configurations on one card.

Memory: the events of the first optimizer steps go through the allocator model. Time: the kernels of a
micro-step and of an optimizer step go through the roofline, apart, so that any accumulation is priced.

A full replay takes milliseconds; `floor_bytes` takes microseconds and cannot be too high, `seconds`
likewise is exact but for paging. A search needs the replay only of what could win.

Not modelled: several streams, kernels outside the trace (data loading, logging,
evaluation, checkpoints), fragmentation left by earlier work in the process.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from autotune.catalogue.gpus import Gpu
from autotune.memory.allocator import Replay
from autotune.memory.traces import Trace
from autotune.predict.breakdown import Memory, memory_of
from autotune.predict.estimate_parts import per_gpu, time_shares
from autotune.predict.floors import MicroStepBytes, micro_step_of
from autotune.predict.kept_prices import TRAINABLE, KeptPrices
from autotune.predict.kept_replays import KeptReplays
from autotune.predict.optimizer_update import (
    LaterUpdate,
    Trainable,
    Update,
    UpdateCosts,
    costs_of,
    identity_of,
    kernels_of,
    priced_update,
)
from autotune.predict.replays import Replayable, Replays, name_of
from autotune.predict.sharding.dealt_layers import DealtTrace
from autotune.predict.sharding.exchange import Exchange
from autotune.predict.sharding.rank_trace import RankTrace
from autotune.predict.sharding.shared_trace import SharedTrace
from autotune.predict.steps import Steps, first_steps
from autotune.predict.timeline import timeline_of
from autotune.records.charts import Timeline
from autotune.records.estimate import Estimate, TraceSpec, specs_for
from autotune.space.config import TrainConfig
from autotune.space.headroom import NO_HEADROOM, Headroom
from autotune.space.lengths import Filling, vary
from autotune.space.optimizers import UPDATERS
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import PRECISIONS
from autotune.speed import compiling, links, roofline, step_parts
from autotune.speed.host import USUAL, Host, Stretches
from autotune.speed.origin import RatesFrom
from autotune.speed.sureness import Part, Parts, added, step_spread_of
from autotune.store.trace_cache import PriceCache, ReplayCache

# "about 10% slower" (transformers 5.23 TrainingArguments.torch_empty_cache_steps, its issue 31372):
# what giving segments back and asking for them again adds to a step that does it.
_EMPTY_CACHE_SHARE = 0.10


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeconds:
    """Predicted times of one configuration's optimizer step."""

    micro_step_seconds: float
    optimizer_step_seconds: float
    total_seconds: float
    bound: str
    communication_seconds: float = 0.0
    """Part of the total that goes into communication with the other GPUs."""


class Estimator:
    """Prices configurations of one model on one card under one budget."""

    def __init__(
        self,
        traces: Mapping[TraceSpec, Trace | SharedTrace],
        gpu: Gpu,
        *,
        memory_budget_bytes: int,
        headroom: Headroom = NO_HEADROOM,
        filling: Callable[[TrainConfig], Filling] | None = None,
        host: Host | None = None,
        replays: ReplayCache | None = None,
        prices: PriceCache | None = None,
    ) -> None:
        assert gpu.context_bytes is not None
        self.gpu = gpu
        self.memory_budget_bytes = memory_budget_bytes
        self.headroom = headroom
        self._traces = traces
        self._filling = filling
        self._context_bytes = gpu.context_bytes
        factor = None if gpu.rates is None else gpu.rates.host_factor
        self._host = host or USUAL.times(factor or 1.0)
        self._machine = replace(
            roofline.ceilings(gpu),
            launch_seconds=self._host.launch_seconds,
            host_from=RatesFrom.CARDS_LIKE_IT if factor is None else RatesFrom.THIS_CARD,
        )
        self._prices = KeptPrices(prices, f"{gpu!r} {self._host!r}", self._identities)
        self._link = links.link_of(gpu)
        self._stretches = functools.cache(self._find_stretches)
        self._between_micro_steps = functools.cache(self._find_between_micro_steps)
        self._micro_step = functools.cache(self._find_micro_step)
        self._priced_update = functools.cache(self._price_update)
        self._update_seconds = functools.cache(self._price_update_seconds)
        self._interned: dict[str, Trainable] = {}
        self._trainable = functools.cache(self._find_trainable)
        self._forward_backward = functools.cache(self._price_forward_backward)
        self._accumulation = functools.cache(self._price_accumulation)
        self._micro_parts = functools.cache(self._price_micro_parts)
        self._exchange = functools.cache(self._find_exchange)
        self._floor = functools.cache(self._find_floor)
        self._whole: Estimator | None = None
        """The estimator of all GPUs, where this one is of the layers of one of them."""
        self._stages = functools.cache(self._find_stages)
        self._estimates: dict[tuple[TrainConfig, int], Estimate] = {}
        """Estimates by configuration and budget."""
        self._replays = Replays(self._prices, KeptReplays(replays))

    def keep_prices(self) -> None:
        """Keep what has been priced, for another search."""
        self._prices.keep()

    def _identities(self) -> Collection[str]:
        return [trace.identity for trace in self._traces.values() if trace.identity]

    def with_budget(self, memory_budget_bytes: int) -> Estimator:
        """The same estimator with another budget; what is priced already is shared."""
        other = copy.copy(self)
        other.memory_budget_bytes = memory_budget_bytes
        return other

    def room_for(self, config: TrainConfig) -> int:
        """Bytes of the budget that the configuration's peak may take: all but the headroom."""
        is_shared = config.num_gpus > 1 and PARALLELISMS[config.parallelism].is_launched
        outside = self._context_bytes + (self.gpu.nccl_bytes if is_shared else 0)
        return self.headroom.within(self.memory_budget_bytes, outside, config)

    def fits(self, estimate: Estimate) -> bool:
        """Whether the predicted peak leaves the headroom."""
        return estimate.peak_device_bytes <= self.room_for(estimate.config)

    def least_needed(self, config: TrainConfig) -> int:
        """A lower bound of the budget that the configuration fits into: no replay is made."""
        floor_bytes = self.floor_bytes(config)
        reserved_bytes = floor_bytes - self._outside_bytes(TraceSpec.of(config))
        return floor_bytes + self.headroom.room_bytes(reserved_bytes, config)

    def may_fit(self, config: TrainConfig) -> bool:
        """Whether live tensors alone fit: no replay is made."""
        return self.floor_bytes(config) <= self.room_for(config)

    def supports(self, config: TrainConfig) -> bool:
        """Whether the model could be traced with this configuration."""
        if self._filling is None:
            return TraceSpec.of(config) in self._traces
        return specs_for(config, varied=True) <= self._traces.keys()

    def is_compiled_step(self, config: TrainConfig) -> bool:
        """Whether the configuration is priced by the trace of a compiled step."""
        trace = self._traces[TraceSpec.of(config)]
        return isinstance(trace, Trace) and self._prices.price(
            bool, trace.identity, "is compiled", lambda: trace.is_compiled
        )

    def lean_layers(self, spec: TraceSpec) -> range:
        """The numbers of lean layers that the trace of a plan tells of; none of another trace, or without."""
        trace = self._traces.get(spec)
        if not isinstance(trace, Trace):
            return range(0)

        def ends() -> tuple[int, int, int]:
            found = trace.lean_layers
            return found.start, found.stop, found.step

        return range(*self._prices.price(tuple[int, int, int], trace.identity, "lean", ends))

    def floor_bytes(self, config: TrainConfig) -> int:
        """A lower bound of peak_device_bytes: live tensors and the context, nothing cached."""
        if stages := self._stages_of(config):
            return max(stage.floor_bytes(config) for stage in stages)
        return self._floor(
            TraceSpec.of(config),
            config.micro_batch_size,
            config.lora_rank or 0,
            config.updater,
            config.gradient_accumulation_steps,
        )

    def _find_floor(
        self, spec: TraceSpec, micro_batch: int, rank: int, updater: str, accumulation: int
    ) -> int:
        in_backward = bool(UPDATERS[updater].updates)
        micro = self._micro_step(spec, micro_batch, rank, in_backward)
        optimizer = self._update(spec, rank, updater)
        above = max(
            micro.peak_first_bytes,
            micro.gradients_bytes + micro.step_buffers_bytes + optimizer.temporary_peak_bytes,
            micro.gradients_bytes + micro.peak_next_bytes if accumulation > 1 else 0,
        )
        above += accumulation * micro.batch_bytes
        state = optimizer.state_bytes
        outside = self._outside_bytes(spec)
        return outside + micro.weights_bytes + micro.workspace_bytes + state + above

    def seconds(self, config: TrainConfig, resident_bytes: int | None = None) -> StepSeconds | None:
        """Predicted time of an optimizer step; None where the card's rates are unknown.

        `resident_bytes`: what the device holds besides managed memory (peak reserved and context).
        Without it the floor is taken, so paging is not overestimated.
        """
        if self._whole is not None:
            return self._whole.seconds(config, resident_bytes)
        return self._seconds(
            config, config.gradient_accumulation_steps, resident_bytes=resident_bytes
        )

    def _seconds(
        self,
        config: TrainConfig,
        accumulation: float,
        full_share: float = 1.0,
        *,
        resident_bytes: int | None = None,
    ) -> StepSeconds | None:
        """Predicted time of a step of so many micro-batches, each with a share of a full one's tokens."""
        spec, rank = TraceSpec.of(config), config.lora_rank or 0
        micro = self._forward_backward(
            spec, config.micro_batch_size, rank, config.precision, full_share
        )
        added = self._accumulation(self._trainable(spec, rank))
        optimizer = self._update(spec, rank, config.updater)
        if resident_bytes is None:
            resident_bytes = self.floor_bytes(config) if optimizer.managed_bytes else 0
        paged = self._paged_out_bytes(config, optimizer, resident_bytes)
        update = self._update_seconds(spec, rank, config.updater, paged)
        if micro is None or added is None or update is None:
            return None
        steps = accumulation * (micro.total_seconds + self._between_micro_steps(spec, rank))
        steps += (accumulation - 1) * added.total_seconds
        if config.torch_empty_cache_steps:
            steps *= 1 + _EMPTY_CACHE_SHARE / config.torch_empty_cache_steps
        update_seconds = update.total_seconds
        if UPDATERS[config.updater].updates and not optimizer.cost.num_synchronizations:
            # The host launches updates while the GPU is at work on the backward pass.
            spare_seconds = max(micro.total_seconds - micro.launch_seconds, 0.0)
            update_seconds = max(update.gpu_seconds, update_seconds - spare_seconds)
        alone = StepSeconds(
            micro_step_seconds=steps / accumulation,
            optimizer_step_seconds=update_seconds,
            total_seconds=steps + update_seconds,
            bound=micro.bound if steps > update_seconds else update.bound,
        )
        exchange = self._exchange(spec, config.micro_batch_size, rank)
        return alone if exchange is None else self._shared(alone, exchange, accumulation)

    def _price_update_seconds(
        self, spec: TraceSpec, rank: int, name: str, paged_out_bytes: int
    ) -> roofline.StepTime | None:
        """Price the update, with what the host does beside its launches.

        Where the host waits for the GPU after every tensor (bitsandbytes), neither runs ahead of the other.
        """
        optimizer = self._update(spec, rank, name)
        found = roofline.seconds(kernels_of(optimizer.cost, paged_out_bytes), self._machine)
        if found is None:
            return None
        num_tensors = self._trainable(spec, rank).num
        each_seconds = self._host.tensor_seconds
        if UPDATERS[name].updates:
            each_seconds += self._host.call_seconds
        host_seconds = found.launch_seconds + self._host.step_seconds + num_tensors * each_seconds
        waited = min(optimizer.cost.num_synchronizations / max(num_tensors, 1), 1.0)
        in_turn_seconds = waited * min(found.gpu_seconds, host_seconds)
        return replace(
            found,
            launch_seconds=host_seconds,
            total_seconds=max(found.total_seconds, host_seconds) + in_turn_seconds,
            bound="launch" if host_seconds >= found.total_seconds else found.bound,
        )

    def _shared(
        self, alone: StepSeconds, exchange: Exchange, accumulation: float
    ) -> StepSeconds | None:
        """The step's times with what several GPUs add to them, one after the other."""
        host_link = self._machine.moving.bytes_per_second.get("copy_host")
        if self._link is None or host_link is None:
            return None
        num_gpus = exchange.num_gpus
        sent_each = links.seconds(exchange.messages_per_micro_step, self._link, num_gpus)
        sent_once = links.seconds(exchange.messages_per_step, self._link, num_gpus)
        micro = sent_each + exchange.host_copy_bytes_per_micro_step / host_link
        once = (
            sent_once
            + exchange.host_copy_bytes_per_step / host_link
            + exchange.host_update_elements * roofline.HOST_UPDATE_SECONDS_PER_ELEMENT
        )
        sent = accumulation * sent_each + sent_once
        others = accumulation * micro + once - sent
        bound = max(
            (sent, "communication"), (others, "transfer"), (alone.total_seconds, alone.bound)
        )[1]
        return StepSeconds(
            micro_step_seconds=alone.micro_step_seconds + micro,
            optimizer_step_seconds=alone.optimizer_step_seconds + once,
            total_seconds=alone.total_seconds + accumulation * micro + once,
            bound=bound,
            communication_seconds=sent,
        )

    def parts(self, config: TrainConfig) -> Parts | None:
        """The predicted time of an optimizer step by cause, and how sure each is; None as of `seconds`."""
        spec, rank = TraceSpec.of(config), config.lora_rank or 0
        whole = self.seconds(config)
        micro = self._micro_parts(spec, config.micro_batch_size, rank, config.precision)
        optimizer = self._update(spec, rank, config.updater)
        resident_bytes = self.floor_bytes(config) if optimizer.managed_bytes else 0
        paged_bytes = self._paged_out_bytes(config, optimizer, resident_bytes)
        update = step_parts.parts(kernels_of(optimizer.cost, paged_bytes), self._machine)
        if whole is None or micro is None or update is None:
            return None
        accumulation = config.gradient_accumulation_steps
        found = added({cause: part.times(accumulation) for cause, part in micro.items()}, update)
        # What the host does between micro-steps, adding gradients, and emptying the cache.
        rest_seconds = whole.total_seconds - whole.communication_seconds
        rest_seconds -= sum(part.seconds for part in found.values())
        rest = step_parts.of_host(max(rest_seconds, 0.0), self._machine)
        sent = step_parts.of_links(whole.communication_seconds)
        parts = added(found, {"host": rest, "links": sent})
        return compiling.less_sure(parts) if self.is_compiled_step(config) else parts

    def _price_micro_parts(
        self, spec: TraceSpec, micro_batch: int, rank: int, precision: str
    ) -> Parts | None:
        def parts() -> dict[str, Part] | None:
            kernels = self._kernels(spec, micro_batch, rank, precision)
            found = step_parts.parts(kernels, self._machine, self._stretches(spec))
            return None if found is None else dict(found)

        return self._prices.time(
            dict[str, Part] | None,
            self._traces[spec].identity,
            f"parts {micro_batch} {rank} {precision}",
            parts,
        )

    def tokens_per_second(self, config: TrainConfig) -> float | None:
        """Predicted speed, an upper bound where a paged optimizer has to page."""
        seconds = self.seconds(config)
        if seconds is None:
            return None
        return self.useful_share(config) * config.tokens_per_step / seconds.total_seconds

    def useful_share(self, config: TrainConfig) -> float:
        """Tokens that are no padding, in those that steps of full length train in the same time.

        Shorter micro-batches take less time, but not as much less as they have fewer tokens: kernels of the
        average one are priced. Where a single sample is checkpointed by a plan, its time is taken to shrink
        with its tokens, as far as the launches of the host let it.
        """
        if self._filling is None or not vary(config.batching):
            return 1.0
        filled = self._filling(config)
        if not self.supports(config):
            return filled.useful_share
        whole = self.seconds(config)
        shorter = self._seconds(config, filled.num_micro_batches, filled.full_share)
        share = filled.useful_share * filled.full_share
        share *= filled.num_micro_batches / config.gradient_accumulation_steps
        if whole is None or shorter is None:
            return filled.useful_share
        return share * whole.total_seconds / shorter.total_seconds

    def estimate(self, config: TrainConfig) -> Estimate:
        """Predicted peaks, breakdown and time by a full replay, which is made once."""
        key = config, self.memory_budget_bytes
        found = self._estimates.get(key)
        if found is None:
            found = self._estimates[key] = self._find_estimate(config)
        return found

    def fitting(self, config: TrainConfig) -> Estimate | None:
        """The estimate of a configuration that fits; None where it does not, by a replay up to there."""
        room_bytes = self.room_for(config) - self._outside_bytes(TraceSpec.of(config))
        estimate = self.reserving(config, room_bytes)
        return estimate if estimate is not None and self.fits(estimate) else None

    def reserving(self, config: TrainConfig, most_bytes: int) -> Estimate | None:
        """The estimate where no more is reserved; None where more is, by a replay up to there."""
        if stages := self._stages_of(config):
            each = [stage.reserving(config, most_bytes) for stage in stages]
            return self.estimate(config) if all(each) else None
        is_known = (config, self.memory_budget_bytes) in self._estimates
        if not is_known and not self._replays.is_within(self._run(config), most_bytes):
            return None
        estimate = self.estimate(config)
        return estimate if estimate.peak_reserved_bytes <= most_bytes else None

    def _start_of(self, config: TrainConfig) -> tuple[object, ...] | None:
        """Facts that the steps before the first update depend on; None where they are more than these."""
        spec, rank = TraceSpec.of(config), config.lora_rank or 0
        update = self._update(spec, rank, config.updater)
        if UPDATERS[config.updater].updates or update.makes_at_once:
            return None
        return (
            spec,
            rank,
            config.micro_batch_size,
            config.gradient_accumulation_steps,
            config.torch_empty_cache_steps,
        )

    def _stages_of(self, config: TrainConfig) -> tuple[Estimator, ...]:
        """Estimators of each GPU where layers are dealt out; none elsewhere."""
        if not PARALLELISMS[config.parallelism].deals_layers or self._whole is not None:
            return ()
        return self._stages(TraceSpec.of(config), self.memory_budget_bytes)

    def _find_stages(self, spec: TraceSpec, memory_budget_bytes: int) -> tuple[Estimator, ...]:
        if memory_budget_bytes != self.memory_budget_bytes:
            stages = self._stages(spec, self.memory_budget_bytes)
            return tuple(stage.with_budget(memory_budget_bytes) for stage in stages)
        trace = self._traces[spec]
        assert isinstance(trace, DealtTrace)
        found = []
        for stage in trace.stages:
            estimator = Estimator(
                {spec: stage},
                self.gpu,
                memory_budget_bytes=self.memory_budget_bytes,
                headroom=self.headroom,
                filling=self._filling,
                host=self._host,
            )
            estimator._whole = self
            found.append(estimator)
        return tuple(found)

    def of_each_gpu(self, config: TrainConfig) -> list[Estimate]:
        """Estimates of each GPU where layers are dealt out; elsewhere of one, which stands for all."""
        return [stage.estimate(config) for stage in self._stages_of(config) or (self,)]

    def _fullest(self, config: TrainConfig) -> Estimator:
        """The estimator of the GPU that holds most; itself where all hold the same."""
        stages = self._stages_of(config)
        return max(stages, key=lambda s: s.estimate(config).peak_device_bytes, default=self)

    def _find_estimate(self, config: TrainConfig) -> Estimate:
        if (fullest := self._fullest(config)) is not self:
            return fullest.estimate(config)
        spec, rank = TraceSpec.of(config), config.lora_rank or 0
        trace, precision = self._traces[spec], PRECISIONS[config.precision]
        optimizer = self._update(spec, rank, config.updater)
        result = self._replayed(config)
        memory = self._prices.price(
            Memory,
            trace.identity,
            f"memory {result.peak_allocated_event} {name_of(config)}",
            lambda: self._find_memory(config, result),
        )
        outside = self._outside_bytes(spec)
        resident = result.peak_reserved_bytes + outside
        managed = optimizer.managed_bytes - self._paged_out_bytes(config, optimizer, resident)
        seconds, parts = self.seconds(config, resident), self.parts(config)
        flops, model_flops = memory.flops
        state = memory.state
        return Estimate(
            config=config,
            gpu=self.gpu.name,
            peak_allocated_bytes=result.peak_allocated_bytes,
            peak_reserved_bytes=result.peak_reserved_bytes,
            nontorch_bytes=outside + managed,
            paged_in_bytes=managed,
            breakdown=memory.breakdown,
            state=state,
            parameters=memory.parameters,
            micro_step_seconds=None if seconds is None else seconds.micro_step_seconds,
            optimizer_step_seconds=None if seconds is None else seconds.optimizer_step_seconds,
            flops_per_step=flops,
            model_flops_per_step=model_flops,
            mfu=None
            if seconds is None
            else roofline.mfu(
                model_flops=model_flops,
                step_seconds=seconds.total_seconds,
                gpu=self.gpu,
                dtype=_rate_dtype(precision.compute_dtype, tf32=precision.tf32),
            ),
            bound=None if seconds is None else seconds.bound,
            step_spread=None if parts is None else step_spread_of(parts),
            time_shares=() if parts is None else time_shares(parts),
            useful_share=self.useful_share(config),
            per_gpu=per_gpu(
                config,
                self._exchange(spec, config.micro_batch_size, rank),
                state,
                None if seconds is None else seconds.communication_seconds,
            ),
            is_bound=config.is_compiled and not self.is_compiled_step(config),
            compile_seconds=self._compile_seconds(config, spec, rank),
        )

    def _find_memory(self, config: TrainConfig, result: Replay) -> Memory:
        spec, rank = TraceSpec.of(config), config.lora_rank or 0
        optimizer = self._update(spec, rank, config.updater)
        flops = self._flops(config, spec, rank)
        return memory_of(self._traces[spec], self._steps(config), optimizer, result, rank, flops)

    def _compile_seconds(
        self, config: TrainConfig, spec: TraceSpec, rank: int
    ) -> tuple[float, float] | None:
        if not self.is_compiled_step(config):
            return None
        launches = self._traces[spec].launches(config.micro_batch_size, rank)
        return compiling.compile_seconds(sum(launch.count for launch in launches))

    def _outside_bytes(self, spec: TraceSpec) -> int:
        """Device memory outside torch's allocator: the context, and NCCL's buffers."""
        is_shared = isinstance(self._traces[spec], RankTrace)
        return self._context_bytes + (self.gpu.nccl_bytes if is_shared else 0)

    def _find_exchange(self, spec: TraceSpec, micro_batch: int, rank: int) -> Exchange | None:
        trace = self._traces[spec]
        return trace.exchange(micro_batch, rank) if isinstance(trace, SharedTrace) else None

    def replayed(self, config: TrainConfig) -> tuple[Steps, Replay]:
        """The events of the first steps, and the allocator's replay of them within the budget.

        Where GPUs hold different layers, those of the one that holds most.
        """
        if (fullest := self._fullest(config)) is not self:
            return fullest.replayed(config)
        return self._steps(config), self._replayed(config)

    def _replayed(self, config: TrainConfig) -> Replay:
        return self._replays.whole(self._run(config))

    def _run(self, config: TrainConfig) -> Replayable:
        spec = TraceSpec.of(config)
        room_bytes = self.room_for(config) - self._outside_bytes(spec)
        return Replayable(
            config=config,
            identity=self._traces[spec].identity,
            steps=functools.partial(self._steps, config),
            room_bytes=room_bytes if config.expandable_segments else None,
            start=self._start_of(config),
        )

    def trace_of(self, config: TrainConfig) -> Trace | SharedTrace:
        """The trace that the configuration's memory is priced by: of the fullest GPU, where they differ."""
        return self._fullest(config)._traces[TraceSpec.of(config)]

    def kernels(self, config: TrainConfig) -> list[roofline.Kernel]:
        """The kernels of a micro-step, then those of an optimizer step in which nothing is paged."""
        spec, rank = TraceSpec.of(config), config.lora_rank or 0
        micro = self._kernels(spec, config.micro_batch_size, rank, config.precision)
        update = self._update(spec, rank, config.updater)
        return [*micro, *kernels_of(update.cost, 0)]

    def timeline(self, config: TrainConfig) -> Timeline:
        """Memory over the optimizer step in which the replay of `estimate` peaks."""
        if (fullest := self._fullest(config)) is not self:
            return fullest.timeline(config)
        identity = self._traces[TraceSpec.of(config)].identity
        peak_event = self._replayed(config).peak_allocated_event
        return self._prices.price(
            Timeline,
            f"{identity} {name_of(config)}" if identity else "",
            f"timeline {peak_event}",
            lambda: timeline_of(self._steps(config), peak_event),
        )

    def _steps(self, config: TrainConfig) -> Steps:
        spec = TraceSpec.of(config)
        update = self._update(spec, config.lora_rank or 0, config.updater)
        return first_steps(self._traces[spec], config, update)

    def _paged_out_bytes(self, config: TrainConfig, optimizer: Update, resident_bytes: int) -> int:
        """Managed state that the budget has no room for beside what torch holds and the headroom."""
        if not optimizer.managed_bytes:
            return 0
        room = max(self.room_for(config) - resident_bytes, 0)
        return max(optimizer.managed_bytes - room, 0)

    def _find_micro_step(
        self, spec: TraceSpec, micro_batch: int, rank: int, in_backward: bool
    ) -> MicroStepBytes:
        trace = self._traces[spec]
        return self._prices.price(
            MicroStepBytes,
            trace.identity,
            f"bytes {micro_batch} {rank} {in_backward}",
            lambda: micro_step_of(trace, micro_batch, rank, in_backward=in_backward),
        )

    def _find_trainable(self, spec: TraceSpec, rank: int) -> Trainable:
        trace = self._traces[spec]
        read = functools.cache(functools.partial(trace.trainable, rank))
        identity, num = self._prices.price(
            tuple[str, int],
            trace.identity,
            f"{TRAINABLE}{rank}",
            lambda: (identity_of(read()), len(read())),
        )
        return self._interned.setdefault(identity, Trainable(identity, num, read))

    def _update(self, spec: TraceSpec, rank: int, name: str) -> Update:
        scaled = PRECISIONS[spec.precision].grad_scaler
        has_parts = PARALLELISMS[spec.parallelism].has_parts
        return self._priced_update(self._trainable(spec, rank), scaled, name, has_parts)

    def _price_update(
        self, trainable: Trainable, scaled: bool, name: str, has_parts: bool
    ) -> Update:
        multiprocessors = self.gpu.multiprocessors

        def update() -> Update:
            return priced_update(
                UPDATERS[name],
                trainable.read(),
                scaled=scaled,
                has_parts=has_parts,
                multiprocessors=multiprocessors,
            )

        update = functools.cache(update)
        costs = self._prices.price(
            UpdateCosts,
            trainable.identity,
            f"update {name} {scaled} {has_parts} {multiprocessors}",
            lambda: costs_of(update()),
        )
        return LaterUpdate(costs, update)

    def _price_forward_backward(
        self,
        spec: TraceSpec,
        micro_batch: float,
        rank: int,
        precision: str,
        full_share: float = 1.0,
    ) -> roofline.StepTime | None:
        if full_share < 1:
            # A single sample's is traced at one size alone.
            several = replace(spec, single=False)
            if several not in self._traces:
                whole = self._forward_backward(spec, micro_batch, rank, precision)
                if whole is None:
                    return None
                seconds = max(full_share * whole.total_seconds, whole.launch_seconds)
                return replace(whole, total_seconds=seconds)
            spec, micro_batch = several, full_share * micro_batch

        def step_time() -> roofline.StepTime | None:
            kernels = self._kernels(spec, micro_batch, rank, precision)
            return roofline.seconds(kernels, self._machine, self._stretches(spec))

        return self._prices.time(
            roofline.StepTime | None,
            self._traces[spec].identity,
            f"step {micro_batch} {rank} {precision}",
            step_time,
        )

    def _find_between_micro_steps(self, spec: TraceSpec, rank: int) -> float:
        num_adapter_weights = 0
        if spec.method != "full":
            num_adapter_weights = self._trainable(spec, rank).num
        trace = self._traces[spec]
        num_weights = self._prices.price(int, trace.identity, "weights", lambda: trace.num_weights)
        return self._host.between_micro_steps_seconds(num_weights, num_adapter_weights)

    def _find_stretches(self, spec: TraceSpec) -> Stretches:
        shares, order = self._traces[spec].stretches
        return Stretches(shares=shares, order=order)

    def _kernels(
        self, spec: TraceSpec, micro_batch: float, rank: int, precision: str
    ) -> list[roofline.Kernel]:
        tf32 = PRECISIONS[precision].tf32
        kernels = []
        for launch in self._traces[spec].launches(micro_batch, rank):
            k = launch.kernel
            kind = "copy_host" if k.name == "copy_host" else roofline.kind_of(k.name)
            kernels.append(
                roofline.Kernel(
                    name=k.name,
                    kind=kind,
                    dtype=_rate_dtype(k.dtype, tf32=tf32) if kind == "matmul" else k.dtype,
                    flops=launch.flops,
                    bytes_moved=launch.bytes_moved,
                    shape=launch.shape,
                    count=launch.count,
                    phase=k.phase,
                )
            )
        return kernels

    def _price_accumulation(self, trainable: Trainable) -> roofline.StepTime | None:
        """Price adding each gradient to the one that is there: two reads and a write."""

        def added() -> roofline.StepTime | None:
            kernels = (
                roofline.Kernel(
                    name="add_",
                    kind="elementwise",
                    dtype=s.dtype,
                    flops=0,
                    bytes_moved=3 * s.size_bytes,
                )
                for s in trainable.read()
            )
            return roofline.seconds(kernels, self._machine)

        return self._prices.time(
            roofline.StepTime | None, trainable.identity, "adding gradients", added
        )

    def _flops(self, config: TrainConfig, spec: TraceSpec, rank: int) -> tuple[float, float]:
        """Floating-point operations of one optimizer step on each GPU: (all, without recomputation)."""
        total = model = 0.0
        for launch in self._traces[spec].launches(config.micro_batch_size, rank):
            flops = launch.count * launch.flops
            total += flops
            model += 0 if launch.kernel.phase == "recompute" else flops
        steps: float = config.gradient_accumulation_steps
        if PARALLELISMS[spec.parallelism].deals_layers:
            steps /= config.num_gpus  # Each GPU runs its layers: on average so many.
        return total * steps, model * steps


def _rate_dtype(dtype: str, *, tf32: bool) -> str:
    """The dtype whose rate a matrix product runs at."""
    if dtype.startswith("float8"):  # e4m3 by e4m3 or by e5m2, at one rate
        return "float8"
    return "tf32" if tf32 and dtype == "float32" else dtype
