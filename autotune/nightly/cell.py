"""The night of one cell: measured again, searched where it needs that, compared, kept.

1. The standing answer runs again, in as many processes as its spread asks for; drift.judge tells what
   that says.
2. Where the cell is new, stale, due or was interrupted, or its answer no longer runs, `find` searches.
   What it has measured under this fingerprint before is in the database.
3. Where the search names another configuration, that runs as often on the same night, and takes the
   standing one's place, and that of its files, only where drift.gain says that it is faster.
4. One more recommendation is in the database, then in the machine's folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.common.units import counted
from autotune.errors import AutotuneError, StorageError, WorkerError
from autotune.nightly import drift, files, ledger, relatives
from autotune.nightly.digest import Done
from autotune.nightly.history import MAX_NIGHTS, NEW, Night, levels
from autotune.nightly.journal import Journal
from autotune.nightly.matrix import Matrix, in_keys
from autotune.nightly.plan import Planned, changes
from autotune.nightly.repeats import Repeated, Repeater
from autotune.probe.fleet.fleet import CardsLostError, Fleet
from autotune.probe.fleet.one_card import OneCard
from autotune.records.answer import Counts
from autotune.records.measurement import Measurement
from autotune.report.deliver import deliver
from autotune.search import budget
from autotune.search.find import Finding, find
from autotune.search.fleet import Cards
from autotune.search.listener import SILENT, Listener, Measuring
from autotune.space.config import TrainConfig
from autotune.space.words import describe
from autotune.store.locks import StudyBusyError
from autotune.store.probe_table import open_probes
from autotune.worker.client.forkserver import ForkServer

BY_A_NIGHT = "search of a night"
"""Reason of the recommendation that a search makes by itself; the night's own says what it means."""


class TimeIsUp(Exception):
    """Raised to end a search after its current probe: the next night goes on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The database, folder and machine of a night."""

    storage: str
    out: Path
    backend: str
    command: str = ""
    machine: str | None = None
    """Name of the machine, where its card's alone does not distinguish it from others."""
    listener: Listener = SILENT

    def machine_name(self, device: str) -> str:
        """Return the name under which the history of this machine is kept."""
        return device if self.machine is None else f"{device} {self.machine}"

    def folder(self, device: str) -> Path:
        """Return the folder of this machine."""
        return files.machine_folder(self.out, self.machine_name(device))


