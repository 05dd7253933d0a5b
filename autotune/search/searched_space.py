"""The space that is searched: what model, card, dataset and installed libraries leave of one; its points."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.catalogue.gpus import Gpu
from autotune.catalogue.installed import is_installed
from autotune.catalogue.models import ModelSource
from autotune.common import log
from autotune.errors import ConfigError
from autotune.probe import compiled
from autotune.search import compiled_candidates, room
from autotune.search.compiled_candidates import Ways
from autotune.search.nothing_fits import why_none_is_valid
from autotune.search.solved_checkpointing import LEAST_LAYERS
from autotune.space.config import TrainConfig, Workload
from autotune.space.enumeration import Enumeration, enumerate_configs
from autotune.space.requirements import LeftOut, predictable
from autotune.space.rules import Context, broken_rules
from autotune.space.search_space import (
    SearchSpace,
    for_gpus,
    with_attentions,
    with_batchings,
    with_checkpoint,
    with_precision_of,
    with_trainers,
    without_intervals,
    without_parts,
    without_solve,
)
from autotune.space.space_changes import Changing, SpaceChange
from autotune.space.trainers import BY_TASK

_log = log.logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchedSpace:
    """A space as it is searched, what is tried on its best alone, and what has become of the rest."""

    space: SearchSpace
    methods: tuple[str, ...]
    """Methods that were asked for, also those of which nothing is predicted."""
    solving: frozenset[str]
    """Methods of which checkpointing is solved, on the best alone."""
    parting: frozenset[str]
    """Methods of which the loss is made in parts, on the best alone."""
    ways_to_compile: Ways
    ways_predicted: Ways
    """The ways to compile of which steps are predicted on this card."""
    changes: tuple[SpaceChange, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def compiles(self) -> bool:
        """Whether compiled steps are predicted, too."""
        return any(self.ways_predicted.values())


def searched_space(
    space: SearchSpace,
    workload: Workload,
    gpu: Gpu,
    model: ModelSource,
    *,
    reference: TrainConfig,
    base: TrainConfig | None,
    has: TrainConfig | None,
    changes: Sequence[SpaceChange],
) -> SearchedSpace:
    """Return what is left of a space for this workload, card and model.

    `reference`: the base, the user's or the default one. What `has` needs is taken for installed. `changes`:
    what has become of the space before.
    """
    ways_to_compile = compiled.settings_of(space)
    ways_predicted = compiled_candidates.predicted_ways(ways_to_compile, gpu.backend)
    changing = Changing(space, tuple(changes))
    changing.to(with_trainers(space, workload.task, reference), "what trains the task")
    space, solving = without_solve(changing.space)
    changing.space, parting = without_parts(space)
    num_layers = LEAST_LAYERS if model.num_layers is None else model.num_layers
    compiles = any(ways_predicted.values())
    if workload.num_gpus == 1 and not compiles and num_layers >= LEAST_LAYERS:
        changing.to(without_intervals(changing.space, solving), "checkpointing is solved")
    space = changing.space
    asked_for = tuple(each for each in space.methods if each.method in workload.methods)
    changing.to(dataclasses.replace(space, methods=asked_for), "the methods that were asked for")
    if base is None and model.is_float32:
        # What the checkpoint is: no answer is slower than leaving it so.
        changing.to(with_precision_of(reference, changing.space), "the checkpoint is in float32")
    changing.to(
        with_checkpoint(changing.space, model.checkpoint), "the checkpoint is quantised already"
    )
    changing.to(with_batchings(changing.space, workload, base), "what batches the dataset allows")
    changing.to(
        with_attentions(changing.space, model.attentions, gpu.compute_capability),
        "what attention the model and the card have",
    )
    eager_space = compiled_candidates.without_predicted(changing.space, ways_predicted)
    space, left_out = predictable(eager_space, workload.methods, has=has)
    changing.to(space, "what is installed and predicted")
    changing.to(for_gpus(changing.space, workload.num_gpus), "the number of GPUs")
    for change in changing.changes:
        _log.info("space: %s", change)
    return SearchedSpace(
        space=changing.space,
        methods=tuple(section.method for section in asked_for),
        solving=solving,
        parting=parting,
        ways_to_compile=ways_to_compile,
        ways_predicted=ways_predicted,
        changes=tuple(changing.changes),
        left_out=tuple(left_out),
    )


def context_of(workload: Workload, gpu: Gpu, model: ModelSource) -> Context:
    """Return what rules ask of the workload, the card and the model, for one configuration at a time."""
    return Context(
        effective_batch_size=workload.effective_batch_size,
        compute_capability=gpu.compute_capability,
        weight_decay=workload.decays,
        task=workload.task,
        checkpoint=model.checkpoint,
        served=room.served_by_vllm(model, gpu),
    )


def points_of(
    space: SearchSpace, workload: Workload, gpu: Gpu, model: ModelSource, reference: TrainConfig
) -> Enumeration:
    """Return the points of a space. Raises ConfigError where none is valid."""
    points = enumerate_configs(
        space,
        workload,
        num_layers=model.num_layers,
        compute_capability=gpu.compute_capability,
        max_sequence_length=model.max_sequence_length,
        head_size=model.head_size,
        checkpoint=model.checkpoint,
        served=room.served_by_vllm(model, gpu),
    )
    if points.configs:
        return points
    trainer = BY_TASK.get(workload.task)
    if trainer is not None and not is_installed(trainer.library):
        raise ConfigError(
            f"{trainer.class_name}, which trains {workload.task}, is not installed here",
            remedy=f"pip install {trainer.library}",
        )
    # Where no rule is broken by all, those that the base breaks say most.
    broken = broken_rules(reference, context_of(workload, gpu, model))
    reasons = points.reasons or tuple(rule.reason for rule in broken)
    raise ConfigError(
        f"The space {space.name} has no valid configuration for this workload",
        why=why_none_is_valid(reasons, points.invalid, workload.methods),
        remedy=_whole_groups(reference, space)
        or "Change the methods, the effective batch size or the space"
        + (", or leave --num-gpus out" if workload.num_gpus > 1 else ""),
    )


def _whole_groups(reference: TrainConfig, space: SearchSpace) -> str:
    """Say which effective batches hold whole groups of completions; empty where this one does.

    Where the space has no number of completions it is the reference's.
    """
    usual = (reference.num_generations,)
    named = (section.domains.get("num_generations", usual) for section in space.methods)
    groups = sorted(group for group in set(itertools.chain(*named)) if group)
    if not groups or any(reference.effective_batch_size % group == 0 for group in groups):
        return ""
    group = groups[0]
    return f"--effective-batch {group} or a multiple of it: a prompt has {group} completions"
