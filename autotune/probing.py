"""Stages 4 and 5 of the funnel: the configurations that could be fastest, measured; the winner confirmed.

A loop of Optuna's ask and tell: the sampler proposes, a process of its own measures, the study and the
table of probes keep it before the next is asked for. What the table has for this fingerprint is not run
again. Killed at any moment, the same command goes on: what was measured is in the table, and a trial
left running is given back. Others may search in the same study meanwhile (autotune.turns), and the answer
waits for what they have begun. Each timed step of a probe is reported to its trial, and what the study's
pruner gives up is stopped part-way.

The winner then runs again, longer, with an evaluation and a checkpoint. Where it fails, the next one by
the same rule takes its place; where it is slower than another's probe, the faster one of the two after
that one's confirmation. A disk without room for the checkpoint is not held against it: the winner
stays, not confirmed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune import compiled, needs, owners
from autotune.config import TrainConfig
from autotune.errors import HardwareError, WorkerError
from autotune.forkserver import ForkServer
from autotune.isolate import Answer, WorkerEnd, private_folder
from autotune.logged_runs import log_run
from autotune.measurement import (
    NOISE,
    STOP_FILE,
    Fingerprint,
    Measurement,
    ProbeSpec,
    fingerprint_from_dict,
    measurement_from_dict,
)
from autotune.models import ModelSource
from autotune.out_of_memory import says_out_of_memory
from autotune.probe_key import probe_key
from autotune.probes import ProbeTable
from autotune.pruner import SpeedPruner
from autotune.results import Estimate
from autotune.sampler import Candidate, Near, PredictionSampler
from autotune.seen import Seen
from autotune.store import parameter_distributions
from autotune.summary import Measured
from autotune.trials import Watch, ended, watched
from autotune.turns import Asked, take_turn
from autotune.winner import (
    MAX_CONFIRMATIONS,
    final,
    none_confirmed,
    nothing_fits,
)

if TYPE_CHECKING:
    import optuna

SET_UP_SECONDS = 120.0
"""A probe's deadline beyond its timed steps: building, warm-up, the last step begun."""

NUM_CONFIRMATION_WARM_UP_STEPS = 10
"""Beside those that are timed: autotune.worker.probe warms up for 8 at most, and evaluates."""
CHECKPOINT_BYTES_PER_SECOND = 50e6
"""For the deadline: [judgement] a slow network disk."""
POLL_SECONDS = 0.5
"""Between two looks whether the last trials of others have ended."""

OnProbe = Callable[[int, Measurement, Measurement | None], None]
"""(probes so far, what was just measured, the best that fits)."""
OnRun = Callable[[TrainConfig, ProbeSpec], None]
"""What is about to run: a probe, the base's, or a confirmation. Not called for what is known."""


class NotAsAssumed(Exception):
    """The fingerprint of measurements is another one here: begin again without assuming one."""


