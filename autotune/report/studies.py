"""Draws what a database holds: its studies, one of them, several side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TextIO

from autotune.common.user_text import printable
from autotune.report import comparison, terminal, words
from autotune.store.stored_answers import ListedStudy, StoredAnswer

_ENDINGS = {"complete": "fit", "pruned": "do not fit"}
"""Words for how predicted trials ended, by the state that Optuna holds."""


def draw_list(studies: Iterable[ListedStudy], file: TextIO) -> None:
    """Draw a row per study; a study that is not autotune's is marked as such."""
    studies = list(studies)
    found = [each.answer for each in studies]
    heading, speeds = comparison.headed(
        [None if answer is None else answer.tokens_per_second for answer in found],
        [None if answer is None else answer.best.config.speed_unit for answer in found],
    )
    headers = ("study", "model", "budget>", "evidence", f"{heading}>", "trials>", "last trial")
    terminal.draw_table(headers, map(_cells, studies, speeds), file, is_list=True)


def _cells(study: ListedStudy, speed: str) -> tuple[str, ...]:
    workload, answer = study.workload or {}, study.answer
    budget, at = workload.get("memory_budget_bytes"), study.last_trial_at
    return (
        words.model_name(study.name),
        words.model_name(str(workload.get("model", ""))),
        words.short_size(budget) if isinstance(budget, int) else "",
        study.problem if answer is None else answer.evidence,
        speed,
        f"{study.num_trials:,}",
        "" if at is None else f"{at.astimezone():%Y-%m-%d %H:%M}",
    )


def draw_stored(
    stored: StoredAnswer,
    counts: Mapping[str, Mapping[str, int]],
    *,
    place: str,
    commands: Mapping[str, str],
    file: TextIO,
) -> None:
    """Draw the answer as `find` drew it, then what made it and what the study holds.

    `place`: its name and database; `commands`: what to type for its report and files, labelled.
    """
    terminal.draw_answer(stored.answer, file)
    versions = ", ".join(f"{name} {version}" for name, version in stored.versions.items())
    trials = "; ".join(trials_in_words(evidence, of) for evidence, of in counts.items() if of)
    rows = [
        ("command", printable(stored.command).replace(" ", words.GLUE) or "unknown"),
        ("made", printable(stored.made) or "unknown"),
        ("trials", printable(trials) or "none"),
        ("versions", printable(versions) or "unknown"),
    ]
    rows += [(name, printable(said).replace(" ", words.GLUE)) for name, said in commands.items()]
    print(file=file)
    terminal.draw_rows(rows, file)
    written = [Path(path) for path in stored.files]
    reports = [path.with_name(terminal.REPORT) for path in written[:1]]
    files = [path for path in (*written, *reports) if path.exists()]
    terminal.draw_outcome(files, place, file, answer=stored.answer)


def trials_in_words(evidence: str, outcomes: Mapping[str, int]) -> str:
    """The trials in words, such as `300 predicted (280 fit, 20 do not fit)`."""
    said = _ENDINGS if evidence == "predicted" else {}
    each = ", ".join(f"{count:,} {said.get(name, name)}" for name, count in outcomes.items())
    return f"{sum(outcomes.values()):,} {evidence} ({each})"


def draw_comparison(record: comparison.Comparison, file: TextIO) -> None:
    headers = ("", *(str(number + 1) for number in range(len(record.studies))))
    rows = ([words.model_name(cell) for cell in row] for row in comparison.rows(record))
    terminal.draw_table(headers, rows, file)
