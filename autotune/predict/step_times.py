"""Prices the time of configurations' steps: kernels by the roofline, the host's work, links.

The kernels of a micro-step and of an optimizer step are priced apart, so that any accumulation is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from autotune.catalogue.gpus import Gpu
from autotune.memory.traces import Trace
from autotune.predict import generation, vllm_generation
from autotune.predict.kept_prices import KeptPrices
from autotune.predict.launched_kernels import as_kernels, rate_dtype
from autotune.predict.optimizer_update import kernels_of
from autotune.predict.priced_updates import PricedUpdates
from autotune.predict.sharding.exchange import Exchange
from autotune.predict.sharding.pipeline import PipelineTrace
from autotune.predict.sharding.shared_trace import SharedTrace
from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.space.optimizers import UPDATERS
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import PRECISIONS
from autotune.speed import links, roofline, step_parts
from autotune.speed.host import Host, Stretches, num_modules
from autotune.speed.origin import RatesFrom
from autotune.speed.sureness import Part, Parts, added, part, repeated

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
    link_bytes_per_second: float | None = None
    """Rate at which each GPU is taken to send large messages; None: there is one GPU."""
    communication_seconds: float = 0.0
    """Part of the total that goes into communication with the other GPUs."""
    hidden_seconds: float = 0.0
    """Time of communication while kernels run, which is no part of the total."""
    waiting_seconds: float = 0.0
    """Part of the total in which GPUs wait for the slowest of them, whatever they send."""


class StepTimes:
    """Prices the time of steps on one card; None where its rates are unknown."""

    def __init__(
        self,
        traces: Mapping[TraceSpec, Trace | SharedTrace],
        gpu: Gpu,
        host: Host,
        prices: KeptPrices,
        updates: PricedUpdates,
    ) -> None:
        self._traces = traces
        self._gpu = gpu
        self._host = host
        is_timed = gpu.rates is not None and gpu.rates.host_factor is not None
        self._machine = replace(
            roofline.ceilings(gpu),
            launch_seconds=host.launch_seconds,
            host_from=RatesFrom.THIS_CARD if is_timed else RatesFrom.CARDS_LIKE_IT,
        )
        self._prices = prices
        self._updates = updates
        self._link = links.link_of(gpu)
        self._stretches = functools.cache(self._find_stretches)
        self._regions = functools.cache(self._find_regions)
        self._modules = functools.cache(self._find_modules)
        self._update = functools.cache(self._price_update)
        self._forward_backward = functools.cache(self._price_forward_backward)
        self._accumulation = functools.cache(self._price_accumulation)
        self._micro_parts = functools.cache(self._price_micro_parts)
        self._backward_share = functools.cache(self._find_backward_share)
        self.exchange = functools.cache(self._find_exchange)

    def seconds(
        self,
        config: TrainConfig,
        paged_out_bytes: int,
        accumulation: float,
        full_share: float = 1.0,
    ) -> StepSeconds | None:
        """The time of a step of so many micro-batches, each with a share of a full one's tokens."""
        spec, rank = TraceSpec.of(config), config.lora_rank or 0
        micro = self._forward_backward(
            spec, config.samples_per_pass, rank, config.precision, full_share
        )
        added = self._accumulation(spec, rank)
        optimizer = self._updates.of(spec, rank, config.updater)
        update = self._update(spec, rank, config.updater, paged_out_bytes)
        if micro is None or added is None or update is None:
            return None
        modules = self._modules(spec, rank)
        rounds = self._rounds(config, micro.total_seconds, accumulation)
        steps = rounds * (micro.total_seconds + self._host.before_micro_step.of(modules))
        # What comes after the last micro-step is in the update.
        between_seconds = added.total_seconds + self._host.after_micro_step.of(modules)
        steps += (rounds - 1) * between_seconds
        if config.torch_empty_cache_steps:
            steps *= 1 + _EMPTY_CACHE_SHARE / config.torch_empty_cache_steps
        bound = micro.bound
        if config.max_completion_length is not None:
            written, scored = self._written(config), self._scored(config, full_share)
            if written is None or scored is None:
                return None
            steps += accumulation * scored
            bound = "generation" if written.seconds > steps else bound
            steps += written.seconds
        update_seconds = update.total_seconds
        if UPDATERS[config.updater].updates and not optimizer.cost.num_synchronizations:
            # The host launches updates while the GPU is at work on the backward pass.
            spare_seconds = max(micro.total_seconds - micro.launch_seconds, 0.0)
            update_seconds = max(update.gpu_seconds, update_seconds - spare_seconds)
        alone = StepSeconds(
            micro_step_seconds=steps / accumulation,
            optimizer_step_seconds=update_seconds,
            total_seconds=steps + update_seconds,
            bound=bound if steps > update_seconds else update.bound,
        )
        exchange = self.exchange(spec, config.samples_per_pass, rank)
        if exchange is None:
            return alone
        backward_seconds = 0.0
        if exchange.hides_gradients:
            share = self._backward_share(spec, config.samples_per_pass, rank, config.precision)
            backward_seconds = share * micro.total_seconds
        return self._shared(alone, exchange, accumulation, backward_seconds)

    def _rounds(self, config: TrainConfig, micro_seconds: float, accumulation: float) -> float:
        """Number of micro-steps one after the other that a step takes as long as.

        In a pipeline the first goes through all GPUs; each further one takes as long as the slowest of them.
        """
        spec, rank = TraceSpec.of(config), config.lora_rank or 0
        trace = self._traces[spec]
        if not isinstance(trace, PipelineTrace):
            return accumulation
        outside = [0.0, 0.0]
        for number, launches in enumerate(
            trace.launches_outside_layers(config.micro_batch_size, rank)
        ):
            kernels = as_kernels(launches, config.precision, self._host)
            found = roofline.seconds(kernels, self._machine)
            outside[number] = 0.0 if found is None else found.total_seconds
        each = max(micro_seconds - sum(outside), 0.0) / sum(trace.counts)
        seconds = [count * each for count in trace.counts]
        seconds[0] += outside[0]
        seconds[-1] += outside[1]
        return 1 + (accumulation - 1) * min(max(seconds) / micro_seconds, 1.0)

    def _shared(
        self,
        alone: StepSeconds,
        exchange: Exchange,
        accumulation: float,
        backward_seconds: float = 0.0,
    ) -> StepSeconds | None:
        """The step's times with what several GPUs add: what they send, and that each waits for the slowest.

        `backward_seconds`: of the backward pass behind which some of what is sent once is hidden; 0: of none.
        """
        host_link = self._machine.moving.bytes_per_second.get("copy_host")
        if self._link is None or host_link is None:
            return None
        num_gpus = exchange.num_gpus
        sent_each = links.seconds(exchange.messages_per_micro_step, self._link, num_gpus)
        sent_once = links.seconds(exchange.messages_per_step, self._link, num_gpus)
        hidden = links.hidden_seconds(sent_once, backward_seconds)
        sent_once -= hidden
        micro = sent_each + exchange.host_copy_bytes_per_micro_step / host_link
        once = (
            sent_once
            + exchange.host_copy_bytes_per_step / host_link
            + exchange.host_update_elements * roofline.HOST_UPDATE_SECONDS_PER_ELEMENT
        )
        sent = accumulation * sent_each + sent_once
        others = accumulation * micro + once - sent
        waiting = 0.0 if exchange.layers else links.waiting_share(num_gpus)
        micro += waiting * alone.micro_step_seconds
        once += waiting * alone.optimizer_step_seconds
        bound = max(
            (sent, "communication"), (others, "transfer"), (alone.total_seconds, alone.bound)
        )[1]
        return StepSeconds(
            micro_step_seconds=alone.micro_step_seconds + micro,
            optimizer_step_seconds=alone.optimizer_step_seconds + once,
            total_seconds=(1 + waiting) * alone.total_seconds + sent + others,
            bound=bound,
            communication_seconds=sent,
            link_bytes_per_second=links.share_of(self._link, num_gpus)
            * self._link.bytes_per_second,
            hidden_seconds=hidden,
            waiting_seconds=waiting * alone.total_seconds,
        )

    def parts(
        self, config: TrainConfig, paged_out_bytes: int, whole: StepSeconds | None
    ) -> Parts | None:
        """The causes of a step's whole time, and how sure each is; None as of `seconds`."""
        spec, rank = TraceSpec.of(config), config.lora_rank or 0
        micro = self._micro_parts(spec, config.samples_per_pass, rank, config.precision)
        optimizer = self._updates.of(spec, rank, config.updater)
        update = step_parts.parts(kernels_of(optimizer.cost, paged_out_bytes), self._machine)
        if whole is None or micro is None or update is None:
            return None
        accumulation = config.gradient_accumulation_steps
        forward_backward = self._forward_backward(
            spec, config.micro_batch_size, rank, config.precision, 1.0
        )
        assert forward_backward is not None
        rounds = self._rounds(config, forward_backward.total_seconds, accumulation)
        found = added(repeated(micro, rounds), update)
        if config.max_completion_length is not None:
            scored = self._micro_parts(
                spec, config.samples_per_pass, rank, config.precision, scores=True
            )
            written = self._written(config)
            if written is None or scored is None:
                return None
            num_scored = accumulation * generation.scorings_per_micro_step(config)
            found = added(found, repeated(scored, num_scored), {"generation": written})
        # What the host does between micro-steps, adding gradients, and emptying the cache.
        sent_seconds = whole.communication_seconds + whole.waiting_seconds
        rest_seconds = whole.total_seconds - sent_seconds
        rest_seconds -= sum(part.seconds for part in found.values())
        rest = step_parts.of_host(max(rest_seconds, 0.0), self._machine)
        spread = 0.0 if self._link is None else self._link.spread
        sent = step_parts.of_links(sent_seconds, spread)
        return added(found, {"host": rest, "links": sent})

    def kernels(self, config: TrainConfig) -> list[roofline.Kernel]:
        """The kernels of a micro-step, then those of an optimizer step in which nothing is paged."""
        spec, rank = TraceSpec.of(config), config.lora_rank or 0
        update = kernels_of(self._updates.of(spec, rank, config.updater).cost, 0)
        return [*self._of_micro_step(config), *update]

    def _of_micro_step(self, config: TrainConfig) -> list[roofline.Kernel]:
        """The kernels of a micro-step, those that score completions as often as on average."""
        spec, rank = TraceSpec.of(config), config.lora_rank or 0
        sizes = config.samples_per_pass, rank, config.precision
        share = generation.scorings_per_micro_step(config)
        scoring = self._kernels_of(spec, *sizes, scores=True) if share else []
        scored = [replace(kernel, count=share * kernel.count) for kernel in scoring]
        return [*scored, *self._kernels_of(spec, *sizes)]

    def mfu(self, config: TrainConfig, model_flops: float, step_seconds: float) -> float | None:
        """The share of the card's rate of matrix products that the model's work is."""
        precision = PRECISIONS[config.precision]
        return roofline.mfu(
            model_flops=model_flops,
            step_seconds=step_seconds,
            gpu=self._gpu,
            dtype=rate_dtype(precision.compute_dtype, tf32=precision.tf32),
        )

    def flops(self, config: TrainConfig) -> tuple[float, float]:
        """Floating-point operations of one optimizer step on each GPU: (all, without recomputation)."""
        total = model = 0.0
        for kernel in self._of_micro_step(config):
            flops = kernel.count * kernel.flops
            total += flops
            model += 0 if kernel.phase == "recompute" else flops
        steps: float = config.gradient_accumulation_steps
        if PARALLELISMS[config.parallelism].deals_layers:
            steps /= config.num_gpus  # Each GPU runs its layers: on average so many.
        return total * steps, model * steps

    def _find_exchange(self, spec: TraceSpec, micro_batch: int, rank: int) -> Exchange | None:
        trace = self._traces[spec]
        return trace.exchange(micro_batch, rank) if isinstance(trace, SharedTrace) else None

    def _price_update(
        self, spec: TraceSpec, rank: int, name: str, paged_out_bytes: int
    ) -> roofline.StepTime | None:
        """Price the update, with what the host does beside its launches.

        The GPU has nothing to do until clipping is through but for small kernels. Where the host waits for it
        after every tensor (bitsandbytes), neither runs ahead of the other.
        """
        optimizer = self._updates.of(spec, rank, name)
        found = roofline.seconds(kernels_of(optimizer.cost, paged_out_bytes), self._machine)
        if found is None:
            return None
        num_trained = self._updates.trainable(spec, rank).num
        modules = self._modules(spec, rank)
        host = self._host
        before_seconds = host.after_micro_step.of(modules)
        waited = min(optimizer.cost.num_synchronizations / max(num_trained, 1), 1.0)
        host_seconds = found.launch_seconds + host.update.of(modules, num_trained)
        host_seconds += optimizer.cost.host_operations * host.python_seconds
        if UPDATERS[name].updates:
            host_seconds += num_trained * host.call_seconds
        else:
            before_seconds += host.before_update.of(modules, num_trained)
        in_turn_seconds = waited * min(found.gpu_seconds, host_seconds)
        total_seconds = max(found.total_seconds, host_seconds) + in_turn_seconds + before_seconds
        is_late = before_seconds + host_seconds >= found.total_seconds
        return replace(
            found,
            launch_seconds=before_seconds + host_seconds,
            total_seconds=total_seconds,
            bound="launch" if is_late else found.bound,
        )

    def _price_forward_backward(
        self,
        spec: TraceSpec,
        micro_batch: float,
        rank: int,
        precision: str,
        full_share: float = 1.0,
        *,
        scores: bool = False,
    ) -> roofline.StepTime | None:
        """Price a micro-step but for what scores completions, or that alone.

        A generation is scored one micro-batch after the other: host and GPU go on evenly.
        """
        if full_share < 1:
            # A single sample's is traced at one size alone.
            several = replace(spec, single=False)
            if several not in self._traces:
                whole = self._forward_backward(spec, micro_batch, rank, precision, scores=scores)
                if whole is None:
                    return None
                seconds = max(full_share * whole.total_seconds, whole.launch_seconds)
                return replace(whole, total_seconds=seconds)
            spec, micro_batch = several, full_share * micro_batch

        def step_time() -> roofline.StepTime | None:
            kernels = self._kernels_of(spec, micro_batch, rank, precision, scores=scores)
            stretches = None if scores else self._stretches(spec)
            return roofline.seconds(kernels, self._machine, stretches)

        return self._prices.time(
            roofline.StepTime | None,
            self._traces[spec].identity,
            f"{'scores' if scores else 'step'} {micro_batch} {rank} {precision}",
            step_time,
        )

    def _price_accumulation(self, spec: TraceSpec, rank: int) -> roofline.StepTime | None:
        """Price adding each gradient to the one that is there: two reads and a write."""

        def added(gradients: Iterable[tuple[str, int]]) -> roofline.StepTime | None:
            kernels = (
                roofline.Kernel(
                    name="add_",
                    kind="elementwise",
                    dtype=dtype,
                    flops=0,
                    bytes_moved=3 * size_bytes,
                )
                for dtype, size_bytes in gradients
            )
            return roofline.seconds(kernels, self._machine)

        trace = self._traces[spec]
        if isinstance(trace, SharedTrace) and trace.whole_gradients:
            sizes, dtype = trace.sizes(1, rank), PRECISIONS[spec.precision].compute_dtype
            return added((dtype, sizes[number]) for number in trace.whole_gradients)
        trainable = self._updates.trainable(spec, rank)
        return self._prices.time(
            roofline.StepTime | None,
            trainable.identity,
            "adding gradients",
            lambda: added((s.dtype, s.size_bytes) for s in trainable.read()),
        )

    def _price_micro_parts(
        self, spec: TraceSpec, micro_batch: int, rank: int, precision: str, *, scores: bool = False
    ) -> Parts | None:
        def parts() -> dict[str, Part] | None:
            kernels = self._kernels_of(spec, micro_batch, rank, precision, scores=scores)
            stretches = None if scores else self._stretches(spec)
            found = step_parts.parts(kernels, self._machine, stretches)
            return None if found is None else dict(found)

        return self._prices.time(
            dict[str, Part] | None,
            self._traces[spec].identity,
            f"parts{' of scores' if scores else ''} {micro_batch} {rank} {precision}",
            parts,
        )

    def _written(self, config: TrainConfig) -> Part | None:
        """The time of an optimizer step in which completions are written; None where rates are unknown."""
        spec, rank = TraceSpec.of(config), config.lora_rank or 0
        sizes = (config.generation_batch_size, config.max_completion_length)
        trace = self._traces[spec].of_one
        if config.writes_with_vllm:
            found = self._prices.time(
                float | None,
                trace.identity,
                f"vllm {vllm_generation.facts_of(config)} {rank} {config.precision}",
                lambda: vllm_generation.seconds(trace, config, self._gpu, self._machine),
            )
            spread = vllm_generation.SPREAD
            return None if found is None else part(found, spread, RatesFrom.CARDS_LIKE_IT)

        def seconds() -> float | None:
            total = 0.0
            for launches, count in generation.passes(trace, config):
                kernels = as_kernels(launches, config.precision, self._host)
                found = roofline.seconds(kernels, self._machine)
                if found is None:
                    return None
                total += count * found.total_seconds
            return total

        once = self._prices.time(
            float | None, trace.identity, f"generation {sizes} {rank} {config.precision}", seconds
        )
        if once is None:
            return None
        per_step = once * generation.generations_per_step(config)
        return part(per_step, generation.SPREAD, RatesFrom.CARDS_LIKE_IT)

    def _scored(self, config: TrainConfig, full_share: float) -> float | None:
        """Seconds of a micro-step in which completions are scored, on average; None as of `_written`."""
        spec, rank = TraceSpec.of(config), config.lora_rank or 0
        found = self._forward_backward(
            spec, config.samples_per_pass, rank, config.precision, full_share, scores=True
        )
        share = generation.scorings_per_micro_step(config)
        return None if found is None else share * found.total_seconds

    def _find_backward_share(
        self, spec: TraceSpec, micro_batch: int, rank: int, precision: str
    ) -> float:
        """Share of a micro-step's floating-point operations in its backward pass, recomputation included."""

        def share() -> float:
            forward = total = 0.0
            for kernel in self._kernels_of(spec, micro_batch, rank, precision):
                flops = kernel.count * kernel.flops
                total += flops
                forward += flops if kernel.phase == "forward" else 0.0
            return 1 - forward / total if total else 0.0

        return self._prices.price(
            float, self._traces[spec].identity, f"backward {micro_batch} {rank} {precision}", share
        )

    def _find_modules(self, spec: TraceSpec, rank: int) -> float:
        num_adapter_weights = 0
        if spec.method != "full":
            num_adapter_weights = self._updates.trainable(spec, rank).num
        trace = self._traces[spec]
        num_weights = self._prices.price(int, trace.identity, "weights", lambda: trace.num_weights)
        return num_modules(num_weights, num_adapter_weights)

    def _find_stretches(self, spec: TraceSpec) -> Stretches:
        shares, order = self._traces[spec].stretches
        return Stretches(shares=shares, order=order)

    def _kernels_of(
        self,
        spec: TraceSpec,
        micro_batch: float,
        rank: int,
        precision: str,
        *,
        scores: bool = False,
    ) -> list[roofline.Kernel]:
        trace = self._traces[spec]
        if not scores:
            launches, regions = trace.launches(micro_batch, rank), self._regions(spec)
            return as_kernels(launches, precision, self._host, num_regions=regions)
        scoring = trace.of_one.scoring_launches(micro_batch, rank)
        return as_kernels(scoring, precision, self._host)

    def _find_regions(self, spec: TraceSpec) -> int:
        """Return how many regions checkpointing recomputes: a layer's backward pass has one, or none."""
        if spec.is_compiled:
            return 0
        trace, stretches = self._traces[spec], self._stretches(spec)
        again = [launch.kernel.phase == "recompute" for launch in trace.launches(1, 1)]
        num_launched = stretches.shares[:, again].sum(axis=1)[stretches.order]
        return int(np.count_nonzero(num_launched))