class Prober:
    """Measures configurations of one model, each in a fresh process, and remembers."""

    def __init__(
        self,
        server: ForkServer,
        table: ProbeTable,
        model: ModelSource,
        spec: ProbeSpec,
        *,
        useful_share: Callable[[TrainConfig], float] = lambda _: 1.0,
        on_run: OnRun = lambda *_: None,
        assumed: Fingerprint | None = None,
    ) -> None:
        """`assumed`: what the fingerprint here must be, as far as is known before a process has told it;
        NotAsAssumed is raised when the first one, started to measure something, tells another.
        """
        self._server = server
        self._table = table
        self._model = model
        self._useful_share = useful_share
        self._on_run = on_run
        self.spec = spec
        self._is_assumed = assumed is not None
        self._fingerprint = assumed or fingerprint_here(server, spec.backend)
        self.here = digest(self._fingerprint)
        self.num_run = 0
        """Probes; confirmations are counted nowhere."""
        self.num_reused = 0
        self.near_seen: dict[TrainConfig, Measurement] = {}
        """Of the same device with another driver or other libraries, which helped the order."""

    def measure(
        self, config: TrainConfig, *, watch: Watch | None = None, slow_below: float = 0.0
    ) -> Measurement:
        """The table's measurement, or a new one, which is in the table when this returns.

        `watch` is called with each timed step of a new one, and may end it. `slow_below`: tokens per
        second; the table answers with what was stopped part-way, too, where it was slower.
        """
        share = self._useful_share(config)
        measurement = self._find(config, self.spec, slow_below=slow_below / share)
        if measurement is not None:
            log_run(measurement, "known probe")
            self.num_reused += 1
            speed = measurement.tokens_per_second
            if measurement.outcome == "slow" and watch is not None and speed is not None:
                # What a trial that is stopped leaves to learn from.
                watch(measurement.num_steps, share * speed)
        else:
            self.num_run += 1
            deadline_seconds = _set_up_seconds(config) + 3 * self.spec.max_seconds
            # A probe counts every token.
            of_useful = None if watch is None else functools.partial(_scaled, watch, share)
            measurement = self._run(
                config, self.spec, deadline_seconds=deadline_seconds, watch=of_useful
            )
        return dataclasses.replace(measurement, useful_share=share)

    def turn(self, study: optuna.Study) -> AbstractContextManager[None]:
        """Within it nobody else asks the study for a trial (autotune.turns)."""
        return self._table.exclusive("ask", study.study_name)

    def alone(self, study: optuna.Study) -> AbstractContextManager[None]:
        """For what is measured beside the trials of the study: whoever comes second finds it known."""
        return self._table.exclusive("measure", study.study_name)

    def again(self, config: TrainConfig) -> Measurement:
        """A new measurement, whatever the table knows; it is in the table when this returns."""
        deadline_seconds = _set_up_seconds(config) + 3 * self.spec.max_seconds
        return self._run(config, self.spec, deadline_seconds=deadline_seconds)

    def fingerprint_of(self, config: TrainConfig) -> Fingerprint:
        """What a measurement of the configuration would have, made here and now."""
        return needs.fingerprint_for(config, self._fingerprint)

    def near(self, configs: Iterable[TrainConfig]) -> dict[TrainConfig, Near]:
        """What was measured of them on the same device with another driver or other libraries."""
        keys = {
            probe_key(self._model.config, config, self.spec, self.fingerprint_of(config)): config
            for config in configs
        }
        found = self._table.near(keys)
        self.near_seen |= found
        return {
            config: _near(dataclasses.replace(seen, useful_share=self._useful_share(config)))
            for config, seen in found.items()
        }

    @property
    def near_versions(self) -> tuple[str, ...]:
        """What those measurements were made with that is not here."""
        others = {
            version for seen in self.near_seen.values() for version in _parts(seen.fingerprint)
        }
        return tuple(sorted(others - set(_parts(self._fingerprint))))

    def confirm(self, best: Measurement, predicted: Estimate, num_steps: int) -> Measurement:
        """The table's confirmation of what a probe measured, or a new one."""
        spec = dataclasses.replace(self.spec, confirm_steps=num_steps)
        known = self._find(best.config, spec)
        if known is not None:
            return dataclasses.replace(known, useful_share=best.useful_share)
        assert best.step_seconds is not None
        steps_seconds = (num_steps + NUM_CONFIRMATION_WARM_UP_STEPS) * best.step_seconds
        state = predicted.state
        written_bytes = state.parameters_bytes + state.optimizer_state_bytes
        deadline_seconds = (
            _set_up_seconds(best.config)
            + 3 * steps_seconds
            + written_bytes / CHECKPOINT_BYTES_PER_SECOND
        )
        measurement = self._run(best.config, spec, deadline_seconds=deadline_seconds)
        return dataclasses.replace(measurement, useful_share=best.useful_share)

    def _find(
        self, config: TrainConfig, spec: ProbeSpec, *, slow_below: float = 0.0
    ) -> Measurement | None:
        key = probe_key(self._model.config, config, spec, self.fingerprint_of(config))
        return self._table.find(key, spec.memory_budget_bytes, slow_below=slow_below)

    def _run(
        self,
        config: TrainConfig,
        spec: ProbeSpec,
        *,
        deadline_seconds: float,
        watch: Watch | None = None,
    ) -> Measurement:
        """Measure in a process of its own; in the table when this returns."""
        here = self._fingerprint
        if self._is_assumed and fingerprint_here(self._server, spec.backend) != here:
            raise NotAsAssumed
        self._is_assumed = False
        self._on_run(config, spec)
        # The folder is made here, so that a checkpoint in it goes however the probe ends.
        with private_folder() as folder:
            request = {
                "config": self._model.config,
                "train_config": config.to_dict(),
                "spec": dataclasses.asdict(spec),
                "folder": folder,
            }
            end = self._server.run(
                "probe",
                request,
                deadline_seconds=deadline_seconds,
                on_answer=None if watch is None else functools.partial(_follow, watch, folder),
            )
        measurement = self._read(end, config, spec)
        log_run(measurement, "confirmation" if spec.confirm_steps else "probe")
        key = probe_key(self._model.config, config, spec, self.fingerprint_of(config))
        tail = "" if measurement.outcome == "ok" else end.stderr_tail
        self._table.add(key, measurement, model=self._model.name, stderr_tail=tail)
        return measurement

    def _read(self, end: WorkerEnd, config: TrainConfig, spec: ProbeSpec) -> Measurement:
        """What the probe said, or how it ended without saying."""
        outcome, message = "crashed", end.problem or "it ended without a measurement"
        if end.how == "ok" and end.answers:
            try:
                measurement = measurement_from_dict(end.answers[-1].get("measurement"))
            except ValueError as error:
                message = str(error)
            else:
                if (measurement.config, measurement.spec) == (config, spec):
                    return measurement
                message = "it measured something else than it was asked for"
        if end.how == "timeout":
            outcome = "timeout"
        elif end.exit_code == -signal.SIGKILL or says_out_of_memory(end.stderr_tail):
            # Nobody else kills it: the kernel does when the host's memory runs out.
            outcome, message = "oom", f"{message}: the host's memory, or the driver's, ran out"
        last_words = end.stderr_tail.strip().rpartition("\n")[2]
        return Measurement(
            config=config,
            spec=spec,
            fingerprint=self.fingerprint_of(config),
            outcome=outcome,
            message=f"{message} {last_words}".strip()[:500],
        )


