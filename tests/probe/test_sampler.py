"""The sampler: finds the best of synthetic tables in few probes, and reads a study as documented."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState
from optuna_storage import unpooled

from autotune.probe import sampler as module
from autotune.probe.sampler import Candidate, Near, PredictionSampler, knobs
from autotune.probe.trial_history import INTERRUPTED, History, key_of
from autotune.space.config import TrainConfig
from autotune.store.predicted_trials import CONSTRAINT
from validation import sampler as comparison

BUDGET_BYTES = 10_000

DISTRIBUTIONS: dict[str, BaseDistribution] = {
    "attention": CategoricalDistribution(("eager", "sdpa")),
    "activation_offloading": CategoricalDistribution((False, True)),
    "micro_batch_size": IntDistribution(1, 32, log=True),
    "lora_rank": IntDistribution(1, 1024, log=True),
}


def candidate(
    attention: str = "sdpa",
    *,
    offloading: bool = False,
    size: int = 1,
    rank: int | None = None,
    speed: float = 100.0,
    peak_bytes: int = 5_000,
) -> Candidate:
    params = {
        "attention": attention,
        "activation_offloading": offloading,
        "micro_batch_size": size,
    }
    return Candidate(
        params=params if rank is None else {**params, "lora_rank": rank},
        knobs={"attention": attention, "offloading": offloading, "size": math.log2(size)},
        tokens_per_second=speed,
        peak_device_bytes=peak_bytes,
    )


def sampler_of(*candidates: Candidate, seed: int = 0) -> PredictionSampler:
    return PredictionSampler(
        candidates, distributions=DISTRIBUTIONS, budget_bytes=BUDGET_BYTES, seed=seed
    )


def new_study(sampler: optuna.samplers.BaseSampler | None = None) -> optuna.Study:
    return optuna.create_study(direction="maximize", sampler=sampler)


def add(
    study: optuna.Study,
    probed: Candidate,
    *,
    speed: float | None = None,
    excess_bytes: float | None = None,
    state: TrialState = TrialState.COMPLETE,
    reported: float | None = None,
    attributes: dict[str, Any] | None = None,
) -> None:
    study.add_trial(
        optuna.trial.create_trial(
            state=state,
            value=speed,
            params=dict(probed.params),
            distributions={name: DISTRIBUTIONS[name] for name in probed.params},
            constraints=None if excess_bytes is None else {CONSTRAINT: excess_bytes},
            intermediate_values=None if reported is None else {4: reported},
            user_attrs=attributes,
        )
    )


@pytest.mark.parametrize("family", ["full", "lora", "methods"])
def test_twelve_probes_find_the_best_of_a_table(family: str) -> None:
    num_found = num_found_in_order = 0
    for seed in range(20):
        table = comparison.synthetic(family, seed)
        probes = comparison.predictions_corrected(table, seed, 12)
        assert len(probes.probed) <= 12
        num_found += probes.curve(12)[-1] >= 0.98
        in_order = comparison.predictions_in_order(table, seed, 12)
        num_found_in_order += in_order.curve(12)[-1] >= 0.98
    assert num_found >= 18
    # The tables are hard enough to tell: predictions alone do not do.
    assert num_found_in_order <= 10


def test_knobs_that_act_on_each_other_are_survived() -> None:
    found = []
    for seed in range(20):
        table = comparison.synthetic("methods", seed, crossed=comparison.CROSSED)
        found.append(comparison.predictions_corrected(table, seed, 12).curve(12)[-1])
    assert np.mean([speed >= 0.98 for speed in found]) >= 0.75
    assert np.median(found) == 1.0


def test_the_first_probe_is_the_fastest_that_is_predicted_to_fit() -> None:
    fastest = candidate(size=4, speed=300, peak_bytes=BUDGET_BYTES + 1)
    best = candidate(size=2, speed=200, peak_bytes=BUDGET_BYTES)
    slow = candidate(size=1, speed=100, peak_bytes=10)
    assert sampler_of(fastest, slow, best).propose(new_study()) == best


def test_of_those_that_promise_the_same_what_compiles_long_is_tried_later() -> None:
    first, quick = candidate(size=4, speed=100), candidate(size=2, speed=99)
    slow = dataclasses.replace(candidate(size=1, speed=99.5), compile_seconds=40)
    for listed in ((first, quick, slow), (slow, quick, first)):
        sampler, study = sampler_of(*listed), new_study()
        add(study, first, speed=100, excess_bytes=-5000)
        assert sampler.propose(study) == quick
    # It is tried all the same where it promises much more.
    much = dataclasses.replace(candidate(size=1, speed=160), compile_seconds=40)
    sampler, study = sampler_of(first, quick, much), new_study()
    add(study, first, speed=100, excess_bytes=-5000)
    assert sampler.propose(study) == much


def test_where_nothing_is_predicted_to_fit_the_likeliest_is_tried() -> None:
    far = candidate(size=4, speed=110, peak_bytes=int(BUDGET_BYTES * 1.3))
    near = candidate(size=1, speed=100, peak_bytes=int(BUDGET_BYTES * 1.02))
    sampler = sampler_of(far, near)
    assert not sampler.should_stop(new_study())
    assert sampler.propose(new_study()) == near


def test_it_stops_at_once_where_nothing_can_fit() -> None:
    assert sampler_of(candidate(peak_bytes=BUDGET_BYTES * 2)).should_stop(new_study())
    assert sampler_of().should_stop(new_study())


def test_after_running_out_of_memory_it_tries_what_is_likelier_to_fit() -> None:
    large = candidate(size=32, speed=300, peak_bytes=9_900)
    next_largest = candidate(size=16, speed=299, peak_bytes=9_800)
    small = candidate(size=8, speed=250, peak_bytes=8_000)
    sampler, study = sampler_of(large, next_largest, small), new_study()
    assert sampler.propose(study) == large
    add(study, large, state=TrialState.PRUNED, excess_bytes=900)
    assert not sampler.should_stop(study)
    assert sampler.propose(study) == small


def test_a_measurement_of_one_knob_says_something_of_what_shares_it() -> None:
    eager, sdpa = candidate("eager", size=1), candidate("sdpa", size=1)
    more_eager, more_sdpa = candidate("eager", size=2), candidate("sdpa", size=2)
    sampler = sampler_of(eager, sdpa, more_eager, more_sdpa)
    for speed_of_eager, expected in ((150.0, more_eager), (60.0, more_sdpa)):
        study = new_study()
        add(study, sdpa, speed=100, excess_bytes=-5_000)
        add(study, eager, speed=speed_of_eager, excess_bytes=-5_000)
        assert not sampler.should_stop(study)
        assert sampler.propose(study) == expected


def test_a_probe_stopped_as_too_slow_turns_away_from_what_shares_its_knobs() -> None:
    first = candidate("sdpa", size=1, speed=100)
    probed, alike = candidate("eager", size=1, speed=110), candidate("eager", size=2, speed=112)
    other = candidate("sdpa", offloading=True, size=2, speed=111)
    sampler, study = sampler_of(first, probed, alike, other), new_study()
    add(study, first, speed=100, excess_bytes=-5_000)
    assert sampler.propose(study) == alike
    add(study, probed, state=TrialState.PRUNED, reported=40.0)
    assert sampler.propose(study) == other


def test_a_probe_that_was_stopped_had_at_most_the_speed_that_it_reported() -> None:
    """At most 150 where 100 is predicted says nothing: not that it, and its likes, had 150."""
    first = candidate("sdpa", size=1, speed=160)
    probed, alike = candidate("eager", size=1, speed=100), candidate("eager", size=2, speed=112)
    other = candidate("sdpa", offloading=True, size=2, speed=118)
    sampler, study = sampler_of(first, probed, alike, other), new_study()
    add(study, first, speed=160, excess_bytes=-5_000)
    add(study, probed, state=TrialState.PRUNED, reported=150.0)
    assert sampler.propose(study) == other


def test_a_larger_peak_than_predicted_makes_its_likes_doubtful() -> None:
    probed = candidate("eager", size=1, speed=100, peak_bytes=8_000)
    alike = candidate("eager", size=2, speed=200, peak_bytes=9_500)
    other = candidate("sdpa", size=2, speed=190, peak_bytes=9_500)
    sampler, study = sampler_of(probed, alike, other), new_study()
    add(study, probed, speed=100, excess_bytes=-2_000)
    assert sampler.propose(study) == alike
    surprised = new_study()
    add(surprised, probed, speed=100, excess_bytes=-1_000)
    assert sampler.propose(surprised) == other


def test_it_stops_when_nothing_is_likely_to_be_faster() -> None:
    best, hopeless = candidate(size=2, speed=100), candidate(size=1, speed=40)
    sampler, study = sampler_of(best, hopeless), new_study()
    add(study, best, speed=100, excess_bytes=-5_000)
    assert sampler.should_stop(study)
    assert sampler.propose(study) == hopeless


@pytest.mark.parametrize(("noise", "stops"), [(0.02, False), (0.98, True)])
def test_it_stops_where_what_is_faster_is_so_by_less_than_the_noise(
    noise: float, stops: bool
) -> None:
    """A tenth faster is worth a probe, unless speeds of which one is nearly twice the other are tied."""
    best, faster = candidate(speed=100), candidate(offloading=True, speed=110)
    sampler = PredictionSampler(
        [best, faster], distributions=DISTRIBUTIONS, budget_bytes=BUDGET_BYTES, noise=noise
    )
    study = new_study()
    add(study, best, speed=100, excess_bytes=-5_000)
    assert sampler.should_stop(study) == stops


def test_what_does_not_fit_is_never_the_one_to_beat() -> None:
    over, other = candidate(size=2, speed=200), candidate(size=1, speed=60)
    sampler, study = sampler_of(over, other), new_study()
    add(study, over, speed=200, excess_bytes=1)
    assert not sampler.should_stop(study)


def test_a_measurement_of_something_else_is_the_one_to_beat() -> None:
    sampler, study = sampler_of(candidate(speed=100)), new_study()
    add(study, candidate(size=16), speed=1_000, excess_bytes=-1)
    assert sampler.should_stop(study)


def test_trials_of_something_else_hide_none_that_come_later() -> None:
    first, second = candidate(size=1, speed=100), candidate(size=2, speed=90)
    sampler, study = sampler_of(first, second), new_study()
    add(study, first, speed=9e9, excess_bytes=-1, attributes={"evidence": "predicted"})
    add(study, candidate(size=16), speed=10, excess_bytes=-1)
    add(study, candidate(size=4), state=TrialState.FAIL)
    add(study, second, state=TrialState.FAIL)
    add(study, first, speed=100, excess_bytes=-5_000)
    assert sampler.propose(study) == second
    add(study, second, speed=90, excess_bytes=-5_000)
    assert sampler.propose(study) is None


def test_predicted_trials_say_nothing() -> None:
    only = candidate()
    sampler, study = sampler_of(only), new_study()
    add(study, only, speed=9e9, excess_bytes=-1, attributes={"evidence": "predicted"})
    assert not sampler.should_stop(study)
    assert sampler.propose(study) == only


@pytest.mark.parametrize(
    ("outcomes", "again"),
    [
        (["crashed"], True),
        (["crashed", "timeout"], False),
        ([INTERRUPTED, INTERRUPTED, INTERRUPTED], True),
        ([INTERRUPTED, "crashed"], True),
    ],
)
def test_failures_are_tried_once_more(outcomes: list[str | None], again: bool) -> None:
    only = candidate()
    sampler, study = sampler_of(only), new_study()
    for outcome in outcomes:
        attributes = {"outcome": outcome} if outcome else None
        add(study, only, state=TrialState.FAIL, attributes=attributes)
    assert sampler.should_stop(study) is not again
    assert sampler.propose(study) == (only if again else None)


@pytest.mark.parametrize(
    ("outcomes", "again"),
    [
        ([None] * 4, True),
        ([None] * 5, False),
        (["ok", None, "oom", INTERRUPTED, INTERRUPTED], True),
        (["crashed", None], True),
        (["crashed", None, "timeout"], False),
    ],
)
def test_what_its_process_did_not_survive_is_tried_a_few_times(
    outcomes: list[str | None], again: bool
) -> None:
    only = candidate()
    sampler, study = sampler_of(only), new_study()
    for outcome in outcomes:
        said = {"outcome": outcome} if outcome else {}
        add(study, only, state=TrialState.FAIL, attributes=said)
    assert sampler.propose(study) == (only if again else None)


def test_what_runs_is_not_proposed() -> None:
    one, other = candidate(size=2), candidate(size=1)
    sampler = sampler_of(one, other)
    study = new_study(sampler)
    first = sampler.propose(study)
    assert first is not None
    study.ask(sampler.search_space(first))
    assert sampler.propose(study) in (one, other)
    assert sampler.propose(study) != first


def test_what_runs_is_believed_to_end_as_it_is_predicted() -> None:
    """Before anything is measured the middle of what is believed is what was predicted."""
    fast, huge, free = (
        candidate(size=2, speed=200.0),
        candidate(size=4, speed=400.0, peak_bytes=10 * BUDGET_BYTES),
        candidate(speed=100.0),
    )
    sampler = sampler_of(fast, huge, free)

    def believed(*running: int, best_speed: float | None = None) -> History:
        nothing: dict[str, dict[int, float]] = {
            name: {} for name in ("speeds", "most_speeds", "peaks", "least_excesses")
        }
        seen = History(tried=set(running), running=set(running), best_speed=best_speed, **nothing)
        return sampler._believed(seen)

    # Candidates are in the order of their promise.
    numbers = {each.params["micro_batch_size"]: n for n, each in enumerate(sampler._candidates)}
    assert believed().speeds == {}
    assert believed(best_speed=50.0).best_speed == 50.0
    one = believed(numbers[2])
    assert one.speeds == {numbers[2]: pytest.approx(200.0)}
    assert one.best_speed == pytest.approx(200.0)
    assert believed(numbers[2], best_speed=300.0).best_speed == 300.0
    # Of what is not likely to fit nothing is expected.
    both = believed(numbers[2], numbers[4])
    assert both.speeds == {numbers[2]: pytest.approx(200.0), numbers[4]: pytest.approx(400.0)}
    assert both.best_speed == pytest.approx(200.0)
    assert believed(numbers[4]).best_speed is None


def objective_of(slow: Callable[[dict[str, Any]], float]) -> Callable[[optuna.Trial], float]:
    def objective(trial: optuna.Trial) -> float:
        params: dict[str, Any] = {
            "attention": trial.suggest_categorical("attention", ("eager", "sdpa")),
            "activation_offloading": trial.suggest_categorical(
                "activation_offloading", (False, True)
            ),
            "micro_batch_size": trial.suggest_int("micro_batch_size", 1, 32, log=True),
        }
        excess_bytes = params["micro_batch_size"] * 1_000 - BUDGET_BYTES
        trial.set_constraint(CONSTRAINT, excess_bytes)
        if excess_bytes > 0:
            raise optuna.TrialPruned
        return slow(params)

    return objective


GRID = [
    candidate(attention, offloading=offloading, size=size, speed=50 + size, peak_bytes=size * 990)
    for attention, offloading, size in itertools.product(
        ("eager", "sdpa"), (False, True), (1, 2, 4, 8, 9, 10, 11, 12)
    )
]


def speed_of(params: dict[str, Any]) -> float:
    return float(params["micro_batch_size"]) + (60 if params["attention"] == "eager" else 30)


def test_optimize_stops_by_itself_and_optuna_understands_the_study() -> None:
    study = new_study(sampler_of(*GRID))
    study.optimize(objective_of(speed_of), n_trials=len(GRID))
    assert len(study.trials) < len(GRID) / 2
    assert all(trial.state != TrialState.FAIL for trial in study.trials)
    assert study.best_trial.params["attention"] == "eager"
    assert study.best_trial.params["micro_batch_size"] == 10
    importances = optuna.importance.get_param_importances(study)
    assert set(importances) == {"attention", "activation_offloading", "micro_batch_size"}
    # An ordinary study: another sampler can go on with it.
    study.sampler = optuna.samplers.TPESampler(seed=0, n_startup_trials=1)
    study.optimize(objective_of(speed_of), n_trials=2)


def test_no_candidate_is_proposed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_BELOW", 0.0)
    study = new_study(sampler_of(*GRID))
    study.optimize(objective_of(speed_of), n_trials=len(GRID) + 5)
    probed = [frozenset(trial.params.items()) for trial in study.trials]
    assert len(probed) == len(set(probed)) == len(GRID)
    # One more, asked for against its advice, is pruned before it costs a probe.
    study.optimize(objective_of(speed_of), n_trials=1)
    assert study.trials[-1].state == TrialState.PRUNED
    assert not study.trials[-1].params


def test_a_study_read_back_goes_on_as_if_never_left(tmp_path: Path) -> None:
    continuous = new_study(sampler_of(*GRID))
    continuous.optimize(objective_of(speed_of), n_trials=8)
    url = f"sqlite:///{tmp_path}/study.db"
    for _ in range(len(continuous.trials)):
        study = optuna.create_study(
            storage=unpooled(url),
            study_name="s",
            direction="maximize",
            load_if_exists=True,
            sampler=sampler_of(*GRID),
        )
        study.optimize(objective_of(speed_of), n_trials=1)
    assert [t.params for t in study.trials] == [t.params for t in continuous.trials]
    assert len(continuous.trials) > 2


def test_the_seed_orders_equals_and_nothing_else() -> None:
    equals = [candidate(size=2**n) for n in range(5)]
    firsts = [sampler_of(*equals, seed=seed).propose(new_study()) for seed in (*range(8), 0)]
    assert firsts[0] == firsts[-1]
    assert any(first != firsts[0] for first in firsts)
    for seed in range(8):
        better = candidate("eager", speed=101)
        assert sampler_of(*equals, better, seed=seed).propose(new_study()) == better


def test_a_parameter_that_the_candidate_lacks_is_refused() -> None:
    sampler = sampler_of(candidate(rank=8, size=2, speed=200), candidate(size=1))
    study = new_study(sampler)
    trial = study.ask()
    assert trial.suggest_int("lora_rank", 1, 1024, log=True) == 8
    trial.suggest_int("micro_batch_size", 1, 32, log=True)
    with pytest.raises(ValueError, match="no temperature"):
        trial.suggest_float("temperature", 0, 1)


def test_a_study_that_minimizes_is_refused() -> None:
    with pytest.raises(ValueError, match="maximizes"):
        sampler_of(candidate()).propose(optuna.create_study(direction="minimize"))


def test_figures_that_cannot_be_are_passed_over() -> None:
    probed, other = candidate(size=2), candidate(size=1)
    sampler, study = sampler_of(probed, other), new_study()
    add(study, probed, state=TrialState.PRUNED, excess_bytes=math.inf, reported=0.0)
    assert not sampler.should_stop(study)
    assert sampler.propose(study) == other


def test_two_candidates_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="same parameters"):
        sampler_of(candidate(speed=1), candidate(speed=2))


def test_a_candidate_of_a_config_has_the_parameters_that_it_has() -> None:
    config = TrainConfig(
        method="full",
        micro_batch_size=8,
        gradient_accumulation_steps=4,
        sequence_length=128,
        precision="bf16-true",
        optimizer="adamw_torch",
        activation_checkpointing=2,
    )
    made = Candidate.of(
        config,
        ["method", "micro_batch_size", "lora_rank"],
        tokens_per_second=1.0,
        peak_device_bytes=2,
    )
    assert made.params == {"method": "full", "micro_batch_size": 8}
    assert made.knobs == knobs(config)
    assert made.knobs["log2_micro_batch_size"] == 3.0
    # The stride is a kind of checkpointing, not a quantity: 0 is none at all.
    assert made.knobs["activation_checkpointing"] == "2"
    assert "log2_lora_rank" not in made.knobs


def test_trials_that_are_left_out_say_nothing() -> None:
    """Neither that the best has been found, nor that a candidate has been tried."""
    slow, fast = candidate(size=1, speed=10.0), candidate(size=2, speed=100.0)
    study = new_study()
    add(study, fast, speed=100.0, excess_bytes=-1.0)
    assert sampler_of(slow, fast).propose(study) == slow
    assert sampler_of(slow, fast).should_stop(study)
    sampler = PredictionSampler(
        [slow, fast], distributions=DISTRIBUTIONS, budget_bytes=BUDGET_BYTES, leave_out={0}
    )
    assert sampler.propose(study) == fast
    assert not sampler.should_stop(study)


def with_near(*candidates: Candidate, near: dict[str, Near]) -> PredictionSampler:
    """`near` by the candidate's attention."""
    return PredictionSampler(
        candidates,
        distributions=DISTRIBUTIONS,
        budget_bytes=BUDGET_BYTES,
        near={
            key_of(each.params): near[each.params["attention"]]
            for each in candidates
            if each.params["attention"] in near
        },
    )


