"""Stages 4 and 5 of the funnel: the configurations that could be fastest, measured; the winner confirmed.

A loop of Optuna's ask and tell: the sampler proposes, a process of its own measures, the study and the
table of probes keep it before the next is asked for. What the table has for this fingerprint is not run
again. Killed at any moment, the same command goes on: what was measured is in the table, and a trial
left running is told to have been interrupted.

The winner then runs again, longer, with an evaluation and a checkpoint. Where it fails, the next one by
the same rule takes its place. A disk without room for the checkpoint is not held against it: the winner
stays, not confirmed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from autotune.config import TrainConfig
from autotune.errors import NothingFitsError, StorageError, WorkerError
from autotune.forkserver import ForkServer
from autotune.isolate import WorkerEnd
from autotune.knobs import describe
from autotune.models import ModelSource
from autotune.out_of_memory import says_out_of_memory
from autotune.probes import ProbeTable, probe_key
from autotune.results import (
    Estimate,
    Fingerprint,
    Measured,
    Measurement,
    ProbeSpec,
    measurement_from_dict,
)
from autotune.sampler import INTERRUPTED, Candidate, PredictionSampler
from autotune.store import CONSTRAINT, parameter_distributions
from autotune.tune import NOISE, gives_up
from autotune.units import format_bytes

if TYPE_CHECKING:
    import optuna

SET_UP_SECONDS = 120.0
"""A probe's deadline beyond its timed steps: building, warm-up, the last step begun."""

MAX_CONFIRMATIONS = 3
"""[judgement] Three that fail have a cause in common, which a fourth would share."""
NUM_CONFIRMATION_WARM_UP_STEPS = 10
"""Beside those that are timed: autotune.worker.probe warms up for 8 at most, and evaluates."""
CHECKPOINT_BYTES_PER_SECOND = 50e6
"""For the deadline: [judgement] a slow network disk."""

OnProbe = Callable[[int, Measurement, Measurement | None], None]
"""(probes so far, what was just measured, the best that fits)."""
OnConfirm = Callable[[TrainConfig], None]
"""What is about to be confirmed."""


