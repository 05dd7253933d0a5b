"""The lines of an exported file: how they are written, and how damaged ones are refused."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import re
import shutil
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from autotune.common import json_records
from autotune.common.files import STDOUT
from autotune.common.version import __version__
from autotune.errors import ConfigError
from autotune.records.measurement import measurement_from_dict
from autotune.store.optuna_study import is_ours
from autotune.store.recommendations import Recommendation

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

FORMAT = 1
"""Version of the file's format; a newer one is refused."""
MAX_INT = 2**63 - 1
MAX_LINE_BYTES = 64 * 2**20
"""Longest line that is read. A study's line, which has its report in it, takes a hundredth of it."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileHeader:
    """The first line of a file."""

    format: int
    made_by: str

    def __post_init__(self) -> None:
        if self.format < 1:
            raise ValueError(f"its format is {self.format}")
        if self.format > FORMAT:
            raise ValueError(f"a newer autotune wrote it ({self.made_by[:80]}): update autotune")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeLine:
    """A row of the table of probes, but for what can be worked out of its record."""

    key: str
    model_digest: str
    model: str
    outcome: str
    stderr_tail: str
    made_at: datetime.datetime
    record: dict[str, Any]

    def __post_init__(self) -> None:
        _check_digests(key=self.key, model_digest=self.model_digest)
        for name in ("model", "stderr_tail"):
            if "\0" in (text := getattr(self, name)):
                raise ValueError(f"{name} is {json_records.shown(text)}")
        if measurement_from_dict(self.record).outcome != self.outcome:
            raise ValueError("its outcome is not its record's")


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyLine:
    """A study, and how many lines of trials follow it."""

    name: str
    user_attrs: dict[str, object]
    num_trials: int

    def __post_init__(self) -> None:
        if not is_ours(self.user_attrs):
            raise ValueError("the study was not made by autotune")
        if self.num_trials < 0 or not self.name.strip() or not self.name.isprintable():
            raise ValueError("its name or its number of trials cannot be")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialLine:
    """A trial that has ended, of the study above it."""

    state: Literal["COMPLETE", "PRUNED", "FAIL"]
    value: float | None
    params: dict[str, Any]
    distributions: dict[str, dict[str, Any]]
    user_attrs: dict[str, Any]
    system_attrs: dict[str, Any]
    intermediate_values: dict[str, float]
    datetime_start: datetime.datetime | None
    datetime_complete: datetime.datetime

    def trial(self) -> FrozenTrial:
        """Return it as Optuna has it. Raises ValueError and UserWarning for what Optuna refuses."""
        from optuna.distributions import json_to_distribution
        from optuna.trial import TrialState, create_trial

        if (record := self.user_attrs.get("measurement")) is not None:
            measurement_from_dict(record)
        with warnings.catch_warnings():
            # Optuna takes choices that no database gives back, and only warns of them.
            warnings.simplefilter("error", UserWarning)
            distributions = {
                name: json_to_distribution(json.dumps(of))
                for name, of in self.distributions.items()
            }
        made = create_trial(
            state=TrialState[self.state],
            value=self.value,
            params=self.params,
            distributions=distributions,
            user_attrs=self.user_attrs,
            system_attrs=self.system_attrs,
            intermediate_values={int(k): v for k, v in self.intermediate_values.items()},
        )
        made.datetime_start, made.datetime_complete = self.datetime_start, self.datetime_complete
        return made


FileLine = FileHeader | ProbeLine | Recommendation | StudyLine | TrialLine
_KINDS: dict[str, type[FileLine]] = {
    "header": FileHeader,
    "probe": ProbeLine,
    "recommendation": Recommendation,
    "study": StudyLine,
    "trial": TrialLine,
}
_KIND_OF = {of: kind for kind, of in _KINDS.items()}


def header() -> FileHeader:
    return FileHeader(format=FORMAT, made_by=f"autotune {__version__}")


def line_of_probe(row: Mapping[Any, Any]) -> ProbeLine | None:
    """A row of the table of probes as a line; None for one that this version cannot read."""
    kept = ("key", "model_digest", "model", "outcome", "stderr_tail", "made_at")
    try:
        return ProbeLine(**{name: row[name] for name in kept}, record=json.loads(row["record"]))
    except ValueError:
        return None


def line_of_trial(trial: FrozenTrial) -> TrialLine:
    """A trial that has ended as a line; what is not finite is left out. ValueError for damage."""
    from optuna.distributions import distribution_to_json

    state: Any = trial.state.name
    if trial.datetime_complete is None:
        raise ValueError(f"trial {trial.number} has no end")
    values = {str(k): v for k, v in trial.intermediate_values.items() if math.isfinite(v)}
    start = trial.datetime_start  # Optuna's are of this machine's zone, without saying so.
    return TrialLine(
        state=state,
        value=trial.value,
        params=trial.params,
        distributions={
            name: json.loads(distribution_to_json(of)) for name, of in trial.distributions.items()
        },
        user_attrs=trial.user_attrs,
        system_attrs=trial.system_attrs,
        intermediate_values=values,
        datetime_start=start and start.astimezone(datetime.UTC),
        datetime_complete=trial.datetime_complete.astimezone(datetime.UTC),
    )


def text_of(line: FileLine) -> str:
    """A line as the file has it."""
    values = {"kind": _KIND_OF[type(line)], **json_records.plain(line)}
    return json.dumps(values, allow_nan=False) + "\n"


def identity(trial: FrozenTrial) -> str:
    """A text that is equal for two copies of one trial, whatever their numbers."""
    return json.dumps(json_records.plain(line_of_trial(trial)), sort_keys=True)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open the file, or stdin for -, so that it can be read twice: a pipe as a copy.

    Raises ConfigError.
    """
    with contextlib.ExitStack() as held:
        try:
            file = sys.stdin.buffer if str(path) == STDOUT else held.enter_context(path.open("rb"))
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                copy = held.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(file, copy)
                file = copy
        except OSError as error:
            raise ConfigError(
                f"{str(path)[:200]} cannot be read",
                why=error.strerror or str(error),
                remedy="Name a file that `autotune studies export` has written",
            ) from error
        yield file


