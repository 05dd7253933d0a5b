"""Studies as they were stored: the answer of each, and how it was asked for.

Trials are Optuna's, which loads 4,000 a second. Whatever else is in the database (another program's studies)
is listed, never touched.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.catalogue import installed
from autotune.common import json_records
from autotune.common.version import __version__
from autotune.errors import ConfigError, StorageError
from autotune.records.answer import Answer, answer_from_dict, stored_record
from autotune.records.charts import Details
from autotune.space.optimizers import OPTIMIZERS
from autotune.store.optuna_study import existing_storage, existing_study, is_ours

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

RESULT = "result"
"""User attribute of a study: the latest answer, as records.answer.stored_record gives it."""
FILES = "files"
"""User attribute of a study: the files that were written of it."""
DETAILS = "details"
"""User attribute of a study: what a report draws beside it, a Details."""

MADE_AT = "made_at"
"""User attribute of a study: the time of its latest answer, in UTC as ISO 8601 has it."""

COMMAND, VERSIONS = "command", "versions"
"""User attributes of a study: the command and library versions that made its latest answer; until there is
one, those that began it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredAnswer:
    """The latest answer of a study."""

    study: str
    answer: Answer
    files: tuple[str, ...]
    """Names of the files that were written of the answer."""
    command: str
    """The command that made the answer."""
    versions: dict[str, str]
    """Versions of the libraries that were installed then."""
    details: Details | None = None
    """Details for a report; None where an older autotune made the answer."""
    made_at: str = ""
    """Time of the answer in UTC, such as 2026-11-29T18:30:05+00:00; empty where it is not known."""

    @property
    def made(self) -> str:
        """Time of the answer in words; empty where it is not known."""
        return f"{self.made_at[:16].replace('T', ' ')} UTC" if self.made_at else ""

    @property
    def result(self) -> dict[str, Any]:
        """The object of `find --json`."""
        return {**self.answer.to_dict(), "versions": self.versions, "files": list(self.files)}


def keep(
    study: optuna.Study,
    answer: Answer,
    details: Details,
    *,
    files: Sequence[str] = (),
    command: str = "",
) -> None:
    """Keep an answer in its study, in place of an earlier one: the answer itself comes last.

    A study may have been begun by another command: that of its latest answer takes its place.
    """
    now = datetime.datetime.now(datetime.UTC)
    attributes = {
        FILES: list(files),
        DETAILS: json_records.plain(details),
        COMMAND: command,
        VERSIONS: library_versions(),
        MADE_AT: now.isoformat(timespec="seconds"),
        RESULT: stored_record(answer),
    }
    for name, value in attributes.items():
        study.set_user_attr(name, value)


def load(url: str, name: str) -> StoredAnswer:
    """The answer of a study. Raises ConfigError for a study without one, StorageError."""
    with existing_study(url, name) as study:
        return answer_of(study)


