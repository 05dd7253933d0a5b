"""Stages 4 and 5 of the funnel: measures the configurations that could be fastest, confirms the winner.

A loop of Optuna's ask and tell: the sampler proposes, a process of its own measures (autotune.probe.run_one),
the study and the table of probes keep it. Where the fleet has several cards, each is kept busy as long as
there is something worth a probe. Killed at any moment, the same command goes on: what was measured is in the
table, and a trial left running is given back. Nobody else searches in the study meanwhile
(autotune.store.locks). Each timed step of a probe is reported to its trial, and what the study's pruner gives
up is stopped part-way.

The winner then runs again, alone and longer, with an evaluation and a checkpoint, and where its batches vary
in length with such batches, too. Where it fails, the next one by the same rule takes its place; where it is
slower than another's probe, the faster one of the two after that one's confirmation. A disk without room for
the checkpoint is no failure of the winner: it stays, not confirmed.

The base is measured first. Where it is a candidate it is the first trial, which costs no second probe, and
no answer is slower: a winner that is confirmed to be slower than the base's probe is compared with the base's
confirmation.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.probe import compiled
from autotune.probe.pruner import SpeedPruner
from autotune.probe.run_one import Prober
from autotune.probe.sampler import Candidate, PredictionSampler
from autotune.probe.study_view import StudyView
from autotune.probe.tell_optuna import tell, watched
from autotune.probe.trial_history import key_of
from autotune.probe.trials import (
    Proposal,
    ask,
    give_back_abandoned,
    give_back_interrupted,
)
from autotune.probe.winner import (
    MAX_CONFIRMATIONS,
    Final,
    final,
    none_confirmed,
    nothing_fits,
    run_speed,
)
from autotune.records.answer import Measured
from autotune.records.estimate import Estimate
from autotune.records.measurement import NOISE, Measurement
from autotune.space import requirements
from autotune.space.config import TrainConfig
from autotune.space.lengths import vary
from autotune.space.tradeoffs import form, tradeoff_class
from autotune.store.predicted_trials import SPACE, parameter_distributions

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

PIECES_SHARE = 0.7
"""Share of a configuration's memory at full length that another may need at most, once the first did not fit
with varied lengths. [judgement] With varied lengths the allocator was seen to reserve up to 2.3 times as
much (studies/no-card), and the third of MAX_CONFIRMATIONS needs half of what the first did."""

OnProbe = Callable[[int, Measurement, Measurement | None], None]
"""A function that hears of each probe: (probes so far, what was just measured, the best that fits)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The candidates to measure, as predicted, and the limits of the search."""

    pool: Sequence[Estimate]
    base: TrainConfig
    baseline: Estimate | None
    budget_bytes: int
    max_probes: int
    confirm_steps: int = 0
    """Optimizer steps of the winner's confirmation; 0 skips it."""
    seed: int = 0
    train_steps: int | None = None
    """Optimizer steps of the run that cold starts are weighed against; None: steady speed decides."""
    variants: Callable[[Estimate], Sequence[Estimate]] = lambda _: ()
    """The compiled variants of an eager candidate that may be measured too."""
    space: str = ""
    """Name of the space that the candidates are points of."""


def can_run(config: TrainConfig, backend: str) -> bool:
    """Whether a probe of it makes sense on that backend.

    A CPU has no device memory to offload from, and no Triton.
    """
    runs_there = not requirements.of_probe(config, backend)
    return runs_there and not compiled.why_not(config, backend)


def search(
    study: optuna.Study,
    plan: Plan,
    prober: Prober,
    *,
    on_probe: OnProbe = lambda *_: None,
) -> Measured:
    """Probe until nothing is likely to beat the best by more than the noise; confirm the winner.

    Raises NothingFitsError when no candidate fits, or survives its confirmation; WorkerError when
    every probe, or every confirmation, failed otherwise; StorageError when the study holds what cannot be
    read.
    """
    return _Search(study, plan, prober, on_probe).run()


