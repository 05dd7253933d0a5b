"""Cards of a Ray cluster that come, speak, fall silent and go, without a cluster (test_on_ray.py has one)."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray_stand_in
from ends import ended
from fake_nvml import fake_nvml
from ray_stand_in import Handle, RayActorError, RayError, RayStandIn

from autotune.catalogue import gpus, installed, nvml
from autotune.common.version import __version__
from autotune.errors import HardwareError, WorkerError
from autotune.probe.fleet import card_thread, on_ray, ray_actor, ray_cards, ray_head
from autotune.probe.fleet.fleet import CardsLostError, Job
from autotune.probe.fleet.ray_actor import CardActor, CardThere
from autotune.probe.fleet.ray_cards import RayCard, RayCards
from autotune.records.fingerprint import Fingerprint

HERE = Fingerprint(
    device="NVIDIA T4", driver="580", cuda="13", versions=(("torch", "2.13"),), allocator=""
)
THERE = CardThere(node="a", kind="NVIDIA T4", gpu=None, why_no_card="", versions=())
ENDED = ended(said="done")


class Actor:
    """An actor that says what a test told it to."""

    def __init__(self, *says: Any, there: CardThere = THERE, taken: Any = None) -> None:
        self.says, self.there, self.taken = list(says), there, taken
        self.asked: list[tuple[Any, ...]] = []
        self.num_polls = 0

    def describe(self, backend: str) -> CardThere:
        self.asked.append(("describe", backend))
        return self.there

    def poll(self, seconds: float) -> Any:
        self.num_polls += 1
        assert seconds == ray_cards.POLL_SECONDS
        assert self.num_polls < 100, "somebody waits for ever"
        return self.says.pop(0) if self.says else []

    def taken_of(self, budget_bytes: int) -> Any:
        self.asked.append(("taken_of", budget_bytes))
        return self.taken

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.asked.append((name, *arguments))


class Clock:
    """Time that passes only where somebody sleeps, and by a little at every look."""

    def __init__(self) -> None:
        self.now, self.num_looks = 1000.0, 0

    def monotonic(self) -> float:
        self.num_looks += 1
        assert self.num_looks < 10_000, "somebody waits for ever"
        self.now += 0.001
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (ray_cards, ray_head, on_ray):
        monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def knocks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record where somebody knocks; who answers is set by putting another function in place."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(ray_head, "knock", lambda *where: seen.append(where))
    return seen


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, clock: Clock, knocks: list[Any]) -> RayStandIn:
    made = ray_stand_in.installed(monkeypatch)
    made.is_there = True
    return made


class Cluster:
    """A fleet of these cards, in whose lost ones' place the `spare` come."""

    def __init__(self, ray: RayStandIn, *actors: Actor, backend: str = "cuda") -> None:
        self.spare: list[Handle] = []
        self.notes: list[str] = []
        self.num_killed: list[int] = []
        """How many actors had been ended whenever another one was asked for."""
        self.handles = [Handle(actor) for actor in actors]
        self.cards = RayCards(
            ray=ray,
            backend=backend,
            new_actor=self.another,
            cards=[RayCard(actor=each, there=each.actor.there) for each in self.handles],
            alike=THERE,
            note=self.notes.append,
            head=ray_head.Head(ray),
        )

    def another(self) -> Handle:
        self.num_killed.append(len(self.cards.ray.killed))
        return self.spare.pop(0)


def job(on_answer: Callable[[Any], str] = lambda _: "") -> Job:
    return Job(request={"what": "a probe"}, deadline_seconds=9.0, on_answer=on_answer)


def silent(actor: Actor) -> Handle:
    made = Handle(actor)
    made.silent = True
    return made


