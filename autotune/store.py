"""The database: one Optuna study per workload, at one SQLAlchemy URL, open to Optuna's own tools.

A study maximizes tokens per second. A trial is one TrainConfig. Its parameters are what the search
varies; what the workload fixes (sequence length, accumulation) is in the user attribute `config`.

| a predicted TrainConfig            | trial    | value             | constraint `memory`      |
|------------------------------------|----------|-------------------|--------------------------|
| fits                               | COMPLETE | tokens per second | peak - budget, at most 0 |
| fits, its speed is unknown         | PRUNED   | none              | peak - budget, at most 0 |
| does not fit                       | PRUNED   | none              | the excess in bytes      |

Nothing stored is ever changed or removed: what is said again in the same numbers is skipped, and
what is said in other numbers (a newer library predicts otherwise) becomes one more trial.
Constraints rather than FAIL, because samplers learn from them (DESIGN.md section 2).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune import locks
from autotune.config import (
    METHODS,
    TrainConfig,
    Workload,
)
from autotune.database import (
    ELSEWHERE,
    engine_options,
    explained,
    file_of,
    make_folder,
    named,
    parse_url,
    shown_url,
)
from autotune.errors import ConfigError, StorageError, nearest
from autotune.knobs import KNOBS, Knob
from autotune.results import SCHEMA_VERSION, Estimate
from autotune.units import GIB
from autotune.upgrade import refuse_newer

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial
    from sqlalchemy import URL

CONSTRAINT = "memory"
"""Name of the trials' constraint: peak_device_bytes minus the budget."""
OVER_BUDGET = "over_budget_bytes"
"""User attribute, the same number: optuna-dashboard 0.21 shows no constraint that has a name."""

HEARTBEAT_SECONDS = 10
"""Between two signs of life of a trial, whole seconds."""
GRACE_SECONDS = 60
"""Of silence, until others take its process for dead. [judgement] Longer than a database restarts."""
MAX_NAME_CHARS = 200


@contextlib.contextmanager
def open_study(
    url: str,
    name: str,
    *,
    workload: Workload,
    gpu: str,
    command: str = "",
    versions: Mapping[str, str] | None = None,
    has_heartbeats: bool = False,
) -> Iterator[optuna.Study]:
    """Open the study of that name, or create it; use as `with open_study(...) as study:`.

    The workload, card, command and library versions of the run that creates a study are kept as
    its user attributes. `has_heartbeats`: for a search, whose trials others may have to judge (Optuna
    beats inside `study.optimize` alone). Problems of the database inside the `with` block are translated
    as well.

    Raises ConfigError when the study belongs to another workload or card, and StorageError for
    everything that the database refuses.
    """

    check_name(name)
    identity = json.loads(json.dumps({"workload": workload.to_dict(), "gpu": gpu}))
    parsed = parse_url(url)
    with explained(parsed):
        storage = open_storage(parsed, has_heartbeats=has_heartbeats)
        try:
            details = {"command": command, "versions": dict(versions or {})}
            attributes = {"schema_version": SCHEMA_VERSION, **details, **identity}
            study = _load_or_create(storage, name, attributes)
            _check_identity(study, identity)
            yield study
        finally:
            storage.remove_session()
            storage.engine.dispose()


@contextlib.contextmanager
def existing_study(url: str, name: str) -> Iterator[optuna.Study]:
    """Open a study that `open_study` has made; use as `with existing_study(...) as study:`.

    Nothing is created. Raises ConfigError for a name that is not there or is not autotune's, and
    StorageError for a database that is not there and everything that it refuses.
    """
    import optuna

    with existing_storage(url) as storage:
        names = optuna.get_all_study_names(storage)
        if name not in names:
            raise ConfigError(
                f"There is no study {name[:MAX_NAME_CHARS]!r} in {shown_url(url)}",
                remedy=nearest(name[:MAX_NAME_CHARS], names)
                if names
                else "Run `autotune find` first",
            )
        study = optuna.load_study(storage=storage, study_name=name)
        _check_schema(study)
        yield study


@contextlib.contextmanager
def existing_storage(url: str) -> Iterator[optuna.storages.RDBStorage]:
    """The database at that URL, which is not created. Raises StorageError."""
    parsed = parse_url(url)
    file = file_of(parsed)
    if file is not None and not file.exists():
        raise StorageError(
            f"There is no database {named(parsed)}",
            remedy="Run `autotune find` first, or name another with --storage",
        )
    with explained(parsed):
        storage = open_storage(parsed)
        try:
            yield storage
        finally:
            storage.remove_session()
            storage.engine.dispose()


def record_estimates(
    study: optuna.Study, estimates: Iterable[Estimate], *, budget_bytes: int
) -> int:
    """Add a trial per Estimate that is not in the study yet; return how many were added.

    About 7 ms per trial on SQLite (Optuna writes each in its own transaction): pass hundreds.

    Raises ConfigError when a setting has a value that the study's categories do not know.
    """
    stored = study.get_trials(deepcopy=False)
    known = {_identity(trial.user_attrs) for trial in stored}
    new = []
    for estimate in estimates:
        attributes = _attributes(estimate)
        if _identity(attributes) not in known:
            known.add(_identity(attributes))
            new.append((estimate, attributes))
    configs = [estimate.config for estimate, _ in new]
    distributions = _distributions(study.study_name, stored, configs)
    study.add_trials(
        _trial(estimate, attributes, distributions, budget_bytes) for estimate, attributes in new
    )
    return len(new)


