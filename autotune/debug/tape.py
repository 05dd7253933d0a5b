"""The whole prediction of one configuration as a file: docs/debugging.md has its format.

Every allocation and free of the first optimizer steps in order, with the operation that made each tensor;
what lives at the peak; the kernels of a micro-step and of an optimizer step.

Known limitations

- Buffers that a kernel of another library allocates have no operation.
- Micro-batches after the first of a step are alike: they are there once, `repeats` says how many they are.
  Their labels are counted once, however many there are.
"""

from __future__ import annotations

import dataclasses
import json
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autotune.common import json_records
from autotune.common.files import read_text
from autotune.common.units import MIB
from autotune.common.version import __version__
from autotune.errors import ConfigError
from autotune.memory.allocator import EMPTY_CACHE
from autotune.predict.estimator import Estimator
from autotune.predict.steps import Steps
from autotune.records.charts import StepPhase
from autotune.space.config import TrainConfig

KIND = "autotune-tape"
SCHEMA_VERSION = 1
MAX_FILE_BYTES = 256 * MIB

Event = int | Literal["empty_cache"]
"""i where tensor i is allocated, ~i where it is freed, and where torch.cuda.empty_cache() runs."""

_BLOCK_BYTES = 512
"""Unit to which allocations are rounded up: autotune.memory.allocator."""


def rounded(size_bytes: int) -> int:
    """Bytes that PyTorch's allocator takes for a request of so many."""
    return -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class TapeTensor:
    """A tensor; it may be allocated again in later steps."""

    size_bytes: int
    """Requested."""
    category: str
    """One of allocator.CATEGORIES."""
    operation: str
    """ATen's name of the operation that allocates it, or a weight's name; empty where nobody knows."""
    phase: str
    """In which it is allocated first; empty for what none of these steps allocates."""
    layer: int | None
    """Layer of the model; None outside of its layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TapePhase:
    """A stretch of events, up to the first event of the next one."""

    step: int
    """Number of the optimizer step, from 0; -1 before the first."""
    phase: StepPhase
    first_event: int
    repeats: int
    """How often a run goes through it, and its neighbours of the same step and number, together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TapeKernel:
    """Launches that are alike: of a micro-step, or in phase `update` of an optimizer step."""

    name: str
    kind: str
    dtype: str
    phase: str
    count: float
    flops: float
    """Floating-point operations of one launch."""
    bytes_moved: float
    """Bytes that one launch reads and writes."""
    shape: tuple[float, ...]
    """Sizes that its speed depends on: autotune.speed.roofline.Kernel."""


_OF_A_KERNEL = tuple(field.name for field in dataclasses.fields(TapeKernel))