class Prober:
    """Measures configurations of one model, each in a fresh process, and remembers."""

    def __init__(
        self, server: ForkServer, table: ProbeTable, model: ModelSource, spec: ProbeSpec
    ) -> None:
        self._server = server
        self._table = table
        self._model = model
        self.spec = spec
        self.fingerprint = self._ask_fingerprint()
        self.num_run = 0
        """Probes; confirmations are counted nowhere."""
        self.num_reused = 0

    def measure(self, config: TrainConfig, *, stop_below: float | None = None) -> Measurement:
        """The table's measurement, or a new one, which is in the table when this returns.

        `stop_below`: tokens per second that make measuring to the end worth while.
        """
        spec = dataclasses.replace(self.spec, stop_below_tokens_per_second=stop_below)
        known = self._find(config, spec)
        if known is not None:
            self.num_reused += 1
            return known
        self.num_run += 1
        return self._run(config, spec, deadline_seconds=SET_UP_SECONDS + 3 * spec.max_seconds)

    def confirm(self, best: Measurement, predicted: Estimate, num_steps: int) -> Measurement:
        """The table's confirmation of what a probe measured, or a new one."""
        spec = dataclasses.replace(self.spec, confirm_steps=num_steps)
        known = self._find(best.config, spec)
        if known is not None:
            return known
        assert best.step_seconds is not None
        steps_seconds = (num_steps + NUM_CONFIRMATION_WARM_UP_STEPS) * best.step_seconds
        state = predicted.state
        written_bytes = state.parameters_bytes + state.optimizer_state_bytes
        deadline_seconds = (
            SET_UP_SECONDS + 3 * steps_seconds + written_bytes / CHECKPOINT_BYTES_PER_SECOND
        )
        # Made here, so that the checkpoint goes however the probe ends.
        with tempfile.TemporaryDirectory(
            prefix="autotune-confirm-", ignore_cleanup_errors=True
        ) as folder:
            return self._run(
                best.config, spec, deadline_seconds=deadline_seconds, more={"folder": folder}
            )

    def _find(self, config: TrainConfig, spec: ProbeSpec) -> Measurement | None:
        return self._table.find(probe_key(self._model.config, config, spec, self.fingerprint))

    def _run(
        self,
        config: TrainConfig,
        spec: ProbeSpec,
        *,
        deadline_seconds: float,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> Measurement:
        """Measure in a process of its own; in the table when this returns."""
        request = {
            "config": self._model.config,
            "train_config": config.to_dict(),
            "spec": dataclasses.asdict(spec),
            **more,
        }
        end = self._server.run("probe", request, deadline_seconds=deadline_seconds)
        measurement = self._read(end, config, spec)
        key = probe_key(self._model.config, config, spec, self.fingerprint)
        self._table.add(key, measurement)
        return measurement

    def _ask_fingerprint(self) -> Fingerprint:
        end = self._server.run(
            "fingerprint", {"backend": self.spec.backend}, deadline_seconds=SET_UP_SECONDS
        )
        if end.how != "ok":
            raise end.to_error("fingerprint")
        values = dict(end.answers[-1]["fingerprint"])
        values["versions"] = tuple((name, version) for name, version in values["versions"])
        return Fingerprint(**values)

    def _read(self, end: WorkerEnd, config: TrainConfig, spec: ProbeSpec) -> Measurement:
        """What the probe said, or how it ended without saying."""
        outcome, message = "crashed", end.problem or "it ended without a measurement"
        if end.how == "ok" and end.answers:
            try:
                return measurement_from_dict(end.answers[-1].get("measurement", {}))
            except ValueError as error:
                message = str(error)
        if end.how == "timeout":
            outcome = "timeout"
        elif end.exit_code == -signal.SIGKILL or says_out_of_memory(end.stderr_tail):
            # Nobody else kills it: the kernel does when the host's memory runs out.
            outcome, message = "oom", f"{message}: the host's memory, or the driver's, ran out"
        last_words = end.stderr_tail.strip().rpartition("\n")[2]
        return Measurement(
            config=config,
            spec=spec,
            fingerprint=self.fingerprint,
            outcome=outcome,
            message=f"{message} {last_words}".strip()[:500],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to measure: the candidates as predicted, and the limits."""

    pool: Sequence[Estimate]
    base: TrainConfig
    baseline: Estimate | None
    budget_bytes: int
    max_probes: int
    confirm_steps: int = 0
    """Optimizer steps of the winner's confirmation; 0 skips it."""
    seed: int = 0


def can_run(config: TrainConfig, backend: str) -> bool:
    """Whether a probe of it makes sense there: a CPU has no device memory to offload from, no Triton.

    Probes run Transformers' Trainer.
    """
    if config.trainer != "transformers":
        return False
    return backend == "cuda" or not (config.activation_offloading or config.liger)


def search(
    study: optuna.Study,
    plan: Plan,
    prober: Prober,
    *,
    on_probe: OnProbe = lambda *_: None,
    on_confirm: OnConfirm = lambda _: None,
) -> Measured:
    """Probe until nothing is likely to beat the best by more than the noise; confirm the winner.

    Raises NothingFitsError when no candidate fits, or survives its confirmation; WorkerError when
    every probe, or every confirmation, failed otherwise; StorageError when the study holds what cannot be
    read.
    """
    _close_interrupted(study)
    earlier = _earlier(study, plan, prober)
    baseline = None if plan.baseline is None else prober.measure(plan.baseline.config)
    predicted = {estimate.config: estimate for estimate in plan.pool}
    measured: list[Measurement] = []
    rejected: list[Measurement] = []
    while len(rejected) < MAX_CONFIRMATIONS:
        refused = {m.config for m in rejected}
        _probe(study, plan, prober, measured, refused, on_probe)
        known = list((earlier | {m.config: m for m in measured}).values())
        # What was stopped as too slow beside a refused one may be the next.
        fitting = [
            m
            for m in known
            if m.config not in refused and (m.fits or (rejected and _stayed_within_budget(m)))
        ]
        if not fitting:
            break
        best, num_tied = _winner(fitting, plan.base)
        confirmation = None
        if plan.confirm_steps:
            on_confirm(best.config)
            confirmation = prober.confirm(best, predicted[best.config], plan.confirm_steps)
        if confirmation is None or confirmation.fits or confirmation.outcome == "full_disk":
            return Measured(
                best=best,
                predicted=predicted[best.config],
                baseline=baseline,
                num_run=prober.num_run,
                num_reused=prober.num_reused,
                num_tied=num_tied,
                outcomes=dict(Counter(m.outcome for m in known)),
                confirmation=confirmation,
                rejected=tuple(rejected),
            )
        rejected.append(confirmation)
    if rejected:
        raise _none_confirmed(rejected)
    raise _nothing_fits(known, plan.budget_bytes)


def _probe(
    study: optuna.Study,
    plan: Plan,
    prober: Prober,
    measured: list[Measurement],
    refused: Collection[TrainConfig],
    on_probe: OnProbe,
) -> None:
    """Probe until nothing that is not refused is likely to be faster; adds to `measured`."""
    distributions = parameter_distributions(study, [e.config for e in plan.pool])
    of_params: dict[frozenset[tuple[str, Any]], TrainConfig] = {}
    candidates = []
    for estimate in plan.pool:
        if estimate.config in refused:
            continue
        assert estimate.tokens_per_second is not None
        candidate = Candidate.of(
            estimate.config,
            distributions,
            tokens_per_second=estimate.tokens_per_second,
            peak_device_bytes=estimate.peak_device_bytes,
        )
        of_params[frozenset(candidate.params.items())] = estimate.config
        candidates.append(candidate)
    if refused and not candidates:
        return
    sampler = PredictionSampler(
        candidates,
        distributions=distributions,
        budget_bytes=plan.budget_bytes,
        noise=NOISE,
        seed=plan.seed,
    )
    while len(measured) < plan.max_probes and not sampler.should_stop(study):
        proposed = sampler.propose(study)
        if proposed is None:
            break
        study.sampler = sampler
        trial = study.ask(sampler.search_space(proposed))
        config = of_params[frozenset(proposed.params.items())]
        best = _fastest(measured, refused)
        stop_below = None if best is None else _speed(best) * (1 - NOISE)
        with _told_when_interrupted(study, trial):
            measurement = prober.measure(config, stop_below=stop_below)
            _tell(study, trial, measurement)
        measured.append(measurement)
        on_probe(len(measured), measurement, _fastest(measured, refused))


def _earlier(study: optuna.Study, plan: Plan, prober: Prober) -> dict[TrainConfig, Measurement]:
    """What the study has of the candidates from before, measured here."""
    configs = {estimate.config for estimate in plan.pool}
    found: dict[TrainConfig, Measurement] = {}
    for trial in study.get_trials(deepcopy=False):
        record = trial.user_attrs.get("measurement")
        if record is None:
            continue
        try:
            earlier = measurement_from_dict(record)
        except ValueError as error:
            raise StorageError(
                f"Trial {trial.number} of the study cannot be read",
                why=f"{error}; another version of autotune may have written it",
                remedy="Nothing was changed. Start another study with --study",
            ) from error
        if earlier.config in configs and earlier.fingerprint == prober.fingerprint:
            found.setdefault(earlier.config, earlier)
    return found


def _winner(fitting: Sequence[Measurement], base: TrainConfig) -> tuple[Measurement, int]:
    """Of those that are as fast as the fastest the one that gives up least, and how many others are."""
    fastest = max(fitting, key=_speed)
    noise = max(NOISE, fastest.spread or 0.0)
    tied = [m for m in fitting if _speed(m) >= _speed(fastest) * (1 - noise)]
    best = min(tied, key=lambda m: (gives_up(m.config, base), -_speed(m), repr(m.config)))
    return best, len(tied) - 1


def _tell(study: optuna.Study, trial: optuna.Trial, measurement: Measurement) -> None:
    """DESIGN section 5: what becomes of each outcome."""
    from optuna.trial import TrialState

    attributes = {
        "evidence": "measured",
        "config": measurement.config.to_dict(),
        "outcome": measurement.outcome,
        "message": measurement.message,
        "measurement": measurement.to_dict(),
    }
    for name, value in attributes.items():
        trial.set_user_attr(name, value)
    over_bytes = measurement.over_budget_bytes
    if over_bytes is None:
        study.tell(trial, state=TrialState.FAIL)
        return
    trial.set_constraint(CONSTRAINT, float(over_bytes))
    if measurement.outcome == "ok":
        study.tell(trial, _speed(measurement))
        return
    if measurement.outcome == "slow" and measurement.tokens_per_second is not None:
        trial.report(measurement.tokens_per_second, measurement.num_steps)
    study.tell(trial, state=TrialState.PRUNED)


@contextlib.contextmanager
def _told_when_interrupted(study: optuna.Study, trial: optuna.Trial) -> Any:
    """No trial stays open when a probe is broken off."""
    from optuna.trial import TrialState

    try:
        yield
    except BaseException:
        trial.set_user_attr("outcome", INTERRUPTED)
        study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
        raise


def _close_interrupted(study: optuna.Study) -> None:
    """Trials that a killed process left running: told so, and proposed again."""
    import optuna
    from optuna.trial import TrialState

    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        optuna.trial.Trial(study, trial._trial_id).set_user_attr("outcome", INTERRUPTED)
        study.tell(trial.number, state=TrialState.FAIL)


def _speed(measurement: Measurement) -> float:
    assert measurement.tokens_per_second is not None
    return measurement.tokens_per_second


def _fastest(
    measured: Sequence[Measurement], refused: Collection[TrainConfig]
) -> Measurement | None:
    fitting = (m for m in measured if m.fits and m.config not in refused)
    return max(fitting, key=_speed, default=None)


def _stayed_within_budget(measurement: Measurement) -> bool:
    """Whether a probe that was stopped as too slow would have fitted."""
    if measurement.outcome != "slow" or measurement.tokens_per_second is None:
        return False
    return dataclasses.replace(measurement, outcome="ok").fits


_NOTHING_MEASURED = {"crashed", "timeout", "invalid"}


def _none_confirmed(rejected: Sequence[Measurement]) -> NothingFitsError | WorkerError:
    message = f"Nothing that fitted survived its confirmation ({len(rejected)} tried)"
    why = "; ".join(f"{describe(m.config)}: {m.problem}" for m in rejected)
    if {m.outcome for m in rejected} <= _NOTHING_MEASURED:
        return WorkerError(message, why=why)
    return NothingFitsError(
        message,
        why=why,
        remedy="Give a larger budget, or take an answer without confirmation: --confirm-steps 0",
    )


def _nothing_fits(
    measured: Sequence[Measurement], budget_bytes: int
) -> NothingFitsError | WorkerError:
    outcomes: Mapping[str, int] = Counter(m.outcome for m in measured)
    told = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
    if set(outcomes) <= _NOTHING_MEASURED:
        last = next((m.message for m in reversed(measured) if m.message), "nothing was probed")
        return WorkerError(f"No probe measured anything ({told or 'none ran'})", why=last)
    return NothingFitsError(
        f"Nothing that was probed fits into {format_bytes(budget_bytes)}",
        why=f"Of {len(measured)} probes: {told}",
        remedy="Give a larger budget, a shorter --seq-len, or allow another --method",
    )