def fingerprint_here(server: ForkServer, backend: str) -> Fingerprint:
    """That of this machine's measurements. Raises HardwareError where they cannot be made, WorkerError."""
    end = server.run("fingerprint", {"backend": backend}, deadline_seconds=SET_UP_SECONDS)
    if end.how != "ok":
        raise end.to_error("fingerprint")
    answer = end.answers[-1] if end.answers else {}
    if "unusable" in answer:
        raise _unusable(str(answer["unusable"]))
    try:
        return fingerprint_from_dict(answer.get("fingerprint"))
    except ValueError as error:
        raise WorkerError("The fingerprint process talked nonsense", why=str(error)) from error


def digest(fingerprint: Fingerprint) -> str:
    """Equal for machines whose measurements may be compared."""
    known = json.dumps(dataclasses.asdict(fingerprint), sort_keys=True)
    return hashlib.sha256(known.encode()).hexdigest()


def _set_up_seconds(config: TrainConfig) -> float:
    return SET_UP_SECONDS + (compiled.COMPILE_SECONDS if config.is_compiled else 0.0)


def _near(seen: Measurement) -> Near:
    over_bytes = seen.over_budget_bytes
    if over_bytes is not None and (seen.outcome == "oom" or seen.num_alloc_retries):
        least_bytes = seen.spec.memory_budget_bytes + over_bytes
        return Near(tokens_per_second=None, peak_device_bytes=None, least_bytes=least_bytes)
    return Near(
        tokens_per_second=seen.tokens_per_second,
        peak_device_bytes=seen.peak_device_bytes,
        least_bytes=None,
    )


