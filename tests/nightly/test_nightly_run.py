"""A night on this machine, with a card and cells that stand in for real ones."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nights_of import HERE, cell, matrix

from autotune.catalogue import gpus, nvml
from autotune.errors import HardwareError
from autotune.nightly import machine_night, run
from autotune.nightly.cell import Place, TimeIsUp
from autotune.nightly.digest import Done
from autotune.nightly.plan import Prepared

CARD = gpus.find_gpu("NVIDIA GeForce RTX 4090")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """This machine has a card of 24 GB, and a fork server that notes what it has started."""
    started: list[str] = []
    server = SimpleNamespace(start=started.append)
    monkeypatch.setattr(run, "ForkServer", lambda: contextlib.nullcontext(server))
    monkeypatch.setattr(run, "fingerprint_here", lambda *_: HERE)
    monkeypatch.setattr(gpus, "detect", lambda: [CARD, dataclasses.replace(CARD, name="another")])
    return started


def test_a_night_does_the_cells_that_the_card_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: list[str]
) -> None:
    """The third has no time left, and the fourth is interrupted."""
    ends: dict[str, BaseException] = {"late": TimeIsUp(), "stopped": KeyboardInterrupt()}

    def cell_night(planned: Any, *_: Any, server: Any, cards: Any, **__: Any) -> Any:
        assert (server.start, cards) == (here.append, None)

        def one_run() -> Done:
            if planned.cell.name in ends:
                raise ends[planned.cell.name]
            return Done(planned=planned, night=None)

        return SimpleNamespace(run=one_run)

    monkeypatch.setattr(machine_night, "CellNight", cell_night)
    monkeypatch.setattr(machine_night, "disturbed", lambda backend: {f"others on {backend}": None})
    plans: list[Prepared] = []
    done: list[str] = []
    names = ("one", "late", "two", "stopped", "after")
    cells = [cell(name, priority=9.0 - place) for place, name in enumerate(names)]
    made = run.night(
        matrix(*cells, cell("too large", gpu_mem="30GB")),
        Place(storage=f"sqlite:///{tmp_path}/a.db", out=tmp_path, backend="cuda"),
        budget_seconds=1e6,
        on_plan=plans.append,
        on_done=lambda each: done.append(each.planned.cell.name),
    )
    assert here == ["probe"]
    (plan,) = plans
    assert (plan.backend, plan.fingerprint) == ("cuda", HERE)
    assert {each.cell.name: each.state for each in plan.planned} == {
        **dict.fromkeys(names, "new"),
        "too large": "impossible",
    }
    assert done == [each.planned.cell.name for each in made.digest.done] == ["one", "two"]
    assert [each.cell.name for each in made.digest.left] == [
        "late",
        "stopped",
        "after",
        "too large",
    ]
    assert made.digest.is_interrupted
    assert made.digest.notes == ("others on cuda",)
    folder = tmp_path / made.digest.machine
    assert made.files == [folder / "digest.md", folder / "digest.html"]
    assert all(path.is_file() for path in made.files)


def test_a_night_that_nobody_interrupts_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: list[str]
) -> None:
    """On a CPU there is no card whose memory could be too small."""
    monkeypatch.setattr(
        machine_night,
        "CellNight",
        lambda planned, *_, **__: SimpleNamespace(run=lambda: Done(planned=planned, night=None)),
    )
    place = Place(storage=f"sqlite:///{tmp_path}/a.db", out=tmp_path, backend="cpu")
    made = run.night(matrix(cell("one", gpu_mem="30GB")), place, budget_seconds=1e6)
    assert [each.planned.cell.name for each in made.digest.done] == ["one"]
    assert (made.digest.left, made.digest.is_interrupted) == ((), False)


@pytest.mark.parametrize("driver_says", ["the driver says why", ""])
def test_the_card_of_this_machine_is_what_auto_means(
    monkeypatch: pytest.MonkeyPatch, driver_says: str
) -> None:
    monkeypatch.setattr(gpus, "detect", lambda: [CARD])
    assert [run.backend_here(asked) for asked in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    none = "NVIDIA's driver reports none on this machine"
    monkeypatch.setattr(gpus, "detect", list)
    monkeypatch.setattr(nvml, "why_no_card", lambda: driver_says)
    assert [run.backend_here(asked) for asked in ("cpu", "cuda")] == ["cpu", "cuda"]
    with pytest.raises(HardwareError) as raised:
        run.backend_here("auto")
    assert str(raised.value) == (
        "There is no CUDA GPU to tune for. "
        f"{driver_says or none}. "
        "--backend cpu runs the matrix on the CPU, as a trial of it."
    )
