"""The errors where nothing fits: what is lacking, and the change that would lower it most."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from autotune.catalogue.models import ModelSource
from autotune.common.units import format_bytes
from autotune.errors import NothingFitsError
from autotune.predict import least_budget
from autotune.predict.estimator import Estimator
from autotune.predict.floors import least_bytes
from autotune.records.estimate import Estimate, TraceSpec
from autotune.space.checkpoint_plans import INTERVAL
from autotune.space.config import TRADEOFF_CLASSES, TrainConfig, Workload
from autotune.space.requirements import LeftOut, Reason
from autotune.space.rules import Context, broken_rules
from autotune.space.search_space import SMALLEST_MINI_BATCH
from autotune.space.trainers import TRAINERS
from autotune.space.words import describe

_HOPELESS_STEP = 1 / 64
"""How exactly the need of what is far too large is told, as a share of it. [judgement]"""


def why_none_is_valid(
    reasons: Sequence[str], broken: Mapping[str, int], methods: Sequence[str]
) -> str:
    """Say why a space has no valid configuration.

    `reasons`: what all break; `broken`: how many break which rule.
    """
    if reasons:
        return f"None can work: {'; '.join(reasons)}"
    said = ", ".join(f"{count} break {name}" for name, count in broken.items())
    return said or f"it has no section for {' or '.join(methods)}"


def none_of_class(
    allow: str,
    wanted: Sequence[TrainConfig],
    base: TrainConfig,
    model: ModelSource,
    workload: Workload,
    best_by_class: dict[str, Estimate],
    refused: Mapping[TraceSpec, str],
) -> NothingFitsError:
    """Return the error where none could be priced: none in the space, none that fits, none that runs."""
    of_more = _higher_class(best_by_class)
    if allow != TRADEOFF_CLASSES[-1]:
        of_more = of_more or "Raise --allow"
    if not wanted:
        return NothingFitsError(
            f"No configuration of the class {allow} is in the space",
            why=f"The base is {describe(base)}",
            remedy="Raise --allow, or name a --space with the base's settings (autotune spaces)",
        )
    whys = {refused.get(TraceSpec.of(config), "") for config in wanted}
    if "" not in whys:
        return NothingFitsError(
            f"No configuration of the class {allow} can be traced",
            why="; ".join(f"{why[:1].upper()}{why[1:]}" for why in sorted(whys)),
            remedy=of_more or "Name another --space, --method or model",
        )
    budget = format_bytes(workload.memory_budget_bytes)
    why, count = "The model cannot be trained so", model.num_parameters_known
    if count is not None:
        smallest = min(wanted, key=lambda config: least_bytes(config, count))
        if (least := least_bytes(smallest, count)) > workload.memory_budget_bytes:
            parts = "weights and gradients" if smallest.method == "full" else "weights"
            each = " on each GPU" if smallest.num_gpus > 1 else ""
            why = f"The {parts} alone of {describe(smallest)} take {format_bytes(least)}{each}"
    return NothingFitsError(
        f"Nothing of the class {allow} fits into {budget}",
        why=why,
        remedy=of_more or "Name a larger card, a smaller model or another --space",
    )


def _higher_class(best_by_class: dict[str, Estimate]) -> str:
    """Say what would fit if more were given up; empty where nothing would."""
    for name, other in best_by_class.items():
        return (
            f"--allow {name}: {describe(other.config)} is predicted to need "
            f"{format_bytes(other.peak_device_bytes)}"
        )
    return ""


def nothing_fits(
    estimator: Estimator,
    allowed: Sequence[TrainConfig],
    model: ModelSource,
    workload: Workload,
    best_by_class: dict[str, Estimate],
    left_out: Sequence[LeftOut] = (),
    *,
    context: Context,
    share: Callable[[TraceSpec], None],
    is_hopeless: bool,
) -> NothingFitsError:
    """The smallest configuration, and the one change that lowers it most.

    `is_hopeless`: the weights alone are too large, so that about the smallest is named, with the least
    replays. `share` makes the trace of a shared run, where it follows from one that is there.
    """
    configs, least_step = estimator.least_of_host(allowed), 0.0
    if is_hopeless:
        configs, least_step = least_budget.by_need(estimator, configs)[:1], _HOPELESS_STEP
    least = least_budget.smallest(estimator, configs, least_step=least_step)
    assert least is not None  # Something is allowed.
    smallest, needed_bytes = least
    budget_bytes = estimator.memory_budget_bytes
    needed = needs(smallest, needed_bytes, budget_bytes, estimator.host_memory_bytes)
    which = "About the smallest" if is_hopeless else "The smallest"
    why = f"{which}, {describe(smallest.config)}, {needed}"
    lacking_bytes = needed_bytes - budget_bytes
    refused = [each for each in left_out if each.reason is Reason.NOT_TRACED]
    why = "; ".join([why, *(f"no {each.words}: {each.details}" for each in refused)])
    if best_by_class:
        remedy = _higher_class(best_by_class)
    elif more := _more_host_memory(estimator, allowed):
        remedy = more
    elif smaller := _smaller_step(estimator, allowed):
        remedy = _whole_step(smaller) + _in_mini_batches(allowed)
    elif (
        "qlora" not in workload.methods
        and model.checkpoint is None
        and lacking_bytes < _of_weights(smallest)
    ):
        remedy = "--method qlora lowers it most: the weights take 4 bits instead of 16 or 32"
    else:
        remedy = _lower_most(smallest, workload, lacking_bytes)
    if not best_by_class and (on_host := _on_host(estimator, smallest.config, context, share)):
        remedy += f". {on_host}"
    return NothingFitsError(
        f"Nothing fits into {format_bytes(budget_bytes)}", why=why, remedy=remedy
    )


_ON_HOST_SPACE = "host-memory"


def _on_host(
    estimator: Estimator,
    smallest: TrainConfig,
    context: Context,
    share: Callable[[TraceSpec], None],
) -> str:
    """Say what one GPU could do beside host memory; empty where that does not fit, or was asked for."""
    if smallest.num_gpus > 1 or smallest.parallelism != "none":
        return ""
    least = TRAINERS[smallest.trainer].least_micro_batch
    plain = dataclasses.replace(
        smallest,
        parallelism="zero3-offload",
        optimizer="adamw_torch_fused",
        precision=smallest.precision.replace("-true", "-mixed"),
        update_in_backward=False,
        activation_checkpointing=1,
        checkpoint_plan=INTERVAL,
        checkpoint_layers=0,
        activation_offloading=False,
        expandable_segments=False,
        chunked_loss=False,
    )
    for size in (least, 2 * least):  # Only one of them may be traced.
        config = dataclasses.replace(
            plain,
            micro_batch_size=size,
            gradient_accumulation_steps=max(1, smallest.effective_batch_size // size),
        )
        if broken_rules(config, context):
            continue
        share(TraceSpec.of(config))
        found = estimator.fitting(config) if estimator.supports(config) else None
        if found is not None and found.per_gpu is not None:
            return (
                f"--space {_ON_HOST_SPACE} fits, more slowly: with "
                f"{format_bytes(found.per_gpu.host_bytes)} in host memory the card needs "
                f"{format_bytes(found.peak_device_bytes)} (pip install deepspeed)"
            )
    return ""


def _more_host_memory(estimator: Estimator, configs: Sequence[TrainConfig]) -> str:
    """Say which host memory would be enough; empty where the card lacks room, or the host is not limited."""
    if estimator.host_memory_bytes is None:
        return ""
    held = [c for c in configs if estimator.floor_bytes(c) <= estimator.room_for(c)]
    if not held:
        return ""
    least = estimator.estimate(min(held, key=estimator.least_on_host))
    if least.peak_device_bytes > estimator.room_for(least.config):
        return ""
    return f"{host_option(least)} is enough for {describe(least.config)}"


def host_option(estimate: Estimate) -> str:
    """The option that allows the host memory that the estimate takes, in tenths of a GB."""
    return f"--host-mem {math.ceil(estimate.all_host_bytes / 10**8) / 10:g}GB"


def needs(
    estimate: Estimate, needed_bytes: int, budget_bytes: int, host_memory_bytes: int | None
) -> str:
    """Say what a configuration that does not fit needs and lacks, with the room that the question leaves.

    `needed_bytes`: the budget that is enough for it, its room included.
    """
    if lacking_bytes := estimate.lacks_on_host(host_memory_bytes):
        taken, lacking = format_bytes(estimate.all_host_bytes), format_bytes(lacking_bytes)
        return f"is predicted to take {taken} of host memory, {lacking} too much (--host-mem)"
    room_bytes, lacking_bytes = (
        needed_bytes - estimate.peak_device_bytes,
        needed_bytes - budget_bytes,
    )
    room = f" with {format_bytes(room_bytes)} of room (--odds, --headroom)" if room_bytes else ""
    lack = f", {format_bytes(lacking_bytes)} too much" if lacking_bytes > 0 else ""
    return f"is predicted to need {format_bytes(needed_bytes)}{room}{lack}"


def _smaller_step(estimator: Estimator, configs: Sequence[TrainConfig]) -> TrainConfig | None:
    """Return the largest smaller step that fits, where one micro-batch is the step; None if there is none."""
    whole = [
        config
        for config in configs
        if config.update_in_backward or TRAINERS[config.trainer].compares_all
    ]
    if not whole:
        return None
    config = min(whole, key=estimator.floor_bytes)
    row = TRAINERS[config.trainer]
    halves = (config.micro_batch_size >> n for n in range(1, config.micro_batch_size.bit_length()))
    fewer = (
        dataclasses.replace(config, micro_batch_size=size)
        for size in halves
        if size >= row.least_micro_batch and size % config.loss_mini_batches == 0
    )
    return next(
        (
            each
            for each in fewer
            if estimator.supports(each) and estimator.fitting(each) is not None
        ),
        None,
    )


def _whole_step(fitting: TrainConfig) -> str:
    """Say that a step of so many samples fits, and why they are all there at once."""
    why = "with each weight updated in the backward pass, which takes"
    if not fitting.update_in_backward:
        why = "as the loss compares"
    each = " on each GPU" if fitting.data_parallel_size > 1 else ""
    count = fitting.effective_batch_size
    return f"--effective-batch {count} fits, {why} all samples of a step{each} at once"


def _in_mini_batches(configs: Sequence[TrainConfig]) -> str:
    """Say which batch mini-batches divide, where they divide none; empty where the loss has none."""
    batch = configs[0].micro_batch_size
    divided = -(-batch // SMALLEST_MINI_BATCH) * SMALLEST_MINI_BATCH
    is_cached = TRAINERS[configs[0].trainer].cached_loss
    if not is_cached or divided == batch or any(each.loss_mini_batches > 1 for each in configs):
        return ""
    count = divided * configs[0].data_parallel_size
    return f"; --effective-batch {count} can be compared in mini-batches, which divide no {batch}"


def _of_weights(smallest: Estimate) -> int:
    """Return the bytes of weights, their gradients and their optimizer's state: QLoRA leaves less of them."""
    parts = smallest.breakdown
    return parts.parameters_bytes + parts.gradients_bytes + parts.optimizer_state_bytes