class CellNight:
    """The night of one cell."""

    def __init__(
        self,
        planned: Planned,
        matrix: Matrix,
        place: Place,
        *,
        server: ForkServer | None = None,
        cards: Cards | None = None,
        journal: Journal,
        prior: drift.Noise,
        give_up: float,
    ) -> None:
        """Take the cell and its time.

        `cards` are those of a cluster to measure on; None: `server` runs the probes here. `prior` is the
        noise of the machine's cells together; `give_up` of time.monotonic.
        """
        self._planned, self._matrix, self._place = planned, matrix, place
        self._prior = prior
        self._server, self._cards = server, cards
        self._journal, self._give_up = journal, give_up
        self._cell = planned.cell
        self._level, self._earlier = levels(planned.nights)

    def run(self) -> Done:
        """Run the cell's night. Whatever goes wrong is said of the cell, and does not end the night.

        On a cluster it raises what is nothing of the cell, which goes on another time: CardsLostError, and
        StudyBusyError where another search works in its study.
        """
        began = time.monotonic()
        searches = self._planned.searches
        try:
            self._journal.begin(self._cell.name, searches=searches)
            with open_probes(self._place.storage) as table:
                self._repeater = Repeater(
                    self._cell,
                    self._matrix,
                    backend=self._place.backend,
                    fleet=self._fleet(),
                    budget_bytes=self._budget_bytes(),
                    table=table,
                    journal=self._journal,
                )
                night = self._tonight()
            night = dataclasses.replace(night, elapsed_seconds=time.monotonic() - began)
            ledger.keep(
                self._place.storage,
                self._cell,
                night,
                machine=self._place.machine_name(night.fingerprint.device),
            )
        except (KeyboardInterrupt, TimeIsUp):
            self._journal.pause(self._cell.name)
            raise
        except AutotuneError as error:
            if isinstance(error, StudyBusyError) and self._cards is not None:
                self._journal.pause(self._cell.name)
                raise
            if isinstance(error, CardsLostError):
                # Still begun: it may be what takes cards with it.
                raise
            # Not begun any more: a cell that fails is tried again in its turn.
            with contextlib.suppress(AutotuneError):
                self._journal.end(self._cell.name)
            return Done(
                planned=self._planned,
                night=None,
                problem=in_keys(str(error)),
                exit_code=error.exit_code,
            )
        # What is in the database is judged and over: a file that cannot be written costs no regression.
        problem, exit_code, relative = "", 0, None
        try:
            self._write(night)
            self._journal.end(self._cell.name)
            relative = self._relative(night) if night.kind == NEW else None
        except StorageError as error:
            problem, exit_code = str(error), error.exit_code
            with contextlib.suppress(StorageError):
                self._journal.end(self._cell.name)
        return Done(
            planned=self._planned,
            night=night,
            problem=problem,
            exit_code=exit_code,
            relative=relative,
        )

    def _tonight(self) -> Night:
        standing = self._planned.standing
        if standing is None:
            return self._searched(kind=NEW, reason="first answer")
        seen = self._repeat(standing.config, standing.useful_share)
        if seen.problem:
            reason = f"the standing answer no longer runs: {seen.problem}"
            return self._searched(kind=drift.REGRESSION, reason=reason)
        verdict = self._judge(seen)
        if not self._planned.searches:
            return self._kept(standing, seen, verdict, has_searched=False)
        finding = self._find()
        best = _best(finding)
        if best.config != standing.config:
            challenger = self._repeat(best.config, best.useful_share)
            history = [*self._earlier, self._level.nights, [seen.tokens_per_second]]
            if not challenger.problem:
                noise = drift.noise_of(history, self._prior)
                gained = drift.gain(challenger.tokens_per_second, seen.tokens_per_second, noise)
                if gained.kind == drift.IMPROVEMENT:
                    return self._replaced(standing, verdict, finding, challenger, gained)
        self._record(finding)
        return self._kept(standing, seen, verdict, has_searched=True, study=finding.study)

    def _searched(self, *, kind: str, reason: str) -> Night:
        """Keep a search's answer, whatever stood before."""
        finding = self._find()
        best = _best(finding)
        seen = self._repeat(best.config, best.useful_share)
        if seen.problem:
            raise WorkerError(
                f"The answer of {self._cell.name} does not run again",
                why=f"{describe(best.config)}: {seen.problem}",
            )
        self._record(finding, writes=True)
        return _night(
            seen,
            best.config,
            kind=kind,
            reason=reason,
            useful_share=best.useful_share,
            study=finding.study,
            change=None if kind == NEW else dataclasses.replace(self._judge(seen), num_nights=1),
            is_replaced=kind != NEW,
        )

    def _replaced(
        self,
        standing: Night,
        verdict: drift.Verdict,
        finding: Finding,
        challenger: Repeated,
        gained: drift.Verdict,
    ) -> Night:
        """Keep another configuration that is faster than the standing one, both of tonight."""
        self._record(finding, writes=True)
        best = _best(finding)
        reason = (
            f"{describe(best.config)} instead of {describe(standing.config)}, "
            f"{100 * gained.change:+.1f} % side by side"
        )
        kind, change = gained.kind, gained
        if verdict.kind != drift.UNCHANGED and verdict.change < 0:
            # The standing one has become slower: what counts is the answer's speed, old against new.
            change = self._judge(challenger)
            kind = change.kind
            reason += f"; the standing one had {100 * verdict.change:+.1f} %"
        return _night(
            challenger,
            best.config,
            kind=kind,
            reason=reason,
            useful_share=best.useful_share,
            study=finding.study,
            change=change,
            is_replaced=True,
        )

    def _fleet(self) -> Fleet:
        if self._cards is not None:
            return self._cards.fleet
        assert self._server is not None
        return OneCard(self._server)

    def _budget_bytes(self) -> int:
        choose = budget.CHOOSERS[self._place.backend] if self._cards is None else self._cards.chosen
        return choose(None, self._cell.options.gpu_mem).budget_bytes

    def _judge(self, seen: Repeated) -> drift.Verdict:
        speeds = seen.tokens_per_second
        return drift.judge(speeds, self._level, self._earlier, prior=self._prior)

    def _repeat(self, config: TrainConfig, useful_share: float) -> Repeated:
        return self._repeater.measure(
            config,
            history=[*self._earlier, self._level.nights],
            useful_share=useful_share,
            prior=self._prior,
        )

    def _kept(
        self,
        standing: Night,
        seen: Repeated,
        verdict: drift.Verdict,
        *,
        has_searched: bool,
        study: str = "",
    ) -> Night:
        """Keep the standing answer."""
        last = self._planned.nights[-verdict.num_nights]
        changed = changes(last.fingerprint, seen.fingerprint)
        since = f"since {', '.join(changed)}" if changed else "no library or driver has changed"
        reasons = {
            drift.UNCHANGED: f"within the noise, which hides less than {100 * verdict.detectable:.1f} %",
            drift.SUSPECT: f"one night alone, the next one tells; {since}",
        }
        return _night(
            seen,
            standing.config,
            kind=verdict.kind,
            reason=reasons.get(verdict.kind, f"on {counted(verdict.num_nights, 'night')}; {since}"),
            useful_share=standing.useful_share,
            study=study or standing.study,
            change=verdict,
            has_searched=has_searched,
        )

    def _find(self) -> Finding:
        """Run `find` as anyone would ask it, measured here."""
        options = dataclasses.replace(self._cell.options, backend=self._place.backend)
        return find(
            options,
            storage=self._place.storage,
            command=self._place.command,
            listener=_limited(self._place.listener, self._give_up),
            server=self._server,
            cards=self._cards,
        )

    def _record(self, finding: Finding, *, writes: bool = False) -> None:
        """Record the answer in its study.

        With `writes` as files too, each of which takes the old one's place whole.
        """
        machine = self._place.folder(_best(finding).fingerprint.device)
        delivered = deliver(
            finding,
            folder=machine / self._cell.name if writes else None,
            storage=self._place.storage,
            command=self._place.command,
            reason=BY_A_NIGHT,
        )
        for problem in delivered.problems:
            raise problem

    def _write(self, night: Night) -> None:
        """Write the night into the machine's folder."""
        files.write(
            self._place.folder(night.fingerprint.device),
            self._cell.name,
            question=self._cell.question,
            nights=[*self._planned.nights, night][-MAX_NIGHTS:],
            backend=self._place.backend,
        )

    def _relative(self, night: Night) -> Night | None:
        """Return the last night of the same question on the machine most like this one."""
        device = night.fingerprint.device
        last: dict[str, Night] = {}
        listed = ledger.nights(self._place.storage, [self._cell], None)[self._cell.name]
        for each in (*listed, *files.others(self._place.out, self._cell.question, device)):
            known = last.get(each.fingerprint.device)
            if known is None or known.at <= each.at:
                last[each.fingerprint.device] = each
        return relatives.nearest(device, last.values())


