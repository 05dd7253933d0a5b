"""torch.compile in a search that measures: a few variants of the best eager configurations.

A probe of a compiled step is long: a few variants of the fastest eager configurations that were measured
are candidates too, once those are known. What autotune.space.compilation does not predict has eager's
estimate until it is measured, as a bound on time and memory: no prediction ranks it above its eager twin.
(CUDA graphs, of reduce-overhead and max-autotune, keep memory of their own beyond it.)

Packed batches alone, which have one shape: a probe's rows are all of full length, so that it would not
see how often padded batches, each as long as its longest sample, are compiled anew.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence

from autotune.catalogue import compilers
from autotune.records.estimate import Estimate
from autotune.records.measurement import Measurement
from autotune.space.config import TrainConfig
from autotune.space.rules import Context, broken_rules
from autotune.space.search_space import SearchSpace, with_domains

MAX_BASES = 2
"""Most eager configurations that get compiled variants. [judgement] Compilation seldom turns the order
around."""
MAX_PROBES = 3
"""Most compiled variants that a search probes. [judgement] Each compiles anew, for half a minute or many."""
COMPILE_SECONDS = 900.0
"""Seconds that compilation adds to a probe's deadline. [judgement] max-autotune times every product for
minutes."""

Settings = tuple[str, str]
"""A way of compiling: (torch_compile, torch_compile_backend)."""


def with_mode(space: SearchSpace, mode: str) -> SearchSpace:
    """The space with that mode of torch.compile beside none."""
    domain = tuple(dict.fromkeys(("none", mode)))
    return with_domains(space, lambda _: {"torch_compile": domain})


def settings_of(space: SearchSpace) -> dict[str, tuple[Settings, ...]]:
    """The ways of compiling that the space names, by method."""
    return {
        section.method: tuple(
            (mode, backend)
            for mode, backend in itertools.product(
                section.domains.get("torch_compile", ()),
                section.domains.get("torch_compile_backend", ("inductor",)),
            )
            if mode != "none"
        )
        for section in space.methods
    }


def configs_of(
    config: TrainConfig, settings: Mapping[str, Sequence[Settings]]
) -> list[TrainConfig]:
    """The configuration compiled, in each of these ways that its method has.

    The list is empty where batches have different lengths.
    """
    if config.batching != "packed":
        return []
    context = Context(effective_batch_size=config.effective_batch_size)
    compiled = (
        dataclasses.replace(config, torch_compile=mode, torch_compile_backend=backend)
        for mode, backend in settings.get(config.method, ())
    )
    return [variant for variant in compiled if not broken_rules(variant, context)]


def bound_of(eager: Estimate, config: TrainConfig) -> Estimate:
    """Eager's estimate as that of the same configuration compiled: a bound."""
    return dataclasses.replace(eager, config=config, is_bound=True)


def why_not(config: TrainConfig, backend: str) -> str:
    """The reason why a probe on that backend cannot compile it, in a clause; empty where it can."""
    if not config.is_compiled or config.torch_compile_backend == "aot_eager":
        return ""
    if config.torch_compile_backend == "inductor":
        return compilers.lacking(backend)
    return "" if backend == "cuda" else f"{config.torch_compile_backend} needs a CUDA device"


def bases(
    fitting: Sequence[Measurement], refused: Collection[TrainConfig]
) -> Sequence[Measurement]:
    """The fastest eager configurations, which are to be compiled too."""
    eager = (m for m in fitting if not m.config.is_compiled and m.config not in refused)
    return sorted(eager, key=lambda m: -(m.tokens_per_second or 0.0))[:MAX_BASES]


def fastest(measured: Sequence[Measurement], *, is_compiled: bool) -> Measurement | None:
    """The one that fits and has the highest steady speed, if any; one stopped as too slow counts last."""
    kind = [m for m in measured if m.stayed_within_budget and m.config.is_compiled == is_compiled]
    return max(kind, key=lambda m: (m.fits, m.tokens_per_second or 0.0), default=None)
