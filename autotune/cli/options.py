"""Options that several commands share, and what was typed."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from autotune.cli import completion
from autotune.common.files import STDOUT
from autotune.records.question import ODDS, RANGES, SECONDS, SEQUENCE_LENGTH, Question
from autotune.space.config import METHODS
from autotune.space.dataset import FORMATS, LOSS_ON
from autotune.space.headroom import DEFAULT_ODDS
from autotune.space.knobs import KNOBS, Knob
from autotune.space.trainers import TASK_NAMES
from autotune.store import database


class UserPath(click.Path):
    """A path, `~` its home: shells leave that to the command in `--out=~/answer`.

    `-` is refused where `allow_dash` does not make it stdout or stdin.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value) == STDOUT and not self.allow_dash:
            self.fail("- is no file here. Name one.", param, ctx)
        return super().convert(os.path.expanduser(value), param, ctx)


PATH = UserPath(path_type=Path)
FILE = UserPath(path_type=Path, dir_okay=False)
FILE_OR_DASH = UserPath(path_type=Path, dir_okay=False, allow_dash=True)
COUNT = click.IntRange(*RANGES["effective_batch"])


class Length(click.IntRange):
    """A number of tokens; `8k` is 8 x 1024."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, str) and value[-1:] in ("k", "K") and value[:-1].isdecimal():
            value = int(value[:-1]) * 1024
        return int(super().convert(value, param, ctx))


LENGTH = Length(*RANGES["seq_len"])

one_of = functools.partial(click.Choice, case_sensitive=False)
"""Make the type of an option that takes one of these values, in upper or lower case."""

Command = Callable[..., Any]
Option = Callable[[Command], Command]

json_option: Option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout."
)
task_option: Option = click.option(
    "--task",
    type=one_of(TASK_NAMES),
    help="What the model is trained for [default: by its architecture].",
)
gpu_option: Option = click.option(
    "--gpu",
    "--gpu-file",
    "gpu",
    metavar="NAME|FILE.toml",
    shell_complete=completion.cards,
    help="Card to plan for: see `autotune gpus`; or a file with the figures of your own.",
)
gpu_mem_option: Option = click.option(
    "--gpu-mem",
    metavar="SIZE",
    help="Memory budget: 12GB, 11.5GiB, 24000MB [default: all of the card].",
)


def headroom_options(command: Command) -> Command:
    """Options that say how sure a predicted answer has to be to fit, and what it may take of the host."""
    odds = click.option(
        "--odds",
        type=click.FloatRange(*ODDS),
        metavar="ODDS",
        help=f"How sure a predicted answer has to be to fit, {ODDS[0]:g} to {ODDS[1]:g} "
        f"[default: {DEFAULT_ODDS:g}].",
    )
    headroom = click.option(
        "--headroom",
        metavar="SIZE",
        help="Memory that a predicted answer leaves, instead of what --odds needs: 500MB; 0 for none.",
    )
    host = click.option(
        "--host-mem",
        metavar="SIZE",
        help="Host memory that training may take beside its programs: 64GB; 0 for none [default: any]. Where "
        "it is said, plans of checkpointing (solve) may use it.",
    )
    return odds(headroom(host(command)))


methods_option: Option = click.option(
    "--method",
    "methods",
    type=one_of(METHODS),
    multiple=True,
    help="Training method allowed; repeat for several [default: all].",
)


def storage_option(of: str = "studies") -> Option:
    """The option that names a database."""
    return click.option(
        "--storage", metavar="URL", default=database.DEFAULT_URL, help=f"Database of the {of}."
    )


def stored_command(
    group: click.Group, name: str, *, of: str = "studies"
) -> Callable[[Command], click.Command]:
    """A command of a group whose commands all read a database and know --json."""

    def add(function: Command) -> click.Command:
        return group.command(name)(storage_option(of)(json_option(function)))

    return add


class Minutes(click.FloatRange):
    """A time limit. `nan`, which is in every range, would be none."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        minutes = float(super().convert(value, param, ctx))
        if math.isnan(minutes):
            self.fail(f"{value!r} is no number of minutes.", param, ctx)
        return minutes


