"""Every answer that was ever given, with its history: table `autotune_recommendations`.

A row is never changed or removed: an answer that differs from the last one to the same question, on the
same device, is one more.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.common import json_records
from autotune.common.units import parse_bytes
from autotune.errors import ConfigError
from autotune.records.fingerprint import Fingerprint
from autotune.records.measurement import NOISE
from autotune.records.question import EFFECTIVE_BATCH_SIZE, SEQUENCE_LENGTH, Question
from autotune.store.database import damage_explained
from autotune.store.upgrade import open_engine

if TYPE_CHECKING:
    from sqlalchemy import Engine, Row, Select


_HOW_HARD = ("backend", "confirm_steps", "effort", "study")
"""Options that decide how an answer is looked for, and are no part of the question."""
_DEFAULTS = {"seq_len": SEQUENCE_LENGTH, "effective_batch": EFFECTIVE_BATCH_SIZE, "num_gpus": 1}
"""Values that these options have when they are left out and no base says otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """One answer to one question."""

    question_key: str
    question: dict[str, Any]
    """The options of `find` that were given, as question_of returns them."""
    device: str
    """The fingerprint's device; the card that was planned for where nothing was measured."""
    fingerprint: Fingerprint | None
    """Fingerprint of the measurement; None where nothing was measured."""
    made_at: datetime
    """Time of the answer, in UTC with its time zone."""
    study: str
    evidence: str
    """The kind of the figures: `measured` or `predicted`."""
    tokens_per_second: float | None
    spread: float | None
    """Relative standard error of the speed; None where nothing was measured."""
    peak_device_bytes: int | None
    config: dict[str, Any]
    """The TrainConfig, as its to_dict gives it."""
    result: dict[str, Any]
    """A nightly run's findings (nightly.ledger); empty for every other answer, whose study holds them."""
    reason: str
    """How it compares with the last answer: `first`, `improved`, `regression`, `retuned` (another
    configuration, as fast) or `unchanged`; or a text of its maker."""


_NEVER = datetime.max.replace(tzinfo=UTC)


class RecommendationTable:
    """The recommendations of one database."""

    def __init__(self, engine: Engine) -> None:
        from autotune.store.schema import recommendations

        self._engine = engine
        self._table = recommendations

    def add(self, recommendation: Recommendation) -> None:
        """Keep one answer; committed when this returns."""
        with self._engine.begin() as connection:
            connection.execute(self._table.insert().values(row_of(recommendation)))

    def latest(self, question_key: str, device: str) -> Recommendation | None:
        """The newest answer to the question on that device; None before there is one."""
        found = self._table.select().where(
            self._table.c.question_key == question_key, self._table.c.device == device
        )
        newest = found.order_by(self._table.c.made_at.desc(), self._table.c.id.desc()).limit(1)
        return next(iter(self._read(newest)), None)

    def history(
        self, question_key: str, device: str | None = None, *, now: datetime = _NEVER
    ) -> list[Recommendation]:
        """Every answer to the question, the oldest first; on any device where `device` is None.

        An answer dated later than `now`, made while a clock was wrong, stands after what was added before it.
        """
        query = self._table.select().where(self._table.c.question_key == question_key)
        if device is not None:
            query = query.where(self._table.c.device == device)
        added = self._read(query.order_by(self._table.c.id))
        last = datetime.min.replace(tzinfo=UTC)
        times = []
        for one in added:
            last = one.made_at if one.made_at <= now else last
            times.append(last)
        return [added[place] for place in sorted(range(len(added)), key=times.__getitem__)]

    def everything(self) -> list[Recommendation]:
        """All answers to all questions, the oldest first."""
        return self._read(self._table.select().order_by(self._table.c.made_at, self._table.c.id))

    def _read(self, query: Select[Any]) -> list[Recommendation]:
        with damage_explained(self._engine.url), self._engine.connect() as connection:
            return [_recommendation(row) for row in connection.execute(query)]


_AS_JSON = ("question", "fingerprint", "config", "result")


def row_of(recommendation: Recommendation) -> dict[str, Any]:
    """The row of the table for a recommendation: JSON as text, times in UTC without a time zone."""
    row = {
        field.name: getattr(recommendation, field.name)
        for field in dataclasses.fields(Recommendation)
    }
    for name in _AS_JSON:
        row[name] = json.dumps(json_records.plain(row[name]))
    row["made_at"] = recommendation.made_at.astimezone(UTC).replace(tzinfo=None)
    return row


def _recommendation(row: Row[Any]) -> Recommendation:
    # The names are of SQLAlchemy's own kind of text.
    values: dict[str, Any] = {str(name): value for name, value in row._mapping.items()}
    del values["id"]
    for name in _AS_JSON:
        values[name] = json.loads(values[name])
    values["made_at"] = values["made_at"].replace(tzinfo=UTC)
    read = json_records.read(Recommendation, values, "a recommendation")
    if read.tokens_per_second is not None and not 0 < read.tokens_per_second < math.inf:
        raise ValueError(f"a recommendation of {read.tokens_per_second} tokens/s")
    return read


@contextmanager
def open_recommendations(url: str) -> Iterator[RecommendationTable]:
    """Open the table of recommendations in the database at that address, created where it is missing.

    Raises StorageError for everything that the database refuses, inside the `with` block too.
    """
    with open_engine(url) as engine:
        yield RecommendationTable(engine)


def question_of(options: Question) -> dict[str, Any]:
    """The question as JSON can hold it: the options that were given and differ from their defaults."""
    return {name: _plain(value) for name, value in options.given.items()}


def question_key(question: Mapping[str, Any]) -> str:
    """A digest that is equal for questions that ask for the same, however hard the answer is looked for."""
    asked = {name: value for name, value in question.items() if name not in _HOW_HARD}
    if "base" not in asked:
        asked = {name: value for name, value in asked.items() if _DEFAULTS.get(name) != value}
    if "gpu_mem" in asked:
        # 12GB and 12 GB are one; what is no size was refused before.
        with suppress(ConfigError):
            asked["gpu_mem"] = parse_bytes(asked["gpu_mem"])
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def reason_for(last: Recommendation | None, now: Recommendation) -> str:
    """Compare an answer with the last one, run against run; return one of Recommendation's reasons.

    Speeds are compared where both are measured or both predicted. They differ where the difference is more
    than NOISE and twice their standard error.
    """
    if last is None or last.evidence != now.evidence:
        return "first"
    before, after = last.tokens_per_second, now.tokens_per_second
    if before and after:
        error = math.hypot(last.spread or 0.0, now.spread or 0.0)
        change = math.log(after / before)
        if abs(change) > max(NOISE, 2 * error):
            return "improved" if change > 0 else "regression"
    return "unchanged" if last.config == now.config else "retuned"
