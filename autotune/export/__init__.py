"""Files that other programs load: one module per file, all of them in EXPORTERS.

An Exporter turns the answer into text and touches no disk; `export_files` writes all of them or
none. Values reach a Python file only as literals (`ascii`, the escapes included) and other files
only through their format's own library, so that a model's name cannot become code.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune.common import files
from autotune.errors import ConfigError
from autotune.export import (
    accelerate_config,
    adapter_config,
    axolotl,
    deepspeed_json,
    llama_factory,
    model_card,
    quantization_config,
    result_json,
    targets,
    torchtune,
    train_config,
    train_embeddings_py,
    train_py,
    train_trl_py,
    training_args,
    trl_config,
    unsloth_py,
)
from autotune.export.carried import Unsaid
from autotune.export.exporter import Exporter
from autotune.export.own_modules import with_adaptable_modules, with_own_modules
from autotune.space.config import TrainConfig, Workload
from autotune.space.parallelisms import PARALLELISMS
from autotune.space.trainers import TRL_BY_TASK
from autotune.space.words import describe

EXPORTERS = (
    train_py.EXPORTER, training_args.EXPORTERS[0], train_config.EXPORTER, result_json.EXPORTER
)  # fmt: skip
"""Exporters of the files that every answer has, in the folder that was named."""

BESIDE = (
    accelerate_config.EXPORTER,
    deepspeed_json.EXPORTER,
    *(train_trl_py.EXPORTERS[row.command] for row in TRL_BY_TASK.values()),
    train_embeddings_py.EXPORTER,
)
"""Exporters of files that lie there as well: what `accelerate launch` needs where GPUs share a run, and the
programs of tasks that train.py does not train."""

FURTHER = (
    *training_args.EXPORTERS[1:],
    trl_config.EXPORTERS[0],
    train_trl_py.EXPORTERS["sft"],
    *trl_config.EXPORTERS[1:],
    *(
        module.EXPORTER
        for module in (
            adapter_config, quantization_config, axolotl, llama_factory,
            torchtune, unsloth_py, model_card,
        )
    ),
)  # fmt: skip
"""Exporters of the files in FURTHER_FOLDER, which keeps the others in sight."""
FURTHER_FOLDER = "exports"

ALL: dict[str, Exporter] = {exporter.name: exporter for exporter in (*EXPORTERS, *BESIDE, *FURTHER)}
"""Exporters by the value of `--format` that names them."""


def exporters_for(config: TrainConfig, workload: Workload) -> tuple[Exporter, ...]:
    """Return the exporters that have something to say of the answer."""
    return tuple(each for each in ALL.values() if not why_not(each, workload, config))


def why_not(exporter: Exporter, workload: Workload, config: TrainConfig) -> str:
    """Return why there is no such file for this answer; empty where there is one."""
    if PARALLELISMS[config.parallelism].schedules:
        return f"No trainer that is installed runs {config.parallelism}, which is priced alone"
    if reason := exporter.lacks(workload):
        return reason
    if not exporter.applies(config):
        return f"It cannot express this configuration: {describe(config)}"
    return ""


def check_targets(exporters: Sequence[Exporter], chosen: Sequence[targets.TargetVersion]) -> None:
    """Check that these versions can be named for these files. Raises ConfigError."""
    if not chosen:
        return
    can = ", ".join(each.name for each in ALL.values() if each.libraries)
    for exporter in exporters:
        if not exporter.libraries:
            raise ConfigError(
                f"The format {exporter.name} cannot have names of another version",
                remedy=f"Leave --target out, or name formats of these: {can}",
            )
        for library in set(exporter.libraries) - {target.library for target in chosen}:
            if importlib.util.find_spec(library) is None:
                raise ConfigError(
                    f"The format {exporter.name} has names of {library} too, which is not installed",
                    remedy=f"Name its version too: --target {library}=={targets.newest(library)}",
                )
    for target in chosen:
        if not any(target.library in exporter.libraries for exporter in exporters):
            names = ", ".join(exporter.name for exporter in exporters)
            raise ConfigError(
                f"--target {target.library}=={target.version} has no effect on {names}",
                why=f"There are no names of {target.library} in it",
            )


def unsaid(exporter: Exporter, workload: Workload, config: TrainConfig) -> tuple[Unsaid, ...]:
    """Each setting, of the user's extra ones too, that the exporter's file does not carry."""
    return (*exporter.cannot_express(config), *exporter.has_no_words_for(workload))


def unsaid_lines(
    exporters: Sequence[Exporter],
    workload: Workload,
    config: TrainConfig,
    *,
    in_full: bool = False,
) -> list[str]:
    """Return lines on what files do not carry; those that leave out the same share a line.

    Files about one part alone are in one line together, or `in_full` in lines like the others.
    """
    parts: dict[str, list[str]] = {}
    losses: dict[str, list[str]] = {}
    for exporter in exporters:
        part = "" if in_full else exporter.part
        words = "; ".join(map(str, unsaid(exporter, workload, config)))
        if part:
            parts.setdefault(part, []).append(exporter.filename)
        elif words:
            losses.setdefault(words, []).append(exporter.filename)
    lines = [f"not in {', '.join(names)}: {words}" for words, names in losses.items()]
    if parts:
        said = (f"{part} in {', '.join(names)}" for part, names in parts.items())
        lines.insert(0, f"apart: {'; '.join(said)}")
    return lines


def unsaid_names(
    exporters: Sequence[Exporter], workload: Workload, config: TrainConfig
) -> dict[str, tuple[str, ...]]:
    """Return settings that some files do not carry, and which files, but for those about one part alone."""
    files: dict[str, list[str]] = {}
    for exporter in exporters:
        if not exporter.part:
            settings = {each.setting for each in unsaid(exporter, workload, config)}
            for setting in sorted(settings):
                files.setdefault(setting, []).append(exporter.filename)
    return {setting: tuple(names) for setting, names in files.items()}


def export_paths(folder: Path, exporters: Sequence[Exporter] = EXPORTERS) -> list[Path]:
    """Return where `export_files` will write, in its order: known beforehand, for the result's `files`."""
    further = folder / FURTHER_FOLDER
    return [
        (further if exporter in FURTHER else folder) / exporter.filename for exporter in exporters
    ]


