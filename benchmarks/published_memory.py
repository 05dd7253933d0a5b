"""Predicted against published memory of whole training runs.

Run: python benchmarks/published_memory.py

The published figures are the 161 rows of studies/published-memory/published_memory.csv; nothing in
them was measured by this project. A row is predicted when its settings are complete and its model is
Transformers' modelling code; `why_left_out` says why the others are not.

Two predictions stand beside each figure:

* as a Trainer: what `autotune estimate` says of the row's configuration, unchanged. It is the step of
  today's transformers.Trainer, on today's versions.
* as its program: the same trace, optimizer and allocator model, with what the row's own program or
  its versions did otherwise (`Program`). These are facts read from its code and named per row; no
  number is chosen to meet a figure.

Errors are of the second. Both are written to studies/published-memory/ (rows.json, and the tables of
README.md).
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

import torch
import transformers
from old_attention import OLD_ATTENTIONS
from published_runs import STUDY, UNIT_BYTES, Plan, Program, plans, published, why_left_out

from autotune.allocator import Tape, replay
from autotune.config import PRECISIONS, TrainConfig
from autotune.estimate import Estimator
from autotune.gpus import Gpu, find_gpu
from autotune.optimizer_steps import TensorSpec, write_clip, write_unscale
from autotune.optimizers import OPTIMIZERS
from autotune.results import Estimate, TraceSpec
from autotune.traces import FORWARD_PHASES, SETUP_PHASES, Trace
from autotune.units import GIB
from autotune.worker.cuda import Device
from autotune.worker.model import load_config
from autotune.worker.trace import trace_step


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published figure beside the predicted ones."""

    id: str
    run: str
    metric: str
    published_bytes: int
    as_trainer_bytes: int
    as_program_bytes: int
    quirks: tuple[str, ...]

    @property
    def error(self) -> float:
        return self.as_program_bytes / self.published_bytes - 1

    @property
    def trainer_error(self) -> float:
        return self.as_trainer_bytes / self.published_bytes - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """One published verdict, fits or out of memory, beside the predicted one."""

    id: str
    run: str
    published_fits: bool
    predicted_fits: bool
    peak_device_bytes: int
    capacity_bytes: int
    quirks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Traced:
    trace: Trace
    num_forward_events: int
    """Of trace.first: where the backward pass begins."""


_TRACES: dict[tuple[Any, ...], _Traced] = {}


def _traced(plan: Plan, gpu: Gpu, attention: str | None) -> _Traced:
    """Trace in this process, once per structure."""
    spec = TraceSpec.of(plan.config)
    length = plan.config.sequence_length
    key = (plan.model.name, plan.task, spec, length, gpu.name, attention)
    if key not in _TRACES:
        assert gpu.compute_capability is not None
        assert gpu.cublas_workspace_bytes is not None
        device = Device(
            compute_capability=gpu.compute_capability,
            cublas_workspace_bytes=gpu.cublas_workspace_bytes,
        )
        old_code: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if attention is not None:
            old_code = mock.patch.object(*OLD_ATTENTIONS[attention])
        with old_code:
            answer = trace_step(
                load_config(plan.model.config),
                plan.task,
                spec,
                sequence_length=length,
                device=device,
            )
        trace = Trace(answer)
        backward = next(
            block
            for block in answer["blocks"]
            if block["phase"] not in (*SETUP_PHASES, *FORWARD_PHASES)
        )
        first_of_backward = backward["events"][0]
        num_forward_events = next(
            position
            for position, event in enumerate(trace.first)
            if event >= 0 and trace.template[event] == first_of_backward
        )
        _TRACES[key] = _Traced(trace=trace, num_forward_events=num_forward_events)
    return _TRACES[key]


