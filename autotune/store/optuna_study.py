"""Optuna studies in a database: one per workload, at one SQLAlchemy URL, open to Optuna's own tools.

A study holds the trials of one workload and card, as autotune.store.predicted_trials describes them. Nothing
stored is ever changed or removed.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from autotune.errors import ConfigError, StorageError, nearest
from autotune.records.estimate import SCHEMA_VERSION
from autotune.space.config import Workload
from autotune.store import locks, study_names
from autotune.store.database import (
    ELSEWHERE,
    damage_explained,
    engine_options,
    explained,
    file_of,
    make_folder,
    may_pass,
    named,
    parse_url,
    shown_url,
)
from autotune.store.upgrade import refuse_newer

if TYPE_CHECKING:
    import optuna
    from sqlalchemy import URL, Engine

_OPTUNAS = {"studies", "version_info", "alembic_version"}
"""Some of Optuna's tables, by which a database is known to have them all."""
_OF_A_STUDY = {"schema_version", "command", "versions", "workload", "gpu"}
"""User attributes of a study."""


@contextlib.contextmanager
def open_study(
    url: str,
    name: str,
    *,
    workload: Workload,
    gpu: str,
    command: str = "",
    versions: Mapping[str, str] | None = None,
    alone: bool = False,
    searches: bool = False,
    waits: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> Iterator[optuna.Study]:
    """Open the study of that name, or create it, for the length of a `with` block.

    The workload, card, command and library versions of the run that creates a study are kept as
    its user attributes. `alone`: once whoever else has opened it so is done, for what takes moments and reads
    what is there before it adds to it. `searches`: for a search, of which a study has one at a time; `waits`:
    until another one is done, which `note` hears. Problems of the database inside the `with` block are
    translated as well.

    Raises ConfigError when the study belongs to another workload or card, StudyBusyError where another
    search works in it, and StorageError for everything that the database refuses.
    """
    study_names.check_name(name)
    identity = _identity(workload, gpu)
    parsed = parse_url(url)
    with opened_storage(parsed) as storage:
        details = {"command": command, "versions": dict(versions or {})}
        attributes = {"schema_version": SCHEMA_VERSION, **details, **identity}
        with damage_explained(parsed):
            study = _load_or_create(storage, name, attributes)
            _check_identity(study, identity)
        with contextlib.ExitStack() as held:
            if searches:
                held.enter_context(locks.searching(storage.engine, study, waits=waits, note=note))
            if alone:
                held.enter_context(locks.exclusive(storage.engine, name))
            yield study


def check_study(url: str, name: str, *, workload: Workload, gpu: str) -> None:
    """Check that `open_study` can open that study, before there is anything to keep in it.

    Nothing is created: a database or a study that is not there yet can be. What may pass, such as a lock or a
    full disk, is left to `open_study`. Raises what that raises for a study or a database of something else,
    and for a damaged one.
    """
    parsed = parse_url(url)
    file = file_of(parsed)
    if file is not None and not file.exists():
        return
    try:
        with explained(parsed), damage_explained(parsed), _tables(parsed) as (_, tables):
            if not _OPTUNAS.issubset(tables):
                return
        with opened_storage(parsed) as storage, damage_explained(parsed):
            _check_if_there(storage, name, _identity(workload, gpu))
    except StorageError as error:
        if not may_pass(error):
            raise


def _check_if_there(
    storage: optuna.storages.RDBStorage, name: str, identity: dict[str, Any]
) -> None:
    import optuna

    with contextlib.suppress(KeyError):
        study = optuna.load_study(storage=storage, study_name=name)
        if not _is_nobodys(study):
            _check_identity(study, identity)


def _identity(workload: Workload, gpu: str) -> dict[str, Any]:
    identity: dict[str, Any] = json.loads(json.dumps({"workload": workload.to_dict(), "gpu": gpu}))
    return identity


@contextlib.contextmanager
def existing_study(url: str, name: str) -> Iterator[optuna.Study]:
    """Open a study that `open_study` has made, for the length of a `with` block.

    Nothing is created. Raises ConfigError for a name that is not there or is not autotune's, and
    StorageError for a database that is not there and everything that it refuses.
    """
    import optuna

    with existing_storage(url) as storage:
        names = optuna.get_all_study_names(storage)
        if name not in names:
            raise ConfigError(
                f"There is no study {name[: study_names.MAX_CHARS]!r} in {shown_url(url)}",
                remedy=nearest(name[: study_names.MAX_CHARS], names)
                if names
                else "Run `autotune find` first",
            )
        study = optuna.load_study(storage=storage, study_name=name)
        _check_schema(study)
        yield study


@contextlib.contextmanager
def existing_storage(url: str) -> Iterator[optuna.storages.RDBStorage]:
    """Open the database at that URL, which must exist: it is not created.

    Raises StorageError.
    """
    parsed = parse_url(url)
    file = file_of(parsed)
    if file is not None and not file.exists():
        raise StorageError(
            f"There is no database {named(parsed)}",
            remedy="Run `autotune find` first, or name another with --storage",
        )
    with damage_explained(parsed), opened_storage(parsed) as storage:
        yield storage


@contextlib.contextmanager
def opened_storage(url: URL) -> Iterator[optuna.storages.RDBStorage]:
    """Open the database, with Optuna's tables made where they are missing.

    Raises StorageError for everything that the database refuses, inside the `with` block too.
    """
    with explained(url):
        with damage_explained(url):
            storage = _open_storage(url)
        try:
            with damage_explained(url):
                _check_version(storage, url)
            yield storage
        finally:
            storage.remove_session()
            storage.engine.dispose()


def _open_storage(url: URL) -> optuna.storages.RDBStorage:
    import optuna

    # Optuna reports the creation of a study on stderr, where our progress is shown, and every trial that
    # failed, with a traceback.
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    make_folder(url)
    text = url.render_as_string(hide_password=False)
    with _creating(url) as creates:
        return optuna.storages.RDBStorage(
            # Optuna fills in a {SCHEMA_VERSION}, and stumbles over any other brace.
            text.replace("{", "{{").replace("}", "}}"),
            engine_kwargs=engine_options(url),
            skip_compatibility_check=True,
            # Tables are added to an empty database only: never to one that is newer, or another's.
            skip_table_creation=not creates,
        )


def _check_version(storage: optuna.storages.RDBStorage, url: URL) -> None:
    """Raise StorageError for tables of another Optuna."""
    version = storage.get_current_version()
    if version != storage.get_head_version():
        is_older = version in storage.get_all_versions()
        command = "optuna storage upgrade --storage URL" if is_older else "pip install -U optuna"
        raise StorageError(
            f"The database {named(url)} cannot be used",
            why=f"It was written by {'an older' if is_older else 'a newer'} Optuna ({version[:40]})",
            remedy=f"Run `{command}`, {ELSEWHERE}",
        )


def _load_or_create(
    storage: optuna.storages.RDBStorage, name: str, attributes: Mapping[str, Any]
) -> optuna.Study:
    import optuna

    with contextlib.suppress(KeyError):
        study = optuna.load_study(storage=storage, study_name=name)
        if is_ours(study.user_attrs):
            return study
    with locks.exclusive(storage.engine, name):
        study = optuna.create_study(
            storage=storage, study_name=name, direction="maximize", load_if_exists=True
        )
        if _is_nobodys(study):
            for key, value in attributes.items():
                study.set_user_attr(key, value)
        return study


@contextlib.contextmanager
def _creating(url: URL) -> Iterator[bool]:
    """Tell whether Optuna's tables are to be created, and keep other processes from doing it meanwhile.

    Raises StorageError for a stranger's database, or a newer one.
    """
    with _tables(url) as (engine, tables):
        if _OPTUNAS.issubset(tables):
            yield False
        else:
            with locks.exclusive(engine, ""):
                yield True


@contextlib.contextmanager
def _tables(url: URL) -> Iterator[tuple[Engine, list[str]]]:
    """Open the database and name its tables. Raises StorageError for a stranger's, or a newer one."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(url, **engine_options(url))
    try:
        refuse_newer(engine)
        yield engine, sqlalchemy.inspect(engine).get_table_names()
    finally:
        engine.dispose()


def _check_identity(study: optuna.Study, wanted: dict[str, Any]) -> None:
    """Raise ConfigError when the study was made for something else than `wanted`."""
    stored = _check_schema(study)
    before = _flat({**stored["workload"], "gpu": stored["gpu"]})
    now = _flat({**wanted["workload"], "gpu": wanted["gpu"]})
    differences = [
        f"{key} was {_short(before.get(key))}, now {_short(now.get(key))}"
        for key in {**before, **now}
        if before.get(key) != now.get(key)
        and not (key == "model" and _is_one_place(str(before.get(key)), str(now.get(key))))
    ]
    if differences:
        raise ConfigError(
            f'The study "{study.study_name}" was made for something else',
            why="; ".join(differences),
            remedy="Choose another name with --study",
        )


def _is_one_place(*names: str) -> bool:
    """Whether they are one folder or file: files of an answer name it by its whole path."""
    return os.path.exists(names[0]) and len({*map(os.path.realpath, names)}) == 1


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, each of a record in them by names such as `lengths.num_tokens`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            {f"{key}.{n}": v for n, v in value.items()} if isinstance(value, dict) else {key: value}
        )
    return flat


def _short(value: Any) -> str:
    said = str(value)
    return said if len(said) <= 60 else f"{said[:57]}..."


def _is_nobodys(study: optuna.Study) -> bool:
    """Whether a study has just been created, or its maker was killed half-way."""
    attributes = study.user_attrs.keys()
    if is_ours(attributes) or not attributes <= _OF_A_STUDY:
        return False
    return not study.get_trials(deepcopy=False)


def is_ours(attributes: Collection[str]) -> bool:
    """Whether a study with these user attributes was made by `open_study`."""
    return {"schema_version", "workload", "gpu"}.issubset(attributes)


def _check_schema(study: optuna.Study) -> dict[str, Any]:
    """Return the study's attributes.

    Raises ConfigError for a stranger's study, StorageError for one of a newer autotune.
    """
    stored = study.user_attrs
    if not is_ours(stored):
        raise ConfigError(
            f'The study "{study.study_name}" was not made by autotune',
            remedy="Choose another name with --study",
        )
    if stored["schema_version"] > SCHEMA_VERSION:
        raise StorageError(
            f'The study "{study.study_name}" was written by a newer autotune',
            remedy="Update autotune, or choose another name with --study",
        )
    return stored
