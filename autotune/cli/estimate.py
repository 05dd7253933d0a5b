"""autotune estimate: memory and speed of one configuration, predicted."""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

import click

from autotune.cli.options import COUNT, LENGTH, is_given, knob_options, workload_options
from autotune.cli.output import note, print_json
from autotune.space.config import METHODS, Workload
from autotune.space.search_space import usual_batching


@click.command()
@workload_options
@click.option("--method", type=click.Choice(METHODS), default="full", help="Training method.")
@knob_options
@click.option("--accumulation", type=COUNT, default=1, help="Micro-batches per optimizer step.")
@click.option("--explain", is_flag=True, help="The textbook's sum beside the traced figure.")
@click.option("--kv-cache", is_flag=True, help="What the model keeps while it generates, too.")
@click.option("--batch", type=COUNT, help="Sequences to generate at once [default: --micro-batch].")
@click.option("--context", type=LENGTH, help="Tokens of each at its end [default: --seq-len].")
def estimate(
    *,
    model: str,
    task: str | None,
    gpu: str | None,
    gpu_mem: str | None,
    num_gpus: int,
    seq_len: int,
    dataset: Path | None,
    text_field: str,
    tokenizer: str | None,
    accumulation: int,
    method: str,
    as_json: bool,
    explain: bool,
    kv_cache: bool,
    batch: int | None,
    context: int | None,
    **settings: Any,
) -> None:
    """Predict memory and speed of one configuration."""
    from autotune.catalogue.models import resolve
    from autotune.predict.estimator import Estimator
    from autotune.predict.tracing import trace_all
    from autotune.records.estimate import SCHEMA_VERSION, TraceSpec
    from autotune.report import terminal
    from autotune.report.explain import explain as explain_estimate
    from autotune.report.generation import draw_kv_cache
    from autotune.report.progress import progress_on_stderr
    from autotune.report.textbook import draw_textbook, textbook
    from autotune.search import budget
    from autotune.space.defaults import default_base
    from autotune.store.database import DEFAULT_URL
    from autotune.store.trace_table import table_of_prediction

    typed = click.get_current_context()
    given = {name: value for name, value in settings.items() if value is not None}
    if "peft" in given and not is_given(typed, "method"):
        method = "peft"
    card, gpu_reason, budget_bytes = budget.choose_card(gpu, gpu_mem)
    source = resolve(model)
    length = budget.possible_length(source, seq_len, is_given=is_given(typed, "seq_len"))
    budget.check_length(task or source.task, length)
    lengths = None
    if dataset is not None:
        lengths = budget.read_lengths(
            dataset, source, length, text_field=text_field, tokenizer=tokenizer
        )
        task_batching = usual_batching(task or source.task)
        packs = given.get("batching", task_batching) == "packed"
        length = budget.longest_batch(lengths, length, packs=packs, note=note)
    workload = Workload(
        model=source.name,
        task=task or source.task,
        sequence_length=length,
        lengths=lengths,
        effective_batch_size=given.get("micro_batch_size", 1) * accumulation * num_gpus,
        methods=(method,),
        memory_budget_bytes=budget_bytes,
        num_gpus=num_gpus,
    )
    config = dataclasses.replace(
        default_base(workload, card, source, parallelism=given.get("parallelism")),
        gradient_accumulation_steps=accumulation,
        **given,
    )
    budget.check_rules(config, workload, card, source, what="This configuration")
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
            num_gpus=num_gpus,
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
        names = {"model": source.name, "task": workload.task, "gpu_reason": gpu_reason}
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
        gpu_reason=gpu_reason,
        budget_bytes=budget_bytes,
        file=sys.stdout,
    )
    if cache is not None:
        draw_kv_cache(cache, priced, budget_bytes, sys.stdout)
    if explain:
        terminal.draw_explanation(lines, sys.stdout)
    if book is not None:
        draw_textbook(book, sys.stdout)
