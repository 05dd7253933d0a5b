"""The trials of a study: the domains of their parameters, and a trial for each prediction.

A study maximizes tokens per second. A trial is one TrainConfig. Its parameters are what the search
varies; what the workload fixes (sequence length, accumulation) is in the user attribute `config`.

| a predicted TrainConfig            | trial    | value             | constraint `memory`      |
|------------------------------------|----------|-------------------|--------------------------|
| fits                               | COMPLETE | tokens per second | peak - budget, at most 0 |
| fits, its speed is unknown         | PRUNED   | none              | peak - budget, at most 0 |
| does not fit                       | PRUNED   | none              | the excess in bytes      |

Nothing stored is ever changed or removed: what is said again in the same numbers is skipped, and
what is said in other numbers (a newer library predicts otherwise) becomes one more trial.
Constraints rather than FAIL, because samplers learn from them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.errors import ConfigError
from autotune.records.estimate import Estimate
from autotune.space.config import METHODS, TrainConfig
from autotune.space.headroom import NO_HEADROOM, Headroom
from autotune.space.knobs import KNOBS, Knob

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

CONSTRAINT = "memory"
"""Name of the trials' constraint: peak_device_bytes minus the budget."""
OVER_BUDGET = "over_budget_bytes"
"""User attribute of a trial with the value of its constraint: optuna-dashboard 0.21 shows no constraint that
has a name."""
PAGED_IN = "paged_in_bytes"
"""User attribute of a trial: how much of its peak is paged state that finds room; older trials have none."""
SPACE = "space"
"""User attribute of a trial: the name of the space whose search added it; older trials have none."""


def record_estimates(
    study: optuna.Study,
    estimates: Iterable[Estimate],
    *,
    budget_bytes: int,
    headroom: Headroom = NO_HEADROOM,
    host_memory_bytes: int | None = None,
    space: str = "",
) -> int:
    """Add a trial per Estimate of that space that is not in the study yet; return how many were added.

    About 7 ms per trial on SQLite (Optuna writes each in its own transaction): pass hundreds.

    Raises ConfigError when a setting has a value that the study's categories do not know.
    """
    stored = study.get_trials(deepcopy=False)
    known = {_identity(trial.user_attrs) for trial in stored}
    new = []
    for estimate in estimates:
        attributes = _attributes(estimate) | {SPACE: space}
        if _identity(attributes) not in known:
            known.add(_identity(attributes))
            new.append((estimate, attributes))
    configs = [estimate.config for estimate, _ in new]
    distributions = _distributions(study.study_name, stored, configs)
    study.add_trials(
        _trial(
            estimate,
            attributes,
            distributions,
            estimate.lacks_on_host(host_memory_bytes)
            or estimate.over_bytes(budget_bytes, headroom),
        )
        for estimate, attributes in new
    )
    return len(new)


def parameter_distributions(
    study: optuna.Study, configs: Sequence[TrainConfig]
) -> dict[str, BaseDistribution]:
    """The domain of each parameter of a study that is to hold these configurations.

    Raises ConfigError when a setting has a value that the study's categories do not know.
    """
    return _distributions(study.study_name, study.get_trials(deepcopy=False), configs)


def _attributes(estimate: Estimate) -> dict[str, Any]:
    return {
        "evidence": "predicted",
        "config": estimate.config.to_dict(),
        "tokens_per_second": estimate.tokens_per_second,
        "peak_device_bytes": estimate.peak_device_bytes,
        PAGED_IN: estimate.paged_in_bytes,
    }


def _identity(attributes: Mapping[str, Any]) -> str:
    """A text that is equal for trials that say the same about the same TrainConfig."""
    return json.dumps(
        {key: attributes.get(key) for key in ("config", "tokens_per_second", "peak_device_bytes")},
        sort_keys=True,
    )


def _distributions(
    study_name: str, stored: Sequence[FrozenTrial], configs: Sequence[TrainConfig]
) -> dict[str, BaseDistribution]:
    """The domain of each parameter, as Optuna's distributions.

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
    excess_bytes: int,
) -> FrozenTrial:
    import optuna

    settings = {name: getattr(estimate.config, name) for name in distributions}
    params = {name: value for name, value in settings.items() if value is not None}
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
