"""The gain of each setting: the way from the base to the answer, one change at a time.

The order decides how a gain is shared between settings that need each other, so it is chosen by one
rule: while the configuration does not fit, the change that frees most; then the one that is fastest
among those that fit; and where none fits, again the one that frees most.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from autotune.predict.estimator import Estimator
from autotune.records.charts import MAX_PRICED, Details, Step
from autotune.records.estimate import Estimate
from autotune.space.config import LOADER_SETTINGS, METHODS, TrainConfig
from autotune.space.knobs import CHECKPOINTING, KNOBS
from autotune.space.rules import Context, broken_rules

Changes = dict[str, object]
"""Fields of TrainConfig -> their values."""


def details(
    estimator: Estimator,
    base: TrainConfig | None,
    answer: TrainConfig,
    context: Context,
    priced: list[tuple[float, int]],
) -> Details:
    """Return what a report draws of an answer. `base` None: it could not be traced."""
    stride = max(1, -(-len(priced) // MAX_PRICED))
    return Details(
        answer=estimator.timeline(answer),
        base=None if base is None else estimator.timeline(base),
        path=() if base is None else path(estimator, base, answer, context),
        priced=tuple((round(speed, 1), num_bytes) for speed, num_bytes in priced[::stride]),
    )


def path(
    estimator: Estimator, base: TrainConfig, answer: TrainConfig, context: Context
) -> tuple[Step, ...]:
    """Return the steps from the base to the answer.

    Settings go together where what lies between cannot run, or was not traced. Empty where there is nothing
    to change, or a speed is unknown.
    """
    left = _changes(base, answer)
    if not left:
        return ()
    config, estimate = base, estimator.estimate(base)
    steps: list[Step | None] = [_step({}, estimate)]
    while left:
        chosen = _next(estimator, config, estimate, left, context)
        changed = {name: value for group in chosen for name, value in group.items()}
        left = [group for group in left if group not in chosen]
        config = dataclasses.replace(config, **changed)  # type: ignore[arg-type]
        estimate = estimator.estimate(config)
        steps.append(_step(changed, estimate))
    return tuple(step for step in steps if step is not None) if all(steps) else ()


def _changes(base: TrainConfig, answer: TrainConfig) -> list[Changes]:
    """Return what differs, in groups that make no sense apart."""
    differing: Changes = {
        field.name: getattr(answer, field.name)
        for field in dataclasses.fields(TrainConfig)
        # Nothing is predicted of a loader.
        if field.name not in LOADER_SETTINGS
        and getattr(answer, field.name) != getattr(base, field.name)
    }
    together = [{"micro_batch_size", "gradient_accumulation_steps"}, {"parallelism", "num_gpus"}]
    together.append({"torch_compile", "torch_compile_backend"})
    together.append(set(CHECKPOINTING))
    if "method" in differing:
        of_method = {knob.name for knob in KNOBS.values() if set(knob.methods) != set(METHODS)}
        together.append({"method", *of_method})
    groups = [{n: v for n, v in differing.items() if n in names} for names in together]
    grouped = set().union(*groups)
    groups += [{name: value} for name, value in differing.items() if name not in grouped]
    return [group for group in groups if group]


def _next(
    estimator: Estimator,
    config: TrainConfig,
    estimate: Estimate,
    left: list[Changes],
    context: Context,
) -> tuple[Changes, ...]:
    """Choose by the rule of the module, among the smallest sets of changes that can run; else all at once."""
    for size in (1, 2):
        possible = list(_possible(estimator, config, left, context, size))
        if not possible:
            continue
        if estimator.fits(estimate):
            possible.sort(key=lambda c: estimator.tokens_per_second(c[1]) or 0.0, reverse=True)
            for groups, changed_config in possible:
                if estimator.fitting(changed_config) is not None:
                    return groups
        return min(possible, key=lambda c: estimator.floor_bytes(c[1]))[0]
    return tuple(left)


def _possible(
    estimator: Estimator, config: TrainConfig, left: list[Changes], context: Context, size: int
) -> Iterator[tuple[tuple[Changes, ...], TrainConfig]]:
    for groups in itertools.combinations(left, size):
        changed = {name: value for group in groups for name, value in group.items()}
        changed_config = dataclasses.replace(config, **changed)  # type: ignore[arg-type]
        if not broken_rules(changed_config, context) and estimator.supports(changed_config):
            yield groups, changed_config


def _step(changed: Changes, estimate: Estimate) -> Step | None:
    speed = estimate.tokens_per_second
    if speed is None:
        return None
    return Step(
        changed=changed,
        tokens_per_second=speed,
        peak_device_bytes=estimate.peak_device_bytes,
        paged_in_bytes=estimate.paged_in_bytes,
        all_host_bytes=estimate.all_host_bytes,
    )
