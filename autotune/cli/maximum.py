"""The command `max`: what is the most that still fits, or the least card that would do."""

from __future__ import annotations

import sys
from typing import Any

import click

from autotune.cli import completion
from autotune.cli.options import (
    COUNT,
    LENGTH,
    dataset_options,
    gpu_mem_option,
    gpu_option,
    headroom_options,
    is_given,
    json_option,
    knob_options,
    methods_option,
    num_gpus_option,
    one_of,
    parted,
    task_option,
)
from autotune.cli.output import note, print_json
from autotune.errors import ConfigError
from autotune.records.question import Question

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
@click.option("--what", type=one_of(WHATS), required=True, help="What to make the most of.")
@click.option(
    "--model",
    metavar="NAME",
    shell_complete=completion.models,
    help="As for `find`; not with --what model, which takes the catalogue.",
)
@task_option
@gpu_option
@gpu_mem_option
@headroom_options
@num_gpus_option
@click.option("--seq-len", type=LENGTH, help="Tokens per sample [default: 1024].")
@dataset_options
@click.option(
    "--multiple-of", type=COUNT, default=64, help="Of which a sequence length is a multiple."
)
@click.option(
    "--accumulation",
    type=COUNT,
    default=1,
    help="Micro-batches per optimizer step; a second one needs room for gradients that wait.",
)
@methods_option
@knob_options
@click.option(
    "--space",
    default="default",
    metavar="NAME|FILE",
    shell_complete=completion.spaces,
    help="Where free settings take their values from: see `autotune spaces`.",
)
@json_option
@click.pass_context
def maximum(
    context: click.Context, /, *, what: str, multiple_of: int, as_json: bool, **typed: Any
) -> None:
    """The most that still fits: context, micro-batch, LoRA rank, model; or the smallest card.

    What is given is fixed; all else is free, and the answer says what it chose. Predicted.

    Example: autotune max --what sequence-length --model Qwen/Qwen2.5-7B --gpu rtx-4090 --method qlora
    """
    from autotune.report import limits as drawing
    from autotune.report.progress import progress_on_stderr
    from autotune.search.dataset import note_unread
    from autotune.search.inverse.limits import limits

    _check_options(context, what)
    fields, settings = parted(typed)
    question = Question(**fields, settings=settings)
    note_unread(question, note)
    with progress_on_stderr(quiet=as_json) as progress:
        found = limits(question, what, multiple_of=multiple_of, progress=progress)
    check = drawing.command(found)
    if as_json:
        print_json({**found.to_dict(), "check": check})
    else:
        drawing.draw_answer(found, check, sys.stdout)


def _check_options(context: click.Context, what: str) -> None:
    """ConfigError for what does not go with the question."""
    options = context.command.params
    given = {option.opts[0] for option in options if is_given(context, str(option.name))}
    for option in _NOT_WITH[what]:
        if option in given:
            raise ConfigError(
                f"{option} does not go with --what {what}",
                why="It is what the question asks for",
                remedy="Leave it out",
            )
    if what != "model" and context.params["model"] is None:
        raise ConfigError(f"--what {what} needs a model", remedy="Give --model")
