"""Predicted against published memory of whole training runs.

Run: python -m validation.published_memory

The published figures are the 161 rows of studies/published-memory/published_memory.csv; nothing in
them was measured by this project. A row is predicted when its settings are complete and its model is
Transformers' modelling code; `why_left_out` says why the others are not.

Two predictions stand beside each figure:

* as a Trainer: what `autotune estimate` says of the row's configuration, unchanged. It is the step of
  today's transformers.Trainer, on today's versions.
* as its program: the same trace, optimizer and allocator model, with what the row's own program or
  its versions did otherwise (`Program`). These are facts read from its code and named per row; no
  number is chosen to meet a figure, but for the two lengths of PEFT's batches (runs.toml there).

Errors are of the second. Both are written to studies/published-memory/ (rows.json, and the tables of
README.md). Of PEFT's runs a second figure is predicted as its program: what is allocated between steps.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest import mock

import torch
import transformers

from autotune.catalogue.gpus import Gpu, find_gpu
from autotune.memory.allocator import EMPTY_CACHE, Tape
from autotune.memory.optimizers import TensorSpec, write_clip, write_unscale
from autotune.memory.replayer import replay
from autotune.memory.traces import FETCH_PHASES, FORWARD_PHASES, SETUP_PHASES, Trace
from autotune.predict import steps
from autotune.predict.estimator import Estimator
from autotune.records.estimate import Estimate, TraceSpec
from autotune.space.config import TrainConfig
from autotune.space.optimizers import OPTIMIZERS
from autotune.space.precisions import PRECISIONS
from autotune.worker.build import adapters
from autotune.worker.build import model as models
from autotune.worker.build.model import load_config
from autotune.worker.trace.cuda import Device
from autotune.worker.trace.meta_step import MetaStep
from autotune.worker.trace.step import trace_step
from validation.published import blind
from validation.published.old_attention import OLD_ATTENTIONS
from validation.published.plan import MEMORY as STUDY
from validation.published.plan import UNIT_BYTES, Plan, Program, published
from validation.published.runs import plans, step_end_figure, why_left_out
from validation.published.tables import (
    Label,
    Row,
    StepEnd,
    markdown,
    markdown_labels,
    markdown_left_out,
    markdown_quirks,
    markdown_step_ends,
    summary,
    write_sections,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Traced:
    trace: Trace
    num_forward_events: int
    """Of trace.first: where the backward pass begins."""
    num_end_events: int
    """What is dropped when the step is over: last of trace.first, trace.again and trace.next."""


_TRACES: dict[tuple[Any, ...], _Traced] = {}


def _traced(plan: Plan, gpu: Gpu, program: Program) -> _Traced:
    """Trace in this process, once per structure."""
    spec = TraceSpec.of(plan.config)
    length = plan.config.sequence_length
    own = (program.old_attention, program.holds_outputs, program.frozen)
    key = (plan.model.name, plan.task, spec, length, gpu.name, own)
    if key not in _TRACES:
        assert gpu.compute_capability is not None
        assert gpu.cublas_workspace_bytes is not None
        device = Device(
            compute_capability=gpu.compute_capability,
            cublas_workspace_bytes=gpu.cublas_workspace_bytes,
        )
        with _code_of(program):
            answer = trace_step(
                load_config(plan.model.config),
                plan.task,
                spec,
                sequence_length=length,
                device=device,
                whole=program.holds_outputs,  # of every layer: there is nothing to copy
            )
        trace = Trace(answer)
        backward = next(
            block
            for block in answer["blocks"]
            if block["phase"] not in (*SETUP_PHASES, *FETCH_PHASES, *FORWARD_PHASES)
        )
        first_of_backward = backward["events"][0]
        num_forward_events = next(
            position
            for position, event in enumerate(trace.first)
            if event >= 0 and trace.template[event] == first_of_backward
        )
        phase, _, end = trace.blocks()[-1]
        assert phase == "end", phase
        _TRACES[key] = _Traced(
            trace=trace, num_forward_events=num_forward_events, num_end_events=len(end)
        )
    return _TRACES[key]


@contextlib.contextmanager
def _code_of(program: Program) -> Iterator[None]:
    """The row's own code in place of today's, and of the Trainer's."""
    with contextlib.ExitStack() as stack:

        def replace_with(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        if program.old_attention is not None:
            replace_with(*OLD_ATTENTIONS[program.old_attention])
        if program.holds_outputs:
            replace_with(MetaStep, "_loss", _loss_of_held_outputs)
            replace_with(models, "build_base", functools.partial(_with_cache, models.build_base))
        if program.frozen:
            frozen = functools.partial(_with_frozen, adapters.add_adapter, program.frozen)
            replace_with(adapters, "add_adapter", frozen)
        yield


def _loss_of_held_outputs(step: MetaStep, inputs: dict[str, Any], *, accepts: bool) -> torch.Tensor:
    """MetaStep._loss, but the outputs live as long as the batch."""
    assert accepts  # the division by the number of micro-batches is the Trainer's
    model: Any = step.model
    outputs = model(**inputs)
    inputs["outputs"] = outputs
    loss: torch.Tensor = outputs["loss"]
    return loss


def _with_cache(build: Callable[..., Any], *arguments: Any) -> Any:
    model = build(*arguments)
    model.config.use_cache = True  # meta-llama/Llama-3.2-3B config.json
    return model


def _with_frozen(add: Callable[..., Any], name_part: str, *arguments: Any) -> Any:
    model = add(*arguments)
    for name, parameter in model.named_parameters():
        if name_part in name:
            parameter.requires_grad_(False)
    return model


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
            events=[*trace.setup, *trace.batch],
        )
        self._states: Any = None
        self._has_gradients = False
        self._outputs: list[int] = []
        """Events that free what the loop holds of the last step."""

    def step(self) -> None:
        """Micro-steps and the optimizer; gradients live on, and what the loop holds."""
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

    def between_steps(self) -> None:
        if self._program.gradients == "dropped after the step":
            self._drop_gradients()
        # Held until the next outputs are there; but before a long batch came a short one.
        self.tape.events += self._outputs
        if self._program.empties_cache:
            self.tape.events.append(EMPTY_CACHE)
        if self._program.gradients == "dropped before the forward pass":
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
        if self._program.holds_outputs:
            num_end_events = self._traced.num_end_events
            backward, self._outputs = backward[:-num_end_events], backward[-num_end_events:]
        if trace.loss is not None:
            backward.append(~trace.loss)
        self.tape.events += forward
        if self._program.gradients == "dropped before the backward pass":
            self._drop_gradients()
        self.tape.events += backward


