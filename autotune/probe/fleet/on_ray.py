"""Gets cards of a Ray cluster for a search, and lets them go.

Cards that are wanted and not there yet are waited for: a cluster may scale up. The search, its study and its
files stay where they are; machines that lack autotune get the package from here. Not yet run on GPUs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from autotune.catalogue import installed
from autotune.common.units import counted
from autotune.errors import ConfigError, HardwareError
from autotune.probe.fleet.ray_actor import CardActor
from autotune.probe.fleet.ray_cards import RayCard, RayCards, end
from autotune.probe.fleet.ray_head import KNOCK_SECONDS, Head, failed
from autotune.probe.fleet.ray_join import READY_SECONDS, joined

CPU_RESOURCE = "autotune_card"
"""Resource of a cluster's machines that stands for a card where probes run on CPUs."""
SCALE_SECONDS = 900.0
"""Time for a cluster to scale up. [judgement] Clouds start a machine in minutes."""
_TYPE = "accelerator_type:"
"""Beginning of the resource that stands for a type of card in Ray."""
_VARIABLES = ("HF_TOKEN", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables of the search's environment that its probes need."""


@contextlib.contextmanager
def connected(
    address: str,
    *,
    backend: str,
    wanted: int | None,
    name: str | None,
    note: Callable[[str], None],
    num_gpus: int = 1,
) -> Iterator[RayCards]:
    """Take cards of the cluster at that address, or of RAY_ADDRESS's with `auto`, until the end of the block.

    `wanted` None: all that it has. `name`: of the card in the catalogue; None: the kind that it has.
    `num_gpus`: cards of one machine that a probe runs on; they count as one.

    Raises ConfigError where Ray is not installed or several kinds are there, HardwareError where no cluster
    answers, or it lacks such cards, WorkerError where Ray fails.
    """
    with joined(address, _resource(backend)) as ray:
        choose = functools.partial(_of_one_kind, name=name, backend=backend)
        (cards,) = _take(ray, backend, wanted, choose, note, name=name, num_gpus=num_gpus)
        with contextlib.closing(cards):
            yield cards


@contextlib.contextmanager
def connected_kinds(
    address: str, *, backend: str, wanted: int | None, note: Callable[[str], None]
) -> Iterator[list[RayCards]]:
    """Take cards as `connected` does, of every kind: a fleet for each kind.

    `wanted` counts them together. Cards that cannot be used are left out, which `note` hears. Raises what
    `connected` raises.
    """
    with joined(address, _resource(backend)) as ray, contextlib.ExitStack() as taken:
        fleets = _take(ray, backend, wanted, functools.partial(_by_kind, note=note), note)
        for cards in fleets:
            taken.enter_context(contextlib.closing(cards))
        yield fleets


def _resource(backend: str) -> str:
    return "GPU" if backend == "cuda" else CPU_RESOURCE


Choose = Callable[[list[RayCard]], list[list[RayCard]]]
"""A function that chooses among the cards of a cluster, and returns those of each kind."""


def _take(
    ray: Any,
    backend: str,
    wanted: int | None,
    choose: Choose,
    note: Callable[[str], None],
    *,
    name: str | None = None,
    num_gpus: int = 1,
) -> list[RayCards]:
    what = "GPUs" if backend == "cuda" else f"machines with the resource {CPU_RESOURCE}"
    kind = "" if name is None else _accelerator_type(ray, name)
    there_are = sum(
        int(node["Resources"].get(_resource(backend), 0)) // num_gpus
        for node in ray.nodes()
        if node["Alive"] and (not kind or _TYPE + kind in node["Resources"])
    )
    free = int(ray.available_resources().get(_resource(backend), 0)) // num_gpus
    free = min(free, there_are)
    number = wanted or there_are
    if name is not None and not kind:  # Cards themselves must say of what kind they are.
        number = max(number, free)
    if not number:
        raise HardwareError(
            f"The Ray cluster has no {what}"
            if num_gpus == 1
            else f"No machine of the Ray cluster has {num_gpus} GPUs",
            remedy="Add some; --cards N waits until the cluster has scaled up to N",
        )
    if number > free:
        note(f"waiting for {counted(number, 'card')} of the cluster: {free} are free.")
    variables = {key: os.environ[key] for key in _VARIABLES if key in os.environ}
    needs = (
        {"num_gpus": num_gpus, "accelerator_type": kind or None}
        if backend == "cuda"
        else {"resources": {CPU_RESOURCE: num_gpus}}
    )
    actor_class = ray.remote(CardActor)

    def new_actor() -> Any:
        return actor_class.options(num_cpus=0, **needs).remote(variables)

    head = Head(ray)
    actors = [new_actor() for _ in range(number)]
    try:
        described = [actor.describe.remote(backend) for actor in actors]
        seconds = READY_SECONDS if number <= free else SCALE_SECONDS
        ready = _awaited(ray, head, described, seconds)
        cards = [
            RayCard(actor=actor, there=ray.get(reference))
            for actor, reference in zip(actors, described, strict=True)
            if reference in ready
        ]
        kinds = [kind[:wanted] for kind in choose(cards)] if cards else []
        chosen = [card for kind in kinds for card in kind]
        if len(chosen) < (wanted or 1):
            raise HardwareError(
                f"The Ray cluster gave {len(chosen)} of {counted(wanted or 1, 'card')}",
                why=f"It has {there_are} {what}, {free} of them free",
                remedy="Lower --cards, or wait until others are done",
            )
    except BaseException as error:
        end(ray, head, actors)
        if isinstance(error, ray.exceptions.RayError):
            raise failed(error) from error
        raise
    kept = {id(card.actor) for card in chosen}
    end(ray, head, [actor for actor in actors if id(actor) not in kept])
    nodes = {card.there.node for card in chosen}
    note(f"{counted(len(chosen), 'card')} on {counted(len(nodes), 'machine')} of the Ray cluster.")
    return [
        RayCards(
            ray=ray,
            backend=backend,
            new_actor=new_actor,
            cards=kind,
            alike=kind[0].there,
            note=note,
            head=head,
        )
        for kind in kinds
    ]


def _accelerator_type(ray: Any, name: str) -> str:
    """Ray's type of the card of that name, of those that its machines have; empty where none is alike.

    A type is of several cards: A100 is the 40 GB one's, too.
    """
    types = [
        resource.removeprefix(_TYPE)
        for resource in ray.cluster_resources()
        if resource.startswith(_TYPE)
    ]
    words = f"-{name.replace(' ', '-')}-"
    alike = [each for each in types if f"-{each.removeprefix('GeForce-')}-" in words]
    return max(alike, key=len, default="")


def _awaited(ray: Any, head: Head, references: list[Any], seconds: float) -> list[Any]:
    """Return the references that are answered within the time. Raises HardwareError where Ray is gone."""
    until = time.monotonic() + seconds
    while True:
        left = until - time.monotonic()
        ready: list[Any]
        ready, _ = ray.wait(
            references, num_returns=len(references), timeout=max(min(left, KNOCK_SECONDS), 0.0)
        )
        if len(ready) == len(references) or left <= KNOCK_SECONDS:
            return ready
        head.check()


def _of_one_kind(cards: list[RayCard], name: str | None, backend: str) -> list[list[RayCard]]:
    """The cards of that kind, or of the only kind."""
    for card in cards:
        _check_works(card)
    kinds = Counter(card.there.kind for card in cards)
    if name is None and len(kinds) > 1:
        listed = ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))
        alone = f"Give the resource {CPU_RESOURCE} to machines of one kind"
        raise ConfigError(
            "The Ray cluster has cards of several kinds",
            why=listed,
            remedy="Name one with --gpu" if backend == "cuda" else alone,
        )
    wanted = name or next(iter(kinds))
    if wanted not in kinds:
        raise HardwareError(
            f"The Ray cluster has no {wanted}",
            why=f"It has {', '.join(sorted(kinds))}",
            remedy="Name another with --gpu",
        )
    chosen = [card for card in cards if card.there.kind == wanted]
    for card in chosen:
        _check_versions(card)
    return [chosen]


