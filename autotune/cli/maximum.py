"""The command `max`: what is the most that still fits, or the least card that would do."""

from __future__ import annotations

import sys
from typing import Any

import click

from autotune.cli import completion
from autotune.cli.options import COUNT, LENGTH, is_given, knob_options
from autotune.cli.output import print_json
from autotune.errors import ConfigError
from autotune.space.config import METHODS, TASKS
from autotune.space.requirements import predictable
from autotune.space.search_space import with_peft

WHATS = ("sequence-length", "micro-batch", "lora-rank", "model", "gpu")
"""The keys of autotune.search.inverse.questions.QUESTIONS, whose import is slow."""

_NOT_WITH = {
    "sequence-length": ("--seq-len",),
    "micro-batch": ("--micro-batch",),
    "lora-rank": ("--rank",),
    "model": ("--model",),
    "gpu": ("--gpu", "--gpu-mem"),
}
"""Options that say what is asked for."""


@click.command("max")
@click.option("--what", type=click.Choice(WHATS), required=True, help="What to make the most of.")
@click.option(
    "--model",
    metavar="NAME",
    shell_complete=completion.models,
    help="As for `find`; not with --what model, which takes the catalogue.",
)
@click.option("--task", type=click.Choice(TASKS), help="[default: by the model's architecture]")
@click.option(
    "--gpu",
    metavar="NAME",
    shell_complete=completion.cards,
    help="Card to plan for: see `autotune gpus`.",
)
@click.option("--gpu-mem", metavar="SIZE", help="Memory budget: 12GB [default: all of the card].")
@click.option("--seq-len", type=LENGTH, help="Tokens per sample [default: 1024].")
@click.option(
    "--multiple-of", type=COUNT, default=64, help="Of which a sequence length is a multiple."
)
@click.option(
    "--accumulation",
    type=COUNT,
    default=1,
    help="Micro-batches per optimizer step; a second one needs room for gradients that wait.",
)
@click.option(
    "--method",
    "methods",
    type=click.Choice(METHODS),
    multiple=True,
    help="Training method allowed; repeat for several [default: all].",
)
@knob_options
@click.option(
    "--space",
    "space_name",
    default="default",
    metavar="NAME|FILE",
    shell_complete=completion.spaces,
    help="Where free settings take their values from: see `autotune spaces`.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def maximum(
    *,
    what: str,
    model: str | None,
    task: str | None,
    gpu: str | None,
    gpu_mem: str | None,
    seq_len: int | None,
    multiple_of: int,
    accumulation: int,
    methods: tuple[str, ...],
    space_name: str,
    as_json: bool,
    **settings: Any,
) -> None:
    """The most that still fits: context, micro-batch, LoRA rank, model; or the smallest card.

    What is given is fixed; all else is free, and the answer says what it chose. Predicted.

    Example: autotune max --what sequence-length --model Qwen/Qwen2.5-7B --gpu rtx-4090 --method qlora
    """
    from autotune.catalogue import models
    from autotune.report import limits
    from autotune.report.progress import progress_on_stderr
    from autotune.search import budget
    from autotune.search.inverse import pricing, questions
    from autotune.space import space_file
    from autotune.worker.client.forkserver import ForkServer

    _check_options(what, model is not None)
    card, gpu_reason, budget_bytes = None, "", None
    if what != "gpu":
        card, gpu_reason, budget_bytes = budget.choose_card(gpu, gpu_mem)
    source = None if model is None else models.resolve(model)
    length = seq_len or 1024
    if source is not None and what != "sequence-length":
        length = budget.possible_length(source, length, is_given=seq_len is not None)
        budget.check_length(task or source.task, length)
    searched, _ = predictable(space_file.load(space_name))
    if settings["peft"] is not None:
        searched = with_peft(searched, settings.pop("peft"))
        methods = ("peft",)
    methods = tuple(method for method in METHODS if method in methods) or METHODS
    space_file.require_method(searched, methods)
    asked = pricing.Asked(
        source=source,
        task=task,
        gpu=card,
        gpu_reason=gpu_reason,
        budget_bytes=budget_bytes,
        sequence_length=length,
        methods=methods,
        accumulation=accumulation,
        fixed={name: value for name, value in settings.items() if value is not None},
        space=searched,
        multiple_of=multiple_of,
    )
    with progress_on_stderr(quiet=as_json) as progress, ForkServer() as server:
        answer = questions.answer(what, asked, server, progress=progress)
    check = limits.command(answer, name_card=gpu_reason != budget.FOUND)
    if as_json:
        print_json({**answer.to_dict(), "check": check})
    else:
        limits.draw_answer(answer, check, sys.stdout)


def _check_options(what: str, has_model: bool) -> None:
    """ConfigError for what does not go with the question."""
    context = click.get_current_context()
    options = context.command.params
    given = {option.opts[0] for option in options if is_given(context, str(option.name))}
    for option in _NOT_WITH[what]:
        if option in given:
            raise ConfigError(
                f"{option} does not go with --what {what}",
                why="It is what the question asks for",
                remedy="Leave it out",
            )
    if what != "model" and not has_model:
        raise ConfigError(f"--what {what} needs a model", remedy="Give --model")
