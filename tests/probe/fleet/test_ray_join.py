"""A search joins a Ray cluster, takes cards of it and leaves: without a cluster, which test_on_ray.py has."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import ray_stand_in
from ray_stand_in import AuthenticationError, RayError, RayStandIn

import autotune
from autotune.catalogue import gpus, installed
from autotune.common.version import __version__
from autotune.errors import AutotuneError, ConfigError, HardwareError, WorkerError
from autotune.probe.fleet import on_ray, ray_head, ray_join
from autotune.probe.fleet.fleet import CardsLostError
from autotune.probe.fleet.ray_actor import CardThere

T4, H100 = gpus.find_gpu("t4"), gpus.find_gpu("h100")
PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> RayStandIn:
    monkeypatch.setattr(ray_join, "knock", lambda _: True)
    monkeypatch.setattr(ray_head, "knock", lambda *_: True)
    monkeypatch.delenv(PATIENCE, raising=False)
    made = ray_stand_in.installed(monkeypatch)
    made.machines = [machine(GPU=1)]
    return made


def machine(name: str = "a", *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": resources}


def no_package(monkeypatch: pytest.MonkeyPatch, ray: RayStandIn) -> None:
    """Let machines lack autotune until the search's package comes with the connection."""
    before = ray.init

    def init(**options: Any) -> None:
        before(**options)
        if options["runtime_env"]:
            monkeypatch.setattr(ray_join, "_lacks_autotune", lambda *_: False)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray_join, "_lacks_autotune", lambda *_: True)


def test_one_joins_quietly_and_leaves(
    ray: RayStandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    patience: list[str] = []
    before = ray.init
    monkeypatch.setattr(
        ray, "init", lambda **each: (before(**each), patience.append(os.environ[PATIENCE]))
    )
    with ray_join.joined("a:6379", "GPU") as found:
        assert found is ray
        assert ray.is_there
        print("a machine has gone")
    assert not ray.is_there
    assert ray.inits == [
        {
            "address": "a:6379",
            "log_to_driver": False,
            "logging_level": logging.ERROR,
            "configure_logging": False,
            "runtime_env": None,
        }
    ]
    assert capsys.readouterr() == ("", "a machine has gone\n")
    # Ray waits for its head for as long as this project wants, or the user does.
    assert float(patience[0]) == 24 * 60 * 60
    assert PATIENCE not in os.environ
    monkeypatch.setenv(PATIENCE, "7")
    with ray_join.joined("a:6379", "GPU"):
        pass
    assert (patience[1], os.environ[PATIENCE]) == ("7", "7")


def test_what_was_joined_before_stays_so(
    ray: RayStandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.is_there = True
    with ray_join.joined("auto", "GPU"):
        print("an answer")
    assert (ray.is_there, ray.inits) == (True, [])
    assert capsys.readouterr() == ("an answer\n", "")
    no_package(monkeypatch, ray)
    with pytest.raises(HardwareError, match="lack autotune"), ray_join.joined("auto", "GPU"):
        pass
    assert (ray.is_there, ray.inits) == (True, [])


def test_machines_without_autotune_get_it_from_here(
    ray: RayStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_package(monkeypatch, ray)
    with ray_join.joined("a:6379", "GPU"):
        assert ray.is_there
    assert [each["runtime_env"] for each in ray.inits] == [
        None,
        {"py_modules": [str(Path(autotune.__file__).parent)]},
    ]


@pytest.mark.parametrize(
    ("error", "is_there", "kind", "says"),
    [
        (HardwareError("No room"), True, HardwareError, "No room"),
        (RayError("full"), True, WorkerError, "The Ray cluster failed"),
        (ValueError("mine"), True, ValueError, "mine"),
        (ValueError("Client is shut down"), False, CardsLostError, "The Ray cluster is gone"),
    ],
)
def test_what_goes_wrong_meanwhile(
    ray: RayStandIn, error: Exception, is_there: bool, kind: type[Exception], says: str
) -> None:
    def search() -> None:
        with ray_join.joined("a:1", "GPU"):
            ray.is_there = is_there
            raise error

    with pytest.raises(kind, match=says) as raised:
        search()
    assert not ray.is_there
    if kind in (WorkerError, CardsLostError):
        assert isinstance(raised.value, AutotuneError)
        assert raised.value.why == str(error)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ConnectionError("Nobody. Try again later.\nTraceback"), "Nobody"),
        (RuntimeError("another Python"), "another Python"),
        (TimeoutError(), "TimeoutError"),
        (ValueError("no address"), "no address"),
        (AuthenticationError("no token"), "no token"),
    ],
)
@pytest.mark.parametrize("listens", [False, True])
def test_where_no_cluster_answers(
    ray: RayStandIn,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    why: str,
    listens: bool,
) -> None:
    def refuse(_: str) -> None:
        raise error

    ray.refuses = error
    if not listens:
        monkeypatch.setattr(ray_join, "knock", refuse)
    with (
        pytest.raises(HardwareError, match="No Ray cluster answers at a:1") as raised,
        ray_join.joined("a:1", "GPU"),
    ):
        pass
    assert raised.value.why == why
    assert ("RAY_AUTH_TOKEN" in raised.value.remedy) == listens
    assert ("ray://HOST:10001" in raised.value.remedy) != listens
    assert PATIENCE not in os.environ


