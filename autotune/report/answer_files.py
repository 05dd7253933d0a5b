"""An answer as files in a folder: every export that fits it, the user's own file with the answer in it."""

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
from autotune.export import Exporter, result_json
from autotune.export.base import own_run
from autotune.export.base.read import BaseRun
from autotune.records.answer import Summary

MAX_RESULT_BYTES = 16 * MIB
SAME_TIME_SECONDS = 5.0
"""Files of one answer are written one after the other, result.json among the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerFiles:
    """What there is to be written, and what is to be said of it."""

    summary: Summary
    exporters: tuple[Exporter, ...]
    result: dict[str, Any]
    """The object of `find --json`; its `files` are these."""
    folder: Path | None
    """None: nothing is written."""
    run: BaseRun | None
    """What the user trains with so far."""

    @classmethod
    def of(cls, summary: Summary, *, folder: Path | None, run: BaseRun | None) -> AnswerFiles:
        exporters = export.exporters_for(summary.exported, summary.workload)
        if run is not None and folder is not None:
            exporters = own_run.with_edited(exporters, folder, run, summary.base)
        places = [] if folder is None else export.export_paths(folder, exporters)
        return cls(
            summary=summary,
            exporters=exporters,
            result={**summary.to_dict(), "files": [str(path) for path in places]},
            folder=folder,
            run=run,
        )

    def write(self) -> list[Path]:
        """All of them or none. Raises StorageError.

        Those of an earlier answer go, so that no adapter_config.json lies beside a full fine-tune; not
        those that somebody has changed since.
        """
        if self.folder is None:
            return []
        earlier = _untouched_in(self.folder)
        written = export.export_files(
            self.folder,
            workload=self.summary.workload,
            config=self.summary.exported,
            result=self.result,
            exporters=self.exporters,
        )
        theirs = () if self.run is None else [part.path.resolve() for part in self.run.parts]
        for path in earlier.difference(written):
            if path.resolve() not in theirs:
                with contextlib.suppress(OSError):
                    path.unlink()
        return written

    @property
    def notes(self) -> tuple[str, ...]:
        """What was changed in the user's own file, in words."""
        if self.run is None or self.folder is None:
            return ()
        return tuple(own_run.changed(self.run, self.summary.base, self.summary.exported))

    @property
    def unsaid(self) -> Mapping[str, tuple[str, ...]]:
        """Settings that some of the files do not carry, and which; each file says at its top what it is."""
        return export.unsaid_names(self.exporters, self.summary.workload, self.summary.exported)


def _untouched_in(folder: Path) -> set[Path]:
    """What the result.json that is in the folder says was written with it, by the names that we give, and
    is as old as it; the folder may have moved."""
    place = folder / result_json.filename
    try:
        result = json.loads(read_text(place, MAX_RESULT_BYTES))
        last_seconds = place.stat().st_mtime + SAME_TIME_SECONDS
    except (ConfigError, ValueError, RecursionError, OSError):
        return set()
    listed = result.get("files") if isinstance(result, dict) else None
    names = {PurePath(str(name)) for name in (listed if isinstance(listed, list) else ())}
    is_listed = {
        (name.parent.name == export.FURTHER_FOLDER, name.name)
        for name in names
        if name.name in {exporter.filename for exporter in export.ALL.values()}
    }
    paths = {
        (folder / export.FURTHER_FOLDER if is_further else folder) / name
        for is_further, name in is_listed
    }
    return {path for path in paths if path.is_file() and path.stat().st_mtime <= last_seconds}
