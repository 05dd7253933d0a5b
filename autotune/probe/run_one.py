"""Measures configurations on the cards of a fleet, each in a process of its own, and remembers them.

What the table of probes has for this fingerprint is not run again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator

from autotune.catalogue.models import ModelSource
from autotune.catalogue.nvml import Occupancy
from autotune.common.units import format_bytes
from autotune.errors import HardwareError
from autotune.memory.out_of_memory import says_out_of_memory
from autotune.probe import compiled
from autotune.probe.fleet.fleet import Fleet, Job
from autotune.probe.logged_runs import log_run
from autotune.probe.sampler import Near
from autotune.probe.tell_optuna import Watch
from autotune.records.estimate import Estimate
from autotune.records.fingerprint import Fingerprint, fingerprint_for
from autotune.records.measurement import (
    NUM_CONFIRMATION_WARM_UP_STEPS,
    Measurement,
    ProbeSpec,
    measurement_from_dict,
    varied_steps,
)
from autotune.space.config import TrainConfig
from autotune.store.probe_key import ProbeKey, probe_key
from autotune.store.probe_table import ProbeTable
from autotune.worker.client import isolate
from autotune.worker.client.isolate import Reply, WorkerEnd

SET_UP_SECONDS = 120.0
"""Seconds that a probe may take beyond its timed steps: building, warm-up, the last step begun."""
RETURN_SECONDS = 2.0
"""Seconds for which the memory of a process that has ended may still be reported as in use. [judgement]"""

CHECKPOINT_BYTES_PER_SECOND = 50e6
"""Speed of writing a checkpoint that a deadline allows for. [judgement] It is a slow network disk's."""

OnRun = Callable[[TrainConfig, ProbeSpec], None]
"""A function that hears what is about to run, or has run: a probe, the base's, or a confirmation. It is not
called for what is known."""


class NotAsAssumed(Exception):
    """The fingerprint of measurements here is not the assumed one: begin again without assuming one."""


