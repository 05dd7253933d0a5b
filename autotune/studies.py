"""Studies as they were stored: the answer of each, and how it was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.details import Details, details_from_dict
from autotune.errors import ConfigError, StorageError
from autotune.store import existing_study
from autotune.summary import Summary, summary_from_dict

if TYPE_CHECKING:
    import optuna

RESULT = "result"
"""User attribute of a study: the latest answer, the object of `find --json`."""
DETAILS = "details"
"""User attribute of a study: what a report draws beside it, Details.to_dict."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredAnswer:
    """The latest answer of a study."""

    study: str
    summary: Summary
    result: dict[str, Any]
    """The object of `find --json`."""
    command: str
    """That made the study."""
    versions: dict[str, str]
    """Of the libraries that were installed then."""
    details: Details | None = None
    """None where an older autotune made the answer."""


def load(url: str, name: str) -> StoredAnswer:
    """The answer of a study. Raises ConfigError for a study without one, StorageError."""
    with existing_study(url, name) as study:
        return answer_of(study)


def answer_of(study: optuna.Study) -> StoredAnswer:
    """The answer of a study that is open. Raises as `load` does."""
    name, attributes = study.study_name, study.user_attrs
    result = attributes.get(RESULT)
    if result is None:
        raise ConfigError(
            f'The study "{name}" holds no answer',
            why="The search that made it has not ended, or an older autotune made it",
            remedy=f"Run its command again: {attributes.get('command') or 'autotune find'}",
        )
    try:
        summary = summary_from_dict(result)
        stored = attributes.get(DETAILS)
        details = None if stored is None else details_from_dict(stored)
    except ValueError as error:
        raise StorageError(
            f'The answer of the study "{name}" cannot be read',
            why=str(error),
            remedy=f"Run its command again: {attributes.get('command') or 'autotune find'}",
        ) from error
    return StoredAnswer(
        study=name,
        summary=summary,
        result=result,
        command=str(attributes.get("command", "")),
        versions=dict(attributes.get("versions", {})),
        details=details,
    )