def _as_program(spec: TensorSpec, program: Program) -> TensorSpec:
    return replace(
        spec,
        group=spec.group if program.parameter_groups > 1 else 0,
        embedding=spec.embedding and program.embedding_state_32bit,
    )


def loop_bytes(plan: Plan, program: Program) -> int:
    """Predicted bytes of the plan's metric for a loop, the context left out."""
    gpu = find_gpu(plan.gpu)
    traced = _traced(plan, gpu, program)
    loop = _Loop(traced, plan.config, program)
    loop.step()
    if plan.metric == "step end":
        return replay(loop.tape.sizes, loop.tape.events).final_allocated_bytes
    loop.between_steps()
    loop.step()
    # These runs are older than torch 2.12.
    return replay(loop.tape.sizes, loop.tape.events, by_address=True).peak_reserved_bytes


def step_end_bytes(plan: Plan, tokens: int | None = None) -> int:
    """Predicted bytes of all that is alive after a step of samples so long, in blocks of 512 B.

    The allocator's own count has the ends of blocks too that are not worth splitting: they differ from
    step to step, and their mean is part of the solved length.
    """
    tokens = tokens or plan.mean_tokens
    assert tokens is not None
    plan = replace(plan, config=replace(plan.config, sequence_length=tokens))
    loop = _Loop(_traced(plan, find_gpu(plan.gpu), plan.program), plan.config, plan.program)
    loop.step()
    sizes = [-(-size // 512) * 512 for size in loop.tape.sizes]
    alive = sum(sizes[e] if e >= 0 else -sizes[~e] for e in loop.tape.events)
    return alive + round(plan.program.kept * plan.program.kept_share)


def trainable(plan: Plan) -> list[TensorSpec]:
    """What the row's program trains."""
    trace = _traced(plan, find_gpu(plan.gpu), plan.program).trace
    return trace.trainable(plan.config.lora_rank or 0)


def estimate(plan: Plan) -> Estimate:
    """What autotune says of the row's configuration, with the allocator of torch before 2.12."""
    gpu = find_gpu(plan.gpu)
    assert gpu.capacity_bytes is not None
    traced = _traced(plan, gpu, Program())
    estimator = Estimator(
        {TraceSpec.of(plan.config): traced.trace}, gpu, memory_budget_bytes=gpu.capacity_bytes
    )
    with mock.patch.object(steps, "takes_lowest_address", return_value=True):
        return estimator.estimate(plan.config)


def predict(ids: Collection[str] | None = None) -> list[Row]:
    """The rows with a figure, or those of them that are named."""
    table = published()
    rows = []
    for name, plan in plans().items():
        if plan.metric == "fits" or (ids is not None and name not in ids):
            continue
        entry = table[name]
        as_program = loop_bytes(plan, plan.program) + plan.program.kept
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
                is_used=plan.is_used,
            )
        )
    return rows


def predict_step_ends(ids: Collection[str] | None = None) -> list[StepEnd]:
    """PEFT's runs, or those of them that are named."""
    table = published()
    return [
        StepEnd(
            id=name,
            run=describe(plan),
            published_bytes=step_end_figure(table[name]),
            as_program_bytes=step_end_bytes(plan),
            is_used=plan.is_used,
        )
        for name, plan in plans().items()
        if name.startswith("peft-") and (ids is None or name in ids)
    ]


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
    if config.peft is not None:
        words.append(json.loads(config.peft)["peft_type"])
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


def main() -> None:
    rows, step_ends, labels = predict(), predict_step_ends(), predict_labels()
    record = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "rows": [
            {**asdict(row), "error": row.error, "trainer_error": row.trainer_error} for row in rows
        ],
        "step_ends": [{**asdict(row), "error": row.error} for row in step_ends],
        "labels": [asdict(label) for label in labels],
    }
    (STUDY / "rows.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sections = {
        "summary": summary(rows, step_ends),
        "rows": markdown(rows),
        "step ends": markdown_step_ends(step_ends),
        "labels": markdown_labels(labels),
        "quirks": markdown_quirks([*rows, *labels]),
        "left out": markdown_left_out(
            {name: why_left_out(STUDY, name) for name in published() if name not in plans()}
        ),
        "blind": blind.markdown(loop_bytes),
    }
    write_sections(STUDY / "README.md", sections)
    print(*sections.values(), sep="\n\n")


if __name__ == "__main__":
    main()