def seen_before(
    *, speed: float | None = None, peak_bytes: int | None = None, least_bytes: int | None = None
) -> Near:
    return Near(tokens_per_second=speed, peak_device_bytes=peak_bytes, least_bytes=least_bytes)


def test_what_another_driver_measured_decides_what_is_probed_first() -> None:
    """Predicted to be the fastest, and half as fast as that before the update."""
    eager, sdpa = candidate("eager", speed=110.0), candidate("sdpa", speed=100.0)
    assert with_near(eager, sdpa, near={}).propose(new_study()) == eager
    slow = {"eager": seen_before(speed=55.0, peak_bytes=5_000)}
    assert with_near(eager, sdpa, near=slow).propose(new_study()) == sdpa
    fast = {"sdpa": seen_before(speed=200.0, peak_bytes=5_000)}
    assert with_near(eager, sdpa, near=fast).propose(new_study()) == sdpa
    # It is no measurement: the same is probed again.
    fast = {"eager": seen_before(speed=220.0, peak_bytes=5_000)}
    assert with_near(eager, sdpa, near=fast).propose(new_study()) == eager


def test_what_another_driver_ran_out_of_memory_with_is_not_probed_first() -> None:
    """It needed a half more than the budget then."""
    eager, sdpa = candidate("eager", speed=110.0), candidate("sdpa", speed=100.0)
    out = {
        "eager": seen_before(least_bytes=15_000),
        "sdpa": seen_before(speed=100.0, peak_bytes=5_000),
    }
    assert with_near(eager, sdpa, near=out).propose(new_study()) == sdpa
    # That it needs what is a fifth of the budget, or more, says nothing.
    little = {"eager": seen_before(least_bytes=2_000), "sdpa": out["sdpa"]}
    assert with_near(eager, sdpa, near=little).propose(new_study()) == eager


def test_a_larger_peak_under_another_driver_is_believed() -> None:
    eager, sdpa = candidate("eager", speed=110.0), candidate("sdpa", speed=100.0)
    large = {
        "eager": seen_before(speed=110.0, peak_bytes=15_000),
        "sdpa": seen_before(speed=100.0, peak_bytes=5_000),
    }
    assert with_near(eager, sdpa, near=large).propose(new_study()) == sdpa