def read(
    file: BinaryIO, name: str
) -> Iterator[ProbeLine | Recommendation | StudyLine | FrozenTrial]:
    """Read every record of the file of that name from its beginning, checked.

    Raises ConfigError, which names the line.
    """
    num_left = number = 0
    try:
        file.seek(0)
        texts = iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")
        for number, text in enumerate(texts, start=1):
            line = _line(text, is_first=number == 1)
            num_left = _next_left(line, num_left)
            if not isinstance(line, FileHeader):
                yield line.trial() if isinstance(line, TrialLine) else line
    except (ValueError, KeyError, TypeError, RecursionError, UserWarning) as error:
        said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(
            f"Line {number} of {name[:200]} cannot be imported",
            why=said[:300] or type(error).__name__,
            remedy="Nothing was imported. Export it again",
        ) from error
    if number == 0 or num_left:
        raise ConfigError(
            f"{name[:200]} ends too early",
            why=f"{num_left} of a study's trials are not there" if number else "It is empty",
            remedy="Nothing was imported. Export it again",
        )


def _line(text: bytes, *, is_first: bool) -> FileLine:
    if len(text) > MAX_LINE_BYTES:
        raise ValueError(f"it is longer than {MAX_LINE_BYTES} bytes")
    values = json_records.mapping(
        json.loads(text, parse_constant=_no_number, parse_int=_stored_int), "it"
    )
    if b"\\u" in text:
        _check_encodes(values)
    kind = values.pop("kind", None)
    if is_first != (kind == "header"):
        raise ValueError(
            "it is no header: this is no export of autotune" if is_first else "it is a header"
        )
    if kind not in _KINDS:
        raise ValueError(f"its kind is {json_records.shown(kind)}")
    line = json_records.read(_KINDS[kind], values)
    if isinstance(line, Recommendation):
        _check_digests(question_key=line.question_key)
        if line.made_at.tzinfo is None:
            raise ValueError(f"made_at is {line.made_at}, without a time zone")
    if isinstance(line, ProbeLine) and line.made_at.tzinfo is not None:
        # The tables hold UTC without saying so.
        return replace(line, made_at=line.made_at.astimezone(datetime.UTC).replace(tzinfo=None))
    return line


def _next_left(line: FileLine, num_left: int) -> int:
    """How many trials of the last study are still to come after this line."""
    if isinstance(line, TrialLine):
        if not num_left:
            raise ValueError("it is a trial more than the study above it has")
        return num_left - 1
    if num_left:
        raise ValueError(f"{num_left} trials of the study above it are missing")
    return line.num_trials if isinstance(line, StudyLine) else 0


def _stored_int(text: str) -> int:
    """Read a whole number. Raises ValueError for one that no column holds: databases have 64 bits for it."""
    if len(text) > len(str(MAX_INT)) + 1 or not -MAX_INT - 1 <= int(text) <= MAX_INT:
        raise ValueError(f"the number {text[:40]} is too large")
    return int(text)


def _check_encodes(values: dict[str, Any]) -> None:
    """Raise ValueError for half of a surrogate pair, which JSON may have and no database takes."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end]
        raise ValueError(f"{half!a} in it is no character") from error


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _check_digests(**digests: str) -> None:
    for name, value in digests.items():
        if not _DIGEST.fullmatch(value):
            raise ValueError(f"{name} is {json_records.shown(value)}")