def test_each_free_card_gets_a_job_and_all_are_heard(ray: RayStandIn) -> None:
    first, second = Actor([], [{"step": 1}, {"step": 2}]), Actor([], [], [{"step": 9}, ENDED])
    cards = (cluster := Cluster(ray, first, second)).cards
    heard: list[Any] = []

    def hear(answer: Any) -> str:
        heard.append(answer)
        return "too slow" if answer == {"step": 2} else ""

    jobs = [job(hear) for _ in range(3)]
    for each in jobs:
        cards.start(each)
    assert [card.job for card in cards.cards] == jobs[:2]
    assert list(cards.waiting) == jobs[2:]
    assert cards.wait() == (jobs[1], ENDED)
    assert heard == [{"step": 1}, {"step": 2}, {"step": 9}]
    assert first.asked == [("start", jobs[0].request, 9.0), ("stop", "too slow")]
    assert cards.last is cards.cards[1]
    assert [card.job for card in cards.cards] == [jobs[0], None]
    second.says = [[ENDED]]
    assert cards.wait() == (jobs[2], ENDED)
    assert second.asked == [("start", jobs[0].request, 9.0)] * 2
    assert set(ray.waits) == {10 * ray_cards.POLL_SECONDS}
    assert cluster.notes == []


def test_what_a_card_raises_is_raised_here_and_the_card_is_free(ray: RayStandIn) -> None:
    cards = Cluster(ray, Actor([WorkerError("It failed")])).cards
    cards.start(job())
    with pytest.raises(WorkerError, match="It failed"):
        cards.wait()
    assert cards.cards[0].job is None
    assert cards.last is None


def test_a_lost_cards_job_goes_first_to_another(ray: RayStandIn) -> None:
    cluster = Cluster(ray, Actor(), Actor([ENDED], [ENDED]))
    cluster.spare = [Handle(Actor([ENDED]))]
    cards = cluster.cards
    jobs = [job() for _ in range(3)]
    cluster.handles[0].fails = RayActorError("\x1b[36mThe node died.\x1b[0m\nMore of it.")
    for each in jobs:
        cards.start(each)
    ended_now = [cards.wait()[0]]
    # What was lost is begun before what waited, and the one that has come takes part.
    assert ended_now == [jobs[1]]
    assert [cards.wait()[0] for _ in range(2)] == [jobs[0], jobs[2]]
    assert cluster.notes == ["a card on a is lost: The node died. Another one takes its place."]
    assert len(cards.cards) == 2
    assert cards.losses == {jobs[0]: 1}
    assert cards.cards[1].actor.actor.asked[0] == ("describe", "cuda")
    assert ray.killed == []


def test_a_job_that_three_cards_did_not_survive_ends_the_search(ray: RayStandIn) -> None:
    cluster = Cluster(ray, *(Actor() for _ in range(4)))
    cluster.spare = [silent(Actor()) for _ in range(4)]
    for each in cluster.handles:
        each.fails = RayActorError("It died.\nAt night.")
    cluster.cards.start(job())
    with pytest.raises(HardwareError, match="3 cards of the cluster were lost") as raised:
        cluster.cards.wait()
    assert raised.value.why == "It died."
    assert len(cluster.notes) == 2


def test_another_error_of_ray_is_no_loss(ray: RayStandIn) -> None:
    cluster = Cluster(ray, Actor())
    cluster.handles[0].fails = RayError("out of disk")
    cluster.cards.start(job())
    with pytest.raises(WorkerError, match="The Ray cluster failed") as raised:
        cluster.cards.wait()
    assert raised.value.why == "out of disk"


def test_a_silent_card_is_lost(ray: RayStandIn, clock: Clock) -> None:
    cluster = Cluster(ray, Actor(), Actor([ENDED], [ENDED], [ENDED]))
    cluster.spare = [Handle(Actor())]
    cluster.handles[0].silent = True
    jobs = [job(), job()]
    for each in jobs:
        cluster.cards.start(each)
    clock.now += ray_cards.SILENT_SECONDS - 1
    assert cluster.cards.wait()[0] == jobs[1]
    assert cluster.notes == []
    clock.now += 2
    again = job()
    cluster.cards.start(again)
    # The silent one is seen to be so once nobody else has anything to say.
    assert {cluster.cards.wait()[0] for _ in range(2)} == {jobs[0], again}
    assert cluster.notes == [
        "a card on a is lost: It has been silent for 120 s. Another one takes its place."
    ]


