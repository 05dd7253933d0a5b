"""Cards of a Ray cluster: an actor holds each, and a probe is a call to it.

Cards that are wanted and not there yet are waited for: a cluster may scale up. A card whose actor or machine
dies gives its probe back, and another one takes it, MAX_LOST times. The search, its study and its files stay
where they are; machines that lack autotune get the package from here. Not yet run on GPUs.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.catalogue import installed
from autotune.catalogue.gpus import Gpu
from autotune.catalogue.nvml import Occupancy
from autotune.common.units import counted
from autotune.common.version import __version__
from autotune.errors import ConfigError, HardwareError, WorkerError
from autotune.probe.fleet.fleet import Job
from autotune.probe.fleet.ray_actor import CardActor, CardThere
from autotune.records.fingerprint import Fingerprint
from autotune.worker.client.isolate import WorkerEnd

MAX_LOST = 3
"""Cards that a probe may lose before the search ends. [judgement] Machines are lost by chance; a probe that
so many did not survive is what took them."""
CPU_RESOURCE = "autotune_card"
"""Resource of a cluster's machines that stands for a card where probes run on CPUs."""
READY_SECONDS = 120.0
"""Time for an actor to start where there is a free card: it imports no torch. [judgement] A runtime_env is
unpacked first."""
SCALE_SECONDS = 900.0
"""Time for a cluster to scale up. [judgement] Clouds start a machine in minutes."""
CONNECT_SECONDS = 10.0
_PACKAGE = str(Path(__file__).parents[2])
"""Folder of the package, for machines that lack it."""
POLL_SECONDS = 0.5
CLOSE_SECONDS = 5.0
_VARIABLES = ("HF_TOKEN", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables of the search's environment that its probes need."""


@dataclass(slots=True, eq=False)
class _Card:
    """A card of the cluster."""

    actor: Any
    there: CardThere
    job: Job | None = None
    polling: Any = None
    """Reference of the call that waits for what it says."""


@dataclass(slots=True)
class RayCards:
    """Cards of a cluster that are alike: made by `connected`."""

    ray: Any
    backend: str
    new_actor: Callable[[], Any]
    cards: list[_Card]
    note: Callable[[str], None]
    starting: dict[Any, Any] = field(default_factory=dict)
    """Actors that take the place of lost ones, by the reference of their description."""
    waiting: deque[Job] = field(default_factory=deque)
    """Jobs without a card: theirs was lost."""
    losses: Counter[Job] = field(default_factory=Counter)
    last: _Card | None = None

    @property
    def num_cards(self) -> int:
        return max(len(self.cards), 1)

    @property
    def gpu(self) -> Gpu | None:
        """The kind of the cards; None on CPUs."""
        return self.cards[0].there.gpu

    def fingerprint(self, backend: str) -> Fingerprint:
        for card in self.cards:
            card.actor.ask_fingerprint.remote(backend)
        found: dict[Fingerprint, _Card] = {}
        for card in list(self.cards):
            try:
                found[self._fingerprint_of(card)] = card
            except self.ray.exceptions.RayActorError as error:
                self._remove(card, str(error))
            except self.ray.exceptions.RayError as error:
                raise _failed(error) from error
        if not found:
            raise HardwareError("All cards of the cluster are lost", remedy="Run it again")
        if len(found) > 1:
            nodes = ", ".join(sorted({card.there.node for card in found.values()}))
            raise HardwareError(
                f"The cards of the cluster are not alike: measurements of {nodes} cannot be compared",
                why="; ".join(sorted({_words(each) for each in found})),
                remedy="Give its machines the same driver and libraries",
            )
        (only,) = found
        return only

    def _fingerprint_of(self, card: _Card) -> Fingerprint:
        while True:
            for said in self.ray.get(card.actor.poll.remote(POLL_SECONDS)):
                if isinstance(said, BaseException):
                    raise said
                if isinstance(said, Fingerprint):
                    return said

    def start(self, job: Job) -> None:
        self.waiting.append(job)
        self._deal()

    def wait(self) -> tuple[Job, WorkerEnd]:
        lost_since: float | None = None
        while True:
            self._welcome()
            self._deal()
            busy = {card.polling: card for card in self.cards if card.job is not None}
            if not busy:
                now = time.monotonic()
                lost_since = lost_since or now
                if now - lost_since > SCALE_SECONDS:
                    raise HardwareError(
                        "The last card of the cluster is lost, and none came in its place",
                        remedy="What was measured is kept, and the same command goes on",
                    )
                time.sleep(POLL_SECONDS)
                continue
            lost_since = None
            ready, _ = self.ray.wait(list(busy), num_returns=1, timeout=10 * POLL_SECONDS)
            for reference in ready:
                ended = self._hear(busy[reference], reference)
                if ended is not None:
                    return ended

    def _hear(self, card: _Card, reference: Any) -> tuple[Job, WorkerEnd] | None:
        """Take in what a card says; how its job has ended, once it has."""
        job = card.job
        assert job is not None
        try:
            heard = self.ray.get(reference)
        except self.ray.exceptions.RayActorError as error:
            self._lost(card, str(error))
            return None
        except self.ray.exceptions.RayError as error:
            raise _failed(error) from error
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
        card.polling = card.actor.poll.remote(POLL_SECONDS)
        return None

    def taken_of(self, job: Job, budget_bytes: int) -> Occupancy | None:  # noqa: ARG002  # the last one
        if self.last is None or self.backend != "cuda":
            return None
        found: Occupancy | None = self._called(self.last.actor.taken_of.remote(budget_bytes))
        return found

    def _called(self, reference: Any) -> Any:
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            raise _failed(error) from error

    def _deal(self) -> None:
        """Give jobs that wait to cards that are free."""
        for card in self.cards:
            if card.job is None and self.waiting:
                card.job = job = self.waiting.popleft()
                card.actor.start.remote(job.request, job.deadline_seconds)
                card.polling = card.actor.poll.remote(POLL_SECONDS)

    def _lost(self, card: _Card, why: str) -> None:
        job = card.job
        assert job is not None
        self.losses[job] += 1
        if self.losses[job] >= MAX_LOST:
            raise HardwareError(
                f"{MAX_LOST} cards of the cluster were lost with the same probe",
                why=_first_line(why),
                remedy="What was measured is kept, and the same command goes on",
            )
        self._remove(card, why)
        # It goes before what was not begun.
        self.waiting.appendleft(job)

    def _remove(self, card: _Card, why: str) -> None:
        """Take a lost card out, and ask for one in its place."""
        self.cards.remove(card)
        self.note(
            f"a card on {card.there.node} is lost: {_first_line(why)} Another one takes its probe."
        )
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
            except self.ray.exceptions.RayError:
                continue
            if self.cards and _kind(there) != _kind(self.cards[0].there):
                self.ray.kill(actor)
                continue
            self.cards.append(_Card(actor=actor, there=there))

    def close(self) -> None:
        """End all probes, servers and actors, and nothing else of the cluster."""
        with contextlib.suppress(self.ray.exceptions.RayError):
            closing = [card.actor.close.remote() for card in self.cards]
            self.ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
        for actor in [*(card.actor for card in self.cards), *self.starting.values()]:
            with contextlib.suppress(self.ray.exceptions.RayError, ValueError):
                self.ray.kill(actor)


@contextlib.contextmanager
def connected(
    address: str,
    *,
    backend: str,
    wanted: int | None,
    name: str | None,
    note: Callable[[str], None],
) -> Iterator[RayCards]:
    """Take cards of the cluster at that address, or of RAY_ADDRESS's with `auto`, until the end of the block.

    `wanted` None: all that it has. `name`: of the card in the catalogue; None: the kind that it has.

    Raises ConfigError where Ray is not installed or several kinds are there, HardwareError where no cluster
    answers, or it lacks such cards.
    """
    ray = _imported()
    is_ours = not ray.is_initialized()
    try:
        if is_ours:
            _connect(ray, address, {})
        if _lacks_autotune(ray, backend):
            if not is_ours:
                raise HardwareError(
                    "Machines of the cluster lack autotune",
                    remedy="Name it in the job's runtime_env, or install it there",
                )
            ray.shutdown()
            _connect(ray, address, {"py_modules": [_PACKAGE]})
        cards = _take(ray, backend, wanted, name, note)
        try:
            yield cards
        finally:
            cards.close()
    finally:
        if is_ours:
            ray.shutdown()


def _imported() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise ConfigError(
            "Ray is not installed", why=str(error), remedy="pip install 'autotune-gpu[ray]'"
        ) from error
    return ray


def _connect(ray: Any, address: str, runtime_env: dict[str, Any]) -> None:
    import logging

    try:
        _knock(address)
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            runtime_env=runtime_env or None,
        )
    except (ConnectionError, OSError, RuntimeError, TimeoutError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise HardwareError(
            f"No Ray cluster answers at {address}",
            why=first,
            remedy="Name one as ray://HOST:10001, or run this on a machine of the cluster with --on auto",
        ) from error


def _knock(address: str) -> None:
    """Raise OSError where nobody listens at an address with a port: Ray would try for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS):
            pass


def _resource(backend: str) -> str:
    return "GPU" if backend == "cuda" else CPU_RESOURCE


def _lacks_autotune(ray: Any, backend: str) -> bool:
    """Whether a machine with such cards has no autotune of this version. Raises HardwareError."""

    # By value: a machine without autotune can run it.
    def look() -> str:
        try:
            from autotune.common.version import __version__ as found
        except ImportError:
            return ""
        return found

    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    looking = ray.remote(num_cpus=0)(look)
    nodes = [
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get(_resource(backend))
    ]
    found = ray.get(
        [
            looking.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote()
            for node in nodes
        ],
        timeout=READY_SECONDS,
    )
    others = sorted({version for version in found if version not in ("", __version__)})
    if others:
        raise HardwareError(
            f"Machines of the cluster have autotune {', '.join(others)}, and this one {__version__}",
            remedy="Install the same version everywhere",
        )
    return "" in found


def _take(
    ray: Any, backend: str, wanted: int | None, name: str | None, note: Callable[[str], None]
) -> RayCards:
    import os

    what = "GPUs" if backend == "cuda" else f"machines with the resource {CPU_RESOURCE}"
    there_are = int(ray.cluster_resources().get(_resource(backend), 0))
    free = int(ray.available_resources().get(_resource(backend), 0))
    number = wanted or there_are
    if not number:
        raise HardwareError(
            f"The Ray cluster has no {what}",
            remedy="Add some; --cards N waits until the cluster has scaled up to N",
        )
    if number > free:
        note(f"waiting for {counted(number, 'card')} of the cluster: {free} are free.")
    variables = {key: os.environ[key] for key in _VARIABLES if key in os.environ}
    needs = {"num_gpus": 1} if backend == "cuda" else {"resources": {CPU_RESOURCE: 1}}
    actor_class = ray.remote(CardActor)

    def new_actor() -> Any:
        return actor_class.options(num_cpus=0, **needs).remote(variables)

    actors = [new_actor() for _ in range(number)]
    try:
        described = [actor.describe.remote(backend) for actor in actors]
        seconds = READY_SECONDS if number <= free else SCALE_SECONDS
        ready, _ = ray.wait(described, num_returns=number, timeout=seconds)
        cards = [
            _Card(actor=actor, there=ray.get(reference))
            for actor, reference in zip(actors, described, strict=True)
            if reference in ready
        ]
        chosen = _of_one_kind(cards, name) if cards else []
        if len(chosen) < (wanted or 1):
            raise HardwareError(
                f"The Ray cluster gave {len(chosen)} of {counted(wanted or 1, 'card')}",
                why=f"It has {there_are} {what}, {free} of them free",
                remedy="Lower --cards, or wait until others are done",
            )
        _check_versions(chosen)
    except BaseException as error:
        for actor in actors:
            ray.kill(actor)
        if isinstance(error, ray.exceptions.RayError):
            raise _failed(error) from error
        raise
    kept = {id(card.actor) for card in chosen}
    for actor in actors:
        if id(actor) not in kept:
            ray.kill(actor)
    nodes = {card.there.node for card in chosen}
    note(f"{counted(len(chosen), 'card')} on {counted(len(nodes), 'machine')} of the Ray cluster.")
    return RayCards(ray=ray, backend=backend, new_actor=new_actor, cards=chosen, note=note)


def _kind(there: CardThere) -> str:
    return "CPU" if there.gpu is None else there.gpu.name


def _of_one_kind(cards: list[_Card], name: str | None) -> list[_Card]:
    """The cards of that kind, or of the only kind."""
    for card in cards:
        if card.there.why_no_card:
            raise HardwareError(
                f"A GPU of {card.there.node} cannot be used", why=card.there.why_no_card
            )
    kinds = Counter(_kind(card.there) for card in cards)
    if name is None and len(kinds) > 1:
        listed = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))
        raise ConfigError(
            "The Ray cluster has cards of several kinds", why=listed, remedy="Name one with --gpu"
        )
    wanted = name or next(iter(kinds))
    if wanted not in kinds:
        raise HardwareError(
            f"The Ray cluster has no {wanted}",
            why=f"It has {', '.join(sorted(kinds))}",
            remedy="Name another with --gpu",
        )
    return [card for card in cards if _kind(card.there) == wanted]


def _check_versions(cards: list[_Card]) -> None:
    """Raise HardwareError where machines have other libraries than predictions were made with here."""
    here = {name: _public(version) for name, version in installed.versions()}
    for card in cards:
        others = [
            f"{name} {version} there, {here[name]} here"
            for name, version in card.there.versions
            if name in here and _public(version) != here[name]
        ]
        if others:
            raise HardwareError(
                f"{card.there.node} has other versions than this machine",
                why="; ".join(others),
                remedy="Install the same versions, or search on the cluster: ray job submit",
            )


def _public(version: str) -> str:
    """A version without the build's part: 2.13.0 of 2.13.0+cu130."""
    return version.partition("+")[0]


def _words(fingerprint: Fingerprint) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in fingerprint.versions)
    return f"{fingerprint.device}, driver {fingerprint.driver or 'none'}: {versions}"


def _failed(error: BaseException) -> WorkerError:
    why = _first_line(str(error)) or type(error).__name__
    return WorkerError(
        "The Ray cluster failed", why=why, remedy="What was measured is kept; run it again"
    )


def _first_line(said: str) -> str:
    return (said.strip().splitlines() or [""])[0]
