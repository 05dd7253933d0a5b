"""`--base FILE`: what the user trains with so far, and their own file with the answer in it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from autotune.config import TrainConfig
from autotune.export import Exporter, mapping
from autotune.export.edit import edited
from autotune.export.read import BaseRun, EditedBase, changes, read_base
from autotune.space import SearchSpace, around, usual_batching


def read_run(
    path: Path,
    *,
    seq_len: int | None,
    methods: Sequence[str] = (),
    num_gpus: int,
    has_bf16: bool,
    usual_length: int,
    note: Callable[[str], None],
) -> BaseRun:
    """The run of the file. Another trainer's says nothing of GPUs, and perhaps nothing of the length
    of a sequence or the method: then these are taken."""
    method = methods[0] if len(methods) == 1 else "full"
    run = read_base(path, sequence_length=seq_len or usual_length, method=method, has_bf16=has_bf16)
    if run.target is None:
        return run
    for words in run.notes:
        note(f"{path.name}: {words}.")
    if not run.has_length and seq_len is None:
        note(f"{path.name} does not say how long a sequence is: --seq-len {usual_length} is taken.")
    parallelism = "ddp" if num_gpus > 1 else "none"
    config = dataclasses.replace(run.config, num_gpus=num_gpus, parallelism=parallelism)
    return dataclasses.replace(run, config=config)


def searched(
    space: SearchSpace, run: BaseRun, base: TrainConfig, task: str, *, has_lengths: bool
) -> tuple[SearchSpace, TrainConfig]:
    """The space as far as the run's trainer has words for it, and the base to compare with.

    Without a dataset nobody knows what padding costs: then how batches are filled is left alone.
    """
    if run.target is None:
        return space, base
    if not has_lengths:
        base = dataclasses.replace(base, batching=usual_batching(task))
    return around(space, base, functools.partial(mapping.allows, run.target)), base


def with_edited(
    exporters: Sequence[Exporter], folder: Path, run: BaseRun, base: TrainConfig
) -> tuple[Exporter, ...]:
    """The exporters, and the user's file among them: in the place of ours if it has that name."""
    if run.target is None:
        return tuple(exporters)
    name = run.path.name
    if (folder / name).resolve() == run.path.resolve():
        name = f"{run.path.stem}.answer{run.path.suffix}"  # theirs is never written over
    copy = EditedBase(run=run, base=base, filename=name)
    return (*(each for each in exporters if each.filename != name), copy)


def changed(run: BaseRun, base: TrainConfig, answer: TrainConfig) -> list[str]:
    """What the user's file has other than before, and what could not be said in it, in words."""
    if run.target is None:
        return []
    made = changes(run, base, answer)
    _, keeps_comments = edited(run.text, made)
    words = ", ".join(
        f"{change.key} gone" if change.value is None else f"{change.key}: {_shown(change.value)}"
        for change in made
    )
    notes = [
        f"your {run.path.name} is written beside the other files, with {words or 'no change'}."
    ]
    if not keeps_comments:
        notes.append(
            f"its comments are lost: {run.path.name} has YAML that is not edited in place."
        )
    notes += [f"not put into it: {words}." for words in mapping.unsaid(run.target, answer)]
    return notes


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
