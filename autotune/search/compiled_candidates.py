"""Compiled configurations of a predicted search: those that the best few traces of compiled steps price.

A trace of a compiled step takes seconds. Where torch.compile is asked for, the fastest eager configuration
of each trade-off class is traced compiled, as it is and without checkpointing, which a compiled step may do
without. Every configuration that shares such a trace is then a candidate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from autotune.common import log
from autotune.errors import AutotuneError
from autotune.memory.traces import Trace
from autotune.predict.sharding.shared_trace import SharedTrace
from autotune.probe import compiled
from autotune.records.compilation import Compilation
from autotune.records.estimate import Estimate, TraceSpec
from autotune.search.candidates import Candidates, speed_of
from autotune.space.compilation import why_not_predicted
from autotune.space.config import TRADEOFF_CLASSES, TrainConfig
from autotune.space.knobs import KNOBS
from autotune.space.requirements import LeftOut, Reason
from autotune.space.search_space import SearchSpace, with_domains
from autotune.space.tradeoffs import LEVEL

_log = log.logger(__name__)

MOST_TRACES = 6
"""Most compiled steps that are traced. [judgement] Each takes seconds of a core; checkpointing, micro-batches
of one and three classes make no more of one method."""

Ways = Mapping[str, Sequence[compiled.Settings]]
"""Ways of compiling by method."""


def predicted_ways(ways: Ways, backend: str) -> Ways:
    """Return those of them that may be predicted on a card of that backend."""
    plain = TrainConfig(
        method="full",
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        sequence_length=1,
        precision="bf16-true",
        optimizer="adamw_torch",
    )

    def is_predicted(settings: compiled.Settings) -> bool:
        mode, inductor = settings
        config = dataclasses.replace(plain, torch_compile=mode, torch_compile_backend=inductor)
        return backend == "cuda" and not why_not_predicted(config)

    return {method: tuple(filter(is_predicted, settings)) for method, settings in ways.items()}


def without_predicted(space: SearchSpace, ways: Ways) -> SearchSpace:
    """Return the space without the modes that are predicted: they come in beside the best eager ones."""
    modes = {mode for settings in ways.values() for mode, _ in settings}
    return with_domains(
        space,
        lambda section: (
            {
                "torch_compile": tuple(
                    mode for mode in section.domains["torch_compile"] if mode not in modes
                )
                or ("none",)
            }
            if "torch_compile" in section.domains
            else {}
        ),
    )


def compiled_configs(
    candidates: Candidates,
    eager: Iterable[TrainConfig],
    ways: Ways,
    *,
    allow: str | None,
    trace: Callable[[set[TraceSpec]], None],
    traces: Mapping[TraceSpec, Trace | SharedTrace],
) -> tuple[list[TrainConfig], tuple[LeftOut, ...]]:
    """Trace the best few compiled; return all configurations that these price, and what was not traced.

    `eager`: the configurations of the search. `allow`: the highest class that may be the answer, None for
    any. `trace` puts traces of specs into `traces`, raising where it can make none of them.
    """
    specs = list(dict.fromkeys(_specs(candidates, ways, allow)))[:MOST_TRACES]
    words = KNOBS["torch_compile"].words("default")
    if not specs:
        why = "nothing that fits without it can be predicted with it"
        return [], (LeftOut(words, Reason.NOT_PREDICTED, why),)
    try:
        trace(set(specs))
    except AutotuneError as error:
        _log.info("no compiled step can be traced: %s", error)
        why = f"its compiled step cannot be traced: {error.why or error}"
        return [], (LeftOut(words, Reason.NOT_PREDICTED, why),)
    made = [(spec, found) for spec in specs if isinstance(found := traces.get(spec), Trace)]
    usable = {spec for spec, found in made if found.is_compiled}
    if not usable:
        why = next((found.not_compiled for _, found in made), "it was not traced")
        return [], (LeftOut(words, Reason.NOT_PREDICTED, why),)
    variants = (variant for config in eager for variant in compiled.configs_of(config, ways))
    return [variant for variant in variants if TraceSpec.of(variant) in usable], ()


def _specs(candidates: Candidates, ways: Ways, allow: str | None) -> Iterator[TraceSpec]:
    anchors = [
        best
        for name in TRADEOFF_CLASSES
        if allow is None or LEVEL[name] <= LEVEL[allow]
        if (best := candidates.best(candidates.exactly(name))) is not None
    ]
    for estimate in sorted(anchors, key=lambda e: -speed_of(e)):
        config = estimate.config
        for eager in (config, dataclasses.replace(config, activation_checkpointing=0)):
            for variant in compiled.configs_of(eager, ways):
                spec = TraceSpec.of(variant)
                if spec.is_compiled:
                    yield spec
                    yield dataclasses.replace(spec, single=False)


def compilation(
    candidates: Candidates, wanted: Callable[[TrainConfig], bool]
) -> Compilation | None:
    """Return the fastest compiled beside the fastest eager one; None where one of them does not fit."""
    with_it, without = (_fastest(candidates, wanted, is_compiled=each) for each in (True, False))
    if with_it is None or without is None:
        return None
    return Compilation(compiled=with_it, eager=without)


def _fastest(
    candidates: Candidates, wanted: Callable[[TrainConfig], bool], *, is_compiled: bool
) -> Estimate | None:
    return candidates.fastest(lambda config: wanted(config) and config.is_compiled == is_compiled)