class KnobType(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A value of a knob, read as a space's file reads it."""

    def __init__(self, knob: Knob) -> None:
        self.name = knob.name
        self._read = knob.read
        self._is_file = knob.is_file

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> Any:
        typed = int(value) if isinstance(value, str) and value.isdecimal() else value
        if self._is_file:
            from autotune.search import budget

            typed = budget.read_yaml(Path(value))
        try:
            return self._read(typed)
        except ValueError as error:
            message = str(error)  # It names the value itself where that is unknown.
            names_value = message.startswith("unknown ")
            self.fail(message if names_value else f"{str(value)[:40]!r} {message}", param, context)


def knob_options(command: Command) -> Command:
    """An option per knob, None where it is not given."""
    for knob in reversed(KNOBS.values()):
        command = _option(knob)(command)
    return command


def _option(knob: Knob) -> Option:
    if knob.choices == (False, True):
        switch = f"{knob.flag}/--no-{knob.flag.removeprefix('--')}"
        return click.option(switch, knob.name, default=None, help=knob.summary)
    is_closed = knob.choices and not knob.metavar
    kind = one_of(knob.choices) if is_closed else KnobType(knob)
    metavar = knob.metavar or None
    return click.option(knob.flag, knob.name, type=kind, metavar=metavar, help=knob.summary)


def workload_options(command: Command) -> Command:
    """Options that say what is trained, and on which card."""
    options = (
        click.option(
            "--model",
            metavar="NAME",
            shell_complete=completion.models,
            help="Hub id, catalogue name, folder or config.json. Weights are never read.",
        ),
        task_option,
        gpu_option,
        gpu_mem_option,
        headroom_options,
        num_gpus_option,
        click.option("--seq-len", type=LENGTH, default=SEQUENCE_LENGTH, help="Tokens per sample."),
        picture_options,
        teacher_option,
        dataset_options,
        json_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


def num_gpus_option(command: Command) -> Command:
    """Return the option that says how many GPUs share the run."""
    return click.option(
        "--num-gpus",
        type=click.IntRange(*RANGES["num_gpus"]),
        default=1,
        help="GPUs of that kind in the machine: a prediction for each.",
    )(command)


def _only_base(
    context: click.Context, parameter: click.Parameter, paths: tuple[Path, ...]
) -> Path | None:
    """Return the base. Raises BadParameter where there are several, of which the last would win."""
    if len(paths) < 2:
        return next(iter(paths), None)
    raise click.BadParameter(
        f"{', '.join(map(str, paths))}: one base is compared with. Where several files make one run, give "
        "the command that starts it, such as --base 'accelerate launch --config_file fsdp.yaml train.py'.",
        context,
        parameter,
    )


def base_option(what: str) -> Option:
    """Return the option that names the user's own file; `what` it is to the command, in words."""
    return click.option(
        "--base",
        type=PATH,
        multiple=True,
        callback=_only_base,
        metavar="FILE|FOLDER|COMMAND",
        help=f"{what}: train_config.yaml; axolotl's, LLaMA-Factory's, torchtune's or TRL's YAML; "
        "TrainingArguments, PEFT's adapter_config or bitsandbytes' quantization_config as JSON; accelerate's "
        "or DeepSpeed's configuration; a Python program (Trainer, TRL, PEFT, Unsloth), or the shell script "
        "or command that starts it: they are read and never run; or a folder that find has written [default: "
        "TrainingArguments' defaults].",
    )


def picture_options(command: Command) -> Command:
    """Options that say which pictures each sample has, or how much sound."""
    images = click.option(
        "--images",
        type=click.IntRange(*RANGES["images"]),
        metavar="N",
        help="Pictures of each sample, for a model that sees [default: text alone].",
    )
    size = click.option(
        "--image-size", metavar="WxH", help="Size of each picture in pixels: 1024x768."
    )
    seconds = click.option(
        "--audio-seconds",
        type=click.FloatRange(*SECONDS),
        metavar="S",
        help="Seconds of each sample's sound (audio-classification, ctc) [default: the model's own].",
    )
    return images(size(seconds(command)))


def teacher_option(command: Command) -> Command:
    """Return the option that names a teacher."""
    return click.option(
        "--teacher",
        metavar="NAME",
        shell_complete=completion.models,
        help="Model whose next words --model learns (--task distillation), named as --model is; of the same "
        "vocabulary.",
    )(command)


def dataset_options(command: Command) -> Command:
    """Options that name a dataset, and say how it is read."""
    options = (
        click.option(
            "--dataset",
            metavar="NAME",
            help="A .jsonl, .json, .csv, .parquet, a text per line, a folder, or NAME[:SPLIT] of the Hub: "
            "with its lengths, tokens/s counts no padding [default: every sample is --seq-len long].",
        ),
        click.option(
            "--format",
            type=one_of(FORMATS),
            help="What the dataset's samples are [default: recognised].",
        ),
        click.option(
            "--text-field",
            metavar="NAME",
            help="Its text, prompt or messages [default: by the format].",
        ),
        click.option(
            "--answer-field", metavar="NAME", help="Its answer or label [default: by the format]."
        ),
        click.option(
            "--loss-on",
            type=one_of(LOSS_ON),
            help="What a language model learns [default: answers, where the format has some].",
        ),
        click.option(
            "--tokenizer",
            metavar="FOLDER",
            help="Of the dataset, from local files [default: the model's].",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def parted(typed: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (fields of Question, settings that were given) of what was typed."""
    names = {each.name for each in dataclasses.fields(Question)}
    fields = {name: value for name, value in typed.items() if name in names}
    settings = {n: value for n, value in typed.items() if n not in names and value is not None}
    return fields, settings


def is_given(context: click.Context, name: str) -> bool:
    """Whether the user typed the option."""
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def command_line(context: click.Context) -> str:
    """Return the command as typed, without the database's address: a password may be in it."""
    words = ["autotune", str(context.info_name)]
    for option in context.command.params:
        assert option.name is not None
        if option.name == "storage" or not is_given(context, option.name):
            continue
        value = context.params[option.name]
        name = [] if isinstance(option, click.Argument) else [option.opts[0]]
        for each in value if isinstance(value, tuple) else (value,):
            words += name if each is True else [*name, str(each)]
    return shlex.join(words)
