"""A night on a cluster's cards of several kinds, on what stands in for Ray's cards and for searches."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nights_of import HERE as FINGERPRINT
from nights_of import cell, matrix

from autotune.catalogue import gpus
from autotune.errors import HardwareError, WorkerError
from autotune.nightly import machine_night, on_cluster
from autotune.nightly.cell import Place
from autotune.nightly.digest import Done, NightProblem
from autotune.nightly.plan import Prepared
from autotune.probe.fleet.fleet import CardsLostError
from autotune.search.fleet import Where
from autotune.search.listener import SILENT

CARD = gpus.find_gpu("NVIDIA GeForce RTX 4090")


class StandInFleet:
    """A kind of card with so many cards, each of which `apart` hands to a thread."""

    def __init__(
        self,
        kind: str,
        num_cards: int = 1,
        error: Exception | None = None,
        *,
        is_there: bool = True,
    ) -> None:
        self.alike = SimpleNamespace(kind=kind)
        self.num_cards, self.error, self.gpu = num_cards, error, CARD
        self.ray = SimpleNamespace(is_initialized=lambda: is_there)
        self.interrupted = threading.Event()
        self.num_closed = self.num_steps = 0

    def fingerprint(self, backend: str) -> Any:
        assert backend == "cuda"
        if self.error is not None:
            raise self.error
        return dataclasses.replace(FINGERPRINT, device=self.alike.kind)

    def apart(self) -> list[StandInFleet]:
        return [self] * self.num_cards

    def go_on(self) -> None:
        self.num_steps += 1

    def close(self) -> None:
        self.num_closed += 1


class Cluster:
    """What a night asked of the cluster, said, and began."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, *fleets: StandInFleet
    ) -> None:
        self.fleets = fleets
        self.asked: list[tuple[Any, ...]] = []
        self.said: list[tuple[str, threading.Thread]] = []
        self.plans: list[Prepared] = []
        self.done: list[tuple[str, str]] = []
        self.on_cell: Callable[[StandInFleet, Any], None] = lambda *_: None
        note = dataclasses.replace(SILENT, note=self._note)
        self.place = Place(
            storage=f"sqlite:///{folder}/a.db", out=folder / "out", backend="cuda", listener=note
        )
        monkeypatch.setattr(on_cluster.on_ray, "connected_kinds", self._connected)
        monkeypatch.setattr(machine_night, "CellNight", self._cell_night)
        monkeypatch.setattr(on_cluster, "_HEAR_SECONDS", 0.002)

    def _note(self, text: str) -> None:
        self.said.append((text, threading.current_thread()))

    @contextlib.contextmanager
    def _connected(
        self, address: str, *, backend: str, wanted: int | None, note: Callable[[str], None]
    ) -> Iterator[list[StandInFleet]]:
        self.asked.append((address, backend, wanted))
        note("a card is left out")
        yield list(self.fleets)

    def _cell_night(self, planned: Any, _: Any, place: Place, *, cards: Any, **__: Any) -> Any:
        def run() -> Done:
            self.on_cell(cards.fleet, place)
            assert cards.gpu is CARD
            return Done(planned=planned, night=None)

        return SimpleNamespace(run=run)

    def on_done(self, device: str, done: Done) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.done.append((device, done.planned.cell.name))

    def night(self, on_done: on_cluster.OnDone | None = None) -> on_cluster.ClusterReport:
        return on_cluster.night(
            matrix(cell("one"), cell("two")),
            Where(on="auto", cards="3"),
            self.place,
            budget_seconds=1e6,
            on_plan=self.plans.append,
            on_done=on_done or self.on_done,
        )


def test_each_kind_of_card_has_a_night_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = HardwareError("Its driver is too old", remedy="Renew it")
    pair, single = StandInFleet("card A", 2), StandInFleet("card B")
    cluster = Cluster(tmp_path, monkeypatch, StandInFleet("card C", error=error), pair, single)
    made = cluster.night()
    assert cluster.asked == [("auto", "cuda", 3)]
    assert [plan.fingerprint.device for plan in cluster.plans] == ["card A", "card B"]
    assert [each.fingerprint.device for each in made.digest.digests] == ["card A", "card B"]
    for each in made.digest.digests:
        assert {done.planned.cell.name for done in each.done} == {"one", "two"}
        assert (each.left, each.is_interrupted) == ((), False)
    assert sorted(cluster.done) == [
        (device, name) for device in ("card A", "card B") for name in ("one", "two")
    ]
    assert made.digest.problems == (
        NightProblem(of="card C", problem="Its driver is too old. Renew it.", exit_code=3),
    )
    assert made.digest.notes == ("a card is left out",)
    assert not made.digest.is_interrupted
    assert (pair.num_closed, single.num_closed) == (2, 1)
    out = cluster.place.out
    of_kinds = [out / each.machine for each in made.digest.digests]
    assert len(set(of_kinds)) == 2
    assert made.files == [
        *(folder / name for folder in of_kinds for name in ("digest.md", "digest.html")),
        out / "digest.md",
    ]
    assert "card C: Its driver is too old" in (out / "digest.md").read_text(encoding="utf-8")


