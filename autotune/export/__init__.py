"""Files that other programs load: one module per file, all of them in EXPORTERS.

An exporter is a module with `name`, `filename` and `write`. It turns the answer into text and
touches no disk; `export_files` writes all of them or none. Values reach a Python file only as
literals (`ascii`, the escapes included) and other files only through their format's own library,
so that a model's name cannot become code.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from autotune.config import TrainConfig, Workload
from autotune.errors import StorageError
from autotune.export import (
    accelerate_config,
    axolotl,
    deepspeed_json,
    llama_factory,
    result_json,
    train_config,
    train_py,
    training_args,
)


class Exporter(Protocol):
    """A TrainConfig as another program's file."""

    @property
    def name(self) -> str:
        """What `--format` calls it."""

    @property
    def filename(self) -> str: ...

    def write(
        self, *, workload: Workload, config: TrainConfig, result: Mapping[str, object]
    ) -> str:
        """The whole content of the file; `result` is the object of `find --json`."""


EXPORTERS: tuple[Exporter, ...] = (train_py, training_args, train_config, result_json)


_WHERE_THEY_APPLY = (axolotl, llama_factory, accelerate_config, deepspeed_json)


def exporters_for(config: TrainConfig) -> tuple[Exporter, ...]:
    """Those of every answer, of trainers that know its method, and of GPUs that share a run."""
    return (*EXPORTERS, *(module for module in _WHERE_THEY_APPLY if module.applies(config)))


def export_paths(folder: Path, exporters: Sequence[Exporter] = EXPORTERS) -> list[Path]:
    """Where `export_files` will write, in its order: known beforehand, for the result's `files`."""
    return [folder / exporter.filename for exporter in exporters]


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
    `exporters` None: exporters_for(config).
    """
    exporters = exporters_for(config) if exporters is None else exporters
    texts = {
        path: exporter.write(workload=workload, config=config, result=result)
        for path, exporter in zip(export_paths(folder, exporters), exporters, strict=True)
    }
    suffix = f".{secrets.token_hex(4)}.tmp"
    places = {path: path.with_name(f".{path.name}{suffix}") for path in texts}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, place in places.items():
            with place.open("x", encoding="utf-8", newline="\n") as file:
                file.write(texts[path])
                file.flush()
                os.fsync(file.fileno())
        for path, place in places.items():
            place.replace(path)
    except OSError as error:
        raise StorageError(
            f"The files cannot be written to {folder}",
            why=error.strerror or str(error),
            remedy="Free some space, check the permissions, or name another folder with --out",
        ) from error
    finally:
        for place in places.values():
            with contextlib.suppress(OSError):
                place.unlink()
    return list(texts)
