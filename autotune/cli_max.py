"""The command `max`: what is the most that still fits, or the least card that would do."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from autotune.config import ATTENTIONS, METHODS, PRECISIONS, QUANTIZATIONS, TASKS
from autotune.errors import ConfigError
from autotune.optimizers import OPTIMIZERS

WHATS = ("sequence-length", "micro-batch", "lora-rank", "model", "gpu")
"""The keys of autotune.inverse.QUESTIONS, whose import is slow."""

_NUMBER = click.IntRange(1, 1_000_000)
_LENGTH = click.IntRange(1, 10_000_000)

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
    help="As for `find`; not with --what model, which takes the catalogue.",
)
@click.option("--task", type=click.Choice(TASKS), help="[default: by the model's architecture]")
@click.option("--gpu", metavar="NAME", help="Card to plan for: see `autotune gpus`.")
@click.option("--gpu-mem", metavar="SIZE", help="Memory budget: 12GB [default: all of the card].")
@click.option("--seq-len", type=_LENGTH, help="Tokens per sample [default: 1024].")
@click.option(
    "--multiple-of", type=_NUMBER, default=64, help="Of which a sequence length is a multiple."
)
@click.option("--micro-batch", "micro_batch_size", type=_NUMBER, help="[default: free]")
@click.option(
    "--accumulation",
    type=_NUMBER,
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
@click.option("--rank", "lora_rank", type=_NUMBER, help="Of the adapter [default: free].")
@click.option(
    "--targets",
    "lora_targets",
    metavar="NAMES",
    help="all-linear, attention, or modules joined by commas [default: free].",
)
@click.option(
    "--quantization",
    type=click.Choice(tuple(QUANTIZATIONS)),
    help="Storage of the frozen weights [default: free].",
)
@click.option("--precision", type=click.Choice(tuple(PRECISIONS)), help="[default: free]")
@click.option("--optimizer", type=click.Choice(tuple(OPTIMIZERS)), help="[default: free]")
@click.option(
    "--checkpointing",
    "activation_checkpointing",
    metavar="none|full|every-N",
    help="Layers whose activations are computed again [default: free].",
)
@click.option(
    "--offload/--no-offload",
    "activation_offloading",
    default=None,
    help="Checkpointed activations wait in host memory [default: free].",
)
@click.option("--attention", type=click.Choice(ATTENTIONS), help="[default: free]")
@click.option(
    "--space",
    "space_name",
    default="default",
    metavar="NAME|FILE",
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
    lora_targets: str | None,
    activation_checkpointing: str | None,
    space_name: str,
    as_json: bool,
    **settings: Any,
) -> None:
    """The most that still fits: context, micro-batch, LoRA rank, model; or the smallest card.

    What is given is fixed; all else is free, and the answer says what it chose. Predicted.

    Example: autotune max --what sequence-length --model Qwen/Qwen2.5-7B --gpu rtx-4090 --method qlora
    """
    from autotune import cases, inputs, inverse, models, space_file
    from autotune.forkserver import ForkServer
    from autotune.report import limits
    from autotune.report.progress import progress_on_stderr

    _check_options(what, model is not None)
    card, gpu_reason, budget_bytes = None, "", None
    if what != "gpu":
        card, gpu_reason, budget_bytes = inputs.choose_card(gpu, gpu_mem)
    source = None if model is None else models.resolve(model)
    length = seq_len or 1024
    if source is not None and what != "sequence-length":
        length = inputs.possible_length(source, length, is_given=seq_len is not None)
    if lora_targets is not None:
        settings["lora_targets"] = inputs.lora_targets(lora_targets)
    if activation_checkpointing is not None:
        settings["activation_checkpointing"] = _interval(activation_checkpointing)
    asked = cases.Asked(
        source=source,
        task=task,
        gpu=card,
        gpu_reason=gpu_reason,
        budget_bytes=budget_bytes,
        sequence_length=length,
        methods=tuple(dict.fromkeys(methods)) or METHODS,
        accumulation=accumulation,
        fixed={name: value for name, value in settings.items() if value is not None},
        space=space_file.load(space_name),
        multiple_of=multiple_of,
    )
    with progress_on_stderr(quiet=as_json) as progress, ForkServer() as server:
        answer = inverse.answer(what, asked, server, progress=progress)
    check = limits.command(answer, name_card=gpu_reason != inputs.FOUND)
    if as_json:
        print(json.dumps({**answer.to_dict(), "check": check}, indent=2, allow_nan=False))
    else:
        limits.draw_answer(answer, check, sys.stdout)


def _interval(text: str) -> int:
    from autotune.space_file import checkpointing

    try:
        return checkpointing(text)
    except ValueError as error:
        raise ConfigError(
            f"--checkpointing {text[:40]!r} cannot be used", why=str(error)
        ) from error


def _check_options(what: str, has_model: bool) -> None:
    """ConfigError for what does not go with the question."""
    context = click.get_current_context()
    given = {
        option.opts[0]
        for option in context.command.params
        if context.get_parameter_source(str(option.name)) is click.core.ParameterSource.COMMANDLINE
    }
    for option in _NOT_WITH[what]:
        if option in given:
            raise ConfigError(
                f"{option} does not go with --what {what}",
                why="It is what the question asks for",
                remedy="Leave it out",
            )
    if what != "model" and not has_model:
        raise ConfigError(f"--what {what} needs a model", remedy="Give --model")
