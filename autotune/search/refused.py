"""Methods, targets of adapters and ways to share of which nothing could be traced, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from autotune.records.estimate import TraceSpec
from autotune.space.config import TrainConfig
from autotune.space.knobs import METHOD_WORDS
from autotune.space.requirements import LeftOut, Reason


def refused_kinds(
    methods: Iterable[str],
    supported: Sequence[TrainConfig],
    refused: Mapping[TraceSpec, str],
) -> Iterator[LeftOut]:
    """Yield the methods, their targets, and the ways to share, of which nothing could be traced, and why.

    Of a way to share the reasons are its own: not such as are given for a way that is supported.
    """
    of_supported = {config.method for config in supported}
    told: set[str] = set()
    for name in dict.fromkeys(methods):
        reasons = sorted({why for spec, why in refused.items() if spec.method == name})
        if reasons and name not in of_supported:
            told.update(reasons)
            yield LeftOut(METHOD_WORDS[name], Reason.NOT_TRACED, "; ".join(reasons))
    ways = {config.parallelism for config in supported}
    told |= {why for spec, why in refused.items() if spec.parallelism in ways}
    for name in sorted({spec.parallelism for spec in refused} - ways):
        reasons = sorted({why for spec, why in refused.items() if spec.parallelism == name} - told)
        if reasons:
            yield LeftOut(name, Reason.NOT_TRACED, "; ".join(reasons))
    yield from _refused_targets(supported, refused)


def _refused_targets(
    supported: Sequence[TrainConfig], refused: Mapping[TraceSpec, str]
) -> Iterator[LeftOut]:
    """Yield the targets of adapters of which nothing could be traced in a way to share, and why.

    Methods and ways of which nothing could be traced at all are told elsewhere.
    """

    def kind(each: TraceSpec | TrainConfig) -> tuple[str, str | None, str]:
        return each.method, each.lora_targets, each.parallelism

    methods, ways = ({getattr(c, n) for c in supported} for n in ("method", "parallelism"))
    kept = {kind(config) for config in supported}
    kinds: dict[str, set[str]] = {}
    for spec, why in refused.items():
        method, targets, way = kind(spec)
        if targets and method in methods and way in ways and kind(spec) not in kept:
            shared = "" if way == "none" else f" with {way}"
            kinds.setdefault(why, set()).add(f"{METHOD_WORDS[method]} on {targets}{shared}")
    for why, words in kinds.items():
        yield LeftOut(", ".join(sorted(words)), Reason.NOT_TRACED, why)
