"""One cell's night: measured again, searched where it needs that, compared, kept.

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

from autotune import finding
from autotune.config import TrainConfig
from autotune.errors import AutotuneError, WorkerError
from autotune.forkserver import ForkServer
from autotune.knobs import describe
from autotune.nightly import drift, files, ledger, relatives
from autotune.nightly.digest import Done
from autotune.nightly.history import MAX_NIGHTS, NEW, Night, levels
from autotune.nightly.journal import Journal
from autotune.nightly.matrix import Matrix
from autotune.nightly.plan import Planned, changes
from autotune.nightly.repeats import Repeated, Repeater
from autotune.probes import open_probes
from autotune.report.measuring import Measuring
from autotune.report.progress import SILENT, Listener


class TimeIsUp(Exception):
    """A search ends after its current probe: the next night goes on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a night runs and writes."""

    storage: str
    out: Path
    backend: str
    command: str = ""
    listener: Listener = SILENT


class CellNight:
    """One cell's night."""

    def __init__(
        self,
        planned: Planned,
        matrix: Matrix,
        place: Place,
        *,
        server: ForkServer,
        journal: Journal,
        give_up: float,
    ) -> None:
        self._planned, self._matrix, self._place = planned, matrix, place
        self._server, self._journal, self._give_up = server, journal, give_up
        self._cell = planned.cell
        self._level, self._earlier = levels(planned.nights)

    def run(self) -> Done:
        """Whatever goes wrong with one cell is said of it, and is no end of the night."""
        began = time.monotonic()
        searches = self._planned.searches
        try:
            self._journal.begin(self._cell.name, searches=searches)
            with open_probes(self._place.storage) as table:
                self._repeater = Repeater(
                    self._cell,
                    self._matrix,
                    backend=self._place.backend,
                    server=self._server,
                    table=table,
                    journal=self._journal,
                )
                night = self._tonight()
            night = dataclasses.replace(night, elapsed_seconds=time.monotonic() - began)
            self._keep(night)
            self._journal.end(self._cell.name)
        except AutotuneError as error:
            # Not begun any more: a cell that fails is tried again in its turn.
            with contextlib.suppress(AutotuneError):
                self._journal.end(self._cell.name)
            return Done(
                planned=self._planned, night=None, problem=str(error), exit_code=error.exit_code
            )
        relative = None
        if night.kind == NEW:
            relative = relatives.nearest(night.fingerprint.device, self._elsewhere(night))
        return Done(planned=self._planned, night=night, relative=relative)

    def _tonight(self) -> Night:
        standing = self._planned.standing
        seen = verdict = None
        if standing is not None:
            seen = self._repeat(standing.config, standing.useful_share)
            if not seen.problem:
                verdict = drift.judge(seen.tokens_per_second, self._level, self._earlier)
        is_broken = seen is not None and bool(seen.problem)
        if not self._planned.searches and not is_broken:
            assert standing is not None
            assert seen is not None
            return self._kept(standing, seen, verdict, has_searched=False)
        answer = self._find()
        summary = answer.summary
        assert summary.measured is not None
        best, share = summary.measured.best.config, summary.measured.best.useful_share
        if standing is not None and best == standing.config and not is_broken:
            assert seen is not None
            self._record(answer)
            return self._kept(standing, seen, verdict, has_searched=True, study=answer.study)
        challenger = self._repeat(best, share)
        if challenger.problem:
            if standing is None or seen is None or is_broken:
                raise WorkerError(
                    f"The answer of {self._cell.name} does not run again",
                    why=f"{describe(best)}: {challenger.problem}",
                )
            self._record(answer)
            return self._kept(standing, seen, verdict, has_searched=True, study=answer.study)
        if standing is None:
            self._record(answer, writes=True)
            return self._night(challenger, best, kind=NEW, reason="first answer", share=share,
                               study=answer.study)  # fmt: skip
        assert seen is not None
        history = [*self._earlier, self._level.baseline]
        noise = drift.noise_of([*history, [seen.tokens_per_second] if not is_broken else []])
        if is_broken:
            after = drift.judge(challenger.tokens_per_second, self._level, self._earlier)
            self._record(answer, writes=True)
            return self._night(
                challenger, best, kind=drift.REGRESSION, share=share, study=answer.study,
                reason=f"the standing answer no longer runs: {seen.problem}",
                change=after, is_replaced=True,
            )  # fmt: skip
        gained = drift.gain(challenger.tokens_per_second, seen.tokens_per_second, noise)
        if gained.kind != drift.IMPROVEMENT:
            self._record(answer)
            return self._kept(standing, seen, verdict, has_searched=True, study=answer.study)
        self._record(answer, writes=True)
        assert verdict is not None
        after = drift.judge(challenger.tokens_per_second, self._level, self._earlier)
        what = f"{describe(best)} instead of {describe(standing.config)}"
        by = f"{100 * gained.change:+.1f} % measured side by side"
        if verdict.kind in (drift.SUSPECT, drift.REGRESSION) and verdict.change < 0:
            # The standing one has become slower: what counts is the answer's speed, old against new.
            kind = after.kind
            reason = f"the standing answer measured {100 * verdict.change:+.1f} %; {what}, {by}"
        else:
            kind, after = drift.IMPROVEMENT, gained
            reason = f"{what}, {by}"
        return self._night(
            challenger, best, kind=kind, share=share, study=answer.study, reason=reason,
            change=after, is_replaced=True,
        )  # fmt: skip

    def _repeat(self, config: TrainConfig, useful_share: float) -> Repeated:
        is_first = not self._level.baseline
        return self._repeater.measure(
            config,
            history=[*self._earlier, self._level.baseline],
            useful_share=useful_share,
            target_se=drift.FIRST_TARGET_SE if is_first else drift.TARGET_SE,
        )

    def _kept(
        self,
        standing: Night,
        seen: Repeated,
        verdict: drift.Verdict | None,
        *,
        has_searched: bool,
        study: str = "",
    ) -> Night:
        """The standing answer stays."""
        assert verdict is not None
        reason = f"within the noise; {100 * verdict.detectable:.1f} % would be told from it"
        if verdict.kind == drift.SUSPECT:
            reason = "one night alone: the next one tells"
        elif verdict.kind != drift.UNCHANGED:
            last = self._planned.nights[-verdict.num_nights]
            changed = changes(last.fingerprint, seen.fingerprint)
            reason = f"on {verdict.num_nights} nights; " + (
                f"since {', '.join(changed)}" if changed else "no library or driver has changed"
            )
        return self._night(
            seen,
            standing.config,
            kind=verdict.kind,
            reason=reason,
            share=standing.useful_share,
            study=study or standing.study,
            change=verdict,
            has_searched=has_searched,
        )

    def _night(
        self,
        seen: Repeated,
        config: TrainConfig,
        *,
        kind: str,
        reason: str,
        share: float,
        study: str,
        change: drift.Verdict | None = None,
        is_replaced: bool = False,
        has_searched: bool = True,
    ) -> Night:
        return Night(
            made_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            kind=kind,
            reason=reason,
            fingerprint=seen.fingerprint,
            config=config,
            tokens_per_second=seen.tokens_per_second,
            peak_device_bytes=seen.peak_device_bytes,
            has_searched=has_searched,
            is_replaced=is_replaced,
            change=None if change is None else change.change,
            low=None if change is None else change.low,
            high=None if change is None else change.high,
            num_nights=1 if change is None else change.num_nights,
            useful_share=share,
            study=study,
        )

    def _find(self) -> finding.Answer:
        """`find` as anyone would ask it, measured here."""
        options = dataclasses.replace(self._cell.options, backend=self._place.backend)
        return finding.find(
            options,
            storage=self._place.storage,
            command=self._place.command,
            listener=_limited(self._place.listener, self._give_up),
        )

    def _record(self, answer: finding.Answer, *, writes: bool = False) -> None:
        """In its study; with `writes` as files too, each of which takes the old one's place whole."""
        device = answer.summary.measured.best.fingerprint.device if answer.summary.measured else ""
        folder = files.machine_folder(self._place.out, device) / self._cell.name
        delivered = finding.deliver(
            answer,
            folder=folder if writes else None,
            storage=self._place.storage,
            command=self._place.command,
        )
        for problem in delivered.problems:
            raise problem

    def _keep(self, night: Night) -> None:
        """In the database, then in the machine's folder."""
        ledger.keep(self._place.storage, self._cell, night)
        files.write(
            files.machine_folder(self._place.out, night.fingerprint.device),
            self._cell.name,
            question=self._cell.question,
            nights=[*self._planned.nights, night][-MAX_NIGHTS:],
            backend=self._place.backend,
        )

    def _elsewhere(self, night: Night) -> list[Night]:
        """Last nights of the same question on other machines, of the database and of the folders."""
        device = night.fingerprint.device
        found: dict[str, Night] = {}
        listed = ledger.nights(self._place.storage, [self._cell], None)[self._cell.name]
        for each in (*listed, *files.others(self._place.out, self._cell.question, device)):
            if each.fingerprint.device != device:
                known = found.get(each.fingerprint.device)
                if known is None or known.at <= each.at:
                    found[each.fingerprint.device] = each
        return [*found.values()]


def _limited(listener: Listener, give_up: float) -> Listener:
    """The same, but that a search ends once the time is over, after the probe that runs then."""

    @contextmanager
    def measuring(*arguments: Any) -> Iterator[Measuring]:
        with listener.measuring(*arguments) as heard:

            def on_probe(*told: Any) -> None:
                heard.on_probe(*told)
                if time.monotonic() > give_up:
                    raise TimeIsUp

            yield Measuring(on_run=heard.on_run, on_probe=on_probe)

    return dataclasses.replace(listener, measuring=measuring)
