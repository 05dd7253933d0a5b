"""A Ray cluster of three machines here: searches with real probes and stand-ins, and what cannot be used."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import here
import optuna
import pytest
import ray_cluster
import stand_in_cards
import sweep
from nights_of import SPACE
from optuna.trial import TrialState
from optuna_storage import unpooled
from ray_cluster import add_card

from autotune.catalogue import gpus
from autotune.errors import ConfigError, HardwareError, WorkerError
from autotune.probe.fleet import on_ray, ray_head, ray_join
from autotune.probe.fleet.fleet import Job
from autotune.probe.trial_history import INTERRUPTED

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[client]'")

pytestmark = [pytest.mark.slow, pytest.mark.worker, pytest.mark.filterwarnings("default")]

ROOT = Path(__file__).parents[3]
NUM_MACHINES = 3
SECONDS = 0.4
"""Time of a stand-in probe."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without cards, and three machines with one each."""
    with pytest.MonkeyPatch.context() as patched, ray_cluster.started("search") as made:
        patched.setenv(stand_in_cards.SECONDS, str(SECONDS))
        made.cards = [add_card(made) for _ in range(NUM_MACHINES)]
        yield made
        ray.shutdown()


@pytest.fixture
def joined(cluster: Any) -> Any:
    """The cluster, with this process as a driver that stays: processes on its machines are used again."""
    if not ray.is_initialized():
        ray_join._connect(ray, cluster.address, {})
    return cluster


@pytest.fixture
def apart(cluster: Any) -> Any:
    """The cluster, which this process has not joined: what is tested joins and leaves it."""
    ray.shutdown()
    return cluster


def searched(
    cluster: Any,
    url: str,
    num_cards: int | None = None,
    *,
    meanwhile: Callable[[Any], None] | None = None,
) -> tuple[Any, list[str]]:
    """(What a search found, what it noted.) `meanwhile`: called in the middle."""
    notes: list[str] = []
    with stand_in_cards.cards_of(cluster.address, num_cards, notes.append) as cards:
        disturbing = None
        if meanwhile is not None:
            disturbing = threading.Timer(1.5 * SECONDS, meanwhile, [cards])
            disturbing.start()
        found = stand_in_cards.searched(cards, url)
        if disturbing is not None:
            disturbing.join()
    return found, notes


def states(url: str) -> dict[TrialState, int]:
    """Numbers of trials by state, but for those whose probes were ended because they could not win."""
    trials = [
        trial
        for trial in optuna.load_study(study_name="s", storage=unpooled(url)).trials
        if trial.user_attrs.get("outcome") != INTERRUPTED
    ]
    return {state: sum(trial.state is state for trial in trials) for state in TrialState}


def url_in(folder: Path, name: str = "a") -> str:
    return f"sqlite:///{folder}/{name}.db"


