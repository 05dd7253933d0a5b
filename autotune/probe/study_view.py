"""The trials of a study as a search that runs here may use them: each is read once, when it has ended.

Trials that were measured elsewhere, or with other libraries, stay in the study and say nothing here: hardware
is never mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import optuna
from optuna.trial import FrozenTrial, TrialState

from autotune.errors import StorageError
from autotune.probe.winner import run_speed
from autotune.records.fingerprint import Fingerprint
from autotune.records.measurement import NOISE, Measurement, measurement_from_dict
from autotune.space.config import TrainConfig


class StudyView:
    """The measurements of a study that count here, as they are known after the latest `look`.

    `fingerprint_of`: what a measurement of a configuration made here would have.
    """

    def __init__(
        self, study: optuna.Study, fingerprint_of: Callable[[TrainConfig], Fingerprint]
    ) -> None:
        self._study = study
        self._fingerprint_of = fingerprint_of
        self._read: set[int] = set()
        self._from_here: dict[int, Measurement] = {}
        self._told: set[int] = set()
        self._candidates: Collection[TrainConfig] | None = None
        """The candidates that were chosen from; None: all."""
        self._refused: set[TrainConfig] = set()
        self.own: list[Measurement] = []
        """Measurements made or looked up by this search, in the order of time."""
        self.left_out: set[int] = set()
        """Numbers of trials that say nothing to this search: measured elsewhere, of no candidate, or refused
        since."""
        self.num_running: int
        """Trials that run at this moment."""
        self.look()

    def look(self) -> None:
        """Take in the trials that have ended since, and count those that run.

        Raises StorageError for a trial that cannot be read.
        """
        self.num_running = 0
        for trial in self._study.get_trials(deepcopy=False):
            if not trial.state.is_finished():
                self.num_running += trial.state == TrialState.RUNNING
            elif trial.number not in self._read:
                self._take_in(trial)
                self._read.add(trial.number)

    def choose_from(self, configs: Collection[TrainConfig]) -> None:
        """Let these be the candidates from now on.

        What else the study holds, of another space or another --allow, is nothing that the answer
        could be: it is not to be beaten, and no probe of this search. What was stopped as too slow
        beside that alone is tried again.
        """
        is_first = self._candidates is None
        self._candidates = configs
        self._sort()
        if is_first:
            self._forget_stopped_beside_others()

    def _forget_stopped_beside_others(self) -> None:
        best = self.fastest()
        least_speed = 0.0 if best is None else run_speed(best) * (1 - NOISE)
        for number, measurement in list(self._from_here.items()):
            speed = measurement.tokens_per_second or 0.0
            if measurement.outcome == "slow" and speed >= least_speed:
                del self._from_here[number]
                self._told.discard(number)
                self.left_out.add(number)

    def refuse(self, configs: Collection[TrainConfig]) -> None:
        """Let the measurements of these configurations say nothing from now on."""
        self._refused.update(configs)
        self._sort()

    def _sort(self) -> None:
        for number, measurement in self._from_here.items():
            if self._is_chosen_from(measurement):
                self.left_out.discard(number)
            else:
                self.left_out.add(number)

    def _is_candidate(self, measurement: Measurement) -> bool:
        return self._candidates is None or measurement.config in self._candidates

    def _is_chosen_from(self, measurement: Measurement) -> bool:
        return self._is_candidate(measurement) and measurement.config not in self._refused

    @property
    def num_begun(self) -> int:
        """Number of trials begun.

        All that run count, and those of candidates that have been told what was measured.
        """
        told = sum(self._is_candidate(self._from_here[number]) for number in self._told)
        return told + self.num_running

    def known(self, configs: Collection[TrainConfig]) -> list[Measurement]:
        """Measurements made here of these configurations, now or before.

        Where one was tried twice, it is the second try.
        """
        found = {m.config: m for m in self._from_here.values() if m.config in configs}
        return list((found | {m.config: m for m in self.own}).values())

    def fastest(self) -> Measurement | None:
        """The fastest measurement of a candidate that fits and is not refused; None without one."""
        measured = [*self._from_here.values(), *self.own]
        fitting = (m for m in measured if m.fits and self._is_chosen_from(m))
        return max(fitting, key=run_speed, default=None)

    def _take_in(self, trial: FrozenTrial) -> None:
        self.left_out.discard(trial.number)
        record = trial.user_attrs.get("measurement")
        if record is None:
            return
        try:
            seen = measurement_from_dict(record)
        except ValueError as error:
            raise StorageError(
                f"Trial {trial.number} of the study cannot be read",
                why=f"{error}; another version of autotune may have written it",
                remedy="Nothing was changed. Start another study with --study",
            ) from error
        if seen.fingerprint != self._fingerprint_of(seen.config):
            self.left_out.add(trial.number)
            return
        self._from_here[trial.number] = seen
        # Killed between measuring and telling: known, and proposed again, which costs no probe.
        if trial.state != TrialState.FAIL or seen.over_budget_bytes is None:
            self._told.add(trial.number)
        if not self._is_chosen_from(seen):
            self.left_out.add(trial.number)
