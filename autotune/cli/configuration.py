"""One configuration as it is typed: the options of `estimate` and of `debug trace`, and what they name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.options import COUNT, Command, is_given, knob_options, workload_options
from autotune.cli.output import note
from autotune.space.config import METHODS, TrainConfig, Workload
from autotune.space.search_space import usual_batching

if TYPE_CHECKING:
    from autotune.catalogue.gpus import Gpu
    from autotune.catalogue.models import ModelSource


def configuration_options(command: Command) -> Command:
    """Options that say what is trained, on which card and how."""
    accumulation = click.option(
        "--accumulation", type=COUNT, default=1, help="Micro-batches per optimizer step."
    )
    method = click.option(
        "--method", type=click.Choice(METHODS), default="full", help="Training method."
    )
    return workload_options(method(knob_options(accumulation(command))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Typed:
    """A configuration, and what it is asked of."""

    source: ModelSource
    workload: Workload
    config: TrainConfig
    gpu: Gpu
    gpu_reason: str


def resolve_typed(
    context: click.Context,
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
    **settings: Any,
) -> Typed:
    """Look up the model, the card and the dataset. Raises ConfigError for what cannot work."""
    from autotune.catalogue.models import resolve
    from autotune.search import budget
    from autotune.space.defaults import default_base

    given = {name: value for name, value in settings.items() if value is not None}
    if "peft" in given and not is_given(context, "method"):
        method = "peft"
    card, gpu_reason, budget_bytes = budget.choose_card(gpu, gpu_mem)
    source = resolve(model)
    length = budget.possible_length(source, seq_len, is_given=is_given(context, "seq_len"))
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
    return Typed(source=source, workload=workload, config=config, gpu=card, gpu_reason=gpu_reason)