class Prober:
    """Measures configurations of one model."""

    def __init__(
        self,
        fleet: Fleet,
        table: ProbeTable,
        model: ModelSource,
        spec: ProbeSpec,
        *,
        useful_share: Callable[[TrainConfig], float] = lambda _: 1.0,
        lengths: tuple[int, ...] = (),
        on_run: OnRun = lambda *_: None,
        on_end: OnRun = lambda *_: None,
        assumed: Fingerprint | None = None,
    ) -> None:
        """Assume the fingerprint, or ask a process for it.

        `lengths`: percentiles of the samples', which a confirmation draws from; empty: not known. `assumed`:
        what the fingerprint here must be, as far as is known before a process has told it; NotAsAssumed is
        raised when the first one, started to measure something, tells another.
        """
        self._fleet = fleet
        self._table = table
        self._model = model
        self._useful_share = useful_share
        self._lengths = lengths
        self._on_run, self._on_end = on_run, on_end
        self.spec = spec
        self._is_assumed = assumed is not None
        self._fingerprint = assumed or fleet.fingerprint(spec.backend)
        self.num_run = 0
        """Number of probes that were run; confirmations are counted nowhere."""
        self._running: dict[Job, tuple[TrainConfig, ProbeSpec]] = {}
        self.near_seen: dict[TrainConfig, Measurement] = {}
        """Measurements of the same device with another driver or other libraries, which helped the order."""

    @property
    def num_cards(self) -> int:
        """Number of probes that may run at once."""
        return self._fleet.num_cards

    def measure(self, config: TrainConfig) -> Measurement:
        """Return the table's measurement, or a new one; nothing else may run meanwhile."""
        found = self.begin(config)
        if found is not None:
            return found
        (_, measurement) = self.wait()
        return measurement

    def begin(
        self, config: TrainConfig, *, watch: Watch | None = None, slow_below: float = 0.0
    ) -> Measurement | None:
        """Return the table's measurement; None where there is none, and a probe was started (see `wait`).

        `watch` is called with each timed step of the probe, and may end it. `slow_below`: tokens per
        second; the table answers with what was stopped part-way, too, where it was slower.
        """
        share = self._useful_share(config)
        measurement = self._find(config, self.spec, slow_below=slow_below / share)
        if measurement is None:
            self.num_run += 1
            self._start_probe(config, watch)
            return None
        log_run(measurement, "known probe")
        speed = measurement.tokens_per_second
        if measurement.outcome == "slow" and watch is not None and speed is not None:
            # What a trial that is stopped leaves to learn from.
            watch(measurement.num_steps, share * speed)
        return dataclasses.replace(measurement, useful_share=share)

    def wait(self) -> tuple[TrainConfig, Measurement]:
        """Wait for a probe that was begun: its measurement is in the table when this returns."""
        job, end = self._fleet.wait()
        config, spec = self._running.pop(job)
        self._on_end(config, spec)
        measurement = self._keep(end, config, spec, functools.partial(self._fleet.taken_of, job))
        return config, dataclasses.replace(measurement, useful_share=self._useful_share(config))

    def drop(self) -> None:
        """End the probes that run; nothing is kept of them."""
        self._fleet.drop()
        for config, spec in self._running.values():
            self._on_end(config, spec)
        self.num_run -= len(self._running)
        self._running.clear()

    def again(self, config: TrainConfig, *, watch: Watch | None = None) -> Measurement:
        """Measure anew, whatever the table knows; the result is in the table when this returns."""
        self._start_probe(config, watch)
        return self.wait()[1]

    def _start_probe(self, config: TrainConfig, watch: Watch | None) -> None:
        deadline_seconds = _set_up_seconds(config) + 3 * self.spec.max_seconds
        self._start(config, self.spec, deadline_seconds=deadline_seconds, watch=watch)

    def confirm(self, best: Measurement, predicted: Estimate, num_steps: int) -> Measurement:
        """Return the table's confirmation of what a probe measured, or run a new one."""
        num_varied = varied_steps(best.config, self.spec.backend)
        spec = dataclasses.replace(
            self.spec,
            confirm_steps=num_steps,
            varied_steps=num_varied,
            lengths=self._lengths if num_varied else (),
        )
        measurement = self._find(best.config, spec)
        if measurement is None:
            assert best.step_seconds is not None
            state = predicted.state
            written_bytes = state.parameters_bytes + state.optimizer_state_bytes
            deadline_seconds = (
                _set_up_seconds(best.config)
                + 3 * (num_steps + NUM_CONFIRMATION_WARM_UP_STEPS + num_varied) * best.step_seconds
                + written_bytes / CHECKPOINT_BYTES_PER_SECOND
            )
            self._start(best.config, spec, deadline_seconds=deadline_seconds)
            _, measurement = self.wait()
        return dataclasses.replace(measurement, useful_share=best.useful_share)

    def fingerprint_of(self, config: TrainConfig) -> Fingerprint:
        """The fingerprint that a measurement of the configuration would have, made here and now."""
        return fingerprint_for(config, self._fingerprint)

    def near(self, configs: Iterable[TrainConfig]) -> dict[TrainConfig, Near]:
        """Measurements of these on the same device with another driver or other libraries."""
        found = self._table.near({self._key(config, self.spec): config for config in configs})
        self.near_seen |= found
        return {
            config: _near(dataclasses.replace(seen, useful_share=self._useful_share(config)))
            for config, seen in found.items()
        }

    @property
    def near_versions(self) -> tuple[str, ...]:
        """Versions with which those measurements were made and that are not here."""
        others = {
            version for seen in self.near_seen.values() for version in _parts(seen.fingerprint)
        }
        return tuple(sorted(others - set(_parts(self._fingerprint))))

    def _key(self, config: TrainConfig, spec: ProbeSpec) -> ProbeKey:
        return probe_key(self._model.config, config, spec, self.fingerprint_of(config))

    def _find(
        self, config: TrainConfig, spec: ProbeSpec, *, slow_below: float = 0.0
    ) -> Measurement | None:
        key = self._key(config, spec)
        return self._table.find(key, spec.memory_budget_bytes, slow_below=slow_below)

    def _start(
        self,
        config: TrainConfig,
        spec: ProbeSpec,
        *,
        deadline_seconds: float,
        watch: Watch | None = None,
    ) -> None:
        """Start a probe on a free card."""
        if self._is_assumed and self._fleet.fingerprint(spec.backend) != self._fingerprint:
            raise NotAsAssumed
        self._is_assumed = False
        self._on_run(config, spec)
        request = {
            "config": self._model.config,
            "train_config": config.to_dict(),
            "spec": dataclasses.asdict(spec),
        }
        job = Job(request=request, deadline_seconds=deadline_seconds)
        if watch is not None:
            hear = functools.partial(_follow, watch, self._useful_share(config))
            job = dataclasses.replace(job, on_answer=hear)
        self._running[job] = config, spec
        self._fleet.start(job)

    def _keep(
        self,
        end: WorkerEnd,
        config: TrainConfig,
        spec: ProbeSpec,
        taken_of: Callable[[int], Occupancy | None],
    ) -> Measurement:
        """The measurement of a probe that has ended, which is in the table when this returns."""
        measurement = self._read(end, config, spec)
        _require_free_card(measurement, taken_of)
        self._require_likeness(measurement)
        log_run(measurement, "confirmation" if spec.confirm_steps else "probe")
        tail = "" if measurement.outcome == "ok" else end.stderr_tail
        key = self._key(config, spec)
        self._table.add(key, measurement, model=self._model.name, stderr_tail=tail)
        return measurement

    def _require_likeness(self, measurement: Measurement) -> None:
        """Refuse a measurement of another machine than the search is about; it would be made again for ever.

        Raises HardwareError. A driver may be changed while a search runs, or a cluster's card be replaced by
        one that is not like it.
        """
        here, there = self.fingerprint_of(measurement.config), measurement.fingerprint
        if there != here:
            raise HardwareError(
                "A probe ran with another driver or other libraries than the search began with",
                why=", ".join(sorted(set(_parts(there)) ^ set(_parts(here)))) or there.device,
                remedy="What was measured before is kept; run it again, on machines that are alike",
            )

    def _read(self, end: WorkerEnd, config: TrainConfig, spec: ProbeSpec) -> Measurement:
        """The measurement that the probe's process answered, or one of how the process ended without it."""
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
        return Measurement(
            config=config,
            spec=spec,
            fingerprint=self.fingerprint_of(config),
            outcome=outcome,
            message=f"{message} {end.last_words}".strip()[:500],
        )