def test_several_cards_have_the_time_of_as_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new cell takes 33 probes of 40 s and 50 s of confirmation: 1,370 s, and two 2,740 s."""
    chosen = {}
    for num_cards in (1, 2):
        cluster = Cluster(tmp_path, monkeypatch, StandInFleet("card A", num_cards))
        (plan,), _ = on_cluster.dry_run(
            matrix(cell("one"), cell("two")),
            Where(on="auto"),
            cluster.place,
            budget_seconds=2400.0,
        )
        chosen[num_cards] = [each.cell.name for each in plan.planned if each.is_chosen]
    assert chosen == {1: ["one"], 2: ["one", "two"]}


def test_where_no_kind_of_card_can_be_used_the_first_error_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = HardwareError("no driver"), WorkerError("no answer")
    fleets = (StandInFleet("card A", error=first), StandInFleet("card B", error=second))
    with pytest.raises(HardwareError) as raised:
        Cluster(tmp_path, monkeypatch, *fleets).night()
    assert raised.value is first


def test_a_search_on_a_card_says_its_remarks_in_the_thread_of_the_night(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = StandInFleet("card A")
    cluster = Cluster(tmp_path, monkeypatch, fleet)

    def on_cell(_: StandInFleet, place: Place) -> None:
        assert threading.current_thread() is not threading.main_thread()
        place.listener.note("a remark")
        with place.listener.searching() as progress:
            progress("traced", 1, 2)

    cluster.on_cell = on_cell
    made = cluster.night()
    main = threading.main_thread()
    assert cluster.said == [
        ("a card is left out", main),
        ("card A: a remark", main),
        ("card A: a remark", main),
    ]
    assert made.digest.notes == ("a card is left out",)
    assert fleet.num_steps == 2


@pytest.mark.parametrize(
    ("error", "is_there", "says"),
    [
        (CardsLostError("The card is lost", remedy="Look"), True, "The card is lost. Look."),
        (
            ConnectionError("Ray said so"),
            False,
            "The Ray cluster is gone. Ray said so. What was measured is kept: start the cluster "
            "again, and the same command goes on.",
        ),
    ],
)
def test_what_a_lost_card_leaves_is_a_problem_of_the_night(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    is_there: bool,
    says: str,
) -> None:
    fleet = StandInFleet("card A", is_there=is_there)
    cluster = Cluster(tmp_path, monkeypatch, fleet)

    def on_cell(*_: Any) -> None:
        raise error

    cluster.on_cell = on_cell
    made = cluster.night()
    assert made.digest.notes == ("a card is left out", f"card A: {says}")
    lost = (
        "Cards were lost with one, and none was left to go on. "
        "What was measured is kept, and the next night goes on."
    )
    assert made.digest.problems == (NightProblem(of="card A", problem=lost, exit_code=3),)
    assert [each.cell.name for each in made.digest.digests[0].left] == ["one", "two"]
    assert (fleet.num_closed, fleet.interrupted.is_set()) == (1, False)


def test_a_mistake_of_this_program_ends_all_cards_and_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, other = StandInFleet("card A"), StandInFleet("card B")
    cluster = Cluster(tmp_path, monkeypatch, wrong, other)

    def on_cell(fleet: StandInFleet, _: Any) -> None:
        if fleet is wrong:
            raise ZeroDivisionError
        assert fleet.interrupted.wait(20)
        raise KeyboardInterrupt  # as a fleet does that was interrupted

    cluster.on_cell = on_cell
    with pytest.raises(ZeroDivisionError):
        cluster.night()
    assert (wrong.num_closed, other.num_closed) == (1, 1)


def test_an_interruption_is_said_once_all_cards_have_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = StandInFleet("card A")
    cluster = Cluster(tmp_path, monkeypatch, fleet)
    begun: list[None] = []

    def on_cell(fleet: StandInFleet, _: Any) -> None:
        begun.append(None)
        if len(begun) == 2:
            assert fleet.interrupted.wait(20)
            raise KeyboardInterrupt

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    cluster.on_cell = on_cell
    made = cluster.night(interrupt)
    assert made.digest.is_interrupted
    (of_card,) = made.digest.digests
    assert [each.planned.cell.name for each in of_card.done] == ["one"]
    assert of_card.is_interrupted
    assert made.digest.exit_code == 130


def test_a_digest_that_cannot_be_written_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path, monkeypatch, StandInFleet("card A"))
    (cluster.place.out / on_cluster.DIGEST).mkdir(parents=True)
    made = cluster.night()
    (problem,) = made.digest.problems
    assert (problem.of, problem.exit_code) == ("digest.md", 6)
    assert [path.name for path in made.files] == ["digest.md", "digest.html"]


def test_a_dry_run_says_which_cells_cannot_begin_on_a_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = HardwareError("no driver")
    cluster = Cluster(
        tmp_path, monkeypatch, StandInFleet("card A"), StandInFleet("card B", error=gone)
    )
    cells = matrix(cell("one"), cell("two", seq_len=5000))
    (plan,), problems = on_cluster.dry_run(
        cells, Where(on="auto"), cluster.place, budget_seconds=1e6
    )
    assert cluster.asked == [("auto", "cuda", None)]
    assert problems == [NightProblem(of="card B", problem="no driver.", exit_code=3)]
    one, two = plan.planned
    assert (one.can_begin, one.is_chosen, one.problem) == (True, True, "")
    assert (two.can_begin, two.is_chosen, two.expected_seconds) == (False, False, 0.0)
    assert two.problem.startswith("A sequence of 5000 tokens is too long for gpt2.")
    assert not cluster.place.out.exists()
