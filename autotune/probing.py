"""Stage 4 of the funnel: the configurations that could be fastest, measured.

A loop of Optuna's ask and tell: the sampler proposes, a process of its own measures, the study and the
table of probes keep it before the next is asked for. What the table has for this fingerprint is not run
again. Killed at any moment, the same command goes on: what was measured is in the table, and a trial
left running is told to have been interrupted.

The confirmation of the winner (stage 5) is not here yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.config import TrainConfig
from autotune.errors import NothingFitsError, WorkerError
from autotune.forkserver import ForkServer
from autotune.isolate import WorkerEnd
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

OnProbe = Callable[[int, Measurement, Measurement | None], None]
"""(probes so far, what was just measured, the best that fits)."""


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
        self.num_reused = 0

    def measure(self, config: TrainConfig, *, stop_below: float | None = None) -> Measurement:
        """The table's measurement, or a new one, which is in the table when this returns.

        `stop_below`: tokens per second that make measuring to the end worth while.
        """
        key = probe_key(self._model.config, config, self.spec, self.fingerprint)
        known = self._table.find(key)
        if known is not None:
            self.num_reused += 1
            return known
        spec = dataclasses.replace(self.spec, stop_below_tokens_per_second=stop_below)
        end = self._server.run(
            "probe",
            {
                "config": self._model.config,
                "train_config": config.to_dict(),
                "spec": dataclasses.asdict(spec),
            },
            deadline_seconds=SET_UP_SECONDS + 3 * spec.max_seconds,
        )
        self.num_run += 1
        measurement = self._read(end, config, spec)
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
        if end.how == "ok" and end.answers and "measurement" in end.answers[-1]:
            return measurement_from_dict(end.answers[-1]["measurement"])
        outcome, message = "crashed", end.problem or "it ended without a measurement"
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
    seed: int = 0


def can_run(config: TrainConfig, backend: str) -> bool:
    """Whether a probe of it makes sense there: a CPU has no device memory to offload from."""
    return backend == "cuda" or not config.activation_offloading


def search(
    study: optuna.Study, plan: Plan, prober: Prober, *, on_probe: OnProbe = lambda *_: None
) -> Measured:
    """Probe until nothing is likely to beat the best by more than the noise.

    Raises NothingFitsError when no candidate fits, WorkerError when every probe failed.
    """
    _close_interrupted(study)
    distributions = parameter_distributions(study, [e.config for e in plan.pool])
    of_params: dict[frozenset[tuple[str, Any]], TrainConfig] = {}
    candidates = []
    for estimate in plan.pool:
        assert estimate.tokens_per_second is not None
        candidate = Candidate.of(
            estimate.config,
            distributions,
            tokens_per_second=estimate.tokens_per_second,
            peak_device_bytes=estimate.peak_device_bytes,
        )
        of_params[frozenset(candidate.params.items())] = estimate.config
        candidates.append(candidate)
    sampler = PredictionSampler(
        candidates,
        distributions=distributions,
        budget_bytes=plan.budget_bytes,
        noise=NOISE,
        seed=plan.seed,
    )
    measured: list[Measurement] = []
    baseline = None if plan.baseline is None else prober.measure(plan.baseline.config)
    while len(measured) < plan.max_probes and not sampler.should_stop(study):
        proposed = sampler.propose(study)
        if proposed is None:
            break
        study.sampler = sampler
        trial = study.ask(sampler.search_space(proposed))
        config = of_params[frozenset(proposed.params.items())]
        best = _fastest(measured)
        stop_below = None if best is None else _speed(best) * (1 - NOISE)
        with _told_when_interrupted(study, trial):
            measurement = prober.measure(config, stop_below=stop_below)
            _tell(study, trial, measurement)
        measured.append(measurement)
        on_probe(len(measured), measurement, _fastest(measured))
    return _conclude(study, plan, measured, baseline, prober)


def _conclude(
    study: optuna.Study,
    plan: Plan,
    measured: Sequence[Measurement],
    baseline: Measurement | None,
    prober: Prober,
) -> Measured:
    """The winner by the rule of tune, among what was measured in this run and before."""
    configs = {estimate.config: estimate for estimate in plan.pool}
    known = {m.config: m for m in measured}
    for trial in study.get_trials(deepcopy=False):
        record = trial.user_attrs.get("measurement")
        if record is not None:
            earlier = measurement_from_dict(record)
            if earlier.config in configs and earlier.fingerprint == prober.fingerprint:
                known.setdefault(earlier.config, earlier)
    fitting = [m for m in known.values() if m.fits]
    if not fitting:
        raise _nothing_fits(list(known.values()), plan.budget_bytes)
    fastest = max(fitting, key=_speed)
    noise = max(NOISE, fastest.spread or 0.0)
    tied = [m for m in fitting if _speed(m) >= _speed(fastest) * (1 - noise)]
    best = min(tied, key=lambda m: (gives_up(m.config, plan.base), -_speed(m), repr(m.config)))
    return Measured(
        best=best,
        predicted=configs[best.config],
        baseline=baseline,
        num_run=prober.num_run,
        num_reused=prober.num_reused,
        num_tied=len(tied) - 1,
        outcomes=dict(Counter(m.outcome for m in known.values())),
    )


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
    budget_bytes = measurement.spec.memory_budget_bytes
    peak = measurement.peak_device_bytes
    if measurement.outcome == "oom":
        trial.set_constraint(CONSTRAINT, float(measurement.excess_bytes or 1))
        study.tell(trial, state=TrialState.PRUNED)
    elif measurement.outcome in ("ok", "slow") and peak is not None:
        # A retry means that it did not fit, however little was lacking.
        excess = (
            max(peak - budget_bytes, 1) if measurement.num_alloc_retries else peak - budget_bytes
        )
        trial.set_constraint(CONSTRAINT, float(excess))
        if measurement.outcome == "slow":
            if measurement.tokens_per_second is not None:
                trial.report(measurement.tokens_per_second, measurement.num_steps)
            study.tell(trial, state=TrialState.PRUNED)
        else:
            study.tell(trial, _speed(measurement))
    else:
        study.tell(trial, state=TrialState.FAIL)


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


def _fastest(measured: Sequence[Measurement]) -> Measurement | None:
    return max((m for m in measured if m.fits), key=_speed, default=None)


def _nothing_fits(
    measured: Sequence[Measurement], budget_bytes: int
) -> NothingFitsError | WorkerError:
    outcomes: Mapping[str, int] = Counter(m.outcome for m in measured)
    told = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
    if not outcomes or set(outcomes) <= {"crashed", "timeout", "invalid"}:
        last = next((m.message for m in reversed(measured) if m.message), "nothing was probed")
        return WorkerError(f"No probe measured anything ({told or 'none ran'})", why=last)
    return NothingFitsError(
        f"Nothing that was probed fits into {format_bytes(budget_bytes)}",
        why=f"Of {len(measured)} probes: {told}",
        remedy="Give a larger budget, a shorter --seq-len, or allow another --method",
    )
