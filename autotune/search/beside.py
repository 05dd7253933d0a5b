"""Facts beside an answer: settings put back, what is safer, what a little more memory would bring."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from autotune.catalogue.models import ModelSource
from autotune.predict.estimator import Estimator
from autotune.records.answer import MORE_MEMORY, MORE_MEMORY_BYTES, Change
from autotune.records.estimate import Estimate
from autotune.records.measurement import NOISE
from autotune.search.candidates import Candidates, put_back, speed_of
from autotune.space import requirements
from autotune.space.config import TrainConfig
from autotune.space.optimizers import OPTIMIZERS
from autotune.space.rules import Context, broken_rules
from autotune.space.tradeoffs import loses_small_updates
from autotune.space.trainers import TRAINERS


def changes(
    estimator: Estimator, best: Estimate, base: TrainConfig, context: Context
) -> tuple[Change, ...]:
    """The answer with one setting put back to the base's, where that is valid and was traced.

    Of another method nothing can be put back: there it is the base itself.
    """
    changes = []
    if best.config.method != base.method and estimator.supports(base):
        estimate = estimator.estimate(base)
        fits = estimator.fits(estimate)
        changes.append(
            Change(setting="method", value=base.method, estimate=estimate, leaves_room=fits)
        )
    without_batch = put_back_one(estimator, best.config, base, context, leaves="micro_batch_size")
    return *changes, *without_batch


def put_back_one(
    estimator: Estimator,
    config: TrainConfig,
    base: TrainConfig,
    context: Context,
    *,
    leaves: str = "",
) -> Iterator[Change]:
    """Yield the configuration with each setting as in the base, where that can be priced; one is left."""
    for setting, changed in put_back(config, base):
        if setting == leaves or broken_rules(changed, context) or not estimator.supports(changed):
            continue
        estimate = estimator.estimate(changed)
        yield Change(
            setting=setting,
            value=getattr(base, setting),
            estimate=estimate,
            leaves_room=estimator.fits(estimate),
        )


def reaches_experts(best: Estimate, model: ModelSource) -> bool | None:
    """Whether the adapters are so many that a mixture's experts must have some.

    An expert has two matrices at least, and an adapter of each as many weights as rank x hidden size.
    PEFT 0.21 (utils/transformers_weight_conversion.py) reaches the experts of some families only.
    """
    inputs, rank = model.expert_inputs, best.config.lora_rank
    if inputs is None or rank is None or best.config.lora_targets != "all-linear":
        return None
    return best.parameters.trainable >= 2 * rank * inputs


def safer(
    estimator: Estimator,
    candidates: Candidates,
    supported: Iterable[TrainConfig],
    config: TrainConfig,
    *,
    backend: str,
) -> Change | None:
    """The best, of any class, that keeps the small updates which the answer loses, and runs on the backend.

    Its optimizer is of the answer's family where such keep them: another is no remedy for rounding. None
    where none are lost, or nothing that keeps them was traced.
    """
    if not loses_small_updates(config):
        return None

    def keeps_updates(other: TrainConfig) -> bool:
        runs_there = not requirements.of_probe(other, backend)
        return runs_there and other.method == config.method and not loses_small_updates(other)

    def is_alike(other: TrainConfig) -> bool:
        family = OPTIMIZERS[other.optimizer].family
        return keeps_updates(other) and family == OPTIMIZERS[config.optimizer].family

    alike = list(filter(is_alike, supported))
    best = candidates.best(is_alike if alike else keeps_updates)
    if best is None:
        left = alike or filter(keeps_updates, supported)
        smallest = min(left, key=estimator.floor_bytes, default=None)
        if smallest is None:
            return None
        best = estimator.estimate(smallest)
    setting = "optimizer" if best.config.precision == config.precision else "precision"
    return Change(
        setting=setting,
        value=getattr(best.config, setting),
        estimate=best,
        leaves_room=estimator.fits(best),
    )


def fewer_gpus(estimator: Estimator, best: Estimate) -> Estimate | None:
    """The answer on fewer of its GPUs, with as many samples a step, where that is faster; else None.

    Half of the GPUs have twice the work each: only what sends for more than half of its time may gain. Of
    ways to share DDP alone is looked at: others may not fit into fewer.
    """
    config, share, seconds = best.config, best.per_gpu, best.step_seconds
    if config.parallelism != "ddp" or share is None or seconds is None:
        return None
    if TRAINERS[config.trainer].compares_all:
        return None  # Fewer GPUs would compare more samples, or as many in parts.
    if (share.communication_seconds or 0.0) < seconds / 2:
        return None
    counts = (n for n in range(1, config.num_gpus) if config.num_gpus % n == 0)
    found = filter(None, (estimator.on_fewer_gpus(config, count) for count in counts))
    fastest = max(found, key=speed_of, default=None)
    is_faster = fastest is not None and speed_of(fastest) > speed_of(best) * (1 + NOISE)
    return fastest if is_faster else None


def more_memory(
    estimator: Estimator,
    configs: Iterable[TrainConfig],
    base: TrainConfig,
    best: Estimate,
    wanted: Callable[[TrainConfig], bool],
    *,
    fastest_now: Estimate | None = None,
) -> Change | None:
    """The fastest under a larger budget, where that is faster by more than the noise.

    `fastest_now`: the fastest that fits already, which memory does not bring. The answer's own configuration,
    where it is as fast there: state that is paged finds more room.
    """
    budget = estimator.memory_budget_bytes + MORE_MEMORY_BYTES
    larger = estimator.with_budget(budget)
    fastest = Candidates(larger, filter(wanted, configs), base).fastest(wanted)
    least = max(speed_of(each) for each in (best, fastest_now) if each is not None) * (1 + NOISE)
    if fastest is None or speed_of(fastest) < least:
        return None
    own = larger.estimate(best.config)
    if speed_of(own) * (1 + NOISE) >= speed_of(fastest):
        fastest = own
    return Change(setting=MORE_MEMORY, value=budget, estimate=fastest, leaves_room=True)