def _best(finding: Finding) -> Measurement:
    assert finding.answer.measured is not None
    return finding.answer.measured.best


def _night(
    seen: Repeated, config: TrainConfig, *, change: drift.Verdict | None, **rest: Any
) -> Night:
    """Make a Night without the time it took, which is not over."""
    return Night(
        made_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        fingerprint=seen.fingerprint,
        config=config,
        tokens_per_second=seen.tokens_per_second,
        peak_device_bytes=seen.peak_device_bytes,
        change=None if change is None else change.change,
        low=None if change is None else change.low,
        high=None if change is None else change.high,
        num_nights=1 if change is None else change.num_nights,
        **{"has_searched": True, **rest},
    )


def _limited(listener: Listener, give_up: float) -> Listener:
    """Return a listener that ends a search once the time is over, after the probe that runs then."""

    @contextmanager
    def measuring(counts: Counts, max_probes: int, confirm_steps: int) -> Iterator[Measuring]:
        with listener.measuring(counts, max_probes, confirm_steps) as heard:

            def on_probe(*told: Any) -> None:
                heard.on_probe(*told)
                if time.monotonic() > give_up:
                    raise TimeIsUp

            yield dataclasses.replace(heard, on_probe=on_probe)

    return dataclasses.replace(listener, measuring=measuring)