def test_three_cards_that_are_kept_busy_find_what_one_does(
    joined: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(stand_in_cards.SECONDS, "0")
    monkeypatch.setenv(stand_in_cards.COMPANY, f"3 {tmp_path}/of-three")
    together, notes = searched(joined, url_in(tmp_path, "three"))
    monkeypatch.setenv(stand_in_cards.COMPANY, f"1 {tmp_path}/of-one")
    alone, _ = searched(joined, url_in(tmp_path, "one"), 1)
    assert together.best.config == alone.best.config
    # A probe goes on until all three cards are at work, but for the last two, to which nobody comes.
    at_once = stand_in_cards.company(tmp_path / "of-three")
    assert len(at_once) >= together.num_run >= 6
    assert sum(number < 3 for number in at_once.values()) <= 4
    assert max(at_once.values()) == 3
    assert set(stand_in_cards.company(tmp_path / "of-one").values()) == {1}
    assert notes[-1].startswith("3 cards on ")
    assert states(url_in(tmp_path, "three"))[TrialState.RUNNING] == 0


def test_dropped_probes_leave_their_cards_free(
    joined: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(stand_in_cards.SECONDS, "600")
    spec = next(iter(sweep.measured().values())).spec
    jobs = [
        Job(
            request={"train_config": each.to_dict(), "spec": dataclasses.asdict(spec)},
            deadline_seconds=1200.0,
        )
        for each in list(sweep.measured())[:3]
    ]
    with stand_in_cards.cards_of(joined.address, 2) as cards:
        for each in jobs:  # one more than there are cards
            cards.start(each)
        begun = time.monotonic()
        cards.drop()
        assert time.monotonic() - begun < 300
        assert not cards.waiting
        assert [card.job for card in cards.cards] == [None, None]
        assert cards.fingerprint("cpu") == stand_in_cards.HERE


def test_a_machine_that_dies_loses_no_probe(joined: Any, tmp_path: Path) -> None:
    def remove(_: Any) -> None:
        joined.remove_node(joined.cards.pop(), allow_graceful=False)

    try:
        found, notes = searched(joined, url_in(tmp_path), meanwhile=remove)
    finally:
        joined.cards.append(add_card(joined))
    assert any("is lost" in note for note in notes)
    ended = states(url_in(tmp_path))
    assert (ended[TrialState.RUNNING], ended[TrialState.FAIL]) == (0, 0)
    assert found.num_run == ended[TrialState.COMPLETE] + ended[TrialState.PRUNED]


def test_a_cluster_that_is_gone(
    apart: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.cluster_utils import Cluster

    monkeypatch.setattr(ray_head, "GONE_SECONDS", 3.0)
    head = {"num_cpus": 1, "include_dashboard": False, "resources": {on_ray.CPU_RESOURCE: 1}}
    other = Cluster(initialize_head=True, head_node_args=head)

    def kill(_: Any = None) -> None:
        other.head_node.kill_all_processes(check_alive=False, allow_graceful=False)

    try:
        with pytest.raises(HardwareError, match="The Ray cluster is gone") as raised:
            searched(other, url_in(tmp_path), meanwhile=kill)
    finally:
        kill()
    assert "the same command goes on" in raised.value.remedy
    assert not ray.is_initialized()
    measured = states(url_in(tmp_path))
    assert measured[TrialState.RUNNING] == 0
    found, _ = searched(apart, url_in(tmp_path))
    ended = states(url_in(tmp_path))
    assert ended[TrialState.COMPLETE] == measured[TrialState.COMPLETE] + found.num_run


def test_an_error_of_ray_is_said_in_one_line(joined: Any) -> None:
    def fill() -> None:
        from ray.exceptions import OutOfDiskError

        raise OutOfDiskError("the store and the disk")

    with (
        pytest.raises(WorkerError) as raised,
        stand_in_cards.cards_of(joined.address, 1) as cards,
    ):
        cards.ray.get(cards.ray.remote(num_cpus=0)(fill).remote())
    assert raised.value.why == "the store and the disk"


@pytest.mark.usefixtures("forked_workers")
def test_a_search_on_the_cluster_probes_for_real(apart: Any, tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "tiny-llama.json", tmp_path / "tiny.json")
    (tmp_path / "space.yaml").write_text(SPACE, encoding="utf-8")
    ended = here.command(
        *("find", "--model", "tiny.json", "--backend", "cpu", "--gpu-mem", "14MB"),
        *("--seq-len", "64", "--effective-batch", "8", "--effort", "quick"),
        *("--space", "space.yaml", "--method", "full"),
        *("--confirm-steps", "2", "--on", apart.address, "--cards", "1"),
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    assert "note: 1 card on 1 machine of the Ray cluster." in ended.stderr
    assert "MEASURED" in ended.stdout
    assert "confirmed over 2 steps" in " ".join(ended.stdout.split())
    assert not ray.is_initialized()


def test_more_cards_than_there_are(joined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "SCALE_SECONDS", 5.0)
    notes: list[str] = []
    with (
        pytest.raises(HardwareError, match="gave 3 of 4 cards"),
        on_ray.connected(joined.address, backend="cpu", wanted=4, name=None, note=notes.append),
    ):
        pass
    assert notes == ["waiting for 4 cards of the cluster: 3 are free."]


def test_a_cluster_without_gpus(joined: Any) -> None:
    with (
        pytest.raises(HardwareError, match="The Ray cluster has no GPUs"),
        on_ray.connected(joined.address, backend="cuda", wanted=None, name=None, note=print),
    ):
        pass


def test_only_cards_of_the_kind_that_was_asked_for(
    joined: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def are_free(number: int) -> None:
        until = time.monotonic() + 20
        while ray.available_resources().get("GPU") != number and time.monotonic() < until:
            time.sleep(0.1)
        assert ray.available_resources()["GPU"] == number

    def taken(wanted: int | None, name: str | None) -> None:
        with on_ray.connected(
            joined.address, backend="cuda", wanted=wanted, name=name, note=print
        ) as cards:
            assert cards.gpu is not None
            assert (len(cards.cards), cards.gpu.name) == (1, name)
            are_free(2)  # Actors with another card end after they were told to.
        are_free(3)

    monkeypatch.setattr(on_ray, "CardActor", stand_in_cards.GpuActor)

    def add_gpu(kind: str) -> Any:
        resources = {f"accelerator_type:{kind}": 1}
        return joined.add_node(num_cpus=1, num_gpus=1, resources=resources)

    nodes = [add_gpu(kind) for kind in ("T4", "T4", "H100")]
    h100 = gpus.find_gpu("h100").name
    try:
        for _ in range(2):  # another machine might be taken by chance
            taken(1, h100)
        with pytest.raises(ConfigError, match="1 x NVIDIA H100 80GB HBM3, 2 x NVIDIA T4"):
            taken(None, None)
        monkeypatch.setattr(on_ray, "_accelerator_type", lambda *_: "")
        taken(None, h100)
        # The one that takes a lost one's place is of its kind, too, whichever machine Ray tries first.
        with on_ray.connected(
            joined.address, backend="cuda", wanted=1, name=h100, note=print
        ) as cards:
            (lost,) = cards.cards
            joined.remove_node(nodes.pop(), allow_graceful=False)
            nodes.append(add_gpu("H100"))
            assert cards.fingerprint("cuda") == stand_in_cards.HERE
            (found,) = cards.cards
            assert (found.there.kind, found.there.node) == (h100, lost.there.node)
            assert found.actor != lost.actor
            assert cards.unlike == []
    finally:
        for node in nodes:
            joined.remove_node(node)


@pytest.mark.parametrize(
    ("name", "types", "found"),
    [
        ("a100-80gb", ["A100", "A100-80G", "H100"], "A100"),
        ("l40s", ["L4", "L40S"], "L40S"),
        ("l4", ["L40S"], ""),
        ("rtx-5090", ["GeForce-RTX-5090", "T4"], "GeForce-RTX-5090"),
        ("rtx-pro-6000", ["RTX-PRO-6000", "RTX-6000"], "RTX-PRO-6000"),
    ],
)
def test_types_of_cards_by_name(name: str, types: list[str], found: str) -> None:
    class Cluster:
        def cluster_resources(self) -> dict[str, float]:
            return {"GPU": 2.0, **{f"accelerator_type:{each}": 1.0 for each in types}}

    assert on_ray._accelerator_type(Cluster(), gpus.find_gpu(name).name) == found


def test_machines_of_another_version(apart: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_join, "__version__", "9.9")
    with (
        pytest.raises(HardwareError, match=r"have autotune \S+, and this one 9\.9"),
        on_ray.connected(apart.address, backend="cpu", wanted=None, name=None, note=print),
    ):
        pass


def test_nobody_answers() -> None:
    with (
        pytest.raises(HardwareError, match="No Ray cluster answers at"),
        on_ray.connected("127.0.0.1:1", backend="cpu", wanted=None, name=None, note=print),
    ):
        pass


def test_nobody_runs_ray_here() -> None:
    """Nothing listens at `auto`, which is no address: that is not said."""

    def init(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance. Please specify one.")

    none = types.SimpleNamespace(init=init, exceptions=types.SimpleNamespace())
    with pytest.raises(HardwareError, match=r"at auto\. Could not .*instance\. Name one as ray://"):
        ray_join._connect(none, "auto", {})


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(ConfigError, match=r"pip install 'ray\[client\]'"),
        on_ray.connected("auto", backend="cpu", wanted=None, name=None, note=print),
    ):
        pass
