"""`autotune nightly --on`: cells that lose their card or wait for it, the digest, what cannot be used."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import here
import pytest
from nights_of import HERE as FINGERPRINT
from nights_of import NOW, cell, matrix, tiny_night

from autotune.errors import ConfigError
from autotune.nightly import draw, machine_night
from autotune.nightly.cell import Place
from autotune.nightly.digest import ClusterDigest, Digest, Done, NightProblem
from autotune.nightly.machine_night import MachineNight, prepared
from autotune.probe.fleet.fleet import CardsLostError
from autotune.store.locks import StudyBusyError


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--on", "127.0.0.1:1"), 3, "No Ray cluster answers at 127.0.0.1:1"),
        (("--cards", "2"), 2, "--cards of a night needs --on"),
        (("--on", "auto", "--cards", "none"), 2, "--cards 'none' is no number of cards"),
        (("--on", "auto", "--backend", "predict"), 2, "'predict' is not one of"),
    ],
)
def test_what_cannot_be_used_is_said_in_a_line(
    arguments: tuple[str, ...], code: int, says: str, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    done = here.command("nightly", *arguments, cwd=tiny_night(tmp_path))
    assert done.returncode == code
    assert says in done.stderr.splitlines()[-1]


def test_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = here.command("nightly", "--on", "auto", cwd=tiny_night(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (ConfigError.exit_code, 1)
    assert "pip install 'ray[client]'" in done.stderr


@pytest.fixture
def of_two(tmp_path: Path) -> MachineNight:
    """A night of two new cells, on which nothing has begun."""
    asked = matrix(cell("one"), cell("two", gpu_mem="12GB"))
    place = Place(storage=f"sqlite:///{tmp_path}/a.db", out=tmp_path, backend="cpu")
    plan = prepared(asked, place, FINGERPRINT, budget_seconds=1e6, now=NOW, capacity_bytes=None)
    return MachineNight(plan, asked, place, now=NOW, began=time.monotonic(), budget_seconds=1e6)


class StandInCell:
    """Stands in for a cell's night: what becomes of each attempt, by the cell's name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **ends: list[Exception]) -> None:
        self.ends = ends
        self.tried: list[str] = []
        monkeypatch.setattr(machine_night, "CellNight", self)
        monkeypatch.setattr(machine_night, "BUSY_SECONDS", 0.01)

    def __call__(self, planned: Any, *_: Any, **__: Any) -> Any:
        self.planned = planned
        return self

    def run(self) -> Done:
        name = self.planned.cell.name
        self.tried.append(name)
        ends = self.ends.get(name, [])
        if ends:
            raise ends.pop(0)
        return Done(planned=self.planned, night=None)


def names(done: tuple[Done, ...]) -> list[str]:
    return [each.planned.cell.name for each in done]


def test_a_cell_that_lost_its_card_goes_on_with_another_first(
    of_two: MachineNight, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = StandInCell(monkeypatch, one=[CardsLostError("lost")]).tried
    with pytest.raises(CardsLostError):
        of_two.work(lambda _: None)
    assert of_two.lost == ["one"]
    of_two.work(lambda _: None)
    assert tried == ["one", "one", "two"]
    assert of_two.lost == []


def test_a_cell_that_takes_card_after_card_with_it_is_left(
    of_two: MachineNight, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = [CardsLostError("lost") for _ in range(machine_night.MAX_LOST)]
    StandInCell(monkeypatch, one=list(lost))
    for _ in lost:
        with pytest.raises(CardsLostError):
            of_two.work(lambda _: None)
    of_two.work(lambda _: None)
    digest = of_two.digest(is_interrupted=False)
    assert names(digest.done) == ["two"]
    assert of_two.lost == ["one"]


def test_a_cell_whose_study_another_card_has_comes_later(
    of_two: MachineNight, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = StandInCell(monkeypatch, one=[StudyBusyError("busy"), StudyBusyError("busy")]).tried
    of_two.work(lambda _: None)
    assert tried == ["one", "two", "one", "one"]
    assert names(of_two.digest(is_interrupted=False).done) == ["two", "one"]


def digest(device: str, exit_code: int | None) -> Digest:
    """The digest of a kind of card with a cell that failed with that code, or without any."""
    of_two_cells = matrix(cell("one"))
    place = Place(storage="sqlite:///nowhere.db", out=Path("nowhere"), backend="cpu")
    fingerprint = dataclasses.replace(FINGERPRINT, device=device)
    plan = prepared(
        of_two_cells, place, fingerprint, budget_seconds=1.0, now=NOW, capacity_bytes=None
    )
    (planned,) = plan.planned
    failed = Done(planned=planned, night=None, problem="no", exit_code=exit_code or 0)
    return Digest(
        made_at=NOW.isoformat(),
        machine="m",
        fingerprint=fingerprint,
        done=() if exit_code is None else (failed,),
        left=(),
        elapsed_seconds=1.0,
    )


@pytest.mark.parametrize(
    ("codes", "problems", "is_interrupted", "code", "events"),
    [
        ([None, None], [], False, 0, []),
        ([None, 4], [], False, 4, ["failure"]),
        ([None, None], [3], False, 3, ["failure"]),
        ([5, None], [3], False, 5, ["failure"]),
        ([5, None], [3], True, 130, ["failure"]),
    ],
)
def test_the_exit_code_of_a_cluster_is_of_what_matters_most(
    codes: list[int | None],
    problems: list[int],
    is_interrupted: bool,
    code: int,
    events: list[str],
) -> None:
    made = ClusterDigest(
        made_at=NOW.isoformat(),
        digests=tuple(digest(f"card {n}", each) for n, each in enumerate(codes)),
        problems=tuple(NightProblem(of="x", problem="gone", exit_code=n) for n in problems),
        is_interrupted=is_interrupted,
    )
    assert (made.exit_code, made.events) == (code, events)
    assert made.to_dict()["headline"].startswith("2 kinds of card")


def test_a_cluster_s_digest_says_what_each_kind_found_and_what_could_not_be_done() -> None:
    made = ClusterDigest(
        made_at=NOW.isoformat(),
        digests=(digest("card A", 4), digest("card B", None)),
        problems=(NightProblem(of="card C", problem="It has `another` driver.", exit_code=3),),
        notes=("a card on x is lost",),
    )
    text = draw.cluster_markdown(made)
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings[0] == "# Ray cluster, 2 kinds of card, 1 cell: 1 failed"
    assert [line for line in headings if line.startswith("## ")] == [
        "## card A: 1 cell: 1 failed",
        "## card B: nothing to do",
    ]
    assert "card C: It has" in text
    assert "a card on x is lost" in text
    printed = draw.cluster_text(made, [Path("a.md")])
    assert "card C: It has `another` driver." in printed
    assert printed.endswith("2 kinds of card, 1 cell: 1 failed\nwritten  a.md\n")