@dataclass(frozen=True, kw_only=True, slots=True)
class TapePeak:
    """The moment at which most is allocated, and the counters' predicted peaks."""

    allocated_bytes: int
    """Value of torch.cuda.max_memory_allocated."""
    reserved_bytes: int
    """Value of torch.cuda.max_memory_reserved."""
    device_bytes: int
    """Bytes reserved, and what lies outside of PyTorch's allocator."""
    event: int
    """Index into events; -1 where there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TapeFile:
    """The whole prediction of one configuration."""

    model: str
    task: str
    gpu: str
    memory_budget_bytes: int
    config: dict[str, Any]
    peak: TapePeak
    phases: tuple[TapePhase, ...]
    tensors: tuple[TapeTensor, ...]
    events: tuple[Event, ...]
    """In order."""
    kernels: tuple[TapeKernel, ...]

    def phase_at(self, event: int) -> TapePhase:
        """Return the phase of an event."""
        starts = [phase.first_event for phase in self.phases]
        return self.phases[max(bisect_right(starts, event) - 1, 0)]

    def live_at_peak(self) -> list[int]:
        """Return numbers of the tensors that live at the peak, the largest first."""
        live: dict[int, None] = {}
        for event in self.events[: self.peak.event + 1]:
            if event == "empty_cache":
                continue
            if event < 0:
                live.pop(~event, None)
            elif self.tensors[event].size_bytes > 0:
                live[event] = None
        return sorted(live, key=lambda number: -self.tensors[number].size_bytes)

    def to_dict(self) -> dict[str, Any]:
        head = {"kind": KIND, "schema_version": SCHEMA_VERSION, "evidence": "predicted"}
        fields = dataclasses.asdict(self)
        live = {"live_at_peak": self.live_at_peak()}
        return {**head, "autotune": __version__, **fields, **live}


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveGroup:
    """Tensors of one operation, phase and category that live at the peak."""

    operation: str
    phase: str
    category: str
    count: int
    size_bytes: int
    """Bytes of all of them, each rounded to 512 B."""


def live_groups(tape: TapeFile) -> list[LiveGroup]:
    """Return tensors that live at the peak by operation, phase and category, the largest group first."""
    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    for number in tape.live_at_peak():
        tensor = tape.tensors[number]
        key = tensor.operation, tensor.phase, tensor.category
        counts[key] += 1
        sizes[key] += rounded(tensor.size_bytes)
    return [
        LiveGroup(
            operation=key[0], phase=key[1], category=key[2], count=counts[key], size_bytes=size
        )
        for key, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    ]


def tape_of(estimator: Estimator, config: TrainConfig, *, model: str, task: str) -> TapeFile:
    """Return the prediction of a configuration whose trace was asked for with its operations."""
    steps, replay = estimator.replayed(config)
    estimate = estimator.estimate(config)
    trace = estimator.trace_of(config)
    return TapeFile(
        model=model,
        task=task,
        gpu=estimator.gpu.name,
        memory_budget_bytes=estimator.memory_budget_bytes,
        config=dataclasses.asdict(config),
        peak=TapePeak(
            allocated_bytes=estimate.peak_allocated_bytes,
            reserved_bytes=estimate.peak_reserved_bytes,
            device_bytes=estimate.peak_device_bytes,
            event=replay.peak_allocated_event,
        ),
        phases=_phases(steps, config.gradient_accumulation_steps - 1),
        tensors=_tensors(steps, trace.operations, trace.layers),
        events=tuple("empty_cache" if event == EMPTY_CACHE else event for event in steps.events()),
        kernels=tuple(
            TapeKernel(**{name: getattr(kernel, name) for name in _OF_A_KERNEL})
            for kernel in estimator.kernels(config)
        ),
    )


def _phases(steps: Steps, num_further: int) -> tuple[TapePhase, ...]:
    phases = []
    first_event = 0
    for part in steps.parts:
        repeats = num_further if part.is_repeated else 1
        phases.append(
            TapePhase(step=part.step, phase=part.phase, first_event=first_event, repeats=repeats)
        )
        first_event += len(part.events)
    return tuple(phases)


def _tensors(steps: Steps, operations: list[str], layers: dict[int, int]) -> tuple[TapeTensor, ...]:
    phase_of: dict[int, str] = {}
    for part in steps.parts:
        for event in part.events.tolist():
            if event >= 0:
                phase_of.setdefault(event, part.phase)

    def operation(number: int) -> str:
        if number < len(operations):
            return operations[number]
        is_of_step = number in steps.of_update
        return "optimizer step" if is_of_step else "Trainer"

    return tuple(
        TapeTensor(
            size_bytes=size,
            category=category,
            operation=operation(number),
            phase=phase_of.get(number, ""),
            layer=layers.get(number),
        )
        for number, (size, category) in enumerate(zip(steps.sizes, steps.categories, strict=True))
    )


_FIELDS = {field.name for field in dataclasses.fields(TapeFile)}


def read_tape(path: Path) -> TapeFile:
    """Read the file that `autotune debug trace` wrote. Raises ConfigError, which says what is wrong."""
    text = read_text(path, MAX_FILE_BYTES, usual="A prediction is a few MB")
    try:
        return _tape(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not what `autotune debug trace` writes",
            why=str(error)[:200],
            remedy="Write it again: autotune debug trace --model NAME --out FILE.json",
        ) from error


def _tape(values: Any) -> TapeFile:
    values = json_records.mapping(values, "the file")
    if values.get("kind") != KIND:
        raise ValueError(
            f"its kind is {json_records.shown(values.get('kind'))} and should be {KIND}"
        )
    if values.get("schema_version") != SCHEMA_VERSION:
        version = json_records.shown(values.get("schema_version"))
        raise ValueError(f"its schema_version is {version}, and this autotune reads 1")
    fields = {name: value for name, value in values.items() if name in _FIELDS}
    tape = json_records.read(TapeFile, fields, "the file")
    _check(tape)
    return tape


def _check(tape: TapeFile) -> None:
    num_tensors, num_events = len(tape.tensors), len(tape.events)
    for position, event in enumerate(tape.events):
        if event != "empty_cache" and not -num_tensors <= event < num_tensors:
            raise ValueError(
                f"events[{position}] is {json_records.shown(event)}, and is no tensor's"
            )
    if not -1 <= tape.peak.event < num_events:
        raise ValueError(f"peak.event is {tape.peak.event}, and there are {num_events} events")
    starts = [phase.first_event for phase in tape.phases]
    if not starts or starts[0] != 0 or starts != sorted(starts) or starts[-1] > num_events:
        raise ValueError("the phases' first events are not in order from 0")
    if any(not 0 <= phase.repeats <= 10**6 for phase in tape.phases):
        raise ValueError("a phase repeats less than 0 or more than 1,000,000 times")