def test_only_a_card_of_the_same_kind_takes_a_lost_ones_place(ray: RayStandIn) -> None:
    others = [
        dataclasses.replace(THERE, kind="NVIDIA H100"),
        dataclasses.replace(THERE, versions=(("torch", "1.0"),)),
    ]
    cluster = Cluster(ray, Actor())
    cluster.handles[0].fails = RayActorError("gone.")
    gone, broken = Handle(Actor()), Handle(Actor())
    gone.fails, broken.fails = RayActorError("on the lost machine"), RayError("?")
    unlike = [Handle(Actor(there=each)) for each in others]
    right = Handle(Actor([ENDED], there=dataclasses.replace(THERE, node="b")))
    cluster.spare = [gone, *unlike, right, broken]
    the_job = job()
    cluster.cards.start(the_job)
    assert cluster.cards.wait() == (the_job, ENDED)
    assert [card.there.node for card in cluster.cards.cards] == ["b"]
    # Those of other kinds have held their cards until the right one was found.
    assert cluster.num_killed == [0] * 4
    assert ray.killed == unlike
    assert cluster.cards.unlike == []
    right.fails = RayActorError("gone as well.")
    cluster.cards.start(job())
    with pytest.raises(CardsLostError, match="none came in its place"):
        cluster.cards.wait()  # The one that was to come could not be asked what it is.
    assert cluster.spare == []
    assert cluster.cards.starting == {}
    assert cluster.cards.num_cards == 1


def test_one_waits_for_the_last_card_for_a_while(ray: RayStandIn, clock: Clock) -> None:
    cluster = Cluster(ray)
    late = silent(Actor([[], HERE]))
    cluster.cards.starting[late.describe.remote("cuda")] = late
    before = clock.now
    with pytest.raises(CardsLostError, match="The last card of the cluster is lost"):
        cluster.cards.fingerprint("cuda")
    assert ray_cards.REPLACE_SECONDS <= clock.now - before < ray_cards.REPLACE_SECONDS + 2


def test_who_is_interrupted_waits_no_more(ray: RayStandIn) -> None:
    cluster = Cluster(ray, Actor())
    cluster.cards.start(job())
    (alone,) = cluster.cards.apart()
    assert cluster.cards.cards == []
    cluster.cards.interrupted.set()
    for wait in (alone.wait, lambda: alone.fingerprint("cuda"), cluster.cards._await_card):
        with pytest.raises(KeyboardInterrupt):
            wait()


def test_cards_apart_are_a_fleet_each(ray: RayStandIn) -> None:
    cluster = Cluster(ray, Actor(), Actor())
    cards = list(cluster.cards.cards)
    fleets = cluster.cards.apart()
    assert [each.cards for each in fleets] == [[cards[0]], [cards[1]]]
    assert [each.num_cards for each in fleets] == [1, 1]
    assert cluster.cards.num_cards == 1


def test_the_fingerprint_of_cards_that_are_alike(ray: RayStandIn) -> None:
    lost = Actor()
    cluster = Cluster(ray, lost, Actor([{"step": 1}], [HERE]), Actor([HERE]))
    cluster.spare = [Handle(Actor())]
    cluster.handles[0].fails = RayActorError("gone.")
    assert cluster.cards.fingerprint("cuda") == HERE
    assert len(cluster.cards.cards) == 2
    for each in cluster.handles[1:]:
        assert each.actor.asked[0] == ("ask_fingerprint", "cuda")
        each.actor.says = [[HERE]]
    other = dataclasses.replace(HERE, driver="", versions=(("torch", "2.12"), ("peft", "0.19")))
    cluster.handles[2].actor.says = [[other]]
    cluster.cards.cards[1].there = dataclasses.replace(THERE, node="b")
    with pytest.raises(HardwareError, match="measurements of a, b cannot be compared") as raised:
        cluster.cards.fingerprint("cuda")
    assert raised.value.why == (
        "NVIDIA T4, driver 580: torch 2.13; NVIDIA T4, driver none: torch 2.12, peft 0.19"
    )
    cluster.handles[1].actor.says = [[HardwareError("PyTorch cannot use the GPU")]]
    with pytest.raises(HardwareError, match="PyTorch cannot use"):
        cluster.cards.fingerprint("cuda")
    cluster.handles[1].fails = RayError("out of disk")
    with pytest.raises(WorkerError, match="The Ray cluster failed"):
        cluster.cards.fingerprint("cuda")


def test_dropping_frees_the_cards_or_loses_them(ray: RayStandIn) -> None:
    cluster = Cluster(ray, Actor(), Actor(), Actor())
    cluster.spare = [silent(Actor())]
    for _ in range(2):
        cluster.cards.start(job())
    cluster.cards.waiting.append(job())
    cluster.handles[1].silent = True
    cluster.cards.drop()
    assert [each.calls[-1:] for each in cluster.handles] == [["drop"], ["drop"], []]
    assert not cluster.cards.waiting
    assert [card.job for card in cluster.cards.cards] == [None, None]
    assert "Nothing came within 120.0 s" in cluster.notes[0]


