"""The points of a space that are valid, and how many others break which rule.

A rule asks for few settings. What it says is worked out once for each combination of these that is left,
and holds for all points that have it: a rule is told apart by what it reads, so no row says what that is.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune.catalogue.checkpoint import Checkpoint
from autotune.memory.vllm import Served
from autotune.space.config import TrainConfig, Workload
from autotune.space.knobs import KNOBS
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.precisions import shared_storage
from autotune.space.rules import RULES, Context, Rule
from autotune.space.search_space import UPDATE, MethodSpace, SearchSpace, without_solve

_Flags = npt.NDArray[np.bool_]
_TWICE = Rule(
    name="update-after-several-micro-batches",
    reason="weights are updated in the backward pass where a step has one micro-batch",
    breaks=lambda c, _: c.update_in_backward and c.gradient_accumulation_steps > 1,
)
"""Points that are not listed where a space has both kinds of updates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Enumeration:
    """Every valid point of a space, and what became of the others."""

    configs: list[TrainConfig]
    num_enumerated: int
    invalid: dict[str, int]
    """Number of points dropped, by the name of the first rule that they break."""
    reasons: tuple[str, ...] = ()
    """Reasons of the rules that every point breaks, where none is valid."""


def enumerate_configs(
    space: SearchSpace,
    workload: Workload,
    *,
    num_layers: int | None = None,
    compute_capability: tuple[int, int] | None = None,
    max_sequence_length: int | None = None,
    head_size: int | None = None,
    checkpoint: Checkpoint | None = None,
    served: Served | None = None,
) -> Enumeration:
    """Return the valid points for the workload's methods, in the order of the file.

    A micro-batch that does not divide the effective batch size is counted as an invalid point. Where GPUs
    share 4-bit weights out, these are packed in the dtype in which they can be. What is solved is no point.
    """
    space, _ = without_solve(space)
    configs: list[TrainConfig] = []
    invalid: Counter[str] = Counter()
    num_enumerated = 0
    breaks_all: list[set[str]] = []
    for section in space.methods:
        if section.method not in workload.methods:
            continue
        context = Context(
            effective_batch_size=workload.effective_batch_size,
            num_layers=num_layers,
            compute_capability=compute_capability,
            precisions=section.domains["precision"],
            max_sequence_length=max_sequence_length,
            weight_decay=workload.decays,
            head_size=head_size,
            task=workload.task,
            checkpoint=checkpoint,
            served=served,
        )
        points = _Points.of(section, workload)
        valid = np.ones(points.shape, dtype=bool)
        if UPDATE in points.axes:
            valid &= ~_broken(_TWICE, context, points, valid)
        num_enumerated += int(valid.sum())
        first_broken = []
        for rule in RULES:
            broken = valid & _broken(rule, context, points, valid)
            if broken.any():
                first_broken.append((int(broken.argmax()), rule.name, int(broken.sum())))
                valid &= ~broken
        for _, name, count in sorted(first_broken):  # in the order in which points break them
            invalid[name] += count
        configs += points.configs(valid)
        if not configs:
            every = np.ones(points.shape, dtype=bool)
            broken_by = {r.reason for r in RULES if _broken(r, context, points, every).all()}
            breaks_all.append(broken_by)
    in_all = set[str].intersection(*breaks_all) if breaks_all and not configs else set()
    return Enumeration(
        configs=configs,
        num_enumerated=num_enumerated,
        invalid=dict(invalid),
        reasons=tuple(rule.reason for rule in RULES if rule.reason in in_all),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Points:
    """All points of a section: an axis for each setting that has several values."""

    axes: Mapping[str, tuple[Any, ...]]
    """Values that vary, by setting, the last fastest."""
    fixed: Mapping[str, Any]
    """Settings with one value, by name."""
    derived: Mapping[str, tuple[tuple[str, ...], Callable[..., Any]]]
    """Settings that follow from others: their names, and how."""

    @classmethod
    def of(cls, section: MethodSpace, workload: Workload) -> _Points:
        domains = dict(section.domains)
        for name in ("micro_batch_size", UPDATE):  # The last varies fastest.
            if name in domains:
                domains[name] = domains.pop(name)
        storage = KNOBS["quantization_storage"].default
        may_pack_anew = domains.get("quantization_storage") == (storage,)

        def accumulation(parallelism: str, size: int) -> int:
            num_parallel = PARALLELISMS[parallelism].data_parallel_size(workload.num_gpus)
            return max(1, workload.effective_batch_size // num_parallel // size)

        def packed_in(parallelism: str, precision: str, quantization: str) -> str:
            shares = PARALLELISMS[parallelism].shares_packed
            return shared_storage(precision, quantization) if shares else storage

        derived: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
            "gradient_accumulation_steps": (("parallelism", "micro_batch_size"), accumulation)
        }
        if may_pack_anew:
            of_storage = ("parallelism", "precision", "quantization")
            derived["quantization_storage"] = (of_storage, packed_in)
        return cls(
            axes={
                name: values
                for name, values in domains.items()
                if len(values) != 1 or name == "micro_batch_size"
            },
            fixed={
                **TrainConfig.defaults(),
                "method": section.method,
                "sequence_length": workload.sequence_length,
                "num_gpus": workload.num_gpus,
                **{name: values[0] for name, values in domains.items() if len(values) == 1},
            },
            derived=derived,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.axes.values()))

    def configs(self, wanted: _Flags) -> Iterator[TrainConfig]:
        """Yield the points that are wanted, in order."""
        places = dict(zip(self.axes, np.nonzero(wanted), strict=True))
        num_wanted = int(wanted.sum())

        def column(name: str) -> list[Any]:
            if name in self.derived:
                names, value_of = self.derived[name]
                found: dict[tuple[Any, ...], Any] = {}
                return [
                    found[of] if of in found else found.setdefault(of, value_of(*of))
                    for of in zip(*map(column, names), strict=True)
                ]
            if name in self.axes:
                values = self.axes[name]
                return [values[place] for place in places[name].tolist()]
            return [self.fixed[name]] * num_wanted

        columns = [column(name) for name in TrainConfig.names()]
        return map(TrainConfig.of_values, zip(*columns, strict=True))