def _shorter_samples(workload: Workload) -> str:
    """Return the option that makes samples half as long; empty where they can be no shorter."""
    media, half = workload.pictures, workload.sequence_length // 2
    if media is not None and media.num_moments:
        return f"--audio-seconds {media.seconds / 2:g}"
    if half < 2 or (media is not None and (media.seconds or half <= media.num_tokens)):
        return ""
    return f"--seq-len {half}"


def _lower_most(smallest: Estimate, workload: Workload, lacking_bytes: int) -> str:
    """Say which part of the peak to go for."""
    parts = smallest.breakdown
    if parts.is_of_loading:
        on_each = "" if smallest.per_gpu is None else " on each GPU, before it is shared out"
        return (
            f"A smaller model lowers it most: {format_bytes(smallest.peak_allocated_bytes)} are allocated "
            f"as it is loaded{on_each}"
        )
    grows_with_length = parts.activations_bytes + parts.logits_bytes + parts.temporaries_bytes
    if grows_with_length > parts.parameters_bytes:
        shorter, grows = _shorter_samples(workload), format_bytes(grows_with_length)
        if not shorter:
            return (
                f"Name a larger card or a smaller model: a step's samples take {grows} of the peak"
            )
        if grows_with_length < lacking_bytes:
            return f"Name a larger card: no more than {grows} of the peak grow with the length"
        return f"{shorter} lowers it most: {grows} of the peak grow with the length"
    if (allocated_bytes := smallest.peak_allocated_bytes) < lacking_bytes:
        taken = format_bytes(allocated_bytes)
        return f"Name a larger card: the model and its samples take no more than {taken}"
    return (
        "A smaller model lowers it most: the weights alone take "
        f"{format_bytes(parts.parameters_bytes)}. {smallest.unquantized_note}"
    )
