"""Takes a file of JSON lines into a database: checked whole, then added study by study.

Each study is one transaction, and all the rest is one more.

Killed in between, the same command goes on: what is there is not added again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import ConfigError
from autotune.store.database import pages, parse_url
from autotune.store.optuna_study import opened_storage
from autotune.store.probe_key import columns_of
from autotune.store.recommendations import Recommendation, row_of
from autotune.store.transfer import lines
from autotune.store.transfer.lines import ProbeLine, StudyLine
from autotune.store.upgrade import alone, open_engine

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial
    from sqlalchemy import Connection

_OF_A_PROBE = tuple(field.name for field in dataclasses.fields(ProbeLine))


def import_file(url: str, path: Path) -> dict[str, int]:
    """Add the file's records that the database lacks; return how many of each kind were new.

    Raises ConfigError for a damaged file, before anything is added, and for a study that was made for
    something else; StorageError.
    """
    with lines.opened(path) as file:
        return _import(url, functools.partial(lines.read, file, str(path)))


def _import(url: str, read: Callable[[], Iterator[Any]]) -> dict[str, int]:
    for _ in read():
        pass
    counts: Counter[str] = Counter({"probe": 0, "recommendation": 0, "study": 0, "trial": 0})
    with open_engine(url) as engine, alone(engine) as connection:
        for probes in pages(one for one in read() if isinstance(one, ProbeLine)):
            counts["probe"] += _add_probes(connection, probes)
        for answers in pages(one for one in read() if isinstance(one, Recommendation)):
            counts["recommendation"] += _add_recommendations(connection, answers)
        connection.commit()
    with opened_storage(parse_url(url)) as storage:
        for study, trials in _studies(read()):
            is_new, num_trials = _add_study(storage, study, trials)
            counts["study"] += is_new
            counts["trial"] += num_trials
    return dict(counts)


def _studies(records: Iterator[Any]) -> Iterator[tuple[StudyLine, list[FrozenTrial]]]:
    for record in records:
        if isinstance(record, StudyLine):
            # As many trials follow: the file was checked.
            yield record, list(islice(records, record.num_trials))


def _add_probes(connection: Connection, page: Sequence[ProbeLine]) -> int:
    import sqlalchemy

    from autotune.store.schema import probes

    found = []
    for one in page:
        row = {name: getattr(one, name) for name in _OF_A_PROBE} | columns_of(one.record)
        found.append(row | {"record": json.dumps(one.record)})
    columns = (probes.c.key, probes.c.made_at, probes.c.record)
    query = sqlalchemy.select(*columns).where(probes.c.key.in_([row["key"] for row in found]))
    known = set(map(tuple, connection.execute(query)))
    rows = {(row["key"], row["made_at"], row["record"]): row for row in found}
    new = [row for identity, row in rows.items() if identity not in known]
    if new:
        connection.execute(probes.insert(), new)
    return len(new)


def _add_recommendations(connection: Connection, page: Sequence[Recommendation]) -> int:
    from autotune.store.schema import recommendations as table

    new: list[dict[str, Any]] = []
    for row in map(row_of, page):
        columns = ("question_key", "device", "made_at", "study")
        same = [table.c[name] == row[name] for name in columns]
        is_known = connection.execute(table.select().where(*same).limit(1)).first() is not None
        if not is_known and row not in new:
            new.append(row)
    if new:
        connection.execute(table.insert(), new)
    return len(new)


def _add_study(
    storage: optuna.storages.RDBStorage, study: StudyLine, trials: Sequence[FrozenTrial]
) -> tuple[bool, int]:
    """Add one study in one transaction; return (whether it was new, how many of its trials were)."""
    import sqlalchemy.orm
    from optuna.study import StudyDirection

    there = {s.study_name: s for s in storage.get_all_studies()}
    before = there.get(study.name)
    if before is not None:
        _check_same(study, before.user_attrs)
    sessions = storage.scoped_session
    with alone(storage.engine) as connection:
        # What Optuna commits becomes part of the one transaction.
        storage.scoped_session = sqlalchemy.orm.scoped_session(
            sqlalchemy.orm.sessionmaker(bind=connection, join_transaction_mode="create_savepoint")
        )
        try:
            if before is None:
                study_id = storage.create_new_study([StudyDirection.MAXIMIZE], study.name)
                known = set()
            else:
                study_id = before._study_id
                known = set(map(lines.identity, storage.get_all_trials(study_id, deepcopy=False)))
            for key, value in study.user_attrs.items():
                if before is None or key not in before.user_attrs:
                    storage.set_study_user_attr(study_id, key, value)
            num_new = 0
            for trial in trials:
                if (said := lines.identity(trial)) not in known:
                    known.add(said)
                    storage.create_new_trial(study_id, trial)
                    num_new += 1
            storage.remove_session()
            connection.commit()
        except ValueError as error:
            # Its choices were fixed by its first trial.
            raise ConfigError(
                f'The trials of the study "{study.name}" do not go with those that are there',
                why=str(error),
                remedy="Nothing of it was imported. Import it into another database",
            ) from error
        finally:
            storage.remove_session()
            storage.scoped_session = sessions
    return before is None, num_new


def _check_same(study: StudyLine, there: dict[str, Any]) -> None:
    of_file = {name: study.user_attrs.get(name) for name in ("workload", "gpu")}
    of_database = {name: there.get(name) for name in of_file}
    if json.dumps(of_file, sort_keys=True) != json.dumps(of_database, sort_keys=True):
        raise ConfigError(
            f'There is a study "{study.name}" already, which was made for something else',
            why="Its workload or its card is another",
            remedy="Nothing of it was imported. Import it into another database",
        )