class _Loop:
    """Two optimizer steps of a program, written onto a tape."""

    def __init__(self, traced: _Traced, config: TrainConfig, program: Program) -> None:
        self._traced = traced
        self._trace = trace = traced.trace
        self._config = config
        self._program = program
        rank = config.lora_rank or 0
        self._specs = [_as_program(spec, program) for spec in trace.trainable(rank)]
        self.tape = Tape(
            sizes=trace.sizes(config.micro_batch_size, rank),
            categories=list(trace.categories),
            events=list(trace.setup),
        )
        self._states: Any = None
        self._has_gradients = False

    def step(self) -> None:
        """Micro-steps and the optimizer; gradients live on."""
        trace, again = self._trace, self._states is not None
        if self._has_gradients and self._program.gradients == "kept":
            self._micro_step(trace.next)
        else:
            self._micro_step(trace.again if again else trace.first)
        if self._config.gradient_accumulation_steps > 1:
            self._micro_step(trace.next)
        tape = self.tape
        scaled = PRECISIONS[self._config.precision].grad_scaler
        scalars = [write_unscale(tape)] if scaled else []
        if self._program.clips:
            scalars.append(write_clip(tape, self._specs))
        algorithm = OPTIMIZERS[self._config.optimizer].algorithm
        self._states = algorithm.write_step(tape, self._specs, self._states)
        for index in scalars:
            tape.free(index)
        self._has_gradients = True

    def zero_grad(self) -> None:
        if self._program.gradients == "dropped after the step":
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        if self._has_gradients:
            for index in self._trace.gradients:
                self.tape.free(index)
            self._has_gradients = False

    def _micro_step(self, events: Sequence[int]) -> None:
        trace, border = self._trace, self._traced.num_forward_events
        if events is not trace.first:
            border -= sum(
                e >= 0 and trace.categories[e] == "workspace" for e in trace.first[:border]
            )
        forward, backward = list(events[:border]), list(events[border:])
        tape = self.tape
        if self._program.holds_logits:
            # The first of the tensors as wide as the vocabulary. The loop's next batch would still find
            # them; after a long batch that is the longest of a sorted bucket, preceded by the shortest.
            logits = next(e for e in forward if e >= 0 and trace.categories[e] == "logits")
            forward = [e for e in forward if e != ~logits]
            backward = [*(e for e in backward if e != ~logits), ~logits]
        tape.events += forward
        if self._program.gradients == "dropped before the backward pass":
            self._drop_gradients()
        tape.events += backward


def _as_program(spec: TensorSpec, program: Program) -> TensorSpec:
    return replace(
        spec,
        group=spec.group if program.parameter_groups > 1 else 0,
        embedding=spec.embedding and program.embedding_state_32bit,
    )


def loop_bytes(plan: Plan, program: Program) -> int:
    """Predicted bytes of the plan's metric for a loop, the context left out."""
    gpu = find_gpu(plan.gpu)
    traced = _traced(plan, gpu, program.attention)
    loop = _Loop(traced, plan.config, program)
    loop.step()
    if plan.metric == "step end":
        return replay(loop.tape.sizes, loop.tape.events).final_allocated_bytes
    loop.zero_grad()
    loop.step()
    return replay(loop.tape.sizes, loop.tape.events).peak_reserved_bytes


def estimate(plan: Plan) -> Estimate:
    """What autotune says of the row's configuration."""
    gpu = find_gpu(plan.gpu)
    assert gpu.capacity_bytes is not None
    traced = _traced(plan, gpu, None)
    estimator = Estimator(
        {TraceSpec.of(plan.config): traced.trace}, gpu, memory_budget_bytes=gpu.capacity_bytes
    )
    return estimator.estimate(plan.config)


def predict(ids: Collection[str] | None = None) -> list[Row]:
    """The rows with a figure, or those of them that are named."""
    table = published()
    rows = []
    for name, plan in plans().items():
        if plan.metric == "fits" or (ids is not None and name not in ids):
            continue
        entry = table[name]
        as_program = loop_bytes(plan, plan.program) + sum(size for _, size in plan.program.kept)
        if plan.metric == "step end":
            as_trainer = loop_bytes(plan, Program())
        else:
            as_trainer = estimate(plan).peak_reserved_bytes
        rows.append(
            Row(
                id=name,
                run=describe(plan),
                metric=plan.metric,
                published_bytes=round(float(entry["mem_value"]) * UNIT_BYTES[entry["mem_unit"]]),
                as_trainer_bytes=as_trainer + plan.context_bytes,
                as_program_bytes=as_program + plan.context_bytes,
                quirks=plan.quirks,
            )
        )
    return rows


def predict_labels() -> list[Label]:
    """The rows that say fits or out of memory, by the estimate against the card's capacity."""
    table = published()
    labels = []
    for name, plan in plans().items():
        if plan.metric != "fits":
            continue
        capacity_bytes = find_gpu(plan.gpu).capacity_bytes
        assert capacity_bytes is not None
        peak_device_bytes = estimate(plan).peak_device_bytes
        labels.append(
            Label(
                id=name,
                run=describe(plan),
                published_fits=table[name]["mem_value"].startswith("fits"),
                predicted_fits=peak_device_bytes <= capacity_bytes,
                peak_device_bytes=peak_device_bytes,
                capacity_bytes=capacity_bytes,
                quirks=plan.quirks,
            )
        )
    return labels