def export_files(
    folder: Path,
    *,
    workload: Workload,
    config: TrainConfig,
    result: Mapping[str, object],
    exporters: Sequence[Exporter] | None = None,
) -> list[Path]:
    """Write the files into `folder`, which is created; return their paths.

    A file is written beside its place and moved there, and moving starts when all are written:
    a full disk leaves the earlier files as they were. Raises StorageError when writing fails.
    `exporters` None: exporters_for(config, workload).
    """
    exporters = exporters_for(config, workload) if exporters is None else exporters
    texts = {
        path: text_of(exporter, workload=workload, config=config, result=result)
        for path, exporter in zip(export_paths(folder, exporters), exporters, strict=True)
    }
    write_texts(texts)
    return list(texts)


def text_of(
    exporter: Exporter, *, workload: Workload, config: TrainConfig, result: Mapping[str, object]
) -> str:
    """Return the text of a file; those of other programs have the model's own names for modules.

    All but ours name them where PEFT refuses one of those that are meant.
    """
    if exporter is not train_config.EXPORTER:
        config = with_adaptable_modules(config, workload.model)
    if exporter in FURTHER:
        config = with_own_modules(config, workload.model)
    return exporter.write(workload=workload, config=config, result=result)


def write_texts(texts: Mapping[Path, str]) -> None:
    """Write all of the files or none; their folders are created. Raises StorageError."""
    folder = next(iter(texts)).parent
    pieces = {path: [text] for path, text in texts.items()}
    files.write_all(pieces, what="The files", to=folder, kind="folder")