def parameter_distributions(
    study: optuna.Study, configs: Sequence[TrainConfig]
) -> dict[str, BaseDistribution]:
    """The domain of each parameter of a study that is to hold these configurations.

    Raises ConfigError when a setting has a value that the study's categories do not know.
    """
    return _distributions(study.study_name, study.get_trials(deepcopy=False), configs)


def default_study_name(workload: Workload, *, gpu: str | None = None) -> str:
    """A name such as `qwen2.5-1.5b-12gb`, with whatever differs from `find`'s defaults appended.

    `gpu` only where the user named one: two cards of one budget need two studies.
    """
    path = Path(workload.model)
    name = path.parent.name if path.name == "config.json" else path.name
    parts = [slug(name), _short_size(workload.memory_budget_bytes)]
    for field, prefix in (("sequence_length", "seq"), ("effective_batch_size", "batch")):
        if getattr(workload, field) != _default(field):
            parts.append(f"{prefix}{getattr(workload, field)}")
    if workload.num_gpus > 1:
        parts.append(f"{workload.num_gpus}gpus")
    if workload.task != _default("task"):
        parts.append(workload.task)
    if set(workload.methods) != set(METHODS):
        parts += [method for method in METHODS if method in workload.methods]
    if workload.lengths is not None:
        known = json.dumps(dataclasses.asdict(workload.lengths))
        parts.append(f"data{hashlib.sha256(known.encode()).hexdigest()[:6]}")
    if gpu is not None:
        parts.append(slug(gpu))
    return "-".join(parts)