def _require_free_card(
    measurement: Measurement, taken_of: Callable[[int], Occupancy | None]
) -> None:
    """Refuse to believe a failed probe where others have what its budget needs of the card.

    Raises HardwareError. The others have taken it since the search began; what ran out then says nothing of
    the configuration. The memory of the probe itself may be reported as in use for a moment after its end.
    """
    spec = measurement.spec
    has_failed = measurement.outcome in ("oom", "crashed") or measurement.num_alloc_retries
    if spec.backend != "cuda" or not has_failed:
        return
    deadline = time.monotonic() + RETURN_SECONDS
    while (taken := taken_of(spec.memory_budget_bytes)) is not None:
        if time.monotonic() < deadline:
            time.sleep(isolate.POLL_SECONDS)
            continue
        raise HardwareError(
            "Other programs took memory of the card during the search",
            why=f"{format_bytes(taken.free_bytes)} are free, and the budget is "
            f"{format_bytes(spec.memory_budget_bytes)}: {taken}",
            remedy="What was measured before is kept, and the same command goes on",
        )


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
    """The facts, in words, in which two measurements of one card may differ."""
    yield from (f"{name} {version}" for name, version in fingerprint.versions)
    named = {"driver": fingerprint.driver, "CUDA": fingerprint.cuda}
    yield from (f"{name} {version}" for name, version in named.items() if version)
    yield f"PYTORCH_ALLOC_CONF {fingerprint.allocator or 'unset'}"


def _follow(watch: Watch, useful_share: float, answer: Reply) -> str:
    """Show a step to the watch; return why the probe, which counts every token, should stop."""
    step, speed = answer.get("step"), answer.get("tokens_per_second_at_most")
    if type(step) is not int or type(speed) is not float or not 0 < speed < math.inf:
        return ""  # The last line; or nonsense, which says nothing of the speed.
    return watch(step, useful_share * speed)