class _Search:
    """One search: its candidates, and all that it has measured and given up so far."""

    def __init__(self, study: optuna.Study, plan: Plan, prober: Prober, on_probe: OnProbe) -> None:
        self._study, self._plan, self._prober, self._on_probe = study, plan, prober, on_probe
        give_back_abandoned(study)
        self._seen = StudyView(study, prober.fingerprint_of)
        self._baseline = None if plan.baseline is None else prober.measure(plan.baseline.config)
        self._predicted = {estimate.config: estimate for estimate in plan.pool}
        """Predictions of all candidates, those of the compiled ones that have joined them too."""
        self._rejected: list[Measurement] = []
        """Confirmations that failed."""
        self._confirmed: dict[TrainConfig, Measurement] = {}
        """Every confirmation of this search, whatever came of it."""

    def run(self) -> Measured:
        plan, rejected = self._plan, self._rejected
        known: list[Measurement] = []
        while len(rejected) < MAX_CONFIRMATIONS:
            known = self._measure()
            # Those that were stopped as too slow were so beside one that may yet disappoint, or did.
            rivals = [m for m in known if m.config not in self._refused and m.stayed_within_budget]
            fitting = rivals if rejected else [m for m in rivals if m.fits]
            if not fitting:
                break
            confirm = self._confirm if plan.confirm_steps else None
            found = final(
                fitting, rivals, plan.base, rejected, confirm, train_steps=plan.train_steps
            )
            if found is not None:
                return self._measured(self._no_slower_than_base(found), known)
        if rejected:
            raise none_confirmed(rejected)
        raise nothing_fits(known, plan.budget_bytes)

    @property
    def _refused(self) -> set[TrainConfig]:
        """Configurations that failed their confirmation, and those that are likely to.

        Where one failed for memory in pieces, the latter need not much less and have segments of the same
        kind.
        """
        predicted = self._predicted
        in_pieces = [predicted[m.config] for m in self._rejected if m.is_in_pieces]

        def is_alike(estimate: Estimate) -> bool:
            config = estimate.config
            return vary(config.batching) and any(
                config.expandable_segments == failed.config.expandable_segments
                and estimate.peak_device_bytes > PIECES_SHARE * failed.peak_device_bytes
                for failed in in_pieces
            )

        alike = {config for config, estimate in predicted.items() if is_alike(estimate)}
        return alike | {m.config for m in self._rejected}

    def _measure(self) -> list[Measurement]:
        """Probe the candidates, then compiled variants of the best; return all that is known of them."""
        seen, predicted = self._seen, self._predicted
        seen.refuse(self._refused)
        seen.choose_from(set(predicted))
        self._probe(list(predicted.values()), self._plan.max_probes)
        known = seen.known(predicted)
        added = self._variants(known)
        if not added:
            return known
        predicted.update({estimate.config: estimate for estimate in added})
        seen.choose_from(set(predicted))
        # Beside what is measured: the others were not worth a probe, or there was no time.
        beside = [predicted[m.config] for m in known] + added
        self._probe(beside, seen.num_begun + len(added))
        return seen.known(predicted)

    def _variants(self, known: Sequence[Measurement]) -> list[Estimate]:
        """Compiled variants of the fastest eager configurations that fit, less those already candidates."""
        predicted = self._predicted
        best = compiled.bases([m for m in known if m.fits], self._refused)
        found = (variant for m in best for variant in self._plan.variants(predicted[m.config]))
        num_left = compiled.MAX_PROBES - sum(config.is_compiled for config in predicted)
        return [estimate for estimate in found if estimate.config not in predicted][:num_left]

    def _confirm(self, best: Measurement) -> Measurement:
        predicted = self._predicted[best.config]
        confirmation = self._prober.confirm(best, predicted, self._plan.confirm_steps)
        self._confirmed[best.config] = confirmation
        return confirmation

    def _no_slower_than_base(self, found: Final) -> Final:
        """The winner, or the base where it is confirmed to be faster.

        Others may have been confirmed before the base was.
        """
        base, confirmation = self._baseline, found.confirmation
        if base is None or not base.fits or base.config not in self._predicted:
            return found
        if confirmation is None or not confirmation.fits or base.config in self._confirmed:
            return found
        least_speed = run_speed(confirmation, self._plan.train_steps) / (1 - NOISE)
        if run_speed(base, self._plan.train_steps) <= least_speed:
            return found
        seen = self._confirm(base)
        if not seen.fits or run_speed(seen, self._plan.train_steps) <= least_speed:
            return found
        return Final(best=base, num_tied=0, confirmation=seen)

    def _base_told(self, found: Final) -> Measurement | None:
        """The measurement of the base to set beside the winner's.

        Where there is one of whole steps, it is that, to be compared with the winner's whole steps.
        """
        base = self._baseline
        if base is None or found.confirmation is None or not found.confirmation.fits:
            return base
        confirmed = self._confirmed.get(base.config, base)
        return confirmed if confirmed.fits else base

    def _measured(self, found: Final, known: Sequence[Measurement]) -> Measured:
        prober = self._prober
        return Measured(
            best=found.best,
            predicted=self._predicted[found.best.config],
            baseline=self._base_told(found),
            num_run=prober.num_run,
            num_near=len(prober.near_seen),
            near_versions=prober.near_versions,
            num_tied=found.num_tied,
            outcomes=dict(Counter(m.outcome for m in known)),
            confirmation=found.confirmation,
            rejected=tuple(self._rejected),
            train_steps=self._plan.train_steps,
            eager=compiled.fastest(known, is_compiled=False),
            compiled=compiled.fastest(known, is_compiled=True),
            num_compiled=sum(m.config.is_compiled for m in known),
            of_classes=self._of_classes(known),
        )

    def _of_classes(self, known: Sequence[Measurement]) -> dict[str, Measurement]:
        """The fastest of each trade-off class, of those that make the fewest further trades.

        What was confirmed is told as it was confirmed, and goes before what was probed alone: beside the
        winner's whole steps, probes that they proved too fast would look faster than it.
        """
        base, steps = self._plan.base, self._plan.train_steps
        confirmed = {c: m for c, m in self._confirmed.items() if m.fits}
        within = [
            confirmed.get(m.config, m)
            for m in known
            if m.stayed_within_budget and m.config not in self._refused
        ]
        within.sort(
            key=lambda m: (form(m.config, base), m.config not in confirmed, -run_speed(m, steps))
        )
        return {tradeoff_class(m.config, base): m for m in reversed(within)}

    def _probe(self, pool: Sequence[Estimate], max_probes: int) -> None:
        """Probe until nothing that is left is likely to be faster.

        `max_probes` counts those of earlier searches in the study on machines like this one.
        """
        study, seen = self._study, self._seen
        distributions = parameter_distributions(study, [e.config for e in pool])
        left = [e for e in pool if e.config not in self._refused]
        if self._rejected and not left:
            return
        study.pruner = pruner = SpeedPruner(noise=NOISE, leave_out=seen.left_out)
        predicted, sampler = self._sampler(left, distributions)
        study.sampler = sampler
        base = self._base_params(predicted)

        def needs_base() -> bool:
            return base is not None and not seen.known([base[0]])

        def propose() -> Proposal | None:
            seen.look()
            if base is not None and needs_base() and base[0] not in running:
                return Proposal(
                    params=base[1], distributions={n: distributions[n] for n in base[1]}
                )
            if seen.num_begun >= max_probes or not sampler.has_another(study):
                return None
            proposed = sampler.propose(study)
            if proposed is None:
                return None
            return Proposal(params=proposed.params, distributions=sampler.search_space(proposed))

        running: dict[TrainConfig, tuple[optuna.Trial, Estimate]] = {}
        try:
            while True:
                while len(running) < self._prober.num_cards and (asked := propose()) is not None:
                    estimate = predicted[key_of(asked.params)]
                    trial = ask(study, asked)
                    running[estimate.config] = trial, estimate
                    trial.set_user_attr(SPACE, self._plan.space)
                    known = self._prober.begin(
                        estimate.config,
                        watch=watched(study, trial),
                        slow_below=(pruner.best_speed(study) or 0.0) * (1 - NOISE),
                    )
                    if known is not None:
                        self._told(running, known)
                if not running:
                    return
                self._told(running, self._prober.wait()[1])
                if running and not needs_base() and sampler.should_stop(study):
                    self._prober.drop()
                    return
        finally:
            # An exception's, or those that were dropped.
            for trial, _ in running.values():
                give_back_interrupted(study, trial)

    def _told(
        self,
        running: dict[TrainConfig, tuple[optuna.Trial, Estimate]],
        measurement: Measurement,
    ) -> None:
        """Tell the study of a measurement; its trial runs no more."""
        trial, estimate = running[measurement.config]
        tell(self._study, trial, measurement, estimate)
        del running[measurement.config]
        self._seen.own.append(measurement)
        self._seen.look()
        num_ended = self._seen.num_begun - self._seen.num_running
        self._on_probe(num_ended, measurement, self._seen.fastest())

    def _base_params(
        self, predicted: Mapping[frozenset[Any], Estimate]
    ) -> tuple[TrainConfig, dict[str, Any]] | None:
        """The base and its trial's parameters; None where it is no candidate, or does not fit."""
        base = self._baseline
        if base is None or not base.fits:
            return None
        found = (key for key, estimate in predicted.items() if estimate.config == base.config)
        return next(((base.config, dict(key)) for key in found), None)

    def _sampler(
        self, pool: Sequence[Estimate], distributions: Mapping[str, BaseDistribution]
    ) -> tuple[dict[frozenset[Any], Estimate], PredictionSampler]:
        """The estimates by their trials' parameters, and the sampler that proposes one of them."""
        predicted: dict[frozenset[Any], Estimate] = {}
        candidates = []
        for estimate in pool:
            assert estimate.tokens_per_second is not None
            candidate = Candidate.of(
                estimate.config,
                distributions,
                tokens_per_second=estimate.tokens_per_second,
                peak_device_bytes=estimate.peak_device_bytes,
                compile_seconds=statistics.mean(estimate.compile_seconds or (0.0,)),
            )
            predicted[key_of(candidate.params)] = estimate
            candidates.append(candidate)
        near = self._prober.near([e.config for e in pool])
        return predicted, PredictionSampler(
            candidates,
            distributions=distributions,
            budget_bytes=self._plan.budget_bytes,
            noise=NOISE,
            leave_out=self._seen.left_out,
            seed=self._plan.seed,
            near={key: near[e.config] for key, e in predicted.items() if e.config in near},
        )