def slug(text: str) -> str:
    """Lower-case letters, digits, dots and dashes: fit for a file's name. Never empty."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower())[:60].strip("-.") or "model"


def folder_of(study: str) -> str:
    """A folder's name for a study that the user has named: two that differ in letters which a slug leaves
    out, those beyond ASCII, have one each."""
    made = slug(study)
    if study.isascii() and any(map(str.isalnum, study)):
        return made
    return f"{made}-{hashlib.sha256(study.encode()).hexdigest()[:6]}"


def check_name(name: str) -> None:
    """Raises ConfigError for one that no study can have."""
    if not name.strip() or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise ConfigError(
            f"{name[:40]!r} cannot name a study",
            why=f"A name is 1 to {MAX_NAME_CHARS} printable characters",
        )


def open_storage(url: URL, *, has_heartbeats: bool = False) -> optuna.storages.RDBStorage:
    """The database, with Optuna's tables; its session and engine are the caller's to close."""
    import optuna

    # Optuna reports the creation of a study on stderr, where our progress is shown, and every trial that
    # failed, with a traceback.
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    make_folder(url)
    text = url.render_as_string(hide_password=False)
    with warnings.catch_warnings(), _creating(url) as creates:
        # Of heartbeats, whose arguments may change in an Optuna to come.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        storage = optuna.storages.RDBStorage(
            # Optuna fills in a {SCHEMA_VERSION}, and stumbles over any other brace.
            text.replace("{", "{{").replace("}", "}}"),
            engine_kwargs=engine_options(url),
            skip_compatibility_check=True,
            heartbeat_interval=HEARTBEAT_SECONDS if has_heartbeats else None,
            grace_period=GRACE_SECONDS,
            # Tables are added to an empty database only: never to one that is newer, or another's.
            skip_table_creation=not creates,
        )
    version = storage.get_current_version()
    if version != storage.get_head_version():
        is_older = version in storage.get_all_versions()
        command = "optuna storage upgrade --storage URL" if is_older else "pip install -U optuna"
        raise StorageError(
            f"The database {named(url)} cannot be used",
            why=f"It was written by an {'older' if is_older else 'newer'} Optuna ({version})",
            remedy=f"Run `{command}`, {ELSEWHERE}",
        )
    return storage


def _load_or_create(
    storage: optuna.storages.RDBStorage, name: str, attributes: Mapping[str, Any]
) -> optuna.Study:
    import optuna

    with contextlib.suppress(KeyError):
        study = optuna.load_study(storage=storage, study_name=name)
        if is_ours(study.user_attrs):
            return study
    with locks.exclusive(storage.engine, "ask", name):
        study = optuna.create_study(
            storage=storage, study_name=name, direction="maximize", load_if_exists=True
        )
        # Nobody's yet; or its maker was killed half-way.
        if study.user_attrs.keys() <= attributes.keys() and not study.get_trials(deepcopy=False):
            for key, value in attributes.items():
                study.set_user_attr(key, value)
        return study


@contextlib.contextmanager
def _creating(url: URL) -> Iterator[bool]:
    """Whether Optuna's tables are to be created; nobody else does it at the same moment then.

    Raises StorageError for a stranger's database, or a newer one.
    """
    import sqlalchemy

    engine = sqlalchemy.create_engine(url, **engine_options(url))
    try:
        refuse_newer(engine)
        tables = sqlalchemy.inspect(engine).get_table_names()
        if {"studies", "version_info", "alembic_version"}.issubset(tables):
            yield False
        else:
            with locks.exclusive(engine, "ask", ""):
                yield True
    finally:
        engine.dispose()


def _check_identity(study: optuna.Study, wanted: dict[str, Any]) -> None:
    """Raise ConfigError when the study was made for something else than `wanted`."""
    stored = _check_schema(study)
    before = {**stored["workload"], "gpu": stored["gpu"]}
    now = {**wanted["workload"], "gpu": wanted["gpu"]}
    differences = [
        f"{key} was {before.get(key)}, now {now.get(key)}"
        for key in {**before, **now}
        if before.get(key) != now.get(key)
    ]
    if differences:
        raise ConfigError(
            f'The study "{study.study_name}" was made for something else',
            why="; ".join(differences),
            remedy="Choose another name with --study",
        )


def is_ours(attributes: Collection[str]) -> bool:
    """Whether a study with these user attributes was made by `open_study`."""
    return {"schema_version", "workload", "gpu"}.issubset(attributes)


def _check_schema(study: optuna.Study) -> dict[str, Any]:
    """The study's attributes. Raises ConfigError for a stranger's, StorageError for a newer one."""
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


def _attributes(estimate: Estimate) -> dict[str, Any]:
    return {
        "evidence": "predicted",
        "config": estimate.config.to_dict(),
        "tokens_per_second": estimate.tokens_per_second,
        "peak_device_bytes": estimate.peak_device_bytes,
    }


def _identity(attributes: Mapping[str, Any]) -> str:
    """Equal for trials that say the same about the same TrainConfig."""
    return json.dumps(
        {key: attributes.get(key) for key in ("config", "tokens_per_second", "peak_device_bytes")},
        sort_keys=True,
    )


def _distributions(
    study_name: str, stored: Sequence[FrozenTrial], configs: Sequence[TrainConfig]
) -> dict[str, BaseDistribution]:
    """The domain of each parameter.

    Optuna allows one list of choices per study and parameter: the stored one stays, so a value
    outside of it needs a new study.
    """
    from optuna.distributions import CategoricalDistribution

    fixed = {
        name: distribution.choices
        for trial in stored
        for name, distribution in trial.distributions.items()
        if isinstance(distribution, CategoricalDistribution)
    }
    distributions: dict[str, BaseDistribution] = {}
    choices_of = {"method": METHODS, **{name: knob.choices for name, knob in KNOBS.items()}}
    for name, listed in choices_of.items():
        used = {getattr(config, name) for config in configs} - {None}
        if not listed:
            distributions[name] = _numbers(KNOBS[name], used)
            continue
        choices = tuple(fixed.get(name, (*listed, *sorted(used.difference(listed)))))
        unknown = sorted(used.difference(choices))
        if unknown:
            raise ConfigError(
                f'The study "{study_name}" cannot hold {name} "{unknown[0]}"',
                why=f"Its choices were fixed by its first trial: {', '.join(map(str, choices))}",
                remedy="Choose another name with --study",
            )
        distributions[name] = CategoricalDistribution(choices)
    return distributions


def _numbers(knob: Knob, used: Collection[int]) -> BaseDistribution:
    from optuna.distributions import IntDistribution

    assert knob.smallest is not None
    largest = max(knob.usual_largest, *used, 0)
    return IntDistribution(knob.smallest, largest, log=knob.is_slope)


def _trial(
    estimate: Estimate,
    attributes: dict[str, Any],
    distributions: Mapping[str, BaseDistribution],
    budget_bytes: int,
) -> FrozenTrial:
    import optuna

    settings = {name: getattr(estimate.config, name) for name in distributions}
    params = {name: value for name, value in settings.items() if value is not None}
    excess_bytes = estimate.peak_device_bytes - budget_bytes
    is_complete = excess_bytes <= 0 and estimate.tokens_per_second is not None
    states = optuna.trial.TrialState
    return optuna.trial.create_trial(
        state=states.COMPLETE if is_complete else states.PRUNED,
        value=estimate.tokens_per_second if is_complete else None,
        params=params,
        distributions={name: distributions[name] for name in params},
        user_attrs={**attributes, OVER_BUDGET: excess_bytes},
        constraints={CONSTRAINT: float(excess_bytes)},
    )


def _default(field: str) -> object:
    return next(row.default for row in dataclasses.fields(Workload) if row.name == field)


def _short_size(size_bytes: int) -> str:
    """`12gb`, `24gib`, `11500mb`: the unit in which the size is a whole number, else MiB."""
    for unit_bytes, unit in ((10**9, "gb"), (GIB, "gib"), (10**6, "mb")):
        if size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{unit}"
    return f"{size_bytes / 2**20:.0f}mib"
