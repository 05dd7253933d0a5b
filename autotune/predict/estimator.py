"""Prices traces as Estimates: predicted memory and time of any number of configurations on one card.

Memory: the events of the first optimizer steps go through the allocator model. Time: StepTimes.

A full replay takes milliseconds; `floor_bytes` takes microseconds and cannot be too high, `seconds`
likewise is exact but for paging. A search needs the replay only of what could win.

Not modelled: several streams, kernels outside the trace (data loading, logging,
evaluation, checkpoints), fragmentation left by earlier work in the process.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence

from autotune.catalogue.gpus import Gpu
from autotune.common.units import format_bytes
from autotune.errors import ConfigError
from autotune.memory.allocator import Replay
from autotune.memory.traces import Trace
from autotune.memory.vllm import share_bytes
from autotune.predict import varied_steps
from autotune.predict.breakdown import Memory, memory_of
from autotune.predict.estimate_parts import parked_bytes, per_gpu, time_shares
from autotune.predict.floors import MicroStepBytes, micro_step_of
from autotune.predict.generation import vllm_kept_bytes
from autotune.predict.kept_prices import KeptPrices
from autotune.predict.kept_replays import KeptReplays
from autotune.predict.optimizer_update import Update
from autotune.predict.priced_updates import PricedUpdates
from autotune.predict.replays import Replayable, Replays, name_of
from autotune.predict.sharding.rank_trace import RankTrace
from autotune.predict.sharding.shared_trace import SharedTrace
from autotune.predict.step_times import StepSeconds, StepTimes
from autotune.predict.steps import Steps, first_steps
from autotune.predict.timeline import timeline_of
from autotune.predict.vllm_generation import facts_of, served_of
from autotune.records.charts import Timeline
from autotune.records.estimate import Estimate, TraceSpec, and_several, specs_for
from autotune.space.checkpoint_plans import plan_offloads
from autotune.space.config import TrainConfig
from autotune.space.headroom import NO_HEADROOM, VARIED_SHARE, Headroom
from autotune.space.lengths import Filling, vary
from autotune.space.optimizers import KEEPS_NOTHING, UPDATERS
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.words import describe
from autotune.speed import compiling, roofline
from autotune.speed.host import USUAL, Host
from autotune.speed.sureness import Parts, slow_spread_of, step_spread_of
from autotune.store.trace_cache import PriceCache, ReplayCache

_MOST_BYTES = 1 << 50
"""Most live bytes of a step that is priced; a replay (autotune.memory.pools) has 32 times the addresses."""


class Estimator:
    """Prices configurations of one model on one card under one budget."""

    def __init__(
        self,
        traces: Mapping[TraceSpec, Trace | SharedTrace],
        gpu: Gpu,
        *,
        memory_budget_bytes: int,
        headroom: Headroom = NO_HEADROOM,
        host_memory_bytes: int | None = None,
        filling: Callable[[TrainConfig], Filling] | None = None,
        host: Host | None = None,
        replays: ReplayCache | None = None,
        prices: PriceCache | None = None,
        varied_share: float = VARIED_SHARE,
    ) -> None:
        """Take what prices a run. `varied_share`: of what is reserved, that stays free where lengths vary."""
        assert gpu.context_bytes is not None
        self.gpu = gpu
        self.memory_budget_bytes = memory_budget_bytes
        self.headroom = headroom
        self.host_memory_bytes = host_memory_bytes
        self._traces = traces
        self._filling = filling
        self._varied_share = varied_share
        self._context_bytes = gpu.context_bytes
        factor = None if gpu.rates is None else gpu.rates.host_factor
        self._host = host or (USUAL if factor is None else USUAL.timed(factor))
        self._prices = KeptPrices(prices, f"{gpu!r} {self._host!r}", self._identities)
        self._updates = PricedUpdates(traces, self._prices, gpu)
        self._times = StepTimes(traces, gpu, self._host, self._prices, self._updates)
        self._micro_step = functools.cache(self._find_micro_step)
        self._floor = functools.cache(self._find_floor)
        self._parked = functools.cache(self._find_parked)
        self._whole: Estimator | None = None
        """The estimator of all GPUs, where this one is of one of them."""
        self._stages = functools.cache(self._find_stages)
        # An estimate asks for the steps that were replayed for it.
        self._steps = functools.lru_cache(maxsize=2)(self._find_steps)
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

    def on_fewer_gpus(self, config: TrainConfig, num_gpus: int) -> Estimate | None:
        """A DDP run with as many samples a step on fewer GPUs; None where it does not fit."""
        times = config.num_gpus // num_gpus
        at_a_time = config.steps_per_generation
        fewer = dataclasses.replace(
            config,
            num_gpus=num_gpus,
            parallelism="none" if num_gpus == 1 else config.parallelism,
            gradient_accumulation_steps=times * config.gradient_accumulation_steps,
            # As many completions are written at a time by all GPUs together: whole groups.
            steps_per_generation=None if at_a_time is None else times * at_a_time,
        )
        traces: dict[TraceSpec, Trace | SharedTrace] = {}
        for of_all in and_several(TraceSpec.of(config)) & self._traces.keys():
            shared = self._traces[of_all]
            assert isinstance(shared, SharedTrace)
            spec = dataclasses.replace(of_all, parallelism=fewer.parallelism)
            traces[spec] = shared.of_one
            if num_gpus > 1:
                on_card = self.gpu.backend == "cuda"
                traces[spec] = RankTrace(shared.of_one, spec, num_gpus=num_gpus, on_card=on_card)
        return self._of_traces(traces).fitting(fewer)

    def _of_traces(self, traces: Mapping[TraceSpec, Trace | SharedTrace]) -> Estimator:
        """Return an estimator of other traces, which is asked as this one is."""
        return Estimator(
            traces,
            self.gpu,
            memory_budget_bytes=self.memory_budget_bytes,
            headroom=self.headroom,
            host_memory_bytes=self.host_memory_bytes,
            filling=self._filling,
            host=self._host,
            varied_share=self._varied_share,
        )

    def room_for(self, config: TrainConfig) -> int:
        """Bytes of the budget that the configuration's peak may take: all but the headroom."""
        is_replayed = varied_steps.is_replayed(config)
        share = self._varied_share if is_replayed else VARIED_SHARE
        return self._within(config, share)

    def _within(self, config: TrainConfig, varied_share: float) -> int:
        is_shared = config.num_gpus > 1 and PARALLELISMS[config.parallelism].is_launched
        outside = self._context_bytes + (self.gpu.nccl_bytes if is_shared else 0)
        outside += vllm_kept_bytes(config, self.gpu.capacity_bytes) + self._staying_bytes(config)
        return self.headroom.within(
            self.memory_budget_bytes, outside, config, varied_share=varied_share
        )

    def most_for_lengths(self, config: TrainConfig) -> int | None:
        """Return the bytes that torch may reserve in all where lengths vary; None where that is not replayed.

        It is the room with nothing kept free for pieces. None, too, where the room was asked for in bytes.
        """
        if self.headroom.spare_bytes is not None or not varied_steps.is_replayed(config):
            return None
        return self._within(config, 0.0) - self._outside_bytes(config)

    def goes_on(self, config: TrainConfig, percentiles: Sequence[int], most_bytes: int) -> bool:
        """Whether steps with samples of varied lengths go on within so many reserved bytes.

        `percentiles`: of their lengths (autotune.space.lengths.Lengths). True of what is not replayed so.
        """
        trace = self._traces[TraceSpec.of(config)]
        if not varied_steps.is_replayed(config) or isinstance(trace, SharedTrace):
            return True
        return self._prices.price(
            bool,
            trace.identity,
            f"lengths {tuple(percentiles)!r} {most_bytes} {name_of(config)}",
            lambda: varied_steps.fits(self._steps(config), trace, config, percentiles, most_bytes),
        )

    def fits(self, estimate: Estimate) -> bool:
        """Whether the peak leaves the headroom, the host has room, and vLLM starts where it writes."""
        config = estimate.config
        if estimate.peak_device_bytes > self.room_for(config):
            return False
        return self._host_holds(estimate.all_host_bytes) and self._starts(config)

    def least_on_host(self, config: TrainConfig) -> int:
        """A lower bound of the host memory that all GPUs take: no replay is made."""
        return config.num_gpus * self._host_bytes(config, self._paged_out_bytes(config))

    def least_of_host(self, configs: Collection[TrainConfig]) -> Collection[TrainConfig]:
        """The ones that the host may have room for; where there are none, the one that takes least of it."""
        if self.host_memory_bytes is None or not configs:
            return configs
        holding = [each for each in configs if self._host_holds(self.least_on_host(each))]
        return holding or [min(configs, key=self.least_on_host)]

    def _host_holds(self, all_host_bytes: int) -> bool:
        return self.host_memory_bytes is None or all_host_bytes <= self.host_memory_bytes

    def _starts(self, config: TrainConfig) -> bool:
        """Whether what writes completions starts: vLLM's share of the card may be too small for it."""
        if not config.writes_with_vllm:
            return True
        trace = self._traces[TraceSpec.of(config)].of_one
        return self._prices.time(
            bool,
            trace.identity,
            f"vllm starts {facts_of(config)}",
            lambda: served_of(trace, config, self.gpu).starts(
                config.vllm_gpu_memory_utilization,
                num_sequences=config.generation_batch_size,
                sequence_length=config.sequence_length,
            ),
        )

    def least_needed(self, config: TrainConfig) -> int:
        """A lower bound of the budget that the configuration fits into: no replay is made."""
        floor_bytes = self.floor_bytes(config)
        reserved_bytes = floor_bytes - self._outside_bytes(config)
        return floor_bytes + self.headroom.room_bytes(reserved_bytes, config)

    def may_fit(self, config: TrainConfig) -> bool:
        """Whether live tensors alone fit, and what is certain to wait on the host: no replay is made."""
        room_bytes = self.room_for(config)
        # The optimizer's update takes most of the time: what is too large without it needs no more.
        if self._without_update_bytes(config) > room_bytes or self.floor_bytes(config) > room_bytes:
            return False
        return self.host_memory_bytes is None or self._host_holds(self.least_on_host(config))

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

    def narrowest_layer(self, config: TrainConfig) -> int:
        """The fewest inputs or outputs of a layer in which the adapter has a rank; 0 where none has."""
        return narrowest_layer(self._traces[TraceSpec.of(config)])

    def lean_layers(self, spec: TraceSpec) -> Sequence[int]:
        """The numbers of lean layers that the trace of a plan tells of; none of another trace, or without."""
        trace = self._traces.get(spec)
        if not isinstance(trace, Trace):
            return ()
        return self._prices.price(
            tuple[int, ...], trace.identity, "lean layers", lambda: tuple(trace.lean_layers)
        )

    def floor_bytes(self, config: TrainConfig) -> int:
        """A lower bound of peak_device_bytes: live tensors and the context, nothing cached."""
        if stages := self._stages_of(config):
            return max(stage.floor_bytes(config) for stage in stages)
        floor_bytes = self._floor(
            TraceSpec.of(config),
            config.samples_per_pass,
            config.lora_rank or 0,
            config.updater,
            config.gradient_accumulation_steps,
        )
        floor_bytes += self._staying_bytes(config)
        if not config.writes_with_vllm:
            return floor_bytes
        floor_bytes += vllm_kept_bytes(config, self.gpu.capacity_bytes)
        return max(floor_bytes, self._writing_bytes(config))

    def _without_update_bytes(self, config: TrainConfig) -> int:
        """A lower bound of peak_device_bytes: forward and backward passes alone, no optimizer state."""
        if stages := self._stages_of(config):
            return max(stage._without_update_bytes(config) for stage in stages)
        spec, rank = TraceSpec.of(config), config.lora_rank or 0
        in_backward = bool(UPDATERS[config.updater].updates)
        micro = self._micro_step(spec, config.samples_per_pass, rank, in_backward)
        held_bytes = micro.weights_bytes + micro.workspace_bytes + micro.batch_bytes
        return self._outside_of(spec) + held_bytes + micro.peak_first_bytes

    def _writing_bytes(self, config: TrainConfig) -> int:
        """Bytes on the device while vLLM writes beside what training keeps; 0 where it never sleeps.

        Before it wakes up the allocator's cache is emptied, so that tensors alone count.
        """
        if not config.vllm_enable_sleep_mode:
            return 0
        spec, rank = TraceSpec.of(config), config.lora_rank or 0
        in_backward = bool(UPDATERS[config.updater].updates)
        micro = self._micro_step(spec, config.samples_per_pass, rank, in_backward)
        held = micro.weights_bytes + micro.workspace_bytes
        held += self._updates.of(spec, rank, config.updater).state_bytes
        if config.micro_batches_per_generation < config.gradient_accumulation_steps:
            held += micro.gradients_bytes
        share = share_bytes(config.vllm_gpu_memory_utilization, self.gpu.capacity_bytes)
        return self._context_bytes + held + share

    def _find_floor(
        self, spec: TraceSpec, micro_batch: int, rank: int, updater: str, accumulation: int
    ) -> int:
        in_backward = bool(UPDATERS[updater].updates)
        micro = self._micro_step(spec, micro_batch, rank, in_backward)
        optimizer = self._updates.of(spec, rank, updater)
        above = max(
            micro.peak_first_bytes,
            micro.gradients_bytes + micro.step_buffers_bytes + optimizer.temporary_peak_bytes,
            micro.gradients_bytes + micro.peak_next_bytes if accumulation > 1 else 0,
        )
        above += accumulation * micro.batch_bytes
        state = optimizer.state_bytes
        outside = self._outside_of(spec)
        return outside + micro.weights_bytes + micro.workspace_bytes + state + above

    def seconds(self, config: TrainConfig, resident_bytes: int | None = None) -> StepSeconds | None:
        """Predicted time of an optimizer step; None where the card's rates are unknown.

        `resident_bytes`: what the device holds besides managed memory (peak reserved and context).
        Without it the floor is taken, so paging is not overestimated.
        """
        if self._whole is not None:
            return self._whole.seconds(config, resident_bytes)
        paged = self._paged_out_bytes(config, resident_bytes)
        return self._times.seconds(config, paged, config.gradient_accumulation_steps)

    def parts(self, config: TrainConfig) -> Parts | None:
        """The predicted time of an optimizer step by cause, and how sure each is; None as of `seconds`."""
        parts = self._times.parts(config, self._paged_out_bytes(config), self.seconds(config))
        if parts is None:
            return None
        return compiling.less_sure(parts) if self.is_compiled_step(config) else parts

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
        shorter = self._times.seconds(
            config, self._paged_out_bytes(config), filled.num_micro_batches, filled.full_share
        )
        share = filled.useful_share * filled.full_share
        share *= filled.num_micro_batches / config.gradient_accumulation_steps
        if whole is None or shorter is None:
            return filled.useful_share
        return share * whole.total_seconds / shorter.total_seconds

    def estimate(self, config: TrainConfig) -> Estimate:
        """Predicted peaks, breakdown and time by a full replay, which is made once.

        Raises ConfigError for a step that no memory holds: the replay's addresses end beyond.
        """
        key = config, self.memory_budget_bytes
        found = self._estimates.get(key)
        if found is None:
            if (floor_bytes := self.floor_bytes(config)) > _MOST_BYTES:
                raise ConfigError(
                    f"A step of {describe(config)} needs {format_bytes(floor_bytes)} at least",
                    why=f"At most {format_bytes(_MOST_BYTES)} are predicted, which no card has",
                    remedy="Take fewer or shorter samples (--micro-batch, --seq-len)",
                )
            found = self._estimates[key] = self._find_estimate(config)
        return found

    def fitting(self, config: TrainConfig) -> Estimate | None:
        """The estimate of a configuration that fits; None where it does not, by a replay up to there."""
        room_bytes = self.room_for(config) - self._outside_bytes(config)
        estimate = self.reserving(config, room_bytes)
        return estimate if estimate is not None and self.fits(estimate) else None

    def reserving(self, config: TrainConfig, most_bytes: int) -> Estimate | None:
        """The estimate where no more is reserved; None where more is, by a replay up to there."""
        if stages := self._stages_of(config):
            fit = all(stage.reserving(config, most_bytes) for stage in stages)
            return self.estimate(config) if fit else None
        is_known = (config, self.memory_budget_bytes) in self._estimates
        if not is_known and not self._replays.is_within(self._run(config), most_bytes):
            return None
        estimate = self.estimate(config)
        return estimate if estimate.peak_reserved_bytes <= most_bytes else None

    def _start_of(self, config: TrainConfig) -> tuple[object, ...] | None:
        """Facts that the steps before the first update depend on; None where they are more than these."""
        if UPDATERS[config.updater].updates or self._update(config).makes_at_once:
            return None
        return (
            TraceSpec.of(config),
            config.lora_rank or 0,
            config.samples_per_pass,
            config.gradient_accumulation_steps,
            config.torch_empty_cache_steps,
            config.max_completion_length and config.micro_batches_per_generation,
        )

    def _stages_of(self, config: TrainConfig) -> tuple[Estimator, ...]:
        """Estimators of GPUs that hold different tensors; none where all hold the same."""
        if config.num_gpus == 1 or self._whole is not None:
            return ()
        return self._stages(TraceSpec.of(config), self.memory_budget_bytes)

    def _find_stages(self, spec: TraceSpec, memory_budget_bytes: int) -> tuple[Estimator, ...]:
        if memory_budget_bytes != self.memory_budget_bytes:
            stages = self._stages(spec, self.memory_budget_bytes)
            return tuple(stage.with_budget(memory_budget_bytes) for stage in stages)
        trace = self._traces[spec]
        if not isinstance(trace, SharedTrace):
            return ()
        found = []
        for stage in trace.stages:
            estimator = self._of_traces({spec: stage})
            estimator._whole = self
            found.append(estimator)
        return tuple(found)

    def of_each_gpu(self, config: TrainConfig) -> list[Estimate]:
        """Estimates of GPUs that hold different tensors; where all hold the same of one, for all."""
        return [stage.estimate(config) for stage in self._stages_of(config) or (self,)]

    def _fullest(self, config: TrainConfig) -> Estimator:
        """The estimator of the GPU that holds most; itself where all hold the same."""
        stages = self._stages_of(config)

        def peaks(stage: Estimator) -> tuple[int, int]:
            estimate = stage.estimate(config)
            return estimate.peak_device_bytes, estimate.peak_allocated_bytes

        return max(stages, key=peaks, default=self)

    def _find_estimate(self, config: TrainConfig) -> Estimate:
        if (fullest := self._fullest(config)) is not self:
            return fullest.estimate(config)
        spec, rank = TraceSpec.of(config), config.lora_rank or 0
        trace = self._traces[spec]
        result = self._replayed(config)
        memory = self._prices.price(
            Memory,
            trace.identity,
            f"memory {result.peak_allocated_event} {name_of(config)}",
            lambda: self._find_memory(config, result),
        )
        outside = self._outside_bytes(config)
        resident = result.peak_reserved_bytes + outside
        # What is beyond the peak of training while vLLM writes is taken for vLLM's.
        beyond = max(self._writing_bytes(config) - resident, 0)
        paged_out = self._paged_out_bytes(config, resident)
        staying = self._staying_bytes(config)
        managed = self._update(config).managed_bytes - paged_out - staying
        seconds, parts = self.seconds(config, resident), self.parts(config)
        flops, model_flops = memory.flops
        state = memory.state
        return Estimate(
            config=config,
            gpu=self.gpu.name,
            peak_allocated_bytes=result.peak_allocated_bytes,
            peak_reserved_bytes=result.peak_reserved_bytes,
            nontorch_bytes=outside + managed + beyond,
            paged_in_bytes=managed,
            staying_bytes=staying,
            host_bytes=self._host_bytes(config, paged_out),
            vllm_bytes=vllm_kept_bytes(config, self.gpu.capacity_bytes) + beyond,
            breakdown=memory.breakdown,
            state=state,
            parameters=memory.parameters,
            micro_step_seconds=None if seconds is None else seconds.micro_step_seconds,
            optimizer_step_seconds=None if seconds is None else seconds.optimizer_step_seconds,
            flops_per_step=flops,
            model_flops_per_step=model_flops,
            mfu=None
            if seconds is None
            else self._times.mfu(config, model_flops, seconds.total_seconds),
            bound=None if seconds is None else seconds.bound,
            step_spread=None if parts is None else step_spread_of(parts),
            slow_spread=None if parts is None else slow_spread_of(parts),
            time_shares=() if parts is None else time_shares(parts),
            useful_share=self.useful_share(config),
            per_gpu=per_gpu(
                config,
                self._times.exchange(spec, config.samples_per_pass, rank),
                state,
                seconds,
                link_is_measured=self.gpu.reached_bytes_per_second is not None,
            ),
            is_bound=config.is_compiled and not self.is_compiled_step(config),
            compile_seconds=self._compile_seconds(config, spec, rank),
        )

    def _host_bytes(self, config: TrainConfig, paged_out_bytes: int) -> int:
        """Host memory of one GPU: what is offloaded, activations and state that wait, what is paged out."""
        spec, rank = TraceSpec.of(config), config.lora_rank or 0
        exchange = self._times.exchange(spec, config.samples_per_pass, rank)
        offloaded_bytes = 0 if exchange is None else exchange.host_bytes
        waiting_bytes = self._parked(spec, config.samples_per_pass, rank)
        waiting_bytes += self._update(config).host_bytes
        return offloaded_bytes + waiting_bytes + paged_out_bytes

    def _find_parked(self, spec: TraceSpec, micro_batch: int, rank: int) -> int:
        if not (spec.activation_offloading or plan_offloads(spec.checkpoint_plan)):
            return 0
        return parked_bytes(self._traces[spec].launches(micro_batch, rank))

    def _find_memory(self, config: TrainConfig, result: Replay) -> Memory:
        return memory_of(
            self._traces[TraceSpec.of(config)],
            self._steps(config),
            self._update(config),
            result,
            config.lora_rank or 0,
            self._times.flops(config),
        )

    def _compile_seconds(
        self, config: TrainConfig, spec: TraceSpec, rank: int
    ) -> tuple[float, float] | None:
        num_updates, num_kernels = self._update(config).num_compiled, 0.0
        if self.is_compiled_step(config):
            launches = self._traces[spec].launches(config.samples_per_pass, rank)
            num_kernels = sum(launch.count for launch in launches)
        if not num_updates and not num_kernels:
            return None
        return compiling.compile_seconds(num_kernels=num_kernels, num_updates=num_updates)

    def _outside_bytes(self, config: TrainConfig) -> int:
        """Device memory beside what is replayed: context, NCCL's buffers, vLLM's part, what cannot leave."""
        outside_bytes = self._outside_of(TraceSpec.of(config))
        outside_bytes += vllm_kept_bytes(config, self.gpu.capacity_bytes)
        return outside_bytes + self._staying_bytes(config)

    def _outside_of(self, spec: TraceSpec) -> int:
        is_shared = isinstance(self._traces[spec], SharedTrace)
        is_shared = is_shared and PARALLELISMS[spec.parallelism].is_launched
        return self._context_bytes + (self.gpu.nccl_bytes if is_shared else 0)

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
        room_bytes = self.room_for(config) - self._outside_bytes(config)
        return Replayable(
            config=config,
            identity=self._traces[spec].identity,
            steps=functools.partial(self._steps, config),
            room_bytes=room_bytes if config.expandable_segments else None,
            start=self._start_of(config),
            least=lambda: self._run(dataclasses.replace(config, optimizer=KEEPS_NOTHING)),
        )

    def trace_of(self, config: TrainConfig) -> Trace | SharedTrace:
        """The trace that the configuration's memory is priced by: of the fullest GPU, where they differ."""
        return self._fullest(config)._traces[TraceSpec.of(config)]

    def kernels(self, config: TrainConfig) -> list[roofline.Kernel]:
        """The kernels of a micro-step, then those of an optimizer step in which nothing is paged."""
        return self._times.kernels(config)

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

    def _find_steps(self, config: TrainConfig) -> Steps:
        return first_steps(self._traces[TraceSpec.of(config)], config, self._update(config))

    def _update(self, config: TrainConfig) -> Update:
        return self._updates.of(TraceSpec.of(config), config.lora_rank or 0, config.updater)

    def _paged_out_bytes(self, config: TrainConfig, resident_bytes: int | None = None) -> int:
        """Managed state that the budget has no room for beside what torch holds and the headroom.

        Without `resident_bytes` torch is taken to hold the floor.
        """
        managed_bytes = self._update(config).managed_bytes
        if not managed_bytes or self.gpu.in_wsl:
            return 0
        if resident_bytes is None:
            resident_bytes = self.floor_bytes(config)
        room = max(self.room_for(config) - resident_bytes, 0)
        return max(managed_bytes - room, 0)

    def _staying_bytes(self, config: TrainConfig) -> int:
        """Managed state that cannot leave the card."""
        return self._update(config).managed_bytes if self.gpu.in_wsl else 0

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


def narrowest_layer(trace: Trace | SharedTrace) -> int:
    """The fewest inputs or outputs of a layer that has an adapter with a rank; 0 where none has.

    They are the sides of the matrices A (rank, inputs) and B (outputs, rank) that the rank leaves alone.
    """
    trainable = trace.trainable_by_all if isinstance(trace, SharedTrace) else trace.trainable
    once, twice = trainable(1), trainable(2)
    sides = [
        side
        for one, two in zip(once, twice, strict=True)
        if one.shape != two.shape
        for side, other in zip(one.shape, two.shape, strict=True)
        if side == other
    ]
    return min(sides, default=0)
