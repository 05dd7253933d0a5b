"""One configuration as it is typed: the options of `estimate` and of `debug trace`."""

from __future__ import annotations

from typing import Any

import click

from autotune.cli.options import (
    COUNT,
    Command,
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
        "--accumulation", type=COUNT, default=1, help="Micro-batches per optimizer step."
    )
    method = click.option("--method", type=one_of(METHODS), default="full", help="Training method.")
    return workload_options(method(knob_options(accumulation(command))))


def question_of(context: click.Context, **typed: Any) -> Question:
    """The question about the one configuration that was typed."""
    method = typed.pop("method")
    fields, settings = parted(typed)
    if (peft := fields.pop("peft")) is not None:
        settings["peft"] = peft
    # Without a method of its own a PeftConfig is a method.
    methods = (method,) if is_given(context, "method") or "peft" not in settings else ()
    if not is_given(context, "seq_len"):
        fields["seq_len"] = None
    return Question(**fields, methods=methods, settings=settings)