@dataclass(slots=True, eq=False)
class _Point:
    """A point that says which settings were read of it: what a rule gets in place of a configuration."""

    points: _Points
    places: Mapping[str, int]
    """The place of its value on each axis."""
    read: set[str] = field(default_factory=set)
    """Names of the axes that were read."""

    def __getattr__(self, name: str) -> Any:
        points = self.points
        if name in points.derived:
            names, value_of = points.derived[name]
            return value_of(*(getattr(self, each) for each in names))
        if name in points.axes:
            self.read.add(name)
            return points.axes[name][self.places[name]]
        if name in points.fixed:
            return points.fixed[name]
        return getattr(TrainConfig, name).fget(self)


def _broken(rule: Rule, context: Context, points: _Points, valid: _Flags) -> _Flags:
    """Return which points break a rule, of those that are valid so far; shaped as numpy broadcasts it.

    Each combination of what is read is asked for one valid point that has it. Where that one reads more than
    others did, all of it is a combination.
    """
    read: list[str] = []
    names = list(points.axes)
    while True:
        kept = [names.index(name) for name in read]
        rest = [number for number in range(len(names)) if number not in kept]
        shape = [valid.shape[number] for number in kept]
        rows = valid.transpose(*kept, *rest).reshape(*shape, -1)
        rest_shape = [valid.shape[number] for number in rest]
        first = rows.argmax(axis=-1)
        found = np.zeros(shape, dtype=bool)
        more: set[str] = set()
        for at in itertools.product(*map(range, shape)):
            row = int(first[at])
            if not rows[at][row]:
                continue
            others = [int(n) for n in np.unravel_index(row, rest_shape)] if rest else []
            places = dict(
                zip((names[number] for number in (*kept, *rest)), (*at, *others), strict=True)
            )
            point: Any = _Point(points, places)
            found[at] = rule.breaks(point, context)
            more = point.read.difference(read)
            if more:
                break
        if not more:
            break
        read += sorted(more)
    in_order = np.argsort(kept)
    spread = [length if number in kept else 1 for number, length in enumerate(valid.shape)]
    return found.transpose(*in_order).reshape(spread)