def answer_of(study: optuna.Study) -> StoredAnswer:
    """The answer of a study that is open.

    Raises as `load` does.
    """
    name, attributes = study.study_name, study.user_attrs
    result = attributes.get(RESULT)
    if result is None:
        raise ConfigError(
            f'The study "{name}" holds no answer',
            why="The search that made it has not ended, or an older autotune made it",
            remedy=f"Run its command again: {attributes.get(COMMAND) or 'autotune find'}",
        )
    try:
        answer = answer_from_dict(result)
        stored = attributes.get(DETAILS)
        details = None if stored is None else json_records.read(Details, stored, "details")
    except ValueError as error:
        raise StorageError(
            f'The answer of the study "{name}" cannot be read',
            why=str(error),
            remedy=f"Run its command again: {attributes.get(COMMAND) or 'autotune find'}",
        ) from error
    return StoredAnswer(
        study=name,
        answer=answer,
        files=tuple(map(str, attributes.get(FILES, ()))),
        command=str(attributes.get(COMMAND, "")),
        versions=dict(attributes.get(VERSIONS, {})),
        details=details,
        made_at=str(attributes.get(MADE_AT, "")),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedStudy:
    """One of the studies of a database, autotune's or not."""

    name: str
    num_trials: int
    last_trial_at: datetime.datetime | None
    """Time at which the study's last trial ended, in UTC; None without trials that ended."""
    is_ours: bool
    workload: dict[str, Any] | None
    """The study's workload as stored; None where the study is not autotune's."""
    answer: Answer | None
    """The answer; None where there is none that can be read."""
    problem: str
    """Why there is no answer; empty where there is one."""

    def to_dict(self) -> dict[str, object]:
        """Return an entry of `studies list --json`, its speed and peak of the kind that `evidence` names."""
        answer, at = self.answer, self.last_trial_at
        workload = self.workload or {}
        return {
            "study": self.name,
            "is_autotunes": self.is_ours,
            "model": workload.get("model"),
            "memory_budget_bytes": workload.get("memory_budget_bytes"),
            "evidence": None if answer is None else answer.evidence,
            "tokens_per_second": None if answer is None else answer.tokens_per_second,
            "peak_device_bytes": None if answer is None else answer.peak_device_bytes,
            "num_trials": self.num_trials,
            "last_trial_at": None if at is None else at.isoformat(),
            "problem": self.problem,
        }


def listed(url: str) -> list[ListedStudy]:
    """List every study of the database, in the order they were made.

    Raises StorageError.
    """
    import optuna

    with existing_storage(url) as storage:
        names = optuna.get_all_study_names(storage)
        for name in names:
            if not isinstance(name, str):  # SQLite keeps any value in any column
                raise TypeError(f"a study's name is {name!r}")
        return [_listed(optuna.load_study(study_name=name, storage=storage)) for name in names]


def _listed(study: optuna.Study) -> ListedStudy:
    attributes, trials = study.user_attrs, study.get_trials(deepcopy=False)
    ended = [trial.datetime_complete for trial in trials if trial.datetime_complete is not None]
    ours, answer, problem = is_ours(attributes), None, ""
    if not ours:
        problem = "not autotune's"
    elif RESULT not in attributes:
        problem = "no answer"
    else:
        try:
            answer = answer_from_dict(attributes[RESULT])
        except ValueError as error:
            problem = str(error)
    workload = attributes.get("workload")
    return ListedStudy(
        name=study.study_name,
        num_trials=len(trials),
        # Optuna gives times of this machine's zone, without saying so.
        last_trial_at=max(ended).astimezone(datetime.UTC) if ended else None,
        is_ours=ours,
        workload=workload if ours and isinstance(workload, dict) else None,
        answer=answer,
        problem=problem,
    )


def count_trials(url: str, name: str) -> dict[str, dict[str, int]]:
    """Count the study's trials, predicted and measured, by how they ended.

    A predicted one is COMPLETE when it fits, else PRUNED; a measured one has its outcome, or Optuna's
    state where it has none. Raises ConfigError for an unknown study, StorageError.
    """
    counts: dict[str, Counter[str]] = {"predicted": Counter(), "measured": Counter()}
    with existing_study(url, name) as study:
        for trial in study.get_trials(deepcopy=False):
            is_predicted = trial.user_attrs.get("evidence") == "predicted"
            ended = str(trial.user_attrs.get("outcome", trial.state.name)).lower()
            counts["predicted" if is_predicted else "measured"][ended] += 1
    return {evidence: dict(sorted(of.items())) for evidence, of in counts.items()}


def load_with_trials(url: str, name: str) -> tuple[StoredAnswer, list[FrozenTrial]]:
    """The answer of a study and its trials, in their order.

    Raises ConfigError for a study without an answer, StorageError.
    """
    with existing_study(url, name) as study:
        return answer_of(study), trials_of(study)


def trials_of(study: optuna.Study) -> list[FrozenTrial]:
    """The trials of a study, in their order; raises TypeError where one has no number."""
    trials = study.get_trials(deepcopy=False)
    for trial in trials:
        if not isinstance(trial.number, int):  # SQLite keeps any value in any column
            raise TypeError(f"a trial's number is {trial.number!r}")
    return trials


def remove(url: str, name: str) -> None:
    """Delete one of autotune's studies and its trials; the table of probes stays as it is.

    Optuna loads every trial for it: about 3 ms each. Raises ConfigError for a study that is not there or
    not autotune's, StorageError.
    """
    import optuna

    with existing_study(url, name), existing_storage(url) as storage:
        optuna.delete_study(study_name=name, storage=storage)


_LIBRARIES = (
    "torch", "transformers", "peft", "optuna", "liger-kernel", "trl", "sentence-transformers",
)  # fmt: skip
"""Libraries whose versions are recorded, beside those of the optimizers, bitsandbytes among them."""


def library_versions() -> dict[str, str]:
    """The versions of autotune and of libraries that a prediction depends on, where they are installed."""
    names = (*_LIBRARIES, *sorted({row.needs for row in OPTIMIZERS.values() if row.needs}))
    known = {name: found for name in names if (found := installed.version(name)) is not None}
    return {"autotune": __version__, **known}