def _parts(fingerprint: Fingerprint) -> Iterator[str]:
    """In words, what two measurements of one card may differ in."""
    yield from (f"{name} {version}" for name, version in fingerprint.versions)
    named = {"driver": fingerprint.driver, "CUDA": fingerprint.cuda}
    yield from (f"{name} {version}" for name, version in named.items() if version)
    yield f"PYTORCH_ALLOC_CONF {fingerprint.allocator or 'unset'}"


def _scaled(watch: Watch, share: float, step: int, tokens_per_second_at_most: float) -> str:
    return watch(step, share * tokens_per_second_at_most)


def _follow(watch: Watch, folder: str, answer: Answer) -> None:
    """Show a step to the watch; leave the probe the word to stop where that wants it."""
    step, speed = answer.get("step"), answer.get("tokens_per_second_at_most")
    if type(step) is not int or type(speed) is not float or not 0 < speed < math.inf:
        return  # The last line; or nonsense, which says nothing of the speed.
    reason = watch(step, speed)
    if reason:
        written = Path(folder) / f"{STOP_FILE}.new"
        # A full disk: the probe takes its time, and that is all.
        with contextlib.suppress(OSError):
            written.write_text(reason, encoding="utf-8")
            # Renamed into place, so that the probe reads all of it or nothing.
            written.replace(written.with_name(STOP_FILE))


_UNUSABLE = (
    # part of torch's message (2.13: c10/cuda/CUDAFunctions.cpp, torch/cuda/__init__.py), remedy
    (
        "driver on your system is too old",
        "Update NVIDIA's driver, or install a PyTorch that was built for an older CUDA",
    ),
    ("not compiled with CUDA", "Install a PyTorch that was built with CUDA (pytorch.org)"),
)


