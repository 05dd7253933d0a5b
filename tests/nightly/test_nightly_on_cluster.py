"""`autotune nightly --on`: real cells on a Ray cluster here, of which one machine says it has another CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import shutil
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
from nights_of import HERE as FINGERPRINT
from nights_of import NOW, cell, matrix

from autotune.catalogue.installed import cpu_name
from autotune.errors import ConfigError, HardwareError
from autotune.nightly import draw, machine_night
from autotune.nightly.cell import Place
from autotune.nightly.digest import ClusterDigest, Digest, Done, NightProblem
from autotune.nightly.machine_night import MachineNight, prepared
from autotune.probe.fleet import on_ray, ray_cards
from autotune.probe.fleet.fleet import CardsLostError
from autotune.store.locks import StudyBusyError

ROOT = Path(__file__).parents[2]
OTHER = "Another CPU"
"""Name that tests/support/other_cpu gives."""
SPACE = """
name: tiny
description: the base, so that one trace is all there is to predict
methods:
  full:
    micro_batch_size: [1]
    precision: [bf16-true]
    optimizer: [adamw_torch_fused]
"""
MATRIX = """
models: [tiny]
budgets: [30MB, 40MB]
lengths: [64]
methods: [full]
effective_batch: 8
effort: quick
space: space.yaml
confirm_steps: 0
measure_again_after: 0s
probes: 2
max_probes: 2
"""
CELLS = {"tiny-30mb-seq64-full", "tiny-40mb-seq64-full"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without cards, a machine with this CPU and one with another; each has one card."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'autotune-gpu[ray]'")
    from ray.cluster_utils import Cluster

    patched = pytest.MonkeyPatch()
    # Sockets have paths of at most 107 characters.
    folder = f"/tmp/ray-night-{os.getpid()}"
    patched.setenv("RAY_TMPDIR", folder)
    patched.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]))
    patched.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    head = {"num_cpus": 1, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    made.like_here = add_card(made)
    other = [str(ROOT / "tests" / "support" / "other_cpu"), os.environ["PYTHONPATH"]]
    made.other = add_card(made, env_vars={"PYTHONPATH": os.pathsep.join(other)})
    try:
        yield made
    finally:
        made.shutdown()
        patched.undo()
        shutil.rmtree(folder, ignore_errors=True)


def add_card(cluster: Any, **more: Any) -> Any:
    return cluster.add_node(num_cpus=1, resources={on_ray.CPU_RESOURCE: 1}, **more)


def night_in(folder: Path, *, budgets: str = "[30MB, 40MB]") -> Path:
    (folder / "tiny").mkdir()
    (folder / "studies").mkdir()
    shutil.copy(ROOT / "examples" / "tiny-llama.json", folder / "tiny" / "config.json")
    (folder / "space.yaml").write_text(SPACE, encoding="utf-8")
    text = MATRIX.replace("[30MB, 40MB]", budgets)
    (folder / "studies" / "nightly.yaml").write_text(text, encoding="utf-8")
    return folder


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


def by_device(digest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {machine["device"]: machine for machine in digest["machines"]}


def ran(cell: dict[str, Any]) -> tuple[float, float]:
    """Begin and end of a cell that a night has just done."""
    end = datetime.datetime.fromisoformat(cell["trend"][-1][0]).timestamp()
    return end - cell["elapsed_seconds"], end


real = [pytest.mark.slow, pytest.mark.worker, pytest.mark.filterwarnings("default")]


class TestOnRay:
    pytestmark = real

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return night_in(tmp_path_factory.mktemp("cluster"))

    @pytest.fixture(scope="class")
    def first(self, cluster: Any, folder: Path) -> dict[str, Any]:
        code, digest, err = nightly(cluster, folder)
        assert code == 0, err
        return digest

    def test_each_kind_of_card_does_every_cell(self, folder: Path, first: dict[str, Any]) -> None:
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

    def test_cells_of_two_kinds_run_side_by_side(self, first: dict[str, Any]) -> None:
        machines = by_device(first)
        spans = [[ran(each) for each in machines[name]["cells"]] for name in (cpu_name(), OTHER)]
        # Ends are given to the second.
        assert any(
            min(one[1], other[1]) - max(one[0], other[0]) > 2.0
            for one in spans[0]
            for other in spans[1]
        )

    def test_nothing_that_one_kind_measured_is_taken_for_the_other_s(
        self, folder: Path, first: dict[str, Any]
    ) -> None:
        repeats = {
            machine["device"]: sum(each["num_probes"] for each in machine["cells"])
            for machine in first["machines"]
        }
        # What the search probed comes on top.
        assert all(probes(folder)[device] > count for device, count in repeats.items())

    @pytest.mark.usefixtures("first")
    def test_the_next_night_goes_by_each_kind_s_own_history(
        self, cluster: Any, folder: Path
    ) -> None:
        code, plans, err = nightly(cluster, folder, "--cards", "2", "--dry-run")
        assert code == 0, err
        states = {
            machine["device"]: [each["state"] for each in machine["cells"]]
            for machine in plans["machines"]
        }
        assert states == {cpu_name(): ["fresh"] * 2, OTHER: ["fresh"] * 2}

    def test_a_machine_that_dies_loses_no_cell(self, cluster: Any, tmp_path: Path) -> None:
        folder = night_in(tmp_path)
        extra = add_card(cluster)
        with once_probed(
            folder, cpu_name(), lambda: cluster.remove_node(extra, allow_graceful=False)
        ):
            code, digest, err = nightly(cluster, folder)
        assert code == 0, err
        assert any("is lost" in text for text in digest["notes"])
        for machine in digest["machines"]:
            assert machine["headline"] == "2 cells: 2 new"
            assert machine["left"] == []

    def test_a_kind_whose_last_card_dies_goes_on_the_next_night(
        self, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ray_cards, "REPLACE_SECONDS", 5.0)
        folder = night_in(tmp_path, budgets="[30MB]")
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
        assert code == 0, err
        (again,) = by_device(digest)[cpu_name()]["cells"]
        assert (again["state"], again["kind"]) == ("interrupted", "new")
        assert probes(folder)[cpu_name()] > kept

    def test_an_interrupted_night_lets_the_cards_go(self, cluster: Any, tmp_path: Path) -> None:
        folder = night_in(tmp_path)
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

    def test_a_search_takes_no_two_kinds_of_cpu(self, cluster: Any) -> None:
        with (
            pytest.raises(ConfigError, match=r"several kinds.*Give the resource autotune_card"),
            on_ray.connected(
                cluster.address, backend="cpu", wanted=2, name=None, note=lambda _: None
            ),
        ):
            pass

    def test_a_cluster_without_gpus(self, cluster: Any, tmp_path: Path) -> None:
        done = here.command("nightly", "--on", cluster.address, cwd=night_in(tmp_path))
        assert (done.returncode, done.stderr.count("\n")) == (HardwareError.exit_code, 1)
        assert "The Ray cluster has no GPUs" in done.stderr


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
    done = here.command("nightly", *arguments, cwd=night_in(tmp_path))
    assert done.returncode == code
    assert says in done.stderr.splitlines()[-1]


def test_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = here.command("nightly", "--on", "auto", cwd=night_in(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (ConfigError.exit_code, 1)
    assert "pip install 'autotune-gpu[ray]'" in done.stderr


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
