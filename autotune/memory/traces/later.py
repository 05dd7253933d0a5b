"""A trace that is put together once something is asked of it: of a search's traces few are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune.memory.traces.trace import Trace


class LaterTrace(Trace):
    """The trace of an answer that is known to add up, read when it is needed."""

    def __init__(
        self, read: Callable[[], dict[str, Any]], identity: str, *, adds_up: bool = False
    ) -> None:
        """`read`: gives the worker's answer. `identity`: as Trace.identity. `adds_up`: as for a Trace."""
        self._read = read
        self._adds_up = adds_up
        self.identity = identity

    def __getattr__(self, name: str) -> Any:
        """Put the trace together, as its first attribute is asked for."""
        read = self.__dict__.pop("_read", None)
        if read is None:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        try:
            super().__init__(read(), adds_up=self._adds_up)
        except BaseException:
            self._read = read  # Whoever asks again hears the same.
            raise
        return getattr(self, name)


def with_lean_layers_later(of_any: Trace, count: int) -> Trace:
    """Return Trace.with_lean_layers of a number that is one of Trace.lean_layers."""
    if not of_any.identity:
        return of_any.with_lean_layers(count)
    return LaterTrace(lambda: of_any.lean_answer(count), f"{of_any.identity} {count} lean")
