"""The cards that a search measures on: which fleet, and with which budget."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from autotune.catalogue.gpus import find_gpu
from autotune.common.units import GIB
from autotune.errors import ConfigError, HardwareError
from autotune.probe.fleet import on_ray
from autotune.probe.fleet.one_card import OneCard
from autotune.records.question import Question
from autotune.search import budget, fleet
from autotune.search.budget import CardSource
from autotune.search.fleet import Cards, Where

T4 = find_gpu("t4")


@pytest.mark.parametrize(
    ("cards", "number"), [(None, None), ("all", None), ("1", 1), ("08", 8), ("1000", 1000)]
)
def test_a_number_of_cards(cards: str | None, number: int | None) -> None:
    assert Where(cards=cards).number == number


@pytest.mark.parametrize("cards", ["0", "1001", "-1", "1.5", "", "two", "²", "٣"])
def test_what_is_no_number_of_cards(cards: str) -> None:
    with pytest.raises(ConfigError, match="is no number of cards") as raised:
        Where(cards=cards)
    assert raised.value.remedy == "Give a number from 1 to 1000, or all"


class Here:
    """Stands for several cards of this machine."""

    made: list[Any] = []

    def __init__(self, environments: list[dict[str, str]]) -> None:
        self.environments, self.is_closed = environments, False
        self.made.append(self)

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("cards", "backend", "num_gpus", "asked"),
    [
        (None, "cuda", 1, None),
        ("1", "cuda", 1, None),
        (None, "cpu", 2, None),
        ("1", "cpu", 2, None),
        (None, "cuda", 2, ("cuda", 1, 2)),
        ("1", "cuda", 2, ("cuda", 1, 2)),
        ("2", "cuda", 1, ("cuda", 2, 1)),
        ("all", "cuda", 1, ("cuda", None, 1)),
        ("all", "cuda", 2, ("cuda", None, 2)),
        ("3", "cpu", 1, ("cpu", 3, 1)),
    ],
)
def test_one_card_or_several_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
    cards: str | None,
    backend: str,
    num_gpus: int,
    asked: tuple[str, int | None, int] | None,
) -> None:
    seen: list[tuple[str, int | None, int]] = []

    def environments_of(backend: str, wanted: int | None, *, num_gpus: int) -> list[dict[str, str]]:
        seen.append((backend, wanted, num_gpus))
        return [{}, {}]

    monkeypatch.setattr(fleet, "environments_of", environments_of)
    monkeypatch.setattr(fleet, "CardsHere", Here)
    monkeypatch.setattr(Here, "made", [])
    server: Any = object()
    with fleet.fleet_here(Where(cards=cards), backend, server, num_gpus=num_gpus) as found:
        if asked is None:
            assert isinstance(found, OneCard)
            assert found._server is server
        else:
            assert Here.made == [found]
            assert (found.environments, found.is_closed) == ([{}, {}], False)  # type: ignore[attr-defined]
    assert seen == ([] if asked is None else [asked])
    assert all(each.is_closed for each in Here.made)


def test_a_cpu_is_as_many_cards_as_are_asked_for() -> None:
    with (
        pytest.raises(ConfigError, match="--cards all does not go with --backend cpu"),
        fleet.fleet_here(Where(cards="all"), "cpu", object()),  # type: ignore[arg-type]
    ):
        pass


def test_the_budget_on_a_clusters_cards() -> None:
    cards = Cards(fleet=object(), gpu=T4)  # type: ignore[arg-type]
    whole, part = cards.chosen(None, None), cards.chosen(None, "8GiB")
    assert (whole.gpu, whole.source, whole.budget_bytes) == (
        T4,
        CardSource.CLUSTER,
        T4.capacity_bytes,
    )
    assert part.budget_bytes == 8 * GIB
    assert cards.chosen("t4", f"{T4.capacity_bytes}B").budget_bytes == T4.capacity_bytes
    with pytest.raises(HardwareError, match=rf"--gpu-mem 40GB is more than the {T4.name} of the"):
        cards.chosen(None, "40GB")
    on_cpus = Cards(fleet=object(), gpu=None)  # type: ignore[arg-type]
    assert on_cpus.chosen(None, "500MB") == budget.cpu_as_card(None, "500MB")
    with pytest.raises(ConfigError, match="--gpu does not go with --backend cpu"):
        on_cpus.chosen("t4", "500MB")


@pytest.mark.parametrize(
    ("question", "where", "asked"),
    [
        (Question(gpu="t4"), Where(on="a", cards="3"), ("cuda", 3, T4.name, 1)),
        (Question(num_gpus=2), Where(on="a"), ("cuda", None, None, 2)),
        (Question(backend="cuda"), Where(on="a", cards="all"), ("cuda", None, None, 1)),
        (Question(backend="cpu", gpu_mem="500MB"), Where(on="a"), ("cpu", None, None, 1)),
    ],
)
def test_cards_of_a_cluster(
    monkeypatch: pytest.MonkeyPatch,
    question: Question,
    where: Where,
    asked: tuple[str, int | None, str | None, int],
) -> None:
    seen: list[Any] = []

    class Taken:
        gpu = T4

    @contextlib.contextmanager
    def connected(address: str, **options: Any) -> Iterator[Any]:
        assert options.pop("note") is print
        seen.append((address, options))
        yield Taken

    monkeypatch.setattr(on_ray, "connected", connected)
    with fleet.fleet_on_ray(where, question, print) as (there, cards):
        assert there.backend == asked[0]
        assert (cards.fleet, cards.gpu, cards.num_gpus) == (Taken, T4, asked[3])
    names = ("backend", "wanted", "name", "num_gpus")
    assert seen == [("a", dict(zip(names, asked, strict=True)))]


def test_what_no_cluster_is_asked_for() -> None:
    for question, says in (
        (Question(backend="predict"), "--backend predict does not go with --on"),
        (Question(backend="cpu"), "There is no memory budget"),
        (Question(backend="cpu", gpu="t4", gpu_mem="1GB"), "--gpu does not go with --backend cpu"),
    ):
        with (
            pytest.raises(ConfigError, match=says),
            fleet.fleet_on_ray(Where(on="a"), question, print),
        ):
            pass