def test_versions_of_autotune_on_machines(ray: RayStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    ray.machines = [
        machine("a", GPU=1),
        machine("b", CPU=8),
        machine("c", alive=False, GPU=1),
        machine("d", GPU=0),
    ]
    assert not ray_join._lacks_autotune(ray, "GPU")
    # Only those that live and have cards are looked at, or where they have just gone others.
    assert [each["scheduling_strategy"] for each in ray.options] == [("a", True)]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "autotune.common.version", None)
        assert ray_join._lacks_autotune(ray, "GPU")
    with monkeypatch.context() as older:
        older.setattr(ray_join, "__version__", "9.9")
        with pytest.raises(HardwareError, match=rf"have autotune {__version__}, and this one 9\.9"):
            ray_join._lacks_autotune(ray, "GPU")

    def fails(_: Any, timeout: float) -> Any:
        assert timeout == ray_join.READY_SECONDS
        raise RayError("full")

    monkeypatch.setattr(ray, "get", fails)
    with pytest.raises(WorkerError, match="The Ray cluster failed"):
        ray_join._lacks_autotune(ray, "GPU")


class Actor:
    """An actor whose card is the next of `there`."""

    there: list[CardThere] = []
    variables: list[dict[str, str]] = []

    def __init__(self, variables: dict[str, str]) -> None:
        self.variables.append(variables)
        self.is_of = self.there.pop(0)

    def describe(self, backend: str) -> CardThere:
        assert backend in ("cuda", "cpu")
        return self.is_of

    def close(self) -> None:
        pass


def card(gpu: gpus.Gpu = T4, node: str = "a", **changed: Any) -> CardThere:
    made = CardThere(
        node=node,
        kind=gpu.name,
        gpu=gpu,
        why_no_card="",
        versions=(("autotune", "0"), *installed.versions()),
    )
    return dataclasses.replace(made, **changed)


@pytest.fixture
def cluster(ray: RayStandIn, monkeypatch: pytest.MonkeyPatch) -> RayStandIn:
    """A cluster of two T4 and an H100, all free."""
    monkeypatch.setattr(on_ray, "CardActor", Actor)
    monkeypatch.setattr(Actor, "there", [card(), card(), card(H100, "b")])
    monkeypatch.setattr(Actor, "variables", [])
    for name in on_ray._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    ray.machines = [
        machine("a", GPU=2, **{"accelerator_type:T4": 1}),
        machine("b", GPU=1, **{"accelerator_type:H100": 1}),
        machine("c", alive=False, GPU=8, **{"accelerator_type:T4": 1}),
    ]
    ray.free = {"GPU": 3.0}
    return ray


def taken(wanted: int | None = None, name: str | None = None, **more: Any) -> tuple[Any, list[str]]:
    """Cards that a search took, and what it noted."""
    notes: list[str] = []
    options = {"backend": "cuda", **more}
    with on_ray.connected("a:1", wanted=wanted, name=name, note=notes.append, **options) as cards:
        return cards, notes


