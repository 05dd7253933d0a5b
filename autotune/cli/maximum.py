"""The command `max`: what is the most that still fits, or the least card that would do."""

from __future__ import annotations

import sys
from typing import Any

import click

from autotune.cli import completion
from autotune.cli.options import COUNT, LENGTH, is_given, knob_options
from autotune.cli.output import print_json
from autotune.errors import ConfigError
from autotune.records.question import Question
from autotune.space.config import METHODS, TASKS

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
    from autotune.report import limits as drawing
    from autotune.report.progress import progress_on_stderr
    from autotune.search.inverse.limits import limits

    _check_options(what, model is not None)
    question = Question(
        model=model,
        task=task,
        gpu=gpu,
        gpu_mem=gpu_mem,
        seq_len=seq_len,
        accumulation=accumulation,
        methods=methods,
        peft=settings.pop("peft"),
        space=space_name,
        settings={name: value for name, value in settings.items() if value is not None},
    )
    with progress_on_stderr(quiet=as_json) as progress:
        found = limits(question, what, multiple_of=multiple_of, progress=progress)
    check = drawing.command(found)
    if as_json:
        print_json({**found.to_dict(), "check": check})
    else:
        drawing.draw_answer(found, check, sys.stdout)


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
