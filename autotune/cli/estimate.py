"""autotune estimate: memory and speed of one configuration, predicted."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

import click

from autotune.cli.configuration import configuration_options, resolve_typed
from autotune.cli.options import COUNT, LENGTH
from autotune.cli.output import note, print_json


@click.command()
@configuration_options
@click.option("--explain", is_flag=True, help="The textbook's sum beside the traced figure.")
@click.option("--kv-cache", is_flag=True, help="What the model keeps while it generates, too.")
@click.option("--batch", type=COUNT, help="Sequences to generate at once [default: --micro-batch].")
@click.option("--context", type=LENGTH, help="Tokens of each at its end [default: --seq-len].")
@click.pass_context
def estimate(
    typed: click.Context,
    /,
    *,
    as_json: bool,
    explain: bool,
    kv_cache: bool,
    batch: int | None,
    context: int | None,
    **settings: Any,
) -> None:
    """Predict memory and speed of one configuration."""
    from autotune.predict.estimator import Estimator
    from autotune.predict.tracing import trace_all
    from autotune.records.estimate import SCHEMA_VERSION, TraceSpec
    from autotune.report import terminal
    from autotune.report.explain import explain as explain_estimate
    from autotune.report.generation import draw_kv_cache
    from autotune.report.progress import progress_on_stderr
    from autotune.report.textbook import draw_textbook, textbook
    from autotune.search import budget
    from autotune.store.database import DEFAULT_URL
    from autotune.store.trace_table import table_of_prediction

    asked = resolve_typed(typed, **settings)
    source, workload, config, card = asked.source, asked.workload, asked.config, asked.gpu
    budget_bytes = workload.memory_budget_bytes
    cache = None
    if kv_cache:
        cache = budget.generation(source, config, batch_size=batch, context=context)
    elif batch or context:
        note("--batch and --context are of the key-value cache: --kv-cache shows it.")
    spec = TraceSpec.of(config)
    with progress_on_stderr(quiet=as_json) as progress:
        traces = trace_all(
            source,
            workload.task,
            workload.sequence_length,
            card,
            [spec],
            num_gpus=workload.num_gpus,
            on_trace=functools.partial(progress, "trace"),
            table=table_of_prediction(DEFAULT_URL),
        )
    estimator = Estimator(
        traces, card, memory_budget_bytes=budget_bytes, useful_share=workload.useful_share
    )
    priced = estimator.estimate(config)
    lines = explain_estimate(priced) if explain else ()
    book = textbook(estimator, priced, source.name) if explain else None
    if as_json:
        head = {"schema_version": SCHEMA_VERSION, "evidence": "predicted"}
        names = {"model": source.name, "task": workload.task, "gpu_reason": asked.gpu_reason}
        result = {**head, **names, **priced.to_dict(budget_bytes)}
        if explain:
            result["explanation"] = [dataclasses.asdict(line) for line in lines]
        if book is not None:
            result["textbook"] = dataclasses.asdict(book)
        if cache is not None:
            result["kv_cache"] = cache.to_dict()
        print_json(result)
        return
    terminal.draw_estimate(
        priced,
        model=source.name,
        gpu_reason=asked.gpu_reason,
        budget_bytes=budget_bytes,
        file=sys.stdout,
    )
    if cache is not None:
        draw_kv_cache(cache, priced, budget_bytes, sys.stdout)
    if explain:
        terminal.draw_explanation(lines, sys.stdout)
    if book is not None:
        draw_textbook(book, sys.stdout)
