"""An answer as files in a folder: every export that fits it, the user's own file with the answer in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune import bases, export
from autotune.export import Exporter
from autotune.export.read import BaseRun
from autotune.summary import Summary


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
            exporters = bases.with_edited(exporters, folder, run, summary.base)
        places = [] if folder is None else export.export_paths(folder, exporters)
        return cls(
            summary=summary,
            exporters=exporters,
            result={**summary.to_dict(), "files": [str(path) for path in places]},
            folder=folder,
            run=run,
        )

    def write(self) -> list[Path]:
        """All of them or none. Raises StorageError."""
        if self.folder is None:
            return []
        return export.export_files(
            self.folder,
            workload=self.summary.workload,
            config=self.summary.exported,
            result=self.result,
            exporters=self.exporters,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What was changed in the user's own file, in words."""
        if self.run is None or self.folder is None:
            return ()
        return tuple(bases.changed(self.run, self.summary.base, self.summary.exported))

    @property
    def unsaid(self) -> Mapping[str, tuple[str, ...]]:
        """Settings that some of the files do not carry, and which; each file says at its top what it is."""
        return export.unsaid_names(self.exporters, self.summary.workload, self.summary.exported)
