"""The lines of an exported file: how they are written, and how damaged ones are refused."""

from __future__ import annotations

import datetime
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.common import json_records
from autotune.common.version import __version__
from autotune.errors import ConfigError
from autotune.records.measurement import measurement_from_dict
from autotune.store.optuna_study import is_ours
from autotune.store.probe_key import columns_of
from autotune.store.recommendations import Recommendation

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial
    from sqlalchemy import RowMapping

FORMAT = 1
"""Version of the file's format; a newer one is refused."""
MAX_LINE_BYTES = 64 * 2**20
"""Longest line that is read. A study's line, which has its report in it, takes a hundredth of it."""

_STATES = ("COMPLETE", "PRUNED", "FAIL")
_DIGEST = re.compile(r"[0-9a-f]{64}")

Values = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadLine:
    """One checked record of a file."""

    number: int
    """Number of the line in the file, from 1."""
    kind: str
    record: Any
    """The record: a row for the table of probes, a Recommendation, a StudyLine or Optuna's FrozenTrial."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyLine:
    """A study, and how many lines of trials follow it."""

    name: str
    user_attrs: dict[str, object]
    num_trials: int


def header() -> Values:
    return {"kind": "header", "format": FORMAT, "made_by": f"autotune {__version__}"}


def of_probe(row: RowMapping) -> Values | None:
    """A row of the table of probes as a line; None for a record that this version cannot read."""
    try:
        record = json.loads(row["record"])
        measurement_from_dict(record)
    except ValueError:
        return None
    kept = ("key", "model_digest", "model", "outcome", "stderr_tail")
    made_at = row["made_at"].isoformat()
    return {
        "kind": "probe",
        **{name: row[name] for name in kept},
        "made_at": made_at,
        "record": record,
    }


def of_recommendation(one: Recommendation) -> Values:
    return {"kind": "recommendation", **json_records.plain(one)}


def of_trial(trial: FrozenTrial) -> Values:
    from optuna.distributions import distribution_to_json

    distributions = {
        name: json.loads(distribution_to_json(of)) for name, of in trial.distributions.items()
    }
    return {
        "kind": "trial",
        "state": trial.state.name,
        "value": trial.value,
        "params": trial.params,
        "distributions": distributions,
        "user_attrs": trial.user_attrs,
        "system_attrs": trial.system_attrs,
        "intermediate_values": {
            str(step): value
            for step, value in trial.intermediate_values.items()
            if math.isfinite(value)
        },
        "datetime_start": _written(trial.datetime_start),
        "datetime_complete": _written(trial.datetime_complete),
    }


def identity(trial: FrozenTrial) -> str:
    """A text that is equal for two copies of one trial, whatever their numbers."""
    return json.dumps(of_trial(trial), sort_keys=True)


def read(path: Path) -> Iterator[ReadLine]:
    """Read every record of the file, checked.

    Raises ConfigError, which names the line.
    """
    try:
        with path.open("rb") as file:
            yield from _read(path, iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""))
    except OSError as error:
        raise ConfigError(
            f"{str(path)[:200]} cannot be read",
            why=error.strerror or str(error),
            remedy="Name a file that `autotune studies export` has written",
        ) from error


def _read(path: Path, texts: Iterator[bytes]) -> Iterator[ReadLine]:
    num_trials_left, number = 0, 0
    for number, text in enumerate(texts, start=1):
        try:
            line = _checked(number, text)
            num_trials_left = _next_left(line, num_trials_left)
        except (ValueError, KeyError, TypeError, RecursionError, UserWarning) as error:
            said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise ConfigError(
                f"Line {number} of {str(path)[:200]} cannot be imported",
                why=said[:300] or type(error).__name__,
                remedy="Nothing was imported. Export it again",
            ) from error
        if line.kind != "header":
            yield line
    if number == 0 or num_trials_left:
        what = f"{num_trials_left} of a study's trials are not there" if number else "It is empty"
        raise ConfigError(
            f"{str(path)[:200]} ends too early",
            why=what,
            remedy="Nothing was imported. Export it again",
        )


def _next_left(line: ReadLine, num_left: int) -> int:
    """How many trials of the last study are still to come after this line."""
    if line.kind == "trial":
        if not num_left:
            raise ValueError("it is a trial more than the study above it has")
        return num_left - 1
    if num_left:
        raise ValueError(f"{num_left} trials of the study above it are missing")
    return line.record.num_trials if line.kind == "study" else 0


def _checked(number: int, text: bytes) -> ReadLine:
    if len(text) > MAX_LINE_BYTES:
        raise ValueError(f"it is longer than {MAX_LINE_BYTES} bytes")
    values = json_records.mapping(json.loads(text, parse_constant=_no_number), "it")
    kind = values.pop("kind", None)
    if (number == 1) != (kind == "header"):
        raise ValueError(
            "it is no header: this is no export of autotune" if number == 1 else "it is a header"
        )
    if kind not in _READERS:
        raise ValueError(f"its kind is {json_records.shown(kind)}")
    return ReadLine(number=number, kind=kind, record=_READERS[kind](values))


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _header(values: Values) -> None:
    found = values.get("format")
    if type(found) is not int or found < 1:
        raise ValueError(f"its format is {json_records.shown(found)}")
    if found > FORMAT:
        made_by = str(values.get("made_by"))[:80]
        raise ValueError(f"a newer autotune wrote it ({made_by}): update autotune")


def _probe(values: Values) -> Values:
    """The row for the table of probes. What can be worked out of the record is not taken from the line."""
    texts = {name: _text(values, name) for name in ("model", "model_digest", "outcome", "key")}
    record = values.get("record")
    measurement = measurement_from_dict(record)
    if measurement.outcome != texts["outcome"]:
        raise ValueError("its outcome is not its record's")
    for name in ("key", "model_digest"):
        if not _DIGEST.fullmatch(texts[name]):
            raise ValueError(f"{name} is {json_records.shown(texts[name])}")
    return {
        **texts,
        **columns_of(record),
        "stderr_tail": _text(values, "stderr_tail"),
        "made_at": _utc(values, "made_at"),
        "record": json.dumps(record),
    }


def _recommendation(values: Values) -> Recommendation:
    recommendation = json_records.read(Recommendation, values)
    if recommendation.made_at.tzinfo is None:
        raise ValueError(f"made_at is {recommendation.made_at}, without a time zone")
    if not _DIGEST.fullmatch(recommendation.question_key):
        raise ValueError(f"question_key is {json_records.shown(recommendation.question_key)}")
    return recommendation


def _study(values: Values) -> StudyLine:
    study = json_records.read(StudyLine, values)
    if not is_ours(study.user_attrs):
        raise ValueError("the study was not made by autotune")
    if study.num_trials < 0 or not study.name.strip() or not study.name.isprintable():
        raise ValueError("its name or its number of trials cannot be")
    return study


def _trial(values: Values) -> FrozenTrial:
    from optuna.distributions import json_to_distribution
    from optuna.trial import TrialState, create_trial

    state = values.get("state")
    if state not in _STATES:
        raise ValueError(f"state is {json_records.shown(state)}")
    parts = {
        name: json_records.mapping(values.get(name), name)
        for name in ("params", "distributions", "user_attrs", "system_attrs", "intermediate_values")
    }
    value = values.get("value")
    if value is not None and type(value) not in (int, float):
        raise ValueError(f"value is {json_records.shown(value)}")
    if not all(type(v) in (int, float) for v in parts["intermediate_values"].values()):
        raise ValueError("intermediate_values are no numbers")
    record = parts["user_attrs"].get("measurement")
    if record is not None:
        measurement_from_dict(record)
    with warnings.catch_warnings():
        # Optuna takes choices that no database gives back, and only warns of them.
        warnings.simplefilter("error", UserWarning)
        distributions = {
            name: json_to_distribution(json.dumps(of))
            for name, of in parts["distributions"].items()
        }
    made = create_trial(
        state=TrialState[state],
        value=value,
        params=parts["params"],
        distributions=distributions,
        user_attrs=parts["user_attrs"],
        system_attrs=parts["system_attrs"],
        intermediate_values={int(k): float(v) for k, v in parts["intermediate_values"].items()},
    )
    made.datetime_start = _time(values, "datetime_start")
    made.datetime_complete = _time(values, "datetime_complete")
    if made.datetime_complete is None:
        raise ValueError("datetime_complete is missing")
    return made


_READERS: dict[str, Callable[[Values], Any]] = {
    "header": _header,
    "probe": _probe,
    "recommendation": _recommendation,
    "study": _study,
    "trial": _trial,
}


def _text(values: Values, name: str) -> str:
    found = values.get(name)
    if not isinstance(found, str) or "\0" in found:
        raise ValueError(f"{name} is {json_records.shown(found)} and should be a text")
    return found


def _written(at: datetime.datetime | None) -> str | None:
    return None if at is None else at.isoformat()


def _time(values: Values, name: str) -> datetime.datetime | None:
    found = values.get(name)
    if found is None:
        return None
    if not isinstance(found, str):
        raise ValueError(f"{name} is {json_records.shown(found)} and should be a time")
    return datetime.datetime.fromisoformat(found)


def _utc(values: Values, name: str) -> datetime.datetime:
    """A time of the line in UTC without a time zone, as the tables hold it.

    Raises ValueError where it is missing, or no time.
    """
    found = _time(values, name)
    if found is None:
        raise ValueError(f"{name} is missing")
    if found.tzinfo is not None:
        found = found.astimezone(datetime.UTC).replace(tzinfo=None)
    return found
