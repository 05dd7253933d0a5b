"""The files of an answer in a folder: every export that fits it, and the user's own file with it applied."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from autotune import export
from autotune.common.files import read_text
from autotune.common.units import MIB
from autotune.errors import ConfigError
from autotune.export import result_json
from autotune.export.base import own_run
from autotune.export.base.read import BaseRun
from autotune.export.exporter import Exporter
from autotune.records.answer import Answer
from autotune.store.stored_answers import library_versions

MAX_RESULT_BYTES = 16 * MIB
_FOLDERS = (export.FURTHER_FOLDER, own_run.YOURS)
"""Folders of an answer's files, in its own."""
SAME_TIME_SECONDS = 5.0
"""Most seconds between the files of one answer: they are written one after the other, result.json among the
first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerFiles:
    """The files that are to be written for an answer, and what is to be said of them."""

    answer: Answer
    exporters: tuple[Exporter, ...]
    result: dict[str, Any]
    """The object of `find --json`; its `files` are these."""
    folder: Path | None
    """Folder of the files; None: nothing is written."""
    run: BaseRun | None
    """The run that the user trains with so far."""

    @classmethod
    def of(cls, answer: Answer, *, folder: Path | None, run: BaseRun | None) -> AnswerFiles:
        exporters = export.exporters_for(answer.exported, answer.workload)
        if run is not None and folder is not None:
            exporters = own_run.with_edited(exporters, folder, run, answer.base)
        places = [] if folder is None else export.export_paths(folder, exporters)
        return cls(
            answer=answer,
            exporters=exporters,
            result={
                **answer.to_dict(),
                "versions": library_versions(),
                "files": [str(path) for path in places],
            },
            folder=folder,
            run=run,
        )

    def write(self) -> list[Path]:
        """Write all of the files or none, and return them.

        Those of an earlier answer go, so that no adapter_config.json lies beside a full fine-tune; not those
        that somebody has changed since. Raises StorageError.
        """
        if self.folder is None:
            return []
        earlier = _untouched_in(self.folder)
        written = export.export_files(
            self.folder,
            workload=self.answer.workload,
            config=self.answer.exported,
            result=self.result,
            exporters=self.exporters,
        )
        theirs = () if self.run is None else [part.path.resolve() for part in self.run.parts]
        for path in earlier.difference(written):
            if path.resolve() not in theirs:
                with contextlib.suppress(OSError):
                    path.unlink()
                    path.parent.rmdir()  # Nothing is left in it, or it stays.
        return written

    @property
    def notes(self) -> tuple[str, ...]:
        """The changes to the user's own file, in words."""
        if self.run is None or self.folder is None:
            return ()
        return tuple(own_run.changed(self.run, self.answer.base, self.answer.exported))

    @property
    def command(self) -> str:
        """The command that trains with the user's edited file; empty where train.py does."""
        if self.run is None or self.folder is None:
            return ""
        return own_run.command(self.run, self.folder, self.answer.exported)

    @property
    def unsaid(self) -> Mapping[str, tuple[str, ...]]:
        """Settings that some of the files do not carry, and which; each file says more at its top."""
        return export.unsaid_names(self.exporters, self.answer.workload, self.answer.exported)


def _untouched_in(folder: Path) -> set[Path]:
    """The files of an earlier answer in the folder that nobody has changed since.

    They are those that the folder's result.json lists under names that we give, and that are no younger than
    it; the folder may have moved. Copies of a user's files have their names: they are as old as it besides.
    """
    place = folder / result_json.filename
    try:
        result = json.loads(read_text(place, MAX_RESULT_BYTES))
        written_seconds = place.stat().st_mtime
    except (ConfigError, ValueError, RecursionError, OSError):
        return set()
    listed = result.get("files") if isinstance(result, dict) else None
    ours = {exporter.filename for exporter in export.ALL.values()}
    found = set()
    for name in map(PurePath, map(str, listed if isinstance(listed, list) else ())):
        beside = name.parent.name if name.parent.name in _FOLDERS else ""
        path = folder / beside / name.name
        if not path.is_file():
            continue
        after_seconds = path.stat().st_mtime - written_seconds
        is_ours = name.name in ours
        if beside == own_run.YOURS:
            is_ours = after_seconds >= -SAME_TIME_SECONDS
        if is_ours and after_seconds <= SAME_TIME_SECONDS:
            found.add(path)
    return found
