"""`autotune nightly --on`: real cells on a Ray cluster here, of which one machine says it has another CPU.

Nights that last, or lose a machine, take minutes on an idle machine: with AUTOTUNE_TEST_NIGHTS=1.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import here
import pytest
import ray_cluster
from nights_of import tiny_night
from ray_cluster import add_card

from autotune.catalogue.installed import cpu_name
from autotune.errors import ConfigError, HardwareError
from autotune.probe.fleet import on_ray, ray_cards

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

ROOT = Path(__file__).parents[2]
lasts = pytest.mark.skipif(
    not os.environ.get("AUTOTUNE_TEST_NIGHTS"), reason="it takes minutes: AUTOTUNE_TEST_NIGHTS=1"
)
OTHER = "Another CPU"
"""Name that tests/support/other_cpu gives."""
CELLS = {"tiny-30mb-seq64-full", "tiny-40mb-seq64-full"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without cards, a machine with this CPU and one with another; each has one card."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[client]'")
    with ray_cluster.started("night") as made:
        made.like_here = add_card(made)
        other = [str(ROOT / "tests" / "support" / "other_cpu"), os.environ["PYTHONPATH"]]
        made.other = add_card(made, env_vars={"PYTHONPATH": os.pathsep.join(other)})
        yield made


def nightly(cluster: Any, folder: Path, *more: str) -> tuple[int, dict[str, Any], str]:
    arguments = ("nightly", "--backend", "cpu", "--on", cluster.address, "--json", *more)
    done = here.command(*arguments, cwd=folder)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def probes(folder: Path) -> Counter[str]:
    """Number of probes in the database, by the device's name."""
    path = folder / "studies" / "autotune.db"
    if not path.exists():
        return Counter()
    with contextlib.closing(sqlite3.connect(path)) as database:
        try:
            rows = database.execute("select device, count(*) from autotune_probes group by device")
            return Counter(dict(rows.fetchall()))
        except sqlite3.OperationalError:
            return Counter()


@contextlib.contextmanager
def once_probed(folder: Path, device: str, do: Callable[[], None]) -> Iterator[None]:
    """Do that in a thread as soon as the device's first probe is stored."""

    def watch() -> None:
        until = time.monotonic() + 300
        while not probes(folder)[device] and time.monotonic() < until:
            time.sleep(0.1)
        do()

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        watching.join()


def problems(digest: dict[str, Any]) -> list[str]:
    cells = [each["problem"] for of in digest["machines"] for each in of["cells"]]
    return [each["problem"] for each in digest["problems"]] + list(filter(None, cells))


