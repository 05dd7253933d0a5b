"""Settings that may vary (SearchSpace), and what a model, a card and a base make of them.

A space comes from a YAML file (autotune.space.space_file). Every combination of its values is a point
(autotune.space.enumeration); gradient accumulation follows from the effective batch size of the workload.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.catalogue.attention import EXPANDED
from autotune.catalogue.checkpoint import Checkpoint
from autotune.catalogue.tasks import PICTURES, TASKS
from autotune.space.checkpoint_plans import SOLVE
from autotune.space.config import OF_COMPLETIONS, TrainConfig, Workload
from autotune.space.knobs import KNOBS
from autotune.space.parallelisms import ON_ONE_GPU_TOO, PARALLELISMS
from autotune.space.precisions import fuses_grouped_heads
from autotune.space.trainers import BY_TASK, EMBEDDERS, FIXED_BY_A_TEACHER, Trainer, trainers_of

_PARALLELISMS_OF_TORCH = ("ddp", "fsdp2", "fsdp2-no-reshard")
_FOR_QUANTIZED = ("device-map",)
"""Ways to share beside these of 4-bit weights, all of which FSDP2 has loaded on each GPU first."""

_PARTS = "chunked_loss"
"""A setting that a search tries on its best configurations, where a space has both of its values."""
UPDATE = "update_in_backward"
"""A setting that is on only where one micro-batch is the step, where a space has both of its values."""
SMALLEST_MINI_BATCH = 8
"""Fewest pairs of a mini-batch that a search offers by itself. [judgement] Fewer keep no card busy."""
Domains = Mapping[str, tuple[Any, ...]]
"""Values that a search may give to a setting, by name of the knob."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodSpace:
    """Values that may vary under one training method."""

    method: str
    domains: Domains
    """Values by setting. A setting that is not in it keeps TrainConfig's default."""

    @property
    def num_points(self) -> int:
        """Return the number of points that are listed: those of _PARTS and UPDATE come beside them."""
        return math.prod(
            1
            if name in (_PARTS, UPDATE) and len(values) > 1
            else len([v for v in values if v != SOLVE])
            for name, values in self.domains.items()
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    """A named set of settings that may vary, section by section."""

    name: str
    description: str
    methods: tuple[MethodSpace, ...]

    def offers(self, config: TrainConfig) -> bool:
        """Whether every setting of the configuration is a value of a section, its micro-batch aside."""
        return any(
            section.method == config.method
            and all(
                getattr(config, name) in values
                for name, values in section.domains.items()
                if name != "micro_batch_size"
            )
            for section in self.methods
        )


def with_domains(space: SearchSpace, change: Callable[[MethodSpace], Domains]) -> SearchSpace:
    """The space with other domains in each section."""
    sections = (
        dataclasses.replace(section, domains={**section.domains, **change(section)})
        for section in space.methods
    )
    return dataclasses.replace(space, methods=tuple(sections))


def with_divisors(space: SearchSpace, num_samples: int) -> SearchSpace:
    """The space with the divisors of what a GPU trains on among its micro-batches, up to its largest.

    Of a list of powers of two alone, 8 would be the largest that divides 24 samples.
    """
    if num_samples & (num_samples - 1) == 0:
        return space
    name = "micro_batch_size"

    def divided(section: MethodSpace) -> Domains:
        sizes = section.domains.get(name, ())
        if len(sizes) < 2:
            return {}
        divisors = (size for size in range(1, max(sizes) + 1) if num_samples % size == 0)
        return {name: tuple(sorted({*sizes, *divisors}))}

    return with_domains(space, divided)


def with_fixed_segments(space: SearchSpace) -> SearchSpace:
    """Return the space without segments that expand: in WSL 2 the first allocation may fail with them."""
    name = "expandable_segments"
    return with_domains(space, lambda section: {name: (False,)} if name in section.domains else {})


def without_solve(space: SearchSpace) -> tuple[SearchSpace, frozenset[str]]:
    """Return the space with no and all layers checkpointed in place of `solve`, and the methods with it."""
    name = "activation_checkpointing"
    solving = frozenset(
        section.method for section in space.methods if SOLVE in section.domains.get(name, ())
    )

    def plain(section: MethodSpace) -> Domains:
        if section.method not in solving:
            return {}
        listed = [value for value in section.domains[name] if value != SOLVE]
        return {name: tuple(dict.fromkeys((*listed, 0, 1)))}

    return with_domains(space, plain), solving


def without_intervals(space: SearchSpace, methods: Collection[str]) -> SearchSpace:
    """Return the space with no and all layers checkpointed alone, for methods whose checkpointing is solved.

    A plan that checkpoints as many layers takes as long, and needs no more (autotune.space.checkpoint_plans).
    """
    name = "activation_checkpointing"

    def ends(section: MethodSpace) -> Domains:
        if section.method not in methods:
            return {}
        return {name: tuple(value for value in section.domains[name] if value in (0, 1))}

    return with_domains(space, ends)


def without_parts(space: SearchSpace) -> tuple[SearchSpace, frozenset[str]]:
    """Return the space without the loss in parts where it has the whole one, too, and methods with both."""
    parting = frozenset(
        section.method for section in space.methods if len(section.domains.get(_PARTS, ())) > 1
    )
    return with_domains(space, lambda s: {_PARTS: (False,)} if s.method in parting else {}), parting


def with_parts(space: SearchSpace, methods: Collection[str]) -> SearchSpace:
    """Return the space with the loss in parts beside the whole one, for these methods."""
    both: Domains = {_PARTS: (False, True)}
    return with_domains(space, lambda section: both if section.method in methods else {})


def with_attentions(
    space: SearchSpace,
    attentions: tuple[str, ...],
    compute_capability: tuple[int, int] | None = None,
) -> SearchSpace:
    """The space for a model that has only these; sdpa, or the first, where it would have none left.

    Where both are offered, key heads are expanded if no fused kernel of the card takes them as they are, in
    any precision that is offered, and left as they are if not, or where there is no card: a CPU's takes them.
    Beside the mask of a batch that is not packed sdpa expands them itself: how batches are filled has to be
    known.
    """
    usual = ("sdpa",) if "sdpa" in attentions else attentions[:1]

    def left(section: MethodSpace) -> Domains:
        offered = section.domains.get("attention", ())
        found = tuple(name for name in offered if name in attentions) or usual
        if EXPANDED not in found:
            return {"attention": found}
        fuses = (
            fuses_grouped_heads(precision, compute_capability)
            for precision in section.domains["precision"]
        )
        # Unfused attention expands the heads as well, and keeps the scores.
        expands = compute_capability is not None and set(fuses) == {False}
        batchings = section.domains.get("batching", ("packed",))
        if expands and "packed" in batchings and len(batchings) > 1:
            return {"attention": found}  # Each is for some of the batches.
        worse = "sdpa" if expands and "packed" in batchings else EXPANDED
        return {"attention": tuple(name for name in found if name != worse) or found}

    return with_domains(space, left)


def with_checkpoint(space: SearchSpace, checkpoint: Checkpoint | None) -> SearchSpace:
    """The space for a checkpoint that is quantised already: as it is stored, or not at all."""

    def stored(section: MethodSpace) -> Domains:
        if checkpoint is None or section.method not in KNOBS["quantization"].methods:
            return {}
        return {"quantization": (checkpoint.quantization,)}

    return with_domains(space, stored)


def with_precision_of(base: TrainConfig, space: SearchSpace) -> SearchSpace:
    """The space with the base's precision among those that it varies for the base's method."""

    def with_base(section: MethodSpace) -> Domains:
        offered = section.domains.get("precision", ())
        if section.method != base.method or len(offered) < 2:
            return {}
        return {"precision": tuple(dict.fromkeys((*offered, base.precision)))}

    return with_domains(space, with_base)


def with_batchings(
    space: SearchSpace, workload: Workload, base: TrainConfig | None = None
) -> SearchSpace:
    """The space for what is known of the samples: without their lengths batches are filled as in the base."""
    usual = usual_batching(workload.task)
    filled = usual if base is None else base.batching

    def left(section: MethodSpace) -> Domains:
        offered = () if workload.lengths is None else section.domains.get("batching", ())
        names = tuple(name for name in offered if name != "packed" or name == usual)
        return {"batching": names or (filled,)}

    return with_domains(space, left)


def with_trainers(space: SearchSpace, task: str, like: TrainConfig | None = None) -> SearchSpace:
    """The space with what trains pictures, or a task that has a trainer of its own, as it is for another.

    Samples are padded, no logits are made, and a plan of checkpointing would not outlast a reference's pass,
    or was not tried with what sees. What a space leaves open of completions is as in `like`.
    """
    if task not in (*BY_TASK, PICTURES):
        return space

    def padded(section: MethodSpace) -> Domains:
        of_task: dict[str, tuple[Any, ...]] = {
            "trainer": trainers_of(task), "batching": ("padded",), "chunked_loss": (False,)
        }  # fmt: skip
        if task in BY_TASK and BY_TASK[task].generates is not None:
            of_task |= _of_completions(section, like)
            if BY_TASK[task].has_teacher:
                of_task |= {name: (value,) for name, value in FIXED_BY_A_TEACHER.items()}
        if task in EMBEDDERS:
            return of_task | _of_embeddings(section, EMBEDDERS[task], like)
        is_scored_before = section.domains.get("precompute_ref_log_probs") == (True,)
        if task == PICTURES:
            of_task |= {
                "attention": _unfused(section), "liger": (False,), "activation_offloading": (False,)
            }  # fmt: skip
        elif is_scored_before or not BY_TASK[task].passes_without_gradients:
            return of_task
        name = "activation_checkpointing"
        offered = [1 if value == SOLVE else value for value in section.domains.get(name, (0,))]
        return {**of_task, name: tuple(dict.fromkeys(min(value, 1) for value in offered))}

    return with_domains(space, padded)


def _unfused(section: MethodSpace) -> tuple[str, ...]:
    """The attentions of a section that every mask can be given to."""
    kept = [a for a in section.domains.get("attention", ()) if a in ("sdpa", "eager")]
    return tuple(kept or ["sdpa"])


def _of_embeddings(
    section: MethodSpace, trainer: Trainer, like: TrainConfig | None
) -> dict[str, tuple[Any, ...]]:
    """Return domains of embeddings: the micro-batch of `like`, all compared, in any mini-batches."""
    name = "loss_mini_batches"
    found: dict[str, tuple[Any, ...]] = {"attention": _unfused(section), "liger": (False,)}
    offered = section.domains.get(name, (1,))
    if like is not None:
        found["micro_batch_size"] = (like.micro_batch_size,)
        if offered == (1,) and trainer.cached_loss:
            most = max(like.micro_batch_size // SMALLEST_MINI_BATCH, 1)
            offered = tuple(number for number in KNOBS[name].choices if number <= most)
    return {**found, name: offered}


def _of_completions(section: MethodSpace, like: TrainConfig | None) -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {
        name: tuple(value for value in section.domains.get(name, ()) if value is not None)
        or (None if like is None else getattr(like, name),)
        for name in OF_COMPLETIONS
    }
    return {**found, "attention": _unfused(section), "liger": (False,)}


def may_pack(space: SearchSpace, task: str) -> bool:
    """Whether a search of it offers packed batches, whose blocks may be longer than any sample."""
    offered = (section.domains.get("batching", ("packed",)) for section in space.methods)
    return usual_batching(task) == "packed" and any("packed" in names for names in offered)


def usual_batching(task: str) -> str:
    """Return how samples of a task are put together where nothing else is asked for."""
    return "packed" if task in TASKS and TASKS[task].packs else "padded"


def for_gpus(space: SearchSpace, num_gpus: int) -> SearchSpace:
    """Return the space on so many GPUs.

    One needs no parallelism, and takes such as keep weights or the optimizer in host memory; where a section
    names none for several, PyTorch's own are taken, under FSDP2 with gradients reduced in each micro-step
    and once, and for quantised weights layers dealt out.
    """

    def left(section: MethodSpace) -> Domains:
        named = section.domains.get("parallelism", ())
        if num_gpus == 1:
            return {"parallelism": ("none", *(name for name in named if name in ON_ONE_GPU_TOO))}
        kept = tuple(name for name in named if name != "none")
        if kept:
            return {"parallelism": kept}
        quantizes = section.method in KNOBS["quantization"].methods
        usual = (*_PARALLELISMS_OF_TORCH, *(_FOR_QUANTIZED if quantizes else ()))
        found: dict[str, tuple[Any, ...]] = {"parallelism": usual}
        # An adapter's gradients are small, whole or shared out.
        if section.method == "full" and section.domains.get("no_sync", (False,)) == (False,):
            found["no_sync"] = KNOBS["no_sync"].choices
        return found

    return with_domains(space, left)


def by_data_parallel_size(space: SearchSpace, num_gpus: int) -> list[tuple[int, SearchSpace]]:
    """Part a space by the number of micro-batches that so many GPUs work on at the same time, least first."""
    parts: dict[int, list[MethodSpace]] = {}
    for section in space.methods:
        of_size: dict[int, list[str]] = {}
        for name in section.domains.get("parallelism", ("none",)):
            of_size.setdefault(PARALLELISMS[name].data_parallel_size(num_gpus), []).append(name)
        for size, names in of_size.items():
            domains = {**section.domains, "parallelism": tuple(names)}
            parts.setdefault(size, []).append(dataclasses.replace(section, domains=domains))
    return [
        (size, dataclasses.replace(space, methods=tuple(sections)))
        for size, sections in sorted(parts.items())
    ]


def unlisted(space: SearchSpace, methods: Collection[str]) -> dict[str, list[Any]]:
    """Values of these methods that are none of their setting's usual ones, in order.

    A study's choices are fixed by its first trial: such values need a study of their own.
    """
    found: dict[str, set[Any]] = {}
    for section in space.methods:
        for name, domain in section.domains.items():
            if section.method in methods and KNOBS[name].choices:
                found.setdefault(name, set()).update({*domain} - {None, *KNOBS[name].choices})
    return {name: sorted(values) for name, values in sorted(found.items()) if values}


def with_peft(space: SearchSpace, peft: str) -> SearchSpace:
    """The space with this adapter as its method peft: varied as lora is, where it has no section."""
    sections = {section.method: section for section in space.methods}
    like = next((sections[name] for name in ("peft", "lora", "qlora") if name in sections), None)
    like = like or space.methods[0]
    kept = {name: domain for name, domain in like.domains.items() if "peft" in KNOBS[name].methods}
    if like.method == "qlora":
        kept["quantization"] = ("none",)
    sections["peft"] = MethodSpace(method="peft", domains={**kept, "peft": (peft,)})
    return dataclasses.replace(space, methods=tuple(sections.values()))


def as_in_base(space: SearchSpace, base: TrainConfig) -> SearchSpace:
    """The space with what costs nothing as the base has it, where the space has only the default."""
    free = [knob for knob in KNOBS.values() if knob.is_free and base.method in knob.methods]

    def of_base(section: MethodSpace) -> Domains:
        return {
            knob.name: (getattr(base, knob.name),)
            for knob in free
            if section.domains.get(knob.name) == (knob.default,)
        }

    return with_domains(space, of_base)


def around(
    space: SearchSpace, base: TrainConfig, allows: Callable[[str, str, Any], bool]
) -> SearchSpace:
    """The space as far as `allows` (method, setting, value) goes, with the base's own values in it.

    What the space does not vary stays as the base has it. A method that is left with no value for
    one of its settings goes.
    """
    sections = []
    for section in space.methods:
        domains = {
            name: _around(section, name, base, functools.partial(allows, section.method, name))
            for name, knob in KNOBS.items()
            if section.method in knob.methods
            and (name in section.domains or getattr(base, name) is not None)
        }
        if all(domains.values()):
            sections.append(dataclasses.replace(section, domains=domains))
    return dataclasses.replace(space, methods=tuple(sections))


def _around(
    section: MethodSpace, name: str, base: TrainConfig, allows: Callable[[Any], bool]
) -> tuple[Any, ...]:
    of_base = getattr(base, name)
    values = section.domains.get(name, ())
    if section.method == base.method or not values:
        values = tuple(dict.fromkeys((*values, of_base)))
    return (
        tuple(filter(allows, values))
        or tuple(filter(allows, (of_base,)))
        or tuple(filter(allows, KNOBS[name].choices))
    )