def _unusable(reason: str) -> HardwareError:
    remedies = (remedy for part, remedy in _UNUSABLE if part in reason)
    remedy = next(remedies, "See what `nvidia-smi` says")
    return HardwareError(
        "PyTorch cannot use the GPU of this machine",
        why=reason,
        remedy=f"{remedy}; or leave --backend out, for a prediction",
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
    train_steps: int | None = None
    """Length of the run that cold starts are weighed against; None: steady speed decides."""
    variants: Callable[[Estimate], Sequence[Estimate]] = lambda _: ()
    """Of an eager candidate: compiled, what may be measured too."""


def can_run(config: TrainConfig, backend: str) -> bool:
    """Whether a probe of it makes sense there: a CPU has no device memory to offload from, no Triton."""
    runs_there = backend == "cuda" or not needs.of_cuda(config)
    return runs_there and compiled.can_compile(config, backend)


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
    seen = Seen(study, prober.fingerprint_of, prober.here)
    seen.look()
    baseline = None
    if plan.baseline is not None:
        with prober.alone(study):
            baseline = prober.measure(plan.baseline.config)
    predicted = {estimate.config: estimate for estimate in plan.pool}
    pool = list(plan.pool)
    rejected: list[Measurement] = []
    while len(rejected) < MAX_CONFIRMATIONS:
        refused = {m.config for m in rejected}
        seen.refuse(refused)
        _probe(study, plan, pool, plan.max_probes, prober, seen, refused, on_probe)
        known = seen.known(predicted)
        num_left = compiled.MAX_PROBES - sum(config.is_compiled for config in predicted)
        added = _variants(plan, known, predicted, refused)[:num_left]
        if added:
            predicted.update({estimate.config: estimate for estimate in added})
            # Beside what is measured: the others were not worth a probe, or there was no time.
            beside = [predicted[m.config] for m in known] + added
            max_probes = seen.num_begun + len(added)
            _probe(study, plan, beside, max_probes, prober, seen, refused, on_probe)
            pool += added
            known = seen.known(predicted)
        left = [m for m in known if m.config not in refused]
        # Those that were stopped as too slow were so beside one that may yet disappoint, or did.
        rivals = [m for m in left if m.stayed_within_budget]
        fitting = rivals if rejected else [m for m in rivals if m.fits]
        if not fitting:
            break

        def confirm(best: Measurement) -> Measurement:
            with prober.alone(study):
                return prober.confirm(best, predicted[best.config], plan.confirm_steps)

        found = final(
            fitting,
            rivals,
            plan.base,
            rejected,
            confirm if plan.confirm_steps else None,
            train_steps=plan.train_steps,
        )
        if found is not None:
            return Measured(
                best=found.best,
                predicted=predicted[found.best.config],
                baseline=baseline,
                num_run=prober.num_run,
                num_reused=prober.num_reused,
                num_near=len(prober.near_seen),
                near_versions=prober.near_versions,
                num_tied=found.num_tied,
                outcomes=dict(Counter(m.outcome for m in known)),
                confirmation=found.confirmation,
                rejected=tuple(rejected),
                train_steps=plan.train_steps,
                eager=compiled.fastest(known, is_compiled=False),
                compiled=compiled.fastest(known, is_compiled=True),
                num_compiled=sum(m.config.is_compiled for m in known),
            )
    if rejected:
        raise none_confirmed(rejected)
    raise nothing_fits(known, plan.budget_bytes)


def _variants(
    plan: Plan,
    known: Sequence[Measurement],
    predicted: Mapping[TrainConfig, Estimate],
    refused: Collection[TrainConfig],
) -> list[Estimate]:
    """Of the fastest eager ones that fit, compiled; those that are no candidates yet."""
    best = compiled.bases([m for m in known if m.fits], refused)
    found = (variant for m in best for variant in plan.variants(predicted[m.config]))
    return [estimate for estimate in found if estimate.config not in predicted]


def _probe(
    study: optuna.Study,
    plan: Plan,
    pool: Sequence[Estimate],
    max_probes: int,
    prober: Prober,
    seen: Seen,
    refused: Collection[TrainConfig],
    on_probe: OnProbe,
) -> None:
    """Probe until nothing that is not refused is likely to be faster, and nobody else probes any more.

    `max_probes` counts those of all who search in the study on machines like this one.
    """
    study.pruner = pruner = SpeedPruner(noise=NOISE, leave_out=seen.left_out)
    distributions = parameter_distributions(study, [e.config for e in pool])
    of_params: dict[frozenset[tuple[str, Any]], Estimate] = {}
    candidates = []
    for estimate in pool:
        if estimate.config in refused:
            continue
        assert estimate.tokens_per_second is not None
        candidate = Candidate.of(
            estimate.config,
            distributions,
            tokens_per_second=estimate.tokens_per_second,
            peak_device_bytes=estimate.peak_device_bytes,
        )
        of_params[frozenset(candidate.params.items())] = estimate
        candidates.append(candidate)
    if refused and not candidates:
        return
    near = prober.near([e.config for e in of_params.values()])
    sampler = PredictionSampler(
        candidates,
        distributions=distributions,
        budget_bytes=plan.budget_bytes,
        noise=NOISE,
        leave_out=seen.left_out,
        seed=plan.seed,
        near={params: near[e.config] for params, e in of_params.items() if e.config in near},
    )
    study.sampler = sampler

    def propose() -> Asked | None:
        seen.look()
        if seen.num_begun >= max_probes or sampler.should_stop(study):
            return None
        proposed = sampler.propose(study)
        if proposed is None:
            return None
        return Asked(params=proposed.params, distributions=sampler.search_space(proposed))

    def run(trial: optuna.Trial, asked: Asked) -> float:
        estimate = of_params[frozenset(asked.params.items())]
        best_speed = pruner.best_speed(study) or 0.0
        measurement = prober.measure(
            estimate.config, watch=watched(study, trial), slow_below=best_speed * (1 - NOISE)
        )
        seen.own.append(measurement)
        return ended(trial, measurement, estimate)

    owner = {**owners.this_process(), "fingerprint": prober.here}
    while True:
        num_before = len(seen.own)
        turn = prober.turn(study)
        if take_turn(study, turn, owner, propose, run):
            seen.look()
            if len(seen.own) > num_before:
                on_probe(seen.num_begun, seen.own[-1], seen.fastest())
        elif seen.num_running:
            # Somebody else's: what comes of it may change what is worth a probe, or be the answer.
            time.sleep(POLL_SECONDS)
        else:
            return
