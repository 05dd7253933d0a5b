"""Ray without a cluster: calls to actors are made here and at once, and may fail as Ray's do."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class RayError(Exception):
    pass


class RayActorError(RayError):
    pass


class GetTimeoutError(RayError):
    pass


class AuthenticationError(Exception):
    pass


class Call:
    """Stands for the reference of a call. `silent`: it is never answered."""

    numbers = itertools.count()

    def __init__(self, made: Callable[[], Any], *, silent: bool = False) -> None:
        self.number = next(self.numbers)
        self.is_silent, self.value, self.error = silent, None, None
        if silent:
            return
        try:
            self.value = made()
        except Exception as error:
            self.error = error


class Handle:
    """Stands for an actor's handle. `fails`: what its calls raise; `silent`: they are never answered."""

    def __init__(self, actor: Any) -> None:
        self.actor, self.fails, self.silent = actor, None, False
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Call:
            self.calls.append(name)

            def made() -> Any:
                if self.fails is not None:
                    raise self.fails
                return getattr(self.actor, name)(*arguments)

            return Call(made, silent=self.silent)

        return SimpleNamespace(remote=remote)


class RayStandIn(ModuleType):
    """The part of Ray that a fleet asks for; what a cluster has is set by a test."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = SimpleNamespace(
            RayError=RayError,
            RayActorError=RayActorError,
            GetTimeoutError=GetTimeoutError,
            AuthenticationError=AuthenticationError,
        )
        self.machines: list[dict[str, Any]] = []
        self.free: dict[str, float] = {}
        self.killed: list[Any] = []
        self.made: list[Handle] = []
        self.options: list[dict[str, Any]] = []
        self.inits: list[dict[str, Any]] = []
        self.refuses: Exception | None = None
        """What `init` raises."""
        self.is_there = False
        self.waits: list[float | None] = []

    def is_initialized(self) -> bool:
        return self.is_there

    def init(self, **options: Any) -> None:
        self.inits.append(options)
        if self.refuses is not None:
            raise self.refuses
        self.is_there = True

    def shutdown(self) -> None:
        self.is_there = False

    def nodes(self) -> list[dict[str, Any]]:
        return self.machines

    def cluster_resources(self) -> dict[str, float]:
        return {name: 1.0 for node in self.machines for name in node["Resources"]}

    def available_resources(self) -> dict[str, float]:
        return self.free

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address="head:6379")

    def remote(self, what: Any = None, **options: Any) -> Any:
        """A class becomes one of actors, a function one whose calls are made here."""
        if what is None:
            return lambda function: self.remote(function)

        def with_options(**options: Any) -> Any:
            self.options.append(options)
            return SimpleNamespace(remote=remote)

        def remote(*arguments: Any) -> Any:
            if not isinstance(what, type):
                return Call(lambda: what(*arguments))
            self.made.append(Handle(what(*arguments)))
            return self.made[-1]

        return SimpleNamespace(options=with_options, remote=remote)

    def get(self, reference: Any, timeout: float | None = None) -> Any:
        if isinstance(reference, list):
            return [self.get(each, timeout) for each in reference]
        if reference.error is not None:
            raise reference.error
        if reference.is_silent:
            raise GetTimeoutError(f"Nothing came within {timeout} s")
        return reference.value

    def wait(
        self, references: list[Any], *, num_returns: int, timeout: float | None
    ) -> tuple[list[Any], list[Any]]:
        self.waits.append(timeout)
        answered = [each for each in references if not each.is_silent]
        ready = sorted(answered, key=lambda each: each.number)[:num_returns]
        return ready, [each for each in references if each not in ready]

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


def installed(monkeypatch: pytest.MonkeyPatch) -> RayStandIn:
    """Install the stand-in as `ray`."""
    made = RayStandIn()
    scheduling: Any = ModuleType("ray.util.scheduling_strategies")
    scheduling.NodeAffinitySchedulingStrategy = lambda node, soft: (node, soft)
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.setitem(sys.modules, "ray.exceptions", made.exceptions)
    monkeypatch.setitem(sys.modules, "ray.util", ModuleType("ray.util"))
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", scheduling)
    return made
