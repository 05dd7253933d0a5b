"""Writes what a database holds as a file of JSON lines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.common import files
from autotune.errors import ConfigError, nearest
from autotune.store.optuna_study import existing_storage, is_ours
from autotune.store.recommendations import open_recommendations
from autotune.store.transfer import lines
from autotune.store.upgrade import open_engine

LEFT_OUT = "left out"
"""Key of the counts for probes that another version wrote and this one cannot read."""


def export(url: str, names: Sequence[str], path: Path) -> dict[str, int]:
    """Write the studies of these names, or all; return how many records of each kind were written.

    With names, the recommendations of these studies and the probes of their models; without, all.
    Raises ConfigError for a name that is not autotune's study, StorageError.
    """
    with existing_storage(url) as storage:
        ours = {s.study_name for s in storage.get_all_studies() if is_ours(s.user_attrs)}
    for name in names:
        if name not in ours:
            raise ConfigError(
                f"There is no study {name[:200]!r} of autotune to export",
                remedy=nearest(name[:200], sorted(ours)) if ours else "Run `autotune find` first",
            )
    counts: Counter[str] = Counter()
    records = _counted(_records(url, names, counts), counts)
    texts = (json.dumps(record, allow_nan=False) + "\n" for record in records)
    files.write_all({path: texts}, what="The export", to=path, kind="file")
    return dict(counts)


def _records(url: str, names: Sequence[str], counts: Counter[str]) -> Iterator[dict[str, Any]]:
    import optuna

    yield lines.header()
    with existing_storage(url) as storage:
        # Optuna has no study of one name twice; the order is that in which they were made.
        studies = [
            study
            for study in storage.get_all_studies()
            if is_ours(study.user_attrs) and (not names or study.study_name in names)
        ]
        models = {study.user_attrs["workload"].get("model") for study in studies}
        yield from _probes(url, models if names else None, counts)
        with open_recommendations(url) as table:
            for one in table.everything():
                if not names or one.study in names:
                    yield lines.of_recommendation(one)
        for study in studies:
            finished = (
                optuna.trial.TrialState.COMPLETE,
                optuna.trial.TrialState.PRUNED,
                optuna.trial.TrialState.FAIL,
            )
            trials = storage.get_all_trials(study._study_id, deepcopy=False, states=finished)
            yield {
                "kind": "study",
                "name": study.study_name,
                "user_attrs": study.user_attrs,
                "num_trials": len(trials),
            }
            yield from map(lines.of_trial, trials)


def _probes(
    url: str, models: Iterable[str] | None, counts: Counter[str]
) -> Iterator[dict[str, Any]]:
    from autotune.store.schema import probes

    query = probes.select().order_by(probes.c.id)
    if models is not None:
        # A probe may have been kept without its model's name.
        query = query.where(probes.c.model.in_([*models, ""]))
    with (
        open_engine(url) as engine,
        engine.connect().execution_options(yield_per=1000) as connection,
    ):
        for row in connection.execute(query):
            line = lines.of_probe(row._mapping)
            if line is None:
                counts[LEFT_OUT] += 1
            else:
                yield line


def _counted(
    records: Iterable[Mapping[str, Any]], counts: Counter[str]
) -> Iterator[Mapping[str, Any]]:
    for record in records:
        if record["kind"] != "header":
            counts[record["kind"]] += 1
        yield record
