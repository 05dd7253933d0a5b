"""Repeated measurement of a configuration, each time in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.catalogue.models import resolve
from autotune.nightly import drift
from autotune.nightly.journal import Journal
from autotune.nightly.matrix import Cell, Matrix
from autotune.probe.fleet.fleet import Fleet
from autotune.probe.run_one import Prober
from autotune.records.fingerprint import Fingerprint
from autotune.records.measurement import PROBE_SECONDS, ProbeSpec
from autotune.records.question import SEQUENCE_LENGTH
from autotune.search.pictures import read_pictures, task_of
from autotune.space.config import TrainConfig
from autotune.store.probe_table import ProbeTable

NUM_FAILURES = 2
"""Number of failures in a row that end it: the first may be chance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeated:
    """Figures that the processes of one night saw of one configuration."""

    tokens_per_second: tuple[float, ...]
    peak_device_bytes: int | None
    fingerprint: Fingerprint
    problem: str = ""
    """Reason why it no longer runs within the budget; the speeds count for nothing then."""


class Repeater:
    """Repeats configurations of one cell; what was measured before an interruption is not lost."""

    def __init__(
        self,
        cell: Cell,
        matrix: Matrix,
        *,
        backend: str,
        fleet: Fleet,
        budget_bytes: int,
        table: ProbeTable,
        journal: Journal,
    ) -> None:
        options = cell.options
        assert options.model is not None
        source = resolve(options.model)
        task = source.own_task(task_of(options, source.task))
        pictures, _ = read_pictures(options, source, task, options.seq_len or SEQUENCE_LENGTH)
        spec = ProbeSpec(
            task=task,
            pictures=pictures,
            backend=backend,
            memory_budget_bytes=budget_bytes,
            max_seconds=PROBE_SECONDS[backend],
        )
        self._prober = Prober(fleet, table, source, spec)
        self._cell, self._matrix, self._journal = cell, matrix, journal

    def measure(
        self,
        config: TrainConfig,
        *,
        history: drift.History,
        useful_share: float,
        prior: drift.Noise,
    ) -> Repeated:
        """Measure in as many processes as the spread asks for (drift.wants_more), or until it fails twice."""
        fingerprint = self._prober.fingerprint_of(config)
        speeds = self._journal.speeds(self._cell.name, config, fingerprint)
        peaks: list[int] = []
        failures: list[str] = []
        while drift.wants_more(
            speeds,
            history,
            at_least=self._matrix.probes,
            at_most=self._matrix.max_probes,
            prior=prior,
        ):
            seen = self._prober.again(config)
            speed = seen.tokens_per_second
            if not seen.fits or speed is None:
                failures.append(seen.problem)
                if len(failures) < NUM_FAILURES:
                    continue
                break
            failures.clear()
            speeds.append(useful_share * speed)
            peaks += [] if seen.peak_device_bytes is None else [seen.peak_device_bytes]
            self._journal.keep(self._cell.name, config, fingerprint, speeds)
        return Repeated(
            tokens_per_second=tuple(speeds),
            peak_device_bytes=max(peaks, default=None),
            fingerprint=fingerprint,
            problem=failures[-1] if len(failures) >= NUM_FAILURES else "",
        )
