"""Parts of an Estimate that follow from its others: each GPU's share, and what the time goes into."""

from __future__ import annotations

import math
from collections.abc import Iterable

from autotune.memory.traces import Launch
from autotune.predict.sharding.exchange import Exchange
from autotune.predict.step_times import StepSeconds
from autotune.records.estimate import PerGpu, StateBytes, TimeShare
from autotune.space.config import TrainConfig
from autotune.speed.roofline import COPIES
from autotune.speed.sureness import Parts


def per_gpu(
    config: TrainConfig,
    exchange: Exchange | None,
    state: StateBytes,
    seconds: StepSeconds | None,
    *,
    link_is_measured: bool,
) -> PerGpu | None:
    """Holdings and messages of each of several GPUs; None of one that runs alone."""
    if exchange is None:
        return None
    return PerGpu(
        num_gpus=config.num_gpus,
        parallelism=config.parallelism,
        parameters_bytes=state.parameters_bytes,
        gradients_bytes=state.gradients_bytes,
        optimizer_state_bytes=state.optimizer_state_bytes,
        gathered_bytes=exchange.gathered_bytes,
        buffers_bytes=exchange.buffers_bytes,
        host_bytes=exchange.host_bytes,
        sent_bytes_per_step=round(exchange.sent_bytes(config.gradient_accumulation_steps)),
        layers=exchange.layers,
        communication_seconds=None if seconds is None else seconds.communication_seconds,
        link_bytes_per_second=None if seconds is None else seconds.link_bytes_per_second,
        link_is_measured=link_is_measured,
        hidden_seconds=0.0 if seconds is None else seconds.hidden_seconds,
    )


def parked_bytes(launches: Iterable[Launch]) -> int:
    """Host memory of the activations of a micro-step that wait there, each copied out and back.

    They are pinned, which torch rounds up to a power of two (c10's CachingHostAllocator). Held against what
    that allocator holds of four models: validation.no_card_host, studies/no-card.
    """
    copies = (each for each in launches if each.kernel.name in COPIES)
    return sum(each.count << (math.ceil(each.bytes_moved) - 1).bit_length() for each in copies) // 2


def time_shares(parts: Parts) -> tuple[TimeShare, ...]:
    """Shares of a time by cause and evidence, largest first."""
    total = sum(part.seconds for part in parts.values())
    shares = (
        TimeShare(cause=cause, rates_from=rates_from, share=seconds / total)
        for cause, part in parts.items()
        for rates_from, seconds in part.seconds_from.items()
        if seconds
    )
    return tuple(sorted(shares, key=lambda each: -each.share))
