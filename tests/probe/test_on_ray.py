"""Cards of a Ray cluster on this machine: real probes, a card that is lost, and what cannot be used."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import here
import pytest

from autotune.errors import ConfigError, HardwareError
from autotune.probe.fleet import on_ray
from autotune.probe.fleet.fleet import Job

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'autotune-gpu[ray]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-llama.json"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head and three machines with a card each, all of them processes here."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        made = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
        )
        for _ in range(3):
            made.add_node(num_cpus=1, resources={on_ray.CPU_RESOURCE: 1})
        try:
            yield made
        finally:
            made.shutdown()


def test_a_search_on_the_cluster_probes_for_real(cluster: Any, tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path / "tiny.json")
    ended = here.command(
        *("find", "--model", "tiny.json", "--backend", "cpu", "--gpu-mem", "14MB"),
        *("--seq-len", "64", "--effective-batch", "8", "--method", "full", "--effort", "quick"),
        *("--confirm-steps", "2", "--on", cluster.address, "--cards", "2"),
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    assert "note: 2 cards on 1 machine of the Ray cluster." in ended.stderr
    assert "MEASURED" in ended.stdout
    assert "confirmed over 2 steps" in " ".join(ended.stdout.split())
    assert not ray.is_initialized()


def test_a_card_that_is_lost_gives_its_probe_to_another(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sleeping_card

    monkeypatch.setattr(on_ray, "CardActor", sleeping_card.SleepingCard)
    monkeypatch.setattr(on_ray, "_VARIABLES", ("AUTOTUNE_TEST_SLEEP", "AUTOTUNE_TEST_LOG"))
    monkeypatch.setenv("AUTOTUNE_TEST_SLEEP", "1")
    monkeypatch.setenv("AUTOTUNE_TEST_LOG", str(tmp_path / "log"))
    notes: list[str] = []
    config = next(iter(sleeping_card.recorded()))
    request = {"train_config": config.to_dict(), "spec": dataclasses.asdict(sleeping_card.SPEC)}
    with on_ray.connected(
        cluster.address, backend="cpu", wanted=2, name=None, note=notes.append
    ) as cards:
        assert cards.num_cards == 2
        assert cards.fingerprint("cpu").device
        jobs = {Job(request=request, deadline_seconds=60.0) for _ in range(2)}
        for job in jobs:
            cards.start(job)
        ray.kill(cards.cards[0].actor)
        ended = [cards.wait() for _ in jobs]
        assert {job for job, _ in ended} == jobs
        assert {end.how for _, end in ended} == {"ok"}
        until = time.monotonic() + 30
        while cards.num_cards < 2 and time.monotonic() < until:
            cards._welcome()
            time.sleep(0.1)
        assert cards.num_cards == 2
    assert any("is lost" in note and "Another one takes its probe" in note for note in notes)


def test_more_cards_than_there_are(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "SCALE_SECONDS", 8.0)
    notes: list[str] = []
    with (
        pytest.raises(HardwareError, match="gave 3 of 4 cards"),
        on_ray.connected(cluster.address, backend="cpu", wanted=4, name=None, note=notes.append),
    ):
        pass
    assert notes == ["waiting for 4 cards of the cluster: 3 are free."]


def test_a_cluster_without_gpus(cluster: Any) -> None:
    with (
        pytest.raises(HardwareError, match="The Ray cluster has no GPUs"),
        on_ray.connected(cluster.address, backend="cuda", wanted=None, name=None, note=print),
    ):
        pass


def test_machines_of_another_version(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "__version__", "9.9")
    with (
        pytest.raises(HardwareError, match=r"have autotune \S+, and this one 9\.9"),
        on_ray.connected(cluster.address, backend="cpu", wanted=None, name=None, note=print),
    ):
        pass


def test_nobody_answers() -> None:
    with (
        pytest.raises(HardwareError, match="No Ray cluster answers at"),
        on_ray.connected("127.0.0.1:1", backend="cpu", wanted=None, name=None, note=print),
    ):
        pass


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(ConfigError, match=r"pip install 'autotune-gpu\[ray\]'"),
        on_ray.connected("auto", backend="cpu", wanted=None, name=None, note=print),
    ):
        pass
