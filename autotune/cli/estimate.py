"""autotune estimate: memory and speed of one configuration, predicted."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import Any

import click

from autotune.cli.configuration import configuration_options, question_of
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
    """Predict memory and speed of one configuration.

    Example: autotune estimate --model Qwen/Qwen2.5-7B --gpu rtx-4090 --method qlora --micro-batch 4
    """
    from autotune.records.estimate import SCHEMA_VERSION
    from autotune.report import terminal, words
    from autotune.report.explain import explain as explain_estimate
    from autotune.report.generation import draw_kv_cache
    from autotune.report.progress import progress_on_stderr
    from autotune.report.textbook import draw_textbook, textbook
    from autotune.search import budget
    from autotune.search import estimate as pricing
    from autotune.search.resolve import resolve_configuration

    question = question_of(typed, **settings)
    with contextlib.ExitStack() as shown:
        if question.dataset is not None:
            shown.enter_context(progress_on_stderr(quiet=as_json))("dataset", 0, 0)
        asked = resolve_configuration(question, note=note)
    source, workload, card = asked.source, asked.workload, asked.card
    budget_bytes = card.budget_bytes
    cache = None
    if kv_cache:
        cache = budget.generation(source, asked.config, batch_size=batch, context=context)
    elif batch or context:
        note("--batch and --context are of the key-value cache: --kv-cache shows it.")
    with progress_on_stderr(quiet=as_json) as progress:
        made = pricing.priced(asked, progress=progress)
    estimator, priced = made.estimator, made.estimate
    pricing.note_room(question, made, note)
    pricing.note_unsolved(asked, made, note)
    pricing.note_rank(priced.config, estimator.narrowest_layer(priced.config), note)
    lines = explain_estimate(priced) if explain else ()
    book = textbook(estimator, priced, source.name) if explain else None
    if as_json:
        head = {"schema_version": SCHEMA_VERSION, "evidence": "predicted"}
        names = {"model": source.name, "task": workload.task, "gpu_reason": card.why}
        room = {"leaves_room": estimator.fits(priced)}
        result = {**head, **names, **priced.to_dict(budget_bytes), **room}
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
        gpu_reason=card.why,
        budget_bytes=budget_bytes,
        file=sys.stdout,
        host_memory_bytes=workload.host_memory_bytes,
        sees=workload.pictures,
        teacher=workload.teacher,
        data=words.data(workload, priced.config.batching) if workload.lengths else "",
    )
    if cache is not None:
        draw_kv_cache(cache, priced, budget_bytes, sys.stdout)
    if explain:
        terminal.draw_explanation(lines, sys.stdout)
    if book is not None:
        draw_textbook(book, sys.stdout)
