"""Draws the answer of an inverse question, and the command that prices it again."""

from __future__ import annotations

import shlex
from typing import TextIO

from autotune.catalogue import gpus
from autotune.common.units import format_bytes, format_seconds
from autotune.common.user_text import printable
from autotune.report import terminal, words
from autotune.search.inverse.questions import Limit
from autotune.space.headroom import NO_HEADROOM, USUAL_HEADROOM
from autotune.space.words import as_options, describe

_QUESTIONS = {
    "sequence-length": ("{:,} tokens", "the longest sequence"),
    "micro-batch": ("micro-batch {:,}", "the largest"),
    "lora-rank": ("rank {:,}", "the highest"),
    "model": ("{}", "the largest model of the catalogue"),
    "gpu": ("{}", "the smallest card of the catalogue"),
}
"""How a question's value is written, and which one it is of those that fit."""


def draw_answer(answer: Limit, check: str, file: TextIO) -> None:
    """Draw the value first, then the configuration that reaches it, then what the next value would need.

    `check`: the command that prices it again.
    """
    best, budget_bytes = answer.best, answer.memory_budget_bytes
    rows: list[terminal.Row] = [
        ("card", f"{printable(best.gpu)}, {answer.gpu_reason}"),
        (
            "budget",
            f"{words.exact_size(budget_bytes)}; the answer {words.room(best, budget_bytes)}",
        ),
        ("answer", _said(answer), "bold green"),
        ("config", describe(best.config), "bold"),
        ("speed", words.speed(best)),
        ("step", words.step(best)),
        *terminal.rates_row(best),
        ("memory", words.memory(best, budget_bytes)),
        *words.of_each_gpu(best),
        ("next", _next(answer)),
        *(("left out", printable(f"{v}: {why}")) for v, why in answer.left_out.items()),
        ("note", _accumulating(answer)),
        *(
            []
            if answer.workload is None
            else [("data", words.data(answer.workload, best.config.batching))]
        ),
    ]
    if best.state.optimizer_state_managed_bytes:
        rows.append(("", words.paging(best)))
    rows += words.host_memory(best, answer.host_memory_bytes)
    rows += [
        (
            "space",
            f"{answer.space}, free where nothing was given; {answer.num_traces} training steps "
            f"traced in {format_seconds(answer.elapsed_seconds)}",
        ),
        ("check", printable(check).replace(" ", words.GLUE)),
        (
            "limits",
            f"not modelled: {words.limits(answer.best.config)}",
            "dim",
        ),
    ]
    terminal.draw_header(answer.model, best, file)
    terminal.draw_rows(rows, file)


def _said(answer: Limit) -> str:
    value, which = _QUESTIONS[answer.what]
    steps = f", in steps of {answer.multiple_of}" if answer.multiple_of > 1 else ""
    return f"{value.format(answer.value)}: {which} that fits{steps}"


def _accumulating(answer: Limit) -> str:
    """A sentence on whether gradients may wait for a second micro-batch.

    Further micro-batches need the memory of their token ids besides.
    """
    if answer.accumulated is None:
        return "Several micro-batches per step do not go with these settings."
    if answer.best.config.gradient_accumulation_steps > 1:
        return "More micro-batches per step need no more memory than their token ids."
    verdict = words.room(answer.accumulated, answer.memory_budget_bytes)
    peak = format_bytes(answer.accumulated.resident_bytes)
    return f"With several micro-batches per step (--accumulation): {peak}, {verdict}."


def _next(answer: Limit) -> str:
    beyond = answer.beyond
    if beyond is None:
        return f"Memory is not the limit: {answer.limit}."
    value = _QUESTIONS[answer.what][0].format(beyond.value)
    need, lack = format_bytes(beyond.smallest.resident_bytes), format_bytes(beyond.lacks_bytes)
    room = "" if answer.headroom == NO_HEADROOM else " with its room"
    config = describe(beyond.smallest.config)
    if lacking_bytes := beyond.smallest.lacks_on_host(answer.host_memory_bytes):
        on_host = format_bytes(beyond.smallest.all_host_bytes)
        more = format_bytes(lacking_bytes)
        return f"{value} needs {on_host} of host memory at least, {more} too much ({config})"
    if beyond.smallest.resident_bytes <= answer.memory_budget_bytes:
        # Its room is lacking, or, where segments grow, pieces between blocks that would suffice.
        budget = format_bytes(beyond.needed_bytes)
        if beyond.lacks_bytes <= 0:
            return f"{value} may fit, too: replayed whole it needs a budget of {budget}{room} ({config})"
        return f"{value} needs a budget of {budget}, {lack} more than there is{room} ({config})"
    return f"{value} needs {need} at least, {lack} too much{room} ({config})"


def command(answer: Limit) -> str:
    """The command that prices the answer's configuration again; a card that is here need not be named."""
    config = answer.best.config
    parts = ["autotune", "estimate", "--model", answer.model, "--task", answer.task]
    budget_bytes = answer.memory_budget_bytes
    known = gpus.of_name(answer.best.gpu)
    # A card that was planned for by its size may be sold with more than can be used: the size alone names it.
    is_sold_with_more = known is not None and budget_bytes > known.capacity_bytes
    if not (answer.card_is_here or is_sold_with_more):
        parts += ["--gpu", answer.best.gpu if known is None else known.slug]
    if answer.card_is_here or known is None or budget_bytes != known.capacity_bytes:
        size = words.typed_size(budget_bytes).replace(" ", "") or f"{budget_bytes}B"
        parts += ["--gpu-mem", size]
    if answer.headroom.spare_bytes is not None:
        spare_bytes = answer.headroom.spare_bytes
        parts += ["--headroom", f"{spare_bytes}B" if spare_bytes else "0"]
    elif answer.headroom != USUAL_HEADROOM:
        parts += ["--odds", str(answer.headroom.odds)]
    if answer.host_memory_bytes is not None:
        limit_bytes = answer.host_memory_bytes
        parts += ["--host-mem", f"{limit_bytes}B" if limit_bytes else "0"]
    if config.num_gpus > 1:
        parts += ["--num-gpus", str(config.num_gpus)]
    parts += ["--seq-len", str(config.sequence_length), "--method", config.method]
    parts += ["--accumulation", str(config.gradient_accumulation_steps)]
    for name, value in answer.dataset_options.items():
        parts += [f"--{name.replace('_', '-')}", value]
    return shlex.join([*parts, *as_options(config)])