def by_device(digest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {machine["device"]: machine for machine in digest["machines"]}


def ran(cell: dict[str, Any]) -> tuple[float, float]:
    """Begin and end of a cell that a night has just done."""
    end = datetime.datetime.fromisoformat(cell["trend"][-1][0]).timestamp()
    return end - cell["elapsed_seconds"], end


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_night(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def first(cluster: Any, folder: Path) -> dict[str, Any]:
    code, digest, err = nightly(cluster, folder)
    assert code == 0, (err, problems(digest))
    return digest


def test_each_kind_of_card_does_every_cell(folder: Path, first: dict[str, Any]) -> None:
    assert first["headline"] == "2 kinds of card, 4 cells: 4 new"
    machines = by_device(first)
    assert set(machines) == {cpu_name(), OTHER}
    for device, machine in machines.items():
        assert {each["cell"] for each in machine["cells"]} == CELLS
        at = folder / "studies" / machine["machine"]
        for name in CELLS:
            kept = json.loads((at / "recommendations" / f"{name}.json").read_text("utf-8"))
            assert (kept["device"], len(kept["nights"])) == (device, 1)
            assert kept["nights"][0]["fingerprint"]["device"] == device
            assert (at / name / "train.py").exists()
        assert "2 cells: 2 new" in (at / "digest.md").read_text("utf-8")
    whole = (folder / "studies" / "digest.md").read_text("utf-8")
    assert all(f"## {device}: 2 cells: 2 new" in whole for device in machines)


@lasts
def test_cells_of_two_kinds_run_side_by_side(cluster: Any, tmp_path: Path) -> None:
    code, digest, err = nightly(cluster, tiny_night(tmp_path, probes=6))
    assert code == 0, (err, problems(digest))
    machines = by_device(digest)
    spans = [[ran(each) for each in machines[name]["cells"]] for name in (cpu_name(), OTHER)]
    # Ends are given to the second.
    assert any(
        min(one[1], other[1]) - max(one[0], other[0]) > 2.0
        for one in spans[0]
        for other in spans[1]
    )


def test_each_kind_has_measurements_of_its_own(folder: Path, first: dict[str, Any]) -> None:
    repeats = {
        machine["device"]: sum(each["num_probes"] for each in machine["cells"])
        for machine in first["machines"]
    }
    # What its searches probed comes on top of what was measured again.
    assert all(probes(folder)[device] > count for device, count in repeats.items())


@pytest.mark.usefixtures("first")
def test_the_next_night_goes_by_each_kind_s_own_history(cluster: Any, folder: Path) -> None:
    code, plans, err = nightly(cluster, folder, "--cards", "2", "--dry-run")
    assert code == 0, (err, plans)
    states = {
        machine["device"]: [each["state"] for each in machine["cells"]]
        for machine in plans["machines"]
    }
    assert states == {cpu_name(): ["fresh"] * 2, OTHER: ["fresh"] * 2}


@lasts
def test_a_machine_that_dies_loses_no_cell(cluster: Any, tmp_path: Path) -> None:
    folder = tiny_night(tmp_path, probes=6)
    extra = add_card(cluster)
    with once_probed(folder, cpu_name(), lambda: cluster.remove_node(extra, allow_graceful=False)):
        code, digest, err = nightly(cluster, folder)
    assert code == 0, (err, problems(digest))
    assert any("is lost" in text for text in digest["notes"])
    for machine in digest["machines"]:
        assert machine["headline"] == "2 cells: 2 new"
        assert machine["left"] == []


@lasts
def test_a_kind_whose_last_card_dies_goes_on_the_next_night(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cards, "REPLACE_SECONDS", 5.0)
    folder = tiny_night(tmp_path, budgets="[30MB]")
    gone = cluster.like_here
    try:
        with once_probed(
            folder, cpu_name(), lambda: cluster.remove_node(gone, allow_graceful=False)
        ):
            code, digest, err = nightly(cluster, folder)
    finally:
        cluster.like_here = add_card(cluster)
    assert code == HardwareError.exit_code, err
    machines = by_device(digest)
    assert machines[OTHER]["headline"] == "1 cell: 1 new"
    assert machines[cpu_name()]["headline"] == "no cell has ended"
    ((of, problem),) = [(each["of"], each["problem"]) for each in digest["problems"]]
    assert of == cpu_name()
    assert "Cards were lost with tiny-30mb-seq64-full" in problem
    kept = probes(folder)[cpu_name()]
    assert kept >= 1
    code, digest, err = nightly(cluster, folder)
    assert code == 0, (err, problems(digest))
    (again,) = by_device(digest)[cpu_name()]["cells"]
    assert (again["state"], again["kind"]) == ("interrupted", "new")
    assert probes(folder)[cpu_name()] > kept


@lasts
def test_an_interrupted_night_lets_the_cards_go(cluster: Any, tmp_path: Path) -> None:
    folder = tiny_night(tmp_path)
    command = [sys.executable, "-m", "autotune", "nightly", "--backend", "cpu"]
    stopped = subprocess.Popen(
        [*command, "--on", cluster.address],
        cwd=folder,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with once_probed(folder, cpu_name(), lambda: stopped.send_signal(signal.SIGINT)):
        out, err = stopped.communicate(timeout=400)
    assert stopped.returncode == 130, err
    assert "(interrupted)" in out
    assert "(interrupted)" in (folder / "studies" / "digest.md").read_text("utf-8")
    notes: list[str] = []
    with on_ray.connected_kinds(
        cluster.address, backend="cpu", wanted=2, note=notes.append
    ) as kinds:
        assert {cards.alike.kind for cards in kinds} == {cpu_name(), OTHER}
    assert notes == ["2 cards on 1 machine of the Ray cluster."]


def test_a_search_takes_no_two_kinds_of_cpu(cluster: Any) -> None:
    with (
        pytest.raises(ConfigError, match=r"several kinds.*Give the resource autotune_card"),
        on_ray.connected(cluster.address, backend="cpu", wanted=2, name=None, note=lambda _: None),
    ):
        pass


def test_a_cluster_without_gpus(cluster: Any, tmp_path: Path) -> None:
    done = here.command("nightly", "--on", cluster.address, cwd=tiny_night(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (HardwareError.exit_code, 1)
    assert "The Ray cluster has no GPUs" in done.stderr
