"""The libraries that Transformers imports wherever they are installed, and which traces need them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from autotune.records.estimate import TraceSpec
from autotune.space.precisions import PRECISIONS
from autotune.space.trainers import TRAINERS

_ASKED_BY: dict[str, Callable[[TraceSpec], bool]] = {
    "torchao": lambda spec: PRECISIONS[spec.precision].fp8,
    "triton": lambda spec: spec.liger or TRAINERS[spec.trainer].is_trl,
    "scipy": lambda spec: TRAINERS[spec.trainer].library == "sentence-transformers",
    "torch.distributed": lambda spec: max(spec.num_splits, spec.sequence_parts) > 1,
}
"""Libraries that a process which only traces does without, and which specs need them."""

LIBRARIES = frozenset(_ASKED_BY)


def asked_by(specs: Iterable[TraceSpec]) -> frozenset[str]:
    """Return the libraries that tracing these specs needs, of LIBRARIES."""
    specs = list(specs)
    return frozenset(name for name, asks in _ASKED_BY.items() if any(map(asks, specs)))