def describe(plan: Plan) -> str:
    config = plan.config
    words = [plan.model.short_name, config.method]
    if config.lora_rank is not None:
        words.append(f"r{config.lora_rank}")
    if config.quantization != "none":
        words.append(config.quantization)
    words += [
        config.precision,
        config.optimizer,
        f"{config.micro_batch_size}x{config.gradient_accumulation_steps}x{config.sequence_length}",
    ]
    if config.activation_checkpointing:
        words.append("checkpointing")
    return " ".join([*words, plan.gpu])


def markdown(rows: Sequence[Row]) -> str:
    lines = [
        "| row | run | metric | published, GiB | as a Trainer, GiB | error | as its program, GiB"
        " | error |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.id} | {row.run} | {row.metric} | {row.published_bytes / GIB:.3f}"
            f" | {row.as_trainer_bytes / GIB:.3f} | {row.trainer_error:+.1%}"
            f" | {row.as_program_bytes / GIB:.3f} | {row.error:+.1%} |"
        )
    return "\n".join(lines)


def markdown_labels(labels: Sequence[Label]) -> str:
    lines = [
        "| row | run | predicted on the device, GiB | card, GiB | predicted | published |",
        "|---|---|---:|---:|---|---|",
    ]
    verdict = {True: "fits", False: "out of memory"}
    for label in labels:
        lines.append(
            f"| {label.id} | {label.run} | {label.peak_device_bytes / GIB:.2f}"
            f" | {label.capacity_bytes / GIB:.2f} | {verdict[label.predicted_fits]}"
            f" | {verdict[label.published_fits]} |"
        )
    return "\n".join(lines)


def markdown_quirks(rows: Sequence[Row | Label]) -> str:
    ids: dict[str, list[str]] = {}
    for row in rows:
        for quirk in row.quirks:
            ids.setdefault(quirk, []).append(row.id)
    return "\n".join(f"- {quirk} ({_listed(names)})" for quirk, names in ids.items())


def markdown_left_out() -> str:
    ids: dict[str, list[str]] = {}
    for name, row in published().items():
        if name not in plans():
            ids.setdefault(why_left_out(row), []).append(name)
    return "\n".join(
        f"- {len(names)} x {reason} ({_listed(names)})" for reason, names in ids.items()
    )


def _listed(names: Sequence[str]) -> str:
    """First and last of a series by one author, in the table's order."""
    groups: dict[str, list[str]] = {}
    for name in names:
        group, _, number = name.rpartition("-")
        groups.setdefault(group, []).append(number)
    return "; ".join(
        f"{group}-{', '.join(numbers)}"
        if len(numbers) <= 9
        else f"{group}-{numbers[0]} to {numbers[-1]}"
        for group, numbers in groups.items()
    )


def summary(rows: Sequence[Row]) -> str:
    """Median, smallest and largest error of both predictions."""
    peaks = {(row.published_bytes, row.as_program_bytes): row for row in rows}
    lines = []
    for name, errors in (
        ("as its program", {row.id: row.error for row in rows}),
        (
            "as its program, peaks alone, equal runs once",
            {row.id: row.error for row in peaks.values() if row.metric != "step end"},
        ),
        ("as a Trainer", {row.id: row.trainer_error for row in rows}),
    ):
        worst = min(errors, key=lambda row: errors[row])
        largest = max(errors, key=lambda row: errors[row])
        lines.append(
            f"- {name}: median error {statistics.median(map(abs, errors.values())):.1%} of"
            f" {len(errors)} rows, from {errors[worst]:+.1%} ({worst})"
            f" to {errors[largest]:+.1%} ({largest}),"
            f" {sum(error < -0.05 for error in errors.values())} more than 5 % under"
        )
    return "\n".join(lines)


def write_section(text: str, name: str, content: str) -> str:
    begin, end = f"<!-- {name} -->\n", f"<!-- end {name} -->\n"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    assert found, f"README.md has no section {name}"
    return f"{before}{begin}{content}\n{end}{after}"


def main() -> None:
    rows, labels = predict(), predict_labels()
    record = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "rows": [
            {**asdict(row), "error": row.error, "trainer_error": row.trainer_error} for row in rows
        ],
        "labels": [asdict(label) for label in labels],
    }
    (STUDY / "rows.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sections = {
        "summary": summary(rows),
        "rows": markdown(rows),
        "labels": markdown_labels(labels),
        "quirks": markdown_quirks([*rows, *labels]),
        "left out": markdown_left_out(),
    }
    readme = STUDY / "README.md"
    text = readme.read_text(encoding="utf-8")
    for name, content in sections.items():
        text = write_section(text, name, content)
        print(content, end="\n\n")
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
