"""Several cards of this machine: probes at once, each in a thread's own server, all heard in one thread."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ends import ended
from fake_nvml import fake_nvml

from autotune.errors import HardwareError, WorkerError
from autotune.probe.fleet import card_thread, cards_here
from autotune.probe.fleet.cards_here import CardsHere, environments_of
from autotune.probe.fleet.fleet import Job
from autotune.records.fingerprint import Fingerprint
from autotune.records.measurement import STOP_FILE
from autotune.worker.client.isolate import WorkerEnd

END = ended(said="done")
HERE = Fingerprint(device="a card", driver="", cuda="", versions=(), allocator="")


class Server:
    """Stands for a fork server; its probes wait until all that run at once have begun."""

    together = threading.Barrier(2)
    closed: list[threading.Thread] = []  # of all servers

    def __init__(self, **_: Any) -> None:
        pass

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed.append(threading.current_thread())

    def run(
        self,
        verb: str,
        request: dict[str, Any],
        *,
        deadline_seconds: float,
        on_answer: Callable[[Any], None] = lambda _: None,
        on_poll: Callable[[], None] = lambda: None,
    ) -> WorkerEnd:
        if verb == "fingerprint":
            return ended({"fingerprint": dataclasses.asdict(HERE) | {"device": request["backend"]}})
        assert (verb, deadline_seconds) == ("probe", 9.0)
        match request["what"]:
            case "goes on until it is told to stop":
                stop = Path(request["folder"], STOP_FILE)
                while not stop.exists():
                    on_answer({"step": 1})
                    on_poll()
                    time.sleep(0.01)
                on_answer({"stopped": stop.read_text(encoding="utf-8")})
            case "together":
                self.together.wait(timeout=30)
                on_answer({"thread": threading.get_ident()})
            case "fails":
                raise WorkerError("It failed")
            case "hangs":
                while True:
                    time.sleep(0.01)
                    on_poll()
        return END


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[CardsHere]:
    monkeypatch.setattr(card_thread, "ForkServer", Server)
    monkeypatch.setattr(Server, "closed", [])
    with contextlib.closing(CardsHere([{}, {}])) as two:
        yield two
    assert len(set(Server.closed)) == 2


def job(what: str, on_answer: Callable[[Any], str] = lambda _: "") -> Job:
    return Job(request={"what": what}, deadline_seconds=9.0, on_answer=on_answer)


def test_two_probes_run_at_once_and_are_heard_here(cards: CardsHere) -> None:
    heard: list[int] = []

    def hear(answer: dict[str, Any]) -> str:
        assert answer["thread"] != threading.get_ident()
        heard.append(threading.get_ident())
        return ""

    assert cards.num_cards == 2
    jobs = {job("together", hear), job("together", hear)}
    for each in jobs:
        cards.start(each)
    assert {cards.wait()[0] for _ in jobs} == jobs
    assert heard == [threading.get_ident()] * 2


def test_the_fingerprint_is_the_first_cards(cards: CardsHere) -> None:
    assert cards.fingerprint("cuda") == dataclasses.replace(HERE, device="cuda")
    the_job = job("ends")
    cards.start(the_job)
    assert cards.wait() == (the_job, END)


def test_what_fails_on_a_card_is_raised_here_and_the_card_goes_on(cards: CardsHere) -> None:
    cards.start(job("fails"))
    with pytest.raises(WorkerError, match="It failed"):
        cards.wait()
    again = job("ends")
    cards.start(again)
    assert cards.wait() == (again, END)


def test_what_is_dropped_is_not_heard_of_and_its_card_goes_on(cards: CardsHere) -> None:
    cards.start(job("hangs"))
    cards.start(job("ends"))
    cards.drop()
    again = {job("ends"), job("ends")}
    for each in again:
        cards.start(each)
    assert {cards.wait()[0] for _ in again} == again
    cards.drop()


def test_a_probe_that_is_told_to_stop_says_why(cards: CardsHere) -> None:
    heard: list[dict[str, Any]] = []

    def hear(answer: dict[str, Any]) -> str:
        heard.append(answer)
        return "too slow" if len(heard) == 3 else ""

    stopped = job("goes on until it is told to stop", hear)
    cards.start(stopped)
    assert cards.wait() == (stopped, END)
    assert heard[-1] == {"stopped": "too slow"}
    # What the last one was told is not said to the next.
    heard.clear()
    cards.start(job("hangs", hear))
    cards.drop()
    assert [card._stop_reason for card in cards._cards] == ["", ""]


def test_a_card_that_cannot_be_freed_is_said(
    cards: CardsHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card_thread, "CLOSE_SECONDS", 0.01)
    cards.start(job("hangs"))
    (busy, _) = cards._cards
    with pytest.raises(WorkerError, match="A probe cannot be ended"):
        busy.await_idle()
    monkeypatch.undo()
    cards.drop()


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_who_else_is_on_the_cards_of_the_last_probe(
    cards: CardsHere, monkeypatch: pytest.MonkeyPatch, num_gpus: int
) -> None:
    asked: list[int] = []
    last = 2 * num_gpus - 1

    def taken_of(budget_bytes: int, *, number: int) -> str | None:
        assert budget_bytes == 5
        asked.append(number)
        return "somebody" if number == last else None

    monkeypatch.setattr(cards_here.nvml, "taken_of", taken_of)
    the_job = job("ends")
    assert cards.taken_of(the_job, 5) is None
    cards.start(the_job)
    cards.wait()
    assert cards.taken_of(the_job, 5) is None  # On CPUs nobody is asked about.
    assert asked == []
    cards._environments = [
        {"CUDA_VISIBLE_DEVICES": ",".join("ab"[:num_gpus])},
        {"CUDA_VISIBLE_DEVICES": ",".join("cd"[:num_gpus])},
    ]
    assert cards.taken_of(the_job, 5) is None
    assert asked == list(range(num_gpus))
    cards._last = cards._cards[1]
    asked.clear()
    assert cards.taken_of(the_job, 5) == "somebody"
    assert asked == list(range(num_gpus, 2 * num_gpus))


def test_closing_ends_what_runs(cards: CardsHere) -> None:
    cards.start(job("hangs"))
    cards.start(job("hangs"))
    cards.close()
    assert len(Server.closed) == 2


@pytest.mark.parametrize(
    ("visible", "entries"),
    [(None, ["0", "2"]), ("2, 1,0", ["2", "0"]), ("GPU-2,GPU-0", ["GPU-2", "GPU-0"]), ("1", ["1"])],
)
def test_cards_of_another_kind_are_left_out(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, entries: list[str]
) -> None:
    fake_nvml(monkeypatch, ["NVIDIA H100", "NVIDIA T4", "NVIDIA H100"])
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = environments_of("cuda", None)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == entries
    assert {each["CUDA_DEVICE_ORDER"] for each in found} == {"PCI_BUS_ID"}
    with pytest.raises(HardwareError, match=f"This machine shows {len(entries)}"):
        environments_of("cuda", 3)
    assert environments_of("cpu", 3) == [{}, {}, {}]
    assert environments_of("cpu", None) == [{}]


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "groups", "option"),
    [
        (None, 1, ["0", "1", "2", "3", "4"], ""),
        (2, 1, ["0", "1"], ""),
        (None, 2, ["0,1", "2,3"], ""),
        (1, 2, ["0,1"], ""),
        (2, 2, ["0,1", "2,3"], ""),
        (None, 5, ["0,1,2,3,4"], ""),
        (6, 1, [], "--cards needs 6 GPUs"),
        (3, 2, [], "--cards needs 6 GPUs"),
        (None, 6, [], "--num-gpus 6 needs 6 GPUs"),
        (1, 6, [], "--num-gpus 6 needs 6 GPUs"),
    ],
)
def test_each_probe_has_cards_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    wanted: int | None,
    num_gpus: int,
    groups: list[str],
    option: str,
) -> None:
    fake_nvml(monkeypatch, ["NVIDIA H100"] * 5)
    if option:
        with pytest.raises(HardwareError, match=f"^{option} of one kind") as raised:
            environments_of("cuda", wanted, num_gpus=num_gpus)
        assert raised.value.remedy == f"Lower {option.split()[0]}, or leave it out"
        return
    found = environments_of("cuda", wanted, num_gpus=num_gpus)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == groups
