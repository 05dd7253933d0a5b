"""Writes what a database holds as a file of JSON lines."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

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

    The path - is stdout.
    With names, the recommendations of these studies and the probes of their models; without, all.
    Raises ConfigError for a name that is not autotune's study, StorageError.
    """
    with existing_storage(url) as storage:
        ours = sorted({s.study_name for s in storage.get_all_studies() if is_ours(s.user_attrs)})
    for name in names:
        if name not in ours:
            raise ConfigError(
                f"There is no study {name[:200]!r} of autotune to export",
                remedy=nearest(name[:200], ours) if ours else "Run `autotune find` first",
            )
    counts: Counter[str] = Counter()
    texts = map(lines.text_of, _records(url, names or ours, counts, everything=not names))
    if str(path) == files.STDOUT:
        sys.stdout.writelines(texts)
    else:
        files.write_all({path: texts}, what="The export", to=path, kind="file")
    return dict(counts)


def _records(
    url: str, names: Sequence[str], counts: Counter[str], *, everything: bool
) -> Iterator[lines.FileLine]:
    import optuna
    from optuna.trial import TrialState

    yield lines.header()
    with existing_storage(url) as storage:
        # Optuna has no study of one name twice; the order is that in which they were made.
        studies = [study for study in storage.get_all_studies() if study.study_name in names]
        models = {str(study.user_attrs["workload"].get("model")) for study in studies}
        for probe in _probes(url, None if everything else models):
            counts["probe" if probe else LEFT_OUT] += 1
            if probe is not None:
                yield probe
        with open_recommendations(url) as table:
            for one in table.everything():
                if everything or one.study in names:
                    counts["recommendation"] += 1
                    yield one
        for study in studies:
            trials = optuna.load_study(storage=storage, study_name=study.study_name).get_trials(
                deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
            )
            counts["study"] += 1
            counts["trial"] += len(trials)
            yield lines.StudyLine(
                name=study.study_name, user_attrs=study.user_attrs, num_trials=len(trials)
            )
            yield from map(lines.line_of_trial, trials)


def _probes(url: str, models: set[str] | None) -> Iterator[lines.ProbeLine | None]:
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
            yield lines.line_of_probe(row._mapping)
