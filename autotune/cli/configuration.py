"""One configuration as it is typed: the options of `estimate` and of `debug trace`."""

from __future__ import annotations

from typing import Any

import click

from autotune.cli.options import (
    COUNT,
    Command,
    base_option,
    is_given,
    knob_options,
    one_of,
    parted,
    workload_options,
)
from autotune.records.question import Question
from autotune.space.config import METHODS


def configuration_options(command: Command) -> Command:
    """Options that say what is trained, on which card and how."""
    accumulation = click.option(
        "--accumulation",
        type=COUNT,
        default=1,
        help="Micro-batches per optimizer step; by default completions have a whole group.",
    )
    method = click.option("--method", type=one_of(METHODS), default="full", help="Training method.")
    base = base_option("Your own settings, which the options beside it overrule")
    command = method(base(knob_options(accumulation(command))))
    return workload_options(command)


def question_of(context: click.Context, **typed: Any) -> Question:
    """The question about the one configuration that was typed."""
    method = typed.pop("method")
    fields, settings = parted(typed)
    if (peft := fields.pop("peft")) is not None:
        settings["peft"] = peft
    # Without a method of its own a PeftConfig is a method, and a base has one.
    has_method = "peft" in settings or fields["base"] is not None
    methods = (method,) if is_given(context, "method") or not has_method else ()
    for name in ("seq_len", "num_gpus", "accumulation"):
        if not is_given(context, name):
            fields[name] = None
    return Question(**fields, methods=methods, settings=settings)