def test_who_else_is_on_the_last_card(ray: RayStandIn) -> None:
    cluster = Cluster(ray, Actor([ENDED], taken="somebody"))
    cards = cluster.cards
    the_job = job()
    assert cards.taken_of(the_job, 5) is None
    cards.start(the_job)
    cards.wait()
    assert cards.taken_of(the_job, 5) == "somebody"
    assert cluster.handles[0].actor.asked[-1] == ("taken_of", 5)
    cluster.handles[0].fails = RayActorError("gone")
    with pytest.raises(WorkerError, match="The Ray cluster failed"):
        cards.taken_of(the_job, 5)
    cards.backend = "cpu"
    assert cards.taken_of(the_job, 5) is None


@pytest.mark.parametrize(
    ("is_there", "head_answers", "num_closed", "num_killed"),
    [(True, True, 2, 4), (True, False, 2, 0), (False, True, 0, 0)],
)
def test_closing_ends_actors_of_a_cluster_that_is_there(
    ray: RayStandIn,
    monkeypatch: pytest.MonkeyPatch,
    is_there: bool,
    head_answers: bool,
    num_closed: int,
    num_killed: int,
) -> None:
    cluster = Cluster(ray, Actor(), Actor())
    starting, unlike = Handle(Actor()), Handle(Actor())
    cluster.cards.starting["its description"] = starting
    cluster.cards.unlike.append(unlike)
    cluster.handles[0].fails = RayActorError("gone")

    def nobody(*_: Any) -> None:
        raise OSError

    if not head_answers:
        monkeypatch.setattr(ray_head, "knock", nobody)
    ray.is_there = is_there
    cluster.cards.close()
    assert [handle.calls for handle in cluster.handles].count(["close"]) == num_closed
    assert ray.killed == [*cluster.handles, starting, unlike][:num_killed]
    assert ray.waits == [ray_cards.CLOSE_SECONDS] * is_there


def test_a_head_that_is_silent_too_long_is_gone(
    ray: RayStandIn, clock: Clock, knocks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = ray_head.Head(ray)
    assert knocks == [("head:6379", ray_head.KNOCK_SECONDS)]
    head.check()
    assert len(knocks) == 1  # It has just been asked.

    def silent(*where: Any) -> None:
        knocks.append(where)
        raise OSError("Connection refused")

    monkeypatch.setattr(ray_head, "knock", silent)

    def pass_by(seconds: float, *, is_heard: bool = False) -> None:
        until = clock.now + seconds
        while clock.now < until:
            clock.sleep(ray_head.KNOCK_SECONDS)
            if is_heard:
                head.heard()
            head.check()

    assert not head.answers()
    pass_by(3 * ray_head.GONE_SECONDS, is_heard=True)
    pass_by(ray_head.GONE_SECONDS - 3)
    monkeypatch.setattr(ray_head, "knock", lambda *_: None)
    pass_by(ray_head.KNOCK_SECONDS)
    assert head.answers()
    monkeypatch.setattr(ray_head, "knock", silent)
    pass_by(ray_head.GONE_SECONDS - 3)
    with pytest.raises(CardsLostError, match="The Ray cluster is gone") as raised:
        pass_by(5)
    assert raised.value.why == (
        "Its head at head:6379 has not answered for 20 s: Connection refused"
    )


def test_a_head_that_was_never_reached_is_not_asked(
    ray: RayStandIn, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: Any) -> None:
        raise OSError

    monkeypatch.setattr(ray_head, "knock", silent)
    head = ray_head.Head(ray)
    for _ in range(20):
        clock.sleep(ray_head.KNOCK_SECONDS)
        head.check()
    assert head.answers()


def test_knocking_needs_a_listener_where_there_is_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ray_head.knock(f"127.0.0.1:{port}")
        ray_head.knock(f"ray://127.0.0.1:{port}", 1.0)
    with pytest.raises(OSError, match="refused"):
        ray_head.knock(f"ray://127.0.0.1:{port}")
    for address in ("auto", "local", "ray://a", "a:b", ":1"):
        ray_head.knock(address)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RayError("\x1b[1;31mfull\x1b[0m\nmore"), "full"),
        (RayError(""), "RayError"),
        (KeyError(), "KeyError"),
    ],
)
def test_the_first_line_says_why_ray_failed(error: Exception, why: str) -> None:
    assert ray_head.failed(error).why == why
    wrapped = RayError("Traceback\nof an actor")
    wrapped.cause = error  # type: ignore[attr-defined]
    assert ray_head.failed(wrapped).why == why