def test_all_of_the_named_kind_are_taken(
    cluster: RayStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "mine")
    cards, notes = taken(name=T4.name)
    assert [each.there.node for each in cards.cards] == ["a", "a"]
    assert (cards.gpu, cards.backend) == (T4, "cuda")
    assert notes == ["2 cards on 1 machine of the Ray cluster."]
    assert needs(cluster) == [{"num_cpus": 0, "num_gpus": 1, "accelerator_type": "T4"}] * 2
    assert Actor.variables == [{"HF_TOKEN": "mine"}] * 2
    # All that was taken has ended.
    assert cluster.killed == cluster.made
    # Fewer than are free are waited for by nobody.
    Actor.there[:] = [card()]
    assert taken(1, T4.name)[1] == ["1 card on 1 machine of the Ray cluster."]
    assert cluster.waits[0] == pytest.approx(ray_head.KNOCK_SECONDS)


def test_of_several_kinds_one_must_be_named(cluster: RayStandIn) -> None:
    with pytest.raises(ConfigError, match="cards of several kinds") as raised:
        taken()
    assert raised.value.why == f"1 x {H100.name}, 2 x {T4.name}"
    assert "--gpu" in raised.value.remedy
    assert cluster.killed == cluster.made
    Actor.there[:] = [card(), card(H100)]
    cluster.machines, cluster.free = [machine("a", autotune_card=2)], {"autotune_card": 2.0}
    with pytest.raises(ConfigError, match="cards of several kinds") as raised:
        taken(backend="cpu")
    assert "autotune_card" in raised.value.remedy


def test_kinds_that_ray_does_not_name_are_asked_of_the_cards(cluster: RayStandIn) -> None:
    cluster.machines = [machine("a", GPU=2), machine("b", GPU=1)]
    cards, notes = taken(1, H100.name)
    assert [each.there.node for each in cards.cards] == ["b"]
    assert notes == ["1 card on 1 machine of the Ray cluster."]
    assert needs(cluster)[0] == {"num_cpus": 0, "num_gpus": 1, "accelerator_type": None}
    # The cards of another kind were let go at once, the other with the search.
    assert cluster.killed == cluster.made
    Actor.there[:] = [card(), card(), card()]
    with pytest.raises(HardwareError, match=f"The Ray cluster has no {H100.name}") as raised:
        taken(1, H100.name)
    assert raised.value.why == f"It has {T4.name}"


def test_a_cluster_that_lacks_cards(cluster: RayStandIn) -> None:
    with pytest.raises(HardwareError, match=r"has no machines with the resource autotune_card"):
        taken(backend="cpu")
    with pytest.raises(HardwareError, match=r"No machine of the Ray cluster has 4 GPUs") as raised:
        taken(num_gpus=4)
    assert "--cards N waits" in raised.value.remedy
    cluster.machines, cluster.free = [], {}
    with pytest.raises(HardwareError, match="The Ray cluster has no GPUs"):
        taken()
    assert cluster.made == []


def test_gpus_of_one_machine_that_a_probe_runs_on_together(cluster: RayStandIn) -> None:
    cluster.machines = [machine("a", GPU=5), machine("b", GPU=3)]
    cluster.free = {"GPU": 8.0}
    Actor.there[:] = [card(), card(node="b"), card(node="b"), card(node="b")]
    cards, notes = taken(num_gpus=2)
    assert len(cards.cards) == 3  # two on a, one on b; two single ones are left
    assert notes == ["3 cards on 2 machines of the Ray cluster."]
    assert {each["num_gpus"] for each in needs(cluster)} == {2}
    cluster.machines, cluster.free = [machine("a", autotune_card=2)], {"autotune_card": 2.0}
    Actor.there[:] = [card()]
    taken(backend="cpu", num_gpus=2)
    assert needs(cluster)[-1] == {"num_cpus": 0, "resources": {"autotune_card": 2}}


def needs(cluster: RayStandIn) -> list[dict[str, Any]]:
    """What the actors that hold cards were made with."""
    return [each for each in cluster.options if "num_cpus" in each]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