def _by_kind(cards: list[RayCard], note: Callable[[str], None]) -> list[list[RayCard]]:
    """The cards that can be used, those of each kind together. Raises HardwareError where none can."""
    kinds: dict[str, list[RayCard]] = {}
    problems: dict[str, HardwareError] = {}
    for card in cards:
        try:
            _check_works(card)
            _check_versions(card)
        except HardwareError as error:
            problems[str(error)] = error
        else:
            kinds.setdefault(card.there.kind, []).append(card)
    if not kinds:
        raise next(iter(problems.values()))
    for problem in problems:
        note(f"left out: {problem}")
    return list(kinds.values())


def _check_works(card: RayCard) -> None:
    if card.there.why_no_card:
        raise HardwareError(
            f"A GPU of {card.there.node} cannot be used", why=card.there.why_no_card
        )


def _check_versions(card: RayCard) -> None:
    """Raise HardwareError where a machine has other libraries than predictions are made with here."""
    here = {name: _public(version) for name, version in installed.versions()}
    others = [
        f"{name} {version} there, {here[name]} here"
        for name, version in card.there.versions
        if name in here and _public(version) != here[name]
    ]
    if others:
        raise HardwareError(
            f"{card.there.node} has other versions than this machine",
            why="; ".join(others),
            remedy="Install the same versions, or run this on the cluster: ray job submit",
        )


def _public(version: str) -> str:
    """A version without the build's part: 2.13.0 of 2.13.0+cu130."""
    return version.partition("+")[0]