class Server:
    """Stands for a fork server; of what it was asked it says a step, and that it has ended."""

    def __init__(self, **_: Any) -> None:
        pass

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, verb: str, request: dict[str, Any], **options: Any) -> Any:
        if verb == "fingerprint":
            return ended({"fingerprint": dataclasses.asdict(HERE)})
        assert (verb, options["deadline_seconds"]) == ("probe", 9.0)
        if "hangs" in request:
            while True:
                threading.Event().wait(0.01)
                options["on_poll"]()
        options["on_answer"]({"step": request["what"]})
        return ENDED


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Iterator[CardActor]:
    monkeypatch.setattr(card_thread, "ForkServer", Server)
    monkeypatch.setenv("HF_TOKEN", "before")
    made = CardActor({"HF_TOKEN": "theirs"})
    assert os.environ["HF_TOKEN"] == "theirs"
    yield made
    made.close()
    assert not made._card._thread.is_alive()


def heard(actor: CardActor, number: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < number:
        said = actor.poll(10.0)
        assert said
        found += said
    return found


def test_an_actor_passes_on_what_its_card_says(actor: CardActor) -> None:
    assert actor.poll(0.0) == []
    actor.ask_fingerprint("cuda")
    assert heard(actor, 1) == [HERE]
    for number in range(2):
        actor.start({"what": number}, 9.0)
        assert heard(actor, 2) == [{"step": number}, ENDED]
    actor.start({"hangs": True}, 9.0)
    actor.drop()
    actor.start({"what": 7}, 9.0)
    assert heard(actor, 2) == [{"step": 7}, ENDED]
    # What is dropped is forgotten, down to what it had said.
    actor.drop()
    actor.start({"what": 8}, 9.0)
    actor._card.await_idle()
    assert actor._says.qsize() == 2
    # All that was said comes at once.
    assert actor.poll(0.0) == [{"step": 8}, ENDED]
    actor.stop("enough")
    assert actor._card._stop_reason == "enough"
    actor.start({"what": 9}, 9.0)
    actor._card.await_idle()
    actor.drop()
    assert actor.poll(0.0) == []


def test_an_actor_describes_its_card(actor: CardActor, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch, [], error="NVML Shared Library Not Found")
    without, on_cpu = actor.describe("cuda"), actor.describe("cpu")
    assert without.why_no_card == nvml.why_no_card() != ""
    assert on_cpu.why_no_card == ""
    assert {each.kind for each in (without, on_cpu)} == {installed.cpu_name()}
    fake_nvml(monkeypatch, ["NVIDIA H100 80GB HBM3"])
    found = actor.describe("cuda")
    assert found.gpu is not None
    assert (found.kind, found.gpu.slug) == (found.gpu.name, gpus.find_gpu("h100").slug)
    assert found.why_no_card == ""
    assert found.versions[0] == ("autotune", __version__)
    assert found.versions[1:] == installed.versions()
    on_cpu = actor.describe("cpu")
    assert (on_cpu.kind, on_cpu.gpu) == (installed.cpu_name(), None)
    assert found.node == socket.gethostname()


def test_an_actor_says_who_is_on_any_of_its_cards(
    actor: CardActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def taken_of(budget_bytes: int, *, number: int) -> str | None:
        asked.append((budget_bytes, number))
        return "somebody" if number == 1 else None

    monkeypatch.setattr(ray_actor.nvml, "taken_of", taken_of)
    monkeypatch.setattr(ray_actor.nvml, "alike", lambda: ["0", "1", "2"])
    assert actor.taken_of(5) == "somebody"
    assert asked == [(5, 0), (5, 1)]
    monkeypatch.setattr(ray_actor.nvml, "alike", list)
    assert actor.taken_of(5) is None
    assert asked[2:] == [(5, 0)]
