"""`--base FILE`: the user's training so far, and their own file with the answer in it."""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from autotune.export import export_paths, mapping_write
from autotune.export.accelerate_config import as_variable
from autotune.export.base.edit import KeyEdit
from autotune.export.base.mapping_read import in_words
from autotune.export.base.parts import RunFile, all_of
from autotune.export.base.read import BaseRun, changes, edited_base, read_base
from autotune.export.exporter import Exporter
from autotune.export.mapping import value_at
from autotune.space.config import TrainConfig
from autotune.space.parallelisms import ON_ONE_GPU_TOO
from autotune.space.search_space import SearchSpace, around, usual_batching

YOURS = "yours"
"""Folder, beside the answer's files, for the edited copies of the user's."""


def read_run(
    path: Path,
    *,
    seq_len: int | None,
    methods: Sequence[str] = (),
    num_gpus: int,
    effective_batch: int,
    has_bf16: bool,
    usual_length: int,
    model: str | None = None,
    task: str | None = None,
    note: Callable[[str], None],
) -> BaseRun:
    """Return the run of the file, as a search takes it.

    Another trainer's may say nothing of GPUs, of the length of a sequence, of the method, or of batches: then
    these are taken.
    """
    method = methods[0] if len(methods) == 1 else "full"
    run = read_base(
        path,
        sequence_length=seq_len or usual_length,
        method=method,
        has_bf16=has_bf16,
        samples=effective_batch,
        num_gpus=num_gpus,
        model=model,
        task=task,
    )
    if run.target is None:
        return run
    for words in run.notes:
        note(f"{run.path.name}: {words}.")
    if run.taken:
        taken = ", ".join(f"{name}: {getattr(run.config, name)}" for name in run.taken)
        note(f"{run.path.name} does not say how it trains: {taken} are assumed.")
    if not run.has_length and seq_len is None:
        note(
            f"{run.path.name} does not say how long a sequence is: --seq-len {usual_length} is assumed."
        )
    if run.has_gpus:
        return run
    parallelism = run.config.parallelism
    replaced = dict(run.replaced)
    if num_gpus == 1 and parallelism == "ddp":
        parallelism = "none"
    is_idle = num_gpus == 1 and parallelism not in ("none", *ON_ONE_GPU_TOO)
    if is_idle and mapping_write.allows(run.target, run.config.method, "parallelism", "none"):
        note(
            f"{run.path.name}: {parallelism} shares nothing on one GPU: the base is the run without it "
            "(--num-gpus says how many GPUs there are)."
        )
        replaced |= {"parallelism": parallelism, "no_sync": run.config.no_sync}
        parallelism = "none"
    if num_gpus > 1 and parallelism == "none":
        parallelism = run.target.several_gpus
        if gone := _gone_with(run, parallelism):
            note(
                f"{run.path.name}: {gone} deals the layers out over GPUs in one process, and {parallelism} "
                "refuses such a model: the base is the run without it."
            )
            replaced["parallelism"] = "none"
    config = dataclasses.replace(
        run.config,
        num_gpus=num_gpus,
        parallelism=parallelism,
        no_sync=run.config.no_sync and parallelism != "none",
    )
    return dataclasses.replace(run, config=config, replaced=replaced)


def _gone_with(run: BaseRun, parallelism: str) -> str:
    """Return the key, in words, that has to go from the run's files with that way to share; empty: none."""
    assert run.target is not None
    content = all_of(run.parts)
    rows = (row for row in run.target.rows if row.ours == ("parallelism",))
    told = (choice.theirs for row in rows if (choice := row.choice_for((parallelism,))) is not None)
    keys = (key for theirs in told for key, value in theirs.items() if value is None)
    return next((in_words(key) for key in keys if value_at(content, key)), "")


def searched(
    space: SearchSpace, run: BaseRun, base: TrainConfig, task: str, *, has_lengths: bool
) -> tuple[SearchSpace, TrainConfig]:
    """Return the space as far as the run's trainer has words for it, and the base to compare with.

    Without a dataset nobody knows what padding costs: then batches are filled as the run has it.
    """
    if run.target is None:
        return space, base
    if not has_lengths and base.batching == "packed":
        base = dataclasses.replace(base, batching=usual_batching(task))
    return around(space, base, functools.partial(mapping_write.allows, run.target)), base


def with_edited(
    exporters: Sequence[Exporter], folder: Path, run: BaseRun, base: TrainConfig
) -> tuple[Exporter, ...]:
    """Return the exporters, and the user's files among them, in YOURS: none has the place of ours."""
    if run.target is None:
        return tuple(exporters)
    theirs = {part.path.resolve() for part in run.parts}
    copies = (
        edited_base(run, base, part, f"{YOURS}/{name_of_copy(part, folder)}") for part in run.parts
    )
    kept = (
        each
        for each, path in zip(exporters, export_paths(folder, exporters), strict=True)
        if path.resolve() not in theirs
    )
    return (*kept, *copies)


def name_of_copy(part: RunFile, folder: Path) -> str:
    """Return the name of a file's edited copy: another where the file itself lies there."""
    path = part.path
    is_theirs = (folder / YOURS / path.name).resolve() == path.resolve()
    return f"{path.stem}.answer{path.suffix}" if is_theirs else path.name


def command(run: BaseRun, folder: Path, answer: TrainConfig) -> str:
    """Return the command that trains with the edited copy; empty where only train.py does."""
    if run.target is None or not run.target.launch:
        return ""
    number = answer.num_gpus
    gpus = run.target.launch_several.format(number=number) if number > 1 else ""
    file = shlex.quote(str(folder / YOURS / name_of_copy(run.parts[0], folder)))
    return run.target.launch.format(file=file, gpus=gpus)


def changed(run: BaseRun, base: TrainConfig, answer: TrainConfig) -> list[str]:
    """Return in words what changes in the user's file, and what could not be said in it."""
    if run.target is None:
        return []
    made = changes(run, base, answer)
    notes: list[str] = []
    for part in run.parts:
        _, keeps_comments, left = part.edited(made)
        ours = [change for change in made if part.has(change.key)]
        words = _listed(change for change in ours if change not in left)
        notes.append(
            f"your {part.path.name} is written into {YOURS}/, with {words or 'no change'}."
        )
        if left:
            notes.append(f"change {part.path.name} there yourself: {_listed(left)}.")
        if not keeps_comments:
            notes.append(
                f"its comments are lost: {part.path.name} has YAML that is not edited in place."
            )
    unsaid = mapping_write.unsaid(run.target, answer)
    if answer.batching == base.batching:  # as the task has it, whatever the file's words are
        unsaid = tuple(each for each in unsaid if each.setting != "batching")
    elsewhere = [each for each in unsaid if each.setting in run.target.elsewhere]
    notes += [f"not put into it: {each}." for each in unsaid if each not in elsewhere]
    if elsewhere:
        notes.append(
            f"not put into it, but into the other files: {'; '.join(map(str, elsewhere))}."
        )
    return notes


def _listed(changes: Iterable[KeyEdit]) -> str:
    return ", ".join(
        f"{in_words(change.key)} gone"
        if change.value is None
        else f"{in_words(change.key)}: {as_variable(change.value)}"
        for change in changes
    )