def test_more_than_are_free_are_waited_for(
    cluster: RayStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(on_ray, "time", clock)
    made_by = cluster.remote

    def remote(what: Any = None, **options: Any) -> Any:
        made = made_by(what, **options)
        if what is Actor:
            with_options = made.options

            def silent_last(**options: Any) -> Any:
                inner = with_options(**options)

                def start(*arguments: Any) -> Any:
                    handle = inner.remote(*arguments)
                    handle.silent = len(cluster.made) > 2
                    return handle

                return type("Options", (), {"remote": staticmethod(start)})

            made.options = silent_last
        return made

    monkeypatch.setattr(cluster, "remote", remote)
    cluster.free = {"GPU": 2.0}
    notes: list[str] = []
    with (
        pytest.raises(HardwareError, match=r"gave 2 of 3 cards") as raised,
        on_ray.connected("a:1", backend="cuda", wanted=3, name=T4.name, note=notes.append),
    ):
        pass
    assert notes == ["waiting for 3 cards of the cluster: 2 are free."]
    assert raised.value.why == "It has 2 GPUs, 2 of them free"
    assert on_ray.SCALE_SECONDS - 5 < clock.now - 1000 < on_ray.SCALE_SECONDS + 5
    assert cluster.killed == cluster.made


@pytest.mark.parametrize(
    ("changed", "says", "why"),
    [
        ({"why_no_card": "No driver"}, "A GPU of z cannot be used", "No driver"),
        (
            {"versions": (("torch", "0.1+cu1"), ("other", "7"))},
            "z has other versions than this machine",
            "torch 0.1 there",
        ),
    ],
)
def test_cards_that_cannot_be_used(
    cluster: RayStandIn, changed: dict[str, Any], says: str, why: str
) -> None:
    bad = card(H100, "z", **changed)
    Actor.there[:] = [card(), card(), bad]
    cluster.machines = [machine("a", GPU=3)]
    with pytest.raises(HardwareError, match=says) as raised:
        taken(1, H100.name)
    assert raised.value.why.startswith(why.removesuffix("0.1 there"))
    assert cluster.killed == cluster.made
    notes: list[str] = []
    Actor.there[:] = [card(), bad, card(node="b")]
    with on_ray.connected_kinds("a:1", backend="cuda", wanted=None, note=notes.append) as fleets:
        assert [len(each.cards) for each in fleets] == [2]
    assert notes[0].startswith(f"left out: {says}")
    assert notes[1] == "2 cards on 2 machines of the Ray cluster."
    Actor.there[:] = [bad] * 3
    with (
        pytest.raises(HardwareError, match=says),
        on_ray.connected_kinds("a:1", backend="cuda", wanted=None, note=print),
    ):
        pass


def test_builds_of_one_version_are_alike(cluster: RayStandIn) -> None:
    others = tuple(
        (name, f"{version.partition('+')[0]}+cu999") for name, version in installed.versions()
    )
    Actor.there[:] = [card(versions=(*others, ("unknown here", "7")))]
    cluster.machines, cluster.free = [machine("a", GPU=1)], {"GPU": 1.0}
    assert len(taken()[0].cards) == 1


def test_every_kind_is_a_fleet(cluster: RayStandIn) -> None:
    with on_ray.connected_kinds("a:1", backend="cuda", wanted=None, note=print) as fleets:
        assert [(each.gpu, len(each.cards)) for each in fleets] == [(T4, 2), (H100, 1)]
        assert cluster.killed == []
    assert sorted(map(id, cluster.killed)) == sorted(map(id, cluster.made))
    Actor.there[:] = [card(), card(), card(H100)]
    with on_ray.connected_kinds("a:1", backend="cuda", wanted=2, note=print) as fleets:
        assert len(cluster.made) == 5
        assert sum(len(each.cards) for each in fleets) == 2


def test_an_error_of_ray_lets_all_cards_go(
    cluster: RayStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise RayError("full")

    monkeypatch.setattr(Actor, "describe", full)
    with pytest.raises(WorkerError, match="The Ray cluster failed") as raised:
        taken(name=T4.name)
    assert raised.value.why == "full"
    assert cluster.killed == cluster.made
    with contextlib.suppress(WorkerError):
        taken(name=H100.name)
    assert len(cluster.killed) == 3
