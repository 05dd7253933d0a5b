"""Everything that the options of `find` name, read and checked against each other: what a search takes.

A question that has come from another machine brings what only that one could read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from autotune.catalogue.gpus import Gpu
from autotune.catalogue.models import ModelSource, resolve
from autotune.common.files import Disk, Files
from autotune.errors import ConfigError
from autotune.export.base import own_run
from autotune.export.base.read import BaseRun
from autotune.probe import compiled
from autotune.records.question import EFFECTIVE_BATCH_SIZE, SEQUENCE_LENGTH, FindOptions
from autotune.search import budget
from autotune.space import space_file
from autotune.space.config import METHODS, TrainConfig, Workload
from autotune.space.lengths import Lengths
from autotune.space.search_space import SearchSpace, as_in_base, may_pack, with_peft
from autotune.store import study_names


@dataclass(frozen=True, kw_only=True, slots=True)
class Brought:
    """What was read elsewhere of what the options name."""

    source: ModelSource | None = None
    """None: looked up here."""
    lengths: Lengths | None = None
    """Of the dataset; None: read here."""
    files: Files = field(default_factory=Disk)
    """Those of the base."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What a search takes."""

    source: ModelSource
    workload: Workload
    space: SearchSpace
    run: BaseRun | None
    """What the user trains with so far."""
    base: TrainConfig | None
    """Its configuration, as the search compares with it."""


def read(
    options: FindOptions,
    card: Gpu,
    budget_bytes: int,
    *,
    note: Callable[[str], None],
    brought: Brought,
) -> Inputs:
    """For a search on that card. Raises ConfigError for what cannot be read or used, WorkerError."""
    if options.study is not None:
        study_names.check_name(options.study)  # Before minutes are spent on its answer.
    space = space_file.load(options.space)
    if options.peft is not None:
        space = with_peft(space, options.peft)
    if options.compile_mode is not None:
        space = compiled.with_mode(space, options.compile_mode)
    run = read_run(options, card, note=note, files=brought.files)
    base = None if run is None else run.config
    source = brought.source or resolve(_model_of(options, run))
    num_gpus, length, batch = options.num_gpus, options.seq_len, options.effective_batch
    if base is not None:
        num_gpus = budget.agreed("--num-gpus", num_gpus, base.num_gpus)
        length = budget.agreed("--seq-len", length, base.sequence_length)
        batch = budget.agreed("--effective-batch", batch, base.effective_batch_size)
    num_gpus = num_gpus or 1
    budget.check_backend(options.backend, num_gpus)
    task = options.task or source.task
    length = _possible_length(source, length, note)
    budget.check_length(task, length)
    lengths = brought.lengths
    if options.dataset is not None:
        lengths = lengths or budget.read_lengths(
            options.dataset,
            source,
            length,
            text_field=options.text_field,
            tokenizer=options.tokenizer,
        )
        packs = may_pack(space, task)
        length = budget.longest_batch(lengths, length, packs=packs, note=note)
        if base is not None:
            base = dataclasses.replace(base, sequence_length=length)
    if run is not None and base is not None:
        space = as_in_base(space, base)
        space, base = own_run.searched(space, run, base, task, has_lengths=lengths is not None)
    methods = _methods(options) or METHODS
    space_file.require_method(space, methods)
    workload = Workload(
        model=source.name,
        task=task,
        sequence_length=length,
        lengths=lengths,
        effective_batch_size=budget.shared_batch(batch or EFFECTIVE_BATCH_SIZE, num_gpus),
        methods=methods,
        memory_budget_bytes=budget_bytes,
        num_gpus=num_gpus,
        extra_arguments="{}" if run is None else run.extra_arguments,
    )
    if base is not None:
        what = f"The configuration of {options.base}"
        budget.check_rules(base, workload, card, source, what=what)
    return Inputs(source=source, workload=workload, space=space, run=run, base=base)


def read_run(
    options: FindOptions, card: Gpu, *, note: Callable[[str], None], files: Files
) -> BaseRun | None:
    """The run of the options' base; None where they name none. Raises ConfigError."""
    if options.base is None:
        return None
    return own_run.read_run(
        options.base,
        seq_len=options.seq_len,
        methods=_methods(options),
        num_gpus=options.num_gpus or 1,
        effective_batch=options.effective_batch or EFFECTIVE_BATCH_SIZE,
        has_bf16=card.has_bfloat16,
        usual_length=SEQUENCE_LENGTH,
        note=note,
        files=files,
    )


def _methods(options: FindOptions) -> tuple[str, ...]:
    """In the order of METHODS, however they were typed: the first is what the defaults would train."""
    given = options.methods if options.peft is None else (*options.methods, "peft")
    return tuple(method for method in METHODS if method in given)


def _model_of(options: FindOptions, run: BaseRun | None) -> str:
    model = options.model or (None if run is None else run.model)
    if model is None:
        raise ConfigError(
            "There is no model",
            why="No file that names one was given" if run is None else f"{run.path} names none",
            remedy="Give --model with a Hub id, a folder or a config.json (autotune models)",
        )
    return model


def _possible_length(source: ModelSource, length: int | None, note: Callable[[str], None]) -> int:
    possible = budget.possible_length(
        source, length or SEQUENCE_LENGTH, is_given=length is not None
    )
    if possible != (length or SEQUENCE_LENGTH):
        note(
            f"{source.short_name} has positions for {possible} tokens: --seq-len {possible} is taken."
        )
    return possible
