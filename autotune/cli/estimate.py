"""autotune estimate: memory and speed of one configuration, predicted."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

import click

from autotune.cli.options import COUNT, is_given, knob_options, workload_options
from autotune.cli.output import print_json
from autotune.config import Workload


@click.command()
@workload_options
@knob_options
@click.option("--accumulation", type=COUNT, default=1, help="Micro-batches per optimizer step.")
@click.option("--explain", is_flag=True, help="The textbook's sum beside the traced figure.")
def estimate(
    *,
    model: str,
    task: str | None,
    gpu: str | None,
    gpu_mem: str | None,
    seq_len: int,
    accumulation: int,
    method: str,
    as_json: bool,
    explain: bool,
    **settings: Any,
) -> None:
    """Predict memory and speed of one configuration."""
    from autotune import inputs, tune
    from autotune.estimate import Estimator
    from autotune.models import resolve
    from autotune.report import terminal
    from autotune.report.explain import explain as explain_estimate
    from autotune.report.progress import progress_on_stderr
    from autotune.results import SCHEMA_VERSION, TraceSpec
    from autotune.tracing import trace_all

    context = click.get_current_context()
    given = {name: value for name, value in settings.items() if value is not None}
    if "peft" in given and not is_given(context, "method"):
        method = "peft"
    card, gpu_reason, budget_bytes = inputs.choose_card(gpu, gpu_mem)
    source = resolve(model)
    workload = Workload(
        model=source.name,
        task=task or source.task,
        sequence_length=inputs.possible_length(
            source, seq_len, is_given=is_given(context, "seq_len")
        ),
        effective_batch_size=given.get("micro_batch_size", 1) * accumulation,
        methods=(method,),
        memory_budget_bytes=budget_bytes,
    )
    config = dataclasses.replace(
        tune.default_base(workload, card, source),
        gradient_accumulation_steps=accumulation,
        **given,
    )
    inputs.check_rules(config, workload, card, source, what="This configuration")
    spec = TraceSpec.of(config)
    with progress_on_stderr(quiet=as_json) as progress:
        traces = trace_all(
            source,
            workload.task,
            workload.sequence_length,
            card,
            [spec],
            on_trace=functools.partial(progress, "trace"),
        )
    priced = Estimator(traces, card, memory_budget_bytes=budget_bytes).estimate(config)
    lines = explain_estimate(priced) if explain else ()
    if as_json:
        head = {"schema_version": SCHEMA_VERSION, "evidence": "predicted"}
        names = {"model": source.name, "task": workload.task, "gpu_reason": gpu_reason}
        result = {**head, **names, **priced.to_dict(budget_bytes)}
        if explain:
            result["explanation"] = [dataclasses.asdict(line) for line in lines]
        print_json(result)
        return
    terminal.draw_estimate(
        priced,
        model=source.name,
        gpu_reason=gpu_reason,
        budget_bytes=budget_bytes,
        file=sys.stdout,
    )
    if explain:
        terminal.draw_explanation(lines, sys.stdout)
