"""Cards of a Ray cluster while probes run on them: an actor holds each, and a probe is a call to it.

A card whose actor or machine dies, or falls silent, gives its probe back, and another one takes it, MAX_LOST
times; one of the same kind is asked for in its place. Not yet run on GPUs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from autotune.catalogue.gpus import Gpu
from autotune.catalogue.nvml import Occupancy
from autotune.errors import HardwareError
from autotune.probe.fleet.fleet import CardsLostError, Job
from autotune.probe.fleet.ray_actor import CardThere
from autotune.probe.fleet.ray_head import Head, failed, first_line
from autotune.records.fingerprint import Fingerprint
from autotune.worker.client.isolate import WorkerEnd

MAX_LOST = 3
"""Cards that a probe may lose before the search ends. [judgement] Machines are lost by chance; a probe that
so many did not survive is what took them."""
REPLACE_SECONDS = 300.0
"""Time for a card to come in the place of the last one. [judgement] Clouds start a machine in minutes."""
SILENT_SECONDS = 120.0
"""Silence after which a card is lost, whatever Ray says. [judgement] A restart of a network passes."""
POLL_SECONDS = 0.5
CLOSE_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class RayCard:
    """A card of the cluster."""

    actor: Any
    there: CardThere
    job: Job | None = None
    polling: Any = None
    """Reference of the call that waits for what it says."""
    heard_at: float = 0.0
    """Time of that call by the monotonic clock: it is answered within POLL_SECONDS."""


@dataclass(slots=True)
class RayCards:
    """Cards of a cluster that are alike: made by `connected`."""

    ray: Any
    backend: str
    new_actor: Callable[[], Any]
    cards: list[RayCard]
    alike: CardThere
    """One of them, which another must be like to take a lost one's place."""
    note: Callable[[str], None]
    head: Head
    starting: dict[Any, Any] = field(default_factory=dict)
    """Actors that take the place of lost ones, by the reference of their description."""
    unlike: list[Any] = field(default_factory=list)
    """Actors that came on cards of another kind: they hold those until one of the right kind is found, or the
    next one would come there again."""
    waiting: deque[Job] = field(default_factory=deque)
    """Jobs without a card: theirs was lost."""
    losses: Counter[Job] = field(default_factory=Counter)
    last: RayCard | None = None
    interrupted: threading.Event = field(default_factory=threading.Event)
    """Set by whoever wants `wait` and `fingerprint` to raise KeyboardInterrupt, in whatever thread."""

    @property
    def num_cards(self) -> int:
        return max(len(self.cards), 1)

    @property
    def gpu(self) -> Gpu | None:
        """The kind of the cards; None on CPUs."""
        return self.alike.gpu

    def apart(self) -> list[RayCards]:
        """Return a fleet of each card alone, for a thread each; this one has none any more."""
        fleets = [
            RayCards(
                ray=self.ray,
                backend=self.backend,
                new_actor=self.new_actor,
                cards=[card],
                alike=self.alike,
                note=self.note,
                head=self.head,
                interrupted=self.interrupted,
            )
            for card in self.cards
        ]
        self.cards.clear()
        return fleets

    def fingerprint(self, backend: str) -> Fingerprint:
        found: dict[Fingerprint, RayCard] = {}
        while not found:
            self._await_card()
            for card in self.cards:
                card.actor.ask_fingerprint.remote(backend)
            for card in list(self.cards):
                try:
                    found[self._fingerprint_of(card)] = card
                except self.ray.exceptions.RayActorError as error:
                    self._remove(card, str(error))
                except self.ray.exceptions.RayError as error:
                    raise failed(error) from error
        if len(found) > 1:
            nodes = ", ".join(sorted({card.there.node for card in found.values()}))
            raise HardwareError(
                f"The cards of the cluster are not alike: measurements of {nodes} cannot be compared",
                why="; ".join(sorted({words_of(each) for each in found})),
                remedy="Give its machines the same driver and libraries",
            )
        (only,) = found
        return only

    def _fingerprint_of(self, card: RayCard) -> Fingerprint:
        while True:
            self.go_on()
            for said in self.ray.get(card.actor.poll.remote(POLL_SECONDS)):
                if isinstance(said, BaseException):
                    raise said
                if isinstance(said, Fingerprint):
                    return said

    def start(self, job: Job) -> None:
        self.waiting.append(job)
        self._deal()

    def wait(self) -> tuple[Job, WorkerEnd]:
        while True:
            self.head.check()
            self._await_card()
            self._welcome()
            self._deal()
            busy = {card.polling: card for card in self.cards if card.job is not None}
            assert busy, "nothing was started"
            ready, _ = self.ray.wait(list(busy), num_returns=1, timeout=10 * POLL_SECONDS)
            for reference in ready:
                ended = self._hear(busy[reference], reference)
                if ended is not None:
                    return ended
            self.go_on()
            silent_since = time.monotonic() - SILENT_SECONDS
            for card in [card for card in busy.values() if card.heard_at < silent_since]:
                self._lost(card, f"It has been silent for {SILENT_SECONDS:.0f} s.")

    def _await_card(self) -> None:
        """Wait until there is a card, where the last one is lost. Raises CardsLostError."""
        until = time.monotonic() + REPLACE_SECONDS
        while not self.cards:
            self.go_on()
            self.head.check()
            if time.monotonic() > until:
                raise CardsLostError(
                    "The last card of the cluster is lost, and none came in its place",
                    remedy="What was measured is kept, and the same command goes on",
                )
            time.sleep(POLL_SECONDS)
            self._welcome()

    def go_on(self) -> None:
        """Raise KeyboardInterrupt where somebody asked for that."""
        if self.interrupted.is_set():
            raise KeyboardInterrupt

    def _hear(self, card: RayCard, reference: Any) -> tuple[Job, WorkerEnd] | None:
        """Take in what a card says; how its job has ended, once it has."""
        job = card.job
        assert job is not None
        try:
            heard = self.ray.get(reference)
        except self.ray.exceptions.RayActorError as error:
            self._lost(card, str(error))
            return None
        except self.ray.exceptions.RayError as error:
            raise failed(error) from error
        self.head.heard()
        for said in heard:
            if isinstance(said, BaseException):
                card.job = None
                raise said
            if isinstance(said, WorkerEnd):
                card.job, self.last = None, card
                return job, said
            reason = job.on_answer(said)
            if reason:
                card.actor.stop.remote(reason)
        self._poll(card)
        return None

    def _poll(self, card: RayCard) -> None:
        card.polling = card.actor.poll.remote(POLL_SECONDS)
        card.heard_at = time.monotonic()

    def drop(self) -> None:
        self.waiting.clear()
        dropping = {card.actor.drop.remote(): card for card in self.cards if card.job is not None}
        for reference, card in dropping.items():
            card.job = None
            try:
                self.ray.get(reference, timeout=SILENT_SECONDS)
            except self.ray.exceptions.RayError as error:
                self._remove(card, str(error))

    def taken_of(self, job: Job, budget_bytes: int) -> Occupancy | None:  # noqa: ARG002  # the last one
        if self.last is None or self.backend != "cuda":
            return None
        found: Occupancy | None = self._called(self.last.actor.taken_of.remote(budget_bytes))
        return found

    def _called(self, reference: Any) -> Any:
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            raise failed(error) from error

    def _deal(self) -> None:
        """Give jobs that wait to cards that are free."""
        for card in self.cards:
            if card.job is None and self.waiting:
                card.job = job = self.waiting.popleft()
                card.actor.start.remote(job.request, job.deadline_seconds)
                self._poll(card)

    def _lost(self, card: RayCard, why: str) -> None:
        job = card.job
        assert job is not None
        self.losses[job] += 1
        if self.losses[job] >= MAX_LOST:
            raise HardwareError(
                f"{MAX_LOST} cards of the cluster were lost with the same probe",
                why=first_line(why),
                remedy="What was measured is kept, and the same command goes on",
            )
        self._remove(card, why)
        # It goes before what was not begun.
        self.waiting.appendleft(job)

    def _remove(self, card: RayCard, why: str) -> None:
        """Take a lost card out, and ask for one in its place."""
        self.cards.remove(card)
        self.note(
            f"a card on {card.there.node} is lost: {first_line(why)} Another one takes its place."
        )
        self._ask_another()

    def _ask_another(self) -> None:
        actor = self.new_actor()
        self.starting[actor.describe.remote(self.backend)] = actor

    def _welcome(self) -> None:
        """Take in cards that come in the place of lost ones, where they are of the same kind."""
        if not self.starting:
            return
        ready, _ = self.ray.wait(list(self.starting), num_returns=len(self.starting), timeout=0)
        for reference in ready:
            actor = self.starting.pop(reference)
            try:
                there: CardThere = self.ray.get(reference)
            except self.ray.exceptions.RayActorError:  # Ray had put it on the machine that is lost.
                self._ask_another()
                continue
            except self.ray.exceptions.RayError:
                continue
            if (there.kind, there.versions) == (self.alike.kind, self.alike.versions):
                self.cards.append(RayCard(actor=actor, there=there))
            else:
                self.unlike.append(actor)
                self._ask_another()
        if not self.starting:
            end(self.ray, self.head, self.unlike)
            self.unlike.clear()

    def close(self) -> None:
        """End all probes, servers and actors, and nothing else of the cluster."""
        actors = [card.actor for card in self.cards]
        if self.ray.is_initialized():
            with contextlib.suppress(self.ray.exceptions.RayError):
                closing = [actor.close.remote() for actor in actors]
                self.ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
        end(self.ray, self.head, [*actors, *self.starting.values(), *self.unlike])


def end(ray: Any, head: Head, actors: Iterable[Any]) -> None:
    """End actors, whatever they do; those of a cluster that is gone end by themselves."""
    # Without a head the call would wait for it, and where Ray Client has given up start a cluster here.
    if not (ray.is_initialized() and head.answers()):
        return
    for actor in actors:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(actor)


def words_of(fingerprint: Fingerprint) -> str:
    """A fingerprint in words."""
    versions = ", ".join(f"{name} {version}" for name, version in fingerprint.versions)
    return f"{fingerprint.device}, driver {fingerprint.driver or 'none'}: {versions}"
